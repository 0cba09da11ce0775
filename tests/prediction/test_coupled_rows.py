"""Rows that are coupled: a prediction and a search know it as a run does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.hardware import read_profile
from meshwright.prediction import coupling
from meshwright.runtime.coupling.trial import ALL_ROWS
from meshwright.workers.pool import LocalWorkers

ROWS, WIDTH = 16, 128
CPU = replace(read_profile("h100"), name="cpu-local", cores=2, network=None)


class Normed(nn.Module):
    """A batch norm or an instance norm between two layers."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d, *, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, 1)
        self._frozen = frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(self.training and not self._frozen)
        return self.last(torch.relu(self.norm(self.first(x).unsqueeze(-1)).squeeze(-1)))


class Contrastive(nn.Module):
    """A loss that compares each row with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.one(x) @ self.other(x).T
        return nn.functional.cross_entropy(logits, torch.arange(len(x)))


class Doubled(Contrastive):
    """Writes to its batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


class Weighed(nn.Module):
    """All rows share the weights of its classes, of which there are as many as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), labels, weight=weight)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class OfEachRow(nn.InstanceNorm1d):
    """Normalizes each row, for which torch calls a batch norm of one row."""

    def __init__(self, width: int) -> None:
        super().__init__(width // 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(len(x), -1, 16)).reshape(x.shape)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def predicted(build, plan):
    return mw.predict(build, (torch.randn(ROWS, WIDTH),), plan, loss=mean, hardware="h100")


def is_told(notes) -> bool:
    return any(ALL_ROWS in note for note in notes)


@pytest.mark.parametrize("build", [Normed, Contrastive])
@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
def test_a_prediction_of_coupled_rows_is_that_of_all_rows_on_each_rank(build, mesh):
    auto, whole, split = (
        predicted(build, {"mesh": mesh, "microbatches": 2, "rows": r}) for r in ("auto", "whole", "split")
    )
    assert is_told(auto.notes)
    assert not is_told(whole.notes)
    assert not is_told(split.notes)
    assert auto.memory(0) == whole.memory(0) != split.memory(0)
    assert auto.seconds.seconds == whole.seconds.seconds


@pytest.mark.parametrize("build", [Plain, lambda: Normed(frozen=True), lambda: Normed(OfEachRow)])
def test_rows_that_are_not_coupled_are_not_told(build):
    plan = {"mesh": "dp_replicate=2", "microbatches": 2}
    assert not is_told(predicted(build, plan).notes)
    split = predicted(build, {**plan, "rows": "split"})
    assert predicted(build, plan).memory(0).peak == pytest.approx(split.memory(0).peak, rel=0.01)


def test_a_model_that_is_not_small_is_not_tried(monkeypatch):
    monkeypatch.setattr(coupling, "MOST_ELEMENTS", 100)
    assert not is_told(predicted(Contrastive, "dp_shard=2").notes)
    assert is_told(predicted(Normed, "dp_shard=2").notes)
    monkeypatch.undo()
    monkeypatch.setattr(coupling, "MOST_FLOPS", 100)
    assert not is_told(predicted(Contrastive, "dp_shard=2").notes)


def test_what_all_rows_share_is_shared_in_a_trial(monkeypatch):
    batch = {"x": torch.randn(8, WIDTH), "labels": torch.arange(8), "weight": torch.ones(8)}
    for most_rows in (8, 4):
        monkeypatch.setattr(coupling, "MOST_ROWS", most_rows)
        assert not is_told(mw.predict(Weighed, batch, "dp_shard=2", loss=mean, hardware="h100").notes)


@pytest.mark.parametrize("build", [Contrastive, Doubled])
def test_a_trial_leaves_the_generators_and_the_caller_s_tensors_as_they_were(build):
    torch.manual_seed(3)
    before, x = torch.get_rng_state(), torch.randn(ROWS, WIDTH)
    torch.set_rng_state(before)
    kept = x.clone()
    mw.predict(build, (x,), "dp_shard=2", loss=mean)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("build", [Normed, Contrastive])
def test_the_memory_of_coupled_rows_is_what_a_run_takes(workers: LocalWorkers, build):
    batch = (torch.randn(32 * ROWS, WIDTH),)
    said = mw.predict(build, batch, "dp_replicate=2", loss=mean, hardware=CPU)
    measured = mw.measure(build, batch, "dp_replicate=2", loss=mean, steps=2, workers=workers)
    assert said.memory(0).peak == pytest.approx(measured.memory(0).peak, rel=0.03)


@pytest.mark.parametrize("build", [Normed, Contrastive])
def test_a_dry_run_runs_all_rows_too(build):
    run = mw.dry_run(build, (torch.randn(ROWS, WIDTH),), "dp_replicate=2", 1, loss=mean)
    assert is_told(run.notes)
    assert run.memory.peak == predicted(build, "dp_replicate=2").memory(0).peak


def test_a_search_knows_that_more_data_ranks_take_no_time_off():
    batch = (torch.randn(64, WIDTH),)

    def found(build, **options):
        return mw.find_plans(
            build, batch, devices=4, loss=mean, hardware="h100", options={"precision": "float32", **options}
        )

    coupled, whole, split = found(Normed), found(Normed, rows="whole"), found(Normed, rows="split")
    assert is_told(coupled.notes)
    assert not is_told([*whole.notes, *split.notes])
    assert all(plan.estimate.candidate.rows == 64 for plan in [*coupled.plans, *whole.plans])
    assert coupled.plans[0].seconds == whole.plans[0].seconds
    assert any(plan.estimate.candidate.rows < 64 for plan in split.plans)
