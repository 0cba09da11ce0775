"""The optimizer of both sides: SGD with momentum, over gradients that are clipped to a norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.runtime.job import Job
from meshwright.runtime.weights.parameters import local_tensor

MAX_NORM = 1.0  # what gradients are clipped to: below the norm of most, so that clipping has something to do


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Not Adam, which divides a gradient by its own size: where it is zero but for rounding, the update is noise."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


class LocalSGD:
    """The same over what this rank holds: the update of a slice is the slice of the update.

    Over three axes DTensor takes ten times as long as the update to find out, once for each function and shape, how it may
    be divided.
    """

    def __init__(self, job: Job) -> None:
        self._parameters = list(job.parameters())
        self._held = [local_tensor(p).detach() for p in self._parameters]
        self._optimizer = sgd(self._held)

    def step(self) -> None:
        """With the gradients that the job's parameters have."""
        for held, p in zip(self._held, self._parameters, strict=True):
            held.data = local_tensor(p).data  # a forward may have assigned another
            held.grad = None if p.grad is None else local_tensor(p.grad)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """No parameter has a gradient."""
        for p in (*self._held, *self._parameters):
            p.grad = None
