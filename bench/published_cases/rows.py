"""Rows of a CSV file: cells by column, read as what they should be; why a row cannot be read is said, once, by ``Unusable``."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_NO = frozenset(["", "0", "false", "no", "n", "none"])


class Unusable(Exception):
    """Why no case is made of a row, for a person."""


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        table: the file's name without ``.csv``.
        number: from 1, without the header.
        cells: by column, as text.
    """

    table: str
    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell that says something. Raises Unusable where the column is missing or the cell empty."""
        if column not in self.cells:
            raise Unusable(f"the table has no column {column}")
        if not self.cells[column]:
            raise Unusable(f"{column} is not stated")
        return self.cells[column]

    def stated(self, column: str) -> bool:
        """Whether there is such a column and its cell says something."""
        return bool(self.cells.get(column))

    def whole(self, column: str) -> int:
        """A cell as a whole number. Raises Unusable."""
        number = self.number_of(column)
        if number != int(number):
            raise Unusable(f"{column} is {self.cells[column]!r}, not a whole number")
        return int(number)

    def number_of(self, column: str) -> float:
        """A cell as a number. Raises Unusable."""
        text = self.text(column)
        try:
            return float(text)
        except ValueError:
            raise Unusable(f"{column} is {text!r}, not a number") from None

    def flag(self, column: str) -> bool:
        """Whether a cell says yes; an empty one says no."""
        return self.cells.get(column, "").lower() not in _NO

    def one_of(self, column: str, known: Mapping[str, _T]) -> _T:
        """What a cell's word stands for. Raises Unusable for a word that is not known."""
        text = self.text(column)
        if text not in known:
            raise Unusable(f"{column} is {text!r}, which is not modelled")
        return known[text]


def read_rows(folder: Path, table: str) -> Iterator[Row]:
    """The rows of ``folder/table.csv``. Raises FileNotFoundError."""
    with (folder / f"{table}.csv").open(newline="", encoding="utf-8") as lines:
        for number, cells in enumerate(csv.DictReader(lines), 1):
            yield Row(table, number, {k: (v or "").strip() for k, v in cells.items() if isinstance(k, str)})
