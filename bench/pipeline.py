"""The bubble: how long ranks of a pipeline do nothing, measured, against (p−1)/(m+p−1).

    python bench/pipeline.py [--quick] [--keep]

Two ways. *Computing*: a stack of linear layers on 2 ranks, one core each. *Sleeping*: blocks that sleep in forward and twice
as long in backward, on 4 ranks: that measures the schedule and the runtime, whatever number of cores there is. Idle is the
share of a step in which a rank runs no forward and no backward, averaged over ranks; a step is from its first action on any
rank to its last. Schedules and numbers of microbatches alternate within each round; medians over rounds.
Bytes and messages are those of a step, counted. Processes are local, with gloo on CPU.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import raw
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.schedule import COMPUTE, idle, make_schedule, timeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
NAPPING = SCHEDULES[:3]  # a nap has no half that belongs to weights
NAP = 0.02  # seconds, of a microbatch's forward in one stage
WIDTH, ROWS = 768, 768


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        if not x.is_meta:
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return g, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.inner = seconds, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return _Nap.apply(self.inner(x), self.seconds)


class Worker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Eight blocks, all alike."""

    def __init__(self, sleeping: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Sleeper(sleeping) if sleeping else Worker()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def measure(ranks: int, counts: list[int], rounds: int, sleeping: bool) -> list[dict[str, Any]]:
    """Runs on every rank: a sample for each schedule and number of microbatches, with the steps that ``_step`` measured."""
    jobs: dict[tuple[str, int], Any] = {}
    for microbatches in counts:
        shape = (microbatches, 8) if sleeping else (microbatches * ROWS, WIDTH)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # the same on all ranks
        for schedule in NAPPING if sleeping else SCHEDULES:
            plan = {"mesh": {"pp": ranks}, "schedule": schedule, "microbatches": microbatches, "rows": "split"}
            nap = NAP / (8 // ranks)
            job = mw.parallelize(lambda nap=nap: Stack(nap if sleeping else 0.0), plan, batch=(x,))
            jobs[schedule, microbatches] = job, x
    steps: dict[tuple[str, int], list[list[float]]] = {key: [] for key in jobs}
    for _ in range(rounds + 1):
        for key, (job, x) in jobs.items():
            steps[key].append(_step(job, x, ranks))
    kind = "sleeping" if sleeping else "computing"
    return [
        {"kind": kind, "ranks": ranks, "schedule": schedule, "microbatches": microbatches, "steps": measured[1:]}
        for (schedule, microbatches), measured in steps.items()
    ]


def _step(job: Any, x: Tensor, ranks: int) -> list[float]:
    """The idle share of a step, its seconds, the messages and the bytes that were sent; the same on every rank."""
    sent = job.pipeline.traffic.sends, job.pipeline.traffic.bytes
    dist.barrier()
    job.step((x,))
    spans = [(action, start, stop) for action, start, stop in job.pipeline.spans]
    first, last = (torch.tensor(time, dtype=torch.float64) for time in (spans[0][1], spans[-1][2]))
    dist.all_reduce(first, dist.ReduceOp.MIN)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    seconds = (last - first).item()
    busy = torch.tensor(
        sum(stop - start for action, start, stop in spans if action.kind in COMPUTE), dtype=torch.float64
    )
    dist.all_reduce(busy)
    traffic = torch.tensor([job.pipeline.traffic.sends - sent[0], job.pipeline.traffic.bytes - sent[1]])
    dist.all_reduce(traffic)
    return [1 - busy.item() / ranks / seconds, seconds, *traffic.tolist()]


def tables(samples: list[dict[str, Any]]) -> dict[str, raw.Table]:
    """``bubble``: medians over the steps of each schedule, beside what the schedule as data and the formula say."""
    rows = [
        ["", "stages", "microbatches", "measured", "schedule", "(p−1)/(m+p−1)", "a step, ms", "messages", "KiB sent"]
    ]
    for sample in samples:
        ranks, schedule, microbatches = sample["ranks"], sample["schedule"], sample["microbatches"]
        share, seconds, messages, size = (median(column) for column in zip(*sample["steps"], strict=True))
        stages = 2 * ranks if schedule == "interleaved" else ranks
        planned = idle(timeline(make_schedule(schedule, ranks, stages, microbatches)))
        formula = (ranks - 1) / (microbatches + ranks - 1)
        rows.append([
            f"{sample['kind']}, {schedule}", f"{stages}", f"{microbatches}", f"{share:.3f}", f"{planned:.3f}",
            f"{formula:.3f}" if schedule in ("gpipe", "1f1b") else "–",
            f"{1e3 * seconds:.1f}", f"{messages:.0f}", f"{size / 1024:.0f}",
        ])  # fmt: skip
    return {"bubble": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--keep", action="store_true", help="write docs/bench/pipeline.json")
    options = parser.parse_args()
    samples = []
    for ranks, sleeping in ((2, False), (4, True)):
        counts = [ranks, 2 * ranks] if options.quick else [ranks, 2 * ranks, 4 * ranks]
        with mw.local_workers(ranks) as workers:
            samples += workers.run(measure, ranks, counts, 2 if options.quick else 7, sleeping, timeout=900)[0]
        print(f"{samples[-1]['kind']}, {ranks} ranks: done", flush=True)
    raw.show(tables(samples)["bubble"])
    if options.keep:
        print(raw.keep("pipeline", samples))


if __name__ == "__main__":
    main()
