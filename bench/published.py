"""Predicted against published: signed errors, MAPE, rank correlation and regret on tables that others measured.

    python bench/published.py --data DIR [--predictor roofline|meshwright|predict|estimate] [--learn N] [--tables NAME ...]

DIR holds CSV files, one for each table (published_cases/tables.py has their names and sources); none of their rows is in this
repository. Each row becomes a case (published_cases/case.py) or is skipped with its reason.

``meshwright`` asks ``mw.predict`` about tables of at most 40 cases that differ, and takes the arithmetic of ``find_plans``
for larger ones; ``predict`` and ``estimate`` say which for all.

With ``--learn N``, N rows of a table, spread evenly over it, first correct the profiles as ``meshwright plan --measure``
does, and the report is on what the arithmetic says of the others.

A report says of each table where the predictor's constants come from: the roofline's is fitted on another table than the one
that is reported (``--fit-on``).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from published_cases import estimates, predictor, roofline
from published_cases.case import Case, Predicted
from published_cases.plans import stand_ins
from published_cases.report import ROW_HEAD, Predict, lines_of, row_text, summary
from published_cases.tables import READERS, Table, read_table, unread

MANY = 40  # cases of a table that differ, above which none is rehearsed by itself
FIT_ON, FIT_ON_INSTEAD = "megatron_sc21_table1", "mosaic_a100"  # the second, for the report on the first


@dataclass(frozen=True)
class Predictor:
    """What is held to the tables.

    Attributes:
        predict: what it says of a case.
        fitted: table → where its constants come from.
    """

    predict: Predict
    fitted: Callable[[str], str]


def main() -> None:
    arguments = _arguments()
    if others := unread(arguments.data):
        print(f"no reader for: {', '.join(others)}")
    for name in arguments.tables:
        table = read_table(arguments.data, name)
        print(f"\n{name}: {len(table.cases)} cases, {len(table.skipped)} rows skipped")
        _print_skipped(table, arguments.rows)
        if table.cases:
            cases = table.cases[:: arguments.every]
            held = _predictor(arguments, table)
            if arguments.learn:
                first, cases = spread(cases, arguments.learn)
                held = _learnt(first)
            _print_report(table.name, cases, held, arguments.rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder of the CSV files")
    parser.add_argument("--predictor", choices=("roofline", "meshwright", "predict", "estimate"), default="roofline")
    parser.add_argument("--tables", nargs="+", default=list(READERS), choices=list(READERS), metavar="NAME")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth case of each table")
    parser.add_argument(
        "--learn", type=int, default=0, metavar="N", help="correct profiles by N rows, report on the others"
    )
    parser.add_argument("--fit-on", choices=list(READERS), metavar="NAME", help="the roofline's table")
    return parser.parse_args()


def _predictor(arguments: argparse.Namespace, table: Table) -> Predictor:
    """The predictor for one table."""
    if arguments.predictor != "roofline":
        few = len({_asked(case) for case in table.cases}) <= MANY
        if arguments.predictor == "predict" or (arguments.predictor == "meshwright" and few):
            return Predictor(remembered(predictor.predict), predictor.fitted)
        return Predictor(remembered(estimates.estimate), estimates.fitted)
    source = arguments.fit_on or (FIT_ON if table.name != FIT_ON else FIT_ON_INSTEAD)
    fitted = roofline.fit(read_table(arguments.data, source).cases, source)
    return Predictor(fitted, fitted.fitted)


def spread(cases: Sequence[Case], count: int) -> tuple[list[Case], list[Case]]:
    """(``count`` of the cases with measured seconds, at most half of them, spread evenly; the others)."""
    timed = [case for case in cases if case.measured.seconds is not None]
    count = min(count, len(timed) // 2)
    chosen = {id(timed[(2 * i + 1) * len(timed) // (2 * count)]) for i in range(count)}
    return [case for case in cases if id(case) in chosen], [case for case in cases if id(case) not in chosen]


def _learnt(cases: Sequence[Case]) -> Predictor:
    """The arithmetic, with profiles that these cases correct."""
    learnt = estimates.Learnt.of(cases)
    return Predictor(remembered(learnt.estimate), learnt.fitted)


def _asked(case: Case) -> object:
    """What a prediction depends on."""
    return case.model, case.layout, case.precision, case.machine, case.compiled


def remembered(predict: Predict) -> Predict:
    """The same predictor, asked once about cases that differ in what was measured only."""
    answers: dict[object, Predicted] = {}

    def answer(case: Case) -> Predicted:
        key = _asked(case)
        if key not in answers:
            answers[key] = predict(case)
        return answers[key]

    return answer


def _print_skipped(table: Table, rows: bool) -> None:
    if rows:
        for skipped in table.skipped:
            print(f"  skipped     row {skipped.row}: {skipped.reason}")
        return
    for reason, count in Counter(skipped.reason for skipped in table.skipped).items():
        print(f"  skipped     {count}: {reason}")


def _print_report(table: str, cases: Sequence[Case], held: Predictor, rows: bool) -> None:
    lines = lines_of(cases, held.predict)
    print(f"  fit         {held.fitted(table)}")
    for said in summary(lines):
        print(f"  {said}")
    for kind, of in (("assumed", lambda case: case.assumed), ("stand-in", stand_ins)):
        for sentence, count in Counter(sentence for line in lines for sentence in of(line.case)).items():
            print(f"  {kind:11} {count}: {sentence}")
    if rows:
        print(f"  {ROW_HEAD}")
        for line in lines:
            print(f"  {row_text(line)}")


if __name__ == "__main__":
    main()
