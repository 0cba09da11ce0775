"""What takes one number of all gradients is refused over parts, of which each rank has gradients of its own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.spmd.patches import CLIPPED_NORM, FLAT_GRADIENT, TOTAL_NORM


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def rows() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def plain_norm() -> float:
    torch.manual_seed(0)
    model = Tower()
    model(rows()).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


def refused_over(job: mw.Job) -> list[str]:
    """What clipping and LBFGS say."""
    asked = (
        lambda: nn.utils.clip_grad_norm_(job.parameters(), 1e-3),
        lambda: nn.utils.get_total_norm([p.grad for p in job.parameters() if p.grad is not None]),
        lambda: torch.optim.LBFGS(list(job.parameters()), max_iter=1).step(lambda: torch.ones(())),
    )
    told = []
    for ask in asked:
        try:
            ask()
        except mw.PlanError as error:
            told.append(str(error))
    return told


def refusals(mesh: dict[str, int]) -> Any:
    """What clipping and LBFGS say over a mesh; the norms of a plain model and of the job beside; whether torch is itself again."""
    torch.manual_seed(0)
    job = mw.parallelize(Tower, mw.Plan(mesh=mesh), batch=rows())
    job.step(rows())
    norm = float(job.clip_grad_norm_(1e9))
    told = refused_over(job)
    norms = plain_norm(), norm
    del job
    gc.collect()
    return told, norms, [patch._changes for patch in (CLIPPED_NORM, TOTAL_NORM, FLAT_GRADIENT)]


def test_what_takes_one_number_of_all_gradients_is_refused_over_stages(workers: Any) -> None:
    for told, (plain, over_stages), patches in workers.run(refusals, {"pp": 2}, ranks=2):
        assert len(told) == 3, told
        assert "torch.nn.utils.clip_grad_norm_" in told[0] and "job.clip_grad_norm_(max_norm)" in told[0]
        assert "torch.nn.utils.get_total_norm" in told[1] and "job.grad_norm()" in told[1]
        assert "torch.optim.LBFGS" in told[2] and "each parameter by itself" in told[2]
        assert plain == pytest.approx(over_stages) == pytest.approx(plain_norm()), "of others' gradients it is as ever"
        assert patches == [[], [], []], "as it was, once the job has gone"


def test_gradients_of_a_model_in_one_part_are_not_refused(workers: Any) -> None:
    for told, (plain, over_replicas), _ in workers.run(refusals, {"dp_replicate": 2}, ranks=2):
        assert told == [] and plain == pytest.approx(over_replicas)


class OwnNorm(torch.optim.SGD):
    """Scales all gradients by a norm of its own, in a method beside ``step``, which alone is tried (``coupled_updates``)."""

    def scale(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for g in grads:
            g.div_(norm)


def recorded(folder: str, mesh: str) -> None:
    """One step of a script with an optimizer of its own, written down."""
    torch.manual_seed(0)
    if not mesh:
        model: Any = Tower()
        optimizer = OwnNorm(model.parameters(), lr=0.01)
        with mw.record(model, folder, optimizer=optimizer) as rec:
            loss = model(rows())
            loss.backward()
            rec.loss(loss, batch=rows())
            optimizer.scale()
            optimizer.step()
        return
    job = mw.parallelize(Tower, mesh, batch=rows())
    optimizer = OwnNorm(job.parameters(), lr=0.01)
    with mw.record(job, folder, optimizer=optimizer) as rec:
        rec.loss(job.step(rows()), batch=rows())
        optimizer.scale()
        optimizer.step()


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="DTensor flattens no tensor whose second dim is sharded")
def test_a_norm_of_an_optimizer_s_own_over_stages_shows_in_a_recording(workers: Any, tmp_path: Any) -> None:
    workers.run(recorded, str(tmp_path / "one"), "", ranks=1)
    for mesh, right in (("pp=2", False), ("tp=2", True)):
        workers.run(recorded, str(tmp_path / mesh), mesh, ranks=2)
        verdict = mw.compare_recordings(tmp_path / "one", tmp_path / mesh)
        assert bool(verdict) is right, str(verdict)
        assert right or "blocks.1.bias" in str(verdict)
