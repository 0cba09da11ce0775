"""Raw results beside the pages: each benchmark keeps what it measured as JSON, and the tables of pages are made of that.

    bench/overhead.py ──► docs/bench/overhead.json     commit, date, command, versions, machine, samples
                                    │ overhead.tables(samples)
    python bench/raw.py             ▼
    docs/bench.md, predict.md       <!-- table: overhead/steps --> … <!-- end of table -->

A benchmark that keeps its samples has a function ``tables``: from samples as JSON has them to tables by name, each a list of
rows of texts, the titles first. What a page has between the two comments is replaced; a table of which there are no
samples stays.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES, FOLDER = tuple(ROOT / "docs" / name for name in ("bench.md", "predict.md")), ROOT / "docs" / "bench"
PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+)/(?P<table>[\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_PACKAGES = ("meshwright", "torch", "numpy")

Table = list[list[str]]


def keep(name: str, samples: Any, *, script: str | None = None, folder: Path = FOLDER) -> Path:
    """Writes the samples of a benchmark, with what is to be known of them. Gives the file.

    Args:
        name: of the file.
        samples: as JSON can have them; numbers that were measured, not what follows from them.
        script: the module whose ``tables`` reads them; ``name``, if none is named.
    """
    script = script or name
    about = {
        "script": script,
        "commit": _git("rev-parse", "--short", "HEAD") + ("-changed" if _git("status", "--porcelain", "src", "bench") else ""),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", f"bench/{script}.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{one: version(one) for one in _PACKAGES}},
        "machine": _machine(),
        "samples": samples,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return file


def filled(page: str, folder: Path = FOLDER) -> str:
    """A page with its tables as the files of a folder have them.

    Raises:
        KeyError: a benchmark makes no table of that name.
    """

    def of_place(place: re.Match[str]) -> str:
        file = folder / f"{place['name']}.json"
        if not file.is_file():
            return place[0]
        about = json.loads(file.read_text(encoding="utf-8"))
        tables = importlib.import_module(about["script"]).tables(about["samples"])
        return f"{place[1]}{_markdown(tables[place['table']])}\n{_source(about, file)}\n\n{place[4]}"

    return PLACE.sub(of_place, page)


def show(table: Table) -> None:
    """Prints a table, its columns aligned."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for first, *others in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([f"{first:<{widths[0]}}", *cells]))


def _markdown(table: Table) -> str:
    titles, *rows = table
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _source(about: Mapping[str, Any], file: Path) -> str:
    versions = ", ".join(f"{name} {one}" for name, one in about["versions"].items() if name in ("torch", "python"))
    return (
        f"`{about['command']}`, {about['date']}, commit {about['commit']}, {about['machine']}, {versions}; every sample: "
        f"[{file.name}](bench/{file.name})."
    )


def _machine() -> str:
    """What the machine is, in words; not which."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"


def _git(*words: str) -> str:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or ("unknown" if words[0] == "rev-parse" else "")


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), "utf-8")
