"""Pipeline schedules as data: for each rank its actions, in order. The runtime executes exactly these.

    4 stages on 4 ranks, 4 microbatches, 1F1B; time goes right, a backward takes as long as two forwards:

    rank 0   0F0 0F1 0F2 0F3                 0B0     0B1     0B2     0B3
    rank 1       1F0 1F1 1F2         1B0     1F3 1B1     1B2     1B3
    rank 2           2F0 2F1     2B0     2F2 2B1     2F3 2B2     2B3
    rank 3               3F0 3B0     3F1 3B1     3F2 3B2     3F3 3B3

The text of an action is stage, kind, microbatch, in the words of ``torch.distributed.pipelining``: ``F`` forward, ``B``
backward, ``I`` and ``W`` its two halves (gradients of inputs, gradients of weights). A transfer also names the other stage:
by ``0SEND_F2:1`` stage 0 sends to stage 1 the values of microbatch 2.

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
    """One action of a rank: ``kind`` for ``stage`` and ``microbatch``; ``other``: the stage at the other end of a transfer."""

    stage: int
    kind: str
    microbatch: int
    other: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}" + (f":{self.other}" if self.other is not None else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``. Raises ValueError for another text."""
        match = _ACTION.fullmatch(text)
        if match is None or (match[2] in TRANSFERS) != (match[4] is not None):
            raise ValueError(f"{text!r} is no action: a stage, one of {' '.join((*COMPUTE, *TRANSFERS))}, a microbatch")
        return cls(int(match[1]), match[2], int(match[3]), int(match[4]) if match[4] else None)


class Span(NamedTuple):
    """An action in time. ``start`` and ``stop`` are in units of a forward."""

    rank: int
    start: float
    stop: float
    action: Action


class Edges(NamedTuple):
    """(stage, later stage) for each pair between which values are sent, and for each of these whose gradients come back."""

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]


NO_EDGES = Edges((), ())


@dataclass(frozen=True)
class Schedule:
    """For each rank of the pipeline axis its actions, in order; and for each stage its rank."""

    ranks: tuple[tuple[Action, ...], ...]
    stage_rank: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str, stage_rank: Sequence[int]) -> Schedule:
        """The inverse of ``str``: a line for each rank. Raises ValueError for another text."""
        lines = [line.split() for line in text.strip().splitlines()]
        return cls(tuple(tuple(map(Action.parse, line)) for line in lines), tuple(stage_rank))

    @property
    def microbatches(self) -> int:
        return 1 + max((a.microbatch for actions in self.ranks for a in actions), default=-1)


def stage_ranks(ranks: int, stages: int) -> tuple[int, ...]:
    """For each stage its rank, in turn: with two stages a rank, rank 0 has the first stage and the middle one."""
    return tuple(s % ranks for s in range(stages))


def make_schedule(name: str, ranks: int, stages: int, microbatches: int, *, backward: bool = True) -> Schedule:
    """The schedule with this name, without transfers; ``with_transfers`` adds them.

    Args:
        name: one of ``NAMES``.
        ranks: the size of the pipeline axis; each rank has ``stages / ranks`` stages.
        backward: False for an evaluation, which has forwards only.
    """
    queues = [_Queues(name, r, ranks, stages, microbatches, backward) for r in range(ranks)]
    spans: list[Span] = []
    done: dict[tuple[int, str, int], float] = {}  # (stage, kind, microbatch) → when it ended
    free = [0.0] * ranks  # when each rank has ended its last action
    while any(q.pending for q in queues):
        choices = []
        for r, q in enumerate(queues):
            ready, next_action = q.choose(free[r], done, stages)
            if next_action is not None:
                choices.append((max(free[r], ready), r, next_action))
        if not choices:
            for q in queues:  # more microbatches must be in flight before the first backward can run
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
    """The pending actions of a rank: forwards and backwards, each in a fixed order, which the schedule merges.

    Attributes:
        forwards, backwards, weights: (stage, microbatch), in order; ``weights``: the second halves of split backwards.
        in_flight: forwards whose backward has not run; at most ``limit``.
        held: microbatches whose activations are held; at most ``most``.
    """

    def __init__(self, name: str, rank: int, ranks: int, stages: int, microbatches: int, backward: bool) -> None:
        chunks = stages // ranks
        order = sorted((m // ranks, c, m % ranks) for m in range(microbatches) for c in range(chunks))
        back = sorted((m // ranks, -c, m % ranks) for m in range(microbatches) for c in range(chunks))
        if chunks == 1 or name == "gpipe":
            order = sorted((0, c, m) for m in range(microbatches) for c in range(chunks))
            back = sorted((0, -c, m) for m in range(microbatches) for c in range(chunks))
        self.forwards = [(rank + c * ranks, group * ranks + m) for group, c, m in order]
        self.backwards = [(rank - c * ranks, group * ranks + m) for group, c, m in back] if backward else []
        self.weights: list[tuple[int, int]] = []
        self.split = name == "zero_bubble" and backward
        self.gpipe = name == "gpipe" or not backward
        self.in_flight = 0
        self.limit = (ranks - rank) if chunks == 1 else (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1
        if self.gpipe:
            self.limit = len(self.forwards)
        # Gradients of weights may wait as long as a rank holds no more activations than the first rank of 1F1B.
        self.held, self.most = 0, max(self.limit, ranks * chunks if self.split else 0)

    @property
    def pending(self) -> bool:
        return bool(self.forwards or self.backwards or self.weights)

    def choose(
        self, now: float, done: Mapping[tuple[int, str, int], float], stages: int
    ) -> tuple[float, Action | None]:
        """(when it can start, the next action): a forward while few are in flight, else a backward, else weights.

        The action is None if none can start yet.
        """
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
        """Removes an action from the queues."""
        if action.kind == "F":
            self.forwards.pop(0)
            self.in_flight, self.held = self.in_flight + 1, self.held + 1
        elif action.kind == "W":
            self.weights.pop(0)
            self.held -= 1
        else:
            self.backwards.pop(0)
            self.in_flight -= 1
            if action.kind == "I":  # its activations are held until the gradients of its weights are computed
                self.weights.append((action.stage, action.microbatch))
            else:
                self.held -= 1


def timeline(
    schedule: Schedule, durations: Mapping[str, float] = DURATIONS, lengths: Sequence[float] = ()
) -> list[Span]:
    """When each action runs, if each rank runs its actions in order, each as soon as it can. Transfers take no time.

    Args:
        durations: kind → duration, in units of a forward.
        lengths: for each stage a factor of its durations; default 1.

    Raises:
        ValueError: the schedule would wait for ever; the error says where.
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

    The two ranks of each pair have their transfers in the same order, that of the timeline, so that no transfer waits for a
    later one.

    Args:
        edges: (stage, later stage) for each pair between which values are sent.
        back: those of ``edges`` whose gradients come back.
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
        for source, target, direction in ends:
            if home[source] != home[target]:
                items[home[source]].append(
                    (span.stop, 0, number, Action(source, f"SEND_{direction}", a.microbatch, target))
                )
                items[home[target]].append(
                    (span.stop, 0, number, Action(target, f"RECV_{direction}", a.microbatch, source))
                )
    return Schedule(tuple(tuple(a for *_, a in sorted(rank, key=lambda x: x[:3])) for rank in items), home)


def idle(spans: Sequence[Span]) -> float:
    """The bubble: the share of all ranks' time, from the first action to the last, in which they are idle; 0 to 1."""
    ranks = 1 + max(s.rank for s in spans)
    length = max(s.stop for s in spans) - min(s.start for s in spans)
    return 1 - sum(s.stop - s.start for s in spans) / (ranks * length)


def microbatches_held(name: str, ranks: int, stages: int, microbatches: int, stage: int) -> float:
    """The most microbatches whose activations a stage holds at once, until their backward.

        gpipe: M · 1F1B: min(M, p - s) · zero bubble (ZB-H1): min(M, p)
        interleaved: min(M, max(1, (2 (p v - s) - 1) / v)): over the stages of rank r these are (v - 1) p + 2 (p - r - 1) + 1,
        the forwards before its first backward

    The sources are those of the schedules.

    Args:
        name: one of ``NAMES``.
        ranks: the size of the pipeline axis, p.
        stages: of the pipeline, p v.
        microbatches: of a step, M.
        stage: s, from 0.
    """
    if name == "gpipe":
        return microbatches
    if stages > ranks:
        return min(microbatches, max(1.0, (2 * (stages - stage) - 1) * ranks / stages))
    return min(microbatches, ranks if name == "zero_bubble" else ranks - stage)


def held_at_peaks(ranks: int, chunks: int, microbatches: int, rank: int) -> frozenset[tuple[int, ...]]:
    """Interleaved 1F1B: the numbers of microbatches whose activations the stages of a rank hold, after each forward from which
    on a rank has as many in flight as it may. With few microbatches: after all forwards.

    Args:
        ranks: the size of the pipeline axis.
        chunks: stages of a rank.
        microbatches: of a step.
        rank: its place in the pipeline.

    >>> sorted(held_at_peaks(2, 2, 4, 1))
    [(2, 1), (3, 0)]
    """
    queues, held = _Queues("interleaved", rank, ranks, ranks * chunks, microbatches, True), [0] * chunks
    states = set[tuple[int, ...]]()
    for number, (stage, _) in enumerate(queues.forwards):
        if number >= queues.limit:
            held[queues.backwards[number - queues.limit][0] // ranks] -= 1
        held[stage // ranks] += 1
        if number >= min(queues.limit, len(queues.forwards)) - 1:
            states.add(tuple(held))
    return frozenset(states)


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """The largest number of forwards of a rank whose activations it holds at once, until their backward."""
    most = now = 0
    for action in schedule.ranks[rank]:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, now)
    return most
