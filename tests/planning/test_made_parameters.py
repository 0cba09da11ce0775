"""Parameters that get their shape, or come into being, in a forward: in ``build()`` they may; in the job's first forward it is one
error before anything starts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.deferred import record
from meshwright.workers.pool import LocalWorkers

MESHES = ["tp=2", "pp=2", "dp_shard=2", "dp_replicate=2"]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(96), nn.LazyBatchNorm1d(), nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


class Copies(nn.Module):
    """Makes a teacher of its student in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.last, self.teacher = nn.Linear(64, 96), nn.Linear(96, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            target = self.teacher(x)
        return self.last((self.student(x) - target + 1).tanh())


def run_once(kind: type[nn.Module]) -> nn.Module:
    model = kind()
    model(torch.randn(4, 64))
    return model


def rows() -> tuple[Tensor]:
    return (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("mesh", MESHES)
def test_lazy_parameters_are_one_error(mesh: str, workers: LocalWorkers) -> None:
    with pytest.raises(mw.PlanError, match=r"first\.weight.*\n.*lazy") as raised:
        mw.make_recipe(Lazy, mesh, rows(), loss)
    assert len(raised.value.findings) == 1
    with pytest.raises(mw.PlanError, match="lazy"):
        mw.check(Lazy, rows(), mesh, loss=loss, workers=workers)


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_replicate=2"])
def test_parameters_that_the_first_forward_makes_are_one_error(mesh: str) -> None:
    with pytest.raises(mw.PlanError, match=r"teacher\.weight.*\n.*the first forward makes") as raised:
        mw.make_recipe(Copies, mesh, rows(), loss)
    assert len(raised.value.findings) == 1


class LeavesOut(nn.Linear):
    """Its optimizer is not to see the bias."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for p in super().parameters(recurse) if p.dim() > 1)


class OtherNames(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"linear.{name}", p) for name, p in super().named_parameters(*args, **kwargs))


class Passes(nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return super().named_parameters(*args, **kwargs)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_model_that_does_not_show_all_its_parameters_is_refused(mesh: str) -> None:
    for kind, said in (
        (LeavesOut, r"parameters\(\)\n.*leaves out bias"),
        (OtherNames, r"named_parameters\(\)\n.*another name"),
    ):
        with pytest.raises(mw.PlanError, match=said):
            mw.make_recipe(partial(kind, 64, 4), mesh, rows(), loss)
    assert mw.make_recipe(partial(Passes, 64, 4), mesh.replace("pp", "tp"), rows(), loss)


def test_lazy_parameters_of_a_build_that_runs_a_forward_are_those_of_plain_torch() -> None:
    recorded = record(partial(run_once, Lazy), seed=3)
    torch.manual_seed(3)
    for name, p in run_once(Lazy).named_parameters():
        assert torch.equal(recorded.value(name), p), name


@pytest.mark.parametrize("kind", [Lazy, Copies])
@pytest.mark.parametrize("mesh", [*MESHES[:3], pytest.param(MESHES[3], marks=pytest.mark.proof)])
def test_a_build_that_runs_a_forward_makes_a_model_like_any_other(
    kind: type[nn.Module], mesh: str, workers: LocalWorkers
) -> None:
    report = mw.check(partial(run_once, kind), rows(), mesh, loss=loss, workers=workers, dtype=torch.float64)
    assert report, report


class Renames(nn.Module):
    """Registers the parameters of its layers under names of its own, again at each assignment, as opacus' DPLSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(96, 4)
        self.names = {"first.weight": "weight_first", "last.weight": "weight_last"}
        self.ready = True

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "ready" in vars(self):
            for old, p in list(self.named_parameters()):
                if old in self.names:
                    self.register_parameter(self.names[old], p)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp_replicate=2"])
def test_a_class_may_do_more_when_its_modules_are_assigned_to(mesh: str, workers: LocalWorkers) -> None:
    report = mw.check(Renames, rows(), mesh, loss=loss, workers=workers, dtype=torch.float64)
    assert report, report
