"""Does the loss of a batch follow from the losses of its pieces? Found out by trying, before the first step.

Data parallelism and microbatches give a rank some of the rows. For most models the loss of all rows is the mean over
pieces, weighed by rows or labels. Not for all: batch statistics, losses that compare rows with each other, sums. So a few
rows are run whole and in two parts, without gradients and without dropout, the parts with the random numbers that the
whole has drawn for their rows, and compared:

    mean       the whole is the weighed mean of the parts       each rank runs its rows
    sum        the whole is the sum of the parts                each rank runs its rows; losses are added
    ratio      the same as mean, for a mean that is divided     each rank runs its rows
               by another, of the mask (runtime/rows/loss_weights.py)
    coupled    neither, or the parts cannot be run              every rank runs all rows: right, though no faster

There is no backward. What hooks and Functions of the model's own make of gradients is tried in a forward (own_backward.py).
Whether the backward of a single row would find what it needs written over is seen from what the forward saves.

The trial computes in float64, at weights moved off their values (runtime/coupling/float64.py): at initial weights, in
the precision of the plan, a batch norm can look like rounding, and a loss that balances experts like a constant. It
leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.blame import line_of
from meshwright.names import few
from meshwright.runtime.coupling.attempt import (
    COUPLED,
    Attempt,
    Computing,
    Forwards,
    NotFiniteError,
    Trial,
    graph_alone,
)
from meshwright.runtime.coupling.attributes import VALUES
from meshwright.runtime.coupling.bent import Bent, bent, of_all_rows
from meshwright.runtime.coupling.float64 import wide
from meshwright.runtime.coupling.own_backward import line_across_rows
from meshwright.runtime.rows.batch import reversed_rows, rolled_rows
from meshwright.runtime.rows.loss_weights import MEAN, RATIO, SUM
from meshwright.runtime.rows.microbatches import rows_of, take_rows

MOST_ROWS = 8


@dataclass(frozen=True)
class Verdict:
    """What a trial came to.

    Attributes:
        kind: mean, sum or coupled.
        why: what ended the trial, with the model's line; empty if it did not fail.
        kept: attributes of modules that are other ones after a part of the rows.
        changes_state: whether a forward leaves modules otherwise than it finds them (a counter, an average): rows may combine
            otherwise in the next, of which a term of the loss is another.
        counted: lines at which Python is told how many elements a mask picked: of a piece's rows, and not of all.
    """

    kind: str
    why: str = ""
    kept: tuple[str, ...] = ()
    changes_state: bool = False
    counted: tuple[str, ...] = ()


# What an attempt comes to, the worst last.
_KINDS = (MEAN, SUM, RATIO, COUPLED)
_NOT_FINITE, _FAILED = 4, 5


def how_rows_combine(batch: Any, forwards: Forwards, dtype: torch.dtype, *, single: bool = False) -> Verdict:
    """How the rows of a batch combine into its loss; the same verdict on every rank.

    Args:
        batch: at least two rows; as many on every rank.
        dtype: what the model computes in.
        single: whether a piece may be a single row. Then one of the trial is: a dim of size 1 is another shape to a model
            (``squeeze``), and memory that is contiguous where it was not (``transpose(0, 1).contiguous()`` copies nothing).
    """
    agreed, first = forwards.agreed, int(single)
    rows = take_rows(batch, 0, min(rows_of(batch), MOST_ROWS))
    native = Computing(dtype, nullcontext, wide=False)
    for computing in (
        Computing(torch.float64, partial(wide, perturbed=True), wide=True),
        Computing(torch.float64, partial(wide, perturbed=False), wide=True),
        native,
    ):
        attempt = Attempt(rows, forwards, computing, first=first)
        outcome = _tried(attempt, forwards)
        if outcome.most < _NOT_FINITE:
            break
    if outcome.most >= _NOT_FINITE:
        return Verdict(COUPLED, outcome.why if outcome.most == _FAILED else "")
    kind = outcome.kind
    if kind != COUPLED and agreed(attempt.weighs_nothing(kind))[1]:
        # Rows that weigh nothing show nothing of what others do to them; backwards, they stand first.
        other = Attempt(reversed_rows(rows, rows_of(rows)), forwards, computing, first=first)
        kind = kind if _tried(other, forwards).kind == kind else COUPLED
    if kind != COUPLED and rows_of(rows) > 2:
        # Parts of which as many elements are masked make the whole by chance; divided elsewhere, they do not.
        rolled = rolled_rows(rows, rows_of(rows))
        other = attempt.divided_elsewhere() or Attempt(rolled, forwards, computing, first=first)
        kind = kind if _tried(other, forwards).kind == kind else COUPLED
    if kind == COUPLED:
        return Verdict(kind, _acts(attempt.outside))
    if (why := _acts_unseen(rows, kind, forwards, first)) is not None:
        return Verdict(COUPLED, why)
    if single:
        written, line = Attempt(rows, forwards, native, first=1).written_in_single_row()
        if agreed(written)[1]:
            why = f"in a single row it writes in place to what its backward needs, unlike in several{line}"
            return Verdict(COUPLED, why)
    verdict = _with_what_is_kept(kind, attempt, forwards)
    return replace(verdict, changes_state=bool(agreed(attempt.changes_state())[1]), counted=attempt.counted())


def _acts(line: str) -> str:
    return line and f"it acts on a number of all rows at {line}"


def _acts_unseen(rows: Any, kind: str, forwards: Forwards, first: int) -> str | None:
    """How the model acts on a number of all rows in a way that the losses do not show where they were tried (bent.py,
    own_backward.py); empty if this rank has not met it. None if it does not."""
    # Stages keep their graphs as they are. What does not go beside hooks on what a graph keeps is run with all that it keeps.
    for gradients in (torch.no_grad,) if forwards.fatal else (graph_alone, torch.enable_grad):
        seen: list[Bent] = []
        computing = Computing(torch.float64, partial(bent, forwards.model, seen), wide=True, gradients=gradients)
        attempt = Attempt(rows, forwards, computing, first=first)
        outcome = _tried(attempt, forwards)
        if outcome.most != _FAILED:
            break
    if outcome.most >= _NOT_FINITE:  # a forward that cannot be bent tells nothing
        return None
    whole, part, rest = seen[:3]
    if outcome.kind != kind:
        return _acts(next((whole.corners[i].line for i in of_all_rows(whole.corners, part.corners)), ""))
    line = line_across_rows(whole.gradients, (part.gradients, rest.gradients))
    if forwards.agreed(line is not None)[1]:
        return f"what its backward does at {line} follows from the gradients of all rows" if line else ""
    of_batch = of_all_rows(whole.corners_of_batch, part.corners_of_batch)
    if forwards.agreed(bool(of_batch))[1]:
        on = partial(bent, forwards.model, [], (), of_batch)
        if _tried(attempt.like(replace(computing, on=on)), forwards).kind != kind:
            return _acts(next((whole.corners_of_batch[i].line for i in of_batch), ""))
    compared = [i for i in of_all_rows(whole.compared, part.compared) if not whole.compared[i].read]
    if not forwards.agreed(bool(compared))[1]:
        return None
    turned = replace(computing, on=partial(bent, forwards.model, [], compared))
    changes = _changes_loss(attempt, attempt.like(turned), forwards)
    return _acts(next((whole.compared[i].line for i in compared), "")) if changes else None


def _changes_loss(attempt: Attempt, other: Attempt, forwards: Forwards) -> bool:
    """Whether the loss of all rows is another in another attempt, on some rank."""
    try:
        a, b = attempt.loss_of_all(), other.loss_of_all()
        changes = abs(a - b) > 1e-12 * max(1.0, abs(a))
    except forwards.fatal:
        raise
    except Exception:  # nothing follows from a forward that cannot be
        changes = False
    return bool(forwards.agreed(changes)[1])


@dataclass(frozen=True)
class _Found:
    """What an attempt came to, on the ranks where it came to least and most; and what ended it."""

    fewest: int
    most: int
    why: str = ""

    @property
    def kind(self) -> str:
        return _KINDS[self.most] if self.fewest == self.most < _NOT_FINITE else COUPLED


def _tried(attempt: Attempt, forwards: Forwards) -> _Found:
    """How rows combine in an attempt: the first way in which they do. Agreed on after each: every rank runs as many forwards,
    which have collectives."""
    outcome = _Found(_FAILED, _FAILED)
    ways: list[Callable[[], str]] = [partial(attempt.compared, way) for way in (MEAN, SUM, RATIO)]
    for compared in (*ways, attempt.compared_by_noise):
        why = outcome.why
        try:
            number = _KINDS.index(compared())
        except NotFiniteError:
            number = _NOT_FINITE
        except forwards.fatal:
            raise
        except Exception as error:  # rows that cannot be divided: a model that has the batch's size as a number
            cause = error.__cause__ or error  # the model's own error, not what a recording made of it
            number, why = _FAILED, _told(cause)
        outcome = _Found(*forwards.agreed(number), why)
        if outcome.most != _KINDS.index(COUPLED):
            break
    return outcome


def combine_as(way: str, rows: Any, first: int, forwards: Forwards) -> bool:
    """Whether the loss of all rows is what the first of them, and the rest, make in this way; the same on every rank.

    It is tried at the model's own weights, at which these rows took their paths, and at others, as what a path does may be
    behind a gate that is zero.
    """
    for perturbed in (False, True):
        computing = Computing(torch.float64, partial(wide, perturbed=perturbed), wide=True)
        attempt = Attempt(rows, forwards, computing, first=first)
        for compared in (partial(attempt.compared, way), attempt.compared_by_noise):
            try:
                fits = compared() == way
            except NotFiniteError:
                fits = perturbed  # other weights tell nothing then
            except forwards.fatal:
                raise
            except Exception:  # rows that cannot be run so
                fits = False
            fits = bool(forwards.agreed(fits)[0])
            if fits:
                break
        if not fits:
            return False
    return True


def finite_together_alone(way: str, rows: Any, first: int, forwards: Forwards) -> bool:
    """Whether all rows have a finite loss, and the first of them, or the rest, have none; the same on every rank."""
    attempt = Attempt(rows, forwards, Computing(torch.float64, partial(wide, perturbed=False), wide=True), first=first)
    try:
        together = attempt.finite_together_alone(way)
    except forwards.fatal:
        raise
    except Exception:  # rows that cannot be run so
        together = False
    return bool(forwards.agreed(together)[0])


def _with_what_is_kept(kind: str, attempt: Attempt, forwards: Forwards) -> Verdict:
    """The verdict on rows whose losses combine, by what they leave in attributes of modules."""
    kept = attempt.kept_otherwise(kind)
    names = tuple(f"{path}.{key}" if path else key for (path, key), how in kept.items() if how == VALUES)
    if not forwards.agreed(bool(kept))[1]:
        return Verdict(kind)
    if forwards.agreed(attempt.computes_with(kept, kind) or (bool(names) and attempt.has_backward_hooks()))[1]:
        of = f" ({', '.join(names[:3])})" if names else ""
        return Verdict(
            COUPLED,
            f"it computes with what earlier forwards left in attributes of its modules{of}, which follows from the rows",
        )
    return Verdict(kind, kept=names)


def _told(error: BaseException) -> str:
    """An error's type, its first line, and the model's line that it went through last."""
    text, line = f"{type(error).__name__}: {error}".split("\n", 1)[0], line_of(error)
    return f"{text} ({line})" if line else text


def notes(verdict: Verdict) -> list[str]:
    """What a person should know of it; none for the usual case."""
    if verdict.kind == COUPLED:
        return [_why_coupled(verdict)]
    said: list[str] = []
    if verdict.kept:
        said.append(
            f"{few(verdict.kept)}: what a forward "
            "leaves there follows from its rows, and after a step it is what this rank's first microbatch left. If it is to be "
            "that of the batch, make it a buffer: rows are then run together"
        )
    if verdict.counted:
        said.append(
            f"{few(verdict.counted)}: the model asks how many elements a mask picked. Each data rank and microbatch asks it of "
            "its own rows. If the model compares that with another number than zero, say rows: whole in the plan"
        )
    return said


def _why_coupled(verdict: Verdict) -> str:
    if verdict.why:
        return (
            f"this model's rows cannot be run apart: {verdict.why}: every data rank runs all rows at once, in one microbatch, "
            "which is right, and saves memory but no time"
        )
    return (
        "this model's loss couples the rows of a batch (batch statistics, rows compared with rows): "
        "every data rank runs all rows at once, which is right, and saves memory but no time; "
        "rows: split in the plan gives each its own rows instead"
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
