"""``Timeline``: a step in time: the actions of each rank of the pipeline axis, with begin and end.

from a plan alone      in units of work: a mean forward of a stage takes 1, a backward 2, a transfer no time
from a prediction      in seconds, with the parts of each action: compute, host, exposed communication over each axis
from a run             in seconds: the measured begin and end of each action, transfer and collective (``Job.observe``)

stage 0  F0 F1 ·· B0── F2 B1──          a line for each rank of the pipeline axis
stage 1  ·· F0 B0── F1 B1── …           the time between slots is the bubble
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.draw.plain import from_plain, to_plain
from meshwright.recipe import Recipe
from meshwright.schedule import COMPUTE, Action, Schedule, make_schedule, most_in_flight
from meshwright.schedule import timeline as spans_of

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.clock import PhaseSeconds
    from meshwright.prediction.play import PlayedStep
    from meshwright.runtime.observed import Collective, RankTimes

WORDS = {
    "F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights",
    "SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive",
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """An interval in which a rank runs one action or phase.

    Attributes:
        start, stop: in the unit of the timeline.
        what: forward, backward, backward of inputs, backward of weights, send, receive; or a phase of the step: begin, end,
            clip, agree (on loss and norm), optimizer.
        stage, microbatch: of an action; -1 for a phase.
        parts: ``compute``, ``host``, and ``communication over tp`` for each axis → time. Empty if only the sum is known.
    """

    start: float
    stop: float
    what: str
    stage: int = -1
    microbatch: int = -1
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Transfer:
    """A transfer from one stage to another.

    Attributes:
        source, target: numbers of the lines.
        start, stop: in the unit of the timeline.
        way: ``forward`` for values, ``backward`` for their gradients.
        microbatch: whose values are sent.
        bytes: size; -1 if it is not known.
    """

    source: int
    target: int
    start: float
    stop: float
    way: str
    microbatch: int
    bytes: int = -1


@dataclass(frozen=True)
class Exchange:
    """A measured collective.

    Attributes:
        line: number of the rank's line.
        axis: the axes of its group, joined by dots.
        kind: all_reduce, all_gather, …
        start, stop: in the unit of the timeline.
        bytes: size of the input or the output, whichever is larger.
    """

    line: int
    axis: str
    kind: str
    start: float
    stop: float
    bytes: int


@dataclass(frozen=True)
class PipelineLane:
    """The actions of the ranks with one index on the pipeline axis.

    Attributes:
        stages: that these ranks run.
        ranks: all of them.
        slots: in order of time.
        in_flight: largest number of microbatches whose activations they hold at once.
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
        schedule: its name.
        microbatches: number in a step.
        length: from the begin of the first slot to the end of the last.
        lines: one for each index of the pipeline axis.
        transfers: between stages.
        exchanges: collectives; known for a measured step only.
    """

    unit: str
    schedule: str
    microbatches: int
    length: float
    lines: tuple[PipelineLane, ...]
    transfers: tuple[Transfer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    def to_json(self) -> str:
        """The timeline as JSON."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The timeline from the text of ``to_json``. Raises KeyError, TypeError or ValueError for other texts."""
        return from_plain(cls, json.loads(text))

    @property
    def idle(self) -> float:
        """The bubble: the share of the ranks' time in which they wait for other stages."""
        total = self.length * len(self.lines)
        return max(0.0, 1 - sum(line.busy for line in self.lines) / total) if total else 0.0


def timeline(recipe: Recipe, played: PlayedStep | None = None) -> Timeline:
    """The timeline of a recipe's step.

    Args:
        played: of a prediction, in seconds. None: from the plan alone, in units of work.
    """
    schedule = _schedule(recipe)
    if played is not None:
        return _in_seconds(recipe, schedule, played)
    return _in_work(recipe, schedule)


def _schedule(recipe: Recipe) -> Schedule:
    """The schedule of a recipe. Without a pipeline, that of one stage: forwards and backwards in turn."""
    ranks, stages = (recipe.mesh.axis_size("pp"), len(recipe.stages)) if recipe.stages else (1, 1)
    return make_schedule(recipe.schedule if recipe.stages else "1f1b", ranks, stages, recipe.microbatches)


def _in_work(recipe: Recipe, schedule: Schedule) -> Timeline:
    """The timeline from the plan alone, in units of work."""
    stage_work = [stage.work for stage in recipe.stages]
    mean = sum(stage_work) / len(stage_work) if sum(stage_work) else 0
    spans = spans_of(schedule, lengths=[work / mean for work in stage_work] if mean else ())
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
    """The stage that receives the result of an action; None if there is none. A plan alone does not say whether values skip
    stages, so it is the next stage."""
    stages = recipe.stages
    if action.kind == "F" and action.stage + 1 < len(stages) and stages[action.stage].sends:
        return action.stage + 1
    if action.kind in ("B", "I") and action.stage > 0 and stages[action.stage - 1].sends:
        return action.stage - 1
    return None


def _in_seconds(recipe: Recipe, schedule: Schedule, played: PlayedStep) -> Timeline:
    """The timeline of a prediction, in seconds."""
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    for rank, start, phase in played.phases:
        length = phase.spent.total.seconds
        if length > 0:
            slots[rank].append(_slot(phase.label, start, start + length, _parts(phase.spent)))
    transfers = [
        Transfer(
            sent.rank, recipe.stage_rank[sent.action.other], sent.start, sent.stop,
            "forward" if sent.action.kind == "SEND_F" else "backward", sent.action.microbatch, sent.nbytes,
        )
        for sent in played.sent if sent.action.other is not None
    ]  # fmt: skip
    return _timeline("seconds", recipe, schedule, slots, transfers)


# --- a step that was measured -----------------------------------------------------------------------------------------


def measured(recipe: Recipe, seen: Sequence[RankTimes]) -> Timeline:
    """The timeline of a measured step. Time 0 is the first begin of an action on any rank.

    Args:
        seen: what the first rank of each index of the pipeline axis has observed, in the order of that axis.
    """
    schedule = _schedule(recipe)
    first = min((start for observed in seen for _, start, _ in observed.activities), default=0.0)
    seen = [observed.since(first) for observed in seen]
    arrived = [dict(observed.arrived) for observed in seen]
    slots, transfers, exchanges = [], list[Transfer](), list[Exchange]()
    for line, observed in enumerate(seen):
        slots.append(_measured_slots(observed))
        starts = {activity: start for activity, start, _ in observed.activities}
        exchanges += [Exchange(line, c.axis, c.kind, c.start, c.stop, c.bytes) for c in observed.collectives]
        for send, nbytes in observed.sent:
            assert send.other is not None
            letter, target = send.kind[-1], recipe.stage_rank[send.other]
            receive = Action(send.other, f"RECV_{letter}", send.microbatch, send.stage)
            stop = arrived[target].get(receive, starts[send])
            way = "forward" if letter == "F" else "backward"
            transfers.append(Transfer(line, target, starts[send], stop, way, send.microbatch, nbytes))
    return _timeline("seconds", recipe, schedule, slots, transfers, exchanges)


def _measured_slots(seen: RankTimes) -> list[Slot]:
    """The slots of a rank, in order. The time of the step before the first action is ``begin``, after the last one ``end``."""
    actions = [(start, stop) for activity, start, stop in seen.activities if isinstance(activity, Action)]
    spans: list[tuple[float, float, Action | str]] = []
    for activity, start, stop in seen.activities:
        if activity != "step":
            spans.append((start, stop, activity))
        elif actions:
            spans += [(start, min(actions)[0], "begin"), (max(stop for _, stop in actions), stop, "end")]
        else:
            spans.append((start, stop, "begin"))
    return [
        _slot(activity, start, stop, _parts_of(start, stop, seen.collectives))
        for start, stop, activity in sorted(spans, key=lambda span: span[:2])
    ]


def _parts_of(start: float, stop: float, collectives: Iterable[Collective]) -> dict[str, float]:
    """The parts of an interval, if the host waited for its collectives; else empty, since only the sum is known."""
    parts: dict[str, float] = {}
    for collective in collectives:
        if not collective.waited:
            return {}
        overlap = min(stop, collective.stop) - max(start, collective.start)
        if overlap > 0:
            name = f"communication over {collective.axis}"
            parts[name] = parts.get(name, 0.0) + overlap
    return {"compute": stop - start - sum(parts.values()), **parts}


def seconds_by_kind(timeline: Timeline, *, apart: bool = True) -> dict[str, float]:
    """Kind of work → its seconds in a step, as a mean over lines: forward, backward, communication over each axis, waiting, …

    Args:
        apart: whether communication is a kind of its own. If not, it counts to the action in which it ran.
    """
    sums: dict[str, float] = {}
    for slot in (slot for line in timeline.lines for slot in line.slots):
        remaining = slot.stop - slot.start
        for name, amount in slot.parts.items() if apart else ():
            if name.startswith("communication"):
                sums[name] = sums.get(name, 0.0) + amount
                remaining -= amount
        sums[slot.what] = sums.get(slot.what, 0.0) + remaining
    means = {name: amount / len(timeline.lines) for name, amount in sums.items()}
    return means | {"waiting": timeline.idle * timeline.length}


def differences(predicted: Timeline, measured: Timeline) -> dict[str, tuple[float, float]]:
    """Kind of work → (predicted seconds, measured seconds), the largest first. They add up to the lengths of the steps.

    Communication is a kind of its own if the measured timeline has the parts of its slots.
    """
    apart = any(slot.parts for line in measured.lines for slot in line.slots)
    first, second = seconds_by_kind(predicted, apart=apart), seconds_by_kind(measured, apart=apart)
    pairs = {kind: (first.get(kind, 0.0), second.get(kind, 0.0)) for kind in (*first, *second)}
    return dict(sorted(pairs.items(), key=lambda pair: -max(pair[1])))


# --- slots ------------------------------------------------------------------------------------------------------------


def _slot(activity: Action | str, start: float, stop: float, parts: Mapping[str, float] | None = None) -> Slot:
    """The slot of an action, or of a phase of the step."""
    if isinstance(activity, Action):
        return Slot(start, stop, WORDS[activity.kind], activity.stage, activity.microbatch, parts or {})
    return Slot(start, stop, "begin" if activity.startswith("step") else activity, parts=parts or {})


def _parts(spent: PhaseSeconds) -> dict[str, float]:
    """The parts of a predicted action: see ``Slot.parts``."""
    parts = {"compute": spent.device.seconds, "host": spent.host.seconds}
    parts |= {f"communication over {axis}": estimate.seconds for axis, estimate in spent.exposed.items()}
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _timeline(
    unit: str,
    recipe: Recipe,
    schedule: Schedule,
    slots: Sequence[Sequence[Slot]],
    transfers: Sequence[Transfer],
    exchanges: Sequence[Exchange] = (),
) -> Timeline:
    """The timeline of slots. ``slots``: those of each rank of the pipeline axis."""
    lines = []
    for pp, slots_of_rank in enumerate(slots):
        stages = tuple(stage for stage, pp_of_stage in enumerate(schedule.stage_rank) if pp_of_stage == pp)
        ranks = recipe.stage_ranks_of(stages[0]) if recipe.stages else range(recipe.mesh.size)
        lines.append(PipelineLane(stages, tuple(ranks), tuple(slots_of_rank), most_in_flight(schedule, pp)))
    length = max((slot.stop for line in lines for slot in line.slots), default=0.0)
    return Timeline(
        unit, recipe.schedule, recipe.microbatches, length, tuple(lines), tuple(transfers), tuple(exchanges)
    )


__all__ = [
    "COMPUTE", "Exchange", "PipelineLane", "Slot", "Timeline", "Transfer", "differences", "measured", "seconds_by_kind",
    "timeline",
]  # fmt: skip
