"""``Timeline``: the schedule of a step, played: what each rank of the pipeline does when. Facts before ink.

of a plan alone      in work: 1 is the mean forward of a stage, a backward takes two; nothing is sent in no time
of a prediction      in seconds: what each action takes of compute, host and each axis's exposed communication

stage 0  F0 F1 ·· B0── F2 B1──          a line for each rank of the pipeline axis
stage 1  ·· F0 B0── F1 B1── …           what stands between slots is the bubble
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.recipe import Recipe
from meshwright.schedule import COMPUTE, Action, Schedule, make_schedule, most_in_flight
from meshwright.schedule import timeline as spans_of

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.clock import Spent
    from meshwright.prediction.play import Played

WORDS = {
    "F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights",
    "SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive",
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """A stretch of time in which a rank does one thing.

    Attributes:
        start, stop: in the unit of the timeline.
        what: forward, backward, backward of inputs, backward of weights, send, receive; or a phase of the step: begin, clip,
            optimizer.
        stage, microbatch: of an action of the schedule; -1 for a phase.
        parts: of its time, in the same unit: ``compute``, ``host``, and ``communication over tp`` for each axis. Empty where
            only the whole is known.
    """

    start: float
    stop: float
    what: str
    stage: int = -1
    microbatch: int = -1
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Transfer:
    """What a stage sends to another.

    Attributes:
        source, target: lines.
        start, stop: in the unit of the timeline.
        way: ``forward`` for values, ``backward`` for their gradients.
        bytes: -1 where it is not known.
    """

    source: int
    target: int
    start: float
    stop: float
    way: str
    microbatch: int
    bytes: int = -1


@dataclass(frozen=True)
class Line:
    """What the ranks of one place on the pipeline axis do, all of them alike.

    Attributes:
        stages: that live there; ``ranks``: all ranks of the place.
        in_flight: microbatches whose activations it holds at most.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    slots: tuple[Slot, ...]
    in_flight: int

    @property
    def busy(self) -> float:
        return sum(slot.stop - slot.start for slot in self.slots)


@dataclass(frozen=True)
class Timeline:
    """A step in time.

    Attributes:
        unit: ``work`` or ``seconds``.
        schedule: its name; ``microbatches``: of a step.
        length: from the first slot to the end of the last.
    """

    unit: str
    schedule: str
    microbatches: int
    length: float
    lines: tuple[Line, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def idle(self) -> float:
        """The share of the ranks' time in which they wait for other stages: the bubble."""
        whole = self.length * len(self.lines)
        return max(0.0, 1 - sum(line.busy for line in self.lines) / whole) if whole else 0.0


def timeline(recipe: Recipe, played: Played | None = None) -> Timeline:
    """The step of a recipe in time. ``played``: as a prediction has it, in seconds; default: the plan alone, in work."""
    schedule = _schedule(recipe)
    if played is not None:
        return _in_seconds(recipe, schedule, played)
    return _in_work(recipe, schedule)


def _schedule(recipe: Recipe) -> Schedule:
    """Without a pipeline, one stage on one rank: forwards and backwards in turn."""
    ranks, stages = (recipe.mesh.axis_size("pp"), len(recipe.stages)) if recipe.stages else (1, 1)
    return make_schedule(recipe.schedule if recipe.stages else "1f1b", ranks, stages, recipe.microbatches)


def _in_work(recipe: Recipe, schedule: Schedule) -> Timeline:
    work = [stage.work for stage in recipe.stages]
    mean = sum(work) / len(work) if sum(work) else 0
    spans = spans_of(schedule, lengths=[w / mean for w in work] if mean else ())
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    transfers = []
    for span in spans:
        action = span.action
        slots[span.rank].append(_slot(action, span.start, span.stop))
        if (other := _neighbour(recipe, action)) is not None:
            target = schedule.stage_rank[other]
            if target != span.rank:
                way = "forward" if action.kind == "F" else "backward"
                transfers.append(Transfer(span.rank, target, span.stop, span.stop, way, action.microbatch))
    return _timeline("work", recipe, schedule, slots, transfers)


def _neighbour(recipe: Recipe, action: Action) -> int | None:
    """The stage that takes what an action gives. A plan alone does not say which, if stages are skipped: the next one."""
    stages = recipe.stages
    if action.kind == "F" and action.stage + 1 < len(stages) and stages[action.stage].sends:
        return action.stage + 1
    if action.kind in ("B", "I") and action.stage > 0 and stages[action.stage - 1].sends:
        return action.stage - 1
    return None


def _in_seconds(recipe: Recipe, schedule: Schedule, played: Played) -> Timeline:
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    for rank, start, phase in played.phases:
        length = phase.spent.total.seconds
        if length > 0:
            slots[rank].append(_slot(phase.what, start, start + length, _parts(phase.spent)))
    transfers = [
        Transfer(
            sent.rank, recipe.stage_rank[sent.action.other], sent.start, sent.stop,
            "forward" if sent.action.kind == "SEND_F" else "backward", sent.action.microbatch, sent.nbytes,
        )
        for sent in played.sent if sent.action.other is not None
    ]  # fmt: skip
    return _timeline("seconds", recipe, schedule, slots, transfers)


def _slot(what: Action | str, start: float, stop: float, parts: Mapping[str, float] | None = None) -> Slot:
    if isinstance(what, Action):
        return Slot(start, stop, WORDS[what.kind], what.stage, what.microbatch, parts or {})
    return Slot(start, stop, "begin" if what.startswith("step") else what, parts=parts or {})


def _parts(spent: Spent) -> dict[str, float]:
    parts = {"compute": spent.device.seconds, "host": spent.host.seconds}
    parts |= {f"communication over {axis}": one.seconds for axis, one in spent.exposed.items()}
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _timeline(
    unit: str, recipe: Recipe, schedule: Schedule, slots: Sequence[Sequence[Slot]], transfers: Sequence[Transfer]
) -> Timeline:
    lines = []
    for rank, of_rank in enumerate(slots):
        stages = tuple(s for s, home in enumerate(schedule.stage_rank) if home == rank)
        ranks = recipe.stage_ranks_of(stages[0]) if recipe.stages else range(recipe.mesh.size)
        lines.append(Line(stages, tuple(ranks), tuple(of_rank), most_in_flight(schedule, rank)))
    length = max((slot.stop for line in lines for slot in line.slots), default=0.0)
    return Timeline(unit, recipe.schedule, recipe.microbatches, length, tuple(lines), tuple(transfers))


__all__ = ["COMPUTE", "Line", "Slot", "Timeline", "Transfer", "timeline"]
