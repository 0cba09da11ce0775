"""``play``: the seconds of a step, from the seconds of each action of each rank of the pipeline.

Each rank runs the actions of its schedule in order, each as soon as its inputs have arrived. It is the schedule of the run,
with the run's transfers (``meshwright.schedule``).

    arrival of a send    its start + seconds of the transfer
    start of an action   max(end of the rank's previous action, arrivals of its inputs)
    bubble               seconds in which a rank waits for other ranks

Ranks that share the cores of one machine cannot all compute at the same time: T ≥ max(T∞, T₁ / cores) (Brent: The parallel
evaluation of general arithmetic expressions, JACM 1974).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.hardware.profile import Estimate
from meshwright.prediction.clock import Phase
from meshwright.schedule import Action, Span

Transfer = Callable[[int, int, int], Estimate]
"""(stage that sends, stage that receives, bytes) → seconds"""


@dataclass(frozen=True)
class PlayedStep:
    """A step in time. All times are seconds since its begin; ranks are ranks of the pipeline axis.

    Attributes:
        spans: start and end of each action of each rank.
        ends: rank → end of its step.
        waits: rank → seconds in which it waits for other ranks.
        phases: each action and phase of each rank, with its start and cost.
        sent: each send.
    """

    spans: tuple[Span, ...]
    ends: Mapping[int, float]
    waits: Mapping[int, float]
    phases: tuple[PlacedAction, ...] = ()
    sent: tuple[PlayedSend, ...] = ()


class PlacedAction(NamedTuple):
    """An action or phase of a rank of the pipeline axis, and its start in seconds."""

    rank: int
    start: float
    phase: Phase


class PlayedSend(NamedTuple):
    """A send: its action, the rank that sends, its start and its arrival in seconds, and its bytes."""

    action: Action
    rank: int
    start: float
    stop: float
    nbytes: int


def play(ranks: Mapping[int, Sequence[Phase]], transfer: Transfer) -> PlayedStep:
    """Computes when each action and phase begins and ends.

    Args:
        ranks: rank of the pipeline axis → its actions and phases in order.
        transfer: seconds of a send.

    Raises:
        ValueError: ranks wait for each other. The schedule of a run has no such deadlock.
    """
    clocks = dict.fromkeys(ranks, 0.0)
    waits = dict.fromkeys(ranks, 0.0)
    remaining = {rank: list(phases) for rank, phases in ranks.items()}
    arrivals: dict[tuple[int, str, int, int], float] = {}
    needs: dict[tuple[int, str, int], list[tuple[int, str, int, int]]] = {}
    spans: list[Span] = []
    placed: list[PlacedAction] = []
    sent: list[PlayedSend] = []
    while any(remaining.values()):
        progressed = False
        for rank, phases in remaining.items():
            while phases:
                ready = _ready(phases[0].label, arrivals, needs)
                if ready is None:
                    break
                progressed, phase = True, phases.pop(0)
                start = max(clocks[rank], ready)
                waits[rank] += start - clocks[rank]
                clocks[rank] = start + phase.spent.total.seconds
                placed.append(PlacedAction(rank, start, phase))
                if isinstance(phase.label, Action):
                    spans.append(Span(rank, start, clocks[rank], phase.label))
                    sent += _send(phase, rank, start, transfer, arrivals)
        if not progressed:
            raise ValueError(f"ranks wait for each other: {[str(p[0].label) for p in remaining.values() if p]}")
    return PlayedStep(tuple(spans), clocks, waits, tuple(placed), tuple(sent))


def _ready(
    label: Action | str,
    arrivals: Mapping[tuple[int, str, int, int], float],
    needs: dict[tuple[int, str, int], list[tuple[int, str, int, int]]],
) -> float | None:
    """The time at which every input of an action has arrived, in seconds; None if an input has not been sent yet."""
    if not isinstance(label, Action):
        return 0.0
    if label.kind.startswith("RECV"):
        assert label.other is not None
        kind = label.kind[-1]
        key = (label.other, kind, label.microbatch, label.stage)
        needs.setdefault((label.stage, kind, label.microbatch), []).append(key)
        return 0.0  # a receive only posts a buffer; the action that uses it waits
    kind = "B" if label.kind in ("B", "I") else label.kind
    inputs = needs.get((label.stage, kind, label.microbatch), [])
    if any(key not in arrivals for key in inputs):
        return None
    return max((arrivals[key] for key in inputs), default=0.0)


def _send(
    phase: Phase, rank: int, start: float, transfer: Transfer, arrivals: dict[tuple[int, str, int, int], float]
) -> Iterator[PlayedSend]:
    """The send of a phase, if it is one. Adds its arrival to ``arrivals``."""
    action = phase.label
    assert isinstance(action, Action)
    if action.kind.startswith("SEND") and action.other is not None:
        stop = start + transfer(action.stage, action.other, phase.sends).seconds
        arrivals[action.stage, action.kind[-1], action.microbatch, action.other] = stop
        yield PlayedSend(action, rank, start, stop, phase.sends)
