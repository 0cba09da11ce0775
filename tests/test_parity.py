"""check: right jobs pass; each kind of wrong job fails, and the report names what is wrong.

A job is made wrong from inside: models and losses that compute something else where WORLD_SIZE is more than one.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import branching
import meshwright as mw
from meshwright.parity import TOLERANCES
from meshwright.parity.case import Case
from meshwright.parity.compare import differences
from meshwright.parity.facts import Facts, copies_of
from meshwright.parity.job import gradients_as_planned
from meshwright.parity.optimizer import sgd
from meshwright.parity.precision import _in_float64 as reference_in_float64
from meshwright.parity.preparation import disable_dropout, perturbed
from meshwright.parity.widening import widened
from meshwright.runtime.rows.loss import output_loss
from meshwright.workers.pool import LocalWorkers
from test_branches import WAYS
from zoo import ZOO

Check = Callable[..., mw.Report]
TP, DATA = "tp=2", "dp_shard=2"


@pytest.fixture
def check(workers: LocalWorkers) -> Check:
    return partial(mw.check, workers=workers, dtype=torch.float64)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(4, 8, generator=generator), "y": torch.randn(4, 8, generator=generator)}


def in_a_job() -> bool:
    return int(of_the_world("WORLD_SIZE", "1")) > 1


def of_the_world(name: str, otherwise: str = "") -> str:
    """A variable of the environment as it is: a model that asks for the text is told that there is one process."""
    return os.environb.get(name.encode(), otherwise.encode()).decode()


def scaled(x: Tensor, gradient: float) -> Tensor:
    """x itself, its gradient multiplied."""
    return x.detach() + gradient * (x - x.detach())


class Output(NamedTuple):
    loss: Tensor


class Small(nn.Module):
    """Two linears. ``fault``: what is wrong with it in a job, and nowhere else."""

    def __init__(self, fault: str = "", where: Callable[[], bool] = in_a_job) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.spare = nn.Parameter(torch.ones(8))
        self.shift = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(8))
        self.fault, self.where = fault, where

    def forward(self, x: Tensor, y: Tensor) -> Output:
        fault = self.fault if self.where() else ""
        up, down = self.up.weight, self.down.weight
        if fault == "gradient":
            up = scaled(up, 3.0)
        if fault == "infinite":
            down = scaled(down, float("inf"))
        out = F.linear(torch.relu(F.linear(x, up, self.up.bias)), down, self.down.bias)
        out = out + self.shift * (2 if fault == "shift" else 1)
        if fault == "used":
            out = out + 0 * self.spare
        if fault == "buffer" or (fault == "buffer of rank 1" and of_the_world("RANK") == "1"):
            self.seen += 1
        loss = F.mse_loss(out, y)
        return Output(scaled(loss, 2.0) if fault == "loss gradient" else loss)


def doubled_loss(output: Any) -> Tensor:
    return output.loss * 2 if in_a_job() else output.loss


def other_clipping(output: Any) -> Tensor:
    return output.loss * 100  # a gradient above the norm that clipping cuts at


class Narrow(Small):
    """A model with an op that knows no float64."""

    def forward(self, x: Tensor, y: Tensor) -> Output:
        if x.dtype is torch.float64:
            raise RuntimeError("sample_op: expected Float, got Double")
        return super().forward(x, y)


class Casting(Small):
    """A model that rounds to float32 midway: of float64 it keeps seven digits."""

    def forward(self, x: Tensor, y: Tensor) -> Output:
        middle = torch.relu(self.up(x)).float().to(torch.float32)
        out = F.linear(middle, self.down.weight.float(), self.down.bias.float())  # a sum in float32 over what is cut
        return Output(F.mse_loss(out.to(x.dtype), y))


class Dropping(Small):
    """Every usual place of dropout, and noise besides where asked."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_dropout=0.3)
        self.drop, self.attn_pdrop, self.noise = nn.Dropout(0.2), 0.1, noise

    def forward(self, x: Tensor, y: Tensor) -> Output:
        x = F.dropout(self.drop(x), self.attn_pdrop, self.training)
        x = F.dropout(x, self.config.hidden_dropout, self.training)
        if self.noise and self.training:
            x = x + torch.randn_like(x)
        return super().forward(x, y)


def fails_on_rank_1() -> nn.Module:
    if of_the_world("RANK") == "1":
        raise ValueError("rank 1 does not want to")
    return Small()


def never_built() -> nn.Module:
    raise ValueError("no such model")


# --- right jobs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_shard=2,tp=2"])
@pytest.mark.parametrize("name", ["mlp", "nanogpt"])
def test_a_right_job_passes(check: Check, name: str, mesh: str) -> None:
    report = check(ZOO[name].build, ZOO[name].batch(), mesh)
    assert report, report
    assert report.dtype == "float64" and report.tolerance == 1e-9
    names = {n for n, _ in ZOO[name].build().named_parameters()}
    assert set(report.errors["gradients"]) == set(report.errors["parameters"]) == names
    assert max(report.errors["parameters"].values()) < 1e-12
    assert report.recipe is not None and {line.name for line in report.recipe} == names


class Empty(Small):
    """With a parameter of no elements: memory keys of which the settings want none."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(4, 0, 8))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = torch.cat([self.memory, x[:, None]], 1).sum(1)
        return super().forward(x, y)


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "pp=2"])
def test_a_parameter_of_no_elements_is_held_by_all(check: Check, mesh: str) -> None:
    report = check(Empty, batch(), mesh)
    assert report, report


class Spectral(nn.Module):
    """Weights of complex numbers, between a Fourier transform and its inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        modes = torch.fft.rfft(torch.tanh(self.first(x))) * self.weight
        return Output(F.mse_loss(self.last(torch.fft.irfft(modes, 8)), y))


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "pp=2"])
def test_complex_parameters_are_cast_clipped_and_compared(check: Check, mesh: str) -> None:
    report = check(Spectral, batch(), mesh)
    assert report, report
    assert report.dtype == "float64" and report.errors["parameters"]["weight"] < 1e-12


class WritesToItsBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.first, self.second = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += self.position
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp_shard=2"])
def test_each_forward_gets_a_batch_of_its_own(mesh: str, workers: LocalWorkers) -> None:
    """A model may write to it: the next forward would add the positions once more, on both sides or on one."""
    report = mw.check(
        WritesToItsBatch, (torch.randn(4, 3, 8),), mesh, loss=lambda out: out.square().mean(), workers=workers,
        dtype=torch.float64,
    )  # fmt: skip
    assert report, report


def test_clipping_by_the_global_norm_is_compared(check: Check) -> None:
    assert check(Small, batch(), "dp_shard=2,tp=2", loss=other_clipping).passed


@pytest.mark.proof
def test_a_pool_of_its_own_and_a_tuple_for_a_batch() -> None:
    report = mw.check(Small, tuple(batch().values()), DATA, timeout=60)
    assert report, report


def test_the_reference_is_run_once_for_many_plans(check: Check, workers: LocalWorkers, tmp_path: Any) -> None:
    build = partial(Small, "", partial(told, str(tmp_path)))
    for mesh in (TP, DATA, TP):
        assert check(build, batch(), mesh)
    assert len(list(tmp_path.iterdir())) == 1
    assert check(build, batch(), TP, steps=2)
    assert len(list(tmp_path.iterdir())) == 2


def told(directory: str) -> bool:
    """Leaves a file for each forward pass of a fresh process group of one rank."""
    if not in_a_job():
        with open(os.path.join(directory, os.environ["MASTER_PORT"]), "w"):
            pass
    return False


# --- wrong jobs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [TP, DATA])
def test_one_wrong_gradient_is_named(check: Check, mesh: str) -> None:
    report = check(partial(Small, "gradient"), batch(), mesh)
    assert not report
    gradients = report.errors["gradients"]
    assert [name for name, error in gradients.items() if error > 1e-9] == ["up.weight"]
    assert report.errors["parameters"]["up.weight"] > 1e-3
    assert "the gradients that differ are scaled by 3" in report.hints[0]
    assert not any("multiplies rounding" in note for note in report.notes)


def test_a_scaled_loss_is_recognised(check: Check) -> None:
    report = check(Small, batch(), DATA, loss=doubled_loss)
    assert report.errors["loss"] > 0.1
    assert "every gradient is scaled by 2, the loss too" in str(report)


def test_scaled_gradients_with_the_right_loss_are_recognised(check: Check) -> None:
    report = check(partial(Small, "loss gradient"), batch(), TP, steps=1)
    assert report.errors["loss"] <= 1e-9
    assert "every gradient is scaled by 2:" in str(report)
    assert report.worst[0] in ("gradients", "parameters")


def test_none_is_not_a_zero_gradient(check: Check) -> None:
    report = check(partial(Small, "used"), batch(), TP)
    assert report.worst == ("gradients", "spare", float("inf"))
    assert report.words == {("gradients", "spare"): "none in the reference, and one in the other"}
    others = {name: error for name, error in report.errors["gradients"].items() if name != "spare"}
    assert max(others.values()) <= 1e-9


def test_fresh_zeros_hide_nothing(check: Check) -> None:
    report = check(partial(Small, "shift"), batch(), TP)
    assert report.errors["loss"] > 1e-5, "a frozen parameter that starts at zero was added twice"


def test_what_is_not_finite_fails(check: Check) -> None:
    report = check(partial(Small, "infinite"), batch(), DATA)
    assert report.errors["gradients"]["down.weight"] == float("inf")
    assert report.words["gradients", "down.weight"] == "not finite on the job"


def test_what_is_not_finite_on_either_side_is_not_equal(check: Check) -> None:
    report = check(partial(Small, "infinite", bool_true), batch(), DATA)
    assert not report
    assert report.words["gradients", "down.weight"] == "not finite on the job and one device"


def bool_true() -> bool:
    return True


class Missing(nn.Module):
    """A table with values that are missing, and an infinite one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer(
            "table", torch.tensor([1.0, float("nan"), float("-inf"), 2.0, 0.0, 1.0, float("nan"), 3.0])
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        known = self.table.isfinite()
        return {"loss": torch.where(known, self.linear(x) - self.table.nan_to_num(0.0, 0.0, 0.0), 0.0).square().mean()}


@pytest.mark.parametrize("mesh", [TP, DATA])
def test_nan_in_a_table_is_equal_to_nan(check: Check, mesh: str) -> None:
    report = check(Missing, fresh_batch(), mesh)
    assert report, report


def test_buffers_are_compared(check: Check) -> None:
    report = check(partial(Small, "buffer"), batch(), DATA)
    assert not report
    assert report.errors["buffers"] == {"seen": 4.0}
    assert max(*report.errors["gradients"].values(), *report.errors["parameters"].values()) <= 1e-9
    assert "1 of 1 buffers" in str(report)


@pytest.mark.parametrize("mesh", [TP, DATA])
def test_buffers_are_compared_on_every_rank(check: Check, mesh: str) -> None:
    report = check(partial(Small, "buffer of rank 1"), batch(), mesh)
    assert not report
    assert report.errors["buffers"] == {"seen": 4.0} and report.worst == ("buffers", "seen", 4.0)
    assert report.words == {("buffers", "seen"): "on rank 1"}
    assert "seen" in str(report) and "on rank 1" in str(report)


class Normed(Small):
    """Batch statistics: those of a rank's own rows where the plan says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        return super().forward(self.norm(x), y)


def test_running_statistics_that_go_apart_are_named(check: Check) -> None:
    report = check(Normed, batch(), {"mesh": DATA, "rows": "split"})
    wrong = {name for name, error in report.errors["buffers"].items() if error > 1e-9}
    assert wrong == {"norm.running_mean", "norm.running_var"}
    assert check(Normed, batch(), DATA), "with all rows on every rank they stay those of one device"


def test_the_tolerance_decides(check: Check) -> None:
    assert not check(Small, batch(), TP, tolerance=0.0)
    assert check(partial(Small, "gradient"), batch(), TP, tolerance=1e3)


def test_a_gradient_of_another_shape_than_planned_is_an_error_not_a_crash() -> None:
    recipe = mw.make_recipe(Small, "dp_shard=2", batch())
    p = nn.Parameter(torch.zeros(16, 8))
    p.grad = torch.zeros(16, 8)
    job: Any = SimpleNamespace(recipe=recipe, rank=1)
    job.named_parameters = lambda: [("up.weight", p)]
    with pytest.raises(RuntimeError, match=r"up\.weight.*\(16, 8\).*\(8, 8\)"):
        gradients_as_planned(job)
    p = nn.Parameter(torch.zeros(8, 8))
    p.grad = torch.zeros(8, 8)
    gradients_as_planned(job)


# --- types, dropout, randomness -------------------------------------------------------------------------------------


def test_float32_where_one_device_raises_in_float64(check: Check) -> None:
    report = check(Narrow, batch(), TP, dtype=None)
    assert report, report
    assert report.dtype == "float32" and report.tolerance == 1e-4
    assert "sample_op: expected Float, got Double" in str(report)
    assert report.worst[2] > 1e-9, "float32 was not used"
    refused = check(Narrow, batch(), TP, dtype=torch.float64)
    assert "sample_op" in refused.failure and refused.failure.startswith("one device")


def test_casts_to_float32_do_not_drown_the_comparison(check: Check) -> None:
    report = check(Casting, batch(), "dp_shard=2,tp=2")
    assert report.worst[2] < 1e-13, report
    assert any("casts to float32" in note for note in report.notes)


def test_the_noise_of_a_model_that_casts_to_float32_has_the_steps_in_float64() -> None:
    """Without them a long sum, which repeats round alike, was an error of the job."""

    class ToFloat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.float())

    given = (torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)
    case = Case(ToFloat, given, lambda out: out.square().mean(), torch.float32, steps=2, seed=0)
    precise = reference_in_float64(case)
    assert precise is not None and all(g.dtype == torch.float64 for g in precise.facts.gradients.values())


def test_widening_ends_with_the_block() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    with widened(torch.float64):
        made = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32), torch.zeros(1)]
        assert {t.dtype for t in made} == {torch.float64}
        assert x.half().dtype is torch.float16
    assert x.float().dtype is torch.zeros(1).dtype is torch.float32
    with widened(torch.float32):
        assert x.float().dtype is torch.float32


@pytest.mark.parametrize("mesh", [TP, DATA])
def test_dropout_is_off_on_both_sides(check: Check, mesh: str) -> None:
    report = check(Dropping, batch(), mesh)
    assert report, report
    assert "dropout is off on both sides: 3 places" in report.notes
    assert not any("eval mode" in note for note in report.notes)


def test_a_model_that_draws_is_compared_in_eval_mode(check: Check) -> None:
    report = check(partial(Dropping, noise=True), batch(), DATA)
    assert report, report
    assert any("compared in eval mode" in note for note in report.notes)


def test_disable_dropout_leaves_a_shared_configuration_alone() -> None:
    shared = SimpleNamespace(dropout=0.1, width=3)
    model = nn.Sequential(nn.LSTM(2, 2, 2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5), nn.AlphaDropout(0.1))
    model.config = model[0].config = shared
    assert disable_dropout(model) == 4
    assert (model[0].dropout, model[1].dropout, model[2].p) == (0.0, 0.0, 0.0)
    assert model.config is model[0].config and vars(model.config) == {"dropout": 0.0, "width": 3}
    assert shared.dropout == 0.1


# --- what cannot be run ---------------------------------------------------------------------------------------------


def test_everything_that_cannot_be_sent_is_named_at_once(check: Check) -> None:
    lock = threading.Lock()
    with pytest.raises(mw.PlanError) as raised:
        check(
            lambda: lock and Small(), batch() | {"f": open}, "tp=16", loss=lambda output: lock and output.loss,
            dtype=torch.int32, steps=0,
        )  # fmt: skip
    assert [f.where for f in raised.value.findings] == ["build", "loss", "dtype", "steps", "workers"]
    with pytest.raises(mw.PlanError, match=r"where: *batch"):
        check(Small, batch() | {"lock": lock}, TP)
    assert check(lambda: Small(), batch(), TP), "a lambda can be sent"


def test_a_plan_error_of_the_workers_is_raised_here(check: Check) -> None:
    with pytest.raises(mw.PlanError) as raised:
        check(Small, batch(), mw.Plan(mesh={"tp": 2}, modules={"upp": {"tp": "replicate"}}))
    assert len(raised.value.findings) == 1 and "upp" in str(raised.value)
    assert raised.value.__cause__ is None and raised.value.__suppress_context__, "told once, without a traceback"
    assert check(Small, batch(), TP), "the pool is usable afterwards"


def test_a_rank_that_fails_fails_the_check_alone(check: Check) -> None:
    report = check(fails_on_rank_1, batch(), TP)
    assert not report and report.worst == ("failure", "", float("inf"))
    assert report.failure.startswith("the job: rank 1 of 2 failed: ValueError: rank 1 does not want to")
    assert str(report).count("Traceback") == 1
    assert check(Small, batch(), TP), "the pool is usable afterwards"


def test_a_reference_that_fails_is_told_apart(check: Check) -> None:
    report = check(never_built, batch(), TP)
    assert "one device: rank 0 of 1 failed: ValueError: no such model" in str(report)


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_text_says_what_a_person_wants_to_know(check: Check) -> None:
    plan = mw.Plan(mesh="dp_shard=2,tp=2", modules={"up": {"tp": "column"}, "down": {"tp": "row"}})
    report = check(partial(Small, "loss gradient"), batch(), plan)
    head, table, differ, likely, _ = str(report).split("\n\n")
    assert head.startswith("FAILED  dp_shard=2 × tp=2 is not one device: the loss, 4 of 6 gradients, 4 of 6 parameters")
    assert "float64, tolerance 1e-09, 3 steps" in head
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["loss", "gradients", "parameters", "buffers"]
    _, error, name = next(line for line in table.splitlines() if line.startswith("gradients")).split()[:3]
    assert report.errors["gradients"][name] == max(report.errors["gradients"].values())
    assert error == f"{report.errors['gradients'][name]:.1e}"
    lines = [line for line in differ.splitlines() if "gradients" in line and "up.weight" in line]
    assert len(lines) == 1 and lines[0].endswith("  up.weight    dp_shard: Shard(0), tp: Shard(0)")
    assert likely == "Likely:\n  " + report.hints[0]


TITLES = {
    "block_a on tp[0:2] | block_b on tp[2:8] as dp_replicate=3 × tp=2": (
        branching.Toy, branching.rows(), branching.beside(2, 6, b={"dp": 3, "tp": 2})
    ),
    "layers.{0…2}.attn on tp[0:2] | layers.{0…2}.mlp on tp[2:3]": WAYS["parallel attention and MLP"],
    "inner on tp[0:3] | other on tp[3] | inner.left on tp[0] of tp[0:3] | inner.right on tp[1:3] of tp[0:3]":
        WAYS["nested"],
    "tower on tp[0] | tower on tp[1]": WAYS["siamese"],
    "left.{0…1} on stream[0] | right.{0…1} on stream[1]": (
        branching.Tracks, branching.rows(),
        {"mesh": "tp=2", "modules": {"left.*": {"on": "stream[0]"}, "right.*": {"on": "stream[1]"}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", TITLES)
def test_the_title_says_what_branches_run_where(said: str) -> None:
    build, batch, plan = TITLES[said]
    recipe = mw.make_recipe(build, plan, batch)
    report = mw.Report(True, mw.Plan.parse(plan), 1e-9, "float64", 3, 0.0, recipe=recipe)
    assert report._verdict() == f"{recipe.mesh}, {said} is one device"
    assert ("on tp[0" in " ".join(report.layout(line.name) for line in recipe)) == bool(recipe.branches)


def test_the_report_as_data_is_json(check: Check) -> None:
    report = check(partial(Small, "used"), batch(), TP)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["passed"] is False
    assert data["worst"] == {"kind": "gradients", "name": "spare", "error": "inf"}
    assert data["layouts"]["up.weight"] == "tp: Shard(0)"
    assert data["plan"] == {"mesh": {"tp": 2}}
    assert set(data["errors"]) == {"loss", "gradients", "parameters", "buffers"}
    assert data["collectives"]["all_reduce"][0] > 0


def test_fallbacks_are_told(check: Check) -> None:
    report = check(Sorting, batch(), mw.Plan(mesh=TP, modules={"up": {"tp": "column"}}))
    assert report, report
    assert report.fallbacks and "Ran whole, in one step of rank 0:" in str(report)
    assert "sort" in str(report)


class Sorting(Small):
    """Sorts along the cut dim."""

    def forward(self, x: Tensor, y: Tensor) -> Output:
        return Output(F.mse_loss(self.down(torch.sort(self.up(x), -1).values), y))


# --- what training does -----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that is other than one device's after the second step only, and right again after the third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.seen.fill_(float(of_the_world("WORLD_SIZE", "1")) if self.calls == 3 else 1.0)
        return {"loss": self.linear(x).square().mean()}


class Doubling(nn.Module):
    """The loss is right, and the gradient of the second step's second backward twice what it is on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 4), 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        loss = self.linear(x).square().mean()
        wrong = self.calls == 3 and in_a_job()
        return {"loss": 2 * loss - loss.detach() if wrong else loss}


class NoEval(nn.Module):
    """Draws random numbers that matter, and has no eval mode; raises where its dropout is off."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop_rate = nn.Linear(8, 4), 0.5

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not self.training or not self.drop_rate:
            raise RuntimeError("no clusters yet")
        return {"loss": self.linear(x * torch.rand(8, dtype=x.dtype)).square().mean()}


def fresh_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}


def test_buffers_are_judged_after_every_step(workers: LocalWorkers) -> None:
    report = mw.check(Counting, fresh_batch(), "tp=2", workers=workers, dtype=torch.float64)
    assert not report and report.errors is not None
    assert report.errors["buffers"]["seen"] == pytest.approx(1.0)
    assert report.words["buffers", "seen"].startswith("after step 2")


def test_gradients_that_add_up_are_judged(workers: LocalWorkers) -> None:
    report = mw.check(Doubling, fresh_batch(), "tp=2", workers=workers, dtype=torch.float64, steps=2)
    assert not report and report.errors is not None
    assert max(report.errors["gradients"].values()) < 1e-9 < max(report.errors["parameters"].values())


def test_what_is_switched_off_is_on_again_where_one_device_cannot_do_without(workers: LocalWorkers) -> None:
    report = mw.check(NoEval, fresh_batch(), "tp=2", workers=workers, dtype=torch.float64)
    assert report, report
    assert any("compared with dropout" in note for note in report.notes)
    assert any("not compared in eval mode" in note for note in report.notes)


EARLIER: dict[str, Tensor] = {}


class Kept(nn.Module):
    """Compares with the labels of the first batch that it has seen, in every later step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if in_a_job() and not y.is_meta:
            y = EARLIER.setdefault("y", y.detach().clone())
        return {"loss": F.mse_loss(self.linear(x), y)}


class Ordered(nn.Module):
    """Has a list of row ends in its batch, which must rise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, ends: Tensor) -> dict[str, Tensor]:
        if not bool((ends.diff() > 0).all()):
            raise ValueError("ends must rise")
        return {"loss": self.linear(x).square().mean() * ends[-1]}


def test_what_is_kept_of_an_earlier_batch_is_seen(workers: LocalWorkers) -> None:
    report = mw.check(Kept, batch(), "tp=2", workers=workers, dtype=torch.float64, steps=2)
    assert not report and report.errors is not None, report
    assert max(report.errors["gradients"].values()) < 1e-9 < report.errors["loss"]


def test_a_model_that_other_rows_are_no_batch_for_is_compared_on_the_same(workers: LocalWorkers) -> None:
    report = mw.check(
        Ordered, fresh_batch() | {"ends": torch.tensor([1, 4, 6, 8])}, "tp=2", workers=workers, dtype=torch.float64
    )
    assert report, report
    assert any("same rows in every step" in note and "ends must rise" in note for note in report.notes)


def test_the_first_two_forwards_have_the_batch_itself_and_later_ones_its_rows_elsewhere() -> None:
    tokens = torch.arange(12).view(4, 3)
    given = {"ids": tokens[:, :-1], "labels": tokens[:, 1:], "table": torch.zeros(7)}
    case = Case(nn.Identity, given, output_loss, torch.float64, steps=3, seed=0)
    batches = case.batches()
    first, second, third, fourth = (next(batches) for _ in range(4))
    assert torch.equal(second["ids"], given["ids"]) and torch.equal(first["ids"], given["ids"])
    assert second["ids"].untyped_storage().data_ptr() != first["ids"].untyped_storage().data_ptr()
    assert [third["ids"][:, 0].tolist(), fourth["ids"][:, 0].tolist()] == [[3, 6, 9, 3], [6, 9, 0, 3]]
    third["ids"][0, 1] = -1  # the memory of labels too
    assert third["labels"][0, 0] == -1 and tokens.equal(torch.arange(12).view(4, 3))
    halves = [case.batches(index, 2) for index in range(2)]
    assert all(torch.cat([next(h)["ids"] for h in halves]).equal(b["ids"]) for b in (first, second))


def test_a_batch_that_is_one_tensor_stays_as_it_is() -> None:
    """Of a bare tensor in the type of the check no copy was made: one device's later forwards moved the job's rows."""
    for tokens in (torch.arange(12).view(4, 3), torch.randn(4, 3, dtype=torch.float64)):
        before = tokens.clone()
        batches = Case(nn.Identity, tokens, output_loss, torch.float64, steps=3, seed=0).batches()
        first, third = next(batches), [next(batches) for _ in range(2)][1]
        first.neg_()
        assert tokens.equal(before) and not third.equal(before)


class Extreme(nn.Module):
    """Writes the smallest number of its activations' type into a table that it makes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.second(self.first(x).relu())
        table = torch.full((4, 4), torch.finfo(h.dtype).min, dtype=torch.float32).triu(1)
        return {"loss": self.third((h @ h.T + table).softmax(-1).to(x.dtype) @ h).square().mean()}


def test_planning_is_as_wide_as_the_check(workers: LocalWorkers) -> None:
    report = mw.check(Extreme, fresh_batch(), "tp=2", workers=workers, dtype=torch.float64)
    assert report, report
    assert (
        report.recipe is not None and report.recipe.by_name["first.weight"].tp != report.recipe.by_name["third.bias"].tp
    )
    assert mw.check(
        Extreme, fresh_batch(), {"mesh": {"pp": 2}, "microbatches": 1}, workers=workers, dtype=torch.float64
    )


class WrongInAType(nn.Module):
    """The smallest of its gradients is twice one device's on several ranks, where it computes in this type."""

    def __init__(self, wrong: torch.dtype | None) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.small, self.wrong = nn.Parameter(torch.ones(4)), wrong

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        small = self.small
        if x.dtype is self.wrong and in_a_job():
            small = 2 * small - small.detach()
        found = self.second(self.norm(self.first(x)).relu())
        return {"loss": found.square().mean() + 2e-3 * (found.detach().abs() * small).mean()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_job_is_judged_in_the_types_of_its_plan_too(precision: str, workers: LocalWorkers) -> None:
    plan = {"mesh": {"tp": 2}, "precision": precision}
    right = mw.check(partial(WrongInAType, None), fresh_batch(), plan, workers=workers)
    assert right and right.dtype == "float64" and right.tolerance == 1e-9
    assert any(f"compared in {precision} too" in note for note in right.notes)
    build = partial(WrongInAType, getattr(torch, precision))
    wrong = mw.check(build, fresh_batch(), plan, workers=workers)
    assert not wrong and wrong.dtype == precision and wrong.errors["loss"] <= wrong.tolerance
    assert [name for name, error in wrong.errors["gradients"].items() if error > wrong.tolerance] == ["small"]
    assert "the change of a tensor by rounding in another order" in str(wrong)
    assert mw.check(build, fresh_batch(), plan, workers=workers, dtype=torch.float64), "asked for float64 alone"


class WrongBesideAKink(nn.Module):
    """As a model with a relu whose input is 0 but for rounding, from the starting values of a check alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.small = nn.Linear(8, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        small = self.small
        if x.dtype is torch.float32 and in_a_job():
            beside = (small - perturbed("small", torch.ones(4)).to(small)).abs() < 1e-5
            small = torch.where(beside, 2 * small - small.detach(), small)
        return {"loss": (self.linear(x) * small).square().mean()}


def test_what_is_off_from_one_set_of_starting_values_alone_is_rounding_beside_a_kink(workers: LocalWorkers) -> None:
    report = mw.check(WrongBesideAKink, fresh_batch(), {"mesh": {"tp": 2}}, workers=workers)
    assert report and report.dtype == "float64", report
    assert any("from two sets of starting values: gradients small was off by" in note for note in report.notes), report


class SumsInAHalfType(nn.Module):
    """The gradient of the norm's bias is a sum over many tokens, which layer norm on a CPU adds up in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(self.norm(x)) - 1).square().mean()}


def test_what_one_device_rounds_by_itself_is_not_counted_against_a_job(workers: LocalWorkers) -> None:
    tokens = (torch.randn(2, 4000, 8, generator=torch.Generator().manual_seed(0)),)
    plan = {"mesh": {"dp_replicate": 2}, "precision": "bfloat16"}
    report = mw.check(SumsInAHalfType, tokens, plan, workers=workers, optimizer=torch.optim.SGD)
    assert report, report


class Multiplies(nn.Module):
    """Its loss multiplies rounding: each application of the map doubles a difference."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.first, self.second, self.gradient = nn.Linear(8, 16), nn.Linear(16, 4), gradient

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.second(self.first(x).relu())
        with torch.no_grad():
            mapped = h.sigmoid()
            for _ in range(40):
                mapped = 3.99 * mapped * (1 - mapped)
        if in_a_job():
            h = scaled(h, self.gradient)
        return {"loss": h.square().mean() + 0.1 * mapped.mean()}


def test_what_a_model_multiplies_is_not_counted_and_its_gradients_are_judged_all_the_same(check: Check) -> None:
    right = check(partial(Multiplies, 1.0), fresh_batch(), TP)
    assert right, right
    assert any("the model multiplies rounding" in note and "loss differs by" in note for note in right.notes), right
    wrong = check(partial(Multiplies, 1.0001), fresh_batch(), TP)
    assert not wrong
    assert {name for name, error in wrong.errors["gradients"].items() if error > 1e-9} == set(wrong.errors["gradients"])


class RaisesInAType(Small):
    """Whoever sees it compute in float32 on several ranks, sees it raise."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if x.dtype is torch.float32 and in_a_job() and not x.is_meta:
            raise RuntimeError("expected m1 and m2 to have the same dtype")
        return super().forward(x, y)


def test_an_error_in_the_types_of_the_plan_alone_fails_the_check(workers: LocalWorkers) -> None:
    report = mw.check(RaisesInAType, batch(), TP, workers=workers)
    assert not report and "the job in float32: " in report.failure and "same dtype" in report.failure


class DrawsMore(nn.Module):
    """Draws a number of the host's more at the end of each forward in a job: the second forward goes on elsewhere."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(8, 4), more

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scale = 1 + random.random() + np.random.rand()
        if self.more and in_a_job() and not x.is_meta:
            random.random()
        return {"loss": (self.linear(x) * scale).square().mean()}


def test_numbers_of_the_host_are_seeded_at_the_start_alone_as_in_training(check: Check) -> None:
    assert check(partial(DrawsMore, False), fresh_batch(), "tp=2", steps=1)
    wrong = check(partial(DrawsMore, True), fresh_batch(), "tp=2", steps=1)
    assert not wrong and wrong.errors is not None, wrong


class Shifted(nn.Module):
    """``shift`` moves all logits alike, which changes no probability: its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.linear(x) + self.shift, y.softmax(-1))}


def trained_in(pieces: int, optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, dict[str, Tensor]]:
    """What one device finds that adds up its rows in so many pieces, and where it started."""
    torch.manual_seed(0)
    model, rows = Shifted(), batch()
    start = copies_of(model.named_parameters())
    chosen, losses, gradients = optimizer(model.parameters()), [], {}
    for step in range(3):
        parts = [
            dict(zip(rows, part, strict=True)) for part in zip(*(x.chunk(pieces) for x in rows.values()), strict=True)
        ]
        loss = sum(model(**part)["loss"] / pieces for part in parts)
        chosen.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        chosen.step()
    return Facts(tuple(losses), gradients, copies_of(model.named_parameters()), ({},)), start


def test_a_gradient_that_is_zero_but_for_rounding_does_not_decide_a_check() -> None:
    """Adam divides it by its own size: gradients are right then, and an update follows the sign of what was rounded."""

    def errors(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Any:
        (one, start), (other, _) = trained_in(1, optimizer), trained_in(4, optimizer)
        return differences(start, one, other)[0]

    adam, ours = errors(torch.optim.Adam), errors(sgd)
    tolerance = TOLERANCES[torch.float32]
    assert max(adam["gradients"].values()) < tolerance < adam["parameters"]["shift"]
    assert max(ours["gradients"].values()) < tolerance and max(ours["parameters"].values()) < tolerance


def leaves_a_hook() -> None:
    """A task that ends with a hook on all modules."""
    nn.modules.module.register_module_forward_hook(lambda m, args, out: 2 * out if isinstance(out, Tensor) else None)


def test_what_an_earlier_task_left_in_one_worker_does_not_decide_a_check(check: Check, workers: LocalWorkers) -> None:
    workers.run(leaves_a_hook, ranks=1)
    assert check(Shifted, batch(), DATA, steps=2)


# --- another optimizer ------------------------------------------------------------------------------------------------


class OwnNorm(torch.optim.SGD):
    """Divides all gradients by a norm of all. ``at_hand``: a module among its attributes, with which no twin of it is tried."""

    def __init__(self, parameters: Any, at_hand: nn.Module | None = None) -> None:
        super().__init__(parameters, lr=0.1)
        self.at_hand = at_hand

    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for g in gradients:
            g.div_(norm)
        super().step(closure)


def twice_as_fast_in_a_job(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1 if in_a_job() else 0.05)


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "pp=2"])
def test_an_optimizer_that_is_passed_is_the_one_of_both_sides(check: Check, mesh: str) -> None:
    assert check(Small, batch(), mesh, optimizer=partial(torch.optim.Adagrad, lr=0.05))
    report = check(Small, batch(), mesh, optimizer=twice_as_fast_in_a_job)
    assert not report and max(report.errors["gradients"].values()) < 1e-9, report


def test_an_optimizer_that_is_right_over_dims_alone(check: Check) -> None:
    assert check(Small, batch(), TP, optimizer=OwnNorm)
    with pytest.raises(mw.PlanError, match="changes with the gradients of others"):
        check(Small, batch(), "pp=2", optimizer=OwnNorm)
    report = check(Small, batch(), "pp=2", optimizer=partial(OwnNorm, at_hand=nn.Identity()))
    assert not report and max(report.errors["gradients"].values()) < 1e-9 < max(report.errors["parameters"].values()), (
        report
    )
    assert any("was not tried on small tensors" in note for note in report.notes), report.notes
