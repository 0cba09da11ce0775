"""Slices and pieces: local where the cut dim is taken whole, or at the borders of its fused blocks."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, WHOLE, Cut, Partial
from meshwright.view.rules.registry import rule
from meshwright.view.rules.shape import moved
from meshwright.view.tensor import View


@rule("tensor_split", "hsplit", "vsplit", "dsplit")
def tensor_split(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By borders, or into so many pieces, of which the first have one more."""
    x, given = args[0], [*args[1:], *kwargs.values()]
    if not isinstance(x, View) or isinstance(given[0], Tensor):
        return NotImplemented
    if func.__name__ == "tensor_split":
        dim = (given[1] if len(given) > 1 else 0) % x.dim()
    else:
        dim = {"vsplit": 0, "hsplit": min(1, x.dim() - 1), "dsplit": 2}[func.__name__]
    n = x.shape[dim]
    if isinstance(given[0], int):
        count = given[0]
        borders = list(accumulate([n // count + (i < n % count) for i in range(count)], initial=0))
    else:
        borders = [0, *(slice(b).indices(n)[1] for b in given[0]), n]
    pieces = []
    for start, stop in pairwise(borders):
        piece = _index(work, x, (slice(None),) * dim + (slice(start, max(start, stop)),))
        if piece is NotImplemented:
            return NotImplemented
        pieces.append(piece)
    return tuple(pieces)


@rule("split", "chunk", "unsafe_split", "unsafe_chunk", "split_with_sizes")
def split(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, given = args[0], [*args[1:], *kwargs.values()]
    dim = (given[1] if len(given) > 1 else kwargs.get("dim", 0)) % x.dim()
    if not isinstance(x, View):
        return NotImplemented
    layout, n = x._mw_layout, x.shape[dim]
    if not isinstance(layout, Cut) or layout.dim != dim:
        return type(r := func(x._mw_local, *args[1:], **kwargs))(
            moved(work, x, piece, [*range(x.dim())]) if layout != WHOLE else piece for piece in r
        )
    size = -(-n // given[0]) if "chunk" in func.__name__ else given[0]
    sizes = [min(size, n - i) for i in range(0, n, size)] or [0] if isinstance(size, int) else list(size)
    found = [_between(layout, sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    if any(f is None for f in found):
        work.blocks(x, tuple(sizes))
        return NotImplemented
    cuts = [f[1] for f in found if f is not None]
    locals_ = x._mw_local.split([c.local(work.axis.rank) for c in cuts], dim)
    return tuple(work.view(t, c) for t, c in zip(locals_, cuts, strict=True))


def _between(layout: Cut, start: int, stop: int) -> tuple[int, Cut] | None:
    """The fused blocks that lie in [start, stop), if that is what the range holds: the first one's number, the cut."""
    base, inside, covered = 0, [], 0
    for number, block in enumerate(layout.blocks):
        if start <= base and base + block <= stop:
            inside.append(number)
            covered += block
        base += block
    if not inside or covered != stop - start:
        return None
    return inside[0], Cut(layout.dim, tuple(layout.pieces[i] for i in inside))


@rule("unbind")
def unbind(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    dim %= x.dim()
    if isinstance(layout := x._mw_layout, Cut) and layout.dim == dim:
        work.blocks(x, (1,) * x.shape[dim])
        return NotImplemented
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))


@rule("__iter__")
def iterate(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return iter(torch.unbind(args[0], 0))


@rule("select")
def select(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, index = (*args, *kwargs.values())
    if isinstance(dim, str) or isinstance(index, View):
        return NotImplemented
    return _index(work, x, (slice(None),) * (dim % x.dim()) + (int(index),))


@rule("narrow")
def narrow(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, start, length = (*args, *kwargs.values())
    start = int(start) % max(x.shape[dim], 1) if int(start) < 0 else int(start)
    return _index(work, x, (slice(None),) * (dim % x.dim()) + (slice(start, start + length),))


@rule("__getitem__")
def getitem(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args
    if not isinstance(x, View):
        return NotImplemented
    return _index(work, x, index if isinstance(index, tuple) else (index,))


def _index(work: Any, x: View, index: tuple[Any, ...]) -> Any:
    plan = _follow(work, x, index)
    if plan is NotImplemented:
        return NotImplemented
    local_index, dims, layout = plan
    local = x._mw_local[local_index]
    if layout is not None:
        return work.view(local, layout)
    return _of_whole(work, x, local, dims)


def _of_whole(work: Any, x: View, local: Tensor, dims: list[int | None]) -> Any:
    if isinstance(x._mw_layout, Partial):
        return work.view(local, PARTIAL)
    if x._mw_parameter is not None and all(d is None or local.shape[i] == x.shape[d] for i, d in enumerate(dims)):
        name, places = x._mw_parameter
        return View(local, WHOLE, work, parameter=(name, tuple(-1 if d is None else places[d] for d in dims)))
    return local


def _follow(work: Any, x: View, index: tuple[Any, ...]) -> Any:
    """(index of the local tensor, the dim of ``x`` each result dim was, the cut of the result), or NotImplemented."""
    if not all(_is_plain(item) for item in index):
        return NotImplemented
    index = _explicit(index, x.dim())
    arrays = [i for i, item in enumerate(index) if isinstance(item, (Tensor, list))]
    if any(isinstance(index[i], View) for i in arrays) or (arrays and arrays[-1] - arrays[0] + 1 != len(arrays)):
        return NotImplemented
    layout = x._mw_layout
    dims: list[int | None] = []
    local: list[Any] = []
    dim, cut_index = 0, None
    for place, item in enumerate(index):
        used = _dims_used(item)
        if isinstance(layout, Cut) and dim <= layout.dim < dim + used:
            cut_index = item
            taken = _on_cut(layout, item)
            if taken is None:
                _explain(work, x, layout, item)
                return NotImplemented
            item = _local_slice(layout, taken, work.axis.rank)
        local.append(item)
        if place in arrays:
            if place == arrays[0]:
                dims += [None] * _array_rank(index, arrays)
        elif item is None:
            dims.append(None)
        elif isinstance(item, slice):
            dims.append(dim)
        dim += used
    if not isinstance(layout, Cut):
        return tuple(local), dims, None
    taken = _on_cut(layout, cut_index)
    assert taken is not None
    return tuple(local), dims, taken[1].on(dims.index(layout.dim))


def _is_plain(item: Any) -> bool:
    """Whether an index is of the kinds followed here; not so booleans by themselves, arrays of NumPy, nested lists."""
    if isinstance(item, list):
        return all(isinstance(i, (int, bool)) for i in item)
    if isinstance(item, Tensor):
        return item.dtype not in (torch.bool, torch.uint8) or item.dim() > 0
    return (
        item is None
        or item is Ellipsis
        or isinstance(item, slice)
        or (isinstance(item, int) and not isinstance(item, bool))
    )


def _array_rank(index: tuple[Any, ...], arrays: list[int]) -> int:
    items = [torch.as_tensor(index[i]) for i in arrays]
    return max(1 if t.dtype in (torch.bool, torch.uint8) else t.dim() for t in items)


def _dims_used(item: Any) -> int:
    if item is None or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _explicit(index: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """The index with its ellipsis written out, a full slice for each dim it does not name."""
    used = sum(_dims_used(i) for i in index if i is not Ellipsis)
    rest = (slice(None),) * (rank - used)
    at = next((i for i, item in enumerate(index) if item is Ellipsis), None)
    return (*index, *rest) if at is None else (*index[:at], *rest, *index[at + 1 :])


def _on_cut(layout: Cut, item: Any) -> tuple[int, Cut] | None:
    """What a slice of the cut dim leaves, where it falls on borders of fused blocks: as ``_between``."""
    if not isinstance(item, slice):
        return None
    start, stop, step = item.indices(layout.size)
    if step != 1:
        return None
    return (0, layout) if (start, stop) == (0, layout.size) else _between(layout, start, stop)


def _local_slice(layout: Cut, taken: tuple[int, Cut], rank: int) -> slice:
    first, part = taken
    start = sum(piece[rank] for piece in layout.pieces[:first])
    return slice(start, start + part.local(rank))


def _explain(work: Any, x: View, layout: Cut, item: Any) -> None:
    """The borders that a slice asks for, for planning."""
    if isinstance(item, int) and layout.size <= 8:
        work.blocks(x, (1,) * layout.size)
    elif isinstance(item, slice):
        start, stop, step = item.indices(layout.size)
        borders = sorted({0, start, stop, layout.size, *_borders(layout)})
        if step == 1:
            work.blocks(x, tuple(b - a for a, b in pairwise(borders)))


def _borders(layout: Cut) -> list[int]:
    return [sum(layout.blocks[:i]) for i in range(1, layout.parts)]


@rule("__setitem__")
def setitem(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index, value = args
    index = index if isinstance(index, tuple) else (index,)
    if not isinstance(x, View) or any(isinstance(i, (Tensor, list)) for i in index):
        return NotImplemented
    plan = _follow(work, x, index)
    if plan is NotImplemented:
        return NotImplemented
    local_index, _, layout = plan
    if layout is None:
        return NotImplemented
    place = x._mw_local[local_index]
    if isinstance(value, Tensor):
        while value.dim() > place.dim() and value.shape[0] == 1:
            value = value.squeeze(0)  # dims of size 1 in front count for nothing here, other than in copy_
        work.view(place, layout).copy_(value)
    else:
        place.fill_(value)
    return None


@rule("index_select", "index_copy", "index_add", "index_fill")
def index_select(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Local where rows are picked by a whole index along a dim that is not cut."""
    if func.__name__ != "index_select" or len(args) < 3 or not isinstance(args[0], View) or isinstance(args[2], View):
        return NotImplemented
    x, dim, index = args[:3]
    layout = x._mw_layout
    if isinstance(layout, Cut) and layout.dim == dim % x.dim():
        return NotImplemented
    local = x._mw_local.index_select(dim, index)
    return work.view(local, layout) if layout != WHOLE else local
