"""``Loader``: reads rows of a dataset, in this process or ahead of steps in processes of ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from meshwright.generators import Generators
from meshwright.private import pytree


class Row(NamedTuple):
    """A row to read.

    Attributes:
        number: its number in the dataset.
        shape_only: whether only its shape is needed: the batch has no row for this rank, and gets tensors with 0 rows.
    """

    epoch: int
    number: int
    shape_only: bool = False


@dataclass(frozen=True)
class Loader:
    """Reads the rows of each batch and collates them, in the order of the batches.

    Random numbers that a dataset draws for a row, from torch's, Python's or NumPy's generators, depend on the seed, the epoch
    and the row alone: they are the same in every layout, for any number of workers, and after a resume.

    Args:
        dataset: an object with ``len(dataset)`` and ``dataset[i]``.
        seed: the seed for the dataset's random numbers.
        num_workers: the number of processes that read ahead; 0: this process reads rows when they are needed.
        pinned: whether batches are in pinned memory, from which the host can copy to a GPU without waiting.
    """

    dataset: Any
    seed: int
    num_workers: int
    pinned: bool

    def __call__(self, rows_of_batches: Iterable[list[Row]]) -> Iterator[Any]:
        """Reads batches, each with the given rows. Raises RuntimeError if a reading process dies."""
        rows = _SeededRows(self.dataset, self.seed)
        if not self.num_workers:
            return (_collated(rows.read_here(batch)) for batch in rows_of_batches)
        # With its own generator: the loader draws a seed for its processes, which would take a number of the model's.
        return iter(
            DataLoader(
                rows,
                batch_sampler=rows_of_batches,
                num_workers=self.num_workers,
                collate_fn=_collated,
                pin_memory=self.pinned,
                generator=torch.Generator("cpu"),
            )
        )


class _SeededRows(Dataset[Any]):
    """A dataset that is indexed by ``Row`` s. Seeds the generators before it reads a row."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._random = dataset, seed, Generators(torch.device("cpu"))

    def __getitem__(self, row: Row) -> Any:
        self._random.seed(zlib.crc32(f"{self._seed} {row.epoch} {row.number}".encode()))
        item = self._dataset[row.number]
        return _ShapeOnly(item) if row.shape_only else item

    def read_here(self, rows: list[Row]) -> list[Any]:
        """Reads rows in this process, and restores its generators, which the model uses too."""
        with self._random.kept():
            return [self[row] for row in rows]


class _ShapeOnly(NamedTuple):
    """A row of which only the shape is needed."""

    row: Any


def _collated(rows: list[Any]) -> Any:
    if isinstance(rows[0], _ShapeOnly):
        return pytree.tree_map_only(Tensor, lambda t: t[:0], default_collate([rows[0].row]))
    return default_collate(rows)
