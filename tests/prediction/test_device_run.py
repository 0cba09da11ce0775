"""A dry run on a device: a rank's step on real tensors, without the other ranks."""

import pytest
import torch
import torch.distributed as dist
from test_rehearsal import Tower, loss, tokens
from torch import nn

from meshwright.prediction.dryrun import dry_run
from meshwright.prediction.measure import UNSTEADY

TOLERANCE = 0.05

LAYOUTS = [
    ({"mesh": "dp_shard=2"}, 1),
    ({"mesh": "tp=2"}, 1),
    ({"mesh": "pp=2", "microbatches": 4}, 1),
    ({"mesh": "pp=2,tp=2,dp_shard=4", "microbatches": 4}, 13),
    ({"mesh": "dp_replicate=4", "recompute": "blocks"}, 0),
    ({"mesh": "dp_shard=16", "precision": "bfloat16"}, 7),
]


@pytest.mark.parametrize(("plan", "rank"), LAYOUTS, ids=str)
def test_its_memory_is_as_rehearsed(plan, rank):
    run = dry_run(Tower, tokens(), plan, rank, loss=loss, hardware="h100", device="cpu")
    real = run.on_device
    assert real.device == "cpu" and real.reserved == 0
    assert run.memory.peak == pytest.approx(real.peak, rel=TOLERANCE)
    assert len(real.peaks) == UNSTEADY + len(real.seconds)
    assert 0 < min(real.seconds) <= real.step_seconds <= max(real.seconds)
    assert not dist.is_initialized()


class Lookup(nn.Module):
    """What crosses from one half to the other are indices, which must be rows of the second half's table."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.scores = nn.Linear(width, 16)
        self.table = nn.Embedding(16, width)
        self.second = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        h = self.first(x)
        chosen = self.scores(h).argmax(-1)
        return self.second(self.table(chosen) + h).square().mean()


def test_other_stages_send_numbers_that_are_indices_too():
    torch.manual_seed(0)
    plan = {"mesh": "pp=2", "modules": {"table": {"on": "pp[1]"}, "second": {"on": "pp[1]"}, "scores": {"on": "pp[0]"}}}
    run = dry_run(Lookup, (torch.randn(8, 64),), plan, 1, loss=loss, device="cpu")
    assert run.on_device.step_seconds > 0


class Chosen(nn.Module):
    """A forward that goes on until a value says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        while x.norm() > 1:
            x = self.layer(x) * 0.5
        return x.square().mean()


def test_a_step_that_reads_values_does_not_run_on_the_device():
    """Without other ranks the values are not the model's: a loop might never end."""
    run = dry_run(Chosen, (torch.randn(8, 64),), "tp=2", 0, loss=loss, device="cpu")
    assert run.host_reads and run.on_device is None and run.json()["on_device"] is None


def test_rows_that_have_no_values_are_zeros():
    run = dry_run(
        Tower, (torch.zeros(16, 64, dtype=torch.int64, device="meta"),), "dp_shard=2", 0, loss=loss, device="cpu"
    )
    assert run.on_device.peak == pytest.approx(run.memory.peak, rel=TOLERANCE)


def test_what_it_took_is_data():
    data = dry_run(Tower, tokens(), "tp=2", 0, loss=loss, device="cpu").json()
    assert data["seconds"] > 0
    assert data["on_device"].keys() == {"device", "peak", "reserved", "seconds", "steps"}
