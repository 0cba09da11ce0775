"""Forks and joins as functions of autograd: what a forward hands to branches and takes of them, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.graph import ModelGraph
from meshwright.regions import Fork, Join
from meshwright.runtime.branches.pieces import Arrival
from meshwright.spmd.comm import locally

if TYPE_CHECKING:
    from meshwright.runtime.branches.exchange import Branching


@dataclass
class Gate:
    """Where the gradient of a value that other branches send back is waited for, before what made the value takes it."""

    arrival: Arrival | None = None


class ForkValues(torch.autograd.Function):
    """Values as branches see them, a tensor for each branch; their gradients, summed over the branches."""

    @staticmethod
    @locally
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
        ctx.set_materialize_grads(False)  # none stays none
        return anchor.detach(), *(t.detach() for t in values)  # no views to autograd: a model may write to them

    @staticmethod
    @locally
    def backward(ctx: Any, anchor: Tensor | None, *gradients: Tensor | None) -> Any:
        by_pair = dict(zip(ctx.pairs, gradients, strict=True))
        sums = ctx.branching.gradients(ctx.move, ctx.graph, by_pair, ctx.rows, ctx.gates)
        return *(None,) * 6, *(sums.pop(n, None) for n, _ in ctx.pairs)


class GateValue(torch.autograd.Function):
    """A value as it is; backward, until its gradient is there."""

    @staticmethod
    @locally
    def forward(ctx: Any, gate: Gate, value: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.set_materialize_grads(False)  # none stays none
        return value.detach()

    @staticmethod
    @locally
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if ctx.gate.arrival is not None:
            ctx.gate.arrival.wait()
        return None, gradient


class JoinValues(torch.autograd.Function):
    """Values of branches, whole on every rank around them."""

    @staticmethod
    @locally
    def forward(
        ctx: Any,
        branching: Branching,
        move: Join,
        joined: dict[int, Tensor],
        mine: tuple[int, ...],
        tied: frozenset[int],
        anchors: int,
        *entering: Tensor,
    ) -> Any:
        ctx.branching, ctx.branches, ctx.rows = branching, dict(move.values), branching.rows
        ctx.mine, ctx.here, ctx.tied, ctx.anchors = mine, tuple(joined), tied, anchors
        ctx.set_materialize_grads(False)  # none stays none
        out = [t.detach() for t in joined.values()]
        ctx.mark_non_differentiable(*(t for n, t in zip(joined, out, strict=True) if n not in tied))
        return entering[0].detach(), *out

    @staticmethod
    @locally
    def backward(ctx: Any, anchor: Tensor | None, *gradients: Tensor | None) -> Any:
        of = {n: g for n, g in zip(ctx.here, gradients, strict=True) if n in ctx.tied and g is not None}
        returned = [ctx.branching.returned(ctx.branches[n], of[n], ctx.rows) if n in of else None for n in ctx.mine]
        return *(None,) * 6, *(None,) * ctx.anchors, *returned
