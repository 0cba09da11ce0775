"""An error that one rank alone meets ends the job on all ranks, soon, each with an error that says which rank failed, and why."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

SOON = 20.0  # seconds: less than any timeout of a collective, more than a busy machine takes


class Fails(nn.Module):
    """Raises in its forward, or in its backward, on the rank that is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x).relu()
            if i == 1 and self.where == "backward" and x.requires_grad:
                x.register_hook(_raises)
        return x.square().mean()


def _raises(*_: Any) -> None:
    raise ValueError("a bad row")


def outcome(mesh: str, where: str, failing: int) -> tuple[str, str, float, str]:
    """The error of this rank's step, how long it took to come, and what the next step says."""
    rows = torch.randn(4, 8)
    job = mw.parallelize(Fails, {"mesh": mesh, "microbatches": 2}, batch={"x": rows}, loss=lambda y: y)
    job.step({"x": rows})
    if job.rank == failing:
        if where == "forward":
            job.module.blocks[3 if "pp" in mesh else 1].register_forward_hook(_raises)
        else:
            job.module.where = where
    began = time.monotonic()
    try:
        job.step({"x": rows})
    except Exception as error:
        took = time.monotonic() - began
        with pytest.raises(mw.RankError) as again:
            job.step({"x": rows})
        if job.rank == failing:
            time.sleep(5)  # it lives on: the others do not learn of its end by that
        return type(error).__name__, str(error), took, str(again.value)
    return "", "", 0.0, ""


@pytest.mark.parametrize(
    ("mesh", "where"),
    [("dp_shard=2", "forward"), ("tp=2", "forward"), ("pp=2", "forward"), ("dp_shard=2", "backward")],
)
def test_a_rank_that_fails_and_lives_on_ends_the_others(workers: LocalWorkers, mesh: str, where: str) -> None:
    outcomes = workers.run(outcome, mesh, where, 1, ranks=2, timeout=60)
    names = [name for name, *_ in outcomes]
    assert names in (["RankError", "ValueError"], ["RankError", "StageError"]), outcomes
    assert outcomes[0][2] < SOON
    assert "step 2: rank 1 failed: " in outcomes[0][1]
    assert "a bad row" in outcomes[0][1]
    assert all("takes no further step" in again for *_, again in outcomes)
