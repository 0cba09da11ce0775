"""What is known of an op before it runs: its tensors, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.described import Laid, described, laid, made_again
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
    tensors: list[Tensor] = []
    mapped(lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return tensors


def foreseen_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The outputs on the meta device; None if values, or other kinds of output, are needed to know them.

    An answer is kept, so nothing may be written to the tensors in it.
    """
    asked = func, torch.get_default_dtype(), described(args), described(dict(kwargs))
    try:
        return _kept(*asked)
    except TypeError:  # an argument cannot be hashed
        return _foreseen(*asked)


def _foreseen(func: Any, default: torch.dtype, positional: Any, named: Any) -> Any:
    """``foreseen_by``, of arguments that are described; ``default`` is torch's own, which the outputs may follow."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return None
    if not all("Tensor" in str(result.type) for result in schema_of(func).returns):
        return None
    was: list[tuple[Tensor, Laid]] = []

    def on_meta(of: Laid) -> Tensor:
        was.append((of.on_meta(), of))
        return was[-1][0]

    args, kwargs = made_again(positional, on_meta), made_again(named, on_meta)
    if any(argument.name == "device" for argument in schema_of(func).arguments):
        kwargs |= {"device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
    try:
        outputs = func(*args, **kwargs)
    except Exception:  # no meta kernel, or the call is wrong: the run with values will tell
        return None
    if any(laid(meta) != of for meta, of in was):
        return None  # it resizes an argument
    plain = all(tensor.is_meta and tensor.layout == torch.strided for tensor in tensors_in(outputs))
    return outputs if plain else None


_kept = lru_cache(maxsize=4096)(_foreseen)
