"""``Shares``: which rows of a value this rank runs in a branch whose data ranks have some rows each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.submesh import Coordinate, Submeshes


class Shares:
    """Rows of this rank in the branches that it is of.

    Attributes:
        rows: of the running forward, which divide.
    """

    def __init__(self, places: Submeshes, rank: int) -> None:
        self._places, self._rank, self._mine = places, rank, places.of(rank)
        self.rows = 0

    def rows_here(self, place: int, shape: Sequence[int], rows: int) -> slice | None:
        """This rank's rows of a tensor of this shape in a place; None where it has all."""
        shares = self._places[place].shares(shape, rows)
        return None if shares is None else slice(*shares[self.at(place).share])

    def at(self, place: int) -> Coordinate:
        coordinate = self._places.at(self._rank, place)
        assert coordinate is not None
        return coordinate

    def leads(self, branch: int, rows: int) -> bool:
        """Whether this rank's gradient of what a branch was given is one of the distinct shares of it."""
        if branch not in self._mine:
            return False
        here = self.at(branch)
        return here.tp == 0 and (here.share == 0 or self._places[branch].divides(rows))

    def share(self, place: int, t: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        rows_here = None if isinstance(t, nn.Parameter) else self.rows_here(place, t.shape, self.rows)
        return t if rows_here is None else t[rows_here]

    def portion(self, place: int) -> tuple[int, int]:
        """See ``calls.exchange.Exchange``."""
        rows_here = self.rows_here(place, (self.rows,), self.rows)
        return self.rows, self.rows if rows_here is None else rows_here.stop - rows_here.start

    def among_all(self, place: int, rows: Tensor, like: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        rows_here = self.rows_here(place, like.shape, self.rows)
        if rows_here is None:
            return rows
        strides = like.stride()
        order = sorted(range(like.dim()), key=lambda d: -strides[d])  # from the outermost dim of memory in
        laid = rows.permute(order)
        before, after = list(laid.shape), list(laid.shape)
        before[order.index(0)], after[order.index(0)] = rows_here.start, len(like) - rows_here.stop
        whole_of = torch.cat([laid.new_zeros(before), laid, laid.new_zeros(after)], order.index(0))
        return whole_of.permute([order.index(d) for d in range(like.dim())])

    def returned(self, branch: int, gradient: Tensor, rows: int) -> Tensor:
        """The gradient of what this rank gave of a value, in a forward of so many rows."""
        if (rows_here := self.rows_here(branch, gradient.shape, rows)) is not None:
            return gradient[rows_here]
        if not self._places[branch].divides(rows) and self.at(branch).share:
            return torch.zeros_like(gradient)  # ranks that run the same rows give their gradients once
        return gradient
