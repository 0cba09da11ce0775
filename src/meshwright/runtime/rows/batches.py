"""``Batches``: a dataset in batches, in an order that no layout changes, and this rank's rows of each batch."""

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

    Args:
        reading: makes a context in which rows are read. It ends the job on all ranks if the dataset raises an error here.

    Attributes:
        batches_taken: the number of batches that the iterator has returned, including those before a resume. After a state is
            loaded, the next iteration begins with this batch.
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
        self.data_size, self.data_index = mesh.data_size, mesh.data_index(rank)
        self.rows, self.num_workers = _row_count(dataset), num_workers
        self.batches_taken, self._reading = start, reading

    def state_dict(self) -> dict[str, int]:
        """The position in the data, and what it belongs to; equal in every layout."""
        return {"taken": self.batches_taken, **self._order_of_rows()}

    def _order_of_rows(self) -> dict[str, int]:
        """What decides which rows a batch has."""
        return {
            "rows": self.rows,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at the position of ``state``.

        Raises:
            PlanError: the state is of other rows, or of another order of them.
        """
        findings = Findings("this data")
        for key, value in self._order_of_rows().items():
            if state.get(key, value) != value:
                fix = f"{key}={state[key]}" if key != "rows" else "load without data="
                findings.add(where=key, given=str(value), required=f"{state[key]}, as when it was saved", fix=fix)
        findings.raise_if_any()
        self.start = self.batches_taken = state["taken"]

    def __len__(self) -> int:
        """The number of batches of all epochs, without those skipped at the start."""
        if self.epochs is None:
            raise TypeError("batches without end have no length")
        return self.epochs * self._per_epoch() - self.start

    def __iter__(self) -> Iterator[Any]:
        first, rank_rows = self.start, self._rows_of_rank(self.start)
        batches: Iterator[Any]
        if _is_table(self.dataset):
            batches = map(self._of_table, rank_rows)
        else:
            batches = Loader(self.dataset, self.seed, self.num_workers, self.device.type != "cpu")(rank_rows)
        for number in itertools.count(first):
            with self._reading():
                batch = next(batches, _END)
            if batch is _END:
                return
            self.batches_taken = number + 1
            yield pytree.tree_map_only(Tensor, lambda t: moved(t, self.device), batch)

    def _rows_of_rank(self, start: int) -> Iterator[list[Row]]:
        """This rank's rows of each batch, from batch number ``start`` on."""
        per_epoch = self._per_epoch()
        if not per_epoch:
            return
        epoch, skipped = divmod(start, per_epoch)
        while self.epochs is None or epoch < self.epochs:
            order = self._order(epoch)  # a tensor: of a large table, a list would be ten times as large
            for i in range(skipped, per_epoch):
                rows = order[i * self.global_batch : (i + 1) * self.global_batch].tolist()
                first, stop = bounds(len(rows), self.data_size)[self.data_index]
                # A short last batch may have no row for this rank: then it gets tensors with 0 rows.
                yield [Row(epoch, row) for row in rows[first:stop]] or [Row(epoch, rows[0], shape_only=True)]
            epoch, skipped = epoch + 1, 0

    def _per_epoch(self) -> int:
        """The number of batches of an epoch."""
        return self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)

    def _order(self, epoch: int) -> Tensor:
        """The numbers of all rows, in the order of an epoch."""
        if not self.shuffle:
            return torch.arange(self.rows, device="cpu")
        generator = torch.Generator("cpu").manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.rows, generator=generator, device="cpu")

    def _of_table(self, rows: list[Row]) -> Any:
        """A batch with rows of a dataset that is a table."""
        numbers = torch.tensor([row.number for row in rows if not row.shape_only], dtype=torch.int64, device="cpu")
        return pytree.tree_map_only(Tensor, lambda t: t[numbers], self.dataset)


def check_global_batch(global_batch: int, mesh: Mesh, microbatches: int) -> None:
    """Raises PlanError if the rows of a step do not divide over data ranks and microbatches."""
    divisor = mesh.data_size * microbatches
    if global_batch % divisor or global_batch < 1:
        nearest = max(round(global_batch / divisor), 1) * divisor
        raise PlanError.of(
            "this run",
            where="global_batch",
            given=str(global_batch),
            required=f"a multiple of {divisor} = {mesh.data_size} data ranks × {microbatches} microbatches",
            fix=f"global_batch={nearest}",
        )


def _is_table(dataset: Any) -> bool:
    """Whether a dataset is a dict or tuple of tensors, each with all rows."""
    return isinstance(dataset, (dict, tuple)) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(dataset))


def _row_count(dataset: Any) -> int:
    if _is_table(dataset):
        return next(len(t) for t in pytree.tree_leaves(dataset) if isinstance(t, Tensor))
    return len(dataset)
