"""Scales means, so that the mean over a batch is right if the batch is divided unevenly.

A model that computes a mean loss takes the mean over the rows that it sees. If rows are divided over data ranks and
microbatches, and some labels are ignored or masked, the mean of these means is not the mean over the batch. To weight them by
rows is not enough. So before a step the *label program* runs: the part of the forward that depends on the batch alone and on
which divisors of means depend (runtime/rows/label_program.py):

    F.cross_entropy(x, labels)            counts the labels that are not ignored, or sums their weights
    (losses * mask).sum() / mask.sum()    any sum over rows of the batch by which a number is divided or multiplied
    losses[mask].mean()                   counts the elements that values of the batch pick

One all-reduce adds up these sums over all ranks and microbatches. While the forward runs, ``MeanScaler`` multiplies a mean over
labels or elements by a factor, and replaces a divisor by the divisor of one device (``mask.sum().clamp(min=1)`` of all rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.runtime.rows.count_tracker import CountTracker
from meshwright.runtime.rows.label_counter import LabelCounts
from meshwright.runtime.rows.label_program import SumId
from meshwright.runtime.rows.tape import Name, Tape
from meshwright.spmd.torch_functions import writes

MEAN, SUM, RATIO, SPLIT = "mean", "sum", "ratio", "split"
"""How the losses of pieces combine into the loss of the batch:

    mean     the mean, weighted by rows; a sum that is divided by a count is divided by the count of all rows
    sum      the sum
    ratio    as mean, for a mean that is divided by another mean: the divisor is the mean over all rows
    split    as mean, because the plan says so: only means over labels use the count of all rows
"""


@dataclass
class MeanFactors:
    """The factors for the means of a piece, with which the mean over all pieces is right.

    Attributes:
        counts: the counts of the piece.
        totals: identity of a sum → the sum over all pieces.
        rows: the number of rows of all pieces.
        weight: the weight of the piece in the mean.
        way: how the losses of pieces combine into the loss of the batch.
        ignored_labels: gets the number of ignored labels of each mean that could not be counted.
    """

    counts: LabelCounts
    totals: Mapping[SumId, Tensor]
    rows: float
    weight: float
    way: str
    ignored_labels: list[Tensor] = field(default_factory=list)

    @property
    def are_all_one(self) -> bool:
        """Whether nothing has to be scaled, as far as the host knows without reading from a device."""
        program = self.counts.program
        are_on_host = all(total.device.type == "cpu" for total in self.totals.values())
        if program.has_other_uses or program.uncounted_lines or not are_on_host:
            return False
        return all(abs(float(self._factor(sum_id)) - 1) <= 1e-12 for sum_id in program.sums.values())

    def of_mean(self, count: Name) -> float | Tensor:
        """The factor for a mean over ``count``; a tensor on the device, if it was counted there."""
        sum_id = self.counts.program.sums.get(count)
        if sum_id is None:
            return 1.0
        factor = self._factor(sum_id)
        return float(factor) if factor.device.type == "cpu" else factor

    def _factor(self, sum_id: SumId) -> Tensor:
        """The factor for a mean whose divisor is this sum: the piece's part of the total, divided by the piece's weight."""
        total = self.totals[sum_id].view(())
        if not self.weight:
            return torch.ones_like(total)
        part = self.counts.sums[sum_id].view(()).to(total.device, non_blocking=True)
        return torch.where(total == 0, 1.0, part / total * self.of_quotient)

    @property
    def of_quotient(self) -> float:
        """The factor for a quotient whose divisor is that of all rows."""
        return 1.0 if self.way == SUM or not self.weight else 1 / self.weight


class MeanScaler(CountTracker):
    """While on, scales means over labels and elements, and replaces values that depend on sums over rows by those of all rows.

    Args:
        factors: of the piece that runs; None: nothing is scaled.
    """

    def __init__(self, factors: MeanFactors | None) -> None:
        super().__init__(Tape(0) if factors is None else factors.counts.program.tape)
        self._factors = factors
        self._interventions = 0

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``. A block in which it scaled something, or named a tensor, is not recorded."""
        return True

    def interventions(self) -> int:
        """See ``FunctionMode``."""
        return self._interventions

    def follows(self, t: Tensor) -> bool:
        """See ``FunctionMode``."""
        return self.name(t) is not None or self.has_picked_rows(t)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward. A segment that a checkpoint recomputes is scaled likewise."""
        if self._factors is None:
            yield
            return
        factors, counts = self._factors, self._factors.counts
        self._values = counts.values.copied()
        for name, sum_id in counts.program.sums.items():
            self._values.replace(name, counts.one_device_value(name, factors.totals[sum_id], factors.rows))
        with super().on(model):
            yield

    def on_mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountTracker``."""
        self._interventions += 1
        loss = func(*args, **kwargs)
        return loss if count is None or self._factors is None else scaled_loss(loss, self._factors.of_mean(count))

    def on_product(
        self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See ``CountTracker``."""
        assert self._factors is not None
        self._interventions += 1
        if self._factors.way == SPLIT:
            return func(*args, **kwargs)
        program = self._factors.counts.program
        factor = 1.0 if self._factors.way == RATIO else self._factors.of_quotient
        if name in program.from_sums:
            value = self._values.value(name).to(args[at].dtype)
            if at == 0 and writes(func, args, kwargs):  # the function writes to the number itself: change its value
                with torch.no_grad():
                    args[0].copy_(value)
            else:
                args = (value, args[1]) if at == 0 else (args[0], value)
        elif not (name in program.batch_numbers and divides and at == 1):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if factor == 1.0:
            return result
        return result.mul_(factor) if result is args[0] else result * factor

    def number_for(self, name: Name, number: Tensor) -> Tensor:
        """See ``CountTracker``. The weights of pieces add up to 1, so a mean of all rows needs no factor."""
        assert self._factors is not None
        if self._factors.way in (SUM, SPLIT) or name not in self._factors.counts.program.batch_means:
            return number
        self._interventions += 1
        value: Tensor = self._values.value(name).to(number.dtype)
        return value

    def on_uncounted_mean(
        self, target: Tensor, ignore_index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See ``CountTracker``."""
        self._interventions += 1
        if self._factors is not None:
            self._factors.ignored_labels.append((target == ignore_index).sum().detach())
        return func(*args, **kwargs)


def scaled_loss(loss: Tensor, factor: float | Tensor) -> Tensor:
    """A loss times its factor. A mean over nothing, 0/0, has the factor 0 and becomes 0."""
    if isinstance(factor, float):
        return loss * factor if factor else torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0
    is_of_nothing = torch.logical_and(factor == 0, torch.logical_not(torch.isfinite(loss.detach())))
    wide = torch.promote_types(loss.dtype, torch.float32)  # as in a product with a Python number
    return (loss.masked_fill(is_of_nothing, 0).to(wide) * factor.to(wide)).to(loss.dtype)


__all__ = ["MEAN", "RATIO", "SPLIT", "SUM", "MeanFactors", "MeanScaler", "scaled_loss"]
