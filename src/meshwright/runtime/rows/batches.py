"""Rows of a dataset, in one global order for every layout, and this rank's share of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshwright.errors import Findings
from meshwright.mesh import Mesh
from meshwright.private import pytree
from meshwright.runtime.rows.batch import plain
from meshwright.submesh import bounds


class Batches:
    """Iterates over this rank's rows of each global batch. See ``Job.batches``.

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
    ) -> None:
        if not uneven:
            check_global_batch(global_batch, mesh, microbatches)
        dataset = plain(dataset)
        self.dataset, self.global_batch, self.seed, self.epochs = dataset, global_batch, seed, epochs
        self.shuffle, self.drop_last, self.start, self.device = shuffle, drop_last, start, device
        self.pieces, self.piece = mesh.data_size, mesh.data_index(rank)
        self.rows = _rows(dataset)
        self.taken = start

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
        number, epoch = 0, 0
        while self.epochs is None or epoch < self.epochs:
            order = self._order(epoch)
            for i in range(self._per_epoch()):
                if number >= self.start:
                    self.taken = number + 1
                    yield self._share(order[i * self.global_batch : (i + 1) * self.global_batch])
                number += 1
            epoch += 1

    def _per_epoch(self) -> int:
        return self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)

    def _order(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.rows)
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))

    def _share(self, rows: Tensor) -> Any:
        start, stop = bounds(len(rows), self.pieces)[self.piece]
        mine = rows[start:stop]
        if _is_table(self.dataset):
            batch = pytree.tree_map_only(Tensor, lambda t: t[mine], self.dataset)
        elif len(mine):
            batch = default_collate([self.dataset[int(i)] for i in mine])
        else:  # no row for this rank in a short last batch: tensors without rows, of the right shape
            batch = pytree.tree_map_only(Tensor, lambda t: t[:0], default_collate([self.dataset[0]]))
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)


def check_global_batch(global_batch: int, mesh: Mesh, microbatches: int) -> None:
    """Raises PlanError where the rows of a step do not divide over data ranks and microbatches."""
    pieces = mesh.data_size * microbatches
    if global_batch % pieces or global_batch < 1:
        findings = Findings("this run")
        near = max(round(global_batch / pieces), 1) * pieces
        findings.add(
            where="global_batch",
            given=str(global_batch),
            required=f"a multiple of {pieces} = {mesh.data_size} data ranks × {microbatches} microbatches",
            fix=f"global_batch={near}",
        )
        findings.raise_if_any()


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
