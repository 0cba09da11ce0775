"""The optimizer of both sides of a check: SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.runtime.job import Job
from meshwright.runtime.weights.parameters import local_tensor

# both sides clip gradients to this norm; most models' gradients are larger, so that clipping has an effect
MAX_NORM = 1.0
_LR, _MOMENTUM = 0.1, 0.9  # large, so that a wrong gradient shows in the parameters after three steps


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD with momentum. Not Adam: it divides a gradient by its own size, so that a gradient of pure rounding errors, which
    should be zero, gives a large random update."""
    return torch.optim.SGD(parameters, lr=_LR, momentum=_MOMENTUM, foreach=False)


class LocalSGD:
    """``sgd`` over a rank's local tensors. It is element-wise, so the update of a slice is the slice of the update.

    With DTensors on a mesh of three axes, DTensor's sharding propagation takes ten times as long as the update, once for each
    function and shape.
    """

    def __init__(self, job: Job) -> None:
        self._parameters = list(job.parameters())
        self._local = [local_tensor(p).detach() for p in self._parameters]
        self._optimizer = sgd(self._local)

    def step(self) -> None:
        """One step with the gradients of the job's parameters."""
        for local, p in zip(self._local, self._parameters, strict=True):
            local.data = local_tensor(p).data  # a forward may have assigned new data
            local.grad = None if p.grad is None else local_tensor(p.grad)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Removes the gradients of all parameters."""
        for p in (*self._local, *self._parameters):
            p.grad = None
