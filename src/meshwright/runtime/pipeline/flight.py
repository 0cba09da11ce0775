"""``Flight``: the tensors of one microbatch in one stage, from its forward to the end of its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from meshwright.runtime.module_state import AttributeValues
from meshwright.runtime.pipeline.deferred_weight_grads import DeferredWeightGrads


@dataclass
class Flight:
    """The tensors of a microbatch that a stage holds. Values have the numbers of the recorded graph.

    Attributes:
        arrived: (number, tensor) of values, later of gradients, from stages of other ranks.
        received: number of a value → the leaf that collects its gradient.
        outputs: number of a value → the tensor that this stage computed for other stages.
        loss: on the last stage.
        ends: other tensors from which a backward begins, if there is one (runtime/weights/unused.py).
        grads: number of an output → its gradients, one from each stage that uses it.
        input_grads: number of a received value → its gradient, which is sent to the stage that computed the value; None if
            the value has no gradient. An item is removed when it is sent.
        attributes: those of modules after the forward, if it has checkpoints, which its backward runs again.
        deferred: the deferred weight gradients, if the backward is split in two halves.
    """

    arrived: list[tuple[int, Tensor]] = field(default_factory=list)
    received: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    ends: list[Tensor] = field(default_factory=list)
    grads: dict[int, list[Tensor]] = field(default_factory=dict)
    input_grads: dict[int, Tensor | None] = field(default_factory=dict)
    attributes: AttributeValues | None = None
    deferred: DeferredWeightGrads | None = None

    def roots(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """(tensors from which the backward starts, their gradients: the sums of those from other stages)."""
        if self.loss is not None:
            roots = [self.loss, *self.ends] if self.loss.requires_grad else []
            return roots, [None for _ in roots]
        pairs = [
            (t, sum(self.grads[n][1:], self.grads[n][0])) for n, t in self.outputs.items()
            if n in self.grads and _has_graph(t)
        ]  # fmt: skip
        return [t for t, _ in pairs], [g for _, g in pairs]

    def end(self) -> None:
        """Call after the backward: releases all tensors but the gradients to send, and the deferred weight gradients."""
        self.received, self.outputs, self.loss, self.ends, self.grads, self.arrived = {}, {}, None, [], {}, []
        self.attributes = None


def _has_graph(t: Tensor) -> bool:
    """Whether a backward can start at a tensor.

    A view under ``no_grad`` of a tensor that requires gradients says that it requires them, too, but has no graph.
    """
    if not t.requires_grad or t.grad_fn is not None:
        return t.requires_grad
    try:
        get_gradient_edge(t)
    except (AssertionError, RuntimeError):
        return False
    return True
