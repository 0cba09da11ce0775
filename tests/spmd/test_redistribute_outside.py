"""Our moves against the typed collectives of ``spmd_types``, made by others: results, gradients, gradients of gradients.

    ours            theirs
    enter           convert(I → R)                  I, invariant: a full tensor with a whole gradient
    reduce          all_reduce(P → I)               R, replicate: a full tensor whose gradient is a sum over ranks
    reduce_scatter  reduce_scatter(P → S)           P, partial: summands
    gather          all_gather(S → I)               S, shard: slices of a dim
    gather_enter    all_gather(S → R)
    take            convert(I → S)
    exchange        all_to_all(S → S)
    hold            convert(I → P)

Their slices are even. A gradient has the dual type: of S a slice, of P a full tensor, of I a whole one, of R summands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout import even_shard
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis, Ledger
from meshwright.workers.pool import LocalWorkers

pytest.importorskip("spmd_types")

SHAPE = (6, 12, 4)  # divides by 2 and by 3 ranks in its first two dims
Move = Callable[[Tensor], Tensor]


def pairs(axis: Axis) -> dict[str, tuple[str, Move, Move]]:
    """Name → (what the input is: whole, a summand, or a slice of dim 1; our move; theirs)."""
    import spmd_types as spmd
    from spmd_types import I, P, R, S

    group: Any = axis.group
    own, other = even_shard(1, SHAPE[1], axis.size), even_shard(0, SHAPE[0], axis.size)
    return {
        "enter": ("whole", lambda x: redistribute.copy_in(x, axis), lambda x: spmd.convert(x, group, src=I, dst=R)),
        "reduce": ("summand", lambda x: redistribute.all_reduce(x, axis), lambda x: spmd.all_reduce(x, group, src=P, dst=I)),
        "reduce_scatter": ("summand", lambda x: redistribute.reduce_scatter(x, axis, own),
                           lambda x: spmd.reduce_scatter(x, group, src=P, dst=S(1))),
        "gather": ("slice", lambda x: redistribute.all_gather(x, axis, own),
                   lambda x: spmd.all_gather(x, group, src=S(1), dst=I)),
        "gather_enter": ("slice", lambda x: redistribute.all_gather_in(x, axis, own),
                         lambda x: spmd.all_gather(x, group, src=S(1), dst=R)),
        "take": ("whole", lambda x: redistribute.keep_slice(x, axis, own), lambda x: spmd.convert(x, group, src=I, dst=S(1))),
        "exchange": ("slice", lambda x: redistribute.all_to_all(x, axis, own, other),
                     lambda x: spmd.all_to_all(x, group, src=S(1), dst=S(0))),
        "hold": ("whole", lambda x: redistribute.keep_first(x, axis), lambda x: spmd.convert(x, group, src=I, dst=P, expert_mode=True)),
    }  # fmt: skip


# The type of a move's gradient at its output, by which ranks' gradients differ: summands and slices do, whole ones do not.
SAME_ON_ALL = ("reduce", "gather", "hold")


def compare() -> dict[str, list[str]]:
    """For each move, which of result, gradient and second gradient differ from theirs on this rank."""
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, Ledger())
    found = {}
    for name, (kind, ours, theirs) in pairs(axis).items():
        (a, a1, a2), (b, b1, b2) = (_derivatives(move, kind, name, axis) for move in (ours, theirs))
        same = {"result": _near(a, b), "gradient": _near(a1, b1), "second gradient": _near(a2, b2)}
        found[name] = [what for what, equal in same.items() if not equal]
    return found


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def _derivatives(move: Move, kind: str, name: str, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """(result, gradient of the input, gradient of the output's gradient)."""
    x = _numbers(SHAPE, 1)
    if kind == "slice":
        x = even_shard(1, SHAPE[1], axis.size).take(x, axis.rank).clone()
    elif kind == "summand":
        x = x + _numbers(SHAPE, 10 + axis.rank)
    x.requires_grad_()
    y = move(x)
    c = _numbers(y.shape, 2 if name in SAME_ON_ALL else 20 + axis.rank).requires_grad_()
    (gradient,) = torch.autograd.grad(y, x, c, create_graph=True)
    h = _numbers(gradient.shape, 3 if kind == "whole" else 30 + axis.rank)
    (second,) = torch.autograd.grad(gradient, c, h)
    return y.detach(), gradient.detach(), second


def _numbers(shape: Any, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="gloo has no all-to-all, which the other library takes")
@pytest.mark.parametrize("ranks", [2, 3])
def test_moves_and_their_gradients_are_those_of_another_library(ranks: int, workers: LocalWorkers) -> None:
    for found in workers.run(compare, ranks=ranks):
        assert found == {name: [] for name in found} and len(found) == 8
