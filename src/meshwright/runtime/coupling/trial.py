"""The trial of rows: before the first step, tries how the losses of parts of a batch combine into the loss of the batch.

With data parallelism and microbatches a forward has only some of the rows. For most models the loss of all rows is the mean
over pieces, weighted by rows or labels. Not for all: there are batch statistics, losses that compare rows, and sums. So a few
rows run together and in two parts, without gradients and without dropout. The parts use the random numbers that the
forward of all rows drew for their rows. The losses are compared:

    mean       the loss of all rows is the weighted mean         each rank runs its rows
    sum        the loss of all rows is the sum                   each rank runs its rows; losses are added
    ratio      as mean, for a mean that is divided by another    each rank runs its rows
               mean, of the mask (runtime/rows/loss_weights.py)
    coupled    none of these, or the parts cannot run            every rank runs all rows: right, but not faster

There is no backward. A forward also tries the model's own hooks and Functions for gradients (custom_backward.py). Whether the
backward of a single row would fail, because the forward wrote to a saved tensor, is seen from what the forward saves.

The trial computes in float64, with perturbed weights (runtime/coupling/float64.py). At initial weights, in the precision of the
plan, a batch norm can look like rounding, and a loss that balances experts like a constant. The trial is undone afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.blame import is_ours, line_of
from meshwright.errors import OF_THE_RUN
from meshwright.names import few
from meshwright.runtime.coupling.attempt import (
    COUPLED,
    Attempt,
    ForwardError,
    Forwards,
    ForwardSetting,
    NotFiniteError,
    Trial,
    graph_alone,
)
from meshwright.runtime.coupling.attributes import VALUES
from meshwright.runtime.coupling.bending import BendingMode, bending, of_all_rows
from meshwright.runtime.coupling.custom_backward import line_across_rows
from meshwright.runtime.coupling.float64 import in_float64
from meshwright.runtime.coupling.other_integers import Alternating, other_integers
from meshwright.runtime.rows.batch import doubled, reversed_rows, rolled_rows
from meshwright.runtime.rows.loss_weights import MEAN, RATIO, SUM
from meshwright.runtime.rows.microbatches import rows_of, take_rows

MOST_ROWS = 8
ALL_ROWS = "every data rank runs all rows"
"""Each note on coupled rows contains these words."""


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    Attributes:
        kind: ``mean``, ``sum``, ``ratio`` or ``coupled``.
        why: why the rows are coupled, with the model's line; empty if the losses show it.
        attributes: attributes of modules that differ after a forward of a part of the rows.
        changes_state: whether a forward changes the state of modules (a counter, an average), so that rows may combine in
            another way in the next forward.
        counted: lines at which Python learns how many elements a mask picked: of the rows of a piece, not of all.
    """

    kind: str
    why: str = ""
    attributes: tuple[str, ...] = ()
    changes_state: bool = False
    counted: tuple[str, ...] = ()


# The outcomes of an attempt, the worst last.
_KINDS = (MEAN, SUM, RATIO, COUPLED)
_NOT_FINITE, _FAILED, _BROKEN = 4, 5, 6
"""The loss is not finite; the model's forward fails; a mistake of this package makes it fail."""


def how_rows_combine(batch: Any, forwards: Forwards, dtype: torch.dtype, *, single: bool = False) -> Verdict:
    """How the rows of a batch combine into its loss; the same verdict on every rank.

    Args:
        batch: at least two rows, with equal numbers on all ranks.
        dtype: the dtype in which the model computes.
        single: whether a piece of a step may be a single row. Then a part of the trial is one: a dim of size 1 may change the
            path of a model (``squeeze``), and may make memory contiguous (``transpose(0, 1).contiguous()`` copies nothing).
    """
    agreed, first = forwards.agreed, int(single)
    rows = take_rows(batch, 0, min(rows_of(batch), MOST_ROWS))
    native = ForwardSetting(dtype, nullcontext, wide=False)
    for computing in (
        _computing_in_float64(forwards, perturbed=True),
        _computing_in_float64(forwards, perturbed=False),
        native,
    ):
        attempt = Attempt(rows, forwards, computing, first=first)
        outcome = _tried(attempt, forwards)
        if outcome.most < _NOT_FINITE:
            break
    if outcome.most >= _NOT_FINITE:
        return Verdict(COUPLED, outcome.why if outcome.most >= _FAILED else "")
    kind = outcome.kind
    if kind != COUPLED and agreed(attempt.weighs_nothing(kind))[1]:
        # Rows without weight do not show the influence of others on them; in reversed order they come first.
        other = Attempt(reversed_rows(rows, rows_of(rows)), forwards, computing, first=first)
        kind = kind if _tried(other, forwards).kind == kind else COUPLED
    if kind != COUPLED and not _also_otherwise(kind, attempt, forwards):
        kind = COUPLED
    if kind == COUPLED:
        left_differs = agreed(attempt.left_differs)[1] and not attempt.outside
        return Verdict(kind, _LEFT if left_differs else _acts(attempt.outside))
    if (why := _acts_unseen(rows, kind, forwards, first)) is not None:
        return Verdict(COUPLED, why)
    if single:
        written, line = Attempt(rows, forwards, native, first=1).written_in_single_row()
        if agreed(written)[1]:
            why = f"in a single row it writes in place to what its backward needs, unlike in several{line}"
            return Verdict(COUPLED, why)
    if (why := _draws_parameters(attempt, forwards)) is not None:
        return Verdict(COUPLED, why)
    verdict = _with_attributes(kind, attempt, forwards)
    return replace(verdict, changes_state=bool(agreed(attempt.changes_state())[1]), counted=attempt.counted())


def _also_otherwise(kind: str, attempt: Attempt, forwards: Forwards) -> bool:
    """Whether rows combine in this way in parts of other sizes, too, and with other integers."""
    elsewhere = attempt
    # Parts with equal numbers of masked elements may add up by chance; parts of other sizes do not.
    if (count := rows_of(attempt.rows)) > 2:
        elsewhere = attempt.divided_elsewhere() or attempt.of(rolled_rows(attempt.rows, count))
    if (other := _with_other_integers(elsewhere, count)) is not None:
        outcome = _tried(other, forwards, (kind,))
        if outcome.most < _NOT_FINITE or outcome.most == _BROKEN:
            return outcome.kind == kind
    return elsewhere is attempt or _tried(elsewhere, forwards).kind == kind


def _with_other_integers(attempt: Attempt, count: int) -> Attempt | None:
    """This attempt with other integers; None if its batch has none. A few rows come twice, with different ones: the integers of
    few rows are alike by chance."""
    few = 2 * count <= MOST_ROWS
    others = other_integers(*((doubled(attempt.rows, count), 2 * count) if few else (attempt.rows, count)))
    return None if others is None else attempt.of(others, Alternating, first=0 if few else None)


_LEFT = "what it leaves in the batch (in a list, dict or object, or in place) does not follow from what parts of the rows leave"


def _acts(line: str) -> str:
    """The reason for a verdict, if the model acts on a number of all rows at this line; empty without a line."""
    return line and f"it acts on a number of all rows at {line}"


def _acts_unseen(rows: Any, kind: str, forwards: Forwards, first: int) -> str | None:
    """The reason, if the model acts on a number of all rows in a way that the compared losses do not show (bending.py,
    custom_backward.py), or if its forward fails with bent values; empty if only another rank saw it. None if the model does
    not."""
    # Stages keep their graphs themselves. A forward that fails with hooks on saved tensors runs with a full graph.
    has_graph = forwards.backward and not forwards.in_parts
    for gradients in (graph_alone, torch.enable_grad) if has_graph else (torch.no_grad,):
        seen: list[BendingMode] = []
        computing = ForwardSetting(
            torch.float64,
            partial(bending, forwards.model, seen, written=forwards.written()),
            wide=True,
            gradients=gradients,
        )
        attempt = Attempt(rows, forwards, computing, first=first)
        outcome = _tried(attempt, forwards)
        if outcome.most < _FAILED:
            break
    if outcome.most >= _NOT_FINITE:
        # It may act on a number of all rows or not: rows run together, which is right in both cases.
        return f"whether it acts on a number of all rows could not be tried ({outcome.why or 'a loss is not finite'})"
    of_all, of_first, of_rest = seen[:3]
    if outcome.kind != kind:
        return _acts(next((of_all.corners[i].line for i in of_all_rows(of_all.corners, of_first.corners)), ""))
    line = line_across_rows(of_all.backward_results, (of_first.backward_results, of_rest.backward_results))
    if forwards.agreed(line is not None)[1]:
        return f"what its backward does at {line} follows from the gradients of all rows" if line else ""
    of_batch = of_all_rows(of_all.corners_of_batch, of_first.corners_of_batch)
    if forwards.agreed(bool(of_batch))[1]:
        on = partial(bending, forwards.model, [], (), of_batch)
        if _tried(attempt.like(replace(computing, on=on)), forwards).kind != kind:
            return _acts(next((of_all.corners_of_batch[i].line for i in of_batch), ""))
    compared = [i for i in of_all_rows(of_all.compared, of_first.compared) if not of_all.compared[i].read]
    if not forwards.agreed(bool(compared))[1]:
        return None
    reversed_comparisons = replace(computing, on=partial(bending, forwards.model, [], compared))
    changes = _changes_loss(attempt, attempt.like(reversed_comparisons), forwards)
    return _acts(next((of_all.compared[i].line for i in compared), "")) if changes else None


def _draws_parameters(attempt: Attempt, forwards: Forwards) -> str | None:
    """The reason, if a forward writes random numbers to a trained parameter: data ranks that draw for their own rows would go
    on with other values of it. None if it does not; empty if only another rank saw it."""
    if not forwards.agreed(attempt.writes_parameters)[1]:
        return None
    names, failure = list[str](), ""
    try:
        names = attempt.drawn_parameters()
    except OF_THE_RUN:
        raise
    except Exception as error:
        failure = f"whether it writes random numbers to what is trained could not be tried ({error_text(error)})"
    if not forwards.agreed(bool(names or failure))[1]:
        return None
    return failure or (f"it writes random numbers to what is trained: {few(names)}" if names else "")


def _changes_loss(attempt: Attempt, other: Attempt, forwards: Forwards) -> bool:
    """Whether the loss of all rows differs between two attempts, on some rank, or the second forward fails."""
    try:
        a, b = attempt.loss_of_all(), other.loss_of_all()
        changes = not abs(a - b) <= 1e-12 * max(1.0, abs(a))
    except OF_THE_RUN:
        raise
    except Exception:  # what is different makes it fail
        changes = True
    return bool(forwards.agreed(changes)[1])


@dataclass(frozen=True)
class _Outcome:
    """The outcome of an attempt: the smallest and the largest number in ``_KINDS`` over ranks; and the error, as text."""

    fewest: int
    most: int
    why: str = ""

    @property
    def kind(self) -> str:
        return _KINDS[self.most] if self.fewest == self.most < _NOT_FINITE else COUPLED


def _tried(attempt: Attempt, forwards: Forwards, kinds: Sequence[str] = (MEAN, SUM, RATIO)) -> _Outcome:
    """How rows combine in an attempt: the first of these ways in which they do. Ranks agree after each way, as all of
    them must run the same forwards, which contain collectives."""
    outcome = _Outcome(_FAILED, _FAILED)
    ways: list[Callable[[], str]] = [partial(attempt.compared, way) for way in kinds]
    for compared in (*ways, attempt.compared_by_noise):
        why = outcome.why
        try:
            number = _KINDS.index(compared())
        except NotFiniteError:
            number = _NOT_FINITE
        except OF_THE_RUN:
            raise
        except Exception as error:  # rows that cannot be divided: a model that contains the batch size as a number
            number, why = _BROKEN if is_ours(error) else _FAILED, error_text(error)
        outcome = _Outcome(*forwards.agreed(number), why)
        if outcome.most != _KINDS.index(COUPLED):
            break
    return outcome


def _computing_in_float64(forwards: Forwards, *, perturbed: bool) -> ForwardSetting:
    """How forwards compute in float64. ``perturbed``: whether parameters have slightly changed values."""
    return ForwardSetting(
        torch.float64, partial(in_float64, perturbed=perturbed, written=forwards.written()), wide=True
    )


def combine_as(way: str, rows: Any, first: int, forwards: Forwards) -> bool:
    """Whether the losses of the first rows and of the rest combine in this way into the loss of all rows; the same on every
    rank.

    It is tried with the model's own weights, with which these rows took their paths; and with perturbed weights, as the effect
    of a path may be multiplied by a gate that is zero.
    """
    for perturbed in (False, True):
        attempt = Attempt(rows, forwards, _computing_in_float64(forwards, perturbed=perturbed), first=first)
        for compared in (partial(attempt.compared, way), attempt.compared_by_noise):
            try:
                fits = compared() == way
            except NotFiniteError:
                fits = perturbed  # with perturbed weights this says nothing
            except OF_THE_RUN:
                raise
            except Exception:  # the rows cannot run apart
                fits = False
            fits = bool(forwards.agreed(fits)[0])
            if fits:
                break
        if not fits:
            return False
    return True


def finite_together_alone(way: str, rows: Any, first: int, forwards: Forwards) -> bool:
    """Whether the loss of all rows is finite, but that of the first rows or of the rest is not; the same on every rank."""
    attempt = Attempt(rows, forwards, _computing_in_float64(forwards, perturbed=False), first=first)
    try:
        together = attempt.finite_together_alone(way)
    except OF_THE_RUN:
        raise
    except Exception:  # the rows cannot run apart
        together = False
    return bool(forwards.agreed(together)[0])


def _with_attributes(kind: str, attempt: Attempt, forwards: Forwards) -> Verdict:
    """The verdict on rows whose losses combine, by the attributes of modules that their forwards leave."""
    differing = attempt.differing_attributes(kind)
    names = tuple(f"{path}.{key}" if path else key for (path, key), how in differing.items() if how == VALUES)
    if not forwards.agreed(bool(differing))[1]:
        return Verdict(kind)
    computing = attempt.computes_with(differing, kind) or (bool(names) and attempt.has_backward_hooks())
    # In evaluation the model may take what training left (a running mean in an attribute).
    if forwards.agreed(computing)[1] or (
        forwards.model.training and forwards.agreed(attempt.computes_with(differing, kind, evaluating=True))[1]
    ):
        which = f" ({', '.join(names[:3])})" if names else ""
        return Verdict(
            COUPLED,
            f"it computes with attributes of its modules{which} that earlier forwards set, and that depend on the rows",
        )
    return Verdict(kind, attributes=names)


def error_text(error: BaseException) -> str:
    """The type of an error, its first line, and the model's line at which it was raised."""
    if isinstance(error, ForwardError):
        return str(error)
    error = error.__cause__ or error  # the model's own error, not the error of a recording around it
    text, line = f"{type(error).__name__}: {error}".split("\n", 1)[0], line_of(error)
    return f"{text} ({line})" if line else text


def notes(verdict: Verdict) -> list[str]:
    """The notes for a person; none in the usual case."""
    if verdict.kind == COUPLED:
        return [_why_coupled(verdict)]
    texts: list[str] = []
    if verdict.attributes:
        texts.append(
            f"{few(verdict.attributes)}: the value that a forward "
            "leaves there depends on its rows; after a step it is the value of this rank's first microbatch. If it should be "
            "the value of the whole batch, make it a buffer: then rows run together"
        )
    if verdict.counted:
        texts.append(
            f"{few(verdict.counted)}: the model asks how many elements a mask picked. Each data rank and microbatch counts "
            "only its own rows. If the model compares the count with a number other than zero, set rows: whole in the plan"
        )
    return texts


def _why_coupled(verdict: Verdict) -> str:
    """The note for coupled rows."""
    if verdict.why:
        return (
            f"this model's rows cannot be run apart: {verdict.why}. So {ALL_ROWS}, in one microbatch: "
            "the results are right; it saves memory but no time"
        )
    return (
        "this model's loss couples the rows of a batch (batch statistics, rows compared with rows): "
        f"{ALL_ROWS}: the results are right; it saves memory but no time. "
        "With rows: split in the plan each rank runs its own rows"
    )


__all__ = [
    "COUPLED",
    "MEAN",
    "RATIO",
    "SUM",
    "Forwards",
    "Trial",
    "Verdict",
    "combine_as",
    "finite_together_alone",
    "how_rows_combine",
    "notes",
]
