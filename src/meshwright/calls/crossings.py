"""``Crossings``: performs the forks and joins of one microbatch's forward through one stage, in the order of the program."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshwright.calls.exchange import Exchange
from meshwright.calls.stage import StageProgram
from meshwright.calls.values import StageValues
from meshwright.regions import Fork, Join


class Crossings:
    """Forks and joins on every rank of the place around the branches. (A place is the number of a submesh; 0 is the trunk.)

    Its tables, with their invariants:

        _moves     forks and joins still to come, in the order of the program. It only shrinks.
        _anchors   place → tensors of autograd to which the join of its open region is tied; empty between regions.
        _tails     place → the tensor to which the fork of its next region is tied.

    Args:
        values: the values of the forward.
        exchange: performs the collectives; needed if there are branches.
    """

    def __init__(self, program: StageProgram, values: StageValues, exchange: Exchange | None) -> None:
        self._program, self._graph, self._values, self._exchange = program, program.graph, values, exchange
        self._moves = [m for m in program.forks_and_joins if m.around in program.rank_places]
        self._anchors: dict[int, list[Tensor]] = {}
        self._tails: dict[int, Tensor] = {}

    def due(self, position: int) -> bool:
        """Whether a fork or join at or before a position is still to come."""
        return bool(self._moves) and self._moves[0].position <= position

    def cross(self, keep: Callable[[Tensor, int], None]) -> None:
        """Performs the next fork or join.

        Args:
            keep: (tensor, number): from now on the tensor stands for the value with this number.
        """
        move = self._moves.pop(0)
        if isinstance(move, Fork):
            self._fork(move)
        else:
            self._join(move, keep)

    def _fork(self, move: Fork) -> None:
        """Gives branches their tensors for the values of a fork, and notes the anchor for the join."""
        assert self._exchange is not None
        # A value that only some branches take is on the ranks of these branches alone.
        numbers = [n for n in move.values if n in self._values or n not in self._program.branch_only]
        # The memory of a value that is still on its way may be filled later.
        tensors = {n: self._values.required(n, self._values.branch_tensor(n, move.around)[0]) for n in numbers}
        branch_inputs, anchor = self._exchange.fork(move, tensors, self._graph, self._tails.get(move.around))
        self._anchors.setdefault(move.around, []).append(anchor)
        for n, takers in move.takers.items():
            self._values.fork(n, takers & self._program.rank_places, branch_inputs)

    def _join(self, move: Join, keep: Callable[[Tensor, int], None]) -> None:
        """Makes values of branches values of the place around, and keeps those that a later fork gives to other branches."""
        assert self._exchange is not None
        values = self._values
        numbers = [(n, branch) for n, branch in move.values if branch in self._program.rank_places]
        branch_values = {n: values.required(n, values.awaited_branch_tensor(n, branch)) for n, branch in numbers}
        tail = self._tails.get(move.around)
        anchors = self._anchors.pop(move.around, []) or ([] if tail is None else [tail])
        joined = self._exchange.join(move, branch_values, self._graph, anchors)
        self._tails[move.around] = joined.tail
        for n, t in joined.values.items():
            keep(t, n)
        for n in branch_values:
            if (move.around, n) in self._program.kept_for_forks:
                self._exchange.keep_for_fork(move.around, n, joined.values[n])
        values.join(move, branch_values, joined.arriving, joined.wait)
