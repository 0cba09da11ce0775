"""Optimizers that take a norm of all parameters are refused over parts, of which each rank holds some parameters."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from test_partial_gradients import Tower, rows
from torch import Tensor, nn
from torch.optim import optimizer as of_torch

import meshwright as mw
from meshwright.runtime.weights.coupled_updates import updates_are_coupled


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class OwnNorm(torch.optim.SGD):
    """Scales all gradients by a norm of its own over all that it was given."""

    def step(self, closure: Any = None) -> None:
        norm = torch.cat([g.flatten() for g in gradients(self)]).norm()
        for g in gradients(self):
            g.div_(norm)
        super().step(closure)


class Clips(torch.optim.SGD):
    """Clips to a large norm, that small gradients do not reach."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e3)
        super().step(closure)


class Distance(torch.optim.SGD):
    """Its step follows from what its last step summed up, as learning rates that are estimated do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.seen: dict[str, float] = {"norm": 0.0}

    def step(self, closure: Any = None) -> None:
        for g in gradients(self):
            g.mul_(1.0 + self.seen["norm"])
        self.seen["norm"] += sum(float(g.norm()) for g in gradients(self))
        super().step(closure)


class Sharpness(torch.optim.Optimizer):
    """Moves parameters along all gradients, asks again there, and steps from where they were (SAM)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
        closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        self.base.step()


class TwoHalves(torch.optim.Optimizer):
    """The same, with a method for each half of a step, as SAM is mostly called."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([g.norm() for g in gradients(self)]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(p.grad, alpha=0.05 / float(norm))
                p.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base.step()

    def step(self, closure: Any = None) -> None:
        self.first_step()
        closure()
        self.second_step()


class Directions(torch.optim.Optimizer):
    """Moves by signs alone; its learning rate follows from how well all of them agree with those before (D-Adaptation)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        signs = [p.grad.sign() for p in group["params"]]
        before = [self.state[p].get("sign", torch.zeros_like(p)) for p in group["params"]]
        agreed = sum(float((a * b).sum()) for a, b in zip(signs, before, strict=True))
        for p, sign in zip(group["params"], signs, strict=True):
            p.sub_(sign, alpha=group["lr"] * (1.1 if agreed > 0 else 1.0))
            self.state[p]["sign"] = sign


class TrustRatio(torch.optim.Optimizer):
    """Scales each update by the norms of its own parameter and gradient (LARS), with noise of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / (p.grad.norm() + 1e-8)
                p.sub_(group["lr"] * ratio * (p.grad + 0.01 * torch.randn_like(p)))


COUPLED = (OwnNorm, Clips, Distance, Sharpness, TwoHalves, Directions)
WITH_CLOSURE = (Sharpness, TwoHalves)


@pytest.mark.parametrize("kind", [*COUPLED, TrustRatio, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("warming_up", [False, True])
def test_a_trial_on_small_tensors_tells_whether_updates_are_coupled(kind: Any, warming_up: bool) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30))
    optimizer = kind(model.parameters(), lr=0.1)
    if warming_up:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    before, drawn = [p.clone() for p in model.parameters()], torch.get_rng_state()
    assert updates_are_coupled(optimizer, closure=kind in WITH_CLOSURE) is (kind in COUPLED)
    assert all(map(torch.equal, before, model.parameters())) and torch.equal(drawn, torch.get_rng_state())
    assert not optimizer.state and getattr(optimizer, "seen", {"norm": 0.0}) == {"norm": 0.0}


class WithModule(OwnNorm):
    """Keeps the model, which no twin of it can do without changing it."""

    def __init__(self, parameters: Any, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)
        self.model = model


def refusals(mesh: str) -> Any:
    """What each optimizer says twice; the notes after one that cannot be tried; hooks of torch while the job lives, and after."""
    torch.manual_seed(0)
    batch = rows()
    job = mw.parallelize(Tower, mesh, batch=batch)
    told = []
    for kind in (*COUPLED, TrustRatio, torch.optim.AdamW):
        optimizer = kind(job.parameters(), lr=0.01)
        for _ in range(2):
            job.step(batch)
            try:
                if kind is TwoHalves:
                    optimizer.first_step()
                    job.step(batch)
                    optimizer.second_step()
                else:
                    optimizer.step(partial(job.step, batch)) if kind is Sharpness else optimizer.step()
            except mw.PlanError as error:
                told.append(str(error))
            optimizer.zero_grad()
    job.step(batch)
    WithModule(job.parameters(), job.module).step()
    notes, hooks = job.notes, len(of_torch._global_optimizer_pre_hooks)
    del job, optimizer
    gc.collect()
    return told, [note for note in notes if "not tried" in note], (hooks, len(of_torch._global_optimizer_pre_hooks))


@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("pp=2,tp=2", marks=pytest.mark.proof)])
def test_coupled_updates_are_refused_over_stages(workers: Any, mesh: str) -> None:
    for told, notes, hooks in workers.run(refusals, mesh, ranks=mw.Plan(mesh).mesh.size):
        assert len(told) == 2 * len(COUPLED), told
        for kind, error in zip([kind for kind in COUPLED for _ in range(2)], told, strict=True):
            assert kind.__qualname__ in error and "a mesh without pp" in error
        assert len(notes) == 1 and "WithModule was not tried on small tensors" in notes[0]
        assert hooks == (1, 0), "torch is itself again once the job has gone"


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="DTensor flattens no tensor whose second dim is sharded")
def test_a_model_in_one_part_has_all_parameters(workers: Any) -> None:
    for told, notes, hooks in workers.run(refusals, "tp=2", ranks=2):
        assert told == [] and notes == [] and hooks == (0, 0)
