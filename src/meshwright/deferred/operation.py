"""What is known of an op before it runs: its tensors, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

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


class _Laid(NamedTuple):
    """All that counts of a tensor for what an op gives on the meta device."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def foreseen_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The outputs on the meta device; None if values, or other kinds of output, are needed to know them.

    Many meta kernels are Python, and the blocks of a model ask the same again and again: an answer is kept, so nothing may be
    written to the tensors in it.
    """
    asked = func, torch.get_default_dtype(), _described(args), _described(dict(kwargs))
    try:
        return _kept(*asked)
    except TypeError:  # an argument cannot be hashed
        return _foreseen(*asked)


def _described(x: Any) -> Any:
    """An argument as something that can be compared; with its type, as ``1 == 1.0 == True``."""
    if isinstance(x, Tensor):
        return _Laid(tuple(x.size()), x.stride(), x.dtype)
    if isinstance(x, dict):
        return dict, tuple((key, _described(value)) for key, value in x.items())
    if type(x) in (list, tuple):
        return type(x), tuple(map(_described, x))
    return type(x), None if isinstance(x, torch.Generator) else x


def _foreseen(func: Any, default: torch.dtype, described: Any, named: Any) -> Any:
    """``foreseen_by``, of arguments that are described; ``default`` is torch's own, which the outputs may follow."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return None
    if not all("Tensor" in str(result.type) for result in schema_of(func).returns):
        return None
    was: list[tuple[Tensor, _Laid]] = []

    def on_meta(x: Any) -> Any:
        if isinstance(x, _Laid):
            meta = torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="meta")
            was.append((meta, x))
            return meta
        kind, value = x
        if kind is dict:
            return {key: on_meta(inner) for key, inner in value}
        return kind(map(on_meta, value)) if kind in (list, tuple) else value

    args, kwargs = on_meta(described), on_meta(named)
    if any(argument.name == "device" for argument in schema_of(func).arguments):
        kwargs |= {"device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
    try:
        outputs = func(*args, **kwargs)
    except Exception:  # no meta kernel, or the call is wrong: the run with values will tell
        return None
    if any(meta.size() != laid.size or meta.stride() != laid.stride for meta, laid in was):
        return None  # it resizes an argument
    plain = all(tensor.is_meta and tensor.layout == torch.strided for tensor in tensors_in(outputs))
    return outputs if plain else None


_kept = lru_cache(maxsize=4096)(_foreseen)
