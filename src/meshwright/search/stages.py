"""``StageCuts``: the number of blocks of each pipeline stage, as planning cuts them (planning/pipeline.py), by arithmetic.

    1  the least W for which all blocks fit:  work(s, n) = n w + ends ≤ W,  n blocks on stage s, Σ n = blocks
    2  the least L for which they fit with W · SLACK, too:
           memory(s, n) = copies (n p + ends) + held(s) rows (n a + ends + received) ≤ L
    3  within L · SLACK: the last stage gets as many as fit, then the one before it, and so on

Blocks are alike here, so the result is exact, like that of ``planning.pipeline.choose_cuts``, which looks at every event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import floor

from meshwright.graph import INTENSITY, ModelGraph
from meshwright.planning.pipeline import SLACK, crossing_bytes, parameter_copies, stored_bytes
from meshwright.schedule import microbatches_held
from meshwright.search.space import Candidate

CLOSE = 1e-9  # difference of equal values, by rounding
_HALVINGS = 20  # of the interval in which the limit of memory lies


@dataclass(frozen=True)
class Part:
    """A part of a model, as planning counts it.

    Attributes:
        fixed: its work that does not depend on the rows: parameters are read.
        work: its work per row, besides.
        parameters: bytes of its parameters.
        stored: bytes per row of its results.
    """

    fixed: float
    work: float
    parameters: float
    stored: float

    def of_rows(self, rows: float) -> float:
        """Its work for so many rows."""
        return self.fixed + self.work * rows


@dataclass(frozen=True)
class StageParts:
    """The parts of a model that is cut between blocks.

    Attributes:
        block: an average block.
        first, last: what comes before all blocks, and after all of them.
        received: bytes per row that a stage receives, at most.
    """

    block: Part
    first: Part
    last: Part
    received: float

    @classmethod
    def of_graph(
        cls, graph: ModelGraph, kinds: Sequence[Sequence[str]], sizes: Mapping[str, int], rows: int
    ) -> StageParts | None:
        """The parts of a recorded model with few blocks; None if it calls none of its blocks.

        Args:
            kinds: for each kind of blocks, the names of its blocks in the full model.
            sizes: parameter → bytes.
            rows: of the batch.
        """
        counter = _Counter(graph, sizes, rows)
        numbers = {name: len(kind) for kind in kinds for name in kind}
        calls = {c.module: (c.start, c.stop) for c in graph.calls.values() if c.module in numbers and c.start < c.stop}
        if not calls:
            return None
        weights = {name: numbers[name] / sum(numbers[other] for other in calls) for name in calls}
        parts = {name: counter.part(*span) for name, span in calls.items()}
        block = Part(*(
            sum(weights[name] * getattr(part, field) for name, part in parts.items())
            for field in ("fixed", "work", "parameters", "stored")
        ))  # fmt: skip
        starts, stops = zip(*calls.values(), strict=True)
        received = max(counter.crossing[start] for start in starts) / rows
        return cls(block, counter.part(0, min(starts)), counter.part(max(stops), len(graph.events)), received)


class _Counter:
    """Counts parts of a recorded model."""

    def __init__(self, graph: ModelGraph, sizes: Mapping[str, int], rows: int) -> None:
        self._events, self._sizes, self._rows = graph.events, sizes, rows
        self._stored, self.crossing = stored_bytes(graph, ()), crossing_bytes(graph)

    def part(self, start: int, stop: int) -> Part:
        """The events from ``start`` to ``stop``."""
        events = self._events[start:stop]
        read = INTENSITY * sum(self._sizes[name] for event in events for name in event.parameters)
        work = sum(event.work for event in events)
        parameters = sum(self._sizes[name] for name in {name for event in events for name in event.parameters})
        stored = self._stored[stop] - self._stored[start]
        return Part(read, max(0, work - read) / self._rows, parameters, stored / self._rows)


class StageCuts:
    """The numbers of blocks of the stages of candidates.

    Args:
        parts: of the model.
        blocks: number of blocks.
        rows: of a step.
    """

    def __init__(self, parts: StageParts, blocks: int, rows: int) -> None:
        self._parts, self._blocks, self._rows = parts, blocks, rows
        self._cut = cache(self._cut_of)

    def __call__(self, candidate: Candidate) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        keeping = candidate.saved_blocks * candidate.pp / self._blocks if candidate.recompute else 1.0
        sizes = candidate.pp, candidate.chunks, candidate.microbatches, candidate.rows, candidate.dp_shard
        return self._cut(*sizes, candidate.schedule, keeping)

    def _cut_of(
        self, pp: int, chunks: int, microbatches: int, rows: int, dp_shard: int, schedule: str, keeping: float
    ) -> tuple[int, ...]:
        """``keeping``: the fraction of blocks that do not recompute."""
        stages, parts, copies = pp * chunks, self._parts, parameter_copies(dp_shard)
        work = [parts.block.of_rows(self._rows), parts.first.of_rows(self._rows), parts.last.of_rows(self._rows)]
        room = room_of(self._blocks, stages, *work)
        stored = keeping * parts.block.stored + (1 - keeping) * parts.received
        first = [copies * parts.first.parameters, parts.first.stored]
        last = [copies * parts.last.parameters, parts.last.stored]
        lines = []
        for stage in range(stages):
            held = rows * microbatches_held(schedule, pp, stages, microbatches, stage)
            ends = [first] * (stage == 0) + [last] * (stage == stages - 1)
            received = parts.received if stage else 0.0
            fixed = sum(parameters + held * nbytes for parameters, nbytes in ends) + held * received
            lines.append((fixed, copies * parts.block.parameters + held * stored))
        return filled(self._blocks, room, lines)


def room_of(blocks: int, stages: int, block: float, first: float, last: float) -> list[int]:
    """The most blocks that each stage has, if its work is within ``SLACK`` of the least possible.

    Args:
        blocks: number of blocks, at least ``stages``.
        stages: at least 2.
        block: work of each block.
        first, last: work of the layers before all blocks, and of those after all blocks.

    >>> room_of(16, 4, 1.0, 0.0, 0.0), room_of(16, 4, 1.0, 0.5, 2.5)
    ([4, 4, 4, 4], [4, 5, 5, 2])
    """

    def within(limit: float) -> list[int]:
        fit = (
            min(blocks, max(0, floor((limit - end) / block + CLOSE)) if block else blocks) for end in (first, 0.0, last)
        )
        begin, between, end = fit
        return [begin, *[between] * (stages - 2), end]

    def fits(limit: float) -> bool:
        return limit >= max(first, last) and sum(within(limit)) >= blocks

    limits = sorted({end + n * block for end in (first, 0.0, last) for n in range(blocks + 1)})
    at = bisect_left(limits, True, key=fits)
    return within(SLACK * limits[at]) if at < len(limits) else [blocks] * stages


def filled(blocks: int, room: Sequence[int], memory: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """The number of blocks of each stage, with the least memory of the stage that needs most, and ``SLACK``.

    Args:
        room: the most blocks of each stage; all blocks fit.
        memory: for each stage (bytes without blocks, bytes of a block).

    >>> filled(12, [6, 6, 6, 6], [(0.0, 4.0), (0.0, 3.0), (0.0, 2.0), (2.0, 1.0)])
    (0, 2, 4, 6)
    """

    fewest = [0, *[1] * (len(room) - 2), 0]  # a stage between the ends has nothing but blocks

    def within(limit: float) -> list[int]:
        return [
            max(least, min(most, floor((limit - fixed) / block + CLOSE) if block else most))
            for least, most, (fixed, block) in zip(fewest, room, memory, strict=True)
        ]

    low, high = 0.0, max(fixed + most * block for most, (fixed, block) in zip(room, memory, strict=True))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= blocks else (middle, high)
    numbers, left = list[int](), blocks
    for stage, most in reversed([*enumerate(within(SLACK * max(high, *(fixed for fixed, _ in memory))))]):
        numbers.append(min(most, left - sum(fewest[:stage])) if stage else left)
        left -= numbers[-1]
    return tuple(reversed(numbers))


def even(blocks: int, stages: int) -> tuple[int, ...]:
    """The blocks of stages with equal numbers, or one more on the first ones.

    >>> even(10, 4)
    (3, 3, 2, 2)
    """
    return tuple((blocks + stages - 1 - stage) // stages for stage in range(stages))


__all__ = ["Part", "StageCuts", "StageParts", "even", "filled", "room_of"]
