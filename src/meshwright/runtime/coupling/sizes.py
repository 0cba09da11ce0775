"""``Sizes``: what a forward computes, by how many rows it has.

A trial of rows (trial.py) runs a few of them. What it finds is true of more rows if a forward does the same with more, and more
of it:

    x.mean(1)                       4 rows: (4,)    64 rows: (64,)     grows with the rows
    losses.topk(min(32, n)).mean()          (4,)             (32,)     does not: with few rows it takes all of them, and with
                                                                       many the largest of all, whoever's they are
    if n > 16: loss += aux(x)               not called       called

So the forward runs for its shapes alone, with one row many times, for some numbers of rows. Each number that it comes to (a
size, an argument) has to stay as it is, or to follow the number of rows n as a·n + b or a / n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.private import pytree
from meshwright.runtime.rows.batch import has_rows, mapped, tensors_in
from meshwright.runtime.rows.microbatches import rows_of
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.torch_functions import is_fact

_MOST_BYTES = 1 << 26  # of a batch that is run for its shapes
_LONGER = 4  # a forward that calls so many times as many functions goes through its rows one by one


class Call(NamedTuple):
    """A function that a forward called: where, and the sizes and numbers of its results and arguments."""

    line: str
    function: str
    numbers: tuple[float, ...]


class TooManyError(Exception):
    """A forward calls so many functions that it goes through its rows one by one."""


class Sizes(FunctionMode):
    """Notes the calls of a forward.

    Args:
        most: calls; a further one raises TooManyError.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._most = most

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """For the time of a forward."""
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_fact(func):
            if self._most is not None and len(self.calls) >= self._most:
                raise TooManyError
            numbers = tuple(_numbers(((result,), args, kwargs)))
            self.calls.append(Call(model_line(), getattr(func, "__name__", ""), numbers))
        return result


def _numbers(of: Any) -> Iterator[float]:
    """The sizes of results that are tensors, and the numbers among arguments."""
    results, args, kwargs = of
    for t in pytree.tree_leaves(results):
        if isinstance(t, Tensor):
            yield from t.shape
    yield from (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (int, float)))


Record = Callable[[Any, Sizes], None]
"""Runs the forward for the shapes of a batch under a mode."""


def line_beyond(batch: Any, counts: Sequence[int], record: Record) -> str:
    """The model's line that does something else with more rows than with the first count, and not only more of it. Empty if
    there is none, or if that cannot be told: a forward that goes through its rows one by one, or does not run without values.

    Args:
        batch: with a row at least.
        counts: numbers of rows, the fewest first.
    """
    calls: dict[int, list[Call]] = {}
    for count in _with_between(counts, _bytes_of_row(batch)):
        few = next(iter(calls.values()), None)
        sizes = Sizes(None if few is None else _LONGER * len(few) + 100)
        try:
            record(_of_rows(batch, count), sizes)
        except Exception:  # whatever a model raises for shapes that it cannot run with
            return ""
        calls[count] = sizes.calls
    return _first_beyond(calls) if len(calls) > 2 else ""


def _with_between(counts: Sequence[int], row: int) -> list[int]:
    """The counts whose batch is not too large, and one between the first and the last: through two every line goes."""
    kept = sorted({n for n in counts if n * row <= _MOST_BYTES})
    return sorted({*kept, (kept[0] + kept[-1]) // 2}) if kept else []


def _bytes_of_row(batch: Any) -> int:
    rows = rows_of(batch)
    return sum(t[:1].numel() * t.element_size() for t in tensors_in(batch) if has_rows(t, rows))


def _of_rows(batch: Any, count: int) -> Any:
    """A batch of so many rows, each of which is the first: masks of it pick in proportion."""
    rows = rows_of(batch)
    with torch.no_grad():
        return mapped(lambda t: t[:1].expand(count, *t.shape[1:]).clone() if has_rows(t, rows) else t.clone(), batch)


def _first_beyond(calls: Mapping[int, Sequence[Call]]) -> str:
    """The first line whose calls are others with more rows."""
    where = {count: [(call.line, call.function) for call in made] for count, made in calls.items()}
    first, *others = where.values()
    if any(other != first for other in others):
        every = [set(of) for of in where.values()]
        some = set[tuple[str, str]]().union(*every) - every[0].intersection(*every)
        # If no line is new, it runs the same lines another number of times: row by row, or block by block.
        return min((line for line, _ in some), default="")
    for together in zip(*calls.values(), strict=True):
        numbers = [call.numbers for call in together]
        if len(set(map(len, numbers))) > 1:
            continue  # a list with an entry for each row, ``x[[i for i in range(n) if …]]``: more rows, more of the same
        if not all(_follows(list(calls), at) for at in zip(*numbers, strict=True)):
            return together[0].line
    return ""


def _follows(counts: Sequence[int], numbers: Sequence[float]) -> bool:
    """Whether numbers are constant, or go with the counts as a·n + b or a / n."""
    first, n = numbers[0], counts[0]
    if all(x == first for x in numbers) or not all(map(_is_finite, numbers)):
        return True
    slope = (numbers[-1] - first) / (counts[-1] - n)
    straight = all(isclose(x, first + slope * (c - n), rel_tol=1e-9) for c, x in zip(counts, numbers, strict=True))
    return straight or all(isclose(x * c, first * n, rel_tol=1e-9) for c, x in zip(counts, numbers, strict=True))


def _is_finite(x: float) -> bool:
    return abs(x) != float("inf") and x == x


__all__ = ["Sizes", "line_beyond"]
