"""Prints checkpoints: a line for each of several; for one, its facts and a line for each module or tensor.

module                     tensors  elements  weights   optimizer
transformer.wte                  1    33,280  130 KiB     260 KiB
transformer.h.{0…11} ×12       144   598,272  2.3 MiB     4.6 MiB
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import size_text
from meshwright.mesh import Mesh
from meshwright.names import Folded, fold_names

if TYPE_CHECKING:  # facts are made where torch is loaded
    from meshwright.checkpoint.inspection import Inspection, TensorFacts

_WHOLE, _DAMAGED = Text("whole", style="green"), Text("damaged", style="bold red")


def checkpoint_lines(inspections: Sequence[Inspection]) -> RenderableType:
    """A line for each checkpoint, oldest first; the newest is marked."""
    table = _table("checkpoint", "step", "saved", "size", "layout", "")
    for inspection in inspections:
        newest = Text(" ← newest", style="bold") if inspection is inspections[-1] else Text("")
        table.add_row(
            inspection.path.name, str(inspection.step) if inspection.step >= 0 else "?",
            str(inspection.about.get("time", "?")), size_text(inspection.bytes), _mesh(inspection),
            _state(inspection) + newest,
        )  # fmt: skip
    return table


def checkpoint_page(inspection: Inspection, *, tensors: bool = False) -> RenderableType:
    """The facts and contents of a checkpoint. ``tensors``: a line for each tensor in place of each module."""
    heading = Text.assemble(
        (str(inspection.path), "bold"), f": step {inspection.step}, " * (inspection.step >= 0) or ": "
    )
    parts: list[RenderableType] = [heading + _state(inspection), _facts(inspection)]
    if inspection.tensors:
        parts += [Text(""), _tensors(inspection) if tensors else _modules(inspection)]
    return Group(*parts)


def _state(inspection: Inspection) -> Text:
    if not inspection.whole:
        return _DAMAGED.copy()
    return _WHOLE.copy() if inspection.checked == "contents" else Text("all there (sizes)", style="green")


def _facts(inspection: Inspection) -> Table:
    about = inspection.about
    facts = {
        "saved": ", ".join(str(about[key]) for key in ("time",) if key in about)
        + "".join(f", {key} {about[key]}" for key in ("meshwright", "torch", "python") if key in about),
        "layout": _mesh(inspection),
        "branches": ", ".join(map(str, about.get("branches", ()))),
        "stages": ", ".join(map(str, about.get("stages", ()))),
        "files": f"{len(inspection.files)}, {size_text(inspection.bytes)}" if inspection.files else "",
        "optimizer": ", ".join(dict.fromkeys(t.key for t in inspection.of("optimizer"))),
        "tied": ", ".join(f"{alias} = {name}" for alias, name in about.get("aliases", {}).items()),
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if value:
            table.add_row(Text(name, style="dim"), Text(value))
    return table


def _mesh(inspection: Inspection) -> str:
    """The mesh of the job that saved it, as text."""
    if "mesh" not in inspection.about:
        return "?"
    mesh = Mesh(tuple(inspection.about["mesh"].items()))
    return "one process" if mesh.size == 1 else f"{mesh}: {mesh.size} ranks"


# --- tables ----------------------------------------------------------------------------------------------------------


def _modules(inspection: Inspection) -> Table:
    """A line for each block, and each module outside of blocks."""
    weights, states = inspection.of("model"), inspection.of("optimizer")
    table = _table("module", "tensors", "elements", "weights", "optimizer")
    for folded in fold_names(_block(t.name) for t in weights):
        blocks = set(folded.names)
        _add(table, _times(folded), weights, states, blocks)
    table.add_section()
    _add(table, "all", weights, states, {_block(t.name) for t in weights})
    return table


def _add(
    table: Table, label: str, weights: Iterable[TensorFacts], states: Iterable[TensorFacts], blocks: set[str]
) -> None:
    """Adds the line of some blocks."""
    tensors = [t for t in weights if _block(t.name) in blocks]
    state = sum(t.bytes for t in states if _block(t.name) in blocks)
    size, elements = sum(t.bytes for t in tensors), sum(prod(t.shape) for t in tensors)
    table.add_row(label, str(len(tensors)), f"{elements:,}", size_text(size), size_text(state) if state else "")


def _tensors(inspection: Inspection) -> Table:
    """A line for each tensor of the model. Tensors whose names differ only in numbers share a line."""
    table = _table("tensor", "shape", "type", "pieces", "size", "optimizer")
    states: dict[str, int] = {}
    for t in inspection.of("optimizer"):
        states[t.name] = states.get(t.name, 0) + t.bytes
    for folded, first in _folded(inspection.of("model")):
        state = sum(states.get(name, 0) for name in folded.names)
        shape = "×".join(map(str, first.shape)) or "–"
        table.add_row(
            _times(folded), shape, first.dtype, str(first.pieces), size_text(first.bytes * len(folded.names)),
            size_text(state) if state else "",
        )  # fmt: skip
    return table


def _folded(tensors: Sequence[TensorFacts]) -> Iterator[tuple[Folded, TensorFacts]]:
    """(folded names, first tensor), for tensors with equal shape, dtype and number of pieces."""
    order = {t.name: i for i, t in enumerate(tensors)}
    kinds: dict[object, list[str]] = {}
    for t in tensors:
        kinds.setdefault((t.shape, t.dtype, t.pieces), []).append(t.name)
    folds = [folded for names in kinds.values() for folded in fold_names(names)]
    for folded in sorted(folds, key=lambda folded: order[folded.names[0]]):
        yield folded, tensors[order[folded.names[0]]]


def _block(name: str) -> str:
    """The block of a tensor: its name up to the first number. Without a number, its module."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] or parts) if number is None else ".".join(parts[: number + 1])


def _times(folded: Folded) -> str:
    return f"{folded} ×{len(folded.names)}" if len(folded.names) > 1 else str(folded)


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="left" if name in ("saved", "layout", "shape", "type", "") else "right")
    return table
