"""For what the host waits in a step while a device computes: all of it, by its place in the library.

A step runs on a device that has no values (tests/standin.py): whatever is read of it, or copied from or to it blocking, is
written down. Rank by rank, without the other ranks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.plan import Plan
from meshwright.runtime.coupling.trial import Verdict
from meshwright.runtime.division import Division
from meshwright.runtime.job import Job
from meshwright.runtime.row_trials import RowTrials
from meshwright.runtime.rows.batch import mapped, with_host
from meshwright.train.agreement import agree
from standin import DEVICE, FakeTensorMode, Waits, job_on_device, world

LATE = "synchronize in runtime/pending_numbers.py: read"
IDS = torch.arange(8 * 6).view(8, 6) % 16


class Block(nn.Module):
    """Attention with dropout, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 2)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0
        )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Tied tables, two blocks, a parameter without dims; the loss is a mean over labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(2))
        self.head, self.scale = nn.Linear(8, 16, bias=False), nn.Parameter(torch.ones(()))
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x * self.scale).flatten(0, 1), labels.flatten())


def waits_of_a_step(plan: Any, rank: int, monkeypatch: pytest.MonkeyPatch, **how: bool) -> Counter[str]:
    """What the host waits for in the third step; the first ones try how rows combine, and record forwards."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    waits = Waits(fake)
    with world(rank, Plan.parse(plan).mesh.size, waits, monkeypatch):
        job, rows = job_on_device(Model, plan, {"ids": IDS, "labels": IDS}, rank, fake, waits, loss=lambda out: out)
        # Trials compare values: what they would find is told.
        monkeypatch.setattr(RowTrials, "_how_rows_combine", lambda trials, batch, mode: Verdict("mean"))
        monkeypatch.setattr(Division, "_try_what_is_new", lambda division: None)
        with fake, waits:
            if how.get("from_host"):
                rows = mapped(lambda t: with_host(t, torch.zeros(t.shape, dtype=t.dtype)), rows)
            optimizer = torch.optim.AdamW(job.parameters())
            for _ in range(3):
                waits.seen.clear()
                _step(job, rows, optimizer, trains=how.get("trains", False))
    return waits.seen


def _step(job: Job, rows: Any, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
    """What a person's own loop does, or ours."""
    loss, norm = job.step(rows), job.clip_grad_norm_(1.0)
    if trains:
        agree(job, loss, norm, stop=False, amount=1.0, seconds=1.0)
        job.finish_step()
    optimizer.step()
    optimizer.zero_grad()


PLANS: dict[str, tuple[Any, int]] = {
    "shards": ("dp_shard=2", 1),
    "replicas of shards": ("dp_replicate=2,dp_shard=2", 0),
    "tp and shards": ("dp_shard=2,tp=2", 3),
    "stages, the last": ({"mesh": "pp=2", "microbatches": 4}, 1),
    "stages, the first": ({"mesh": "pp=2", "microbatches": 4}, 0),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_reads_the_loss_of_the_one_before_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether the loss is finite: that of pieces of rows may not be, where that of all rows is.
    assert waits_of_a_step(*PLANS[name], monkeypatch) == {LATE: 1}


def test_a_step_of_rows_that_are_not_divided_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits_of_a_step("tp=2", 1, monkeypatch) == {}


def test_our_loop_waits_once_before_the_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # For loss and norm: with one that is not finite the optimizer does not step. What the step itself looks at is there by then.
    assert waits_of_a_step(*PLANS["tp and shards"], monkeypatch, trains=True) == {LATE: 2}


class Ticking:
    """An event of a stream on which a millisecond passes from one event to the next, as little as that may be for the host."""

    waits: Waits
    _stream: Iterator[int]

    def __init__(self, device: str, *, enable_timing: bool) -> None:
        assert (device, enable_timing) == (DEVICE.type, True)
        self._at, self._done = -1, False

    @classmethod
    def on(cls, waits: Waits) -> type[Ticking]:
        return type("Event", (cls,), {"waits": waits, "_stream": itertools.count()})

    def record(self) -> None:
        self._at = next(self._stream)

    def synchronize(self) -> None:
        self.waits.waited("synchronize")
        self._done = True

    def elapsed_time(self, other: Ticking) -> float:
        assert self._done and other._done, "CUDA raises for an event that was not waited for"
        return float(other._at - self._at)


@pytest.mark.parametrize("name", ["tp and shards", "stages, the first"])
def test_an_observed_step_waits_for_the_device_when_it_has_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = PLANS[name]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    waits = Waits(fake)
    with world(0, Plan.parse(plan).mesh.size, waits, monkeypatch):
        job, rows = job_on_device(Model, plan, {"ids": IDS, "labels": IDS}, 0, fake, waits, loss=lambda out: out)
        monkeypatch.setattr(RowTrials, "_how_rows_combine", lambda trials, batch, mode: Verdict("mean"))
        monkeypatch.setattr(Division, "_try_what_is_new", lambda division: None)
        monkeypatch.setattr(torch, "Event", Ticking.on(waits))
        with fake, waits:
            optimizer = torch.optim.AdamW(job.parameters())
            for _ in range(2):
                _step(job, rows, optimizer, trains=False)
            with job.observe(optimizer) as seen:
                waits.seen.clear()
                _step(job, rows, optimizer, trains=False)
                during = Counter(waits.seen)
    assert during == {LATE: 1}  # as in any step
    after = waits.seen - during
    assert set(after) == {"synchronize in watch/moments.py: seconds"}
    step = seen.timeline
    assert step is not None and step.exchanges
    slots = step.lines[0].slots
    assert slots[0].what == "begin" and [slot.what for slot in slots[-2:]] == ["clip", "optimizer"]
    # By the clock of the device, on which a whole number of milliseconds passes.
    # Counts of rows, and what ranks agree on, which the host has, go by its own clock.
    values = [one for one in step.exchanges if one.bytes > 80]
    assert values
    lengths = [1e3 * (one.stop - one.start) for one in (*slots, *values)]
    assert all(length > 0.5 and abs(length - round(length)) < 1e-3 for length in lengths)
    assert all(one.stop <= other.start for one, other in itertools.pairwise(slots))


def test_labels_whose_values_the_host_has_are_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits_of_a_step(*PLANS["shards"], monkeypatch, from_host=True) == {LATE: 1}


def test_what_is_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    waits = Waits(fake)
    with world(0, 1, waits, monkeypatch), fake, waits:
        t = torch.zeros(3, device="lazy")
        t.tolist(), bool(t.sum() > 0), t.cpu()
        torch.tensor([1.0], device="lazy"), torch.ones(2).to("lazy"), t.copy_(torch.ones(3))
        t.to("cpu", non_blocking=True), torch.ones(3).to("lazy", non_blocking=True), torch.ones(3).tolist()
    assert waits.seen == {
        "read in the caller": 2,
        "copy to the host in the caller": 1,
        "copy to the device in the caller": 3,
    }
