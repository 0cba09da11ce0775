"""What is covered: every model of bench/architectures.py in every layout, checked against one device in float64.

    python bench/coverage.py [--only NAME ...] [--layouts pp=2 ...] [--again] [--failed] [--keep]

Writes docs/coverage.md. A cell is one ``mw.check``; one that fails or hangs fails alone. Results are kept in
build/coverage.json as they come, and a run that was broken off goes on from there: a result counts as long as neither
its model nor the library has changed (``--keep``: whatever the library did), ``--failed`` repeats those that failed,
``--again`` all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from architectures import MODELS as OF_TRANSFORMERS
from architectures import NARROW, Model
from packages import PACKAGE_MODELS, PackageModel

import meshwright as mw
from meshwright.errors import PlanError

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"mesh": {"tp": 2}},
    "pp=2": {"mesh": {"pp": 2}},
    "dp_shard=2": {"mesh": {"dp_shard": 2}},
    "pp=2,tp=2": {"mesh": {"pp": 2, "tp": 2}},
    "pp=2,dp_shard=2": {"mesh": {"pp": 2, "dp_shard": 2}},
}
ROOT = Path(__file__).resolve().parent.parent
CACHE, PAGE = ROOT / "build" / "coverage.json", ROOT / "docs" / "coverage.md"
Cell = dict[str, Any]  # a result, as JSON has it
Row = Model | PackageModel
MODELS: dict[str, Row] = {**OF_TRANSFORMERS, **PACKAGE_MODELS}


def main() -> None:
    arguments = _arguments()
    models = [m for m in MODELS.values() if any(fnmatchcase(m.name, glob) for glob in arguments.only)]
    library = "" if arguments.keep else _library()
    cells: dict[str, dict[str, Cell]] = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    todo = [
        (m, layout) for m in models for layout in arguments.layouts
        if arguments.again or _stale(cells.get(m.name, {}).get(layout), m, library, arguments.failed)
    ]  # fmt: skip
    with mw.local_workers(4, start_method="spawn") as workers:  # as under torchrun: each hashes strings in its own way
        for i, (model, layout) in enumerate(todo, 1):
            cell = checked(model, layout, workers, arguments.timeout)
            print(
                f"{i:4}/{len(todo)}  {model.name:30}  {layout:16}  {cell['seconds']:5.1f} s  {said(cell)}", flush=True
            )
            cells.setdefault(model.name, {})[layout] = cell
            CACHE.parent.mkdir(exist_ok=True)
            CACHE.write_text(json.dumps(cells, indent=1))
    PAGE.write_text(page(cells))
    print(f"{PAGE.relative_to(ROOT)}: {_counts(cells)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="models, or globs of their names")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="MESH")
    parser.add_argument("--again", action="store_true", help="repeat all")
    parser.add_argument("--failed", action="store_true", help="repeat those that failed")
    parser.add_argument("--keep", action="store_true", help="keep what another state of the library gave")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a side may go without a step")
    return parser.parse_args()


# --- a cell -----------------------------------------------------------------------------------------------------------


def checked(model: Row, layout: str, workers: Any, timeout: float = 60.0) -> Cell:
    """One model in one layout."""
    started = time.monotonic()
    cell: Cell = {"model": _digest(model), "library": _library(), "passed": False}
    try:
        dtype = torch.float32 if model.name in NARROW else None
        loss = model.loss if isinstance(model, PackageModel) else None
        report = mw.check(
            model.build, model.batch(), LAYOUTS[layout], loss=loss, workers=workers, dtype=dtype, timeout=timeout
        )
    except PlanError as error:
        cell["refused"] = str(error)
    except Exception as error:  # whatever a model's own code may raise; the other cells go on
        cell["failure"] = f"{type(error).__name__}: {error}"
    else:
        kind, name, error = report.worst
        cell |= {"passed": report.passed, "error": error, "worst": f"{kind} {name}".strip(), "failure": report.failure}
        cell |= {"dtype": report.dtype, "fallbacks": [list(f) for f in report.fallbacks], "notes": list(report.notes)}
        cell |= {"cut": sum(isinstance(line.tp, mw.Shard) for line in report.recipe or ())}
        cell |= {"coupled": any("every data rank runs all rows" in note for note in report.notes)}
        if not report.passed:
            cell["report"] = str(report)  # all that differs: what fails once may not fail again
    return cell | {"seconds": time.monotonic() - started}


def said(cell: Cell) -> str:
    """A cell in a few words."""
    if cell["passed"]:
        whole = sum(count for count, _ in cell["fallbacks"])
        narrow = f" {cell['dtype']}" if cell["dtype"] != "float64" else ""
        return f"✓ {cell['error']:.0e}{narrow}" + (f", {whole} whole" if whole else "")
    if reason(cell):
        return f"✗ {reason(cell)}"
    return f"{'~' if draws(cell) else '✗'} {cell['worst']} is off by {cell['error']:.1e}"


def draws(cell: Cell) -> bool:
    """Whether a difference may be that of random numbers: the model draws some in its forward, in eval mode too, and stages and
    data ranks draw their own."""
    drawn = any("the model draws random numbers in its forward, in" in note for note in cell.get("notes", ()))
    return not cell["passed"] and not reason(cell) and drawn


def reason(cell: Cell) -> str:
    """Why there was no result, in a line."""
    if "refused" in cell:
        parts = [line.strip() for line in cell["refused"].splitlines()]
        return "refused: " + "; ".join(p for p in parts if p.startswith(("given:", "required:")))
    return str(cell.get("failure") or "").split("\n", 1)[0]


def _stale(cell: Cell | None, model: Row, library: str, failed: bool) -> bool:
    if cell is None or cell["model"] != _digest(model) or (failed and not cell["passed"]):
        return True
    return bool(library) and cell["library"] != library


def _digest(model: Row) -> str:
    version = f" {model.version}" if isinstance(model, PackageModel) else ""
    return f"{model.kind} {model.settings}{version}"


def _library() -> str:
    """The state of the library's source."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


# --- the page ---------------------------------------------------------------------------------------------------------


def page(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """docs/coverage.md."""
    import transformers

    lines = [
        "# Coverage",
        "",
        "`make coverage` writes this page: each model, with random weights and tiny sizes (bench/architectures.py,",
        "bench/packages.py), in each layout, against plain PyTorch on one device: the loss, every gradient, every parameter",
        "and every buffer after three steps. No model is edited, and no plan says more than its mesh.",
        "",
        "✓ and the largest error: at most 1e-9 in float64 (1e-4 in float32, for a model that cannot run in float64). *n",
        "whole*: calls of functions without a rule in a step of rank 0, which are right and save no work; they are listed",
        "below. *rows gathered*: the model's rows depend on each other (batch norm, contrast), and every data rank runs all.",
        "✗: the reason is below. Dropout is off; other random numbers that a model draws for its rows are given with the",
        "batch, or off in eval mode. ~: the model draws random numbers in its forward whatever the mode; stages and data",
        "ranks draw their own, so that this table cannot tell whether it is right there.",
        "",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, gloo on CPU, {date.today()}. "
        f"{_counts(cells)}.",
    ]
    for kind in dict.fromkeys(m.kind for m in MODELS.values()):
        rows = [m for m in MODELS.values() if m.kind == kind and m.name in cells]
        if rows:
            lines += ["", f"## {_title(rows[0])}", "", f"| model | | {' | '.join(LAYOUTS)} |"]
            lines += ["| --- " * (2 + len(LAYOUTS)) + "|"]
            lines += [f"| {m.name} | {m.traits} | {' | '.join(_cells(cells[m.name]))} |" for m in rows]
    lines += _failures(cells) + _fallbacks(cells)
    return "\n".join(lines) + "\n"


def _title(row: Row) -> str:
    """The heading of a group: the kind of its models, or their package with the version that was tried."""
    if isinstance(row, PackageModel):
        return f"{row.package} {row.version}"
    return f"{row.kind[0].upper()}{row.kind[1:]}"


def _cells(row: Mapping[str, Cell]) -> Iterable[str]:
    for layout in LAYOUTS:
        cell = row.get(layout)
        if cell is None:
            yield ""
        elif not cell["passed"]:
            yield "~" if draws(cell) else "✗"
        else:
            yield said(cell) + (", rows gathered" if cell["coupled"] else "")


def _counts(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    rows = [cells[name] for name in MODELS if name in cells]
    parts = []
    for layout in LAYOUTS:
        found = [row[layout] for row in rows if layout in row]
        undecided = sum(map(draws, found))
        said_too = f", {undecided} not comparable" if undecided else ""
        parts.append(f"{layout}: {sum(c['passed'] for c in found)} of {len(found)}{said_too}")
    return "; ".join(parts)


def _failures(cells: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    lines = []
    for name in MODELS:
        reasons: dict[str, list[str]] = {}
        for layout in LAYOUTS:
            cell = cells.get(name, {}).get(layout)
            if cell is not None and not cell["passed"]:
                reasons.setdefault(said(cell)[2:], []).append(layout)
        lines += [f"- **{name}**, {' and '.join(layouts)}: {why}" for why, layouts in reasons.items()]
    return ["", "## What does not work", "", *lines] if lines else []


def _fallbacks(cells: Mapping[str, Mapping[str, Cell]]) -> list[str]:
    lines = []
    for name in MODELS:
        found: dict[str, int] = {}
        for cell in cells.get(name, {}).values():
            for count, text in cell.get("fallbacks", ()):
                function = text.split(" ", 1)[0]
                found[function] = max(found.get(function, 0), count)
        if found:
            lines.append(f"- **{name}**: {', '.join(f'{count} × `{f}`' for f, count in found.items())}")
    return ["", "## What ran whole over `tp`", "", *lines] if lines else []


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "bench"))
    main()
