"""What it costs to observe a step: the same step with ``job.observe`` around it and without, in turns.

    python bench/observe.py [--rounds 30]

The Llama-like model of overhead.py over two local ranks, gloo on CPU: forward, backward and AdamW. An observed step has a
barrier before it, hooks and moments within it, and a gather of what each rank has seen after it; all of that counts. The
slowest rank's wall time of each step; CPU seconds are those of rank 0's process.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles
from typing import Any

import raw
import torch
import torch.distributed as dist
from overhead import LENGTH, VOCAB, Decoder

import meshwright as mw
from meshwright.runtime.rows.microbatches import rows_of_rank

PLANS: dict[str, dict[str, Any]] = {
    "tp=2": {"mesh": "tp=2"},
    "dp_shard=2": {"mesh": "dp_shard=2"},
    "pp=2, 4 microbatches": {"mesh": "pp=2", "microbatches": 4},
}
SIDES = ("not observed", "observed")


def measured(plan: dict[str, Any], blocks: int, rows: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Runs on every rank: side → wall seconds and CPU seconds of each step."""
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    job = mw.parallelize(lambda: Decoder(blocks), {**plan, "verify": 0}, batch=batch)
    optimizer, mine = torch.optim.AdamW(job.parameters(), fused=True), rows_of_rank(batch, job.recipe, dist.get_rank())

    def step() -> None:
        job.step(mine)
        optimizer.step()
        optimizer.zero_grad()

    def observed() -> None:
        with job.observe(optimizer):
            step()

    for _ in range(4):  # how rows combine is tried, programs are recorded
        step()
    observed()
    times: dict[str, dict[str, list[float]]] = {side: {"wall": [], "cpu": []} for side in SIDES}
    for _ in range(rounds):
        for side, run in zip(SIDES, (step, observed), strict=True):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            times[side]["cpu"].append(time.process_time() - cpu)
            slowest = torch.tensor(time.perf_counter() - wall)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[side]["wall"].append(float(slowest))
    return times


def tables(samples: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, raw.Table]:
    """``steps``: medians of both sides, and the quartiles of the ratios of pairs."""
    rows = [["plan", "a step, ms", "observed, ms", "ratio of pairs, quartiles", "CPU of rank 0, ms", "observed, ms"]]
    for plan, times in samples.items():
        plain, observed = (times[side] for side in SIDES)
        low, middle, high = quantiles([b / a for a, b in zip(plain["wall"], observed["wall"], strict=True)], n=4)
        rows.append([
            f"`{plan}`", _ms(plain["wall"]), _ms(observed["wall"]), f"{middle:.2f} ({low:.2f} to {high:.2f})",
            _ms(plain["cpu"]), _ms(observed["cpu"]),
        ])  # fmt: skip
    return {"steps": rows}


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("blocks", 4), ("rows", 8), ("rounds", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--keep", action="store_true", help="write docs/bench/observe.json")
    given = parser.parse_args()
    with mw.local_workers(2) as workers:
        samples = {
            name: workers.run(measured, plan, given.blocks, given.rows, given.rounds, timeout=600)[0]
            for name, plan in PLANS.items()
        }
    raw.show(tables(samples)["steps"])
    if given.keep:
        print(raw.keep("observe", samples))


if __name__ == "__main__":
    main()
