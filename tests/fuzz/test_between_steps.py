"""Random training scripts over every layout: what they leave is what they leave on one device."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from between_steps import MODELS, Run, batch, outcome, script

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


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODELS[seed // 2 % len(MODELS)]().double()


def of_one_device(seed: int) -> dict[str, Any] | None:
    """What a script leaves; None if torch refuses it."""
    model = model_of(seed)
    target, states = copy.deepcopy(model), {}

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids)
        loss.backward()
        return loss.detach()

    def save(optimizer: Any) -> None:
        states.update(copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))

    def load(optimizer: Any) -> None:
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])

    run = Run(
        model,
        dict(model.named_parameters()),
        step,
        lambda ids: model(ids).detach(),
        lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm),
        save,
        load,
        dict(target.named_parameters()),
        lambda ids: target(ids).detach(),
    )
    try:
        script(seed, run, [name for name, _ in model.named_parameters()])
    except RuntimeError:
        return None
    return outcome(run)


def of_job(seed: int, mesh: str, microbatches: int, folder: Path) -> dict[str, Any] | str:
    """What a script leaves on this rank; or why it was refused."""
    plan = {"mesh": mesh, "microbatches": microbatches}
    job, target = (
        mw.parallelize(partial(model_of, seed), plan, batch=(batch(0),), loss=lambda out: out, dtype=torch.float64)
        for _ in range(2)
    )
    size, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
    saves = 0

    def rows(ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (ids.tensor_split(size)[index],)

    def save(optimizer: Any) -> None:
        nonlocal saves
        saves += 1
        job.save(folder, optimizer, step=saves)

    run = Run(
        job.module,
        dict(job.named_parameters()),
        lambda ids: job.step(rows(ids)),
        lambda ids: job.evaluate(rows(ids)),
        job.clip_grad_norm_,
        save,
        lambda optimizer: job.load(folder, optimizer),
        dict(target.named_parameters()),
        lambda ids: target.evaluate(rows(ids)),
    )
    try:
        script(seed, run, [line.name for line in job.recipe.parameters])
    except mw.PlanError as error:
        return str(error)
    return outcome(run)


def judge(workers: LocalWorkers, seed: int, mesh: str, folder: Path) -> str:
    """right, refused, or what is wrong."""
    expected = of_one_device(seed)
    if expected is None:
        return "refused"
    found_by_rank = workers.run(of_job, seed, mesh, 1 + seed % 2, folder / str(seed), ranks=LAYOUTS[mesh])
    for rank, found in enumerate(found_by_rank):
        if isinstance(found, str):
            return "refused"
        for name, value in found.items():
            one = expected.get(name)
            if (value is None) != (one is None):
                return f"rank {rank}: {name} is {'no' if value is None else 'a'} tensor"
            if value is not None and not torch.allclose(value, one, rtol=1e-7, atol=1e-9, equal_nan=True):
                return f"rank {rank}: {name} differs by {(value - one).abs().max().item():.3g}"
    return "right"


# One of each model, with one and with two microbatches; the proof has the rest.
@pytest.mark.parametrize("seeds", [(0, 3, 4), pytest.param((1, 2, 5), marks=pytest.mark.proof)], ids=str)
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_random_scripts(workers: LocalWorkers, mesh: str, seeds: tuple[int, ...], tmp_path: Path) -> None:
    told = {seed: judge(workers, seed, mesh, tmp_path) for seed in seeds}
    assert set(told.values()) <= {"right", "refused"}, told
    assert sum(verdict == "right" for verdict in told.values()) > len(seeds) / 2, told


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_many_random_scripts(workers: LocalWorkers, mesh: str, tmp_path: Path) -> None:
    told = {seed: judge(workers, seed, mesh, tmp_path) for seed in range(100, 300)}
    assert set(told.values()) <= {"right", "refused"}, {s: v for s, v in told.items() if v not in ("right", "refused")}
