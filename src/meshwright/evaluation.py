"""Which modules of a model are in evaluation mode (``module.eval()``).

A forward may do something else in it. What was found out about a forward, and what was recorded of it, is of the modes that
its modules had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

Evaluating = frozenset[str]
"""The names of the modules that are in evaluation mode."""


class Modes:
    """The modes of the modules of a model, as somebody sets them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())  # a walk costs more than a look at each

    def now(self) -> Evaluating:
        """The modules that are in evaluation mode."""
        return frozenset(name for name, module in self._modules if not module.training)


@contextmanager
def in_evaluation(model: nn.Module, names: Evaluating) -> Iterator[None]:
    """For the time of a block these modules of a model are in evaluation mode, and the others train."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for name, module in model.named_modules():
            module.training = name not in names
        yield
    finally:
        for module, training in before:
            module.training = training
