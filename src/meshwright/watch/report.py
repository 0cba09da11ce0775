"""The report of a job that hangs: who is to blame, and where every rank is, on one screen.

    meshwright: no progress for 20 s; the job ends
    first suspect: rank 1: in no collective, and rank 0 waits for it

    rank 1   node-b  step 7  action 1F2  forward
             model.py:31 in forward: time.sleep(60)
    rank 0   node-a  step 7  action 0B0  backward
             all_reduce with ranks 0 1; model.py:40 in loss: ...

Suspects, the worst first: ranks without a sign of life; ranks that others wait for and that wait for nobody; ranks in another
collective than the others of their group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from meshwright.schedule import Action
from meshwright.watch.heartbeat import FAILED, HERE, LEFT, Beat, Who
from meshwright.watch.location import Whereabouts

V = TypeVar("V")

_BLOCKS = 8  # kinds of ranks that fit a screen
_WIDTH = 120


@dataclass(frozen=True)
class Hang:
    """What is known when a job is given up.

    Attributes:
        cause: why.
        ranks: of the job.
        who: the processes that have been seen.
        beats: the last sign of life of each.
        where: where those are that have answered.
        idle: seconds since each rank last got on.
        silent: ranks that were here and gave no sign of life any more.
    """

    cause: str
    ranks: int
    who: Mapping[int, Who]
    beats: Mapping[int, Beat]
    where: Mapping[int, Whereabouts]
    idle: Mapping[int, float]
    silent: tuple[int, ...] = ()

    def suspects(self) -> dict[int, str]:
        """Rank → why, the worst first."""
        suspects = {r: "it never came" for r in range(self.ranks) if r not in self.beats}
        for rank, beat in sorted(self.beats.items()):
            if rank in self.silent or (rank not in self.where and beat.state == HERE):
                suspects[rank] = "no sign of life: killed, stopped, cut off, or stuck in code that holds Python's lock"
        failed = {r: f"it failed: {b.error}" for r, b in sorted(self.beats.items()) if b.state == FAILED}
        return suspects or failed or self._apart()

    def _apart(self) -> dict[int, str]:
        """Suspects among those that all answered."""
        inside = {r: w for r, w in self.where.items() if w.collective}
        outside = [r for r in self.where if r not in inside]
        if outside and inside:
            waiting = spelled_ranks(sorted(inside))
            return {r: f"in no collective; {waiting} wait{'s' * (len(inside) == 1)} in one" for r in outside}
        awaited: Counter[int] = Counter()
        for rank, where in inside.items():
            alike = {r for r, w in inside.items() if (w.collective, w.group) == (where.collective, where.group)}
            awaited.update(r for r in where.group if r not in alike and r != rank)
        most = max(awaited.values(), default=0)
        return {
            r: f"in {inside[r].collective}, where {n} rank{'s wait' if n > 1 else ' waits'} for it in another collective"
            for r, n in awaited.items() if n == most and r in inside
        }  # fmt: skip

    def report(self) -> str:
        """One screen."""
        blocks, shown = self._blocks(), []
        for ranks, text in blocks[:_BLOCKS]:
            shown += ["", *_indented(spelled_ranks(list(ranks)), text)]
        if len(blocks) > _BLOCKS:
            rest = sum(len(ranks) for ranks, _ in blocks[_BLOCKS:])
            shown += ["", f"and {rest} more ranks, in other places"]
        suspects = [f"suspect: {spelled_ranks(ranks)}: {why}" for why, ranks in _by_value(self.suspects()).items()]
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        head = [f"meshwright, {when}: {self.cause}; the job ends", *suspects[:4]]
        return "\n".join(line[:_WIDTH] for line in [*head, *shown])

    def full(self) -> str:
        """The report, and every rank's stack: for a file."""
        stacks = [
            f"rank {rank}, the innermost frame last:\n" + "\n".join(f"  {line}" for line in where.stack)
            for rank, where in sorted(self.where.items())
        ]
        return "\n\n".join([self.report(), *stacks]) + "\n"

    def _blocks(self) -> list[tuple[tuple[int, ...], list[str]]]:
        """(ranks, what is told of them): those that are in the same place together, suspects first."""
        told = _by_value({rank: tuple(self._told(rank)) for rank in range(self.ranks)})
        suspects = self.suspects()
        order = sorted(told.items(), key=lambda item: (not any(r in suspects for r in item[1]), item[1][0]))
        return [(tuple(ranks), list(lines)) for lines, ranks in order]

    def _told(self, rank: int) -> list[str]:
        who, beat, where = self.who.get(rank), self.beats.get(rank), self.where.get(rank)
        if beat is None:
            return [f"{who.host if who else 'unknown host'}  has not come to the first step"]
        head = [who.host if who else "", f"step {where.step}" if where else f"last heard of in step {beat.step}"]
        action = where.action if where else beat.action
        stage = f"stage {Action.parse(action).stage}, action {action}" if action else who.stages if who else ""
        head += [stage] if stage else []
        if where is None:
            return ["  ".join([*head, "has left"] if beat.state == LEFT else head)]
        head += [where.phase] if where.phase else []
        idle = self.idle.get(rank, 0.0)
        head += [f"got on last {idle:.0f} s ago"] if idle >= 1 else []
        lines = ["  ".join(filter(None, head))]
        with_ = f" with {spelled_ranks(list(where.group))}" if where.group else ""
        lines += [beat.error] if beat.state == FAILED else []
        state = f"waits in {where.collective}{with_}" if where.collective else "in no collective"
        lines.append(f"{state}; {where.entered} entered" if where.entered else state)
        lines += [line for line in (where.line, where.within) if line]
        lines += [f"recorded last: {where.recorded}"] if where.recorded else []
        return lines


def spelled_ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0 2–5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(r[0]) if len(r) == 1 else f"{r[0]} {r[1]}" if len(r) == 2 else f"{r[0]}–{r[-1]}" for r in runs]
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(parts)}"


def _indented(head: str, lines: list[str]) -> list[str]:
    head = f"{head:<9}"
    return [head + "  " + lines[0], *(" " * 11 + line for line in lines[1:])]


def _by_value(of: Mapping[int, V]) -> dict[V, list[int]]:
    """Value → ranks that have it, in the order of the first of them."""
    ranks: dict[V, list[int]] = {}
    for rank, value in of.items():
        ranks.setdefault(value, []).append(rank)
    return ranks
