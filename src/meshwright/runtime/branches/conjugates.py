"""Forks and joins as autograd Functions: their forward, and the exchange of gradients in their backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.graph import ModelGraph
from meshwright.regions import Fork, Join
from meshwright.runtime.branches.pieces import Arrival
from meshwright.spmd.comm import without_function_modes

if TYPE_CHECKING:
    from meshwright.runtime.branches.exchange import Branching


@dataclass
class Gate:
    """Holds the arrival of a value's gradient, which other branches send back. The backward of the value waits for it."""

    arrival: Arrival | None = None


class ForkValues(torch.autograd.Function):
    """Gives each branch a tensor for each value that it takes. Backward sums the gradients over the branches."""

    @staticmethod
    @without_function_modes
    def forward(
        ctx: Any,
        branching: Branching,
        move: Fork,
        graph: ModelGraph,
        pairs: tuple[tuple[int, int], ...],
        gates: Mapping[int, Gate],
        anchor: Tensor,
        *values: Tensor,
    ) -> Any:
        ctx.branching, ctx.move, ctx.graph, ctx.pairs, ctx.gates = branching, move, graph, pairs, gates
        ctx.rows = branching.rows
        ctx.set_materialize_grads(False)  # no gradient stays None
        return anchor.detach(), *(t.detach() for t in values)  # no views to autograd: a model may write to them

    @staticmethod
    @without_function_modes
    def backward(ctx: Any, anchor: Tensor | None, *gradients: Tensor | None) -> Any:
        by_pair = dict(zip(ctx.pairs, gradients, strict=True))
        sums = ctx.branching.gradients(ctx.move, ctx.graph, by_pair, ctx.rows, ctx.gates)
        return *(None,) * 6, *(sums.pop(n, None) for n, _ in ctx.pairs)


class GateValue(torch.autograd.Function):
    """Returns the value. Backward waits until its gradient has arrived."""

    @staticmethod
    @without_function_modes
    def forward(ctx: Any, gate: Gate, value: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.set_materialize_grads(False)  # no gradient stays None
        return value.detach()

    @staticmethod
    @without_function_modes
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if ctx.gate.arrival is not None:
            ctx.gate.arrival.wait()
        return None, gradient


class JoinValues(torch.autograd.Function):
    """Returns joined values, whole on every rank around the branches. Backward gives each branch its gradients."""

    @staticmethod
    @without_function_modes
    def forward(
        ctx: Any,
        branching: Branching,
        move: Join,
        joined: dict[int, Tensor],
        made_here: tuple[int, ...],
        differentiable: frozenset[int],
        anchors: int,
        *inputs: Tensor,
    ) -> Any:
        ctx.branching, ctx.branches, ctx.rows = branching, dict(move.values), branching.rows
        ctx.made_here, ctx.joined, ctx.differentiable, ctx.anchors = made_here, tuple(joined), differentiable, anchors
        ctx.set_materialize_grads(False)  # no gradient stays None
        out = [t.detach() for t in joined.values()]
        ctx.mark_non_differentiable(*(t for n, t in zip(joined, out, strict=True) if n not in differentiable))
        return inputs[0].detach(), *out

    @staticmethod
    @without_function_modes
    def backward(ctx: Any, anchor: Tensor | None, *gradients: Tensor | None) -> Any:
        by_value = {
            n: g for n, g in zip(ctx.joined, gradients, strict=True) if n in ctx.differentiable and g is not None
        }
        branch_gradients = [
            ctx.branching.returned(ctx.branches[n], by_value[n], ctx.rows) if n in by_value else None
            for n in ctx.made_here
        ]
        return *(None,) * 6, *(None,) * ctx.anchors, *branch_gradients
