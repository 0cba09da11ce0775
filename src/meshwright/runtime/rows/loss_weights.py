"""Weights of losses: the mean over a batch stays right if the batch is divided unevenly.

A model that computes a mean loss takes the mean over the rows that it sees. If rows are divided over data ranks and
microbatches, and some labels are ignored or masked, the mean of these means is not the mean over the batch; to weight them by
rows is not enough. So before a step the *label program* runs: the part of the forward that depends on the batch alone and on
which divisors of means depend (runtime/rows/label_counter.py):

    F.cross_entropy(x, labels)            counts the labels that are not ignored, or sums their weights
    (losses * mask).sum() / mask.sum()    any sum over rows of the batch by which a number is divided or multiplied
    losses[mask].mean()                   counts the elements that values of the batch pick

One all-reduce adds up these sums over all ranks and microbatches. While the forward runs, a mean over labels or elements is
scaled by the share of the piece, and a divisor is replaced by that of one device (``mask.sum().clamp(min=1)`` of the whole
batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.runtime.rows.counted_uses import CountedUses
from meshwright.runtime.rows.label_counter import Counted, Slot
from meshwright.runtime.rows.label_program import Name, Tape
from meshwright.spmd.torch_functions import writes

MEAN, SUM, RATIO, SPLIT = "mean", "sum", "ratio", "split"
"""How the losses of pieces make the loss of the batch:

    mean     the mean, weighted by rows; a sum that is divided by a count is divided by the count of all rows
    sum      the sum
    ratio    as mean, for a mean that is divided by another mean: the other is that of all rows
    split    as mean, because the plan says so: only means over labels use the count of all rows
"""


@dataclass
class Share:
    """How to scale the means of a piece, so that the mean over all pieces is right.

    Attributes:
        counted: the counts of the piece.
        totals: slot → the sum over all pieces.
        rows: the number of rows of all pieces.
        weight: the weight of the piece in the mean.
        way: how the losses of pieces make the loss of the batch.
        ignored: gets the number of ignored labels of each mean that could not be counted.
    """

    counted: Counted
    totals: Mapping[Slot, Tensor]
    rows: float
    weight: float
    way: str
    ignored: list[Tensor] = field(default_factory=list)

    @property
    def even(self) -> bool:
        """Whether nothing has to be scaled, as far as the host knows without reading from a device."""
        program, total = self.counted.program, self.totals
        if program.divides or program.lines or not all(t.device.type == "cpu" for t in total.values()):
            return False
        return all(abs(float(self._ratio(slot)) - 1) <= 1e-12 for slot in program.slots.values())

    def of_mean(self, count: Name) -> float | Tensor:
        """The factor for a mean over ``count``; a tensor on the device, if it was counted there."""
        slot = self.counted.program.slots.get(count)
        if slot is None:
            return 1.0
        ratio = self._ratio(slot)
        return float(ratio) if ratio.device.type == "cpu" else ratio

    def _ratio(self, slot: Slot) -> Tensor:
        total = self.totals[slot].view(())
        if not self.weight:
            return torch.ones_like(total)
        part = self.counted.sums[slot].view(()).to(total.device, non_blocking=True)
        return torch.where(total == 0, 1.0, part / total * self.of_part)

    @property
    def of_part(self) -> float:
        """The factor for a quotient whose divisor is that of all rows."""
        return 1.0 if self.way == SUM or not self.weight else 1 / self.weight


class Shares(CountedUses):
    """While on, means over labels and elements are scaled, and values that depend on sums over rows are those of all rows."""

    def __init__(self, share: Share | None) -> None:
        super().__init__(Tape(0) if share is None else share.counted.program.tape)
        self._share = share
        self._weighed = 0

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``. A block in which it scaled something, or named a tensor, is not recorded."""
        return True

    def interventions(self) -> int:
        """See ``FunctionMode``."""
        return self._weighed

    def follows(self, t: Tensor) -> bool:
        """See ``FunctionMode``."""
        return self.name(t) is not None or self.picks(t)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward. A segment that a checkpoint recomputes is scaled likewise."""
        if self._share is None:
            yield
            return
        share, program = self._share, self._share.counted.program
        self._replay = share.counted.replay.again()
        for name, slot in program.slots.items():
            self._replay.put(name, share.counted.whole(name, share.totals[slot], share.rows))
        with super().on(model):
            yield

    def mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        self._weighed += 1
        loss = func(*args, **kwargs)
        return loss if count is None or self._share is None else weighed(loss, self._share.of_mean(count))

    def part(self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        assert self._share is not None
        self._weighed += 1
        if self._share.way == SPLIT:
            return func(*args, **kwargs)
        program = self._share.counted.program
        scale = 1.0 if self._share.way == RATIO else self._share.of_part
        if name in program.from_sums:
            whole = self._replay.value(name).to(args[at].dtype)
            if at == 0 and writes(func, args, kwargs):  # the function writes to the number itself: change its value
                with torch.no_grad():
                    args[0].copy_(whole)
            else:
                args = (whole, args[1]) if at == 0 else (args[0], whole)
        elif not (name in program.given and divides and at == 1):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if scale == 1.0:
            return result
        return result.mul_(scale) if result is args[0] else result * scale

    def term(self, name: Name, number: Tensor) -> Tensor:
        """See ``CountedUses``. The weights of pieces add up to 1, so a mean of all rows needs no factor."""
        assert self._share is not None
        if self._share.way in (SUM, SPLIT) or name not in self._share.counted.program.terms:
            return number
        self._weighed += 1
        whole: Tensor = self._replay.value(name).to(number.dtype)
        return whole

    def uncounted(self, target: Tensor, ignored: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        self._weighed += 1
        if self._share is not None:
            self._share.ignored.append((target == ignored).sum().detach())
        return func(*args, **kwargs)


def weighed(loss: Tensor, scale: float | Tensor) -> Tensor:
    """A loss times its factor. A mean over nothing, 0/0, has the factor 0 and becomes 0."""
    if isinstance(scale, float):
        return loss * scale if scale else torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0
    of_nothing = torch.logical_and(scale == 0, torch.logical_not(torch.isfinite(loss.detach())))
    wide = torch.promote_types(loss.dtype, torch.float32)  # as in a product with a Python number
    return (loss.masked_fill(of_nothing, 0).to(wide) * scale.to(wide)).to(loss.dtype)


__all__ = ["MEAN", "RATIO", "SPLIT", "SUM", "Share", "Shares", "weighed"]
