"""``line_beyond``: whether a forward calls the same functions for many rows as for few, with sizes in proportion to the rows.

A trial of rows (trial.py) runs a few rows. Its verdict holds for more rows if the forward then calls the same functions, on
larger tensors:

    x.mean(1)                       4 rows: (4,)    64 rows: (64,)     in proportion to the rows
    losses.topk(min(32, n)).mean()          (4,)             (32,)     not in proportion: of few rows it takes all, of many rows
                                                                       the largest losses among all
    if n > 16: loss += aux(x)               not called       called    another function

So the forward runs for its shapes alone, with one row repeated, for several numbers of rows. Each number in it (a size, an
argument) must be constant, or follow from the number of rows n as a·n + b or a / n.
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
_LONGER = 4  # a forward with so many times as many calls computes its rows one by one


class Call(NamedTuple):
    """A call of a function in a forward.

    Attributes:
        line: the model's line.
        numbers: the sizes of its results, then the numbers among its arguments.
    """

    line: str
    function: str
    numbers: tuple[float, ...]


class TooManyError(Exception):
    """A forward calls so many functions that it must compute its rows one by one."""


class CallRecorder(FunctionMode):
    """Records the calls of a forward.

    Args:
        most: the largest number of calls; a further call raises TooManyError.

    Attributes:
        calls: the calls so far.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._most = most

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward."""
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_fact(func):
            if self._most is not None and len(self.calls) >= self._most:
                raise TooManyError
            numbers = tuple(_numbers(result, args, kwargs))
            self.calls.append(Call(model_line(), getattr(func, "__name__", ""), numbers))
        return result


def _numbers(result: Any, args: Any, kwargs: Any) -> Iterator[float]:
    """The sizes of a result's tensors, and the numbers among the arguments of the call."""
    for t in pytree.tree_leaves(result):
        if isinstance(t, Tensor):
            yield from t.shape
    yield from (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (int, float)))


Record = Callable[[Any, CallRecorder], None]
"""Runs the forward for the shapes of a batch under a mode."""


def line_beyond(batch: Any, counts: Sequence[int], record: Record) -> str:
    """The first line of the model that computes something else with more rows.

    Args:
        batch: a batch with at least one row.
        counts: numbers of rows, the smallest first.

    Returns:
        The line. Empty if there is none, or if the forward does not show it: it computes its rows one by one, or does not run
        without values.
    """
    calls: dict[int, list[Call]] = {}
    for count in _with_between(counts, _bytes_of_row(batch)):
        calls_with_fewest = next(iter(calls.values()), None)
        recorder = CallRecorder(None if calls_with_fewest is None else _LONGER * len(calls_with_fewest) + 100)
        try:
            record(_repeated_row(batch, count), recorder)
        except Exception:  # a model may raise any error for shapes with which it cannot run
            return ""
        calls[count] = recorder.calls
    return _first_beyond(calls) if len(calls) > 2 else ""


def _with_between(counts: Sequence[int], row_bytes: int) -> list[int]:
    """The counts whose batch is not too large, and one between the first and the last: a straight line fits any two numbers,
    but not any three."""
    small = sorted({n for n in counts if n * row_bytes <= _MOST_BYTES})
    return sorted({*small, (small[0] + small[-1]) // 2}) if small else []


def _bytes_of_row(batch: Any) -> int:
    rows = rows_of(batch)
    return sum(t[:1].numel() * t.element_size() for t in tensors_in(batch) if has_rows(t, rows))


def _repeated_row(batch: Any, count: int) -> Any:
    """A batch with ``count`` copies of the first row: so the number of elements that a mask picks is in proportion to rows."""
    rows = rows_of(batch)
    with torch.no_grad():
        return mapped(lambda t: t[:1].expand(count, *t.shape[1:]).clone() if has_rows(t, rows) else t.clone(), batch)


def _first_beyond(calls: Mapping[int, Sequence[Call]]) -> str:
    """The first line that calls other functions with more rows, or the same functions with numbers that do not follow the rows.

    Args:
        calls: number of rows → the calls of the forward.
    """
    functions = [[(call.line, call.function) for call in of_forward] for of_forward in calls.values()]
    if any(of_forward != functions[0] for of_forward in functions):
        sets = [set(of_forward) for of_forward in functions]
        in_some = set[tuple[str, str]]().union(*sets) - sets[0].intersection(*sets)
        # If no function is new, the forward runs the same lines another number of times: row by row, or block by block.
        return min((line for line, _ in in_some), default="")
    for same_call in zip(*calls.values(), strict=True):
        numbers = [call.numbers for call in same_call]
        if len(set(map(len, numbers))) > 1:
            continue  # an argument is a list with an item for each row: ``x[[i for i in range(n) if …]]``
        if not all(_follows(list(calls), at_counts) for at_counts in zip(*numbers, strict=True)):
            return same_call[0].line
    return ""


def _follows(counts: Sequence[int], numbers: Sequence[float]) -> bool:
    """Whether numbers are constant, or follow from the counts n as a·n + b or a / n."""
    x0, n0 = numbers[0], counts[0]
    if all(x == x0 for x in numbers) or not all(map(_is_finite, numbers)):
        return True
    points = list(zip(counts, numbers, strict=True))
    slope = (numbers[-1] - x0) / (counts[-1] - n0)
    is_linear = all(isclose(x, x0 + slope * (n - n0), rel_tol=1e-9) for n, x in points)
    return is_linear or all(isclose(x * n, x0 * n0, rel_tol=1e-9) for n, x in points)


def _is_finite(x: float) -> bool:
    return abs(x) != float("inf") and x == x


__all__ = ["CallRecorder", "line_beyond"]
