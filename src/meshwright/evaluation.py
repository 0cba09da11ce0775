"""Which modules of a model are in evaluation mode (``module.eval()``).

A forward may take another path in it. So what is recorded of a forward holds only for the modes that its modules had then.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

Evaluating = frozenset[str]
"""The names of the modules that are in evaluation mode."""


@dataclass(frozen=True)
class StepMode:
    """On what the path of a forward may depend beside its batch: ``self.training`` and ``torch.is_grad_enabled()``.

    Attributes:
        evaluating: the modules that are in evaluation mode.
        backward: whether the step computes gradients.
    """

    evaluating: Evaluating
    backward: bool


class Modes:
    """Reads the modes of the modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        # Listed once: to walk over a model takes longer than to look at each module.
        self._modules = list(model.named_modules())

    def now(self) -> Evaluating:
        """The modules that are in evaluation mode."""
        return frozenset(name for name, module in self._modules if not module.training)


@contextmanager
def in_evaluation(model: nn.Module, names: Set[str]) -> Iterator[None]:
    """Within the block these modules of a model are in evaluation mode, and all others in training mode."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for name, module in model.named_modules():
            module.training = name not in names
        yield
    finally:
        for module, training in before:
            module.training = training
