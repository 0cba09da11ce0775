"""Functions that move dims and compute nothing: they run on local tensors, and the layout follows the sharded dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, REPLICATE, Partial, Shard, regroup, reshape_group
from meshwright.spmd.alias import dim_order
from meshwright.spmd.decide.pointwise import of_each
from meshwright.spmd.decide.registry import DECIDERS, decider, named
from meshwright.spmd.decision import (
    GATHER,
    Answer,
    Blocks,
    Body,
    Decision,
    Gather,
    Units,
    is_sharded,
    use_as,
    use_local,
    use_original,
    use_replicated,
)
from meshwright.spmd.signature import Call, Operand, as_number, is_undecided, layout_of
from meshwright.spmd.tensor import GlobalTensor


def moved(x: Operand, dims: Sequence[int | None], run: Callable[..., Tensor], *args: Any) -> Answer:
    """The Decision to call ``run`` with the local tensor of ``x``. It permutes, adds or drops dims: dim i of the result is
    dim ``dims[i]`` of ``x``, or a new one (None)."""
    layout, use = x.layout, (use_local(x), *args)
    if isinstance(layout, Shard):
        if layout.dim not in dims:  # a sharded dim of size 1 is dropped: only one rank holds its element
            return GATHER
        return Decision(run, use, {}, layout.on(list(dims).index(layout.dim)))
    if isinstance(layout, Partial):
        return Decision(run, use, {}, PARTIAL)
    if is_undecided(x) and None not in dims:
        return Decision(run, use, {}, follows=(x.index, tuple(d for d in dims if d is not None)))
    return Decision(run, use, {})


@decider("transpose", "swapaxes", "swapdims")
def transpose(call: Call) -> Answer:
    x, *rest = call.args
    a, b = [*rest, *call.kwargs.values()]
    return _swapped(x, a, b)


def _swapped(x: Operand, a: int, b: int) -> Answer:
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return moved(x, dims, Tensor.transpose, a, b)


@decider("permute")
def permute(call: Call) -> Answer:
    x = call.args[0]
    return permuted(x, [d % x.dim() for d in _sizes(call.args[1:] or (call.kwargs["dims"],))])


def permuted(x: Operand, dims: list[int]) -> Answer:
    return moved(x, dims, Tensor.permute, tuple(dims))


@decider("movedim", "moveaxis")
def movedim(call: Call) -> Answer:
    x, n = call.args[0], call.args[0].dim()
    source, target = ([d % n for d in _sizes((v,))] for v in [*call.args[1:], *call.kwargs.values()])
    dims: list[int | None] = [None] * n
    for s, t in zip(source, target, strict=True):
        dims[t] = s
    rest = iter([d for d in range(n) if d not in source])
    return permuted(x, [next(rest) if d is None else d for d in dims])


@decider("t", "numpy_T")
def t(call: Call) -> Answer:
    x = call.args[0]
    return permuted(x, list(range(x.dim()))[::-1])


def _matrix_t(call: Call) -> Answer:
    return _swapped(call.args[0], -2, -1) if call.args[0].dim() > 1 else GATHER


@decider("adjoint")
def adjoint(call: Call) -> Answer:
    x = call.args[0]
    return Body(_conjugate_transpose, (use_original(x),), {}) if x.dim() > 1 else GATHER


def _conjugate_transpose(x: Tensor) -> Tensor:
    return x.transpose(-2, -1).conj()  # of real numbers, conj is the tensor itself


DECIDERS[Tensor.T.__get__] = t  # type: ignore[attr-defined]
DECIDERS[Tensor.mT.__get__] = _matrix_t  # type: ignore[attr-defined]
DECIDERS[Tensor.H.__get__] = adjoint  # type: ignore[attr-defined]
DECIDERS[Tensor.mH.__get__] = adjoint  # type: ignore[attr-defined]


@decider("unsqueeze")
def unsqueeze(call: Call) -> Answer:
    x, dim = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs["dim"]
    dim %= x.dim() + 1
    dims: list[int | None] = list(range(x.dim()))
    dims.insert(dim, None)
    return moved(x, dims, Tensor.unsqueeze, dim)


@decider("squeeze")
def squeeze(call: Call) -> Answer:
    x = call.args[0]
    named_dims = [*call.args[1:], *call.kwargs.values()]
    chosen = [d % x.dim() for d in _sizes((named_dims[0],))] if named_dims else list(range(x.dim()))
    gone = [d for d in chosen if x.shape[d] == 1]  # by the global shape: a dim whose local size is 1 stays
    if isinstance(x.layout, Shard) and x.layout.dim in gone:
        return GATHER  # one rank holds the full tensor
    return moved(x, [d for d in range(x.dim()) if d not in gone], Tensor.squeeze, tuple(gone))


@decider("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as", "ravel")
def reshape(call: Call) -> Answer:
    """Local if a dim of the result can express the same slices (``layout.regroup``)."""
    x, shape = call.args[0], _target_shape(call)
    if shape is None:
        return GATHER
    layout = x.layout
    if is_undecided(x) and (dims := _same_dims(x, shape)) is not None:
        return Decision(Tensor.reshape, (use_local(x), tuple(shape)), {}, follows=(x.index, dims))
    if not isinstance(layout, Shard):
        return moved(x, [None] * len(shape), Tensor.reshape, tuple(shape))
    regrouped = regroup(layout, tuple(x.shape), shape)
    if regrouped is None:
        return Gather(_finding(x, layout, shape))
    shape[regrouped.dim] = regrouped.local(call.rank)
    return Decision(Tensor.reshape, (use_local(x), tuple(shape)), {}, regrouped)


def _same_dims(x: Operand, shape: Sequence[int]) -> tuple[int, ...] | None:
    """For each dim of ``shape`` the dim of parameter ``x``, -1 for a new one, if a reshape only adds or drops dims of size 1;
    else None."""
    if [n for n in x.shape if n != 1] != [n for n in shape if n != 1]:
        return None
    dims = iter([d for d, n in enumerate(x.shape) if n != 1])
    return tuple(-1 if n == 1 else next(dims) for n in shape)


def _target_shape(call: Call) -> list[int] | None:
    """The global shape that a reshape asks for; None if it is a view in another dtype."""
    x, rest, name = call.args[0], [*call.args[1:], *call.kwargs.values()], call.name
    if name in ("view_as", "reshape_as"):
        return list(rest[0].shape)
    if name == "flatten" or name == "ravel":
        bounds = [*rest, *(0, -1)[len(rest) :]]
        start, end = bounds[0], bounds[1]
        start, end = start % max(x.dim(), 1), end % max(x.dim(), 1)
        return [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]]
    if name == "unflatten":
        dim = rest[0] % x.dim()
        return [*x.shape[:dim], *_filled(_sizes((rest[1],)), x.shape[dim]), *x.shape[dim + 1 :]]
    if rest and isinstance(rest[0], torch.dtype):
        return None
    return _filled(_sizes(rest), x.numel())


def _filled(sizes: list[int], total: int) -> list[int]:
    """The sizes, with a number in place of -1."""
    if -1 in sizes:
        known = prod(s for s in sizes if s != -1)
        sizes = [total // max(known, 1) if s == -1 else s for s in sizes]
    return sizes


def _finding(x: Operand, layout: Shard, shape: list[int]) -> Blocks | Units | None:
    """Why a reshape is not local: the sharded dim consists of pieces that no shard may divide, or of fused blocks."""
    group = reshape_group(layout.dim, tuple(x.shape), shape)
    if group is None:
        return None
    after = [n for n in shape[group[1][0] : group[1][1]] if n != 1]
    if len(after) < 2:
        return None
    if layout.parts == 1 and after[0] >= layout.ranks:
        return Units(x.index, after[0])
    if layout.parts == after[0]:
        return Units(x.index, after[1])
    return Blocks(x.index, (layout.size // after[0],) * after[0])


@decider("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> Answer:
    """Local, unless the sharded dim itself broadcasts."""
    x, rest = call.args[0], [*call.args[1:], *call.kwargs.values()]
    sizes = list(rest[0].shape) if call.name == "expand_as" else _sizes(rest)
    layout, added = x.layout, len(sizes) - x.dim()
    if not isinstance(layout, Shard):
        return moved(x, [None] * len(sizes), Tensor.expand, tuple(sizes))
    if layout.size == 1 and sizes[layout.dim + added] != 1:
        return GATHER
    sizes[layout.dim + added] = -1
    return Decision(Tensor.expand, (use_local(x), tuple(sizes)), {}, layout.on(layout.dim + added))


@decider("broadcast_tensors")
def broadcast_tensors(call: Call) -> Answer:
    tensors = call.args[0] if len(call.args) == 1 and isinstance(call.args[0], (tuple, list)) else call.args
    return Body(_expanded_alike, tuple(map(use_original, tensors)), {})


def _expanded_alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    return tuple(t if t.shape == shape else t.expand(shape) for t in tensors)


@decider("as_strided")
def as_strided(call: Call) -> Answer:
    """By the strides of one device. Only elements of the full tensor itself can be reached, not others of its storage."""
    names = named("input size stride storage_offset", call.args, call.kwargs)
    x, size, stride, offset = names["input"], names["size"], names["stride"], names.get("storage_offset")
    if isinstance(x.layout, Partial):
        return Decision(Tensor.as_strided, (use_local(x), size, stride, offset), {}, PARTIAL)
    return Body(_strided, (use_original(x), size, stride, offset), {})


def _strided(x: GlobalTensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    offset = 0 if offset is None else offset - x.storage_offset()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    dense = dim_order(tuple(x.shape), x.stride()) is not None and last < x.numel()
    itself = offset == 0 and (tuple(size), tuple(stride)) == (tuple(x.shape), x.stride())
    if offset < 0 or not (dense or itself or 0 in size):
        raise NotImplementedError("as_strided of a sharded tensor reaches elements that are not its own")
    return x._mw_dispatcher.fallback(_strided_from, (x, size, stride, offset), {})


def _strided_from(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


_strided_from.__name__ = "as_strided"  # the name by which the ledger counts the fallback


@decider("repeat", "tile")
def repeat(call: Call) -> Answer:
    x, times = call.args[0], _sizes([*call.args[1:], *call.kwargs.values()])
    times = [1] * (x.dim() - len(times)) + times
    layout, added = x.layout, len(times) - x.dim()
    if not isinstance(layout, Shard):
        return moved(x, [None] * len(times), Tensor.repeat, tuple(times))
    dim = layout.dim + added
    return Decision(Tensor.repeat, (use_local(x), tuple(times)), {}, Shard(dim, layout.pieces * times[dim]))


@decider("repeat_interleave")
def repeat_interleave(call: Call) -> Answer:
    """Local: the pieces of the sharded dim grow alike."""
    names = named("input repeats dim", call.args, call.kwargs)
    x, times, dim = names["input"], names.get("repeats"), names.get("dim")
    if not isinstance(times, int) or dim is None:
        return GATHER
    layout, dim = x.layout, dim % x.dim()
    if not isinstance(layout, Shard):
        return moved(x, [None] * x.dim(), Tensor.repeat_interleave, times, dim)
    if layout.dim == dim:
        layout = Shard(dim, tuple(tuple(n * times for n in piece) for piece in layout.pieces))
    return Decision(Tensor.repeat_interleave, (use_local(x), times, dim), {}, layout)


@decider("cat", "concat", "concatenate")
def cat(call: Call) -> Answer:
    """Concatenation: along another dim than the sharded one, or along it if all tensors are sharded (as fused blocks)."""
    tensors = list(call.args[0] if call.args else call.kwargs["tensors"])
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", call.kwargs.get("axis", 0))
    # Torch skips empty vectors, whatever the number of dims of the others; but their dtype counts.
    nonempty = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)]
    empty = [use_replicated(t) for t in tensors if t.dim() == 1 and t.shape[0] == 0]
    if isinstance(dim, str) or not nonempty:
        return GATHER
    dim %= nonempty[0].dim()
    if all(isinstance(t.layout, Partial) for t in nonempty):
        return Decision(torch.cat, ([*empty, *map(use_local, nonempty)], dim), {}, PARTIAL)
    shards = [(t.layout, t.numel()) for t in nonempty if isinstance(t.layout, Shard)]
    if not shards:
        return Decision(torch.cat, ([*empty, *map(use_replicated, nonempty)], dim), {}, REPLICATE)
    target = max(shards, key=lambda pair: pair[1])[0]
    if target.dim != dim:
        return Decision(torch.cat, ([*empty, *(use_as(t, target) for t in nonempty)], dim), {}, target)
    if all(is_sharded(t) and t.layout.dim == dim for t in nonempty):
        pieces = tuple(piece for t in nonempty for piece in t.layout.pieces)
        return Decision(torch.cat, ([*empty, *map(use_local, nonempty)], dim), {}, Shard(dim, pieces))
    return GATHER


@decider("stack")
def stack(call: Call) -> Answer:
    tensors = list(call.args[0] if call.args else call.kwargs["tensors"])
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return Body(_stacked, ([*map(use_original, tensors)], dim), {})


def _stacked(tensors: list[Tensor], dim: int) -> Tensor:
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


@decider("flip", "roll", "tril", "triu")
def along_dims(call: Call) -> Answer:
    """These run on local tensors if they do not work on the sharded dim."""
    x, args, kwargs = call.args[0], call.args, call.kwargs
    layout = layout_of(x)
    if isinstance(layout, Partial):
        return of_each(call, use_local, PARTIAL)
    if not isinstance(layout, Shard):
        return GATHER
    if call.name == "flip":
        dims = _sizes(args[1:] or (kwargs["dims"],))
    elif call.name == "roll":
        chosen = args[2] if len(args) > 2 else kwargs.get("dims")
        dims = list(range(x.dim())) if chosen is None else _sizes(chosen if isinstance(chosen, tuple) else (chosen,))
    else:
        dims = [-2, -1]
    if layout.dim in [d % x.dim() for d in dims]:
        return GATHER
    return of_each(call, use_local, layout)


def _sizes(sizes: Sequence[Any]) -> list[int]:
    """Sizes that are passed as separate arguments or as one sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        return [as_number(s) for s in sizes[0]]
    return [as_number(s) for s in sizes]
