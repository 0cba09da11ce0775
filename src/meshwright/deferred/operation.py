"""What is known of an op before it runs: its tensors, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.private import schema_of

Changed = list[tuple[Any, Any]]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` of each leaf; op arguments nest in lists, tuples and dicts only."""
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([mapped(function, value) for value in tree])
    return function(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found


def foreseen_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The outputs on the meta device; None if values, or other kinds of output, are needed to know them."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return None
    if not all("Tensor" in str(result.type) for result in schema_of(func).returns):
        return None
    was = []

    def on_meta(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None if isinstance(leaf, torch.Generator) else leaf
        meta = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
        was.append((meta, leaf))
        return meta

    meta_args, meta_kwargs = mapped(on_meta, (args, dict(kwargs)))
    if any(argument.name == "device" for argument in schema_of(func).arguments):
        meta_kwargs |= {"device": torch.device("meta")}
        meta_kwargs.pop("pin_memory", None)
    try:
        outputs = func(*meta_args, **meta_kwargs)
    except Exception:  # no meta kernel, or the call is wrong: the run with values will tell
        return None
    if any(meta.size() != leaf.size() or meta.stride() != leaf.stride() for meta, leaf in was):
        return None  # it resizes an argument
    plain = all(tensor.is_meta and tensor.layout == torch.strided for tensor in tensors_in(outputs))
    return outputs if plain else None
