"""What a predictor says against what was measured: errors of rows, and their summary for a table.

error     predicted / measured − 1, signed
MAPE      the mean of the errors' sizes
rank      Spearman's correlation of predicted and measured seconds over the table
regret    of a group of rows of one model, batch and machine, which differ in layout: the time of the layout that the
          predictor puts first, over the fastest of the group, − 1; the mean of those it puts first alike
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from published_cases.case import GIB, Case, Predicted

Predict = Callable[[Case], Predicted]
TIED = 1e-9  # relative: predictions that differ by less are alike


@dataclass(frozen=True)
class Line:
    """One case and what was said of it; ``failed``: why nothing was."""

    case: Case
    predicted: Predicted | None
    failed: str = ""

    @property
    def error(self) -> float | None:
        """Of the seconds of a step."""
        measured = self.case.measured.seconds
        return None if measured is None or self.predicted is None else self.predicted.seconds / measured - 1

    @property
    def active_error(self) -> float | None:
        """Of the bytes of live tensors."""
        return None if self.predicted is None else _relative(self.predicted.active, self.case.measured.active)

    @property
    def reserved_error(self) -> float | None:
        """Of the bytes that the process held; where the predictor says only what lives, of that."""
        return _relative(self.peak, self.case.measured.reserved)

    @property
    def peak(self) -> int | None:
        """The most that the predictor says a device holds, in bytes."""
        if self.predicted is None:
            return None
        return self.predicted.active if self.predicted.reserved is None else self.predicted.reserved

    @property
    def fits(self) -> bool | None:
        """Whether the predictor says that the case fits its device; None: it does not say."""
        return None if self.peak is None else self.peak <= self.case.machine.capacity

    @property
    def inside(self) -> bool | None:
        """Whether the measured time lies in the predicted interval; None: there is none."""
        seconds, said = self.case.measured.seconds, self.predicted
        if seconds is None or said is None or said.low is None or said.high is None:
            return None
        return said.low <= seconds <= said.high


def lines_of(cases: Iterable[Case], predict: Predict) -> list[Line]:
    """Predicts every case; one that the predictor cannot do is a line that says why."""
    lines = []
    for case in cases:
        try:
            lines.append(Line(case, predict(case)))
        except Exception as error:  # whatever a predictor raises: the other rows go on
            lines.append(Line(case, None, f"{type(error).__name__}: {error}"))
    return lines


def _relative(predicted: int | None, measured: int | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


# --- regret and rank --------------------------------------------------------------------------------------------------


def regrets(lines: Iterable[Line]) -> list[tuple[str, float]]:
    """(a row of the group, regret) of each group of at least two layouts. A choice that ran out of memory has no limit.

    A layout that the predictor says does not fit is not chosen. Rows that ran out of memory are in a group, but are not its
    fastest.
    """
    groups: dict[object, list[Line]] = defaultdict(list)
    for line in lines:
        if line.predicted is not None and (line.case.measured.seconds is not None or line.case.measured.out_of_memory):
            groups[_without_layout(line.case)].append(line)
    result = []
    for group in groups.values():
        times = [line.case.measured.seconds for line in group if line.case.measured.seconds is not None]
        if len({line.case.layout for line in group}) > 1 and times:
            result.append((group[0].case.row, _regret(group, min(times))))
    return result


def _regret(group: Sequence[Line], fastest: float) -> float:
    offered = [line for line in group if line.fits is not False] or group
    said = [line.predicted.seconds for line in offered if line.predicted is not None]
    chosen = [line for line, seconds in zip(offered, said, strict=True) if seconds <= min(said) * (1 + TIED)]
    times = [line.case.measured.seconds for line in chosen]
    return mean(float("inf") if seconds is None else seconds for seconds in times) / fastest - 1


def _without_layout(case: Case) -> object:
    """What two rows share that differ in layout only."""
    layout = case.layout
    return (
        case.model,
        layout.devices,
        layout.global_batch,
        case.machine,
        case.precision,
        case.runtime,
        case.compiled,
        case.table,
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's: Pearson's of the ranks; equal values share the mean of theirs. None: under three pairs, or all alike."""
    first, second = (_ranks([pair[i] for pair in pairs]) for i in range(2))
    centre = (len(pairs) + 1) / 2
    spread = sum((a - centre) ** 2 for a in first) * sum((b - centre) ** 2 for b in second)
    if len(pairs) < 3 or not spread:
        return None
    return sum((a - centre) * (b - centre) for a, b in zip(first, second, strict=True)) / spread**0.5


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values), 1):
        places[value].append(place)
    return [mean(places[value]) for value in values]


# --- text -------------------------------------------------------------------------------------------------------------


def summary(lines: Sequence[Line]) -> list[str]:
    """The lines of a report on one table."""
    timed = [line for line in lines if line.error is not None]
    said = [f"rows        {len(lines)}, {len(timed)} with a time"]
    if timed:
        said += _of_time(timed)
    said += _of_regret(regrets(lines))
    said += _of_memory(lines)
    if failed := [line for line in lines if line.failed]:
        said.append(f"failed      {len(failed)} not predicted: {failed[0].failed.splitlines()[0]}")
    return said


def _of_time(timed: Sequence[Line]) -> list[str]:
    errors = [line.error for line in timed if line.error is not None]
    worst = max(timed, key=lambda line: abs(line.error or 0))
    pairs = [(line.predicted.seconds, line.case.measured.seconds) for line in timed if line.predicted is not None]
    rank = rank_correlation([(a, b) for a, b in pairs if b is not None])
    said = [
        f"time        MAPE {mean(map(abs, errors)):.1%}, median |error| {median(map(abs, errors)):.1%}, "
        f"median error {median(errors):+.1%}, worst {worst.error:+.1%} ({worst.case.row})",
        "rank        " + ("too few rows" if rank is None else f"{rank:.3f}"),
    ]
    inside = [line.inside for line in timed if line.inside is not None]
    return [*said, f"interval    {sum(inside)} of {len(inside)} measured times lie in it"] if inside else said


def _of_regret(found: Sequence[tuple[str, float]]) -> list[str]:
    if not found:
        return ["regret      no rows that differ in layout only"]
    limited = [(regret, row) for row, regret in found if regret != float("inf")]
    said = f"regret      {len(found)} groups"
    if limited:
        values, (worst, row) = [regret for regret, _ in limited], max(limited)
        said += f": mean {mean(values):.1%}, median {median(values):.1%}, worst {worst:.1%} (group of {row})"
    if runs_out := len(found) - len(limited):
        said += f"; in {runs_out}, what is put first ran out of memory"
    return [said]


def _of_memory(lines: Sequence[Line]) -> list[str]:
    said = []
    for name, errors in (
        ("active", [e for line in lines if (e := line.active_error) is not None]),
        ("reserved", [e for line in lines if (e := line.reserved_error) is not None]),
    ):
        if errors:
            worst = max(errors, key=abs)
            said.append(f"{name:11} {len(errors)} rows: MAPE {mean(map(abs, errors)):.1%}, worst {worst:+.1%}")
    failed = [line for line in lines if line.case.measured.out_of_memory]
    if failed and any(line.fits is not None for line in lines):
        ran = [line for line in lines if not line.case.measured.out_of_memory and line.fits is not None]
        told = sum(line.fits is False for line in failed)
        fits = sum(line.fits is True for line in ran)
        said.append(
            f"capacity    {told} of {len(failed)} that ran out of memory told, {fits} of {len(ran)} that ran told to fit"
        )
    elif failed:
        said.append(f"capacity    {len(failed)} ran out of memory; the predictor says nothing of memory")
    return said


def row_text(line: Line) -> str:
    """One row of a table: measured, predicted, signed errors."""
    measured, predicted = line.case.measured, line.predicted
    if predicted is None:
        return f"{line.case.row}: not predicted: {line.failed.splitlines()[0]}"
    cells = [
        "out of memory" if measured.out_of_memory else _seconds(measured.seconds),
        _seconds(predicted.seconds),
        "" if line.error is None else f"{line.error:+.1%}",
        _gib(measured.reserved if measured.active is None else measured.active),
        _gib(line.peak if measured.active is None else predicted.active),
        _percent(line.reserved_error if measured.active is None else line.active_error),
    ]
    return f"{cells[0]:>14} {cells[1]:>12} {cells[2]:>8} {cells[3]:>10} {cells[4]:>10} {cells[5]:>8}  {line.case.row}"


ROW_HEAD = f"{'measured':>14} {'predicted':>12} {'error':>8} {'measured':>10} {'predicted':>10} {'error':>8}  row"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4g} s"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.1f} GiB"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"
