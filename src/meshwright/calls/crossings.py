"""``Crossings``: the forks and joins of one microbatch's forward through one stage, each in its turn."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshwright.calls.exchange import Exchange
from meshwright.calls.stage import StageProgram
from meshwright.calls.values import StageValues
from meshwright.regions import Fork, Join


class Crossings:
    """Has values enter branches, and become those of the place around, on every rank of that place.

    Its tables, each with what holds of it throughout:

        _moves     forks and joins still to come, in the order of the program. Shrinks only.
        _anchors   place → what the join of its open region is tied to; empty between regions.
        _tails     place → what the next region of it is tied to.

    Args:
        values: of the forward.
        exchange: what forks and joins, if there are branches.
    """

    def __init__(self, program: StageProgram, values: StageValues, exchange: Exchange | None) -> None:
        self._program, self._graph, self._values, self._exchange = program, program.graph, values, exchange
        self._moves = [m for m in program.moves if m.around in program.mine]
        self._anchors: dict[int, list[Tensor]] = {}
        self._tails: dict[int, Tensor] = {}

    def due(self, position: int) -> bool:
        """Whether a fork or join up to a position is still to come."""
        return bool(self._moves) and self._moves[0].position <= position

    def cross(self, keep: Callable[[Tensor, int], None]) -> None:
        """The next fork or join.

        Args:
            keep: (tensor, number): the tensor is what stands for a value from now on.
        """
        move = self._moves.pop(0)
        if isinstance(move, Fork):
            self._fork(move)
        else:
            self._join(move, keep)

    def _fork(self, move: Fork) -> None:
        assert self._exchange is not None
        apart = self._program.apart  # what only some branches take is on their ranks alone
        standing = {  # of what is on its way, the memory
            n: self._values.inside(n, self._values.of_branch(n, move.around)[0])
            for n in move.values if n in self._values or n not in apart
        }  # fmt: skip
        handed, anchor = self._exchange.fork(move, standing, self._graph, self._tails.get(move.around))
        self._anchors.setdefault(move.around, []).append(anchor)
        for n, takers in move.takers.items():
            self._values.fork(n, takers & self._program.mine, handed)

    def _join(self, move: Join, keep: Callable[[Tensor, int], None]) -> None:
        assert self._exchange is not None
        values = self._values
        made_here = {n: values.inside(n, values.taken(n, b)) for n, b in move.values if b in self._program.mine}
        tail = self._tails.get(move.around)
        anchors = self._anchors.pop(move.around, []) or ([] if tail is None else [tail])
        joined = self._exchange.join(move, made_here, self._graph, anchors)
        self._tails[move.around] = joined.tail
        for n, t in joined.values.items():
            keep(t, n)
        for n in made_here:
            if (move.around, n) in self._program.lent:
                self._exchange.lend(move.around, n, joined.values[n])
        values.join(move, made_here, joined.arriving, joined.wait)
