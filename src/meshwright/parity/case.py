"""``Case``: the model, the batch and the number of steps that a check compares; and the rows of each forward.

    forward   0      1      2      3      4      ...
    rows      abcd   abcd   bcdb   cdab   dabd   ...    for a batch with the rows abcd

The first two forwards get the batch itself: a model that writes to its batch must not change the next forward. Later ones
get its rows permuted, and every second one has one row twice: a model that keeps values of an earlier batch is then wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.deferred import Build
from meshwright.runtime.apply import cast_type
from meshwright.runtime.rows.batch import copied, has_rows, mapped, place_rows, tensors_in
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.submesh import bounds

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Parameters → an optimizer of them: a class of ``torch.optim``, or a ``functools.partial`` of one."""

_FIRST = 2  # forwards that get the batch itself


@dataclass(frozen=True)
class Case:
    """The arguments of a check, as they are sent to the workers.

    Attributes:
        build: returns the model.
        batch: the global batch: the rows of all data ranks together.
        loss: of the model's output.
        dtype: of parameters, batch and computation.
        steps: number of optimizer steps.
        seed: of the plan.
        device: ``cpu`` or ``cuda``.
        training: False: the model is put in eval mode.
        dropout: whether the model keeps its dropout.
        same: whether every forward gets the same rows.
        optimizer: of parameters; None: SGD with momentum (``parity.optimizer``).
        start: parameters before the first step; None: as they are built, and perturbed.
    """

    build: Build
    batch: Any
    loss: Loss
    dtype: torch.dtype
    steps: int
    seed: int
    device: str = "cpu"
    training: bool = True
    dropout: bool = False
    same: bool = False
    optimizer: MakeOptimizer | None = None
    start: Mapping[str, Tensor] | None = None

    def forwards(self, step: int) -> int:
        """Number of forwards and backwards in a step: two in one of the steps, which accumulates gradients, else one."""
        return 2 if step == min(1, self.steps - 1) else 1

    def batches(self, index: int = 0, ranks: int = 1) -> Iterator[Any]:
        """The batches of data rank ``index`` of ``ranks``, one for each forward, without an end."""
        for forward in count():
            batch = self._cast()
            rows = rows_of(batch) if forward >= _FIRST and not self.same and _has_rows(batch) else 0
            yield self._part(place_rows(batch, rows, row_numbers(rows, forward)) if rows else batch, index, ranks)

    def _cast(self) -> Any:
        # A copy for each forward: a model may write to its batch, and place_rows does.
        return cast(copied(self.batch), self.dtype, self.device)

    @staticmethod
    def _part(batch: Any, index: int, ranks: int) -> Any:
        return batch if ranks == 1 else take_rows(batch, *bounds(rows_of(batch), ranks)[index])


def row_numbers(rows: int, forward: int) -> list[int]:
    """For each row of a forward, its number in the batch of the check.

    >>> row_numbers(4, 2), row_numbers(4, 3)
    ([1, 2, 3, 1], [2, 3, 0, 1])
    """
    rotated = [(row + forward - 1) % rows for row in range(rows)]
    return [*rotated[:-1], rotated[0]] if rows and not forward % 2 else rotated


def _has_rows(batch: Any) -> bool:
    return any(t.dim() and has_rows(t, t.shape[0]) for t in tensors_in(batch))


def cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    """``value`` with its tensors on the device, and floating and complex ones in the type of the check.

    A tensor that needs neither a move nor a cast is not copied.
    """
    return mapped(lambda t: t.to(device, cast_type(t.dtype, dtype)), value)
