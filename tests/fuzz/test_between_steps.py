"""Random training scripts over every layout: what they leave is what they leave on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from between_steps import Net, Run, batch, outcome, script

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

LAYOUTS = {
    "dp_shard=2": 2,
    "tp=2": 2,
    "dp_shard=2,tp=2": 4,
    "dp_replicate=2": 2,
    "pp=2": 2,
    "dp_replicate=2,dp_shard=2": 4,
}


def of_one_device(seed: int) -> dict[str, Any] | None:
    """What a script leaves; None if torch refuses it."""
    torch.manual_seed(seed)
    model = Net().double()

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids)
        loss.backward()
        return loss.detach()

    run = Run(
        model,
        dict(model.named_parameters()),
        step,
        lambda ids: model(ids).detach(),
        lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm),
    )
    try:
        script(seed, run, [name for name, _ in model.named_parameters()])
    except RuntimeError:
        return None
    return outcome(run)


def of_job(seed: int, mesh: str) -> dict[str, Any] | str:
    """What a script leaves on this rank; or why it was refused."""
    torch.manual_seed(seed)
    state = Net().double().state_dict()

    def build() -> Net:
        model = Net().double()
        model.load_state_dict(state)
        return model

    job = mw.parallelize(build, mesh, batch=(batch(0),), loss=lambda out: out, dtype=torch.float64)
    size, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)

    def rows(ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (ids.tensor_split(size)[index],)

    run = Run(
        job.module,
        dict(job.named_parameters()),
        lambda ids: job.step(rows(ids)),
        lambda ids: job.evaluate(rows(ids)),
        job.clip_grad_norm_,
    )
    try:
        script(seed, run, [line.name for line in job.recipe.parameters])
    except mw.PlanError as error:
        return str(error)
    return outcome(run)


def judge(workers: LocalWorkers, seed: int, mesh: str) -> str:
    """right, refused, or what is wrong."""
    expected = of_one_device(seed)
    if expected is None:
        return "refused"
    for rank, found in enumerate(workers.run(of_job, seed, mesh, ranks=LAYOUTS[mesh])):
        if isinstance(found, str):
            return "refused"
        for name, value in found.items():
            one = expected[name]
            if (value is None) != (one is None):
                return f"rank {rank}: {name} is {'no' if value is None else 'a'} tensor"
            if value is not None and not torch.allclose(value, one, rtol=1e-7, atol=1e-9, equal_nan=True):
                return f"rank {rank}: {name} differs by {(value - one).abs().max().item():.3g}"
    return "right"


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_random_scripts(workers: LocalWorkers, mesh: str) -> None:
    seeds = range(8 if LAYOUTS[mesh] == 2 else 4)
    told = {seed: judge(workers, seed, mesh) for seed in seeds}
    assert set(told.values()) <= {"right", "refused"}, told
    assert sum(verdict == "right" for verdict in told.values()) > len(seeds) / 2, told


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_many_random_scripts(workers: LocalWorkers, mesh: str) -> None:
    told = {seed: judge(workers, seed, mesh) for seed in range(100, 300)}
    assert set(told.values()) <= {"right", "refused"}, {s: v for s, v in told.items() if v not in ("right", "refused")}
