"""``GradientSync``: when FSDP2 reduces gradients over data ranks: once in each step, for any number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.runtime.weights.fsdp import add_up_unreduced, reduce_gradients


class GradientSync:
    """Tells FSDP2 to reduce in the backward of the last microbatch, unit by unit. If stages or branches run parts of a forward,
    it reduces after all backwards instead, because these do not run in the order of units.

    Args:
        model: the model; FSDP2 may shard it or not.
        at_end: whether to reduce after all backwards.

    Attributes:
        ends: during a forward whose backward reduces: tensors from which this backward must also begin, so that it reduces
            units whose inputs have no gradient (unused.py). Else None.
    """

    def __init__(self, model: nn.Module, *, at_end: bool) -> None:
        self._model, self._at_end = model, at_end
        self._last: bool | None = None  # the value that the units have now
        self.ends: list[Tensor] | None = None

    def begin(self) -> None:
        """Called before the first forward of a step."""
        if self._at_end:
            self._set(last=False)

    def begin_microbatch(self, *, last: bool) -> None:
        """Called before the forward of each microbatch. ``last``: whether it is the step's last one."""
        if not self._at_end:
            self._set(last=last)

    @contextmanager
    def forward(self) -> Iterator[list[Tensor]]:
        """A context for a microbatch's forward. Yields a list, to which the forward adds its ``ends``."""
        tensors: list[Tensor] = []
        self.ends = None if self._at_end else tensors
        try:
            yield tensors
        finally:
            self.ends = None

    def weights_done(self) -> None:
        """Called after a backward of weights alone (the second half of a zero-bubble backward)."""
        add_up_unreduced(self._model)

    def finish(self) -> None:
        """Called after the last backward of a step."""
        if self._at_end:
            self._set(last=True)
            reduce_gradients(self._model)

    def _set(self, *, last: bool) -> None:
        """Tells all units whether the next backward reduces. Skipped if they know: it walks over the model."""
        if isinstance(self._model, FSDPModule) and last is not self._last:
            self._last = last
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
            if self._at_end:
                self._model.set_reshard_after_backward(last)
