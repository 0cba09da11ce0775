"""The bubble: how long ranks of a pipeline do nothing, measured, against (p−1)/(m+p−1).

    python bench/pipeline.py [--quick]

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


def measure(ranks: int, counts: list[int], rounds: int, sleeping: bool) -> dict[tuple[str, int], tuple[float, ...]]:
    """Runs on every rank: (schedule, microbatches) → (idle share, seconds of a step, messages, bytes) on rank 0."""
    jobs: dict[tuple[str, int], Any] = {}
    for m in counts:
        x = torch.randn(m, 8) if sleeping else torch.randn(m * ROWS, WIDTH)
        for name in NAPPING if sleeping else SCHEDULES:
            plan = {"mesh": {"pp": ranks}, "schedule": name, "microbatches": m, "rows": "split"}
            nap = NAP / (8 // ranks)
            jobs[name, m] = mw.parallelize(lambda nap=nap: Stack(nap if sleeping else 0.0), plan, batch=(x,)), x
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {key: [] for key in jobs}
    for _ in range(rounds + 1):
        for key, (job, x) in jobs.items():
            sent = job.pipeline.traffic.sends, job.pipeline.traffic.bytes
            dist.barrier()
            job.step((x,))
            spans = [(a, start, stop) for a, start, stop in job.pipeline.spans]
            first, last = (torch.tensor(t, dtype=torch.float64) for t in (spans[0][1], spans[-1][2]))
            dist.all_reduce(first, dist.ReduceOp.MIN)
            dist.all_reduce(last, dist.ReduceOp.MAX)
            length = (last - first).item()
            busy = torch.tensor(sum(b - a for action, a, b in spans if action.kind in COMPUTE), dtype=torch.float64)
            dist.all_reduce(busy)
            moved = torch.tensor([job.pipeline.traffic.sends - sent[0], job.pipeline.traffic.bytes - sent[1]])
            dist.all_reduce(moved)
            found[key].append((1 - busy.item() / ranks / length, length, *moved.tolist()))
    return {key: tuple(median(column) for column in zip(*rows[1:], strict=True)) for key, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    quick = parser.parse_args().quick
    for ranks, sleeping in ((2, False), (4, True)):
        counts = [ranks, 2 * ranks] if quick else [ranks, 2 * ranks, 4 * ranks]
        print(f"\n{'sleeping' if sleeping else 'computing'}, pp={ranks}")
        print("schedule      m   idle  schedule  (p−1)/(m+p−1)   step ms  messages   KiB sent")
        with mw.local_workers(ranks) as workers:
            rows = workers.run(measure, ranks, counts, 2 if quick else 7, sleeping, timeout=900)[0]
        for (name, m), (share, seconds, messages, moved) in rows.items():
            stages = 2 * ranks if name == "interleaved" else ranks
            planned = idle(timeline(make_schedule(name, ranks, stages, m)))
            formula = f"{(ranks - 1) / (m + ranks - 1):.3f}" if name in ("gpipe", "1f1b") else "    –"
            print(f"{name:12} {m:2}  {share:.3f}     {planned:.3f}          {formula:>5}  {1e3 * seconds:8.1f}"
                  f"  {messages:8.0f}  {moved / 1024:9.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
