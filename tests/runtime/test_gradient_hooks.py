"""Hooks on parameters and values, and backwards of a model's own, get the gradients that one device has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad as grad_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import meshwright as mw
from meshwright.runtime.weights.local_part import HandOver, local_part

ROWS, WIDTH = 8, 6


class Net(nn.Module):
    """Four layers; a subclass puts something on its parameters, or on a value between the second and third."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.begin()

    def begin(self):
        pass

    def between(self, h):
        return h

    def forward(self, x):
        h = x
        for i, layer in enumerate(self.layers):
            h = layer(h).tanh()
            if i == 1:
                h = self.between(h)
        return {"loss": (h - x).square().mean()}


def of_norm_one(g):
    return g / (1e-6 + g.norm())


def clamped(g):
    return g.clamp(-0.01, 0.01)


class ParameterNorm(Net):
    def begin(self):
        for p in self.parameters():
            p.register_hook(of_norm_one)


class ParameterMask(Net):
    """Trains some elements alone; the first hook gives nothing, the second writes to what it gets."""

    def begin(self):
        self.seen = []
        for layer in self.layers:
            layer.weight.register_hook(lambda g: self.seen.append(tuple(g.shape)))
            layer.weight.register_hook(lambda g: g.mul_(torch.arange(WIDTH).remainder(2)))


class Removed(Net):
    """The model takes its hook away in a forward."""

    def begin(self):
        self.handle = self.layers[0].weight.register_hook(lambda g: 0 * g)

    def between(self, h):
        self.handle.remove()
        return h


class CoupledParameterNorm(ParameterNorm):
    def between(self, h):
        return (h - h.mean(0)) / h.std(0)


class ValueClamped(Net):
    def between(self, h):
        h.register_hook(clamped)
        return h


class ValueNorm(Net):
    def between(self, h):
        h.register_hook(of_norm_one)
        return h


class CoupledValueClamped(ValueClamped):
    def between(self, h):
        return super().between((h - h.mean(0)) / h.std(0))


class WeightClamped(Net):
    """A value without rows: each part of the rows gives it a part of its gradient."""

    def between(self, h):
        weight = self.layers[0].weight * 1
        weight.register_hook(clamped)
        return h @ weight


class WeightDoubled(Net):
    def between(self, h):
        weight = self.layers[0].weight * 1
        weight.register_hook(lambda g: 2 * g)
        return h @ weight


class NormBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return of_norm_one(g)


class FunctionNorm(Net):
    def between(self, h):
        return NormBackward.apply(h)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return clamped(g) * weight, (g * x).sum(0)


class FunctionOfRows(Net):
    def begin(self):
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def between(self, h):
        return Scaled.apply(h, self.scale)


class FunctionOfParameters(FunctionOfRows):
    """Of no rows, and clamped: a part of the rows gives it a part of its gradient. In another stage it is given parameters that are
    not there."""

    def between(self, h):
        return h * Scaled.apply(self.scale[None], self.layers[0].bias)


class Again(torch.autograd.Function):
    """Runs a module again in its backward, which asks for gradients of its own."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, g)
        return x.grad, None


class FunctionAgain(Net):
    def begin(self):
        self.inner = nn.Linear(WIDTH, WIDTH)

    def between(self, h):
        return Again.apply(h, self.inner)


class InPlaceLoss(torch.autograd.Function):
    """Makes the gradient in its forward, and writes to it in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.gradient = 2 * x / x.numel()
        return x.square().mean()

    @staticmethod
    def backward(ctx, g):
        return ctx.gradient.mul_(g)


class Frequent(Net):
    """A table whose gradient is divided by how often a row of it stands in the batch."""

    def begin(self):
        self.table = nn.Embedding(3, WIDTH, scale_grad_by_freq=True)

    def between(self, h):
        return h + self.table((10 * h.detach().sum(-1)).long() % 3)


class Sparse(Net):
    def begin(self):
        self.table = nn.Embedding(3, WIDTH, sparse=True)

    def between(self, h):
        return h + self.table((10 * h.detach().sum(-1)).long() % 3)


class FunctionLoss(Net):
    def forward(self, x):
        return {"loss": InPlaceLoss.apply(self.layers[1](self.layers[0](x).tanh()) - x)}


class ModuleNorm(Net):
    def begin(self):
        self.layers[1].register_full_backward_hook(lambda m, of_inputs, of_outputs: tuple(map(of_norm_one, of_inputs)))


class ModuleNormBefore(Net):
    def begin(self):
        self.layers[1].register_full_backward_pre_hook(lambda m, of_outputs: tuple(map(of_norm_one, of_outputs)))


class ModuleScaled(Net):
    def begin(self):
        self.layers[1].register_full_backward_hook(lambda m, of_inputs, of_outputs: (2 * of_inputs[0],))


APART = (
    ParameterNorm, ParameterMask, Removed, ValueClamped, WeightDoubled, FunctionOfRows, FunctionAgain, FunctionLoss,
    ModuleScaled, Sparse,
)  # fmt: skip
COUPLED = (
    CoupledParameterNorm, ValueNorm, CoupledValueClamped, WeightClamped, FunctionNorm, ModuleNorm, ModuleNormBefore,
    Frequent, FunctionOfParameters,
)  # fmt: skip


def sample():
    return {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def on_one_device(build):
    torch.manual_seed(0)
    model = build().double()
    for _ in range(2):  # without zero_grad: gradients add up
        loss = model(**sample())["loss"]
        loss.backward()
    return loss.item(), {name: None if p.grad is None else p.grad.to_dense() for name, p in model.named_parameters()}


def in_job(builds, plan):
    found = []
    for build in builds:
        job = mw.parallelize(build, {**plan, "seed": 0}, batch=sample(), dtype=torch.float64)
        mesh, batch = job.recipe.mesh, sample()
        rows = ROWS // mesh.data_size
        first = rows * mesh.data_index(job.rank)
        losses = [job.step({"x": batch["x"][first : first + rows]}).item() for _ in range(2)]
        found.append((losses[-1], {line.name: g for line, g in job.full_gradients()}, job.rows))
    return found


PLANS = [
    {"mesh": "dp_shard=2"},
    {"mesh": "pp=2", "microbatches": 2},
]
MORE = [{"mesh": "tp=2", "microbatches": 2}, {"mesh": "dp_replicate=2"}, {"mesh": "tp=2"}]


FEW = (
    ParameterNorm,
    ValueClamped,
    FunctionOfRows,
    ModuleScaled,
    ValueNorm,
    WeightClamped,
    FunctionNorm,
    ModuleNormBefore,
)


@pytest.mark.parametrize(
    ("builds", "plan"),
    [
        pytest.param(FEW, PLANS[1], id=f"a few-{PLANS[1]}"),
        *(pytest.param((*APART, *COUPLED), p, id=f"all-{p}", marks=pytest.mark.proof) for p in (*PLANS, *MORE)),
    ],
)
def test_hooks_and_own_backwards_are_those_of_one_device(builds, plan, workers):
    found = workers.run(in_job, builds, plan, ranks=2)[0]
    divided = plan["mesh"] != "tp=2" or "microbatches" in plan
    for build, (loss, gradients, rows) in zip(builds, found, strict=True):
        expected_loss, expected = on_one_device(build)
        assert loss == pytest.approx(expected_loss, rel=1e-12), build.__name__
        assert gradients.keys() == expected.keys()
        for name, g in expected.items():
            if g is None:
                assert gradients[name] is None, (build.__name__, name)
            else:
                torch.testing.assert_close(gradients[name], g, rtol=1e-9, atol=1e-12, msg=f"{build.__name__} {name}")
        assert not divided or rows == ("mean" if build in APART else "coupled"), build.__name__


class Waiting(Net):
    def begin(self):
        self.layers[2].bias.register_post_accumulate_grad_hook(lambda p: None)


def test_a_hook_that_waits_for_a_gradient_is_an_error_of_the_plan():
    with pytest.raises(mw.PlanError, match=r"layers\.2\.bias") as error:
        mw.make_recipe(Waiting, "dp_shard=2", sample())
    assert "register_hook" in str(error.value)


def test_a_hook_on_a_parameter_is_told():
    notes = " ".join(mw.make_recipe(ParameterNorm, "dp_shard=2", sample()).notes)
    assert "layers.{0…3}.weight" in notes and "whole gradient" in notes


PEEKED: list[bool] = []


class PeeksByValue(Net):
    """While a backward runs, looks whether a layer that comes later in the forward has its gradient."""

    def between(self, h):
        if h.requires_grad:
            h.register_hook(lambda g: PEEKED.append(self.layers[3].weight.grad is not None))
        return h


class PeeksByModule(Net):
    def begin(self):
        self.layers[2].register_full_backward_hook(lambda *_: PEEKED.append(self.layers[3].weight.grad is not None))


def peeked(model):
    PEEKED.clear()
    x = torch.randn(ROWS, WIDTH)
    job = mw.parallelize(model, {"mesh": {"tp": 2}, "verify": 0}, batch=(x,))
    for _ in range(4):
        job.module.zero_grad()
        job.step((x,))
    return PEEKED[-4:]


@pytest.mark.parametrize("model", [PeeksByValue, PeeksByModule])
def test_a_hook_finds_the_gradients_that_a_backward_has_made_so_far(model, workers):
    assert workers.run(peeked, model, ranks=2) == [[True] * 4] * 2


class TakesAGradient(Net):
    """A gradient with respect to a parameter that has a hook is part of the loss; autograd calls the hook there, too."""

    def begin(self):
        self.layers[1].weight.register_hook(lambda g: g.mul(0.5).add(0.01))

    def between(self, h):
        (gradient,) = grad_of(h.square().mean(), [self.layers[1].weight], create_graph=True)
        return h + gradient.sum(0)


@pytest.mark.parametrize("plan", ["tp=2", "tp=3", "dp_shard=2", "dp_replicate=2", "dp_shard=2,tp=2"])
def test_a_hook_is_called_for_a_gradient_that_the_forward_takes(plan, workers):
    report = mw.check(TakesAGradient, (torch.randn(ROWS, WIDTH),), plan, workers=workers, dtype=torch.float64)
    assert report, report


def test_over_pp_a_hook_and_a_gradient_that_the_forward_takes_are_an_error(workers):
    report = mw.check(TakesAGradient, (torch.randn(ROWS, WIDTH),), "pp=2", workers=workers, dtype=torch.float64)
    assert "where:    layers.1.weight" in report.failure and "remove the hook" in report.failure, report


def handed_over():
    """Of two backwards in a row, the parameter's gradient at the end of each, before and after it is handed over."""
    p = nn.Parameter(distribute_tensor(torch.ones(3), init_device_mesh("cpu", (2,)), [Replicate()]))
    gradients, seen = HandOver(), []
    local = local_part(p, gradients)
    for _ in range(2):
        with gradients.together():
            local.sum().backward()
            seen.append(p.grad is not None and p.grad.to_local().tolist())
        seen.append(p.grad.to_local().tolist())
    return seen


def test_gradients_are_handed_over_together_and_added_one_by_one(workers):
    assert workers.run(handed_over, ranks=2) == [[False, [1.0] * 3, [2.0] * 3, [2.0] * 3]] * 2
