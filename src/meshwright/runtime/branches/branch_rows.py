"""``BranchRows``: the rows of a value that this rank runs, in a branch whose data ranks run some rows each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.submesh import Coordinate, Submeshes


class BranchRows:
    """The rows of this rank in its branches.

    Attributes:
        rows: the number of rows of the running forward.
    """

    def __init__(self, places: Submeshes, rank: int) -> None:
        self._places, self._rank, self._rank_places = places, rank, places.of(rank)
        self.rows = 0

    def local_rows(self, place: int, shape: Sequence[int], rows: int) -> slice | None:
        """This rank's rows of a tensor with this shape in a place; None if it has all rows."""
        shares = self._places[place].shares(shape, rows)
        return None if shares is None else slice(*shares[self.at(place).share])

    def at(self, place: int) -> Coordinate:
        """This rank's coordinate in a place to which it belongs."""
        coordinate = self._places.at(self._rank, place)
        assert coordinate is not None
        return coordinate

    def leads(self, branch: int, rows: int) -> bool:
        """Whether this rank's gradient of a value that a branch took counts in the sum over ranks. If several ranks have equal
        gradients, only the first of them counts."""
        if branch not in self._rank_places:
            return False
        coordinate = self.at(branch)
        return coordinate.tp == 0 and (coordinate.share == 0 or self._places[branch].divides(rows))

    def take_rows(self, place: int, t: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        local_slice = None if isinstance(t, nn.Parameter) else self.local_rows(place, t.shape, self.rows)
        return t if local_slice is None else t[local_slice]

    def row_counts(self, place: int) -> tuple[int, int]:
        """See ``calls.exchange.Exchange``."""
        local_slice = self.local_rows(place, (self.rows,), self.rows)
        return self.rows, self.rows if local_slice is None else local_slice.stop - local_slice.start

    def padded(self, place: int, rows: Tensor, like: Tensor) -> Tensor:
        """See ``calls.exchange.Exchange``."""
        local_slice = self.local_rows(place, like.shape, self.rows)
        if local_slice is None:
            return rows
        strides = like.stride()
        order = sorted(range(like.dim()), key=lambda d: -strides[d])  # dims in the order of memory, outermost first
        permuted = rows.permute(order)
        before, after = list(permuted.shape), list(permuted.shape)
        before[order.index(0)], after[order.index(0)] = local_slice.start, len(like) - local_slice.stop
        all_rows = torch.cat([permuted.new_zeros(before), permuted, permuted.new_zeros(after)], order.index(0))
        return all_rows.permute([order.index(d) for d in range(like.dim())])

    def returned(self, branch: int, gradient: Tensor, rows: int) -> Tensor:
        """The gradient of this rank's part of a joined value, from the gradient of the whole value.

        ``rows``: the number of rows of the forward.
        """
        if (local_slice := self.local_rows(branch, gradient.shape, rows)) is not None:
            return gradient[local_slice]
        if not self._places[branch].divides(rows) and self.at(branch).share:
            return torch.zeros_like(gradient)  # of ranks that run the same rows, one has the gradient
        return gradient
