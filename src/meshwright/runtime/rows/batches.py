"""Rows of a dataset, in one global order for every layout, and this rank's share of each batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import Findings, PlanError
from meshwright.mesh import Mesh
from meshwright.private import pytree
from meshwright.runtime.rows.batch import moved, plain
from meshwright.runtime.rows.loader import Loader, Row
from meshwright.submesh import bounds

_END = object()


class Batches:
    """Iterates over this rank's rows of each global batch. See ``Job.batches``.

    ``reading`` makes what is on while rows are read: an error of the dataset's, which one rank alone meets, is to end all.

    Attributes:
        taken: batches handed out, from the first of all; where the next iteration begins, once a state is loaded.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        mesh: Mesh,
        rank: int,
        microbatches: int,
        seed: int,
        epochs: int | None,
        shuffle: bool,
        drop_last: bool,
        start: int,
        device: torch.device,
        uneven: bool = False,
        num_workers: int = 0,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if not uneven:
            check_global_batch(global_batch, mesh, microbatches)
        dataset = plain(dataset)
        self.dataset, self.global_batch, self.seed, self.epochs = dataset, global_batch, seed, epochs
        self.shuffle, self.drop_last, self.start, self.device = shuffle, drop_last, start, device
        self.pieces, self.piece = mesh.data_size, mesh.data_index(rank)
        self.rows, self.num_workers = _rows(dataset), num_workers
        self.taken, self._reading = start, reading

    def state_dict(self) -> dict[str, int]:
        """Where it stands: the same in every layout."""
        return {"taken": self.taken, "seed": self.seed, "global_batch": self.global_batch, "rows": self.rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where another stood.

        Raises:
            PlanError: it went through other rows, or took other numbers of them at a time.
        """
        findings = Findings("this data")
        for key, here in (("rows", self.rows), ("global_batch", self.global_batch), ("seed", self.seed)):
            if state[key] != here:
                fix = f"{key}={state[key]}" if key != "rows" else "load without data="
                findings.add(where=key, given=str(here), required=f"{state[key]}, as when it was saved", fix=fix)
        findings.raise_if_any()
        self.start = self.taken = state["taken"]

    def __len__(self) -> int:
        """Batches of all epochs, less those skipped."""
        if self.epochs is None:
            raise TypeError("batches without end have no length")
        return self.epochs * self._per_epoch() - self.start

    def __iter__(self) -> Iterator[Any]:
        first, shares = self.start, self._shares(self.start)
        batches: Iterator[Any]
        if _is_table(self.dataset):
            batches = map(self._of_table, shares)
        else:
            batches = Loader(self.dataset, self.seed, self.num_workers, self.device.type != "cpu")(shares)
        for number in itertools.count(first):
            with self._reading():
                batch = next(batches, _END)
            if batch is _END:
                return
            self.taken = number + 1
            yield pytree.tree_map_only(Tensor, lambda t: moved(t, self.device), batch)

    def _shares(self, start: int) -> Iterator[list[Row]]:
        """This rank's rows of each batch, from batch ``start`` on."""
        per_epoch = self._per_epoch()
        if not per_epoch:
            return
        epoch, skipped = divmod(start, per_epoch)
        while self.epochs is None or epoch < self.epochs:
            order = self._order(epoch)  # a tensor: of a large table, a list would be ten times as large
            for i in range(skipped, per_epoch):
                rows = order[i * self.global_batch : (i + 1) * self.global_batch].tolist()
                first, stop = bounds(len(rows), self.pieces)[self.piece]
                # A short last batch may have no row for this rank: then tensors without rows, of the right shape.
                yield [Row(epoch, row) for row in rows[first:stop]] or [Row(epoch, rows[0], shape_only=True)]
            epoch, skipped = epoch + 1, 0

    def _per_epoch(self) -> int:
        return self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.rows, device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.rows, generator=generator, device="cpu")

    def _of_table(self, share: list[Row]) -> Any:
        rows = torch.tensor([row.number for row in share if not row.shape_only], dtype=torch.int64, device="cpu")
        return pytree.tree_map_only(Tensor, lambda t: t[rows], self.dataset)


def check_global_batch(global_batch: int, mesh: Mesh, microbatches: int) -> None:
    """Raises PlanError if the rows of a step do not divide over data ranks and microbatches."""
    pieces = mesh.data_size * microbatches
    if global_batch % pieces or global_batch < 1:
        near = max(round(global_batch / pieces), 1) * pieces
        raise PlanError.of(
            "this run",
            where="global_batch",
            given=str(global_batch),
            required=f"a multiple of {pieces} = {mesh.data_size} data ranks × {microbatches} microbatches",
            fix=f"global_batch={near}",
        )


def _is_table(dataset: Any) -> bool:
    return (
        isinstance(dataset, (dict, tuple, list))
        and any(isinstance(t, Tensor) for t in pytree.tree_leaves(dataset))
        and (isinstance(dataset, (dict, tuple)))
    )


def _rows(dataset: Any) -> int:
    if _is_table(dataset):
        return next(len(t) for t in pytree.tree_leaves(dataset) if isinstance(t, Tensor))
    return len(dataset)
