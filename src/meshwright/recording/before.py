"""What two runs began with and were told: names, rows, settings of optimizers, the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import nearest
from meshwright.recording.alike import RELATIVE
from meshwright.recording.pairs import Pair, StepFacts, is_tensor
from meshwright.recording.pattern import Pattern
from meshwright.recording.verdict import Wrong


def wrong_names(pair: Pair) -> Iterator[Wrong]:
    """Parameters that one of both lacks."""
    for name in pair.missing:
        near = nearest(name, pair.extra, 1)
        yield Wrong("names", name, Pattern("missing"), detail=f"nearest there: {near[0]}" if near else "")
    for name in pair.extra:
        near = nearest(name, pair.missing, 1)
        yield Wrong("names", name, Pattern("extra"), detail=f"nearest in one process: {near[0]}" if near else "")


def wrong_rows(one: StepFacts, many: StepFacts) -> Iterator[Wrong]:
    """Rows that were not seen as often as on one process. Ranks of one tensor-parallel group all see the same rows."""
    if not one.rows or not many.rows:
        total = sum(one.counts), sum(many.counts)
        if all(total) and total[1] % total[0]:
            yield Wrong(
                "rows", "rows", Pattern("counts"), detail=f"{total[0]} in one process, {total[1]} over all ranks"
            )
        return
    missing = [row for row in one.rows if row not in many.rows]
    extra = [row for row in many.rows if row not in one.rows]
    of = f"of {len(one.rows)}"
    if len(missing) == len(one.rows):
        yield Wrong("rows", "all rows", Pattern("other"), detail=f"none {of} is the same")
        return
    if missing:
        yield Wrong("rows", f"{len(missing)} {of} rows", Pattern("missing"), detail="no rank saw them")
    if extra:
        yield Wrong("rows", f"{len(extra)} rows", Pattern("extra"), detail="one process did not see them")
    times = {many.rows[row] / one.rows[row] for row in one.rows if row in many.rows}
    if len(times) > 1:
        often = [row for row in one.rows if row in many.rows and many.rows[row] / one.rows[row] > min(times)]
        yield Wrong("rows", f"{len(often)} {of} rows", Pattern("twice"), detail="seen more often than others")


def split_rows(pair: Pair, many: StepFacts) -> Iterator[Wrong]:
    """Ranks of a tensor-parallel group that saw different rows: each should see all rows of its group."""
    for axis in filter(is_tensor, pair.axes):
        for ranks in pair.groups(axis):
            told = [many.rows_of[rank] for rank in ranks if many.rows_of[rank]]
            if len({frozenset(rows) for rows in told}) > 1:
                yield Wrong("rows", f"ranks {', '.join(map(str, ranks))}", Pattern("split"), detail=f"along {axis}")


def wrong_settings(one: StepFacts, many: StepFacts) -> Iterator[Wrong]:
    """Settings of optimizers that differ: class and groups, by position."""
    first = next(iter(one.settings.values()), ())
    found: dict[tuple[str, str], list[int]] = {}
    for rank, settings in many.settings.items():
        for at, (a, b) in enumerate(zip(map(_flat, first), map(_flat, settings), strict=False)):
            for key in a:
                if key in b and not _equal(a[key], b[key]):
                    where = key if len(first) == 1 else f"optimizer {at}: {key}"
                    found.setdefault((where, f"{a[key]} in one process, {b[key]}"), []).append(rank)
    for (where, values), ranks in found.items():
        on = (
            "here"
            if len(ranks) == len(many.settings)
            else f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        )
        yield Wrong("settings", where, Pattern("settings", ranks=tuple(ranks)), detail=f"{values} {on}")


def wrong_loss(one: StepFacts, many: StepFacts, tolerance: float | None) -> Iterator[Wrong]:
    """The mean loss over all rows."""
    if one.loss is None or many.loss is None:
        return
    relative = tolerance or max(RELATIVE.get(dtype, 5e-2) for dtype in (one.dtype, many.dtype)) / 10
    off = abs(many.loss - one.loss)
    if not off <= relative * max(abs(one.loss), 1e-3):
        factor = many.loss / one.loss if one.loss else None
        detail = f"{one.loss:.6g} in one process, {many.loss:.6g} over all ranks"
        yield Wrong("loss", "loss", Pattern("scaled", off / max(abs(one.loss), 1e-3), factor), detail=detail)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """One optimizer's settings by a name each; groups have their number, if there are several."""
    groups = settings["groups"]
    flat = {"class": settings["class"]}
    for at, group in enumerate(groups):
        flat |= {key if len(groups) == 1 else f"group {at}: {key}": value for key, value in group.items()}
    return flat


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float | int):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return bool(a == b)
