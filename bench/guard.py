"""What it costs that ranks compare what they hold alike (``verify`` in the plan).

    python bench/guard.py [--quick]

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
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from overhead import VOCAB, Decoder
from torch import Tensor

import meshwright as mw
from meshwright.spmd.comm import Ledger

MESHES = ({"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}, {"pp": 2})
PERIODS = (1, 10**6, 0)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, of the small size alone")
    quick = parser.parse_args().quick
    every, steps = mw.Plan("tp=2").verify, 6 if quick else 60
    heads = f"{'mesh':<16}{'layers':>6}{'ms':>9}{'compares':>10}{'adds':>8}{f'every {every}':>11}{'between':>9}"
    print(f"{heads}{'CPU ms':>9}{'compares':>10}{f'every {every}':>11}{'between':>9}{'calls':>7}{'bytes':>7}")
    with mw.local_workers(2) as workers:
        for mesh in MESHES:
            for blocks, rows, length in ((4, 4, 128), (8, 8, 256))[: 1 if quick else 2]:
                found = workers.run(partial(measured, mesh, blocks, rows, length, steps), ranks=2, timeout=900)
                wall, cpu = (_slowest([times for times, _ in found], clock) for clock in (0, 1))
                calls, size = found[0][1]
                name = ",".join(f"{axis}={n}" for axis, n in mesh.items())
                never, compares, adds, between = _told(wall)
                text = f"{name:<16}{blocks:>6}{never:>9.1f}{compares:>10.1f}{adds:>8.1%}{adds / every:>11.2%}{between:>9.1%}"
                never, compares, adds, between = _told(cpu)
                text += f"{never:>9.1f}{compares:>10.1f}{adds / every:>11.2%}{between:>9.1%}"
                print(f"{text}{calls:>7}{size:>7}", flush=True)


def _slowest(of_ranks: list[list[list[tuple[float, float]]]], clock: int) -> list[list[float]]:
    """For each job the time of each step, that of its slowest rank."""
    return [[max(t[clock] for t in of) for of in zip(*(times[k] for times in of_ranks), strict=True)] for k in range(3)]


def _told(times: list[list[float]]) -> tuple[float, float, float, float]:
    """Milliseconds of a step without and with a comparison; the share that this adds; what a period adds to other steps."""
    compares, between, never = times
    adds = median((a - b) / b for a, b in zip(compares, never, strict=True))
    return (
        1e3 * median(never),
        1e3 * median(compares),
        adds,
        median((a - b) / b for a, b in zip(between, never, strict=True)),
    )


if __name__ == "__main__":
    main()
