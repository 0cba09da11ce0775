"""What a step does on a GPU beside its numbers: whether the host waits, memory, compiled blocks, dropout, checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import Block, Decoder, itself, words
from torch import Tensor, nn

import meshwright as mw
from meshwright.prediction.dryrun import dry_run
from meshwright.runtime.rows.batch import mapped
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.workers.pool import LocalWorkers


def _job(build: Callable[[], nn.Module], plan: Any, batch: Any, device: torch.device) -> tuple[mw.Job, Any]:
    """A job, and this rank's rows."""
    job = mw.parallelize(build, plan, batch=batch, loss=itself, device=device.type)
    rows = rows_of_rank(batch, job.recipe, job.rank)
    return job, mapped(lambda t: t.to(job.groups.device), rows)


@contextmanager
def _no_host_waits(device: torch.device) -> Iterator[None]:
    """What makes the host wait for a GPU is an error, where torch sees it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _steps_without_waits(plan: Any, device: torch.device) -> list[float]:
    job, rows = _job(partial(Decoder, dropout=0.1), plan, words(), device)
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)
    losses = []
    for number in range(6):
        # The first steps try how rows combine, and record forwards; the first compares ranks.
        with _no_host_waits(device) if number > 2 else _no_host_waits(torch.device("cpu")):
            losses.append(job.step(rows))
            job.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    job.finish_step()
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("plan", ["dp_shard=1", {"mesh": "dp_shard=1", "microbatches": 2}], ids=str)
def test_no_step_waits_for_the_device(plan: Any, device: torch.device, alone: LocalWorkers) -> None:
    (losses,) = alone.run(_steps_without_waits, plan, device)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("plan", ["dp_shard=2,tp=2", {"mesh": "pp=2,tp=2", "microbatches": 2}], ids=str)
def test_ranks_with_dropout_have_one_loss(plan: Any, device: torch.device, pool: LocalWorkers) -> None:
    # (Over gloo a collective of device tensors waits; what is compared is that ranks draw alike.)
    results = pool.run(_losses, plan, device, ranks=4)
    assert all(losses == results[0] for losses in results) and results[0][-1] < results[0][0]


def _losses(plan: Any, device: torch.device) -> list[float]:
    job, rows = _job(partial(Decoder, dropout=0.1), plan, words(), device)
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        losses.append(job.step(rows).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _peaks(device: torch.device) -> tuple[int, int]:
    """The most bytes that a step of a job of one rank holds, and of plain PyTorch."""
    build, batch = partial(Decoder, blocks=4, width=256), words(16, 64)

    def peak(step: Callable[[], Tensor], parameters: Any) -> int:
        optimizer = torch.optim.AdamW(parameters)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats(device)
            step()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated(device)

    before = torch.cuda.memory_allocated(device)
    ours = _peak_of_job(build, batch, device, peak) - before
    before = torch.cuda.memory_allocated(device)
    model, rows = build().to(device), mapped(lambda t: t.to(device), batch)

    def plainly() -> Tensor:
        loss: Tensor = model(**rows)
        loss.backward()
        return loss

    return ours, peak(plainly, model.parameters()) - before


def _peak_of_job(build: Any, batch: Any, device: torch.device, peak: Callable[..., int]) -> int:
    """Of a job that is gone when it returns."""
    job, rows = _job(build, {"mesh": "dp_shard=1", "verify": 0}, batch, device)
    return peak(lambda: job.step(rows), job.parameters())


def test_a_rank_alone_takes_the_memory_of_plain_pytorch(gpu: torch.device, alone: LocalWorkers) -> None:
    ((ours, plain),) = alone.run(_peaks, gpu)
    assert ours <= 1.05 * plain


def _compiled_and_plain(device: torch.device) -> list[tuple[float, list[Tensor]]]:
    """Loss and gradients of a job whose blocks are compiled, and of one whose blocks are not."""

    def build(compiles: bool) -> nn.Module:
        model = Decoder()
        for block in model.blocks if compiles else ():
            assert isinstance(block, Block)
            block.compile()
        return model

    found = []
    for compiles in (True, False):
        job, rows = _job(partial(build, compiles), "dp_shard=1", words(), device)
        loss = job.step(rows)
        found.append((loss.item(), [g.clone() for _, g in job.full_gradients() if g is not None]))
    return found


def test_compiled_blocks_are_those_of_the_model(device: torch.device, alone: LocalWorkers) -> None:
    ((compiled, plain),) = alone.run(_compiled_and_plain, device)
    assert compiled[0] == pytest.approx(plain[0], rel=1e-4)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(compiled[1], plain[1], strict=True))


def _resumed(folder: Path, device: torch.device) -> tuple[list[float], list[float]]:
    """Losses after an asynchronous checkpoint: of the run that goes on, and of one that resumes; with dropout."""
    plan = {"mesh": "dp_shard=2", "weights": "drawn"}
    job, rows = _job(partial(Decoder, dropout=0.1), plan, words(), device)
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)

    def steps(job: mw.Job, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(job.step(rows).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    steps(job, optimizer)
    saving = job.save(folder, optimizer, step=2, wait=False)
    after = steps(job, optimizer)  # while it is written
    saving.wait()
    again, _ = _job(partial(Decoder, dropout=0.1), plan | {"weights": "checkpoint"}, words(), device)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    again.load(folder, other)
    return after, steps(again, other)


def test_a_run_resumes_from_what_was_saved_beside_training(
    device: torch.device, pool: LocalWorkers, tmp_path: Path
) -> None:
    for went_on, resumed in pool.run(_resumed, tmp_path, device, ranks=2):
        assert resumed == pytest.approx(went_on, rel=1e-5)


def _norms(device: torch.device) -> tuple[float, float]:
    """The norm of gradients, and what is left of it after clipping; of plain PyTorch and of a job."""
    job, rows = _job(Decoder, "dp_shard=1", words(), device)
    torch.manual_seed(0)
    model = Decoder().to(job.groups.device)
    model(**copy.copy(rows)).backward()
    job.step(rows)
    ours = job.clip_grad_norm_(0.1)
    plain = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return (ours / plain).item(), (job.grad_norm() / 0.1).item()


def test_clipping_is_that_of_plain_pytorch(device: torch.device, alone: LocalWorkers) -> None:
    ((ratio, left),) = alone.run(_norms, device)
    assert ratio == pytest.approx(1.0, rel=1e-4) and left == pytest.approx(1.0, rel=1e-3)


# --- a step that is observed ------------------------------------------------------------------------------------------


def _observed(plan: Any, device: torch.device) -> tuple[float, float, float, list[str], list[float]]:
    """Seconds that the host took to hand over a step, that the step took, and that its timeline has; what was done; and
    seconds of collectives."""
    job, rows = _job(partial(Decoder, dropout=0.0), plan, words(), device)
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)

    def step() -> None:
        job.step(rows)
        job.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    job.finish_step()
    with job.observe(optimizer) as seen:
        begun = time.perf_counter()
        with _no_host_waits(device):
            step()
        handed_over = time.perf_counter() - begun
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
    assert seen.timeline is not None
    whats = [slot.what for slot in seen.timeline.lines[0].slots]
    return handed_over, took, seen.timeline.length, whats, [e.stop - e.start for e in seen.timeline.exchanges]


@pytest.mark.parametrize("plan", ["dp_shard=1", {"mesh": "dp_shard=1", "microbatches": 2}], ids=str)
def test_a_step_is_observed_by_the_clock_of_the_device(plan: Any, device: torch.device, alone: LocalWorkers) -> None:
    ((handed_over, took, length, whats, collectives),) = alone.run(_observed, plan, device)
    assert 0 < length <= took + 1e-3 and handed_over <= took
    assert whats[0] == "begin" and whats[-2:] == ["clip", "optimizer"]
    assert whats.count("forward") == whats.count("backward") == (1 if isinstance(plan, str) else 2)
    assert all(0 <= seconds <= length for seconds in collectives)


@pytest.mark.parametrize(("plan", "rank"), [("dp_shard=8", 3), ("pp=2,tp=2", 3), ("dp_replicate=2", 0)], ids=str)
def test_a_dry_run_takes_as_much_as_rehearsed(plan: str, rank: int, device: torch.device) -> None:
    build = partial(Decoder, blocks=4, width=256)
    run = dry_run(build, words(), plan, rank, loss=itself, hardware="h100", device=device)
    assert run.on_device is not None and run.on_device.step_seconds > 0
    assert run.on_device.peak == pytest.approx(run.memory.peak, rel=0.1)
