"""What a check compares: a model, a batch, and how long; and what each forward is given of it.

    forward   0   1   2               3           4 ...
    rows      abcd abcd  bcdb            cdab        dabd       of a batch with the rows abcd

The first two forwards have the batch itself, so that what a model writes to it in the one is seen in the other. Later ones
have its rows in other places, and every second one has one of them twice: what was kept of an earlier batch is then wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import torch

from meshwright.deferred import Build
from meshwright.runtime.apply import cast_type
from meshwright.runtime.rows.batch import copied, has_rows, mapped, place_rows, tensors_in
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.submesh import bounds

_FIRST = 2  # forwards that have the batch itself


@dataclass(frozen=True)
class Case:
    """What is compared. All of it travels to the workers."""

    build: Build
    batch: Any  # of all data ranks together
    loss: Loss
    dtype: torch.dtype
    steps: int
    seed: int
    device: str = "cpu"
    training: bool = True  # False: the model is put in eval mode
    dropout: bool = False  # whether the model keeps its dropout
    same: bool = False  # whether every forward has the same rows

    def forwards(self, step: int) -> int:
        """How many forwards and backwards a step has: two in one of them, whose gradients add up."""
        return 2 if step == min(1, self.steps - 1) else 1

    def batches(self, index: int = 0, ranks: int = 1) -> Iterator[Any]:
        """What each forward of one of so many data ranks is given, in turn, without an end."""
        first = self._part(self._cast(), index, ranks)
        if self.same or not _has_rows(first):
            yield from repeat(first)
        yield from repeat(first, _FIRST)
        for forward in count(_FIRST):
            batch = self._cast()
            rows = rows_of(batch)
            yield self._part(place_rows(batch, rows, places(rows, forward)), index, ranks)

    def _cast(self) -> Any:
        # A copy: a model may write to its batch, and rows are moved in it.
        return cast(copied(self.batch), self.dtype, self.device)

    @staticmethod
    def _part(batch: Any, index: int, ranks: int) -> Any:
        return batch if ranks == 1 else take_rows(batch, *bounds(rows_of(batch), ranks)[index])


def places(rows: int, forward: int) -> list[int]:
    """Where each row of a forward stands in the batch of a check."""
    turned = [(row + forward - 1) % rows for row in range(rows)]
    return [*turned[:-1], turned[0]] if rows and not forward % 2 else turned


def _has_rows(batch: Any) -> bool:
    return any(t.dim() and has_rows(t, t.shape[0]) for t in tensors_in(batch))


def cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """Floating and complex tensors of ``value`` in the type of the check, all on the device. What is so already is no copy."""
    return mapped(lambda t: t.to(device, cast_type(t.dtype, dtype)), value)
