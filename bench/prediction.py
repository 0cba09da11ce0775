"""Predicted against measured memory, case by case, on local processes of this machine. Nothing is fitted on what is reported.

`python bench/prediction.py` prints a row for each role of each case: bytes at the peak of a step, as torch's own allocator
counts them (the smallest of the steps that follow the first three, see `prediction.measure`) and as `mw.predict` says, and the
signed error; then the bytes of the first step, which tries how rows combine, too. Memory does not follow from the machine's
load. `--keep` writes docs/bench/prediction.json, from which `bench/raw.py` makes the tables of docs/predict.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import raw
import torch
from small_models import MODELS

import meshwright as mw
from meshwright.amounts import size_text
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.prediction.measure import measured_rank
from meshwright.prediction.memory import memory_of
from meshwright.prediction.rehearsal import Rehearsal, rehearse
from meshwright.prediction.roles import roles_of
from meshwright.runtime.rows.batch import plain
from meshwright.workers.pool import LocalWorkers

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {"mesh": "dp_shard=2"},
    "FSDP, bfloat16, accumulation": {"mesh": "dp_shard=2", "precision": "bfloat16", "microbatches": 2},
    "FSDP, recompute": {"mesh": "dp_shard=2", "recompute": "blocks"},
    "HSDP": {"mesh": "dp_replicate=2,dp_shard=2"},
    "tp": {"mesh": "tp=2"},
    "FSDP × tp": {"mesh": "dp_shard=2,tp=2"},
    "pp": {"mesh": "pp=2", "microbatches": 4},
    "pp, recompute": {"mesh": "pp=2", "microbatches": 4, "recompute": "blocks"},
    "pp × FSDP": {"mesh": "pp=2,dp_shard=2", "microbatches": 4},
    "pp × tp, interleaved": {"mesh": "pp=2,tp=2", "microbatches": 4, "schedule": "interleaved"},
    "branches": {"mesh": "tp=2", "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:2]"}}},
    "branches × FSDP": {"mesh": "dp_shard=2,tp=2", "modules": {"left": {"on": "tp[0:1]"}, "right": {"on": "tp[1:2]"}}},
}
NONE = "–"  # a case that there is not


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--keep", action="store_true", help="write docs/bench/prediction.json")
    chosen = parser.parse_args()
    samples: list[dict[str, Any]] = []
    print("| model | layout | role | measured | predicted | error | first step |\n|---|---|---|---|---|---|---|")
    with mw.local_workers(4) as workers:
        for name in chosen.models:
            for layout in filter(lambda layout: _is_case(name, layout), chosen.layouts):
                for row in _rows(name, layout, workers):
                    samples.append(row)
                    print(f"| {name} | {layout} | {row['role']} | {size_text(row['measured'])} | {size_text(row['predicted'])}"
                          f" | {_error(row):+.2%} | {size_text(row['first step'])} |", flush=True)  # fmt: skip
    errors = [_error(row) for row in samples]
    worst = max(errors, key=abs)
    print(
        f"\n{len(errors)} rows: median of absolute errors {statistics.median(map(abs, errors)):.2%}, worst {worst:+.2%}"
    )
    if chosen.keep:
        print(raw.keep("prediction", samples))


def _is_case(name: str, layout: str) -> bool:
    """A U-Net has no repeated blocks, and one model has parts side by side."""
    if layout.startswith("branches"):
        return name == "two towers"
    return name != "U-Net" or not LAYOUTS[layout].get("recompute")


def _rows(name: str, layout: str, workers: LocalWorkers) -> Iterator[dict[str, Any]]:
    model, plan = MODELS[name], Plan.parse({**LAYOUTS[layout], **MODELS[name].settings})
    batch = plain(model.batch())
    measured = workers.run(
        measured_rank,
        model.build,
        batch,
        plan,
        model.loss,
        torch.optim.AdamW,
        1.0,
        4,
        ranks=plan.mesh.size,
        timeout=600,
    )
    planned = Planned(model.build, plan, batch, model.loss, whole_batch=True)
    for role in roles_of(planned.recipe):
        one = measured[role.rank]
        memory = memory_of(rehearse(Rehearsal(model.build, planned, batch, model.loss), role.rank))
        yield {
            "model": name, "layout": layout, "role": role.name, "measured": one.peak, "predicted": memory.peak,
            "first step": one.peaks[0],
        }  # fmt: skip


def _error(row: dict[str, Any]) -> float:
    return float(row["predicted"] / row["measured"] - 1)


def tables(samples: list[dict[str, Any]]) -> dict[str, raw.Table]:
    """``memory``: signed errors of each role, a row for each layout and a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in samples))
    rows = [["layout", *models]]
    for layout in dict.fromkeys(row["layout"] for row in samples):
        cells = [
            ", ".join(f"{_error(row):+.2%}" for row in samples if (row["model"], row["layout"]) == (model, layout))
            for model in models
        ]
        rows.append([layout, *(cell or NONE for cell in cells)])
    return {"memory": rows}


if __name__ == "__main__":
    main()
