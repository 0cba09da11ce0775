"""Pipeline schedules as data: for each rank, the actions it performs, in order. The runtime executes exactly that.

    4 stages on 4 ranks, 4 microbatches, 1F1B; time goes right, a backward takes two forwards:

    rank 0   0F0 0F1 0F2 0F3                 0B0     0B1     0B2     0B3
    rank 1       1F0 1F1 1F2         1B0     1F3 1B1     1B2     1B3
    rank 2           2F0 2F1     2B0     2F2 2B1     2F3 2B2     2B3
    rank 3               3F0 3B0     3F1 3B1     3F2 3B2     3F3 3B3

An action's text is stage, kind, microbatch, in the words of ``torch.distributed.pipelining``: ``F`` forward, ``B`` backward,
``I`` and ``W`` its two halves (the gradients of inputs, those of weights); transfers also name the other stage:
``0SEND_F2:1`` sends what stage 1 needs of microbatch 2.

Sources: GPipe (Huang et al., arXiv 1811.06965); 1F1B (PipeDream-flush, Narayanan et al., arXiv 2006.09503); interleaved 1F1B
(Megatron-LM, arXiv 2104.04473); zero bubble, ZB-H1 (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
COMPUTE = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SENDS = ("SEND_F", "SEND_B")
DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?::(\d+))?")


class Action(NamedTuple):
    """One thing a rank does: ``kind`` for ``stage`` and ``microbatch``; ``other``: the stage at a transfer's other end."""

    stage: int
    kind: str
    microbatch: int
    other: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}" + (f":{self.other}" if self.other is not None else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``text`` says. Raises ValueError."""
        match = _ACTION.fullmatch(text)
        if match is None or (match[2] in TRANSFERS) != (match[4] is not None):
            raise ValueError(f"{text!r} is no action: a stage, one of {' '.join((*COMPUTE, *TRANSFERS))}, a microbatch")
        return cls(int(match[1]), match[2], int(match[3]), int(match[4]) if match[4] else None)


class Span(NamedTuple):
    """An action in time, in units of a forward."""

    rank: int
    start: float
    stop: float
    action: Action


class Edges(NamedTuple):
    """(stage, later stage) where values cross, and those of them where gradients come back."""

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]


NO_EDGES = Edges((), ())


@dataclass(frozen=True)
class Schedule:
    """For each rank of the axis, its actions; and which rank each stage lives on."""

    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str, stage_rank: Sequence[int]) -> Schedule:
        """The inverse of ``str``: a line for each rank. Raises ValueError."""
        lines = [line.split() for line in text.strip().splitlines()]
        return cls(tuple(tuple(map(Action.parse, line)) for line in lines), tuple(stage_rank))

    @property
    def microbatches(self) -> int:
        return 1 + max((a.microbatch for actions in self.ranks for a in actions), default=-1)


def stage_ranks(ranks: int, stages: int) -> tuple[int, ...]:
    """Which rank each stage lives on: in turn, so that with two stages a rank, rank 0 has the first and the middle."""
    return tuple(s % ranks for s in range(stages))


def make_schedule(name: str, ranks: int, stages: int, microbatches: int, *, backward: bool = True) -> Schedule:
    """The schedule of that name, of computing alone; ``with_transfers`` adds what is sent.

    Args:
        name: one of ``NAMES``.
        ranks: of the pipeline axis; each has ``stages / ranks`` stages.
        backward: False for an evaluation: forwards only.
    """
    queues = [_Queues(name, r, ranks, stages, microbatches, backward) for r in range(ranks)]
    spans: list[Span] = []
    done: dict[tuple[int, str, int], float] = {}
    free = [0.0] * ranks
    while any(q.left for q in queues):
        choices = [(max(free[r], ready), r, action) for r, q in enumerate(queues) if q.left
                   for ready, action in [q.choose(free[r], done, stages)] if action is not None]  # fmt: skip
        if not choices:
            for q in queues:  # more must be in flight before the first backward can run
                q.limit, q.most = q.limit + 1, q.most + 1
            continue
        start, r, action = min(choices, key=lambda c: (c[0], c[1]))
        stop = start + DURATIONS[action.kind]
        queues[r].take(action)
        done[action[:3]], free[r] = stop, stop
        spans.append(Span(r, start, stop, action))
    orders = tuple(tuple(s.action for s in sorted(spans, key=lambda s: s.start) if s.rank == r) for r in range(ranks))
    return Schedule(orders, stage_ranks(ranks, stages))


class _Queues:
    """What a rank has still to do: forwards and backwards, each in a fixed order, merged as the schedule says."""

    def __init__(self, name: str, rank: int, ranks: int, stages: int, microbatches: int, backward: bool) -> None:
        chunks = stages // ranks
        order = sorted((m // ranks, c, m % ranks) for m in range(microbatches) for c in range(chunks))
        back = sorted((m // ranks, -c, m % ranks) for m in range(microbatches) for c in range(chunks))
        if chunks == 1 or name == "gpipe":
            order = sorted((0, c, m) for m in range(microbatches) for c in range(chunks))
            back = sorted((0, -c, m) for m in range(microbatches) for c in range(chunks))
        place = [(rank + c * ranks, group * ranks + m) for group, c, m in order]
        self.forwards = place
        self.backwards = [(rank - c * ranks, group * ranks + m) for group, c, m in back] if backward else []
        self.weights: list[tuple[int, int]] = []  # backwards of weights that wait
        self.split = name == "zero_bubble" and backward
        self.gpipe = name == "gpipe" or not backward
        self.in_flight = 0
        self.limit = (ranks - rank) if chunks == 1 else (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1
        if self.gpipe:
            self.limit = len(place)
        # With halves, weights may wait while no more is held than the first rank of 1F1B holds.
        self.held, self.most = 0, max(self.limit, ranks * chunks if self.split else 0)

    @property
    def left(self) -> bool:
        return bool(self.forwards or self.backwards or self.weights)

    def choose(
        self, now: float, done: Mapping[tuple[int, str, int], float], stages: int
    ) -> tuple[float, Action | None]:
        """(when it can start, the action to do next): a forward while few are in flight, else a backward, else weights."""
        choices: list[tuple[float, int, Action]] = []
        if self.backwards and not (self.gpipe and self.forwards):
            s, m = self.backwards[0]
            kind = "I" if self.split else "B"
            after = done.get((s, "F", m)) if s == stages - 1 else done.get((s + 1, kind, m))
            if after is not None and (s, "F", m) in done:
                choices.append((max(now, after), 1, Action(s, kind, m)))
        if self.forwards and self.in_flight < self.limit and self.held < self.most:
            s, m = self.forwards[0]
            before = 0.0 if s == 0 else done.get((s - 1, "F", m))
            if before is not None:
                choices.append((max(now, before), 0, Action(s, "F", m)))
        if self.weights:
            s, m = self.weights[0]
            choices.append((now, 2, Action(s, "W", m)))
        if not choices:
            return now, None
        start, _, action = min(choices, key=lambda f: (f[0], f[1]))
        return start, action

    def take(self, action: Action) -> None:
        if action.kind == "F":
            self.forwards.pop(0)
            self.in_flight, self.held = self.in_flight + 1, self.held + 1
        elif action.kind == "W":
            self.weights.pop(0)
            self.held -= 1
        else:
            self.backwards.pop(0)
            self.in_flight -= 1
            if action.kind == "I":  # what it holds is held until its weights are done
                self.weights.append((action.stage, action.microbatch))
            else:
                self.held -= 1


def timeline(
    schedule: Schedule, durations: Mapping[str, float] = DURATIONS, lengths: Sequence[float] = ()
) -> list[Span]:
    """When each action runs, transfers taking no time, if each rank does its own in order as soon as it can.

    ``durations``: by kind; ``lengths``: of each stage, by which its durations are multiplied; default 1. Raises ValueError for
    a schedule that would wait for ever, saying where.
    """
    actions = [[a for a in rank if a.kind in COMPUTE] for rank in schedule.ranks]
    last = len(schedule.stage_rank) - 1
    halves = {(a.stage, a.microbatch) for rank in actions for a in rank if a.kind == "I"}
    done: dict[tuple[int, str, int], float] = {}
    spans: list[Span] = []
    at, free = [0] * len(actions), [0.0] * len(actions)

    def needed(a: Action) -> list[tuple[int, str, int]]:
        s, kind, m = a.stage, a.kind, a.microbatch
        if kind == "F":
            return [(s - 1, "F", m)] if s else []
        if kind == "W":
            return [(s, "I", m)]
        after = (s + 1, "I" if (s + 1, m) in halves else "B", m)
        return [(s, "F", m)] + ([after] if s < last else [])

    while any(i < len(a) for i, a in zip(at, actions, strict=True)):
        ready = [(max([free[r], *(done[n] for n in needed(a))]), r, a) for r, i in enumerate(at) if i < len(actions[r])
                 for a in [actions[r][i]] if all(n in done for n in needed(a))]  # fmt: skip
        if not ready:
            stuck = [f"rank {r} at {actions[r][i]}" for r, i in enumerate(at) if i < len(actions[r])]
            raise ValueError(f"this schedule waits for ever: {', '.join(stuck)}")
        start, r, a = min(ready, key=lambda x: (x[0], x[1]))
        done[a[:3]] = free[r] = start + durations[a.kind] * (lengths[a.stage] if lengths else 1.0)
        spans.append(Span(r, start, free[r], a))
        at[r] += 1
    return spans


def with_transfers(schedule: Schedule, edges: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> Schedule:
    """The schedule with sends and receives.

    Both ends of every pair of ranks have their transfers in the same order, that of the timeline, so that none waits for
    one that comes later.

    Args:
        edges: (stage, later stage) where values cross.
        back: those of them where gradients come back.
    """
    home = schedule.stage_rank
    items: list[list[tuple[float, int, int, Action]]] = [[] for _ in schedule.ranks]
    spans = sorted(timeline(schedule), key=lambda s: (s.stop, s.rank, s.start))
    for number, span in enumerate(spans):
        a = span.action
        items[span.rank].append((span.start, 1, number, a))
        if a.kind == "F":
            ends = [(a.stage, t, "F") for s, t in edges if s == a.stage]
        else:
            ends = [(a.stage, s, "B") for s, t in back if t == a.stage and a.kind in ("B", "I")]
        for here, there, way in ends:
            if home[here] != home[there]:
                items[home[here]].append((span.stop, 0, number, Action(here, f"SEND_{way}", a.microbatch, there)))
                items[home[there]].append((span.stop, 0, number, Action(there, f"RECV_{way}", a.microbatch, here)))
    return Schedule(tuple(tuple(a for *_, a in sorted(rank, key=lambda x: x[:3])) for rank in items), home)


def idle(spans: Sequence[Span]) -> float:
    """The share of all ranks' time, from the first action to the last, in which they do nothing: the bubble."""
    ranks = 1 + max(s.rank for s in spans)
    length = max(s.stop for s in spans) - min(s.start for s in spans)
    return 1 - sum(s.stop - s.start for s in spans) / (ranks * length)


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """How many forwards of a rank at most wait for their backward, whose activations it holds."""
    most = now = 0
    for action in schedule.ranks[rank]:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, now)
    return most
