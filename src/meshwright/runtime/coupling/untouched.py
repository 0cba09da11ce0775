"""``untouched``: forwards that leave no trace: what they change of a model, and of random numbers, is put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.generators import Generators
from meshwright.runtime.coupling.attributes import Name, changed, marks, put
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.weights.parameters import local_tensor

Slot = tuple[nn.Module, str]  # where a module keeps a tensor, as a forward may put another in its place


@contextmanager
def untouched(
    model: nn.Module,
    random: Generators,
    slots: Sequence[Slot],
    left: list[list[Tensor]],
    attributes: list[dict[Name, Any]],
    *,
    begin: Mapping[Name, Any],
    wide: bool,
) -> Iterator[None]:
    """Forwards within leave the state of modules, parameters, gradients and random numbers as they were.

    Args:
        random: the generators that the forwards may draw from.
        slots: what a forward may change: buffers, parameters that it writes.
        left: gets what the forwards made of the slots.
        attributes: gets the plain attributes that the forwards changed.
        begin: what attributes are when the forwards begin, if not what they are now.
        wide: buffers are of float64 meanwhile.
    """
    tensors = ((slot, getattr(*slot)) for slot in slots)
    parameters = [(*slot, p) for slot, p in tensors if isinstance(p, nn.Parameter)]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        with random.kept(), ModuleState(model, [p for *_, p in parameters]).restored():
            if wide:
                _widen(slots)
            put(model, begin)
            before = marks(model)
            try:
                yield
            finally:
                attributes.append(changed(model, before))
                left.append([local_tensor(getattr(*slot)).detach().clone() for slot in slots])
    finally:
        for module, name, p in parameters:
            setattr(module, name, p)
        for p, gradient in gradients:
            p.grad = gradient


def _widen(slots: Sequence[Slot]) -> None:
    """Makes buffers of float64."""
    for module, name in slots:
        t = getattr(module, name)
        if not isinstance(t, nn.Parameter) and t.is_floating_point():
            setattr(module, name, t.double())
