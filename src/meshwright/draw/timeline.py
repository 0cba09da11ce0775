"""``Timeline``: the schedule of a step, played: what each rank of the pipeline does when. Facts before ink.

of a plan alone      in work: 1 is the mean forward of a stage, a backward takes two; nothing is sent in no time
of a prediction      in seconds: what each action takes of compute, host and each axis's exposed communication
of a run             in seconds: when each action, transfer and collective began and ended (``Job.observe``)

stage 0  F0 F1 ·· B0── F2 B1──          a line for each rank of the pipeline axis
stage 1  ·· F0 B0── F1 B1── …           what stands between slots is the bubble
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
    from meshwright.prediction.clock import Spent
    from meshwright.prediction.play import Played
    from meshwright.runtime.observed import Collective, Seen

WORDS = {
    "F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights",
    "SEND_F": "send", "SEND_B": "send", "RECV_F": "receive", "RECV_B": "receive",
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """A stretch of time in which a rank does one thing.

    Attributes:
        start, stop: in the unit of the timeline.
        what: forward, backward, backward of inputs, backward of weights, send, receive; or a phase of the step: begin, end,
            clip, agree (on loss and norm), optimizer.
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
class Exchange:
    """A collective of a rank, as it was measured.

    Attributes:
        line: of the rank.
        axis: the axes that its group lies along, joined by dots; ``kind``: all_reduce, all_gather …
        start, stop: in the unit of the timeline.
        bytes: the larger of what is put in and what comes out.
    """

    line: int
    axis: str
    kind: str
    start: float
    stop: float
    bytes: int


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
        exchanges: collectives, of a step that was measured.
    """

    unit: str
    schedule: str
    microbatches: int
    length: float
    lines: tuple[Line, ...]
    transfers: tuple[Transfer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    def to_json(self) -> str:
        """As text; ``from_json`` is the inverse."""
        return json.dumps(to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The timeline that ``to_json`` gave. Raises KeyError, TypeError, ValueError for another text."""
        return from_plain(cls, json.loads(text))

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


# --- a step that was measured -----------------------------------------------------------------------------------------


def measured(recipe: Recipe, seen: Sequence[Seen]) -> Timeline:
    """A step of a job in time, from the first thing that a rank does in it. ``seen``: by the first rank of each place on the
    pipeline axis, in its order."""
    schedule = _schedule(recipe)
    first = min((start for one in seen for _, start, _ in one.did), default=0.0)
    seen = [one.since(first) for one in seen]
    arrived = [dict(one.arrived) for one in seen]
    lines, transfers, exchanges = [], list[Transfer](), list[Exchange]()
    for line, one in enumerate(seen):
        lines.append(_measured_slots(one))
        starts = {what: start for what, start, _ in one.did}
        exchanges += [Exchange(line, c.axis, c.kind, c.start, c.stop, c.bytes) for c in one.collectives]
        for action, nbytes in one.sent:
            assert action.other is not None
            way, target = action.kind[-1], recipe.stage_rank[action.other]
            come = Action(action.other, f"RECV_{way}", action.microbatch, action.stage)
            stop = arrived[target].get(come, starts[action])
            named = "forward" if way == "F" else "backward"
            transfers.append(Transfer(line, target, starts[action], stop, named, action.microbatch, nbytes))
    return _timeline("seconds", recipe, schedule, lines, transfers, exchanges)


def _measured_slots(seen: Seen) -> list[Slot]:
    """What a rank did, in order. What a step does before its first action is its begin; after the last, its end."""
    actions = [(start, stop) for what, start, stop in seen.did if isinstance(what, Action)]
    spans: list[tuple[float, float, Action | str]] = []
    for what, start, stop in seen.did:
        if what != "step":
            spans.append((start, stop, what))
        elif actions:
            spans += [(start, min(actions)[0], "begin"), (max(stop for _, stop in actions), stop, "end")]
        else:
            spans.append((start, stop, "begin"))
    return [
        _slot(what, start, stop, _parts_of(start, stop, seen.collectives))
        for start, stop, what in sorted(spans, key=lambda span: span[:2])
    ]


def _parts_of(start: float, stop: float, collectives: Iterable[Collective]) -> dict[str, float]:
    """What a stretch of time is made of, where the host waited for its collectives; else only the whole is known."""
    parts: dict[str, float] = {}
    for one in collectives:
        if not one.waited:
            return {}
        if (inside := min(stop, one.stop) - max(start, one.start)) > 0:
            name = f"communication over {one.axis}"
            parts[name] = parts.get(name, 0.0) + inside
    return {"compute": stop - start - sum(parts.values()), **parts}


def seconds_by_kind(timeline: Timeline, *, apart: bool = True) -> dict[str, float]:
    """The length of a step by what its time went to, in the mean over lines: forward, backward …, each axis's communication,
    and waiting, in which a rank does nothing.

    Args:
        apart: communication stands by itself; else within that during which it ran.
    """
    sums: dict[str, float] = {}
    for slot in (slot for line in timeline.lines for slot in line.slots):
        left = slot.stop - slot.start
        for name, amount in slot.parts.items() if apart else ():
            if name.startswith("communication"):
                sums[name] = sums.get(name, 0.0) + amount
                left -= amount
        sums[slot.what] = sums.get(slot.what, 0.0) + left
    means = {name: amount / len(timeline.lines) for name, amount in sums.items()}
    return means | {"waiting": timeline.idle * timeline.length}


def differences(predicted: Timeline, measured: Timeline) -> dict[str, tuple[float, float]]:
    """kind → its seconds, (predicted, measured), the larger ones first; they add up to the lengths of the steps.

    Communication stands by itself if both timelines know how much of each slot it took.
    """
    apart = any(slot.parts for line in measured.lines for slot in line.slots)
    one, other = seconds_by_kind(predicted, apart=apart), seconds_by_kind(measured, apart=apart)
    pairs = {kind: (one.get(kind, 0.0), other.get(kind, 0.0)) for kind in (*one, *other)}
    return dict(sorted(pairs.items(), key=lambda pair: -max(pair[1])))


# --- slots ------------------------------------------------------------------------------------------------------------


def _slot(what: Action | str, start: float, stop: float, parts: Mapping[str, float] | None = None) -> Slot:
    if isinstance(what, Action):
        return Slot(start, stop, WORDS[what.kind], what.stage, what.microbatch, parts or {})
    return Slot(start, stop, "begin" if what.startswith("step") else what, parts=parts or {})


def _parts(spent: Spent) -> dict[str, float]:
    parts = {"compute": spent.device.seconds, "host": spent.host.seconds}
    parts |= {f"communication over {axis}": one.seconds for axis, one in spent.exposed.items()}
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _timeline(
    unit: str,
    recipe: Recipe,
    schedule: Schedule,
    slots: Sequence[Sequence[Slot]],
    transfers: Sequence[Transfer],
    exchanges: Sequence[Exchange] = (),
) -> Timeline:
    lines = []
    for rank, of_rank in enumerate(slots):
        stages = tuple(s for s, home in enumerate(schedule.stage_rank) if home == rank)
        ranks = recipe.stage_ranks_of(stages[0]) if recipe.stages else range(recipe.mesh.size)
        lines.append(Line(stages, tuple(ranks), tuple(of_rank), most_in_flight(schedule, rank)))
    length = max((slot.stop for line in lines for slot in line.slots), default=0.0)
    return Timeline(
        unit, recipe.schedule, recipe.microbatches, length, tuple(lines), tuple(transfers), tuple(exchanges)
    )


__all__ = [
    "COMPUTE", "Exchange", "Line", "Slot", "Timeline", "Transfer", "differences", "measured", "seconds_by_kind", "timeline",
]  # fmt: skip
