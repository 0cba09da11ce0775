"""Checks that all pieces of a batch take the same path through the model, if the path depends on values of rows.

A model may read a value of its batch and act on it: ``if (ids > 7).any()``, ``while h.norm() > 4``, a loop over the experts to
which some row was sent. On one device the rows of the whole batch decide. With data ranks and microbatches each piece decides
by its own rows. Often this does no harm: a model may skip a mask of ones, and an expert without rows does nothing. Sometimes it
makes a difference.

``ReadLogger`` logs the values that Python reads in a forward and that may depend on rows, by the model's line. It has two uses:

    before the first step     The trial of rows (runtime/coupling/trial.py) logs the numbers read in forwards of all rows and of
                              parts. If a number of all rows (a norm, a sum) lies outside of the range of the numbers of the
                              parts, then the parts may take one path and all rows together another: the rows are coupled.
    in every step             ``Paths`` compares the logs of the pieces. If the logs of two pieces differ, the rows of both run
                              together and apart, as before the first step. If the loss is the same, the line is harmless,
                              and is not compared again. Else the step ends in an error, on all ranks.

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
from meshwright.evaluation import StepMode
from meshwright.private import pytree
from meshwright.runtime.coupling.tensor_table import TensorTable, is_parameter, tensor_arguments
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.torch_functions import NUMBERS, SIZES, YES_OR_NO, is_fact, writes

# Functions whose results have a size that shows Python how many elements fulfil a condition.
AS_MANY_AS_FIT = frozenset("nonzero argwhere masked_select".split())
# Functions that act like an ``if`` when their condition is one number for all rows.
_SELECTS = frozenset("where masked_fill masked_fill_".split())
COMPARES = frozenset(
    "gt lt ge le eq ne greater less greater_equal less_equal not_equal __gt__ __lt__ __ge__ __le__ __eq__ __ne__".split()
)


ForwardId = tuple[int, int]
"""A forward in a step: (stage, microbatch)."""

PathsByForward = dict[ForwardId, dict[str, list[int]]]
"""Forward → line → for each read at this line, a number that identifies the path after the read."""

ForwardContext = Callable[[nn.Module, ForwardId], AbstractContextManager[None]]
"""(model, forward) → the context in which this forward runs."""


def no_context(model: nn.Module, forward_id: ForwardId) -> AbstractContextManager[None]:
    """No context: for a forward that is not watched."""
    return nullcontext()


@dataclass
class ReadLog:
    """The values that Python read in one forward.

    Attributes:
        paths: line → for each read at this line, a number that identifies the path after the read, including sizes.
        paths_without_sizes: as ``paths``, without sizes.
        numbers: line → for each number of the forward there (the number, the number with which it was compared). The second is
            None if Python read the first.
        counted: lines at which Python learnt how many elements a mask picked.
    """

    paths: dict[str, list[int]] = field(default_factory=dict)
    paths_without_sizes: dict[str, list[int]] = field(default_factory=dict)
    numbers: dict[str, list[tuple[float, Any]]] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)


class ReadLogger(FunctionMode):
    """Logs the values that Python reads of tensors that may depend on rows: of all tensors except parameters, buffers, and
    results of these alone.

    Args:
        numbers: whether to log numbers, too. They must be copied from the device.
        sizes: whether the sizes of results that follow the read of a number are part of the path, as for
            ``h[[i for i, y in enumerate(labels.tolist()) if y >= 0]]``. Only for forwards with equal numbers of rows.

    Attributes:
        log: the reads so far.
    """

    def __init__(self, *, numbers: bool = False, sizes: bool = False) -> None:
        super().__init__()
        self.log = ReadLog()
        self._numbers, self._sizes = numbers, sizes
        self._independent = TensorTable[bool]()  # tensors that do not depend on rows
        self._picked = TensorTable[bool]()  # tensors with a row for each element that a mask picked
        # After Python read a number: (its line, a hash of the functions called since, a hash of the sizes of their results).
        self._path: tuple[str, int, int] | None = None

    def may_be_recorded(self) -> bool:
        """See ``FunctionMode``. While this mode is on, no recorded program runs: the mode would not see its functions."""
        return True

    @contextmanager
    def on(self, model: nn.Module, forward_id: ForwardId = (0, 0)) -> Iterator[None]:
        """A context for one forward."""
        self._independent.note(model.buffers(), True)
        with self:
            yield
        self._end_path()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in YES_OR_NO or name in NUMBERS:
            result = func(*args, **kwargs)
            if not all(map(self._is_independent, tensor_arguments(args, kwargs))):
                self._read(result)
            return result
        if is_fact(func):
            result = func(*args, **kwargs)
            if self._picked and func in SIZES and args[0] in self._picked:
                self._read(result)
                self.log.counted.add(_line())
            return result
        result = func(*args, **kwargs)
        if self._path is not None:
            line, functions, sizes = self._path
            if self._sizes and isinstance(result, Tensor):
                sizes = hash((sizes, *result.shape)) & _MASK
            self._path = line, _hashed(functions, name), sizes
        self._follow(func, name, args, kwargs, result)
        return result

    def _follow(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Logs the values that a call reads of its arguments. Notes facts about its results."""
        if args and isinstance(args[0], Tensor) and not self._is_independent(args[0]):  # the usual case first
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
        if all(map(self._is_independent, tensor_arguments(args, kwargs))):
            self._independent.note(pytree.tree_leaves(result), True)
        elif args and isinstance(args[0], Tensor) and writes(func, args, kwargs):
            self._independent.forget(args[0])

    def _follow_picked(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Notes the results that have a row for each picked element, as an argument has."""
        counts = {t.shape[0] for t in tensor_arguments(args, kwargs) if t in self._picked}
        if counts:
            results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
            self._picked.note((t for t in results if t.dim() and t.shape[0] in counts), True)

    def _is_independent(self, t: Tensor) -> bool:
        """Whether a tensor does not depend on rows."""
        return t in self._independent or is_parameter(t)

    def _compare(self, x: Tensor, others: tuple[Any, ...]) -> None:
        """Logs a comparison of one number with another: Python or a ``torch.where`` may act on it. A comparison with zero is
        harmless: if it has one result for all parts, it has this result for their sum, too.

        Args:
            others: the other arguments of the comparison.
        """
        if not self._numbers or not others or x.numel() != 1 or x.is_complex():
            return
        bound = others[0]
        if isinstance(bound, Tensor):
            bound = float(bound) if bound.numel() == 1 and self._is_independent(bound) else 0
        if bound != 0:
            self.log.numbers.setdefault(_line(), []).append((float(x), bound))

    def _select(self, condition: Any) -> None:
        if self._numbers:
            return  # a trial reverses comparisons instead (bending.py)
        if isinstance(condition, Tensor) and not condition.dim() and not self._is_independent(condition):
            self._note(_line(), int(bool(condition)))

    def _read(self, result: Any) -> None:
        """Logs a value that Python read."""
        line = _line()
        if isinstance(result, bool):
            self._note(line, int(result))
            return
        if isinstance(result, float) and self._numbers:
            self.log.numbers.setdefault(line, []).append((result, None))
        self._end_path()
        self._path = line, 0, 0

    def _end_path(self) -> None:
        """Logs the path since Python last read a number."""
        if self._path is not None:
            self._note(*self._path)
        self._path = None

    def _note(self, line: str, path: int, sizes: int = 0) -> None:
        """Logs the path after a read at this line. ``sizes``: a hash of the sizes on it."""
        self.log.paths_without_sizes.setdefault(line, []).append(path)
        self.log.paths.setdefault(line, []).append((path + sizes) & _MASK)


def picks(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call picks elements by a mask: ``x[mask]``."""
    return name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool


def _line() -> str:
    """The model's line, without the folder: it may differ between machines."""
    return os.path.basename(model_line())


_MASK = 0xFFFFFFFF


def _hashed(before: int, name: str) -> int:
    """A hash of the functions called so far, and of one more function with the model's line that calls it.

    Args:
        before: the hash of the functions called so far.
    """
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
    """The first line at which a number of all rows lies outside of the range of the parts' numbers; empty if there is none.

    A number does not count if the number with which it is compared differs between all rows and parts. Then both grow with the
    number of rows (the sum of a mask, the number of elements): a comparison that has one result for all parts has the same
    result for all rows.
    """
    for line, numbers in of_all.numbers.items():
        numbers_of_parts = [part.numbers.get(line, []) for part in parts]
        if any(len(of_part) != len(numbers) for of_part in numbers_of_parts):
            continue  # a part took another path: the losses will show whether it matters
        for (number, bound), *of_parts in zip(numbers, *numbers_of_parts, strict=True):
            slack = 1e-9 * max(1.0, abs(number))
            smallest = min(x for x, _ in of_parts) - slack
            largest = max(x for x, _ in of_parts) + slack
            bounds_are_equal = all(bound_of_part == bound for _, bound_of_part in of_parts)
            if bounds_are_equal and not smallest <= number <= largest:
                return line
    return ""


# --- in steps ---------------------------------------------------------------------------------------------------------

SUMS = 5
"""How many sums over pieces show whether the logs of all pieces in one stage are equal."""


class Paths:
    """The paths that the pieces of a step took on this rank.

    Args:
        stages: the number of pipeline stages; 1 without a pipeline.

    Attributes:
        watching: whether this step is watched; equal on all ranks.
    """

    NO_PATHS: Hashable = frozenset()
    """The ``key`` of a step in which Python read no values."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        # (mode of the step, line), for lines at which differences are harmless
        self._harmless_lines: set[tuple[StepMode | None, str]] = set()
        # The modes in which the first step read no values.
        self._without_reads: set[StepMode | None] = set()
        self._logs: dict[ForwardId, ReadLog] = {}
        self._mode: StepMode | None = None
        self.watching = self._even = False
        self._weights: Sequence[float] = ()

    def begin(self, mode: StepMode, weights: Sequence[float], *, divided: bool, even: bool = False) -> None:
        """A step begins.

        Args:
            mode: of the step.
            weights: the weights of the microbatches. A microbatch without rows has weight 0, and its path does not count.
            divided: whether the rows of the step are divided into pieces.
            even: whether all pieces, on all ranks, have equal numbers of rows.
        """
        self._even = even
        self._mode = mode
        self._weights = weights
        self._logs = {}
        self.watching = divided and mode not in self._without_reads

    @contextmanager
    def watch_forward(self, model: nn.Module, forward_id: ForwardId) -> Iterator[None]:
        """A context for the forward of a piece."""
        if not self.watching or not self._weights[forward_id[1]]:
            yield
            return
        reads = ReadLogger(sizes=self._even)
        with reads.on(model, forward_id):
            yield
        self._logs[forward_id] = reads.log

    def sums(self) -> list[float]:
        """This rank's summands of the numbers that ``differ`` needs, ``SUMS`` for each stage."""
        sums = [0.0] * (SUMS * self.stages)
        for (stage, _), log in self._logs.items():
            paths = self._not_harmless(log)
            if paths:
                a, b = divmod(zlib.crc32(repr(sorted(paths.items())).encode()), 2**16)
            else:
                a = b = 0
            for i, x in enumerate((1.0, a, b, a * a, b * b)):
                sums[SUMS * stage + i] += x
        return sums

    def differ(self, sums: Sequence[float]) -> bool:
        """Whether pieces took different paths, by the sums over all ranks.

        For each stage the sums are n, Σa, Σb, Σa² and Σb² over its forwards; a and b are the halves of a hash of a log. All a
        are equal if and only if n·Σa² = (Σa)².
        """
        of_stages = [sums[i : i + SUMS] for i in range(0, len(sums), SUMS)]
        if not any(x for _, *of_logs in of_stages for x in of_logs):
            self._without_reads.add(self._mode)
        return any(n * aa != a * a or n * bb != b * b for n, a, b, aa, bb in of_stages)

    def by_forward(self) -> PathsByForward:
        """For each forward its paths at each line, without harmless lines."""
        return {forward_id: self._not_harmless(log) for forward_id, log in self._logs.items()}

    def key(self) -> Hashable:
        """The paths that this rank's pieces took, without sizes and without harmless lines, as a value to compare."""
        of_pieces: set[Hashable] = set()
        for (stage, _), log in self._logs.items():
            lines = sorted(log.paths_without_sizes.items())
            paths = tuple((line, *paths) for line, paths in lines if not self._is_harmless(line))
            if paths:
                of_pieces.add((stage, paths))
        return frozenset(of_pieces)

    def settle(self, lines: Iterable[str]) -> None:
        """Notes that different paths are harmless at these lines."""
        self._harmless_lines.update((self._mode, line) for line in lines)

    def _not_harmless(self, log: ReadLog) -> dict[str, list[int]]:
        """The paths at the lines that are not known to be harmless."""
        return {line: paths for line, paths in log.paths.items() if not self._is_harmless(line)}

    def _is_harmless(self, line: str) -> bool:
        return (self._mode, line) in self._harmless_lines


Piece = tuple[int, int]
"""(rank, microbatch)."""


def first_to_differ(paths_of_ranks: Sequence[PathsByForward]) -> tuple[Piece, Piece, list[str]] | None:
    """Two pieces that took different paths in one stage.

    Args:
        paths_of_ranks: ``Paths.by_forward`` of each rank.

    Returns:
        (piece, other piece, the lines at which their paths differ); None if all pieces took the same paths.
    """
    first_of_stage: dict[int, tuple[Piece, dict[str, list[int]]]] = {}
    for rank, by_forward in enumerate(paths_of_ranks):
        for (stage, microbatch), paths in sorted(by_forward.items()):
            piece = rank, microbatch
            first_piece, first_paths = first_of_stage.setdefault(stage, (piece, paths))
            if paths != first_paths:
                lines = [line for line in {**first_paths, **paths} if first_paths.get(line) != paths.get(line)]
                return first_piece, piece, lines
    return None


__all__ = [
    "ForwardContext",
    "ForwardId",
    "Paths",
    "ReadLog",
    "ReadLogger",
    "first_to_differ",
    "no_context",
    "outside_of_parts",
]
