"""``restored_afterwards``: a context for the forwards of a trial, which restores the model and the generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from meshwright.code_state import CodeState
from meshwright.generators import Generators
from meshwright.runtime.coupling.attributes import Name, changed, marks, set_attributes
from meshwright.runtime.coupling.float64 import wider
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.weights.parameters import local_tensor

Slot = tuple[nn.Module, str]
"""(module, name of a tensor in it). A forward may replace the tensor."""


@contextmanager
def restored_afterwards(
    model: nn.Module,
    random: Generators,
    code: CodeState,
    slots: Sequence[Slot],
    final_slots: list[list[Tensor]],
    final_attributes: list[dict[Name, Any]],
    *,
    begin: Mapping[Name, Any],
    wide: bool,
) -> Iterator[None]:
    """A context. At its end, the state of modules, of their code, parameters, gradients and generators is as at its beginning.

    Args:
        random: the generators from which the forwards may draw.
        code: what the model's code keeps outside of modules.
        slots: the buffers and parameters that a forward may write.
        final_slots: gets the values of the slots after the forwards.
        final_attributes: gets the plain attributes that the forwards changed, with their values after them.
        begin: attributes that have other values than now when the forwards begin.
        wide: whether buffers and attributes are in float64 during the forwards.
    """
    tensors = [(module, name, getattr(module, name)) for module, name in slots]
    parameters = [(module, name, t) for module, name, t in tensors if isinstance(t, nn.Parameter)]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        with random.kept(), ModuleState(model, [p for *_, p in parameters]).restored(_wide if wide else None):
            set_attributes(model, begin)
            before = marks(model)
            try:
                yield
            finally:
                final_attributes.append(changed(model, before))
                final_slots.append([local_tensor(getattr(*slot)).detach().clone() for slot in slots])
    finally:
        code.put_back()
        for module, name, p in parameters:
            setattr(module, name, p)
        for p, gradient in gradients:
            p.grad = gradient


def _wide(t: Tensor) -> Tensor:
    """A tensor in the dtype in which ``Float64Mode`` computes: a write to a slice of it must not be one to a converted copy."""
    return t.to(wider(t.dtype))
