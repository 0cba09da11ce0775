"""A recorded forward for a batch of another length, without recording it.

Recorded at three lengths, a forward that does the same each time has shapes that are sums and products of constants and the
length. What crosses from stage to stage, and what stands for values that are not here, follows from that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshwright.graph import Call, ModelGraph, Value
from meshwright.private import pytree
from meshwright.spmd.alias import dense

_DEPTH = 6  # how far into plain objects to look for constants


def graphs_between(lengths: Sequence[int], graphs: Sequence[ModelGraph]) -> Callable[[int], ModelGraph] | None:
    """A length between → the forward for it. None if what was recorded is not the same but for sizes that follow.

    Args:
        lengths: three or more, in their order, at which ``graphs`` were recorded.
    """
    if any(g.of_this_batch for g in graphs) or not all(_alike(graphs[0], g) for g in graphs[1:]):
        return None
    if not all(_value(vs, lengths, lengths[1]) == vs[1] for vs in zip(*(g.values for g in graphs), strict=True)):
        return None
    ends = [(first, last) for first, last in zip(graphs[0].values, graphs[-1].values, strict=True)]
    outer = lengths[0], lengths[-1]

    def between(length: int) -> ModelGraph:
        graph = copy.copy(graphs[0])
        graph.__dict__.pop("signature", None)
        graph.values = [v for pair in ends if (v := _value(pair, outer, length)) is not None]
        graph.resized = True
        return graph

    return between


def _value(values: Sequence[Value], lengths: Sequence[int], length: int) -> Value | None:
    """A value at a length, by what it is at the first and last of some; None if no size follows."""
    first, last = values[0], values[-1]
    if first.shape == last.shape and first.stride == last.stride:
        return replace(values[1], shape=first.shape, stride=first.stride) if len(values) > 2 else first
    shape = [_number(a, b, lengths, length) for a, b in zip(first.shape, last.shape, strict=True)]
    if None in shape:
        return None
    sizes = tuple(n for n in shape if n is not None)
    stride = _dense(first, last, sizes) or tuple(
        n for a, b in zip(first.stride, last.stride, strict=True) if (n := _number(a, b, lengths, length)) is not None
    )
    if len(stride) != len(sizes):
        return None
    return replace(values[1] if len(values) > 2 else first, shape=sizes, stride=stride)


def _number(first: int, last: int, lengths: Sequence[int], length: int) -> int | None:
    """A number that grows with the length alike."""
    slope, rest = divmod(last - first, lengths[-1] - lengths[0])
    return None if rest else first + slope * (length - lengths[0])


def _dense(first: Value, last: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps, its dims in the order of memory that they had; empty if it had gaps."""
    outermost_first = sorted(range(len(shape)), key=lambda d: (first.stride[d], first.shape[d]), reverse=True)
    dims = tuple(outermost_first)
    return dense(shape, dims) if all(v.stride == dense(v.shape, dims) for v in (first, last)) else ()


def _alike(a: ModelGraph, b: ModelGraph) -> bool:
    """Whether two forwards did the same with the same constants, sizes aside."""
    return (
        len(a.values) == len(b.values)
        and [replace(e, flops=0, moved=0) for e in a.events] == [replace(e, flops=0, moved=0) for e in b.events]
        and all(_same_kind(x, y) for x, y in zip(a.values, b.values, strict=True))
        and _memories(a) == _memories(b)
        and a.returned == b.returned
        and a.ways == b.ways
        and (a.rows, a.by_rows) == (b.rows, b.by_rows)
        and (a.carried, a.changes, a.parameter_writes, a.spans) == (b.carried, b.changes, b.parameter_writes, b.spans)
        and a.repeated == b.repeated
        and a.calls.keys() == b.calls.keys()
        and all(_same_call(call, b.calls[path]) for path, call in a.calls.items())
        and _constants(list(a.outputs.items()), _DEPTH) == _constants(list(b.outputs.items()), _DEPTH)
    )


def _same_kind(a: Value, b: Value) -> bool:
    same = (a.dtype, a.requires_grad, a.position, len(a.shape)) == (b.dtype, b.requires_grad, b.position, len(b.shape))
    return same and len(a.stride) == len(b.stride)


def _memories(graph: ModelGraph) -> list[int]:
    """Which values share memory: for each, the first that has its memory."""
    first: dict[int, int] = {}
    return [first.setdefault(v.storage, i) if v.storage else -1 for i, v in enumerate(graph.values)]


def _same_call(a: Call, b: Call) -> bool:
    fields = "module start stop outputs fresh stashed visible acts leaf".split()
    same = all(getattr(a, name) == getattr(b, name) for name in fields)
    same = same and [(g.which, g.values) for g in a.grown] == [(g.which, g.values) for g in b.grown]
    structures = [(c.returned, [g.items for g in c.grown]) for c in (a, b)]
    return same and bool(_constants(structures[0], _DEPTH) == _constants(structures[1], _DEPTH))


def _constants(x: Any, depth: int) -> Any:
    """What is in a structure besides tensors, in turn."""
    leaves, spec = pytree.tree_flatten(x)
    return spec, [_constant(leaf, depth) for leaf in leaves]


def _constant(x: Any, depth: int) -> Any:
    if isinstance(x, Tensor):
        return Tensor
    if depth and hasattr(x, "__dict__") and not isinstance(x, (nn.Module, type)) and not callable(x):
        return type(x), _constants(vars(x), depth - 1)
    return x


__all__ = ["graphs_between"]
