"""Facts of an op before it runs: the tensors among its arguments, and its outputs on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.described import TensorMeta, described, from_description, tensor_meta
from meshwright.private import schema_of

Changed = list[tuple[Any, Any]]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to each leaf. Arguments of ops nest only in lists, tuples and dicts."""
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([mapped(function, value) for value in tree])
    return function(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    mapped(lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return tensors


def outputs_on_meta(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The outputs of an op, as meta tensors; None if they depend on values, or are not all plain tensors, or if an argument
    is sparse.

    The result is cached, so its tensors may not be written.
    """
    if any(tensor.layout != torch.strided for tensor in tensors_in((args, kwargs))):
        return None  # a description has strides
    key = func, torch.get_default_dtype(), described(args), described(dict(kwargs))
    try:
        return _cached_outputs(*key)
    except TypeError:  # an argument cannot be hashed
        return _outputs(*key)


def _outputs(func: Any, default: torch.dtype, positional: Any, named: Any) -> Any:
    """``outputs_on_meta`` for described arguments. ``default``: torch's default dtype, on which outputs may depend."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return None
    if not all("Tensor" in str(result.type) for result in schema_of(func).returns):
        return None
    arguments: list[tuple[Tensor, TensorMeta]] = []

    def on_meta(description: TensorMeta) -> Tensor:
        arguments.append((description.on_meta(), description))
        return arguments[-1][0]

    args, kwargs = from_description(positional, on_meta), from_description(named, on_meta)
    if any(argument.name == "device" for argument in schema_of(func).arguments):
        kwargs |= {"device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
    try:
        outputs = func(*args, **kwargs)
    except Exception:  # no meta kernel, or a wrong call: the run with values will show which
        return None
    if any(tensor_meta(meta) != description for meta, description in arguments):
        return None  # the op resizes an argument
    plain = all(tensor.is_meta and tensor.layout == torch.strided for tensor in tensors_in(outputs))
    return outputs if plain else None


_cached_outputs = lru_cache(maxsize=4096)(_outputs)
