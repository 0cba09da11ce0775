"""Checks that all pieces of a batch take the same path, if paths depend on values of rows.

A model may read a value of its batch and act on it: ``if (ids > 7).any()``, ``while h.norm() > 4``, a loop over the experts to
which some row was sent. On one device the rows of the whole batch decide. With data ranks and microbatches each piece decides
by its own rows. Often this does no harm: a mask of ones may be left out, and an expert without rows does nothing. But not
always.

``Reads`` logs which values Python reads in a forward that may depend on rows, by the model's line. It is used twice:

    before the first step     The trial of rows (runtime/coupling/trial.py) reads the same numbers in forwards of all rows and
                              of parts. If a number of all rows lies outside of the range of those of the parts (a norm, a sum),
                              then the parts may agree with each other but not with the whole: the rows are coupled.
    in every step             ``Paths`` compares the logs of the pieces. If they differ, the rows of two pieces that differ are
                              run together and apart, as before the first step. If the loss is the same, the line is harmless
                              and is not compared again; else the step ends in an error, on all ranks.

A model that reads no values of its rows is not watched after its first step.
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
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter, tensor_arguments
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.torch_functions import NUMBERS, SIZES, YES_OR_NO, is_fact, writes

# functions whose results show Python by their shape whether any elements fit
AS_MANY_AS_FIT = frozenset("nonzero argwhere masked_select".split())
# functions that act as an ``if``, if their condition is one number for all rows
_SELECTS = frozenset("where masked_fill masked_fill_".split())
COMPARES = frozenset(
    "gt lt ge le eq ne greater less greater_equal less_equal not_equal __gt__ __lt__ __ge__ __le__ __eq__ __ne__".split()
)


ForwardId = tuple[int, int]
"""A forward in a step: (stage, microbatch)."""

Watched = Callable[[nn.Module, ForwardId], AbstractContextManager[None]]
"""(model, which forward) → the context in which the forward runs."""


def unwatched(model: nn.Module, forward_id: ForwardId) -> AbstractContextManager[None]:
    """No context: for a forward that is not watched."""
    return nullcontext()


@dataclass
class ReadLog:
    """The values that Python read in one forward.

    Attributes:
        taken: line → for each read there a number for the path that was taken, including sizes.
        ways: ``taken`` without sizes.
        numbers: line → for each time (a number, the number with which it was compared); None instead of the second if Python
            read the first.
        counted: lines at which Python learnt how many elements a mask picked.
    """

    taken: dict[str, list[int]] = field(default_factory=dict)
    ways: dict[str, list[int]] = field(default_factory=dict)
    numbers: dict[str, list[tuple[float, Any]]] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)


class Reads(FunctionMode):
    """While on, logs which values Python reads of tensors that may depend on rows: of all tensors except parameters, buffers,
    and results of these alone.

    Args:
        numbers: whether to log numbers as well, which must be copied from the device.
        sizes: whether, after a number was read, the sizes of results are part of the path, as for
            ``h[[i for i, y in enumerate(labels.tolist()) if y >= 0]]``. Only for forwards with equal numbers of rows.

    Attributes:
        log: the reads so far.
    """

    def __init__(self, *, numbers: bool = False, sizes: bool = False) -> None:
        super().__init__()
        self.log, self._numbers, self._sizes = ReadLog(), numbers, sizes
        self._same = TensorTable[bool]()  # tensors that do not depend on rows
        self._picked = TensorTable[bool]()  # tensors with a row for each element that a mask picked
        # After a number was read: (its line, a hash of the functions called since, a hash of the sizes of their results).
        self._way: tuple[str, int, int] | None = None

    def may_be_recorded(self) -> bool:
        """See ``FunctionMode``. While this mode is on, no program runs, in which it would see nothing."""
        return True

    @contextmanager
    def on(self, model: nn.Module, forward_id: ForwardId = (0, 0)) -> Iterator[None]:
        """A context for one forward."""
        self._same.note(model.buffers(), True)
        with self:
            yield
        self._end_way()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in YES_OR_NO or name in NUMBERS:
            result = func(*args, **kwargs)
            if not all(map(self._is_same, tensor_arguments(args, kwargs))):
                self._read(result)
            return result
        if is_fact(func):
            result = func(*args, **kwargs)
            if self._picked and func in SIZES and args[0] in self._picked:
                self._read(result)
                self.log.counted.add(_line())
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
        """Logs what a call shows of its arguments, and notes facts of its result."""
        if args and isinstance(args[0], Tensor) and not self._is_same(args[0]):  # the usual case first
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
        if all(map(self._is_same, tensor_arguments(args, kwargs))):
            self._same.note(pytree.tree_leaves(result), True)
        elif args and isinstance(args[0], Tensor) and writes(func, args, kwargs):
            self._same.forget(args[0])

    def _follow_picked(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Notes results that have a row for each picked element, computed from tensors that have."""
        rows = {t.shape[0] for t in tensor_arguments(args, kwargs) if t in self._picked}
        made = (t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)) if rows else ()
        self._picked.note((t for t in made if t.dim() and t.shape[0] in rows), True)

    def _is_same(self, t: Tensor) -> bool:
        """Whether a tensor does not depend on rows."""
        return t in self._same or is_parameter(t)

    def _compare(self, x: Tensor, others: tuple[Any, ...]) -> None:
        """Logs a comparison of one number with another; Python or a ``torch.where`` may act on it. A comparison with zero is
        harmless: if it has one result for all parts, it has the same for their sum."""
        if self._numbers and others and x.numel() == 1 and not x.is_complex():
            other = others[0]
            if isinstance(other, Tensor):
                other = float(other) if other.numel() == 1 and self._is_same(other) else 0
            if other != 0:
                self.log.numbers.setdefault(_line(), []).append((float(x), other))

    def _select(self, condition: Any) -> None:
        if self._numbers:
            return  # a trial reverses it (bent.py)
        if isinstance(condition, Tensor) and not condition.dim() and not self._is_same(condition):
            self._note(_line(), int(bool(condition)))

    def _read(self, result: Any) -> None:
        """Logs a value that Python read."""
        line = _line()
        if isinstance(result, bool):
            self._note(line, int(result))
            return
        if isinstance(result, float) and self._numbers:
            self.log.numbers.setdefault(line, []).append((result, None))
        self._end_way()
        self._way = line, 0, 0

    def _end_way(self) -> None:
        if self._way is not None:
            self._note(*self._way)
        self._way = None

    def _note(self, line: str, way: int, sizes: int = 0) -> None:
        self.log.ways.setdefault(line, []).append(way)
        self.log.taken.setdefault(line, []).append((way + sizes) & _MASK)


def picks(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call picks elements by a mask: ``x[mask]``."""
    return name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool


def _line() -> str:
    """The model's line, without the folder, which may differ between machines."""
    return os.path.basename(model_line())


_MASK = 0xFFFFFFFF


def _hashed(before: int, name: str) -> int:
    """A hash of the functions called so far (``before``) and of this one, with the line of the model that calls it."""
    frame: Any = sys._getframe(2)
    while frame is not None and not _is_of_model(frame.f_code):
        frame = frame.f_back
    call = _hash_of(name, frame.f_code.co_name, frame.f_lineno) if frame is not None else _hash_of(name, "", 0)
    return (before * 1000003 ^ call) & _MASK


@lru_cache(maxsize=4096)
def _is_of_model(code: CodeType) -> bool:
    return is_of_model(code.co_filename)


@lru_cache(maxsize=4096)
def _hash_of(name: str, caller: str, line: int) -> int:
    return zlib.crc32(f"{name} {caller} {line}".encode())  # equal in every process, unlike Python's hash


def outside_of_parts(of_all: ReadLog, parts: Sequence[ReadLog]) -> str:
    """The first line at which a number of all rows lies outside of the range of those of the parts; empty if there is none.

    If the number with which it is compared differs too, both grow with the number of rows (the sum of a mask, the number of
    elements): a comparison that has one result for the parts has the same for the whole. Such numbers do not count.
    """
    for line, numbers in of_all.numbers.items():
        others = [part.numbers.get(line, []) for part in parts]
        if any(len(other) != len(numbers) for other in others):
            continue  # a part took another path: the losses will show whether it matters
        for (number, compared), *of_parts in zip(numbers, *others, strict=True):
            slack = 1e-9 * max(1.0, abs(number))
            among = min(x for x, _ in of_parts) - slack <= number <= max(x for x, _ in of_parts) + slack
            if not among and all(other == compared for _, other in of_parts):
                return line
    return ""


# --- in steps ---------------------------------------------------------------------------------------------------------

SUMS = 5
"""The number of sums over pieces that each stage needs, to find out whether all logs are equal."""


class Paths:
    """The paths that the pieces of a step took on this rank.

    Args:
        stages: the number of pipeline stages; 1 without a pipeline.

    Attributes:
        watching: whether this step is watched; equal on all ranks.
    """

    NOTHING: Hashable = frozenset()
    """``ways`` of a step in which Python read no values."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        # (modules in evaluation mode, line): lines at which differences are harmless
        self._settled: set[tuple[Evaluating, str]] = set()
        self._idle: set[Evaluating] = set()  # with these modules in evaluation mode the first step read no values
        self._logs: dict[ForwardId, ReadLog] = {}
        self._evaluating: Evaluating = frozenset()
        self.watching = self._even = False
        self._weights: Sequence[float] = ()

    def begin(self, evaluating: Evaluating, weights: Sequence[float], *, divided: bool, even: bool = False) -> None:
        """A step begins.

        Args:
            evaluating: the modules that are in evaluation mode.
            weights: the weights of the microbatches. One without rows has weight 0, and its path does not count.
            divided: whether the rows of the step are divided into pieces.
            even: whether all pieces, on all ranks, have equal numbers of rows.
        """
        self._even = even
        self._evaluating, self._logs, self._weights = evaluating, {}, weights
        self.watching = divided and evaluating not in self._idle

    @contextmanager
    def watched(self, model: nn.Module, forward_id: ForwardId) -> Iterator[None]:
        """A context for the forward of a piece."""
        if not self.watching or not self._weights[forward_id[1]]:
            yield
            return
        reads = Reads(sizes=self._even)
        with reads.on(model, forward_id):
            yield
        self._logs[forward_id] = reads.log

    def sums(self) -> list[float]:
        """This rank's summands of the numbers that ``differ`` needs, ``SUMS`` for each stage."""
        sums = [0.0] * (SUMS * self.stages)
        for (stage, _), read in self._logs.items():
            a, b = divmod(zlib.crc32(repr(sorted(self._open(read).items())).encode()), 2**16)
            for i, x in enumerate((1.0, a, b, a * a, b * b) if self._open(read) else (1.0, 0.0, 0.0, 0.0, 0.0)):
                sums[SUMS * stage + i] += x
        return sums

    def differ(self, sums: Sequence[float]) -> bool:
        """Whether pieces took different paths, by the sums over all ranks.

        For each stage the sums are n, Σa, Σb, Σa² and Σb² over its forwards, where a and b are the halves of a hash of a log.
        All a are equal exactly if n·Σa² = (Σa)².
        """
        each = [sums[i : i + SUMS] for i in range(0, len(sums), SUMS)]
        if not any(x for _, *rest in each for x in rest):
            self._idle.add(self._evaluating)
        return any(n * aa != a * a or n * bb != b * b for n, a, b, aa, bb in each)

    def taken(self) -> dict[ForwardId, dict[str, list[int]]]:
        """For each forward the paths at each line, without harmless lines."""
        return {forward_id: self._open(read) for forward_id, read in self._logs.items()}

    def ways(self) -> Hashable:
        """The paths that this rank's pieces took, without sizes and without harmless lines; a value to compare."""
        return frozenset(
            (stage, ways)
            for (stage, _), read in self._logs.items()
            if (ways := tuple((line, *ways) for line, ways in sorted(read.ways.items()) if not self._harmless(line)))
        )

    def settle(self, lines: Iterable[str]) -> None:
        """Notes that different paths are harmless at these lines."""
        self._settled.update((self._evaluating, line) for line in lines)

    def _open(self, read: ReadLog) -> dict[str, list[int]]:
        return {line: ways for line, ways in read.taken.items() if not self._harmless(line)}

    def _harmless(self, line: str) -> bool:
        return (self._evaluating, line) in self._settled


Taken = dict[ForwardId, dict[str, list[int]]]


def first_to_differ(everywhere: Sequence[Taken]) -> tuple[tuple[int, int], tuple[int, int], list[str]] | None:
    """(piece, other piece, the lines at which they differ) for two pieces that took different paths in one stage; None if there
    are none. A piece is (rank, microbatch).

    Args:
        everywhere: ``Paths.taken`` of each rank.
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


__all__ = ["ForwardId", "Paths", "ReadLog", "Reads", "Watched", "first_to_differ", "outside_of_parts", "unwatched"]
