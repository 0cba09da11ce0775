"""Benchmarks keep every sample, and the tables of docs/bench.md are those of the samples. None of them runs here."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import raw

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
}
ROWS = {
    "overhead/steps": "| `tp=2` | 300 ms | 200 ms | 1.50 | 1.00 to 2.00 |",
    "overhead/collectives": "| `tp=2` | a | b |",
    "overhead/calls": "| `add` | 1.0 | 2.0 | 3.0 |",
    "handwritten/steps": "| 0 | recorded | 110.0 | 300.0 | 1.10 | 1.10 | 1.50 |",
    "ratios/all": "| vit, 4 × 64, 4 × 16 | `dp_replicate=2` | ddp | 2.00 | 2.00 | 2.00 | 2.00 to 3.00 | 200.0 | a | none |",
    "startup/waits": "| import | 0.2 | 0.2 | 4.0 |",
    "observe/steps": "| `tp=2` | 150.0 | 200.0 | 1.50 (0.75 to 2.25) | 100.0 | 150.0 |",
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


def test_the_page_has_the_tables_of_its_files_and_a_place_for_each() -> None:
    text = raw.PAGE.read_text("utf-8")
    assert raw.filled(text) == text, "python bench/raw.py"
    places = [(re.sub("-(alone|large)$", "", place["name"]), place["table"]) for place in raw.PLACE.finditer(text)]
    assert {name for name, _ in places} == set(SAMPLES)
    assert all(table in importlib.import_module(name).tables(SAMPLES[name]) for name, table in places)
