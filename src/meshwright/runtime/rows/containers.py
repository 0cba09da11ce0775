"""What forwards leave in lists, dicts and objects of a batch (the hidden states of a recurrent network, for the next step).

the caller's batch ── rows ──► microbatches, each in containers of its own ──► forward, which changes these
        ▲                                                                           │
        └───────── one change of each, with the rows of all microbatches ◄──────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.changes import Holders, before_of, make_changes, map_changed
from meshwright.calls.structure import PLAIN, is_constant, tensors_of
from meshwright.described import dense
from meshwright.graph import Change
from meshwright.private import pytree, version
from meshwright.runtime.rows.batch import has_rows, tensors_in, versions
from meshwright.runtime.rows.microbatches import arguments_of, rows_of

NOTE = (
    "the forward changes an object of the batch in a way that is not repeated (it removes from a list, or adds to a set): the "
    "caller's own object is as it was"
)


class BatchContainers:
    """The containers and objects of microbatches, before their forwards.

    Args:
        batches: the microbatches.
        weights: of each. One without rows has the weight 0, and runs a row in place of its own.
    """

    def __init__(self, batches: Sequence[Any], weights: Sequence[float]) -> None:
        self._has_rows = [weight > 0 for weight in weights]
        self._rows = [rows_of(batch) for batch in batches]
        self._tensors = [tensors_in(batch) for batch in batches]
        self._arguments = [arguments_of(batch) for batch in batches]
        self._holders = [Holders(arguments) for arguments in self._arguments]

    def give_back(self, batch: Any, rows: int, first_row: int | None, full: Callable[[Tensor], Tensor]) -> bool:
        """Makes in the caller's batch the changes that the forwards made in their microbatches.

        Args:
            batch: this rank's rows, as the caller passed them; ``rows``: their number.
            first_row: where they begin, if there is one microbatch with the rows of all data ranks.
            full: a tensor → the tensor with all elements.

        Returns:
            Whether all changes were made. If they cannot be repeated, none is.

        Raises:
            RuntimeError: microbatches left what does not fit together.
        """
        arguments = arguments_of(batch)
        if self._are_those_of(arguments):
            for change in self._holders[0].changes(_no_number, ())[0]:
                map_changed(full, change, arguments)
            return True
        found = [holders.changes(_no_number, ()) for holders in self._holders]
        if not all(repeatable for *_, repeatable in found):
            return False
        changes_of_each = [changes for changes, *_ in found]
        if not any(changes_of_each):
            return True
        kinds = list(map(_without_tensors, changes_of_each))
        if any(kind != kinds[0] for kind in kinds):
            raise _do_not_fit("other numbers or items than in the others")
        tensors = [[t for change in changes for t in tensors_of(change.items)] for changes in changes_of_each]
        given, memo = tensors_in(batch), dict[int, Tensor]()
        before = [t for change in changes_of_each[0] for t in before_of(change, arguments)]
        for old, *of_one in zip(before, *tensors, strict=True):
            which = {self._index(m, t) for m, t in enumerate(of_one)}
            if None not in which and len(which) == 1:
                memo[id(of_one[0])] = given[which.pop()]  # type: ignore[index]  # a tensor of the batch, in another place
            else:
                have_rows = None if old is None else has_rows(old, rows)
                memo[id(of_one[0])] = self._joined([full(t) for t in of_one], first_row, rows, have_rows)
        try:
            make_changes(changes_of_each[0], arguments, memo)
        except TypeError:  # an object that cannot be copied
            return False
        return True

    def _are_those_of(self, arguments: Any) -> bool:
        """Whether the forward has had the caller's own containers: a batch that is not divided is passed on as it is."""
        (args, kwargs), (own_args, own_kwargs) = arguments, self._arguments[0]
        pairs = (*zip(args, own_args, strict=True), *((kwargs[key], own_kwargs[key]) for key in kwargs))
        return all(a is b for a, b in pairs if not isinstance(a, Tensor))

    def _index(self, m: int, t: Tensor) -> int | None:
        """The index of a tensor among those of a microbatch; None if it is a new one."""
        return next((i for i, own in enumerate(self._tensors[m]) if own is t), None)

    def _joined(self, pieces: Sequence[Tensor], first_row: int | None, rows: int, have_rows: bool | None) -> Tensor:
        """One tensor for the caller, of those that the microbatches left. ``have_rows``: whether the tensor in whose place it
        comes has rows; None: there was none."""
        may_have = all(has_rows(t, n) for t, n in zip(pieces, self._rows, strict=True))
        have_rows = may_have and have_rows is not False
        if first_row is not None:
            return pieces[0][first_row : first_row + rows] if have_rows else pieces[0]
        if have_rows:
            own_rows = [t if own else t[:0] for t, own in zip(pieces, self._has_rows, strict=True)]
            return torch.cat(own_rows) if len(own_rows) > 1 else own_rows[0]
        pieces = [t for t, own in zip(pieces, self._has_rows, strict=True) if own] or pieces[:1]
        if any(t.shape != pieces[0].shape or not torch.equal(dense(t), dense(pieces[0])) for t in pieces):
            raise _do_not_fit("a tensor without rows (dim 0) with other values than in the others")
        return pieces[0]


@dataclass(frozen=True)
class Left:
    """What a forward has left in a batch.

    Attributes:
        rows: the number of rows of the batch.
        form: what has changed in containers and objects, without tensors.
        tensors: the tensors that it put there; and those of the batch to which it has written.
    """

    rows: int
    form: Any
    tensors: list[Tensor]

    def is_joined(self, parts: Sequence[Left], close: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether this, of all rows, is what ``parts`` of the rows have left, joined."""
        if any(part.form != self.form or len(part.tensors) != len(self.tensors) for part in parts):
            return False
        for t, *pieces in zip(self.tensors, *(part.tensors for part in parts), strict=True):
            divided = all(has_rows(piece, part.rows) for piece, part in zip(pieces, parts, strict=True))
            if divided and has_rows(t, self.rows):
                pieces = [torch.cat(pieces)]
            if not all(close(t, piece) for piece in pieces):
                return False
        return True


class BatchWatch:
    """A batch before a forward of a trial."""

    def __init__(self, batch: Any) -> None:
        self._holders = Holders(arguments_of(batch)) if has_containers(batch) else None
        self._rows, self._tensors, self._versions = rows_of(batch), tensors_in(batch), versions(batch)

    def left(self, full: Callable[[Tensor], Tensor]) -> Left:
        """What the forward has left. ``full``: a tensor → the tensor with all elements."""
        changes = self._holders.changes(_no_number, ())[0] if self._holders is not None else ()
        tensors = [full(t).detach() for change in changes for t in tensors_of(change.items)]
        written = (t for t, before in zip(self._tensors, self._versions, strict=True) if version(t) != before)
        return Left(self._rows, _without_tensors(changes), [*tensors, *written])


def has_containers(batch: Any) -> bool:
    """Whether a model gets anything with a batch that it can change, besides tensors."""
    args, kwargs = arguments_of(batch)
    return not all(isinstance(x, Tensor) or type(x) in PLAIN for x in (*args, *kwargs.values()))


def _no_number(t: Tensor) -> int | None:
    return 0


def _without_tensors(changes: Sequence[Change]) -> Any:
    """Changes, as a value to compare, with a constant in place of each tensor."""
    items = [pytree.tree_map(lambda x: "tensor" if isinstance(x, Tensor) else x if is_constant(x) else type(x), c.items)
             for c in changes]  # fmt: skip
    return [(c.where, c.removed, c.before, c.length) for c in changes], items


def _do_not_fit(what: str) -> RuntimeError:
    return RuntimeError(
        f"the forward of a microbatch left in a list, dict or object of the batch {what}, so the caller's own cannot be "
        "what it is on one device. Run all rows together (rows: whole), or leave there what has rows"
    )
