"""``Flight``: a microbatch in one stage, from its forward to the end of its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from meshwright.runtime.pipeline.deferred_weight_grads import DeferredWeightGrads


@dataclass
class Flight:
    """What a stage holds of a microbatch.

    Attributes:
        arrived: values, then gradients, from stages of other ranks; by their numbers.
        received: value → the leaf that collects its gradient.
        outputs: value → what this stage gave, for other stages.
        loss: on the last stage.
        ends: from where else a backward begins, if it begins (runtime/weights/unused.py).
        grads: value → its gradients, from each stage that takes it.
        back: value → the gradient that goes back to the stage that gave it, if any, until it is sent.
        later: what is left to do of a backward in halves.
    """

    arrived: list[tuple[int, Tensor]] = field(default_factory=list)
    received: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    ends: list[Tensor] = field(default_factory=list)
    grads: dict[int, list[Tensor]] = field(default_factory=dict)
    back: dict[int, Tensor | None] = field(default_factory=dict)
    later: DeferredWeightGrads | None = None

    def roots(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """What a backward starts from, with the gradients that other stages gave, summed."""
        if self.loss is not None:
            roots = [self.loss, *self.ends] if self.loss.requires_grad else []
            return roots, [None for _ in roots]
        pairs = [
            (t, sum(self.grads[n][1:], self.grads[n][0])) for n, t in self.outputs.items()
            if n in self.grads and _has_graph(t)
        ]  # fmt: skip
        return [t for t, _ in pairs], [g for _, g in pairs]

    def end(self) -> None:
        """After the backward: nothing is held but what is still to be sent back, and what is left of the backward."""
        self.received, self.outputs, self.loss, self.ends, self.grads, self.arrived = {}, {}, None, [], {}, []


def _has_graph(t: Tensor) -> bool:
    """Whether a backward can start at a tensor. A view that was made without gradients says that it requires them, as what it
    is a view of does, and has no graph."""
    if not t.requires_grad or t.grad_fn is not None:
        return t.requires_grad
    try:
        get_gradient_edge(t)
    except (AssertionError, RuntimeError):
        return False
    return True
