"""Computes the graph of a forward for another length of the batch, from recordings at three or more lengths.

If a forward runs the same functions at all recorded lengths, and each size is linear in the length, the sizes at any length
between them follow. So do the values that cross from stage to stage, and the placeholders.
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

_DEPTH = 6  # levels of plain objects within objects that are searched for constants: outputs of models are less deep


def graphs_between(lengths: Sequence[int], graphs: Sequence[ModelGraph]) -> Callable[[int], ModelGraph] | None:
    """A function: length → graph of the forward. None if the graphs differ in more than sizes that are linear in the length.

    Args:
        lengths: three or more, in ascending order.
        graphs: recorded at these lengths.
    """
    if any(graph.of_this_batch for graph in graphs):
        return None
    if not all(_same_program(graphs[0], graph) for graph in graphs[1:]):
        return None
    values_by_length = zip(*(graph.values for graph in graphs), strict=True)
    if not all(_value(values, lengths, lengths[1]) == values[1] for values in values_by_length):
        return None
    # Each value at the first and at the last length.
    outer_values = list(zip(graphs[0].values, graphs[-1].values, strict=True))
    outer_lengths = lengths[0], lengths[-1]

    def between(length: int) -> ModelGraph:
        graph = copy.copy(graphs[0])
        graph.__dict__.pop("signature", None)
        graph.values = [value for pair in outer_values if (value := _value(pair, outer_lengths, length)) is not None]
        graph.resized = True
        return graph

    return between


def _value(values: Sequence[Value], lengths: Sequence[int], length: int) -> Value | None:
    """A value at ``length``, interpolated between the first and the last length. None if a size is not linear in the length.

    Args:
        values: at each of ``lengths``.
    """
    first, last = values[0], values[-1]
    template = values[1] if len(values) > 2 else first
    if first.shape == last.shape and first.stride == last.stride:
        return first if template is first else replace(template, shape=first.shape, stride=first.stride)
    shape = _interpolated(first.shape, last.shape, lengths, length)
    if shape is None:
        return None
    stride = _dense_strides(first, last, shape) or _interpolated(first.stride, last.stride, lengths, length)
    if stride is None:
        return None
    return replace(template, shape=shape, stride=stride)


def _interpolated(
    first: Sequence[int], last: Sequence[int], lengths: Sequence[int], length: int
) -> tuple[int, ...] | None:
    """Numbers at ``length``, on a line between those at the first and the last length. None if one is not an integer."""
    numbers = []
    for a, b in zip(first, last, strict=True):
        slope, rest = divmod(b - a, lengths[-1] - lengths[0])
        if rest:
            return None
        numbers.append(a + slope * (length - lengths[0]))
    return tuple(numbers)


def _dense_strides(first: Value, last: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps, with its dims in the same order of memory as before; empty if it had gaps."""
    outermost_first = sorted(range(len(shape)), key=lambda d: (first.stride[d], first.shape[d]), reverse=True)
    dims = tuple(outermost_first)
    return dense(shape, dims) if all(v.stride == dense(v.shape, dims) for v in (first, last)) else ()


def _same_program(a: ModelGraph, b: ModelGraph) -> bool:
    """Whether two forwards ran the same functions with the same constants, apart from sizes."""
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
    """Whether two values are equal, apart from sizes and strides."""
    same = (a.dtype, a.requires_grad, a.position, len(a.shape)) == (b.dtype, b.requires_grad, b.position, len(b.shape))
    return same and len(a.stride) == len(b.stride)


def _memories(graph: ModelGraph) -> list[int]:
    """For each value, the number of the first value with the same memory; -1 if it has none."""
    first: dict[int, int] = {}
    return [first.setdefault(v.storage, i) if v.storage else -1 for i, v in enumerate(graph.values)]


def _same_call(a: Call, b: Call) -> bool:
    """Whether two calls of a module are equal, apart from sizes."""
    fields = "module start stop outputs fresh stashed visible acts leaf".split()
    same = all(getattr(a, name) == getattr(b, name) for name in fields)
    same = same and _where_changed(a) == _where_changed(b)
    structures = [(c.returned, [change.items for change in c.changes]) for c in (a, b)]
    return same and bool(_constants(structures[0], _DEPTH) == _constants(structures[1], _DEPTH))


def _where_changed(call: Call) -> list[Any]:
    """What a call changes among its arguments, but for the new items."""
    return [(c.where, c.removed, c.before, c.values, c.length) for c in call.changes]


def _constants(x: Any, depth: int) -> Any:
    """The structure and its leaves, with ``Tensor`` in place of each tensor. ``depth``: levels of plain objects to search."""
    leaves, spec = pytree.tree_flatten(x)
    return spec, [_constant(leaf, depth) for leaf in leaves]


def _constant(x: Any, depth: int) -> Any:
    if isinstance(x, Tensor):
        return Tensor
    if depth and hasattr(x, "__dict__") and not isinstance(x, (nn.Module, type)) and not callable(x):
        return type(x), _constants(vars(x), depth - 1)
    return x


__all__ = ["graphs_between"]
