"""Training in the plan's own types: float32, and bfloat16 with parameters in float32, in every kind of layout.

float64 is the sharp judge and runs elsewhere; what a job does with types, it does not see. ``check`` judges a job in the
precision of its plan too: three steps, one of them of two forwards and backwards, against one device in the same types.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import branching
import meshwright as mw
from branching import beside, on
from meshwright.parity.case import Case
from meshwright.parity.one_device import reference
from meshwright.parity.precision import reference_in_precision
from meshwright.runtime.rows.loss import output_loss
from meshwright.workers.pool import LocalWorkers
from zoo import ZOO

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard2-tp2": {"mesh": {"dp_shard": 2, "tp": 2}, "microbatches": 2},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2},
    "pp2-dp_shard2": {"mesh": {"pp": 2, "dp_shard": 2}, "microbatches": 2},
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "recompute": {"mesh": {"dp_shard": 2, "tp": 2}, "recompute": "blocks"},
    "sequence": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "zero_bubble": {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "zero_bubble", "microbatches": 2},
    "odd": {"mesh": {"tp": 3}},
}
NO_BFLOAT16 = {"batchnorm", "complex_rotary", "codebook"}  # of which a kernel wants float32
PRECISIONS = ("float32", "bfloat16")
MODELS = [name for name, entry in ZOO.items() if entry.family == "issue"]
# What continuous integration runs: of each axis and each type something, with a model that needs no package.
OFTEN = {("nanogpt", "pp2-tp2", "bfloat16")}


def same_in_its_precision(build: Any, batch: Any, plan: dict[str, Any], workers: LocalWorkers) -> mw.Report:
    """The report of a check that compared in the plan's types too."""
    report = mw.check(build, batch, plan, workers=workers)
    assert report.passed, str(report)
    assert any(f"compared in {plan['precision']} too" in note for note in report.notes), report.notes
    return report


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        pytest.param(n, k, p, marks=() if (n, k, p) in OFTEN else pytest.mark.proof)
        for n in MODELS
        for k in LAYOUTS
        for p in PRECISIONS
    ],
)
def test_models_train_in_the_types_of_their_plan(name: str, layout: str, precision: str, workers: LocalWorkers) -> None:
    entry = ZOO[name]
    same_in_its_precision(entry.build, entry.batch(), {**LAYOUTS[layout], "precision": precision}, workers)


ODD = [name for name, entry in ZOO.items() if entry.family == "odd" and entry.float64 and not entry.random]
ODD_OFTEN = {("branch_on_parameter", "dp_shard2-tp2", "bfloat16")}  # FSDP2 does not follow the inputs of a routed model


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        pytest.param(n, k, p, marks=() if (n, k, p) in ODD_OFTEN else pytest.mark.proof)
        for n in ODD
        for k in ("dp_shard2-tp2", "pp2-tp2")
        for p in PRECISIONS
    ],
)
def test_models_as_people_write_them(name: str, layout: str, precision: str, workers: LocalWorkers) -> None:
    entry = ZOO[name]
    plan = {**LAYOUTS[layout], "precision": precision}
    if name in NO_BFLOAT16 and precision == "bfloat16":
        report = mw.check(entry.build, entry.batch(), plan, workers=workers)
        assert report.passed and any("raises on one device" in note for note in report.notes), str(report)
    else:
        same_in_its_precision(entry.build, entry.batch(), plan, workers)


BRANCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "toy": (branching.Toy, beside(1, 2)),
    "siamese": (branching.Siamese, {"mesh": {"tp": 2}, "modules": {"tower": {"on": ["tp[0]", "tp[1]"]}}}),
    "nested": (
        branching.Nested, on({"tp": 3}, inner="tp[0:2]", other="tp[2]", inner__left="tp[0]", inner__right="tp[1]")
    ),
    "toy, sharded": (branching.Toy, beside(2, 2, b={"dp_shard": 2})),
    "toy in stages": (branching.Toy, {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}}),
    "toy over data": (branching.Toy, {**beside(1, 1), "mesh": {"dp_shard": 2, "tp": 2}}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param(c, p, marks=() if (c, p) == ("toy", "bfloat16") else pytest.mark.proof)
        for c in BRANCHES
        for p in PRECISIONS
    ],
)
def test_branches_train_in_the_types_of_their_plan(case: str, precision: str, workers: LocalWorkers) -> None:
    build, plan = BRANCHES[case]
    same_in_its_precision(build, branching.rows(), {**plan, "precision": precision}, workers)


class Elsewhere(nn.Module):
    """Uses parameters that are in no unit of FSDP2: of two blocks; of which a list and a function have the object; without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        for block in self.blocks:
            block.gate = nn.Parameter(torch.randn(16, 16) / 4)
        self.gates = [block.gate for block in self.blocks]
        weight = self.blocks[0][0].weight
        self.project = lambda h: F.linear(F.linear(h, weight), weight.T)
        self.mix = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = h + block(h)
        for gate in self.gates:
            h = h @ gate
        shares = torch.stack([*self.mix]).softmax(0)
        h = torch.einsum("k,kbtc->btc", shares, torch.stack([h, self.project(h), h.tanh()]))
        return self.head(h).square().mean()


class Renormed(nn.Module):
    """Its forward writes the rows of the table that are longer than one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).square().mean()


UNITLESS: dict[str, dict[str, Any]] = {
    "dp_shard2": {"mesh": {"dp_shard": 2}},
    "dp_shard1": {"mesh": {"dp_shard": 1}},
    "dp_shard2-tp2": {"mesh": {"dp_shard": 2, "tp": 2}},
    "pp2-dp_shard2": {"mesh": {"pp": 2, "dp_shard": 2}, "microbatches": 2},
    "recompute": {"mesh": {"dp_shard": 2}, "recompute": "blocks"},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(k, marks=() if k == "dp_shard2" else pytest.mark.proof) for k in UNITLESS]
)
def test_what_is_in_no_unit_is_computed_in_bfloat16_too(layout: str, workers: LocalWorkers) -> None:
    """FSDP2 casts what it gathers. The others stayed float32: an error of types in the forward, or another result."""
    x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(1))
    same_in_its_precision(Elsewhere, x, {**UNITLESS[layout], "precision": "bfloat16"}, workers)


def test_what_a_forward_writes_is_refused_in_bfloat16() -> None:
    with pytest.raises(mw.PlanError, match=r"bfloat16, and a forward that writes table\.weight"):
        mw.make_recipe(Renormed, {"mesh": {"dp_shard": 2}, "precision": "bfloat16"}, (torch.arange(8).view(4, 2),))


class Teacher(nn.Module):
    """A student, and a teacher that follows it: a forward writes the teacher's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
            self.teacher.bias.data.copy_(0.9 * self.teacher.bias + 0.1 * self.student.bias)
        return (self.student(x).tanh() - self.teacher(x).sin()).square().mean()


def test_parameters_that_a_forward_writes_are_compared(workers: LocalWorkers) -> None:
    plan = {"mesh": {"tp": 2}, "precision": "float32"}
    same_in_its_precision(Teacher, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), plan, workers)


class LongSums(nn.Module):
    """The gradient of the first bias is a sum of many elements that nearly cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 16, 7, stride=4, padding=2), nn.GroupNorm(1, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = F.gelu(self.norm(self.conv(x))).mean((2, 3))
        return {"loss": F.cross_entropy(self.out(h), y)}


def test_what_one_device_always_rounds_in_the_same_way_is_rounding(workers: LocalWorkers) -> None:
    batch = {"x": torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0)), "y": torch.arange(8) % 2}
    case = Case(LongSums, batch, output_loss, torch.float32, 1, 0)
    one, noise = workers.run(reference_in_precision, case, "float32", ranks=1, timeout=60)[0]
    in_float64 = replace(case, dtype=torch.float64)
    precise, _ = workers.run(reference_in_precision, in_float64, "float64", ranks=1, timeout=60)[0]
    expected, bias = (side.facts.gradients["conv.bias"].double() for side in (precise, one))
    error = float((bias - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert noise["gradients"]["conv.bias"] >= 0.9 * error > 4 * torch.finfo(torch.float32).eps


class LargeWeight(nn.Module):
    """On a CPU, torch adds the squares of a long tensor one after the other: the norm of its gradient is off by many roundings."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(512, 2048)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.lin(x) * y).sum()  # the first update changes it by much


def test_the_norm_that_clips_gradients_rounds_too(workers: LocalWorkers) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(4, 512, generator=generator), "y": torch.randn(4, 2048, generator=generator)}
    case = Case(LargeWeight, batch, output_loss, torch.float32, 2, 0)
    one, noise = workers.run(reference_in_precision, case, "float32", ranks=1, timeout=60)[0]
    precise = workers.run(reference, replace(case, dtype=torch.float64), narrow=False, ranks=1, timeout=60)[0]
    last, expected = one.facts.losses[-1], precise.facts.losses[-1]
    assert noise["loss"] >= 0.9 * abs(last - expected) / abs(expected) > 4 * torch.finfo(torch.float32).eps


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.float().square().mean()


def steps_in_autocast(plan: dict[str, Any]) -> float:
    """The largest error of a gradient, relative to the largest gradient of its parameter, after two steps of a job within one
    autocast, an evaluation between them."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Layers()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
    torch.manual_seed(0)
    job = mw.parallelize(Layers, plan, batch=x)
    mine = x.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    with torch.autocast("cpu", torch.bfloat16):
        job.step(mine)
        job.evaluate(mine)
        job.step(mine)
    expected = {name: p.grad for name, p in model.named_parameters()}
    errors = [
        float((gradient - expected[line.name]).abs().max() / expected[line.name].abs().max())
        for line, gradient in job.full_gradients()
        if gradient is not None  # rank 0 gets them
    ]
    return max(errors, default=0.0)


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 2}, "microbatches": 2},
        *(
            pytest.param(plan, marks=pytest.mark.proof)
            for plan in (
                {"mesh": {"dp_replicate": 2, "tp": 2}, "microbatches": 2},
                {"mesh": {"pp": 2, "dp_shard": 2}, "microbatches": 2},
                {"mesh": {"dp_shard": 2}, "recompute": "blocks"},
                {"mesh": {"dp_replicate": 2}},
            )
        ),
    ],
    ids=str,
)
def test_autocast_around_steps_loses_no_gradient(plan: dict[str, Any], workers: LocalWorkers) -> None:
    """Autocast keeps its casts of parameters: a later forward got those of an earlier one, and gradients came too late."""
    ranks = prod(plan["mesh"].values())
    assert workers.run(steps_in_autocast, plan, ranks=ranks)[0] < 0.05  # bfloat16 rounds to 0.4 %
