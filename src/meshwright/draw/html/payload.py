"""``payload``: a ``Report`` as compact values for the page's scripts. Its size does not grow with parameters × ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from meshwright.draw.communication import Communication
from meshwright.draw.facts import ShardMap
from meshwright.draw.memory import MemoryProfile
from meshwright.draw.parameters import Row, itemsize
from meshwright.draw.plain import to_plain
from meshwright.draw.text import layout_text
from meshwright.draw.timeline import Timeline
from meshwright.layout import Shard
from meshwright.names import fold_names
from meshwright.recipe import Recipe

if TYPE_CHECKING:
    from meshwright.draw.report import Report  # which imports pages

_DIGITS = 6  # significant digits of a number: more than a page can show, and half the length of all


def payload(report: Report) -> dict[str, Any]:
    """The facts of a report, as plain values for the page's scripts."""
    shards = report.shards
    sizes = shards.bytes_by_rank
    return {
        "title": report.title,
        "axes": [list(axis) for axis in report.recipe.mesh.axes],
        "perNode": report.per_node,
        "links": {axis.axis: str(axis) for axis in report.topology.axes} if report.topology else {},
        "places": _places(shards),
        "stageRank": list(report.recipe.stage_rank),
        "stages": _stages(report.recipe),
        "rows": [_row(row, shards) for row in shards.rows],
        "numel": shards.numel,
        "bytes": shards.bytes,
        "held": [min(sizes), max(sizes)],
        "timeline": timeline_payload(report.timeline),
        "memory": _memory(report.memory),
        "communication": _communication(report.communication),
        "steps": to_plain(report.steps),
        "mismatches": to_plain(report.mismatches),
        "notes": list(report.notes),
        "plan": report.recipe.plan,
    }


# --- shards -----------------------------------------------------------------------------------------------------------


def _places(shards: ShardMap) -> list[dict[str, Any]]:
    """The submeshes of the trunk and the branches, with the values that `Submeshes.at` needs."""
    facts = {branch.number: branch for branch in shards.branches}
    return [
        {
            "parent": submesh.parent,
            "start": submesh.start,
            "stop": submesh.stop,
            "axes": [list(axis) for axis in submesh.mesh.axes],
            "on": shards.recipe.places.spelled(number),
            "modules": [folded.label for folded in fold_names(submesh.modules)],
            "work": facts[number].work if number in facts else 1,
            "numel": facts[number].numel if number in facts else 0,
            "splits": submesh.splits,
        }
        for number, submesh in enumerate(shards.recipe.places.all)
    ]


def _stages(recipe: Recipe) -> list[dict[str, Any]]:
    total_work = sum(stage.work for stage in recipe.stages) or 1
    return [
        {
            "from": stage.where,
            "to": stage.modules[-1] if stage.modules else "–",
            "modules": [folded.label for folded in fold_names(stage.modules)],
            "work": stage.work / total_work,
            "parameters": stage.parameters,
            "sends": stage.sends,
        }
        for stage in recipe.stages
    ]


def _row(row: Row, shards: ShardMap) -> dict[str, Any]:
    facts, line = row.first, shards.recipe.by_name[row.first.name]
    return {
        "label": row.label,
        "count": row.count,
        "shape": list(facts.shape),
        "dtype": facts.dtype,
        "item": itemsize(facts.dtype),
        "tp": [line.tp.dim, [list(piece) for piece in line.tp.pieces]] if isinstance(line.tp, Shard) else None,
        "shards": shards.recipe.shards(line),
        "places": list(line.places),
        "unit": facts.unit,
        "reason": facts.reason,
        "aliases": list(facts.aliases),
        "trained": facts.requires_grad,
        "layouts": {axis.split(" ")[0]: layout_text(one, len(facts.shape)) for axis, one in facts.layout.items()},
        "variants": [
            {"stages": list(stages), "name": names[0], "label": _label(names), "count": len(names)}
            for stages, names in row.by_stage.items()
        ],
    }


def _label(names: Sequence[str]) -> str:
    return ", ".join(folded.label for folded in fold_names(names))


# --- a step -----------------------------------------------------------------------------------------------------------


def timeline_payload(timeline: Timeline) -> dict[str, Any]:
    """A timeline as plain values.

    A slot is [start, stop, index into ``whats``, stage, microbatch, index into ``parts``], since few values of both repeat in
    many slots.
    """
    whats: dict[str, int] = {}  # value → index
    parts: dict[tuple[tuple[str, float], ...], int] = {}  # value → index
    lines = []
    for line in timeline.lines:
        slots = []
        for slot in line.slots:
            what_index = whats.setdefault(slot.what, len(whats))
            amounts = tuple((name, _short(amount)) for name, amount in slot.parts.items())
            parts_index = parts.setdefault(amounts, len(parts))
            slots.append([_short(slot.start), _short(slot.stop), what_index, slot.stage, slot.microbatch, parts_index])
        lines.append(
            {"stages": list(line.stages), "inFlight": line.in_flight, "busy": _short(line.busy), "slots": slots}
        )
    return {
        "unit": timeline.unit,
        "schedule": timeline.schedule,
        "microbatches": timeline.microbatches,
        "length": _short(timeline.length),
        "idle": timeline.idle,
        "whats": list(whats),
        "parts": [dict(amounts) for amounts in parts],
        "lines": lines,
        "transfers": [
            [t.source, t.target, _short(t.start), _short(t.stop), t.way, t.microbatch, t.bytes]
            for t in timeline.transfers
        ],
        "exchanges": [[e.line, e.axis, e.kind, _short(e.start), _short(e.stop), e.bytes] for e in timeline.exchanges],
    }


def _memory(profile: MemoryProfile) -> dict[str, Any]:
    """The memory profile as plain values. A moment is [what, bytes, bytes of each of ``kinds``]."""
    most: dict[str, int] = {}
    for role in profile.roles:
        for moment in role.moments:
            for kind, nbytes in moment.items.items():
                most[kind] = max(most.get(kind, 0), nbytes)
    kinds = sorted(most, key=lambda kind: -most[kind])
    return {
        "kinds": kinds,
        "capacity": profile.capacity,
        "context": profile.context,
        "roles": [
            {
                "name": role.name,
                "runs": _runs(role.ranks),
                "stage": role.stage,
                "atRest": list(role.at_rest),
                "moments": [[m.what, m.bytes, [m.items.get(kind, 0) for kind in kinds]] for m in role.moments],
                "peak": role.peak,
                "device": list(role.device),
                "sites": to_plain(role.sites),
            }
            for role in profile.roles
        ],
    }


def _communication(facts: Communication) -> dict[str, Any]:
    return {
        "source": facts.source,
        "exchanges": [[e.role, e.axis, e.kind, e.module, e.calls, round(e.bytes)] for e in facts.exchanges],
        "ranWhole": to_plain(facts.ran_whole),
    }


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks as [start, stop) runs."""
    runs = []
    for _, group in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        runs.append([members[0], members[-1] + 1])
    return runs


def _short(number: float) -> float:
    """The number, rounded to ``_DIGITS`` significant digits."""
    return float(f"{number:.{_DIGITS}g}")
