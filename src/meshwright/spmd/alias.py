"""What a value aliases, as on one device.

On one device a tensor is a shape, strides and an offset into a storage, and torch decides by the strides whether
``contiguous``, ``reshape``, ``flatten`` or ``to`` give a view or a copy. A rank holds a local tensor of another shape and
other strides, whose answer may differ: ``(2, 1, 5, 8).transpose(1, 2)`` is contiguous, ``(2, 4, 5, 8).transpose(1, 2)``
is not. A later write in place then reaches a tensor that it does not reach on one device, or misses one that it does.

So a cut ``GlobalTensor`` carries its strides and its offset on one device, and three rules hold:

1.  *Torch decides.* What a function's result aliases, and with which strides, is asked of the function itself: it runs on
    meta tensors that lie as the global ones do (``placed``), once for each function, shapes, strides and constants. Only
    functions that can alias are asked (``torch_functions.aliases``). A function that computes gives fresh memory. If its
    operands are contiguous, so is its result; else an elementwise function is asked on meta as well, and any other gives
    its dims the order that it gives the local.
2.  *A local lies as its global.* When memory is fresh, the local is dense, with its dims in the global's order
    (``order``); one that is not is copied. From then on both go through the same functions, so that a view that torch
    makes of the global can be made of the local, too: a cut takes whole dims out of a dense box.
3.  *Copies are made apart, views written through.* If one device copies and the local result shares memory, the local is
    cloned. If one device aliases and no local can (a slice across the cut), the value is gathered, and the result keeps
    its base and how it is selected from it: a write to it is written to the base, and a write to the base is seen in it.

``stride``, ``is_contiguous`` and ``storage_offset``, asked of a global tensor, are those of one device. global tensors
of one storage share a ``Memory``, which counts writes that torch's own version does not count (those to ``.data``).
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
    """A storage as on one device, shared by the global tensors of it. ``written``: how often one of them has been written."""

    written = 0


class Like(NamedTuple):
    """A tensor as its memory lies on one device. ``strides``: None if it is contiguous."""

    shape: tuple[int, ...]
    strides: Strides | None
    offset: int
    dtype: torch.dtype


class Placed(NamedTuple):
    """Where a result lies.

    ``source``: the number of the argument whose storage it shares; None if its memory is its own. ``itself``: whether it is
    that argument. ``laid``: the strides as a global tensor notes them, None if contiguous.
    """

    shape: tuple[int, ...]
    strides: Strides
    offset: int
    source: int | None
    itself: bool
    laid: Strides | None


@functools.lru_cache(maxsize=8192)
def contiguous(shape: tuple[int, ...]) -> Strides:
    """The strides of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


@functools.lru_cache(maxsize=8192)
def order(shape: tuple[int, ...], strides: Strides) -> tuple[int, ...] | None:
    """The dims of a dense tensor, outermost first; None if it is not dense (it has gaps, or overlaps itself)."""
    left, dims, step = list(range(len(shape))), [], 1
    while left:
        fits = [d for d in left if strides[d] == step]
        # A dim of size 1 says by its stride where it stands, if the kernel that allocated it meant to.
        best = max(fits, key=lambda d: (shape[d] <= 1, d), default=None)
        if best is None:
            best = next((d for d in reversed(left) if shape[d] <= 1), None)
        if best is None:
            return None
        left.remove(best)
        dims.append(best)
        step *= max(shape[best], 1)
    return tuple(reversed(dims))


@functools.lru_cache(maxsize=8192)
def dense(shape: tuple[int, ...], dims: tuple[int, ...]) -> Strides:
    """The strides of a dense tensor whose dims stand in memory in the order ``dims``, outermost first."""
    strides, step = [0] * len(shape), 1
    for d in reversed(dims):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor reaches over, from its first element to its last."""
    return 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, strides, strict=True))


def alike(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two strides mean the same for tensors of a shape: of dims of size 1 and of no elements they say nothing."""
    return 0 in shape or all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))


def noted(shape: tuple[int, ...], strides: Strides) -> Strides | None:
    """Strides as a global tensor notes them: None if the tensor is contiguous."""
    return None if alike(shape, strides, contiguous(shape)) else strides


def laid(value: Tensor, strides: Strides) -> Tensor:
    """The values of a tensor in fresh memory with the given strides, which may have gaps and repeat; differentiable."""
    shape = tuple(value.shape)
    for d, (n, step) in enumerate(zip(shape, strides, strict=True)):
        if n > 1 and step == 0:
            value = value.narrow(d, 0, 1)
    dims = order(tuple(value.shape), strides)
    if dims is not None:
        inverse = sorted(range(len(dims)), key=dims.__getitem__)
        made = value.permute(dims).clone(memory_format=torch.contiguous_format).permute(inverse)
    else:
        made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        made = made.copy_(value)
    return made.expand(shape) if made.shape != value.shape or tuple(made.shape) != shape else made


def overwrite(t: Tensor, value: Tensor) -> None:
    """``t.copy_(value)``, also of a tensor that is expanded, if the value is: torch does not write one place in memory twice.

    On a rank that holds no elements as well: what is computed for the value has the same graph on every rank.
    """
    for d, step in enumerate(t.stride()):
        if step == 0 and t.shape[d] > 1:
            t, value = t.narrow(d, 0, 1), value.narrow(d, 0, 1)
    t.copy_(value)


def share(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are of one storage."""
    return storage_of(a) == storage_of(b)


# --- asking torch -----------------------------------------------------------------------------------------------------


def asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any], like: Callable[[Tensor], Like]) -> Any:
    """Where the results of a call lie on one device (``Placed`` for each), or None if meta tensors cannot say.

    ``like``: how a tensor among the arguments lies.
    """
    try:
        named = tuple([(k, _frozen(v, like)) for k, v in kwargs.items()]) if kwargs else ()
        return placed(func, tuple([a if type(a) is int else _frozen(a, like) for a in args]), named)
    except TypeError:  # an argument that cannot be hashed
        return None


@functools.lru_cache(maxsize=8192)
def placed(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[Placed, ...] | None:
    """See ``asked``: of arguments that can be hashed."""
    with without_any_mode(), torch.no_grad():
        arguments = _thawed(args)
        try:
            out = func(*arguments, **{k: _thawed(v) for k, v in kwargs})
        except Exception:  # a kernel that meta has not, or that needs values
            return None
        memory = {storage_of(t): i for i, t in enumerate(arguments) if isinstance(t, Tensor)}
        return tuple(
            Placed(
                tuple(t.shape),
                t.stride(),
                int(t.storage_offset()),
                memory.get(storage_of(t)),
                any(t is x for x in arguments),
                noted(tuple(t.shape), t.stride()),
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
    """True is equal to 1, which as an index means something else."""

    value: bool


_AS_IT_IS = frozenset([int, type(None), type(...), str, torch.dtype, torch.memory_format])
_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8])


def _frozen(value: Any, like: Callable[[Tensor], Like]) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is torch.Size:
        return tuple([_frozen(v, like) for v in value])
    if kind is list:
        return _List(tuple([_frozen(v, like) for v in value]))
    if kind is slice:
        return _Slice(*(_frozen(v, like) for v in (value.start, value.stop, value.step)))
    if kind is bool:
        return _Bool(value)
    if isinstance(value, Tensor):
        # A number as an index selects, like any other; which one, only the offset knows.
        return like(value) if value.dim() or value.dtype not in _INTEGERS else 0
    return value


def _thawed(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple([_thawed(v) for v in value])
    if kind is Like:
        return _on_meta(value)
    if kind is _List:
        return [_thawed(v) for v in value.items]
    if kind is _Slice:
        return slice(*map(_thawed, value))
    return value.value if kind is _Bool else value


def _on_meta(like: Like) -> Tensor:
    strides = like.strides if like.strides is not None else contiguous(like.shape)
    base = torch.empty(like.offset + reach(like.shape, strides), dtype=like.dtype, device="meta")
    return base.as_strided(like.shape, strides, like.offset)
