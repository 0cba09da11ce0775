"""``mesh: auto``: the mesh is found for the processes that there are; what the plan says is kept; the same as one process."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from commands import meshwright
from meshwright import Plan, PlanError
from meshwright.amounts import duration_text
from meshwright.hardware import profiles, read_profile
from meshwright.hardware.devices import GPUS, profile_of_gpu
from meshwright.search.space import candidates
from meshwright.workers.pool import LocalWorkers, WorkerError

WIDTH, ROWS = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.down(nn.functional.gelu(self.up(h)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), y)}


def loss_of(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["loss"]


def batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH), "y": torch.arange(rows) % 8}


CPU = replace(read_profile("v100"), name="cpu-local", cores=1, devices_per_node=4096)
"""As ``calibrate`` would write it."""


@pytest.fixture
def home(tmp_path: Path) -> str:
    """A folder of settings with a profile of this machine."""
    (tmp_path / "meshwright").mkdir()
    (tmp_path / "meshwright" / "cpu-local.yaml").write_text(CPU.text())
    return str(tmp_path)


def trained(home: str, plan: Any, build: Any = Tower) -> dict[str, Any]:
    """Two steps of SGD, on every rank."""
    os.environ["XDG_CONFIG_HOME"] = home
    job = mw.parallelize(build, plan, batch=batch(), loss=loss_of)
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(float(job.step(next(iter(job.batches(batch(), ROWS, shuffle=False))))))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": job.full_state_dict(),
        "plan": mw.Plan.from_yaml(job.recipe.plan),
        "notes": job.notes,
    }


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, losses = Tower(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_of(model(**batch()))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def test_a_run_finds_its_mesh_says_so_and_is_the_same_as_one_process(home: str, workers: LocalWorkers) -> None:
    results = workers.run(trained, home, mw.Plan(mesh="auto"), ranks=2)
    losses, weights = alone()
    found = mw.find_plans(Tower, batch(), devices=2, hardware=CPU, loss=loss_of)
    plan = found.plans[0].plan
    for result in results:
        assert result["plan"] == plan and plan.mesh.size == 2
        note = result["notes"][0]
        assert f"mesh: {plan.mesh}" in note and "2 ranks of cpu-local and 8 rows a step" in note
        assert "estimated at" in note and f"microbatches: {plan.microbatches}" in note
        assert set(found.why) <= set(result["notes"])
    assert results[0]["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(results[0]["weights"][name], value, rtol=1e-4, atol=1e-6)
    for proposal in found.plans:  # two ranks on one core: a step takes at least the work of both
        work = sum(seconds for term, seconds in proposal.terms.items() if term not in ("bubble", "shared cores"))
        assert proposal.seconds >= 2 * work / CPU.cores


@pytest.mark.proof
def test_what_a_plan_says_is_kept(home: str, workers: LocalWorkers) -> None:
    said = {"microbatches": 2, "recompute": "none", "seed": 3, "precision": "bfloat16", "sequence_parallel": False}
    plan = mw.Plan("auto", {"head": {"dp": "replicate", "tp": "replicate"}}, schedule="gpipe", **said)
    found, *_ = workers.run(trained, home, plan, ranks=2)
    kept = found["plan"]
    assert {name: getattr(kept, name) for name in said} == said
    assert kept.schedule == "gpipe" and kept.modules == plan.modules and kept.mesh.size == 2
    assert not any("recompute" in note or "microbatches: " in note for note in found["notes"][:1])


def test_without_a_profile_every_rank_is_told_how_to_get_one(tmp_path: Path, workers: LocalWorkers) -> None:
    with pytest.raises(WorkerError) as raised:
        workers.run(trained, str(tmp_path), "auto", ranks=2)
    assert raised.value.plan_error is not None
    (finding,) = raised.value.plan_error.findings
    assert finding.where == "mesh" and finding.fix == "meshwright calibrate"
    alone_here, *_ = workers.run(trained, str(tmp_path), "auto", ranks=1)
    assert alone_here["plan"].mesh.size == 1, "there is nothing to find"


def trained_with_a_lock(home: str) -> None:
    held = threading.Lock()

    def build() -> Tower:
        with held:
            return Tower()

    trained(home, "auto", build)


def test_a_model_that_cannot_be_sent_to_the_search_is_told(home: str, workers: LocalWorkers) -> None:
    with pytest.raises(WorkerError) as raised:
        workers.run(trained_with_a_lock, home, ranks=2)
    assert raised.value.plan_error is not None
    assert "cannot be sent to another process" in raised.value.plan_error.findings[0].given


@pytest.mark.parametrize(
    "asked",
    [
        lambda: mw.make_recipe(Tower, "auto", batch(), loss_of),
        lambda: mw.predict(Tower, batch(), "auto", loss=loss_of),
        lambda: mw.measure(Tower, batch(), "auto", loss=loss_of),
        lambda: mw.check(Tower, batch(), "auto", loss=loss_of),
    ],
)
def test_what_knows_no_number_of_processes_asks_for_a_mesh(asked: Any) -> None:
    with pytest.raises(PlanError, match="the number of processes") as raised:
        asked()
    assert "find_plans" in raised.value.findings[0].fix


def target() -> tuple[Any, dict[str, torch.Tensor]]:
    return Tower, batch()


@pytest.mark.proof
@pytest.mark.parametrize("nodes", [2, 4])
def test_show_searches_for_the_nodes_that_it_draws(nodes: int, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", home)
    options = ("--mesh", "auto", "--ranks", 4, "--nodes", nodes, "--loss", f"{__file__}:loss_of")
    text = meshwright("show", f"{__file__}:target", *options).output
    found = mw.find_plans(
        Tower, batch(), devices=4, nodes=nodes, hardware=CPU, loss=loss_of, options={"precision": "float32"}
    )
    alone = mw.find_plans(Tower, batch(), devices=4, hardware=CPU, loss=loss_of, options={"precision": "float32"})
    seconds, on_one_node = (duration_text(one.plans[0].seconds) for one in (found, alone))
    assert f"a step is estimated at {seconds}" in " ".join(text.split()) and seconds != on_one_node


@pytest.mark.parametrize("options", [{"recompute": "blocks"}, {"recompute": "none"}, {"schedule": "interleaved"},
                                     {"schedule": "zero_bubble"}, {"stages_per_rank": 3}, {"microbatches": 4},
                                     {"reshard_after_forward": False}, {"sequence_parallel": False}])  # fmt: skip
def test_a_search_varies_only_what_is_left_out(options: dict[str, Any]) -> None:
    every = [*candidates(8, 8, 64, [1, 2, 4], 16, recompute=True)]
    some = [*candidates(8, 8, 64, [1, 2, 4], 16, options, recompute=True)]
    assert some and len(some) <= len(every)
    for candidate in some:
        plan = Plan.from_dict(candidate.plan(options))
        (key, value), *_ = options.items()
        assert getattr(plan, key) == value
        if key == "schedule" and candidate.pp > 1:
            assert (candidate.chunks > 1) == (value == "interleaved")
        if key == "stages_per_rank":
            assert candidate.pp == 1 or candidate.chunks == 3


def test_a_gpu_s_profile_goes_by_its_name() -> None:
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA B200": "b200-sxm",
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H200": "h200-sxm",
        "AMD Instinct MI300X": "mi300x",
        "Tesla V100-SXM2-32GB": "v100",
    }
    assert {name: profile_of_gpu(name).name for name in names} == names
    assert set(GPUS) == set(profiles())
    for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        with pytest.raises(PlanError, match="profile ships"):
            profile_of_gpu(other)
