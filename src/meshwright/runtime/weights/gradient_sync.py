"""``GradientSync``: when FSDP2 reduces gradients over data ranks: once a step, whatever the microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.weights.fsdp import add_up_unreduced, reduce_gradients


class GradientSync:
    """Reduces in the backward of the last microbatch, unit by unit; or, if stages or branches run parts of a forward, after all
    backwards, as their order is not that of the units.

    Args:
        model: of which FSDP2 shards what the plan says, if anything.
        at_end: reduce after all backwards.

    Attributes:
        ends: while a forward runs whose backward reduces: from where else that backward is to begin, so that it reduces units
            whose input has no gradient too (unused.py).
    """

    def __init__(self, model: nn.Module, *, at_end: bool) -> None:
        self._model, self._at_end = model, at_end
        self._last: bool | None = None  # what units were told
        self.ends: list[Tensor] | None = None

    def begin(self) -> None:
        """Before the first forward."""
        if self._at_end:
            self._set(last=False)

    def begin_microbatch(self, *, last: bool) -> None:
        """Before the forward of a microbatch."""
        if not self._at_end:
            self._set(last=last)

    @contextmanager
    def forward(self) -> Iterator[list[Tensor]]:
        """For the time of a microbatch's forward: gives what ``ends`` are found."""
        tensors: list[Tensor] = []
        self.ends = None if self._at_end else tensors
        try:
            yield tensors
        finally:
            self.ends = None

    def weights_done(self) -> None:
        """After a backward of weights alone, the second half of one."""
        add_up_unreduced(self._model)

    def finish(self) -> None:
        """After the last backward."""
        if self._at_end:
            self._set(last=True)
            reduce_gradients(self._model)

    def _set(self, *, last: bool) -> None:
        """Tells all units, which is a walk over the model, unless they know."""
        if isinstance(self._model, FSDPModule) and last is not self._last:
            self._last = last
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
            if self._at_end:
                self._model.set_reshard_after_backward(last)
