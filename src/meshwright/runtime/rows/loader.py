"""Reading rows of a dataset: here, or ahead of the steps in processes of ``torch.utils.data.DataLoader``."""

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
    """A row of the order: of which epoch, and which of the dataset. ``shape_only``: of a share that has no row."""

    epoch: int
    number: int
    shape_only: bool = False


@dataclass(frozen=True)
class Loader:
    """Gives the collated rows of each share, in the order of the shares.

    Random numbers that a dataset draws for a row, from torch's, Python's or NumPy's generators, follow from the seed, the
    epoch and the row: they are the same in every layout, for any number of workers, and after a resume.

    Args:
        dataset: with ``len`` and ``dataset[i]``.
        seed: of the numbers that it draws.
        num_workers: how many processes read ahead; 0: rows are read here, when they are asked for.
        pinned: whether batches are in pinned memory, from which a copy to a GPU does not make the host wait.
    """

    dataset: Any
    seed: int
    num_workers: int
    pinned: bool

    def __call__(self, shares: Iterable[list[Row]]) -> Iterator[Any]:
        """A batch for each share. Raises RuntimeError if a process that reads ends."""
        rows = _Rows(self.dataset, self.seed)
        if not self.num_workers:
            return (_collated(rows.read_here(share)) for share in shares)
        # A generator of its own: the loader draws a seed for its processes, and from torch's it would be the model's next.
        return iter(
            DataLoader(
                rows,
                batch_sampler=shares,
                num_workers=self.num_workers,
                collate_fn=_collated,
                pin_memory=self.pinned,
                generator=torch.Generator("cpu"),
            )
        )


class _Rows(Dataset[Any]):
    """A dataset whose rows are asked for as ``Row``s."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed, self._random = dataset, seed, Generators(torch.device("cpu"))

    def __getitem__(self, row: Row) -> Any:
        self._random.seed(zlib.crc32(f"{self._seed} {row.epoch} {row.number}".encode()))
        item = self._dataset[row.number]
        return _ShapeOnly(item) if row.shape_only else item

    def read_here(self, share: list[Row]) -> list[Any]:
        """Rows, in the process whose generators are the model's, too."""
        with self._random.kept():
            return [self[row] for row in share]


class _ShapeOnly(NamedTuple):
    """A row that shows what a share without rows is like."""

    row: Any


def _collated(rows: list[Any]) -> Any:
    if isinstance(rows[0], _ShapeOnly):
        return pytree.tree_map_only(Tensor, lambda t: t[:0], default_collate([rows[0].row]))
    return default_collate(rows)
