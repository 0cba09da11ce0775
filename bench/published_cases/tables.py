"""All tables: which file is read by which function, and which files are no measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from published_cases import fsdp, internevo, megatron, torchtitan
from published_cases.case import Case, Skipped
from published_cases.rows import Row, Unusable, read_rows


def _analytic(row: Row) -> Case:
    raise Unusable("analytic, not measured: tests/predict/test_analytic.py holds it")


def _claims(row: Row) -> Case:
    raise Unusable("a claim about a ratio; neither the hardware nor the model's shape is stated")


READERS: dict[str, Callable[[Row], Case]] = {
    "megatron_sc21_table1": megatron.sc21,
    "vtrain_single": megatron.vtrain,
    "bigscience_tr3m_v100": megatron.tr3m,
    "mosaic_a100": fsdp.mosaic,
    "fms_fsdp_a100_h100": fsdp.fms,
    "yafsdp_a100": fsdp.yafsdp,
    "torchtitan_a100_2024": torchtitan.a100,
    "torchtitan_other": torchtitan.other,
    "torchtitan_prs_h100": torchtitan.pull_requests,
    "internevo_a100": internevo.internevo,
    "korthikanti_memory_analytic": _analytic,
    "seed_2d": _claims,
}


@dataclass(frozen=True)
class Table:
    """A file as it was read: every row is a case or is skipped with a reason."""

    name: str
    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...]


def read_table(folder: Path, name: str) -> Table:
    """Reads one file. A row that says the same as an earlier one is skipped.

    Raises:
        FileNotFoundError: there is no such file.
        KeyError: no reader knows the table.
    """
    read, cases, skipped = READERS[name], [], []
    first: dict[Case, int] = {}
    for row in read_rows(folder, name):
        try:
            case = read(row)
            unnamed = replace(case, row="")
            if unnamed in first:
                raise Unusable(f"repeats row {first[unnamed]}")
            first[unnamed] = row.number
            cases.append(case)
        except Unusable as why:
            skipped.append(Skipped(name, str(row.number), str(why)))
    return Table(name, tuple(cases), tuple(skipped))


def unread(folder: Path) -> list[str]:
    """The CSV files of a folder that no reader knows."""
    return sorted(file.stem for file in folder.glob("*.csv") if file.stem not in READERS)
