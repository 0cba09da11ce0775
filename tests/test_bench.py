"""Benchmarks keep every sample, and the tables of docs/bench.md are those of the samples. None of them runs here."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import concurrent_branches
import pytest
import raw
from concurrent_branches import ONE, PLANNED, TENSOR

TIMES = {
    PLANNED: [[0.1, 0.2]] * 3,
    TENSOR: [[0.2, 0.2]] * 3,
    "one process, 1 thread": [[0.16, 0.16]] * 3,
}


def planned_and_run(mesh: str, predicted: float, measured: float) -> dict[str, Any]:
    turn = {"seconds": [measured] * 2, "computed": [2 * measured] * 2, "load": 2.0}
    return {"plan": {"mesh": mesh}, "predicted": predicted, "turns": [turn]}


SAMPLES: dict[str, Any] = {
    "overhead": {
        "meshes": {"tp=2": {"meshwright": [0.2, 0.3, 0.4], "by hand": [0.1, 0.3, 0.2], "collectives": ["a", "b"]}},
        "calls": {"add": [1.0, 2.0, 3.04]},
    },
    "handwritten": [{"times": {"by hand": [[0.1] * 3, [0.2] * 3], "recorded": [[0.11] * 3, [0.3] * 3]}}],
    "ratios": [
        {
            "case": {
                "against": "ddp",
                "layout": "dp_replicate=2",
                "shape": "vit",
                "blocks": 4,
                "width": 64,
                "rows": 4,
                "tokens": 16,
                "microbatches": 1,
            },
            "times": [[[0.2, 0.2, 0.3], [0.4] * 3], [[0.1, 0.1, 0.1], [0.2] * 3]],
            "collectives": ["a", ""],
        },
    ],
    "startup": {"import": {"what": "import", "aim": 0.2, "runs": [[3.0, 4.0], [2.0, 5.0]], "beyond": [[1.75, 1.0]]}},
    "observe": {
        "tp=2": {
            "not observed": {"wall": [0.1, 0.2], "cpu": [0.1, 0.1]},
            "observed": {"wall": [0.2, 0.2], "cpu": [0.1, 0.2]},
        }
    },
    "pipeline": [
        {
            "kind": "computing",
            "ranks": 2,
            "schedule": "gpipe",
            "microbatches": 2,
            "steps": [[0.25, 0.1, 4, 2048], [0.5, 0.2, 4, 2048], [0.75, 0.3, 4, 2048]],
        }
    ],
    "checkpoint": {
        "bytes": 4_000_000,
        "share": 2_000_000,
        "ways": {
            "save: ours": [[[1.0, 0], [2.0, 3_000_000]], [[3.0, 0], [1.0, 0]]],
            "save: ours, async: training waits": [[[0.1, 0], [0.1, 0]], [[0.1, 0], [0.1, 0]]],
        },
    },
    "kill_trials": [
        {"seed": 0, "layout": "tp=2", "error": None, "rank": 1, "asynchronous": True, "killed": "writing", "after": "a"},
        {"seed": 1, "layout": "tp=2", "error": "other losses"},
    ],
    "guard": [
        {
            "mesh": "tp=2",
            "blocks": 4,
            "comparison": [23, 208],
            "ranks": [
                [[[0.2, 0.1]] * 2, [[0.1, 0.1]] * 2, [[0.1, 0.1]] * 2],
                [[[0.1, 0.3]] * 2, [[0.1, 0.1]] * 2, [[0.1, 0.2]] * 2],
            ],
        }
    ],
    "prediction": [
        {"model": "decoder", "layout": "pp", "role": "stage 0", "measured": 100, "predicted": 101, "first step": 120},
        {"model": "decoder", "layout": "pp", "role": "stage 1", "measured": 200, "predicted": 198, "first step": 220},
        {"model": "vision", "layout": "tp", "role": "every rank", "measured": 10, "predicted": 10, "first step": 10},
    ],
    "planner": {
        "profile": "",
        "cores": 2,
        "models": {
            "decoder": {
                "tp=2": planned_and_run("tp=2", 0.11, 0.1),
                "pp=2": planned_and_run("pp=2", 0.28, 0.2),
                "found by find_plans for 2": planned_and_run("tp=2", 0.11, 0.1),
            }
        },
    },
    "concurrent_branches": {
        "rates": {
            "flops": 93e9, "bandwidth": 39e9, "link": 1.2e9, "latency": 116e-6, "function": 5.7e-6, "job_call": 29e-6,
            "job_step": 5.7e-3,
        },
        "balanced": [{"depth": 8, "tokens": 128, "times": TIMES, "moved": {PLANNED: [2, 2048], TENSOR: [32, 4096]}}],
        "sweep": [
            {
                "rows": 1,
                "blocks": [1, 2],
                "times": {ONE: TIMES[PLANNED], PLANNED: TIMES[TENSOR], TENSOR: TIMES[PLANNED]},
                "predicted": {
                    side: {"fastest": fastest, "seconds": {ONE: 0.1, PLANNED: 0.2, TENSOR: 0.3}}
                    for side, fastest in ((concurrent_branches.WITH, ONE), (concurrent_branches.WITHOUT, PLANNED))
                },
            }
        ],
        "bytes": {"depth": 2, "branches": 1000, "fsdp": 2000, "branches_predicted": 1000, "fsdp_predicted": 2000},
        "tracks": [{"depth": 4, "sizes": [16, 32, 64, 32], "times": TIMES, "moved": {PLANNED: [8, 1], TENSOR: [52, 1]}}],
    },
}  # fmt: skip
ROWS = {
    "overhead/steps": "| `tp=2` | 300 ms | 200 ms | 1.50 | 1.00 to 2.00 |",
    "overhead/collectives": "| `tp=2` | a | b |",
    "overhead/calls": "| `add` | 1.0 | 2.0 | 3.0 |",
    "handwritten/steps": "| 0 | recorded | 110.0 | 300.0 | 1.10 | 1.10 | 1.50 |",
    "ratios/all": "| vit, 4 × 64, 4 × 16 | `dp_replicate=2` | ddp | 2.00 | 2.00 | 2.00 | 2.00 to 3.00 | 200.0 | a | none |",
    "startup/waits": "| import | 0.2 | 0.2 | 4.0 |",
    "observe/steps": "| `tp=2` | 150.0 | 200.0 | 1.50 (0.75 to 2.25) | 100.0 | 150.0 |",
    "pipeline/bubble": "| computing, gpipe | 2 | 2 | 0.500 | 0.333 | 0.333 | 200.0 | 4 | 2 |",
    "checkpoint/ways": "| save: ours | 2.50 | 2 | 3 |",
    "kill_trials/trials": "| `tp=2` | 2 | 1 | 0 | 1 | 0 | 0 | 0 |",
    "guard/steps": "| `tp=2` | 4 | 100.0 | 200.0 | 100.0% | 1.00% | 0.0% | 200.0 | 300.0 | 0.50% | 23 | 208 |",
    "prediction/memory": "| pp | +1.00%, -1.00% | – |",
    "planner/summary": "| decoder | 3 | 10.0% | +20.0% | 1.00 | 10.0% | 1.00 | 2: 0.0%, any: 0.0% | 2.0 |",
    "concurrent_branches/rates": "| 93 | 39.0 | 1.20 | 232 | 5.7 | 29 | 5.7 |",
    "concurrent_branches/balanced": f"| 128 | {TENSOR} | 200.0 | 200.0 | 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) | 32 | 4 |",
    "concurrent_branches/sweep": f"| 1 | 1:2 | 100.0, 100.0 | – | 100.0, 300.0 | 200.0, 200.0 | {ONE} | {ONE} |",
    "concurrent_branches/scores": f"| {concurrent_branches.WITH} | 1 of 1 | 1 of 1 | 1 of 1 | 1 of 1 |",
    "concurrent_branches/bytes": "| FSDP of the model, `dp_shard=4` | 2,000 | 2,000 |",
    "concurrent_branches/tracks": (
        "| 16 sequences of 32 | 160.0 ms | 100.0 ms | 200.0 ms | 8, 52 | 0.80 (0.80 to 0.80) | 0.40 (0.40 to 0.40) |"
    ),
}


def page(place: str, inside: str = "an old table\n") -> str:
    return f"Before.\n\n<!-- table: {place} -->\n{inside}<!-- end of table -->\n\nAfter.\n"


@pytest.mark.parametrize("place", ROWS)
def test_a_table_is_made_of_the_samples_that_were_kept(place: str, tmp_path: Path) -> None:
    name = place.partition("/")[0]
    file = raw.keep(name, SAMPLES[name], folder=tmp_path)
    about = json.loads(file.read_text())
    assert (
        about["samples"] == SAMPLES[name]
        and about["versions"]["torch"]
        and about["command"].startswith("python bench/")
    )
    made = raw.filled(page(place), tmp_path)
    assert ROWS[place] in made.splitlines() and "an old table" not in made and f"(bench/{name}.json)" in made
    assert made.startswith("Before.") and made.endswith("After.\n")
    assert raw.filled(made, tmp_path) == made


def test_a_table_without_samples_stays(tmp_path: Path) -> None:
    assert raw.filled(page("overhead/steps"), tmp_path) == page("overhead/steps")


def test_the_pages_have_the_tables_of_their_files_and_a_place_for_each() -> None:
    texts = [page.read_text("utf-8") for page in raw.PAGES]
    assert [raw.filled(text) for text in texts] == texts, "python bench/raw.py"
    places = [
        (re.sub("-(alone|large)$", "", place["name"]), place["table"])
        for text in texts
        for place in raw.PLACE.finditer(text)
    ]
    assert {name for name, _ in places} == set(SAMPLES)
    assert all(table in importlib.import_module(name).tables(SAMPLES[name]) for name, table in places)
