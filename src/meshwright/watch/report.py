"""``Hang``: the report of a job that hangs, with suspects and the location of every rank, on one screen.

    meshwright, 2026-11-21 13:34:59: no rank made progress for 20 s; the job ends
    suspect: rank 1: in no collective; rank 0 waits in one

    rank 1     node-b  step 7  stage 1, action 1F2  forward
               in no collective
               model.py:31 in forward: time.sleep(60)
    rank 0     node-a  step 7  stage 0, action 0B0  backward
               waits in all_reduce with ranks 0 1
               model.py:40 in loss: ...

Suspects, the worst first: ranks without heartbeats; ranks that are in no collective while others wait in one; ranks that are in
another collective than the others of their group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshwright.schedule import Action
from meshwright.watch.heartbeat import FAILED, HERE, LEFT, Beat, RankProcess
from meshwright.watch.location import Whereabouts

V = TypeVar("V")

_BLOCKS = 8  # most blocks of ranks in a report, which then fits a screen of 50 lines
_SUSPECTS = 4  # most lines of suspects
_HEAD = 9  # characters of the first column: as wide as "rank 1234" and "ranks 0–7"
_WIDTH = 120  # most characters of a line


@dataclass(frozen=True)
class Hang:
    """The facts about a job that hangs.

    Attributes:
        cause: the reason for the alarm, as text.
        ranks: number of ranks.
        who: rank → process, of ranks that have introduced themselves.
        beats: rank → last heartbeat.
        where: rank → location, of ranks that have answered the alarm.
        idle: rank → seconds since its last progress.
        silent: ranks whose heartbeats have stopped.
    """

    cause: str
    ranks: int
    who: Mapping[int, RankProcess]
    beats: Mapping[int, Beat]
    where: Mapping[int, Whereabouts]
    idle: Mapping[int, float]
    silent: tuple[int, ...] = ()

    def suspects(self) -> dict[int, str]:
        """Rank → reason, the worst first."""
        suspects = {r: "it never came" for r in range(self.ranks) if r not in self.beats}
        for rank, beat in sorted(self.beats.items()):
            if rank in self.silent or (rank not in self.where and beat.state == HERE):
                suspects[rank] = "no sign of life: killed, stopped, cut off, or stuck in code that holds Python's lock"
        failed = {r: f"it failed: {b.error}" for r, b in sorted(self.beats.items()) if b.state == FAILED}
        return suspects or failed or self._not_waiting()

    def _not_waiting(self) -> dict[int, str]:
        """Suspects if all ranks have answered: those in no collective; else those that the most ranks wait for."""
        waiting = {rank: where for rank, where in self.where.items() if where.collective}
        others = [rank for rank in self.where if rank not in waiting]
        if others and waiting:
            text = f"in no collective; {spelled_ranks(sorted(waiting))} wait{'s' * (len(waiting) == 1)} in one"
            return dict.fromkeys(others, text)
        awaited: Counter[int] = Counter()  # rank → number of ranks that wait for it in another collective
        for rank, where in waiting.items():
            together = {r for r, w in waiting.items() if (w.collective, w.group) == (where.collective, where.group)}
            awaited.update(r for r in where.group if r not in together and r != rank)
        most = max(awaited.values(), default=0)
        return {
            rank: f"in {waiting[rank].collective}, but {n} rank{'s wait' if n > 1 else ' waits'} for it in another collective"
            for rank, n in awaited.items() if n == most and rank in waiting
        }  # fmt: skip

    def report(self) -> str:
        """The report, on one screen."""
        blocks, lines = self._blocks(), []
        for ranks, text in blocks[:_BLOCKS]:
            lines += ["", *_indented(spelled_ranks(list(ranks)), text)]
        if len(blocks) > _BLOCKS:
            rest = sum(len(ranks) for ranks, _ in blocks[_BLOCKS:])
            lines += ["", f"and {rest} more ranks, in other places"]
        suspects = [f"suspect: {spelled_ranks(ranks)}: {why}" for why, ranks in _by_value(self.suspects()).items()]
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        head = [f"meshwright, {when}: {self.cause}; the job ends", *suspects[:_SUSPECTS]]
        return "\n".join(line[:_WIDTH] for line in [*head, *lines])

    def full(self) -> str:
        """The report and the stack of every rank, for a file."""
        stacks = [
            f"rank {rank}, the innermost frame last:\n" + "\n".join(f"  {line}" for line in where.stack)
            for rank, where in sorted(self.where.items())
        ]
        return "\n\n".join([self.report(), *stacks]) + "\n"

    def _blocks(self) -> list[tuple[tuple[int, ...], list[str]]]:
        """(ranks, lines about them). Ranks with equal lines share a block; blocks with suspects come first."""
        ranks_by_lines = _by_value({rank: tuple(self._lines(rank)) for rank in range(self.ranks)})
        suspects = self.suspects()

        def suspects_first(item: tuple[tuple[str, ...], list[int]]) -> tuple[bool, int]:
            _, ranks = item
            return not any(rank in suspects for rank in ranks), ranks[0]

        ordered = sorted(ranks_by_lines.items(), key=suspects_first)
        return [(tuple(ranks), list(lines)) for lines, ranks in ordered]

    def _lines(self, rank: int) -> list[str]:
        """The lines about one rank: host and step; if it has answered, also its collective and its source lines."""
        who, beat, where = self.who.get(rank), self.beats.get(rank), self.where.get(rank)
        if beat is None:
            return [f"{who.host if who else 'unknown host'}  has not come to the first step"]
        head = [who.host if who else "", f"step {where.step}" if where else f"last heard of in step {beat.step}"]
        action = where.action if where else beat.action
        if action:
            head.append(f"stage {Action.parse(action).stage}, action {action}")
        elif who and who.stages:
            head.append(who.stages)
        if where is None:
            return ["  ".join([*head, "has left"] if beat.state == LEFT else head)]
        idle = self.idle.get(rank, 0.0)
        head += [where.phase, f"last progress {idle:.0f} s ago" if idle >= 1 else ""]
        lines = ["  ".join(filter(None, head))]
        if beat.state == FAILED:
            lines.append(beat.error)
        state = "in no collective"
        if where.collective:
            group = f" with {spelled_ranks(list(where.group))}" if where.group else ""
            state = f"waits in {where.collective}{group}"
        lines.append(f"{state}; {where.entered} entered" if where.entered else state)
        lines += [line for line in (where.line, where.within) if line]
        lines += [f"recorded last: {where.recorded}"] if where.recorded else []
        return lines


def spelled_ranks(ranks: list[int]) -> str:
    """Ranks as text, with runs folded.

    >>> spelled_ranks([3]), spelled_ranks([0, 2, 3, 4, 5])
    ('rank 3', 'ranks 0 2–5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(r[0]) if len(r) == 1 else f"{r[0]} {r[1]}" if len(r) == 2 else f"{r[0]}–{r[-1]}" for r in runs]
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(parts)}"


def _indented(head: str, lines: list[str]) -> list[str]:
    """The lines, with ``head`` before the first and spaces before the others."""
    head = f"{head:<{_HEAD}}"
    return [head + "  " + lines[0], *(" " * (_HEAD + 2) + line for line in lines[1:])]


def _by_value(values: Mapping[int, V]) -> dict[V, list[int]]:
    """Value → its ranks, in the order of their first ranks."""
    ranks: dict[V, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks
