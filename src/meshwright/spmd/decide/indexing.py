"""Indexing and splitting: runs on local tensors if the sharded dim is taken whole, or divided between its fused blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, REPLICATE, Partial, Shard
from meshwright.spmd.decide.pointwise import Aligner, of_each
from meshwright.spmd.decide.registry import decider
from meshwright.spmd.decision import GATHER, Answer, Blocks, Body, Decision, Gather, use_local, use_original
from meshwright.spmd.signature import Call, Operand, as_number, is_undecided, layout_of, replaced


@decider("tensor_split", "hsplit", "vsplit", "dsplit")
def tensor_split(call: Call) -> Answer:
    """Splits at given borders, or into a number of pieces, of which the first ones are larger by one."""
    x, options = call.args[0], [*call.args[1:], *call.kwargs.values()]
    if isinstance(options[0], Operand):
        return GATHER
    if call.name == "tensor_split":
        dim = (options[1] if len(options) > 1 else 0) % x.dim()
    else:
        dim = {"vsplit": 0, "hsplit": min(1, x.dim() - 1), "dsplit": 2}[call.name]
    n = x.shape[dim]
    if isinstance(options[0], int):
        count = options[0]
        borders = list(accumulate([n // count + (i < n % count) for i in range(count)], initial=0))
    else:
        borders = [0, *(slice(b).indices(n)[1] for b in options[0]), n]
    indices = [(slice(None),) * dim + (slice(start, max(start, stop)),) for start, stop in pairwise(borders)]
    taken = [_follow(call, x, index) for index in indices]
    if any(isinstance(piece, Gather) for piece in taken):
        return next(piece for piece in taken if isinstance(piece, Gather))
    out = tuple(_out(x, piece) for piece in taken if isinstance(piece, IndexResult))
    return Decision(
        _pieces, (use_local(x), [piece.index for piece in taken if isinstance(piece, IndexResult)]), {}, out
    )


def _pieces(local: Tensor, indices: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(local[index] for index in indices)


@decider("split", "chunk", "unsafe_split", "unsafe_chunk", "split_with_sizes")
def split(call: Call) -> Answer:
    """Splits along another dim than the sharded one, or at borders of fused blocks."""
    x, options = call.args[0], [*call.args[1:], *call.kwargs.values()]
    dim = (options[1] if len(options) > 1 else call.kwargs.get("dim", 0)) % x.dim()
    layout, n = x.layout, x.shape[dim]
    if not isinstance(layout, Shard) or layout.dim != dim:
        return of_each(call, use_local, layout if isinstance(layout, (Shard, Partial)) else REPLICATE)
    size = -(-n // options[0]) if "chunk" in call.name else options[0]
    sizes = (
        [min(size, n - i) for i in range(0, n, size)] or [0] if isinstance(size, int) else list(map(as_number, size))
    )
    pieces = [_between(layout, sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    if any(f is None for f in pieces):
        return Gather(Blocks(x.index, tuple(sizes)))
    layouts = tuple(f[1] for f in pieces if f is not None)
    return Decision(Tensor.split, (use_local(x), [c.local(call.rank) for c in layouts], dim), {}, layouts)


def _between(layout: Shard, start: int, stop: int) -> tuple[int, Shard] | None:
    """(number of the first fused block in [start, stop), the layout of these blocks); None if the range divides a block."""
    base, inside, covered = 0, [], 0
    for i, block in enumerate(layout.blocks):
        if start <= base and base + block <= stop:
            inside.append(i)
            covered += block
        base += block
    if not inside or covered != stop - start:
        return None
    return inside[0], Shard(layout.dim, tuple(layout.pieces[i] for i in inside))


@decider("unbind")
def unbind(call: Call) -> Answer:
    """Slices along another dim than the sharded one."""
    x, dim = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    dim %= x.dim()
    layout = x.layout
    if is_undecided(x):
        return Body(_selected, (use_original(x), dim), {})
    if isinstance(layout, Shard) and layout.dim == dim:
        return Gather(Blocks(x.index, (1,) * x.shape[dim]))
    out = layout.on(layout.dim - (dim < layout.dim)) if isinstance(layout, Shard) else layout
    return Decision(torch.unbind, (use_local(x), dim), {}, out)


def _selected(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))


@decider("__iter__")
def iterate(call: Call) -> Answer:
    return Body(_iterator, (use_original(call.args[0]),), {})


def _iterator(x: Tensor) -> Iterator[Tensor]:
    return iter(torch.unbind(x, 0))


@decider("select")
def select(call: Call) -> Answer:
    x, dim, index = (*call.args, *call.kwargs.values())
    if isinstance(dim, str):
        return GATHER
    return _indexed(call, x, (slice(None),) * (dim % x.dim()) + (as_number(index),))


@decider("narrow")
def narrow(call: Call) -> Answer:
    x, dim, start, length = (*call.args, *call.kwargs.values())
    start, length = as_number(start), as_number(length)
    start = start % max(x.shape[dim], 1) if start < 0 else start
    return _indexed(call, x, (slice(None),) * (dim % x.dim()) + (slice(start, start + length),))


@decider("__getitem__")
def getitem(call: Call) -> Answer:
    x, index = call.args
    return _indexed(call, x, index if isinstance(index, tuple) else (index,))


@dataclass(frozen=True)
class IndexResult:
    """The result of an index into a tensor.

    Attributes:
        index: the index into the local tensor.
        dims: for each dim of the result the dim of the tensor that it comes from; None for a new one.
        full: whether each of these dims is taken from beginning to end.
        layout: the layout of the result; None if the tensor is not sharded.
    """

    index: tuple[Any, ...]
    dims: list[int | None]
    full: bool
    layout: Shard | None


def _indexed(call: Call, x: Operand, index: tuple[Any, ...]) -> Answer:
    """The Decision for ``x[index]``."""
    taken = _follow(call, x, index)
    if isinstance(taken, Gather):
        return taken
    # The number of elements that a mask selects follows from its values, which no signature contains.
    cacheable = not any(isinstance(i, Operand) and i.dtype in _MASKS for i in index)
    args = (use_local(x), replaced(taken.index, use_local))
    if is_undecided(x) and taken.full:
        follows = (x.index, tuple(-1 if d is None else d for d in taken.dims))
        return Decision(Tensor.__getitem__, args, {}, follows=follows)
    return Decision(Tensor.__getitem__, args, {}, _out(x, taken), cacheable=cacheable)


def _out(x: Operand, taken: IndexResult) -> Any:
    return taken.layout if taken.layout is not None else PARTIAL if isinstance(x.layout, Partial) else REPLICATE


_MASKS = (torch.bool, torch.uint8)


def _follow(call: Call, x: Operand, index: tuple[Any, ...]) -> IndexResult | Gather:
    """The result of indexing ``x``, if this rank's part of the result lies in its local tensor; else Gather."""
    if not all(_is_plain(item) for item in index):
        return GATHER
    index = _explicit(index, x.dim())
    arrays = [i for i, item in enumerate(index) if isinstance(item, (Operand, list))]
    if any(layout_of(index[i]) != REPLICATE for i in arrays) or (arrays and arrays[-1] - arrays[0] + 1 != len(arrays)):
        return GATHER
    if layout_of(x) == REPLICATE and not is_undecided(x):
        return GATHER  # a plain tensor, indexed by a sharded one
    layout = x.layout
    dims: list[int | None] = []
    local: list[Any] = []
    dim, full, of_result = 0, True, None
    for position, item in enumerate(index):
        used = _dims_used(item)
        if isinstance(item, slice):
            item = slice(*(None if i is None else as_number(i) for i in (item.start, item.stop, item.step)))
            full = full and len(range(*item.indices(x.shape[dim]))) == x.shape[dim]
        if isinstance(layout, Shard) and dim <= layout.dim < dim + used:
            taken = _on_shard(layout, item)
            if taken is None:
                return Gather(_finding(x, layout, item))
            item, of_result = _local_slice(layout, taken, call.rank), taken[1].on(len(dims))
        local.append(item)
        if position in arrays:
            if position == arrays[0]:
                dims += [None] * _array_rank(index, arrays)
        elif item is None:
            dims.append(None)
        elif isinstance(item, slice):
            dims.append(dim)
        dim += used
    return IndexResult(tuple(local), dims, full, of_result)


def _is_plain(item: Any) -> bool:
    """Whether ``_follow`` knows this kind of index. It does not know single booleans, NumPy arrays and nested lists."""
    if isinstance(item, list):
        return all(isinstance(i, (int, bool)) for i in item)
    if isinstance(item, Operand):
        return item.dtype not in _MASKS or item.dim() > 0
    return (
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, int) and not isinstance(item, bool))
    )


def _array_rank(index: tuple[Any, ...], arrays: list[int]) -> int:
    """How many dims the index arrays, at positions ``arrays`` of an index, give the result."""
    items = [index[i] if isinstance(index[i], Operand) else torch.as_tensor(index[i]) for i in arrays]
    return max(1 if t.dtype in _MASKS else t.dim() for t in items)


def _dims_used(item: Any) -> int:
    """How many dims of the tensor one item of an index takes."""
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, Operand) and item.dtype in _MASKS:
        return item.dim()
    return 1


def _explicit(index: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """The index without an ellipsis: with a full slice for each dim that it does not name."""
    used = sum(_dims_used(i) for i in index if i is not Ellipsis)
    rest = (slice(None),) * (rank - used)
    at = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return (*index, *rest) if at is None else (*index[:at], *rest, *index[at + 1 :])


def _on_shard(layout: Shard, item: Any) -> tuple[int, Shard] | None:
    """The fused blocks that a slice of the sharded dim takes, as ``_between`` gives them; None if it divides a block."""
    if not isinstance(item, slice):
        return None
    start, stop, step = item.indices(layout.size)
    if step != 1:
        return None
    return (0, layout) if (start, stop) == (0, layout.size) else _between(layout, start, stop)


def _local_slice(layout: Shard, taken: tuple[int, Shard], rank: int) -> slice:
    """The slice of a rank's local tensor that holds its part of the blocks ``taken`` (a result of ``_on_shard``)."""
    first, part = taken
    start = sum(piece[rank] for piece in layout.pieces[:first])
    return slice(start, start + part.local(rank))


# A dim of at most so many elements of which the model takes one by its number is a stack of parts: query, key and value, or the
# gates of an LSTM. Each is sharded by itself. In a larger one, a number picks a position: a token, a time step.
_FEW_PARTS = 8


def _finding(x: Operand, layout: Shard, item: Any) -> Blocks | None:
    """The fused blocks that the sharded dim would need for this item of an index to be local; None if no blocks help."""
    if isinstance(item, int) and layout.size <= _FEW_PARTS:
        return Blocks(x.index, (1,) * layout.size)
    if not isinstance(item, slice):
        return None
    start, stop, step = item.indices(layout.size)
    borders = sorted({0, start, stop, layout.size, *_borders(layout)})
    return Blocks(x.index, tuple(b - a for a, b in pairwise(borders))) if step == 1 else None


def _borders(layout: Shard) -> list[int]:
    return [sum(layout.blocks[:i]) for i in range(1, layout.parts)]


@decider("__setitem__")
def setitem(call: Call) -> Answer:
    """``x[index] = value``: local if the index is, by ``_follow``; the value is sharded alike."""
    x, index, value = call.args
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, (Operand, list)) for i in index):
        return GATHER
    taken = _follow(call, x, index)
    if isinstance(taken, Gather) or taken.layout is None:
        return taken if isinstance(taken, Gather) else GATHER
    align = Aligner(taken.layout, len(taken.dims))
    args = (use_local(x), taken.index, align(value))
    return Decision(_set_item, args, {}, choices=tuple(align.choices), itself=x.index, writes=True)


def _set_item(local: Tensor, index: Any, value: Any) -> None:
    target = local[index]
    if isinstance(value, Tensor):
        while value.dim() > target.dim() and value.shape[0] == 1:
            value = value.squeeze(0)  # ``x[i] = value`` ignores leading dims of size 1; ``copy_`` does not
        target.copy_(value)
    else:
        target.fill_(value)


@decider("index_select", "index_copy", "index_add", "index_fill")
def index_select(call: Call) -> Answer:
    """Runs on the local tensor if the index is whole and selects along a dim that is not sharded."""
    if call.name != "index_select" or len(call.args) < 3 or layout_of(call.args[2]) != REPLICATE:
        return GATHER
    x, dim, index = call.args[:3]
    layout = layout_of(x)
    if isinstance(layout, Shard) and layout.dim == dim % x.dim():
        return GATHER
    out = layout if isinstance(layout, (Shard, Partial)) else REPLICATE
    return Decision(torch.index_select, (use_local(x), dim, use_local(index)), {}, out)
