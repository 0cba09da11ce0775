"""What parameters begin with: what the model draws, or nothing, where a load brings them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright import deferred
from meshwright.errors import PlanError
from meshwright.workers.pool import LocalWorkers

X = torch.arange(16.0).view(4, 4) / 16


class Model(nn.Module):
    """A table of the model's own beside its weights; with ``chance``, one that is drawn, and is in no file."""

    def __init__(self, chance: bool = False, wide: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, wide), nn.Linear(wide, wide * 4)
        self.register_buffer("table", torch.arange(4.0) / 4, persistent=False)
        if chance:
            self.register_buffer("noise", torch.randn(4) * 2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table + getattr(self, "noise", 0.0)
        return self.b(self.a(x).relu()).square().mean()


def _job(weights: str, mesh: str = "dp_shard=1", *, chance: bool = False) -> mw.Job:
    return mw.parallelize(
        lambda: Model(chance), {"mesh": mesh, "weights": weights}, batch=(X,), loss=lambda out: out, device="cpu"
    )


def _saved_and_loaded(folder: Path) -> list[tuple[list[Tensor], list[Tensor]]]:
    """The parameters and losses of a run that saves, and of one that draws nothing and loads."""
    runs = []
    for weights in ("drawn", "checkpoint"):
        with pytest.MonkeyPatch.context() as patch:
            if weights == "checkpoint":
                patch.setattr(deferred.RecordedModule, "value", None)  # whoever asks for a value fails
            job = _job(weights, "dp_shard=2,tp=2", chance=False)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        if weights == "drawn":
            job.save(folder, optimizer, step=0)
        else:
            nans = [line.name for line, value in job.full_parameters() if value is not None and not value.isnan().all()]
            assert not nans
            job.load(folder, optimizer)
        losses = [job.step((X[:2],)).detach()]
        optimizer.step()
        runs.append(([value for _, value in job.full_parameters() if value is not None], losses))
    return runs


def test_what_a_checkpoint_brings_is_not_drawn(workers: LocalWorkers, tmp_path: Path) -> None:
    for drawn, loaded in workers.run(_saved_and_loaded, tmp_path, ranks=4):
        assert all(map(torch.equal, [*drawn[0], *drawn[1]], [*loaded[0], *loaded[1]]))


@pytest.mark.parametrize(
    ("weights", "by"), [("checkpoint", "job.load(...)"), ("pretrained", "job.load_pretrained(...)")]
)
def test_no_step_is_taken_before_weights_are_loaded(weights: str, by: str) -> None:
    job = _job(weights)
    for run in (lambda: job.step((X,)), lambda: job(X)):
        with pytest.raises(PlanError, match="not numbers yet") as told:
            run()
        assert told.value.findings[0].fix == f"{by}, or weights: drawn"


def test_nothing_is_not_a_number() -> None:
    job = _job("none")
    assert all(p.isnan().all() for p in job.parameters())
    assert job.step((X,)).isnan()  # who fills them himself may take steps
    assert job.module.table.equal(torch.arange(4.0) / 4)


def test_what_is_drawn_and_in_no_file_is_drawn_all_the_same() -> None:
    drawn, loaded = _job("drawn", chance=True), _job("checkpoint", chance=True)
    assert drawn.module.noise.equal(loaded.module.noise)


def test_buffers_that_follow_from_random_numbers_are_known() -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 128))
            self.register_buffer("large", torch.rand(64, 128).cumsum(0))  # deferred
            self.register_buffer("written", torch.zeros(8))
            self.written[2:].copy_(torch.rand(6))
            self.register_buffer("plain", torch.zeros(64, 128).add_(1))
            self.kept = {"list": [torch.bernoulli(torch.full((3,), 0.5))]}

    recorded = deferred.record(Others, seed=0, draw=False)
    assert set(recorded.by_chance) == {"large", "written", "kept"}
    assert deferred.record(lambda: nn.Linear(80, 80), seed=0, draw=False).by_chance == ()


def test_a_folder_that_lacks_weights_which_nobody_drew_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: t.contiguous() for name, t in Model().state_dict().items() if name != "b.bias"}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"lacks b\.bias"):
        _job("pretrained").load_pretrained(tmp_path, strict=False)
    job = _job("drawn")
    assert job.load_pretrained(tmp_path, strict=False).missing == ("b.bias",)
    assert job.step((X,)).isfinite()
