"""The table of the README: a decoder in each layout, against plain PyTorch in one process, in float64.

Loss, every gradient, and every parameter after three steps of an optimizer, of the model of ``make demo`` (a Llama of Hugging
Face, unedited). An error is relative to the largest of what it is compared with; 1e-16 is the last bit of a float64.
"""

from __future__ import annotations

from typing import Any

import demo
import torch

import meshwright as mw

PLANS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}},
    "FSDP": {"mesh": {"dp_shard": 4}},
    "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
    "tensor parallel, 3 ranks for 4 kv heads": {"mesh": {"tp": 3}},
    "tensor and sequence parallel": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "pipeline, interleaved": {"mesh": {"pp": 2}, "schedule": "interleaved", "stages_per_rank": 2, "microbatches": 2},
    "FSDP × tensor parallel": {"mesh": {"dp_shard": 2, "tp": 2}},
    "pipeline × FSDP × tensor parallel": demo.PLAN,
}


def error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def main() -> None:
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    print("| layout | mesh | ranks | loss | worst gradient | worst parameter after 3 steps | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with mw.local_workers(8) as workers:
        for title, plan in PLANS.items():
            report = mw.check(demo.build, demo.rows(ids), plan, workers=workers, dtype=torch.float64)
            worst = [max(report.errors[kind].values()) for kind in ("gradients", "parameters")]
            cells = [report.errors["loss"], *worst]
            ranks = report.plan.mesh.size
            told = " | ".join([title, f"`{report.plan.mesh}`", str(ranks), *map(error, cells)])
            print(f"| {told} | {'✓' if report else '✗'} |", flush=True)


if __name__ == "__main__":
    main()
