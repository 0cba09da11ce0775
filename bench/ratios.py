"""One table of ratios: a step of Meshwright against the same model laid out by other means, in the same processes, in turns.

    python bench/ratios.py [--large] [--ranks 1,2,4,8] [--shapes llama,gpt2,vit,moe] [--rounds 20] [--grow] [--keep]

against      plain PyTorch in one process; DDP; fully_shard by block; Accelerate (FSDP2), if it is installed;
             parallelize_module; DTensors all through; torch.distributed.pipelining; Hugging Face's own tp_plan, of a
             small Llama, if transformers and accelerate are installed. Code by hand with explicit collectives is in
             handwritten.py
shapes       a decoder with gated MLPs (Llama's), one with biases and LayerNorm (GPT-2's), an encoder of patches (ViT's), and
             a decoder with four experts, of which each token takes two (MoE)
sizes        small: the host is the limit; ``--large``: the device is
``--grow``   how the host's own time grows with blocks, ranks and microbatches

A step is forward and backward. Told are ratios of CPU time of rank 0 (of medians, and of the fastest tenth), and of wall
time, with the quartiles of pairs; and what a step puts into collectives, as torch's dispatcher sees both sides. A way that
does not run says so. Both sides must have the same first loss.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import ratio_sides
import raw
import torch
import torch.distributed as dist
from overhead import Collectives
from ratio_models import batch_of, built

import meshwright as mw


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        against: a name of ``ratio_sides.SIDES``.
        layout: the mesh, as in a plan.
    """

    against: str
    layout: str
    shape: str = "llama"
    blocks: int = 4
    width: int = 64
    rows: int = 4
    tokens: int = 16
    microbatches: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """Axis → size."""
        return {axis: int(size) for axis, size in (one.split("=") for one in self.layout.split(","))}

    @property
    def ranks(self) -> int:
        return mw.Mesh.parse(self.mesh).size

    def __str__(self) -> str:
        pieces = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self.shape}, {self.blocks} × {self.width}, {self.rows} × {self.tokens}{pieces}"


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """The rows that are asked for."""
    size = {"width": 512, "rows": 8, "tokens": 128} if given.large else {}
    for ranks in given.ranks:
        for shape in given.shapes:
            case = partial(Case, shape=shape, **size)
            if ranks == 1:
                yield case("plain", "tp=1")
                continue
            yield case("ddp", f"dp_replicate={ranks}")
            yield case("fully_shard", f"dp_shard={ranks}")
            yield case("accelerate", f"dp_shard={ranks}")
            if shape in ratio_sides.CUT and ranks <= ratio_sides.HEADS:
                yield case("parallelize_module", f"tp={ranks}")
                yield case("dtensor", f"tp={ranks}")
            if shape in ratio_sides.CUT and ranks <= 4:
                yield case("pipelining", f"pp={ranks}", microbatches=ranks)
        if ranks == 2 and "llama" in given.shapes:
            yield Case("tp_plan", "tp=2", shape="hf_llama", **size)
    if given.grow:
        for blocks in (2, 8, 16):
            yield Case("plain", "tp=1", blocks=blocks)
            yield Case("parallelize_module", "tp=2", blocks=blocks)
        for microbatches in (2, 4, 8):
            yield Case("pipelining", "pp=2", rows=8, microbatches=microbatches)


# --- on every rank ----------------------------------------------------------------------------------------------------


def ours(case: Case, batch: dict[str, torch.Tensor]) -> Callable[[], float]:
    """A step of a job."""
    plan = {"mesh": case.mesh, "microbatches": case.microbatches, "rows": "split", "verify": 0}
    job = mw.parallelize(partial(built, case), plan, batch=batch)
    mine = ratio_sides.rows_of_rank(batch, case)

    def step() -> float:
        job.module.zero_grad()
        return float(job.step(mine))

    return step


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """What both sides took: seconds of CPU time and of wall time, first losses, collectives of a step."""
    batch = batch_of(case)
    sides = [ours(case, batch), ratio_sides.SIDES[case.against](case, batch)]
    losses = [side() for side in sides]
    if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
        raise ValueError(f"first losses differ: {losses}")
    for side in sides * 3:  # recorded twice, then replayed
        side()
    counted = []
    for side in sides:
        with Collectives() as moved:
            side()
        counted.append(str(moved))
    times: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    for _ in range(rounds):
        for side, (cpu, wall) in zip(sides, times, strict=True):
            if dist.is_initialized():
                dist.barrier()
            began = time.process_time(), time.perf_counter()
            side()
            cpu.append(time.process_time() - began[0])
            wall.append(time.perf_counter() - began[1])
    return {"times": times, "losses": losses, "collectives": counted}


# --- the table --------------------------------------------------------------------------------------------------------

TITLES = [
    "model", "layout", "against", "CPU", "fastest tenth", "wall", "pairs of CPU, quartiles", "ms, CPU", "collectives",
    "of the other",
]  # fmt: skip


def row(sample: dict[str, Any]) -> list[str]:
    """A line of the table."""
    case = Case(**sample["case"])
    begins = [str(case), f"`{case.layout}`", case.against]
    if "error" in sample:
        return [*begins, *["–"] * 5, sample["error"], ""]
    (cpu, wall), (cpu_other, wall_other) = sample["times"]
    low, _, high = quantiles([a / b for a, b in zip(cpu, cpu_other, strict=True)], n=4)
    ratios = [median(cpu) / median(cpu_other), _fast(cpu) / _fast(cpu_other), median(wall) / median(wall_other)]
    moved = [text or "none" for text in sample["collectives"]]
    return [*begins, *(f"{r:.2f}" for r in ratios), f"{low:.2f} to {high:.2f}", f"{1e3 * median(cpu):.1f}", *moved]


def tables(samples: list[dict[str, Any]]) -> dict[str, raw.Table]:
    """``all``: a row for each case that ran; ``errors``: a row for each way that did not, with its layouts and its error."""
    failed: dict[tuple[str, str], list[str]] = {}
    for sample in samples:
        if "error" in sample:
            case = Case(**sample["case"])
            error = re.sub(r"rank \d+ of \d+ failed: ", "", sample["error"])
            failed.setdefault((case.against, error), []).append(f"{case.shape} `{case.layout}`")
    return {
        "all": [TITLES, *(row(sample) for sample in samples if "error" not in sample)],
        "errors": [
            ["against", "model and layout", "error"],
            *([against, ", ".join(of), error] for (against, error), of in failed.items()),
        ],
    }


def _fast(seconds: list[float]) -> float:
    """The tenth of the steps that took least: what others on the machine have taken least part in."""
    return sorted(seconds)[len(seconds) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda kind: lambda text: [kind(one) for one in text.split(",")]  # noqa: E731
    parser.add_argument("--ranks", type=listed(int), default=[1, 2])
    parser.add_argument("--shapes", type=listed(str), default=["llama", "gpt2", "vit", "moe"])
    parser.add_argument("--against", type=listed(str), help="these alone")
    parser.add_argument("--rounds", type=int, default=20)
    for name, what in (
        ("large", "the device is the limit"),
        ("grow", "how cost grows"),
        ("keep", "write the samples to docs/bench"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    given = parser.parse_args()
    every = [case for case in cases(given) if given.against is None or case.against in given.against]
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, gloo on CPU, 1 thread a process"
    )
    print(f"{given.rounds} steps of each, in turns\n\n" + " | ".join(TITLES))
    samples: list[dict[str, Any]] = []
    with mw.local_workers(max(case.ranks for case in every)) as workers:
        for case in every:
            sample: dict[str, Any] = {"case": asdict(case)}
            try:
                sample |= workers.run(measured, case, given.rounds, ranks=case.ranks, timeout=900)[0]
            except Exception as error:  # a way that does not run is a row, too
                sample["error"] = ratio_sides.in_short(error)
            samples.append(sample)
            print(" | ".join(row(sample)), flush=True)
    if given.keep:
        print(raw.keep("ratios-large" if given.large else "ratios", samples, script="ratios"))


if __name__ == "__main__":
    main()
