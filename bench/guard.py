"""What it costs that ranks compare what they hold alike (``verify`` in the plan).

    python bench/guard.py [--quick] [--keep]

Three jobs of the same small Llama-like model take a step each in turn, so that all meet the same machine: with
``verify: 1``, with a period that is not reached, and with ``0``. A step is forward, backward and AdamW; the slowest rank's
time counts; medians are over steps. Printed: a step without and with a comparison; the share that a comparison adds, and
that share with the default period; what a job with a period adds to the steps between; calls and bytes of a comparison, as
rank 0 puts them in. The same by the clock of the CPU, which other programs on the machine disturb less. Processes are local,
with gloo.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import raw
import torch
import torch.distributed as dist
from overhead import VOCAB, Decoder
from torch import Tensor

import meshwright as mw
from meshwright.spmd.comm import Ledger

MESHES = ({"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}, {"pp": 2})
PERIODS = (1, 10**6, 0)
EVERY = mw.Plan("tp=2").verify
SIZES = ((4, 4, 128), (8, 8, 256))  # blocks, rows, tokens of a row


def measured(
    mesh: dict[str, int], blocks: int, rows: int, length: int, steps: int
) -> tuple[list[list[tuple[float, float]]], list[int]]:
    """Seconds of each step of each job on this rank, and those of the CPU; calls, then bytes, of a comparison."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(0, VOCAB, (rows, length), generator=draw) for name in ("ids", "labels")}
    jobs = [
        mw.parallelize(lambda: Decoder(blocks), {"mesh": mesh, "rows": "split", "verify": verify}, batch=batch)
        for verify in PERIODS
    ]
    stepping = [_stepping(job, batch) for job in jobs]
    for step in stepping:
        step()
    cost = jobs[0].guard.cost = Ledger()
    stepping[0]()
    told = [cost.calls["all_gather"], cost.bytes["all_gather"]]
    times: list[list[tuple[float, float]]] = [[] for _ in PERIODS]
    for i in range(steps):
        for which in (0, 1, 2) if i % 2 else (2, 1, 0):
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            stepping[which]()
            times[which].append((time.perf_counter() - begin, time.process_time() - begin_cpu))
    return times, told


def _stepping(job: mw.Job, batch: dict[str, Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-4)
    job.guard.optimizers = optimizer
    data = job.recipe.mesh
    mine = {name: t.chunk(data.data_size)[data.data_index(job.rank)] for name, t in batch.items()}

    def step() -> None:
        job.step(mine)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tables(samples: list[dict[str, Any]]) -> dict[str, raw.Table]:
    """``steps``: medians of the slowest rank, by the clock on the wall and by that of the CPU."""
    titles = ["mesh", "blocks", "ms", "ms that compares", "more", "more, every {every}", "more between"]
    cpu = ["CPU ms", "CPU ms that compares", "more CPU, every {every}"]
    rows = [[title.format(every=EVERY) for title in [*titles, *cpu, "all-gathers", "bytes"]]]
    for sample in samples:
        wall, busy = (_summary(_slowest(sample["ranks"], clock)) for clock in (0, 1))
        rows.append([
            f"`{sample['mesh']}`", f"{sample['blocks']}",
            f"{wall.never:.1f}", f"{wall.compares:.1f}", f"{wall.adds:.1%}", f"{wall.adds / EVERY:.2%}", f"{wall.between:.1%}",
            f"{busy.never:.1f}", f"{busy.compares:.1f}", f"{busy.adds / EVERY:.2%}",
            *(f"{count}" for count in sample["comparison"]),
        ])  # fmt: skip
    return {"steps": rows}


def _slowest(ranks: list[list[list[list[float]]]], clock: int) -> list[list[float]]:
    """For each job the seconds of each step, those of its slowest rank."""
    return [
        [max(times[clock] for times in step) for step in zip(*(jobs[which] for jobs in ranks), strict=True)]
        for which in range(len(PERIODS))
    ]


@dataclass(frozen=True)
class Summary:
    """Medians of steps.

    Attributes:
        never, compares: milliseconds of a step without and with a comparison.
        adds: the share that a comparison adds to a step.
        between: the share that a job with a period adds to a step that does not compare.
    """

    never: float
    compares: float
    adds: float
    between: float


def _summary(times: list[list[float]]) -> Summary:
    compares, between, never = times
    more, some = (median((a - b) / b for a, b in zip(side, never, strict=True)) for side in (compares, between))
    return Summary(1e3 * median(never), 1e3 * median(compares), more, some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps, of the small size alone")
    parser.add_argument("--keep", action="store_true", help="write docs/bench/guard.json")
    options = parser.parse_args()
    samples, steps = [], 6 if options.quick else 60
    with mw.local_workers(2) as workers:
        for mesh in MESHES:
            for blocks, rows, length in SIZES[: 1 if options.quick else 2]:
                ranks = workers.run(partial(measured, mesh, blocks, rows, length, steps), ranks=2, timeout=900)
                name = ",".join(f"{axis}={size}" for axis, size in mesh.items())
                times, comparison = [times for times, _ in ranks], ranks[0][1]
                samples.append({"mesh": name, "blocks": blocks, "comparison": comparison, "ranks": times})
                print(f"{name}, {blocks} blocks: done", flush=True)
    raw.show(tables(samples)["steps"])
    if options.keep:
        print(raw.keep("guard", samples))


if __name__ == "__main__":
    main()
