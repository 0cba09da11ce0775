"""``Shapes``: remembers what torch infers of a function's result, as a rehearsal calls the same functions thousands of times.

function, descriptions of its arguments ──► descriptions of its results
                                            new memory, a view of the first argument, or the argument that was written

``FakeTensorMode`` remembers results too. But its key describes all that a tensor may be (sparse, symbolic, quantized), and
takes longer than the inference of most functions. Here tensors are dense and sizes are numbers; all others are left to torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwright.described import tensors_among
from meshwright.private import FakeTensor, FakeTensorMode, new_fake_tensor, schema_of, storage_of

_NUMBERS_AND_TEXT = frozenset(
    [int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format]
)
_REAL = (Tensor, nn.Parameter)
_NAMESPACES = ("aten", "fsdp")  # whose functions do to shapes what their schemas say
_Key: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class _Result:
    """A result. ``offset``: in the memory of the first argument, if it is a view of it; None: its memory is new."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int | None


class Shapes:
    """The results of functions, inferred once for equal arguments."""

    def __init__(self) -> None:
        self._known: dict[_Key, Any] = {}

    def run(self, fake: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, some of whose tensors have no values.

        Args:
            fake: infers results that are not known. It is on, and no mode within it.
        """
        written = _written_by(func)
        key = None if written is _UNKNOWN else _key_of(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        known = self._known.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            return self._inferred(func, args, kwargs, key, written)
        return _result(fake, known, args) if written is None else _argument(written, args, kwargs)

    def _inferred(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: _Key, written: Any) -> Any:
        """The result of a function, which is remembered if it can be described, and if no argument was resized."""
        inputs = {storage_of(t) for t in tensors_among((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        if written is None:
            known = _facts(out, args[0] if args else None, inputs)
        else:
            known = None if out is _argument(written, args, kwargs) else _UNKNOWN
        if known is not _UNKNOWN and _key_of(func, args, kwargs) == key:
            self._known[key] = known
        return out


_UNKNOWN: Any = object()


@lru_cache(maxsize=4096)
def _written_by(func: Any) -> int | str | None:
    """The position, or the name, of the argument that a function writes and returns; None if it returns none of them.
    ``_UNKNOWN`` if it returns several, or changes shapes in place."""
    schema = schema_of(func)
    if func.namespace not in _NAMESPACES or torch.Tag.inplace_view in func.tags:
        return _UNKNOWN
    written = [
        result.alias_info.before_set for result in schema.returns if result.alias_info and result.alias_info.is_write
    ]
    if not written:
        return None
    for position, argument in enumerate(schema.arguments):
        if (
            len(schema.returns) == 1
            and argument.alias_info is not None
            and argument.alias_info.before_set == written[0]
        ):
            return str(argument.name) if argument.kwarg_only else position
    return _UNKNOWN


def _argument(at: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs[at] if isinstance(at, str) else args[at]


def _key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key | None:
    """What the shapes of a function's results follow from; None if an argument is not a dense tensor, a number or text."""
    key: list[Any] = [func, torch.get_default_dtype(), *kwargs]
    return tuple(key) if _described(args, key) and _described(kwargs.values(), key) else None


def _described(values: Iterable[Any], key: list[Any]) -> bool:
    """Adds descriptions of arguments to a key. False if one is not a dense tensor, a number or text."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind in _REAL:
            if not _is_plain(value, kind):
                return False
            key += (kind, value.dtype, value.shape, value.stride(), value.storage_offset())
        elif kind in _NUMBERS_AND_TEXT:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _described(value, key):
                return False
        else:
            return False
    return True


def _is_plain(t: Any, kind: type) -> bool:
    """Whether a tensor is dense, real, on the CPU, and not one of which ``FakeTensorMode`` knows the value."""
    if t.layout is not torch.strided or t.dtype.is_complex:
        return False
    if kind is FakeTensor:
        return t.constant is None and t.fake_device.type == "cpu"
    return bool(t.device.type == "cpu")


def _facts(out: Any, first: Any, inputs: set[int]) -> Any:
    """The facts of a function's results, in their structure; ``_UNKNOWN`` if they are not what ``_Result`` can say.

    Args:
        first: the first argument.
        inputs: the memory of the arguments.
    """
    if out is None:
        return None
    if type(out) in (list, tuple):
        each = [_facts(one, first, inputs) for one in out]
        return _UNKNOWN if _UNKNOWN in each else type(out)(each)
    if type(out) is not FakeTensor or not _is_plain(out, FakeTensor) or out.requires_grad or out is first:
        return _UNKNOWN
    memory = storage_of(out)
    if type(first) is FakeTensor and memory == storage_of(first):
        return _Result(out.shape, out.stride(), out.dtype, int(out.storage_offset()))
    if memory in inputs or out.storage_offset() or out.untyped_storage().nbytes() != _extent(out):
        return _UNKNOWN
    inputs.add(memory)  # two results with the same memory are not new
    return _Result(out.shape, out.stride(), out.dtype, None)


def _result(fake: FakeTensorMode, known: Any, args: tuple[Any, ...]) -> Any:
    """The results that these facts describe."""
    if known is None:
        return None
    if type(known) is not _Result:
        return type(known)(_result(fake, one, args) for one in known)
    memory = None if known.offset is None else args[0].untyped_storage()
    return new_fake_tensor(fake, known.size, known.stride, known.dtype, memory, known.offset or 0)


def _extent(t: Tensor) -> int:
    """Bytes from the first element of a tensor to its last one."""
    if not t.numel():
        return 0
    return t.element_size() * (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)))
