"""``Attempt``: runs a few rows in one forward and in two parts, and compares the loss of all rows with those of the parts.

Each forward begins with the same state, and is undone. The parts draw the random numbers that the forward of all rows drew for
their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.code_state import CodeState
from meshwright.errors import OF_THE_RUN
from meshwright.evaluation import in_evaluation
from meshwright.generators import Generators
from meshwright.private import has_backward_hooks
from meshwright.runtime.coupling.attributes import VALUES, Name, differing, perturbed
from meshwright.runtime.coupling.paths import ReadLog, outside_of_parts
from meshwright.runtime.coupling.saved_tensors import without_hooks, written_after_saved
from meshwright.runtime.coupling.trial_forward import DrawnNumbers, GradientsAskedError, TrialForward
from meshwright.runtime.coupling.trial_state import Slot, restored_afterwards
from meshwright.runtime.rows.batch import doubled, reversed_rows
from meshwright.runtime.rows.containers import Left
from meshwright.runtime.rows.loss_weights import MEAN
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.autograd_functions import transformed_functions

COUPLED = "coupled"

# dtype → (relative tolerance for two ways to compute one loss; the largest tolerance, if the measured noise is larger).
# In float64 the first is close to rounding (about 1e-15): a maximum over all rows may couple them by only 1e-11.
_TOLERANCE = {torch.float64: (1e-12, 1e-7), torch.float32: (2e-5, 1e-3)}
_HALF = (2e-2, 2e-2)

Trial = Callable[[], AbstractContextManager[None]]
Losses = Callable[[list[Any], str, Trial, bool], "Results"]
Agreed = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class Forwards:
    """The forwards of a trial, and how ranks agree on results.

    Attributes:
        model: the model.
        random: the generators from which a forward may draw.
        code: what the model's code keeps outside of modules.
        changed: the buffers and parameters that a forward may write.
        losses: (pieces of a batch, how they combine, a context for each forward, whether it computes in float64) → the results,
            without the final state of modules.
        agreed: a number → (its minimum, its maximum) over all ranks.
        backward: whether the steps compute gradients.
        in_parts: whether a forward is run in stages or branches, which keep their autograd graphs.
    """

    model: nn.Module
    random: Generators
    code: CodeState
    changed: Sequence[Slot]
    losses: Losses
    agreed: Agreed
    backward: bool
    in_parts: bool

    def written(self) -> list[nn.Parameter]:
        """The parameters that a forward may write to."""
        slots = (getattr(module, name) for module, name in self.changed)
        return [t for t in slots if isinstance(t, nn.Parameter) and not t.is_meta]


@dataclass(frozen=True)
class ForwardSetting:
    """How the forwards of an attempt compute.

    Attributes:
        dtype: the dtype of the computation.
        on: the context that makes a forward compute in it.
        wide: whether buffers are cast to float64.
        gradients: the autograd context of a forward: no graph, or a graph (``graph_alone``, ``torch.enable_grad``).
    """

    dtype: torch.dtype
    on: Trial
    wide: bool
    gradients: Trial = torch.no_grad


class ForwardError(Exception):
    """The error of one rank in a forward, as text, on every rank."""


class NotFiniteError(Exception):
    """A loss of the trial is not finite: with perturbed weights, say."""


@dataclass
class Results:
    """The results of forwards of some pieces, one item for each piece.

    Attributes:
        losses: the losses.
        weights: the weights of the pieces in the mean.
        final_slots: the buffers and written parameters after the forward.
        reads: the values that Python read.
        left: what the forward has left in the batch.
        final_attributes: the plain attributes of modules that the forward changed, with their values after it.
    """

    losses: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    final_slots: list[list[Tensor]] = field(default_factory=list)
    reads: list[ReadLog] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    final_attributes: list[dict[Name, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ForwardOfAll:
    """A forward of all rows, which attempts may share: its results, once it has run, and the random numbers that it drew."""

    results: Results
    numbers: DrawnNumbers


class Attempt:
    """One comparison of all rows with two parts of them.

    Args:
        first: the number of rows in the first part; 0: about a half.
        of_all: the forward of all these rows in another attempt.

    Attributes:
        outside: the model's line at which a number of all rows lies outside of the range of those of the parts; or empty.
        left_differs: whether what the forward of all rows leaves in the batch is not what those of the parts leave.
    """

    def __init__(
        self,
        rows: Any,
        forwards: Forwards,
        computing: ForwardSetting,
        *,
        first: int = 0,
        of_all: ForwardOfAll | None = None,
    ) -> None:
        self._rows, self._count = rows, rows_of(rows)
        # Uneven, as even halves may be equal by chance.
        self._first = first or self._count // 2 - (self._count > 5)
        self.outside, self.left_differs = "", False
        self._forwards, self._computing = forwards, computing
        self._tolerance, self._largest = _TOLERANCE.get(computing.dtype, _HALF)
        of_all = of_all or ForwardOfAll(Results(), DrawnNumbers(self._count))
        self._of_all, self._numbers = of_all.results, of_all.numbers
        self._parts: dict[str, Results] = {}  # way → the results of the parts

    def compared(self, way: str) -> str:
        """``way``, if the losses of the parts combine in this way into that of all rows, within the tolerance of the dtype;
        else ``COUPLED``. Raises NotFiniteError."""
        self._without_gradients(partial(self._try, way))
        if not all(map(isfinite, (*self._of_all.losses, *self._parts[way].losses))):
            raise NotFiniteError
        return way if self._agrees(way, self._tolerance) else COUPLED

    def loss_of_all(self) -> float:
        """The loss of all rows."""
        self._without_gradients(self._try_all)
        return self._of_all.losses[0]

    def finite_together_alone(self, way: str) -> bool:
        """Whether the loss of all rows is finite, but the loss of a part is not."""
        self._without_gradients(partial(self._try, way))
        return all(map(isfinite, self._of_all.losses)) and not all(map(isfinite, self._parts[way].losses))

    def like(self, computing: ForwardSetting) -> Attempt:
        """An attempt with the same rows and random numbers that computes in another way."""
        of_all = ForwardOfAll(Results(), self._numbers)
        return Attempt(self._rows, self._forwards, computing, first=self._first, of_all=of_all)

    def of(self, rows: Any, on: Trial = nullcontext, *, first: int | None = None) -> Attempt:
        """An attempt with other rows, in a further context; with parts of the same sizes, or as ``first`` says."""
        computing = replace(self._computing, on=partial(_in_both, self._computing.on, on))
        return Attempt(rows, self._forwards, computing, first=self._first if first is None else first)

    @property
    def rows(self) -> Any:
        """The rows."""
        return self._rows

    def divided_elsewhere(self) -> Attempt | None:
        """This attempt with parts of other sizes, if there are any in which no part is a single row; else None."""
        sizes = {self._count // 2, self._first + 1, self._first - 1} - {self._first}
        first = min((size for size in sizes if 1 < size < self._count - 1), default=None)
        if first is None:
            return None
        of_all = ForwardOfAll(self._of_all, self._numbers)
        return Attempt(self._rows, self._forwards, self._computing, first=first, of_all=of_all)

    def weighs_nothing(self, way: str) -> bool:
        """Whether a part contributes nothing to the loss of all rows: all its labels are ignored, say."""
        parts = self._parts[way]
        return any(w * x == 0 for w, x in zip(parts.weights, parts.losses, strict=True))

    def compared_by_noise(self) -> str:
        """The first way tried before in which the parts combine within the measured noise; else ``COUPLED``."""
        noise = min(self._without_gradients(self._noise), self._largest)
        ways = (way for way in self._parts if self._agrees(way, max(noise, self._tolerance)))
        return next(ways, COUPLED)

    def written_in_single_row(self) -> tuple[bool, str]:
        """(whether a forward of one row writes to a tensor that is saved for the backward, while one of all rows does not; the
        line that saved it, as text).

        If torch must copy rows to make them contiguous, it saves the copy; a single row is contiguous, and is saved itself.
        """
        lines: list[set[str]] = []
        try:
            for span in ((0, self._count), (0, 1)):
                lines.append(set())
                trial = partial(self._trial_with_saved, TrialForward(self._numbers, *span), lines[-1])
                self._losses([take_rows(self._rows, *span)], MEAN, trial)
        except OF_THE_RUN:
            raise
        except (RuntimeError, ForwardError):  # torch does not show the saved tensors of this forward (torch.func)
            return False, ""
        lines_alone = sorted(lines[1] - lines[0])
        return bool(lines_alone), f" ({lines_alone[0]})" if lines_alone and lines_alone[0] else ""

    @contextmanager
    def _trial_with_saved(self, trial: TrialForward, lines: set[str]) -> Iterator[None]:
        with self._trial(trial, Results()), written_after_saved(lines):
            yield

    def has_backward_hooks(self) -> bool:
        """Whether modules have backward hooks, which may compute with what a forward left; the trial does not see them."""
        return any(map(has_backward_hooks, self._forwards.model.modules()))

    def counted(self) -> tuple[str, ...]:
        """The lines at which Python learnt how many elements a mask picked."""
        return tuple(sorted(self._of_all.reads[0].counted))

    def changes_state(self) -> bool:
        """Whether a forward changes the state of modules, so that the next may compute something else."""
        after = self._of_all.final_slots[0] if self._of_all.final_slots else []
        before = [local_tensor(getattr(*slot)).detach() for slot in self._forwards.changed]
        same = all(a.shape == b.shape and torch.equal(a.to(b.dtype), b) for a, b in zip(after, before, strict=True))
        return not same or bool(self._of_all.final_attributes[0])

    @property
    def writes_parameters(self) -> bool:
        """Whether a forward may write to a trained parameter on this rank."""
        return any(_is_trained(getattr(*slot)) for slot in self._forwards.changed)

    def drawn_parameters(self) -> list[str]:
        """The names of the trained parameters to which a forward writes random numbers: after a forward with others, their
        values are others."""
        slots, paths = self._forwards.changed, {module: path for path, module in self._forwards.model.named_modules()}
        other = self.of(self._rows, partial(_other_numbers, self._forwards.random))
        other.loss_of_all()
        values = zip(slots, self._of_all.final_slots[0], other._of_all.final_slots[0], strict=True)
        differ = [slot for slot, a, b in values if _is_trained(getattr(*slot)) and not _close(a, b, self._tolerance)]
        return [f"{paths[module]}.{name}".lstrip(".") for module, name in differ]

    def differing_attributes(self, way: str) -> dict[Name, str]:
        """The attributes that differ after a forward of all rows and one of a part, and how."""
        return differing(self._of_all.final_attributes[0], self._of_a_part(way))

    def _of_a_part(self, way: str) -> dict[Name, Any]:
        """The attributes after a forward of a part in which some differ from those of all rows; of any part if none do."""
        of_all, of_parts = self._of_all.final_attributes[0], self._parts[way].final_attributes
        return next((of_part for of_part in of_parts if differing(of_all, of_part)), of_parts[0])

    def computes_with(self, attributes: Mapping[Name, str], way: str, *, evaluating: bool = False) -> bool:
        """Whether the loss of the next forward depends on these attributes. ``evaluating``: of one in evaluation mode.

        Two forwards begin with different values: those after a forward of all rows; and those after a part if the shape is the
        same, else invented ones.
        """
        of_all, of_part = self._of_all.final_attributes[0], self._of_a_part(way)
        other = {
            n: of_part[n] if how == VALUES else perturbed(of_all[n])
            for n, how in attributes.items()
            if n in of_all and n in of_part
        }
        model = self._forwards.model
        mode = in_evaluation(model, {name for name, _ in model.named_modules()}) if evaluating else nullcontext()
        with mode:
            once = self._loss_after(of_all)
            again = None if once is None else self._loss_after({**of_all, **other})
        if once is None or not isfinite(once):
            return False
        # A forward that fails with other values computes with them, too.
        return again is None or not abs(once - again) <= self._tolerance * max(1.0, abs(once))

    def _loss_after(self, begin: Mapping[Name, Any]) -> float | None:
        """The loss of all rows in a forward that begins with these values of attributes; None if the forward fails, or has no
        loss."""
        trial = partial(self._trial, TrialForward(self._numbers, 0, self._count), Results(), begin)
        try:
            results: Results = self._without_gradients(partial(self._losses, [self._rows], MEAN, trial))
        except OF_THE_RUN:
            raise
        except Exception:  # of whatever type: the same on every rank
            return None
        return results.losses[0]

    def _try_all(self) -> None:
        if not self._of_all.losses:
            self._of_all = self._outcome([(0, self._count)], [self._rows], MEAN, self._numbers)

    def _try(self, way: str) -> None:
        self._try_all()
        spans = [(0, self._first), (self._first, self._count)]
        pieces = [take_rows(self._rows, *span) for span in spans]
        self._parts[way] = self._outcome(spans, pieces, way, self._numbers)

    def _noise(self) -> float:
        """8 times the relative difference of two losses that should be equal: of some rows, and of the same rows twice
        (unless the model compares single rows, or divides by their number and something else); or of all rows, and of all in
        reverse (unless their order matters). The smaller one."""
        count = self._count // 2
        once, numbers = take_rows(self._rows, 0, count), DrawnNumbers(count)
        twice = doubled(once, count)
        a = self._outcome([(0, count)], [once], MEAN, numbers).losses[0]
        b = self._outcome([(0, 2 * count)], [twice], MEAN, numbers).losses[0]
        noise = min(abs(b - a), abs(b - 2 * a)) / max(1.0, abs(a))
        loss, backwards = self._of_all.losses[0], reversed_rows(self._rows, self._count)
        try:
            other = self._outcome([(0, self._count)], [backwards], MEAN, DrawnNumbers(self._count)).losses[0]
        except OF_THE_RUN:
            raise
        except Exception:  # rows that must be in order: packed sequences, the longest first
            return 8 * noise
        return 8 * min(noise, abs(other - loss) / max(1.0, abs(loss)))

    def _outcome(self, spans: list[tuple[int, int]], pieces: list[Any], way: str, numbers: DrawnNumbers) -> Results:
        final = Results()
        trials = (self._trial(TrialForward(numbers, *span), final) for span in spans)
        results = self._losses(pieces, way, partial(next, trials))
        return replace(results, final_slots=final.final_slots, final_attributes=final.final_attributes)

    def _losses(self, pieces: list[Any], way: str, trial: Trial) -> Results:
        return self._forwards.losses(pieces, way, trial, self._computing.wide)

    @contextmanager
    def _trial(
        self, trial: TrialForward, results: Results, begin: Mapping[Name, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        """The context of one forward, whose final state is added to ``results``."""
        restored = restored_afterwards(
            self._forwards.model,
            self._forwards.random,
            self._forwards.code,
            self._forwards.changed,
            results.final_slots,
            results.final_attributes,
            begin=begin,
            wide=self._computing.wide,
        )
        with restored, self._computing.on(), trial:
            yield

    def _without_gradients(self, run: Callable[[], Any]) -> Any:
        with suppress(GradientsAskedError), self._computing.gradients():
            return run()
        # Not while the error is handled: before torch 2.13, a checkpoint that an error has ended keeps its hooks for saved
        # tensors on until the error's traceback is freed.
        with torch.enable_grad():
            return run()

    def _agrees(self, way: str, tolerance: float) -> bool:
        """Whether the results of the parts combine into those of all rows."""
        of_all, parts = self._of_all, self._parts[way]
        for slots in parts.final_slots:  # of each part: a maximum over all rows is that of some part
            if any(not _close(a, b, tolerance) for a, b in zip(of_all.final_slots[0], slots, strict=True)):
                return False  # a buffer after the forward (a running mean) depends on its rows
        self.outside = outside_of_parts(of_all.reads[0], parts.reads)
        self.left_differs = not of_all.left[0].is_joined(parts.left, _close_in_their_types)
        if self.outside or self.left_differs:
            return False
        together = sum(w * x for w, x in zip(parts.weights, parts.losses, strict=True))
        return abs(of_all.losses[0] - together) <= tolerance * max(1.0, abs(of_all.losses[0]))


@contextmanager
def _in_both(outer: Trial, inner: Trial) -> Iterator[None]:
    with outer(), inner():
        yield


@contextmanager
def _other_numbers(random: Generators) -> Iterator[None]:
    """A context for a forward that draws other random numbers than without it."""
    random.seed(0x5EED)
    yield


def _is_trained(slot: Tensor) -> bool:
    return isinstance(slot, nn.Parameter) and slot.requires_grad


@contextmanager
def graph_alone() -> Iterator[None]:
    """A context in which autograd keeps a graph without saved values."""

    def unpack(nothing: None) -> Tensor:
        raise GradientsAskedError

    hooks = saved_tensors_hooks(lambda t: None, unpack)
    with torch.enable_grad(), hooks, transformed_functions(partial(without_hooks, hooks)):
        yield


def _close_in_their_types(a: Tensor, b: Tensor) -> bool:
    """``_close`` for tensors of a batch, of which a trial may compute some in a wider type."""
    narrow, wide = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize), torch.promote_types(a.dtype, b.dtype)
    return _close(a.to(wide), b.to(wide), _TOLERANCE.get(narrow, _HALF)[0])


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))
