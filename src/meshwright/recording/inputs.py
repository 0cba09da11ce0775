"""Compares the inputs of two runs: names of parameters, rows, settings of optimizers; and the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import nearest
from meshwright.recording.pairs import Pair, StepFacts, is_tensor
from meshwright.recording.pattern import Pattern
from meshwright.recording.tolerance import OTHER_TYPE, RELATIVE
from meshwright.recording.verdict import TensorDifference


def wrong_names(pair: Pair) -> Iterator[TensorDifference]:
    """A difference for each parameter that only one of the recordings has."""
    for name in pair.missing:
        similar = nearest(name, pair.extra, 1)
        yield TensorDifference(
            "names", name, Pattern("missing"), detail=f"nearest there: {similar[0]}" if similar else ""
        )
    for name in pair.extra:
        similar = nearest(name, pair.missing, 1)
        yield TensorDifference(
            "names", name, Pattern("extra"), detail=f"nearest in one process: {similar[0]}" if similar else ""
        )


def wrong_rows(one: StepFacts, many: StepFacts) -> Iterator[TensorDifference]:
    """Differences in the rows that a step used.

    Ranks of one tensor-parallel group use the same rows, so a row may be seen several times; but all rows equally often.
    """
    if not one.rows or not many.rows:
        total = sum(one.counts), sum(many.counts)
        if all(total) and total[1] % total[0]:
            yield TensorDifference(
                "rows", "rows", Pattern("counts"), detail=f"{total[0]} in one process, {total[1]} over all ranks"
            )
        return
    missing = [row for row in one.rows if row not in many.rows]
    extra = [row for row in many.rows if row not in one.rows]
    count = len(one.rows)
    if len(missing) == count:
        yield TensorDifference("rows", "all rows", Pattern("other"), detail=f"none of {count} is the same")
        return
    if missing:
        yield TensorDifference("rows", f"{len(missing)} of {count} rows", Pattern("missing"), detail="no rank saw them")
    if extra:
        yield TensorDifference("rows", f"{len(extra)} rows", Pattern("extra"), detail="one process did not see them")
    times = {row: many.rows[row] / one.rows[row] for row in one.rows if row in many.rows}
    if len(set(times.values())) > 1:
        least = min(times.values())
        often = [row for row, how_often in times.items() if how_often > least]
        yield TensorDifference(
            "rows", f"{len(often)} of {count} rows", Pattern("twice"), detail="seen more often than others"
        )


def split_rows(pair: Pair, many: StepFacts) -> Iterator[TensorDifference]:
    """A difference for each tensor-parallel group whose ranks used different rows: all of them should use the same."""
    for axis in filter(is_tensor, pair.axes):
        for ranks in pair.groups(axis):
            rows_by_rank = [many.rows_of[rank] for rank in ranks if many.rows_of[rank]]
            if len({frozenset(rows) for rows in rows_by_rank}) > 1:
                yield TensorDifference(
                    "rows", f"ranks {', '.join(map(str, ranks))}", Pattern("split"), detail=f"along {axis}"
                )


def wrong_settings(one: StepFacts, many: StepFacts) -> Iterator[TensorDifference]:
    """A difference for each setting of an optimizer: its class, and the values of its groups. Both are matched by position."""
    expected = next(iter(one.settings.values()), ())
    ranks_of: dict[tuple[str, str], list[int]] = {}  # (setting, both values) → ranks
    for rank, settings in many.settings.items():
        for i, (a, b) in enumerate(zip(map(_flat, expected), map(_flat, settings), strict=False)):
            for key in a:
                if key in b and not _equal(a[key], b[key]):
                    name = key if len(expected) == 1 else f"optimizer {i}: {key}"
                    ranks_of.setdefault((name, f"{a[key]} in one process, {b[key]}"), []).append(rank)
    for (name, values), ranks in ranks_of.items():
        if len(ranks) == len(many.settings):
            where = "here"
        else:
            where = f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        yield TensorDifference("settings", name, Pattern("settings", ranks=tuple(ranks)), detail=f"{values} {where}")


_LOSS_SHARE = 10  # the loss is compared this much more sharply than gradients: a mean has smaller rounding errors
_SAME_SETTING = 1e-6  # relative difference of equal settings of an optimizer: one may have been a float32 once
_SMALL_LOSS = 1e-3  # below it, the loss is compared on this scale, since a loss may be zero


def wrong_loss(one: StepFacts, many: StepFacts, tolerance: float | None) -> Iterator[TensorDifference]:
    """A difference if the mean loss over all rows differs by more than the tolerance (relative; default: by type)."""
    if one.loss is None or many.loss is None:
        return
    relative = tolerance or max(RELATIVE.get(dtype, OTHER_TYPE) for dtype in (one.dtype, many.dtype)) / _LOSS_SHARE
    off, scale = abs(many.loss - one.loss), max(abs(one.loss), _SMALL_LOSS)
    if not off <= relative * scale:
        factor = many.loss / one.loss if one.loss else None
        detail = f"{one.loss:.6g} in one process, {many.loss:.6g} over all ranks"
        yield TensorDifference("loss", "loss", Pattern("scaled", off / scale, factor), detail=detail)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """One optimizer's settings by a name each; groups have their number, if there are several."""
    groups = settings["groups"]
    flat = {"class": settings["class"]}
    for at, group in enumerate(groups):
        flat |= {key if len(groups) == 1 else f"group {at}: {key}": value for key, value in group.items()}
    return flat


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float | int):
        return abs(a - b) <= _SAME_SETTING * max(abs(a), abs(b))
    return bool(a == b)
