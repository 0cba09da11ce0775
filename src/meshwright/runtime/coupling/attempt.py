"""``Attempt``: a few rows in one forward, and in two parts: do the losses of the parts make that of the whole?

Each forward begins with the same state and leaves none; the parts draw the random numbers that the whole drew for their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.generators import Generators
from meshwright.private import has_backward_hooks
from meshwright.runtime.coupling.attributes import VALUES, Name, differing, moved
from meshwright.runtime.coupling.paths import Found, outside_of_parts
from meshwright.runtime.coupling.saved import without_hooks, written_after_saved
from meshwright.runtime.coupling.trial_forward import DrawnNumbers, GradientsAskedError, TrialForward
from meshwright.runtime.coupling.untouched import Slot, untouched
from meshwright.runtime.rows.batch import doubled
from meshwright.runtime.rows.loss_weights import MEAN
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.autograd_functions import transformed_functions

COUPLED = "coupled"

# By how much two ways to the same loss may differ, of the loss, by the type that it is computed in; and by how much at
# most, if measured noise is larger. In float64 the first is near to rounding (1e-15, as models go): a maximum over all
# rows may couple them by 1e-11.
_TOLERANCE = {torch.float64: (1e-12, 1e-7), torch.float32: (2e-5, 1e-3)}
_HALF = (2e-2, 2e-2)

Trial = Callable[[], AbstractContextManager[None]]
Losses = Callable[[list[Any], str, Trial], tuple[list[float], list[float], list[Found]]]
Agreed = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class Forwards:
    """What a trial runs, and how ranks agree on what came of it.

    Attributes:
        model: whose forwards are tried.
        random: the generators that a forward may draw from.
        changed: what a forward may change, buffers, parameters that it writes: by where its module keeps it.
        losses: pieces of a batch, how they combine, and a context for each forward → (the loss of each piece, what it is
            multiplied by, what was read of it).
        agreed: a number → the smallest and the largest of all ranks.
        fatal: errors that come up on one rank while others wait for what it would send: no agreement can follow.
    """

    model: nn.Module
    random: Generators
    changed: Sequence[Slot]
    losses: Losses
    agreed: Agreed
    fatal: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Computing:
    """The type that an attempt computes in, and what makes it so.

    Attributes:
        gradients: what autograd does in its forwards: nothing; or it keeps a graph (``graph_alone``, ``torch.enable_grad``).
    """

    dtype: torch.dtype
    on: Trial
    wide: bool
    gradients: Trial = torch.no_grad


class NotFiniteError(Exception):
    """A loss of the trial is not finite: at weights moved off their values, say."""


@dataclass
class Outcome:
    """What came of forwards of some pieces."""

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of the pieces, in their mean
    left: list[list[Tensor]] = field(default_factory=list)  # what each made of what it may change
    reads: list[Found] = field(default_factory=list)  # what each read of its rows
    attributes: list[dict[Name, Any]] = field(default_factory=list)  # plain ones of modules, that each changed


@dataclass(frozen=True)
class Whole:
    """A forward of all rows, which attempts may share: what came of it, once it has run, and the numbers that it drew."""

    outcome: Outcome
    numbers: DrawnNumbers


class Attempt:
    """One comparison of the whole with its parts.

    Args:
        first: how many rows the first part has; 0: about a half.
        whole: of these rows, from another attempt.
    """

    def __init__(
        self, rows: Any, forwards: Forwards, computing: Computing, *, first: int = 0, whole: Whole | None = None
    ) -> None:
        self._rows, self._count = rows, rows_of(rows)
        # Uneven, as even halves may happen to be alike.
        self._first = first or self._count // 2 - (self._count > 5)
        self.outside = ""  # the line of a number of all rows that lies outside of those of the parts
        self._forwards, self._computing = forwards, computing
        self._tolerance, self._largest = _TOLERANCE.get(computing.dtype, _HALF)
        whole = whole or Whole(Outcome(), DrawnNumbers(self._count))
        self._whole, self._numbers, self._parts = whole.outcome, whole.numbers, dict[str, Outcome]()

    def compared(self, way: str) -> str:
        """The way, if the parts make the whole in it, by the tolerance of the type; else coupled. Raises NotFiniteError."""
        self._without_gradients(partial(self._try, way))
        if not all(map(isfinite, (*self._whole.losses, *self._parts[way].losses))):
            raise NotFiniteError
        return way if self._agrees(way, self._tolerance) else COUPLED

    def loss_of_all(self) -> float:
        """The loss of all rows."""
        self._without_gradients(self._try_whole)
        return self._whole.losses[0]

    def finite_together_alone(self, way: str) -> bool:
        """Whether the loss of all rows is finite, and that of a part is not."""
        self._without_gradients(partial(self._try, way))
        return all(map(isfinite, self._whole.losses)) and not all(map(isfinite, self._parts[way].losses))

    def like(self, computing: Computing) -> Attempt:
        """The same rows with the same random numbers, computed otherwise."""
        whole = Whole(Outcome(), self._numbers)
        return Attempt(self._rows, self._forwards, computing, first=self._first, whole=whole)

    def divided_elsewhere(self) -> Attempt | None:
        """The same comparison with rows divided at another place, if there is one that leaves no single row."""
        places = {self._count // 2, self._first + 1, self._first - 1} - {self._first}
        place = min((p for p in places if 1 < p < self._count - 1), default=None)
        if place is None:
            return None
        whole = Whole(self._whole, self._numbers)
        return Attempt(self._rows, self._forwards, self._computing, first=place, whole=whole)

    def weighs_nothing(self, way: str) -> bool:
        """Whether a part adds nothing to the loss of all rows: its labels are all ignored, say."""
        parts = self._parts[way]
        return any(w * x == 0 for w, x in zip(parts.weights, parts.losses, strict=True))

    def compared_by_noise(self) -> str:
        """The same, if what seemed coupled may be noise, with that measured."""
        noise = min(self._without_gradients(self._noise), self._largest)
        ways = (way for way in self._parts if self._agrees(way, max(noise, self._tolerance)))
        return next(ways, COUPLED)

    def written_in_single_row(self) -> tuple[bool, str]:
        """Whether a forward of one row writes to what it has saved for the backward, and one of all rows does not; and where
        it was saved. Torch saves a copy of rows that it has to lay out anew, and a single row is saved itself."""
        lines: list[set[str]] = []
        try:
            for span in ((0, self._count), (0, 1)):
                lines.append(set())
                trial = partial(self._trial_with_saved, TrialForward(self._numbers, *span), lines[-1])
                self._forwards.losses([take_rows(self._rows, *span)], MEAN, trial)
        except self._forwards.fatal:
            raise
        except RuntimeError:  # a forward of which torch does not tell what is saved (torch.func)
            return False, ""
        lines_alone = sorted(lines[1] - lines[0])
        return bool(lines_alone), f" ({lines_alone[0]})" if lines_alone and lines_alone[0] else ""

    @contextmanager
    def _trial_with_saved(self, trial: TrialForward, lines: set[str]) -> Iterator[None]:
        with self._trial(trial, Outcome()), written_after_saved(lines):
            yield

    def has_backward_hooks(self) -> bool:
        """Whether something computes in a backward, with what a forward left, which the trial does not see."""
        return any(map(has_backward_hooks, self._forwards.model.modules()))

    def counted(self) -> tuple[str, ...]:
        """The lines at which Python was told how many elements a mask picked."""
        return tuple(sorted(self._whole.reads[0].counted))

    def changes_state(self) -> bool:
        """Whether a forward leaves modules otherwise than it finds them: the next may compute something else."""
        left = self._whole.left[0] if self._whole.left else []
        before = [local_tensor(getattr(*slot)).detach() for slot in self._forwards.changed]
        same = all(a.shape == b.shape and torch.equal(a.to(b.dtype), b) for a, b in zip(left, before, strict=True))
        return not same or bool(self._whole.attributes[0])

    def kept_otherwise(self, way: str) -> dict[Name, str]:
        """Attributes that a forward of all rows leaves otherwise than one of the first part."""
        return differing(self._whole.attributes[0], self._parts[way].attributes[0])

    def computes_with(self, kept: Mapping[Name, str], way: str) -> bool:
        """Whether the next forward computes with attributes that are kept: it begins with those of all rows, and with the
        part's, if they have the same shape, or else with other values in them."""
        whole, part = self._whole.attributes[0], self._parts[way].attributes[0]
        other = {
            n: part[n] if how == VALUES else moved(whole[n]) for n, how in kept.items() if n in whole and n in part
        }
        losses = []
        try:
            for begin in (whole, {**whole, **other}):
                losses.append(self._without_gradients(partial(self._loss_after, begin)))
        except self._forwards.fatal:
            raise
        except Exception:  # a forward that cannot be followed by another
            return False
        return all(map(isfinite, losses)) and abs(losses[0] - losses[1]) > self._tolerance * max(1.0, abs(losses[0]))

    def _loss_after(self, begin: Mapping[Name, Any]) -> float:
        """The loss of all rows in a forward that begins with other attributes."""
        trial = partial(self._trial, TrialForward(self._numbers, 0, self._count), Outcome(), begin)
        return self._forwards.losses([self._rows], MEAN, trial)[0][0]

    def _try_whole(self) -> None:
        if not self._whole.losses:
            self._whole = self._outcome([(0, self._count)], [self._rows], MEAN, self._numbers)

    def _try(self, way: str) -> None:
        self._try_whole()
        spans = [(0, self._first), (self._first, self._count)]
        pieces = [take_rows(self._rows, *span) for span in spans]
        self._parts[way] = self._outcome(spans, pieces, way, self._numbers)

    def _noise(self) -> float:
        """By how much a loss differs, of itself, for the same rows once and twice: rounding alone, for a model whose rows
        do not meet one by one."""
        count = self._count // 2
        once, numbers = take_rows(self._rows, 0, count), DrawnNumbers(count)
        twice = doubled(once, count)
        a = self._outcome([(0, count)], [once], MEAN, numbers).losses[0]
        b = self._outcome([(0, 2 * count)], [twice], MEAN, numbers).losses[0]
        return 8 * min(abs(b - a), abs(b - 2 * a)) / max(1.0, abs(a))

    def _outcome(self, spans: list[tuple[int, int]], pieces: list[Any], way: str, numbers: DrawnNumbers) -> Outcome:
        outcome = Outcome()
        trials = (self._trial(TrialForward(numbers, *span), outcome) for span in spans)
        outcome.losses, outcome.weights, outcome.reads = self._forwards.losses(pieces, way, partial(next, trials))
        return outcome

    @contextmanager
    def _trial(
        self, trial: TrialForward, found: Outcome, begin: Mapping[Name, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        of, left, attributes, is_wide = self._forwards, found.left, found.attributes, self._computing.wide
        with (
            untouched(of.model, of.random, of.changed, left, attributes, begin=begin, wide=is_wide),
            self._computing.on(),
            trial,
        ):
            yield

    def _without_gradients(self, run: Callable[[], Any]) -> Any:
        try:
            with self._computing.gradients():
                return run()
        except GradientsAskedError:
            with torch.enable_grad():
                return run()

    def _agrees(self, way: str, tolerance: float) -> bool:
        """Whether the parts make the whole."""
        whole, parts = self._whole, self._parts[way]
        if any(not _alike(a, b, tolerance) for a, b in zip(whole.left[0], parts.left[0], strict=True)):
            return False  # what a forward leaves in a buffer, a running mean, follows from the rows that it sees
        self.outside = outside_of_parts(whole.reads[0], parts.reads)
        if self.outside:
            return False
        together = sum(w * x for w, x in zip(parts.weights, parts.losses, strict=True))
        return abs(whole.losses[0] - together) <= tolerance * max(1.0, abs(whole.losses[0]))


@contextmanager
def graph_alone() -> Iterator[None]:
    """Autograd keeps a graph, without values."""

    def asked(nothing: None) -> Tensor:
        raise GradientsAskedError

    hooks = saved_tensors_hooks(lambda t: None, asked)
    with torch.enable_grad(), hooks, transformed_functions(partial(without_hooks, hooks)):
        yield


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))
