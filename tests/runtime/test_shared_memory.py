"""Tensors that lie in one memory when the constructor has ended, and that each rank would have apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.workers.pool import LocalWorkers


class Net(nn.Module):
    """``made``: what the constructor does at its end; ``use``: what the forward does with it."""

    def __init__(
        self, made: Callable[[Any], None] | None = None, use: Callable[[Any, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.use = use
        if made is not None:
            made(self)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h if self.use is None else self.use(self, h)
        return self.head(torch.tanh(self.mid(h))).square().mean()


IDS = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(0))


def recipe(made: Callable[[Any], None] | None, use: Callable[[Any, Tensor], Tensor] | None, plan: str) -> mw.Recipe:
    return mw.make_recipe(partial(Net, made, use), plan, (IDS,), lambda out: out)


# --- refused: memory that a trained parameter shares -------------------------------------------------------------------


def same_data(net: Any) -> None:
    net.head.weight.data = net.embed.weight.data


def parameter_of_a_parameter(net: Any) -> None:
    net.head.weight = nn.Parameter(net.embed.weight)


def transposed(net: Any) -> None:
    net.mid.weight = nn.Parameter(net.embed.weight.data[:8].t())


def frozen_copy(net: Any) -> None:
    net.head.weight = nn.Parameter(net.embed.weight, requires_grad=False)


def buffer(net: Any) -> None:
    net.register_buffer("average", net.embed.weight.data)


def interleaved(net: Any) -> None:
    both = torch.randn(12, 12)
    net.head.weight, net.embed.weight = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 4:])


@pytest.mark.parametrize("plan", ["tp=2", "dp_shard=2", "pp=2"])
@pytest.mark.parametrize("made", [same_data, parameter_of_a_parameter, transposed, frozen_copy, buffer, interleaved])
def test_what_overlaps_a_trained_parameter_is_refused(made: Callable[[Any], None], plan: str) -> None:
    with pytest.raises(PlanError, match=r"embed\.weight and .*\n.*two tensors in the same memory"):
        recipe(made, None, plan)


def apart(net: Any) -> None:
    both = torch.randn(12, 16)
    net.head.weight, net.embed.weight = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])


def frozen_together(net: Any) -> None:
    net.embed.requires_grad_(False)
    net.head.weight = nn.Parameter(net.embed.weight, requires_grad=False)


def tied(net: Any) -> None:
    net.head.weight = net.embed.weight


@pytest.mark.parametrize("made", [apart, frozen_together, tied])
def test_what_does_not_overlap_or_is_not_trained_is_not(made: Callable[[Any], None]) -> None:
    assert recipe(made, None, "tp=2")


# --- refused: what the constructor made from a trained parameter, if the forward uses it --------------------------------


def kept_data(net: Any) -> None:
    net.kept = {"table": [net.embed.weight.data]}


def kept_view(net: Any) -> None:
    net.kept = {"table": [net.embed.weight[:]]}


def kept_result(net: Any) -> None:
    net.kept = {"table": [torch.cat([net.embed.weight, net.embed.weight])]}


def kept_in_a_closure(net: Any) -> None:
    table = net.embed.weight.detach()
    net.look_up = lambda h: h + table.mean(0)


def uses_kept(net: Any, h: Tensor) -> Tensor:
    return h + (net.look_up(h) if hasattr(net, "look_up") else net.kept["table"][0].mean(0))


@pytest.mark.parametrize("plan", ["tp=2", "dp_replicate=2", "pp=2"])
@pytest.mark.parametrize("made", [kept_data, kept_view, kept_result, kept_in_a_closure])
def test_a_use_of_what_the_constructor_made_from_a_parameter_is_refused(made: Callable[[Any], None], plan: str) -> None:
    with pytest.raises(PlanError, match=r"test_shared_memory\.py:\d+\n.*the constructor made from a parameter"):
        recipe(made, uses_kept, plan)


@pytest.mark.parametrize("made", [kept_data, kept_view, kept_result, kept_in_a_closure])
def test_what_the_forward_does_not_use_is_not(made: Callable[[Any], None]) -> None:
    assert recipe(made, None, "tp=2")


def test_old_weight_norm_is_not() -> None:
    """Its constructor computes an attribute from parameters, which a hook computes again before each use."""

    def made(net: Any) -> None:
        net.mid = torch.nn.utils.weight_norm(net.mid)

    assert recipe(made, None, "tp=2")


# --- refused: a forward that lets parameters share memory ---------------------------------------------------------------


def gives_memory(net: Any, h: Tensor) -> Tensor:
    net.head.weight.data = net.embed.weight.data
    return h


def gives_the_parameter(net: Any, h: Tensor) -> Tensor:
    net.head.weight = net.embed.weight
    return h


@pytest.mark.parametrize("plan", ["tp=2", "dp_shard=2", "pp=2", "pp=2,tp=2"])
@pytest.mark.parametrize(
    ("use", "said"),
    [
        (gives_memory, r"test_shared_memory\.py:\d+\n.*gives head\.weight the memory of embed\.weight"),
        (gives_the_parameter, r"head\.weight\n.*in whose place the first forward puts others"),
    ],
)
def test_a_forward_that_joins_parameters_is_refused(use: Callable[[Any, Tensor], Tensor], said: str, plan: str) -> None:
    with pytest.raises(PlanError, match=said):
        recipe(None, use, plan)


# --- right: buffers and attributes that share memory --------------------------------------------------------------------


def two_buffers(net: Any, size: int) -> None:
    net.register_buffer("count", torch.zeros(size, dtype=torch.float64))
    net.register_buffer("part", net.count[:8])


def an_attribute(net: Any, size: int) -> None:
    net.register_buffer("count", torch.zeros(size, dtype=torch.float64))
    net.part = net.count[:8]


def writes_whole(net: Any, h: Tensor) -> Tensor:
    net.count.mul_(0.9).add_(0.1)
    return h * (1 + net.part)


def writes_part(net: Any, h: Tensor) -> Tensor:
    net.part.lerp_(h.detach().mean((0, 1)), 0.1)
    return h * (1 + net.count[:8])


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": "tp=2", "microbatches": 2},
        {"mesh": "pp=2", "microbatches": 1},
        {"mesh": "pp=2", "microbatches": 2},
        "pp=2,tp=2",
    ],
    ids=str,
)
@pytest.mark.parametrize("use", [writes_whole, writes_part])
# A large buffer is a reason to cut beside it, and has no memory while it is built.
@pytest.mark.parametrize(("made", "size"), [(two_buffers, 8), (two_buffers, 6000), (an_attribute, 6000)])
def test_buffers_in_one_memory_are_the_one_devices(
    made: Callable[[Any, int], None], size: int, use: Any, plan: Any, workers: LocalWorkers
) -> None:
    build = partial(Net, partial(made, size=size), use)
    report = mw.check(build, (IDS,), plan, loss=lambda out: out, dtype=torch.float64, workers=workers, steps=4)
    assert report.passed, report


# --- refused: trained tensors of a loss that are not in the model -------------------------------------------------------


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, out: Tensor) -> Tensor:
        return (out * self.scale).square().mean()


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("plan", ["tp=2", "dp_shard=2", "pp=2"])
def test_a_loss_with_trained_tensors_is_refused(plan: str) -> None:
    criterion, variance = Criterion(), torch.zeros(12, requires_grad=True)
    frozen = Criterion().requires_grad_(False)
    said = r"loss, .*test_shared_memory\.py:\d+\n.*a trained tensor of shape \(12,\) that is not in the model"
    for loss in (lambda out: criterion(out), lambda out: (out.square() * (-variance).exp()).mean()):
        with pytest.raises(PlanError, match=said):
            mw.make_recipe(Logits, plan, (IDS,), loss)
    assert mw.make_recipe(Logits, plan, (IDS,), lambda out: frozen(out))


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_a_loss_that_makes_tensors_with_gradients_is_not(plan: str) -> None:
    def loss(out: Tensor) -> Tensor:
        one, two = torch.ones(12, requires_grad=True), torch.tensor([2.0], requires_grad=True)
        (slope,) = torch.autograd.grad((one.square() * two).sum(), one, create_graph=True)
        return (out * slope.detach()).square().mean()

    assert mw.make_recipe(Logits, plan, (IDS,), loss)
