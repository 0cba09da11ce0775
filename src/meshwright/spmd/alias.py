"""Aliasing as on one device: which results share memory, and with which strides.

On one device a tensor is a shape, strides and an offset into a storage. By the strides torch decides whether ``contiguous``,
``reshape``, ``flatten`` or ``to`` give a view or a copy. A local tensor has another shape and other strides, so torch may
decide otherwise: ``(2, 1, 5, 8).transpose(1, 2)`` is contiguous, ``(2, 4, 5, 8).transpose(1, 2)`` is not. A later write in
place would then reach a tensor that it does not reach on one device, or miss one that it reaches there.

So a sharded ``GlobalTensor`` carries the strides and the offset that it has on one device, and three rules hold:

1.  *Torch decides.* To learn what the result of a function aliases, and with which strides, the function itself runs on meta
    tensors with the global geometry (``result_geometries``), once for each function, shapes, strides and constants. Only
    functions that can alias are asked (``torch_functions.aliases``). A function that computes gives new memory. If its
    operands are contiguous, so is its result. Else an elementwise function is asked on meta as well; the result of any other
    function has its dims in the order of the local result.
2.  *A local tensor has the dim order of its global tensor.* In new memory the local tensor is dense, with its dims in the
    global order (``dim_order``); a local tensor that is not is copied. From then on both pass through the same functions. So
    if torch can make a view of the global tensor, it can make one of the local tensor: a shard takes whole dims out of a
    dense box.
3.  *A copy shares no memory; a write to a view reaches its base.* If one device copies and the local result shares memory,
    the local result is cloned. If one device aliases and no local tensor can (a slice of several shards), the value is
    gathered, and the result remembers its base and how it is selected from it: a write to it is written to the base, and it
    shows a write to the base.

``stride``, ``is_contiguous`` and ``storage_offset`` of a global tensor are those of one device. Global tensors of one storage
share a ``Memory``, which counts the writes that torch's own version counter does not count (those to ``.data``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.private import pytree, storage_of, without_any_mode

Strides = tuple[int, ...]


class Memory:
    """A storage as on one device, shared by its global tensors. ``written``: how often one of them has been written."""

    written = 0


class Geometry(NamedTuple):
    """How a tensor lies in memory on one device. ``strides``: None if it is contiguous; ``offset``: into its storage."""

    shape: tuple[int, ...]
    strides: Strides | None
    offset: int
    dtype: torch.dtype


class ResultGeometry(NamedTuple):
    """How the result of a call lies in memory on one device.

    ``source``: the number of the argument whose storage it shares; None if its memory is new. ``itself``: whether it is that
    argument. ``noted_strides``: the strides as a global tensor notes them, None if contiguous.
    """

    shape: tuple[int, ...]
    strides: Strides
    offset: int
    source: int | None
    itself: bool
    noted_strides: Strides | None


@functools.lru_cache(maxsize=8192)
def contiguous(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


@functools.lru_cache(maxsize=8192)
def dim_order(shape: tuple[int, ...], strides: Strides) -> tuple[int, ...] | None:
    """The dims of a dense tensor, outermost first; None if it is not dense (it has gaps, or overlaps itself)."""
    remaining, dims, step = list(range(len(shape))), [], 1
    while remaining:
        fits = [d for d in remaining if strides[d] == step]
        # The stride of a dim of size 1 may say where it stands, if the kernel that allocated the tensor set it so.
        best = max(fits, key=lambda d: (shape[d] <= 1, d), default=None)
        if best is None:
            best = next((d for d in reversed(remaining) if shape[d] <= 1), None)
        if best is None:
            return None
        remaining.remove(best)
        dims.append(best)
        step *= max(shape[best], 1)
    return tuple(reversed(dims))


@functools.lru_cache(maxsize=8192)
def dense(shape: tuple[int, ...], dims: tuple[int, ...]) -> Strides:
    """The strides of a dense tensor whose dims are in memory in the order ``dims``, outermost first."""
    strides, step = [0] * len(shape), 1
    for d in reversed(dims):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements of memory from the first element of a tensor to its last."""
    return 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, strides, strict=True))


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two strides mean the same for tensors of a shape: for a dim of size 1, or no elements, strides do not count."""
    return 0 in shape or all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))


def noted_strides(shape: tuple[int, ...], strides: Strides) -> Strides | None:
    """Strides as a global tensor notes them: None if the tensor is contiguous."""
    return None if same_strides(shape, strides, contiguous(shape)) else strides


def with_strides(value: Tensor, strides: Strides) -> Tensor:
    """A copy of a tensor in new memory with these strides, which may have gaps and zeros; differentiable."""
    shape = tuple(value.shape)
    for d, (n, step) in enumerate(zip(shape, strides, strict=True)):
        if n > 1 and step == 0:
            value = value.narrow(d, 0, 1)
    dims = dim_order(tuple(value.shape), strides)
    if dims is not None:
        inverse = sorted(range(len(dims)), key=dims.__getitem__)
        copy = value.permute(dims).clone(memory_format=torch.contiguous_format).permute(inverse)
    else:
        copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        copy = copy.copy_(value)
    return copy.expand(shape) if copy.shape != value.shape or tuple(copy.shape) != shape else copy


def laid_out(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor with the strides that it has on one device; a copy, if it has others.

    Strides decide which functions return views, and in which order a sum is added.

    If elements overlap in memory, other than by ``expand``, no copy has these strides. Then the tensor is returned as it is.
    """
    if not stride or t.stride() == stride:
        return t
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, t.shape, strict=True) if size > 1 and step):
        if step <= reach:
            return t
        reach += step * (size - 1)
    return with_strides(t, stride)


def overwrite(t: Tensor, value: Tensor) -> None:
    """``t.copy_(value)``, also if both are expanded: torch refuses to write one address twice.

    It also copies if the local tensor has no elements, so that every rank has the same graph.
    """
    for d, step in enumerate(t.stride()):
        if step == 0 and t.shape[d] > 1:
            t, value = t.narrow(d, 0, 1), value.narrow(d, 0, 1)
    t.copy_(value)


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors have one storage."""
    return storage_of(a) == storage_of(b)


# --- asking torch -----------------------------------------------------------------------------------------------------


def result_geometries(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], geometry_of: Callable[[Tensor], Geometry]
) -> Any:
    """How each result of a call lies in memory on one device; None if meta tensors cannot say.

    ``geometry_of``: a tensor among the arguments → its geometry on one device.
    """
    try:
        named = tuple([(k, _frozen(v, geometry_of)) for k, v in kwargs.items()]) if kwargs else ()
        return cached_geometries(func, tuple([a if type(a) is int else _frozen(a, geometry_of) for a in args]), named)
    except TypeError:  # an argument that cannot be hashed
        return None


@functools.lru_cache(maxsize=8192)
def cached_geometries(
    func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[ResultGeometry, ...] | None:
    """``result_geometries`` for arguments that can be hashed, in which a Geometry stands for a tensor."""
    with without_any_mode(), torch.no_grad():
        arguments = _thawed(args)
        try:
            out = func(*arguments, **{k: _thawed(v) for k, v in kwargs})
        except Exception:  # meta has no kernel, or the kernel needs values
            return None
        memory = {storage_of(t): i for i, t in enumerate(arguments) if isinstance(t, Tensor)}
        return tuple(
            ResultGeometry(
                tuple(t.shape),
                t.stride(),
                int(t.storage_offset()),
                memory.get(storage_of(t)),
                any(t is x for x in arguments),
                noted_strides(tuple(t.shape), t.stride()),
            )
            for t in pytree.tree_leaves(out)
            if isinstance(t, Tensor)
        )


class _Slice(NamedTuple):
    start: Any
    stop: Any
    step: Any


class _List(NamedTuple):
    items: tuple[Any, ...]


class _Bool(NamedTuple):
    """A bool, which would be equal to 0 or 1: as an index these mean something else."""

    value: bool


_AS_IT_IS = frozenset([int, type(None), type(...), str, torch.dtype, torch.memory_format])
_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8])


def _frozen(value: Any, geometry_of: Callable[[Tensor], Geometry]) -> Any:
    """An argument as a value that can be hashed."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is torch.Size:
        return tuple([_frozen(v, geometry_of) for v in value])
    if kind is list:
        return _List(tuple([_frozen(v, geometry_of) for v in value]))
    if kind is slice:
        return _Slice(*(_frozen(v, geometry_of) for v in (value.start, value.stop, value.step)))
    if kind is bool:
        return _Bool(value)
    if isinstance(value, Tensor):
        # A tensor of one integer selects by index. Which index it is changes only the offset.
        return geometry_of(value) if value.dim() or value.dtype not in _INTEGERS else 0
    return value


def _thawed(value: Any) -> Any:
    """The argument for a value of ``_frozen``, with meta tensors."""
    kind = type(value)
    if kind is tuple:
        return tuple([_thawed(v) for v in value])
    if kind is Geometry:
        return _on_meta(value)
    if kind is _List:
        return [_thawed(v) for v in value.items]
    if kind is _Slice:
        return slice(*map(_thawed, value))
    return value.value if kind is _Bool else value


def _on_meta(geometry: Geometry) -> Tensor:
    """A meta tensor with this geometry."""
    strides = geometry.strides if geometry.strides is not None else contiguous(geometry.shape)
    base = torch.empty(geometry.offset + span(geometry.shape, strides), dtype=geometry.dtype, device="meta")
    return base.as_strided(geometry.shape, strides, geometry.offset)
