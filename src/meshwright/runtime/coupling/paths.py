"""Paths that follow from values of rows: do all pieces of a batch take the same?

A model may read a value of its batch and act on it: ``if (ids > 7).any()``, ``while h.norm() > 4``, a loop over the experts
that some row was sent to. On one device the rows of the whole batch decide. Here each data rank and microbatch decides by its
own rows. Mostly no harm is done: a mask of ones may be left out, and an expert without rows does nothing. But not always.

``Reads`` notes what a forward reads of values that may follow from rows, by the model's line. It is used twice:

    before the first step     the trial of rows (runtime/coupling/trial.py) reads the same numbers of all rows and of
    their parts. If
                              a number of all rows lies outside of those of the parts (a norm, a sum), then the parts may
                              agree with each other and not with the whole: the rows are coupled.
    in every step             ``Paths`` compares what the pieces have read. If it differs, the rows of two pieces that differ
                              are tried at once and apart, as before the first step. If the loss is the same, the line does
                              no harm, and is not compared again; else the step ends in an error, on all ranks.

A model that reads nothing of its rows is not watched after its first step.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import is_of_model, model_line
from meshwright.evaluation import Evaluating
from meshwright.private import pytree
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter, tensors_given
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.torch_functions import NUMBERS, SIZES, YES_OR_NO, is_fact, writes

AS_MANY_AS_FIT = frozenset("nonzero argwhere masked_select".split())  # Python sees whether any do, by the shape
_SELECTS = frozenset("where masked_fill masked_fill_".split())  # by one yes or no for all rows, as an ``if`` does
COMPARES = frozenset(
    "gt lt ge le eq ne greater less greater_equal less_equal not_equal __gt__ __lt__ __ge__ __le__ __eq__ __ne__".split()
)


Place = tuple[int, int]
"""A forward of a step: the stage, and the microbatch."""

Watched = Callable[[nn.Module, Place], AbstractContextManager[None]]
"""What is on for the time of a forward of a model, at a place."""


def unwatched(model: nn.Module, place: Place) -> AbstractContextManager[None]:
    """Nothing is on."""
    return nullcontext()


@dataclass
class Found:
    """What one forward read.

    Attributes:
        taken: line → which way it was taken there, each time; ``ways``: the same, whatever the sizes.
        numbers: line → the numbers that were compared with others, and those; or that were taken out of tensors; each time.
        counted: lines at which Python was told how many elements a mask picked.
    """

    taken: dict[str, list[int]] = field(default_factory=dict)
    ways: dict[str, list[int]] = field(default_factory=dict)
    numbers: dict[str, list[tuple[float, Any]]] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)


class Reads(FunctionMode):
    """While on, ``found`` is told what Python reads of tensors that may follow from rows: of all but parameters, buffers, and
    what is made of these alone.

    Args:
        numbers: whether numbers are told as well. It takes them off a device.
        sizes: whether, after a number was read, sizes of what functions give belong to the way that is taken, as of
            ``h[[i for i, y in enumerate(labels.tolist()) if y >= 0]]``; in forwards of as many rows.
    """

    def __init__(self, *, numbers: bool = False, sizes: bool = False) -> None:
        super().__init__()
        self.found, self._numbers, self._sizes = Found(), numbers, sizes
        self._same = TensorTable[bool]()  # whatever the rows
        self._picked = TensorTable[bool]()  # those that have a row for each element that was picked
        # After a number was read: its line, the functions called since, and sizes of what they gave.
        self._way: tuple[str, int, int] | None = None

    def may_be_recorded(self) -> bool:
        """See ``FunctionMode``. A program, of which it would see nothing, is not run while it is on."""
        return True

    @contextmanager
    def on(self, model: nn.Module, place: Place = (0, 0)) -> Iterator[None]:
        """For the time of a forward."""
        self._same.note(model.buffers(), True)
        with self:
            yield
        self._end_way()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in YES_OR_NO or name in NUMBERS:
            result = func(*args, **kwargs)
            if not all(map(self._is_same, tensors_given(args, kwargs))):
                self._read(result)
            return result
        if is_fact(func):
            result = func(*args, **kwargs)
            if self._picked and func in SIZES and args[0] in self._picked:
                self._read(result)
                self.found.counted.add(_line())
            return result
        result = func(*args, **kwargs)
        if self._way is not None:
            line, functions, sizes = self._way
            if self._sizes and isinstance(result, Tensor):
                sizes = hash((sizes, *result.shape)) & _MASK
            self._way = line, _hashed(functions, name), sizes
        self._follow(func, name, args, kwargs, result)
        return result

    def _follow(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """What is known of a result."""
        if args and isinstance(args[0], Tensor) and not self._is_same(args[0]):  # as nearly always: told at once
            if name in COMPARES:
                self._compare(args[0], args[1:])
            elif name in _SELECTS and len(args) == 3:
                self._select(args[0] if name == "where" else args[1])
            elif name in AS_MANY_AS_FIT or (name == "where" and len(args) == 1) or picks(name, args):
                pieces = pytree.tree_leaves(result)
                self._note(_line(), int(any(t.numel() for t in pieces)))
                self._picked.note(pieces, True)
            elif self._picked:
                self._follow_picked(args, kwargs, result)
            return
        if all(map(self._is_same, tensors_given(args, kwargs))):
            self._same.note(pytree.tree_leaves(result), True)
        elif args and isinstance(args[0], Tensor) and writes(func, args, kwargs):
            self._same.forget(args[0])

    def _follow_picked(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """What has a row for each that was picked, made of such."""
        rows = {t.shape[0] for t in tensors_given(args, kwargs) if t in self._picked}
        made = (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)) if rows else ()
        self._picked.note((t for t in made if t.dim() and t.shape[0] in rows), True)

    def _is_same(self, t: Tensor) -> bool:
        """Whether a tensor is the same whatever the rows."""
        return t in self._same or is_parameter(t)

    def _compare(self, x: Tensor, others: tuple[Any, ...]) -> None:
        """A comparison of one number with another, whoever acts on it: Python, or a ``torch.where``. With zero, what holds
        of all parts holds of their sum, too."""
        if self._numbers and others and x.numel() == 1 and not x.is_complex():
            other = others[0]
            if isinstance(other, Tensor):
                other = float(other) if other.numel() == 1 and self._is_same(other) else 0
            if other != 0:
                self.found.numbers.setdefault(_line(), []).append((float(x), other))

    def _select(self, condition: Any) -> None:
        if self._numbers:
            return  # a trial turns it round (bent.py)
        if isinstance(condition, Tensor) and not condition.dim() and not self._is_same(condition):
            self._note(_line(), int(bool(condition)))

    def _read(self, result: Any) -> None:
        line = _line()
        if isinstance(result, bool):
            self._note(line, int(result))
            return
        if isinstance(result, float) and self._numbers:
            self.found.numbers.setdefault(line, []).append((result, None))
        self._end_way()
        self._way = line, 0, 0

    def _end_way(self) -> None:
        if self._way is not None:
            self._note(*self._way)
        self._way = None

    def _note(self, line: str, way: int, sizes: int = 0) -> None:
        self.found.ways.setdefault(line, []).append(way)
        self.found.taken.setdefault(line, []).append((way + sizes) & _MASK)


def picks(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a mask picks what fits."""
    return name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool


def _line() -> str:
    """The model's line, without its folder, which may be another on another machine."""
    return os.path.basename(model_line())


_MASK = 0xFFFFFFFF


def _hashed(before: int, name: str) -> int:
    """A number for the functions that were called so far, and this one, with the place in the model where it is called."""
    frame: Any = sys._getframe(2)
    while frame is not None and not _is_of_model(frame.f_code):
        frame = frame.f_back
    place = _hash_of(name, frame.f_code.co_name, frame.f_lineno) if frame is not None else _hash_of(name, "", 0)
    return (before * 1000003 ^ place) & _MASK


@lru_cache(maxsize=4096)
def _is_of_model(code: CodeType) -> bool:
    return is_of_model(code.co_filename)


@lru_cache(maxsize=4096)
def _hash_of(name: str, caller: str, line: int) -> int:
    return zlib.crc32(f"{name} {caller} {line}".encode())  # the same in every process, which Python's own is not


def outside_of_parts(whole: Found, parts: Sequence[Found]) -> str:
    """The first line at which a number of all rows lies outside of those of their parts; empty if there is none.

    A number that is compared with one that follows from how many rows there are (a sum of a mask with its elements) grows as
    that does: what holds of the parts holds of the whole.
    """
    for line, numbers in whole.numbers.items():
        others = [part.numbers.get(line, []) for part in parts]
        if any(len(other) != len(numbers) for other in others):
            continue  # another way was taken: what the trial finds is the answer
        for (number, compared), *of_parts in zip(numbers, *others, strict=True):
            slack = 1e-9 * max(1.0, abs(number))
            among = min(x for x, _ in of_parts) - slack <= number <= max(x for x, _ in of_parts) + slack
            if not among and all(other == compared for _, other in of_parts):
                return line
    return ""


# --- in steps ---------------------------------------------------------------------------------------------------------

SUMS = 5
"""How many sums over pieces a stage needs to tell whether all have read the same."""


class Paths:
    """Which paths the pieces of a step took, on this rank.

    Args:
        stages: of the pipeline; 1 without one.

    Attributes:
        watching: whether this step is watched; alike on all ranks.
    """

    NOTHING: Hashable = frozenset()
    """What is told of a step in which nothing was read."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self._settled: set[tuple[Evaluating, str]] = set()
        self._idle: set[Evaluating] = set()  # with these modules in evaluation mode nothing was read in the first step
        self._found: dict[Place, Found] = {}
        self._evaluating: Evaluating = frozenset()
        self.watching = self._even = False
        self._weights: Sequence[float] = ()

    def begin(self, evaluating: Evaluating, weights: Sequence[float], *, divided: bool, even: bool = False) -> None:
        """A step begins.

        Args:
            evaluating: the modules that are in evaluation mode.
            weights: of the microbatches: one that stands in for no rows weighs nothing, and goes where it likes.
            divided: whether the step's rows are run apart.
            even: whether all pieces, of all ranks, have as many.
        """
        self._even = even
        self._evaluating, self._found, self._weights = evaluating, {}, weights
        self.watching = divided and evaluating not in self._idle

    @contextmanager
    def watched(self, model: nn.Module, place: Place) -> Iterator[None]:
        """For the time of a forward of a piece."""
        if not self.watching or not self._weights[place[1]]:
            yield
            return
        reads = Reads(sizes=self._even)
        with reads.on(model, place):
            yield
        self._found[place] = reads.found

    def sums(self) -> list[float]:
        """Numbers to be summed over all ranks, ``SUMS`` a stage."""
        sums = [0.0] * (SUMS * self.stages)
        for (stage, _), read in self._found.items():
            a, b = divmod(zlib.crc32(repr(sorted(self._open(read).items())).encode()), 2**16)
            for i, x in enumerate((1.0, a, b, a * a, b * b) if self._open(read) else (1.0, 0.0, 0.0, 0.0, 0.0)):
                sums[SUMS * stage + i] += x
        return sums

    def differ(self, sums: Sequence[float]) -> bool:
        """Whether pieces have taken different paths, by the sums over all ranks."""
        each = [sums[i : i + SUMS] for i in range(0, len(sums), SUMS)]
        if not any(x for _, *rest in each for x in rest):
            self._idle.add(self._evaluating)
        return any(n * aa != a * a or n * bb != b * b for n, a, b, aa, bb in each)

    def taken(self) -> dict[Place, dict[str, list[int]]]:
        """What was read, but for what does no harm."""
        return {place: self._open(read) for place, read in self._found.items()}

    def ways(self) -> Hashable:
        """What is told of the paths that this rank's pieces took, but for what does no harm; sizes apart."""
        return frozenset(
            (stage, ways)
            for (stage, _), read in self._found.items()
            if (ways := tuple((line, *ways) for line, ways in sorted(read.ways.items()) if not self._harmless(line)))
        )

    def settle(self, lines: Iterable[str]) -> None:
        """At these lines different paths do no harm."""
        self._settled.update((self._evaluating, line) for line in lines)

    def _open(self, read: Found) -> dict[str, list[int]]:
        return {line: ways for line, ways in read.taken.items() if not self._harmless(line)}

    def _harmless(self, line: str) -> bool:
        return (self._evaluating, line) in self._settled


Taken = dict[Place, dict[str, list[int]]]


def first_to_differ(everywhere: Sequence[Taken]) -> tuple[tuple[int, int], tuple[int, int], list[str]] | None:
    """Two pieces, (rank, microbatch), that took different paths in the same stage, and the lines at which they differ.

    Args:
        everywhere: by rank.
    """
    first: dict[int, tuple[tuple[int, int], dict[str, list[int]]]] = {}
    for rank, taken in enumerate(everywhere):
        for (stage, microbatch), ways in sorted(taken.items()):
            piece = rank, microbatch
            other, before = first.setdefault(stage, (piece, ways))
            if ways != before:
                lines = [line for line in {**before, **ways} if before.get(line) != ways.get(line)]
                return other, piece, lines
    return None


__all__ = ["Found", "Paths", "Place", "Reads", "Watched", "first_to_differ", "outside_of_parts", "unwatched"]
