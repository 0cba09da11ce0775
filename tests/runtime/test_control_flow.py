"""torch's control flow in a model: in every layout it runs as the Python that it stands for, with parameters in its branches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.spmd.uncompiled import AS_PYTHON, UNCOMPILED
from meshwright.workers.pool import LocalWorkers

WIDTH, LENGTH = 8, 5


def _by_activation(model: Any, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda t: model.a(t).relu(), lambda t: model.b(t), (h,))


def _by_parameter(model: Any, h: Tensor) -> Tensor:
    return torch.cond(model.gate > 0, lambda t: model.a(t) * model.gate, lambda t: model.b(t), (h,))


def _by_one_then_other(model: Any, h: Tensor) -> Tensor:
    a = model.a(h)
    return torch.cond(a.sum() > 0, lambda t: model.b(t), lambda t: t.cos(), (_by_activation(model, a),))


def _while(model: Any, h: Tensor) -> Tensor:
    return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, model.b(h).tanh()), (torch.tensor(0), model.a(h)))[1]


def _scan(model: Any, h: Tensor, **kwargs: Any) -> Tensor:
    def step(carry: dict[str, Tensor], x: dict[str, Tensor]) -> Any:
        now = torch.tanh(carry["c"] @ model.b.weight + x["x"])
        return {"c": now}, {"now": now.clone(), "last": carry["c"] * 2}

    start = {"c": torch.zeros_like(h[:, 0])}
    carry, outputs = scan(step, start, {"x": model.a(h)}, dim=1, **kwargs)
    return outputs["now"] + outputs["last"] * carry["c"][:, None]


def _map(model: Any, h: Tensor) -> Tensor:
    mapped = torch_map(lambda x, scale: {"y": model.a(x["x"]).relu() * scale}, {"x": h}, model.gate)
    return mapped["y"] + model.b(h)


def _associative(model: Any, h: Tensor) -> Tensor:
    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    pairs = torch.sigmoid(model.a(h)), model.b(h)
    return associative_scan(combine, pairs, dim=1, combine_mode="generic")[1]


FLOWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cond of an activation": _by_activation,
    "cond of a parameter": _by_parameter,
    "cond after cond": _by_one_then_other,
    "cond, recomputed": lambda model, h: checkpoint(_by_activation, model, h, use_reentrant=False),
    "while": _while,
    "scan": _scan,
    "scan, backwards": partial(_scan, reverse=True),
    "map": _map,
    "associative scan": _associative,
}


class Flow(nn.Module):
    def __init__(self, flow: str) -> None:
        super().__init__()
        self.flow, self.a, self.b = flow, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor([0.3]))

    def forward(self, h: Tensor) -> Tensor:
        return FLOWS[self.flow](self, h)


class Model(nn.Module):
    def __init__(self, flow: str) -> None:
        super().__init__()
        self.begin, self.side, self.end = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.flow = Flow(flow)

    def forward(self, x: Tensor) -> Tensor:
        h = self.begin(x)
        return self.end(self.flow(h) + self.side(h)).square().mean()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Loss and gradients; zeros of a parameter that was not used."""
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("flow", FLOWS)
def test_control_flow_as_python_gives_what_torch_gives(flow: str) -> None:
    torch._dynamo.reset()  # what it has compiled for other tests
    torch.manual_seed(0)
    model = Model(flow).double()
    for seed in range(3):  # conditions of some are true, of others false
        of_torch = gradients(model, batch(seed))
        with UNCOMPILED.on():
            as_python = gradients(model, batch(seed))
        torch.testing.assert_close(as_python, of_torch, rtol=1e-12, atol=1e-12)


def test_a_loop_without_a_turn_returns_what_it_was_given() -> None:
    """Its gradient, too, which torch 2.13 gets wrong."""
    x, step = batch().requires_grad_(), torch.tensor(3)
    with UNCOMPILED.on():
        (state,) = while_loop(
            lambda s: s["i"] < 3, lambda s: ({"i": s["i"] + 1, "x": s["x"] * 2},), ({"i": step, "x": x},)
        )
    state["x"].sum().backward()
    assert state["i"] == 3 and torch.equal(state["x"], x) and state["x"] is not x
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("length", [1, LENGTH])
def test_an_elementwise_scan_is_a_loop(length: int) -> None:
    """torch runs it on a GPU alone."""
    x, y = batch()[:length].abs(), batch(1)[:length]
    scanned = AS_PYTHON["associative_scan"](lambda a, b, c, d: {"sum": a + c, "product": b * d}, (x, y), ())
    torch.testing.assert_close(scanned["sum"], x.cumsum(0))
    torch.testing.assert_close(scanned["product"], y.cumprod(0))


PLANS: dict[str, Any] = {
    "tp": "tp=2",
    "pp": {"mesh": "pp=2", "microbatches": 2},
    "dp_shard": "dp_shard=2",
    "dp_replicate": {"mesh": "dp_replicate=2", "recompute": "blocks"},
    "branch": {"mesh": "tp=2", "modules": {"flow": {"on": "tp[0]"}, "side": {"on": "tp[1]"}}},
}
QUICK = {
    ("cond of an activation", "tp"), ("cond of an activation", "pp"), ("cond of an activation", "dp_shard"),
    ("cond after cond", "branch"), ("while", "pp"), ("scan", "tp"), ("map", "dp_shard"),
}  # fmt: skip


@pytest.mark.parametrize(
    "flow,plan",
    [
        pytest.param(flow, plan, marks=() if (flow, plan) in QUICK else pytest.mark.proof)
        for flow in FLOWS
        for plan in PLANS
    ],
)
def test_control_flow_in_every_layout(flow: str, plan: str, workers: LocalWorkers) -> None:
    report = mw.check(
        partial(Model, flow), (batch(),), PLANS[plan], loss=lambda out: out, dtype=torch.float64, workers=workers
    )
    assert report, report


@pytest.mark.parametrize("flow", ["cond of an activation", "while", "scan"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2"])
def test_what_control_flow_costs_is_predicted(flow: str, mesh: str) -> None:
    prediction = mw.predict(partial(Model, flow), (batch().float(),), mesh, loss=lambda out: out, hardware="a100-80")
    assert float(prediction.seconds) > 0
