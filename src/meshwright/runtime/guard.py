"""``Guard``: checks every so many steps that replicas are bitwise equal.

    tensor                                                          must be equal on all ranks that
    a parameter, and the optimizer's count of its updates           have the same part of it (dp, tp, ties over stages)
    a buffer, or frozen parameter, that no forward writes           have it
    a buffer that forwards write (it may depend on rows)            run the same rows: a tp group
    unsharded inputs and outputs of a block; the loss               run the same rows: a tp group
    the order of the collectives of tensor parallelism              are in the same tp group (with ``OrderCheck``)
    the order in which FSDP2 gathers units (``OrderCheck`` alone)   are on the same data axis

It also checks on each rank that a forward leaves the parameters that FSDP2 has gathered unchanged: writes to them are
lost. Planning keeps parameters that are written out of FSDP2 units, if it can trace the forward.

For each of these sets of ranks (a ``Column``) a rank adds up the checksums of all its tensors. At the end of the step
these few sums are gathered. Only if sums differ do ranks exchange the checksum of each tensor. A difference raises the
same error on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import ReplicaError
from meshwright.layout import REPLICATE
from meshwright.names import few
from meshwright.private import version, without_modes
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.checksum import checksum
from meshwright.runtime.groups import Groups
from meshwright.runtime.order_check import OrderCheck
from meshwright.runtime.replicas import (
    Column,
    Key,
    add_by_column,
    buffers_of,
    columns_of,
    describe_difference,
    key_of,
    parameters_of,
)
from meshwright.runtime.step_notes import StepNotes, listed
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.comm import Ledger

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers

# the beginning of a tensor's name → the kind that it is counted as
_KINDS = {
    "parameter ": "parameters", "buffer ": "buffers", "steps of the optimizer": "optimizer steps",
    "what enters ": "activations", "what leaves ": "activations", "loss of ": "losses", "the order ": "collectives",
}  # fmt: skip
# differences that an error lists; one cause often makes all later tensors differ, and the first ones tell most
_SHOWN = 8
_ON_GPU = " On a GPU, torch.use_deterministic_algorithms(True) leaves out kernels whose sums depend on timing."
_FIX = (
    "The optimizer has not stepped. A checkpoint has each value once: to go on, resume from the last one, or save one and "
    "load it, which makes ranks equal again. If it comes back, look for code that asks for its rank, the clock or random "
    "numbers that are not seeded.{} verify: 0 in the plan stops comparing"
)

_WRITTEN = "the forward writes to {}, which planning has not seen, and which is sharded: what it writes is lost"
_FIX_WRITTEN = (
    "The optimizer has not stepped. Have the constructor write what is written once; a forward that can be followed without "
    "values may write where it likes"
)


@dataclass(frozen=True)
class ReplicaComparison:
    """The result of a comparison; the same on every rank, except ``counts``.

    Attributes:
        step: the step after which it was made.
        counts: kind → how many parameters, buffers, activations … of this rank were compared.
        differences: in words; empty if all is equal.
    """

    step: int
    counts: Mapping[str, int]
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constant:
    """A buffer, or frozen parameter, as it was when values were filled or loaded.

    Attributes:
        version: its version counter then; ``checksum``: its checksum then.
    """

    value: Tensor
    version: int | None
    checksum: int

    def written(self, current: Tensor) -> bool:
        """Whether it was written since, or replaced; ``current``: the tensor that has its name now."""
        return current is not self.value or version(local_tensor(current)) != self.version


@dataclass
class LocalChecksums:
    """The checksums of all tensors of a rank that are compared.

    Attributes:
        columns: for each tensor, the number of its column.
        names: for each tensor, its name.
        sums: for each tensor, its checksum, on the device.
        numbers: (column, name, number), for numbers that the host has already.
        changed: (column, name) of buffers and frozen parameters that were written, or have other bits than in the beginning.
    """

    columns: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    numbers: list[tuple[int, str, int]] = field(default_factory=list)
    changed: set[tuple[int, str]] = field(default_factory=set)

    def add(self, column: int, name: str, checksum: Tensor) -> None:
        """Adds a tensor."""
        self.columns.append(column)
        self.names.append(name)
        self.sums.append(checksum)

    def counts(self) -> dict[str, int]:
        """Kind of tensor → number of tensors."""
        names = [*self.names, *(name for _, name, _ in self.numbers)]
        return dict(
            Counter(next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), name) for name in names)
        )


class Guard:
    """Compares replicas between the ranks of a job.

    Args:
        ledger: counts the collectives of tensor parallelism, whose order is compared.
        every: the number of steps from one comparison to the next; the first step compares. 0: never.

    Attributes:
        optimizers: their counts of updates are compared too.
        cost: counts the all-gathers of comparisons, and the bytes that this rank puts into them.
        last: the result of the last comparison; None before the first.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, ledger: Ledger, every: int) -> None:
        self._model, self._recipe, self._groups, self._ledger = model, recipe, groups, ledger
        self.every = every if recipe.mesh.size > 1 else 0
        self.optimizers: Optimizers = None
        self.cost = Ledger()
        self.last: ReplicaComparison | None = None
        self._columns: dict[Key, Column] = {}
        self._places = [p for p in sorted(recipe.places.of(groups.rank)) if recipe.places.axis_size(p, "tp") > 1]
        self._new_notes = partial(StepNotes, model, recipe, groups, self._places)
        self._order_check = OrderCheck(model, recipe, groups, self._places, ledger, self.cost)
        self._notes = self._new_notes()  # of the running step
        self._constants: dict[str, Constant] = {}
        if self.every:
            self._columns = columns_of(recipe)
            self.begin()
        self._index = {key: i for i, key in enumerate(self._columns)}

    def due(self, step: int) -> bool:
        """Whether replicas are compared after this step; ``step``: counted from 1."""
        return self.every > 0 and (step - 1) % self.every == 0

    def begin(self) -> None:
        """Values were filled or loaded: takes checksums of buffers and frozen parameters, for later comparisons."""
        if self.every:
            tensors = [*self._buffers(), *((n, p) for n, _, p in self._parameters() if not p.requires_grad)]
            sums = listed([checksum(local_tensor(t)) for _, t in tensors], self._groups.device)
            self._constants = {
                name: Constant(t, version(local_tensor(t)), number)
                for (name, t), number in zip(tensors, sums, strict=True)
            }

    @contextmanager
    def ordered(self, step: int) -> Iterator[None]:
        """A context for forwards and backwards in a step that is compared: ranks compare the order of collectives.

        Raises:
            ReplicaError: ranks of a group enter different collectives. On all ranks of this group.
        """
        try:
            with self._order_check.watching(step):
                yield
        except ReplicaError as error:
            self.last = ReplicaComparison(step, {"collectives": 1}, error.differences)
            raise

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """``ordered``, for the forwards and backwards of the step itself; also records what they do."""
        self._notes = self._new_notes()
        with self.ordered(step), self._notes.watching():
            yield

    # --- at the end of a step -----------------------------------------------------------------------------------------

    def compare(self, step: int, losses: Sequence[Tensor] = ()) -> None:
        """Compares all replicas. Collective over all ranks.

        Args:
            step: as errors call it.
            losses: the losses of this rank's microbatches, on the ranks that have them.

        Raises:
            ReplicaError: something differs. On every rank.
        """
        with torch.no_grad(), without_modes():
            local = self._local_checksums(losses)
            device, count = self._groups.device, len(self._columns)
            written = self._notes.written()
            sums = torch.zeros(count + 1, dtype=torch.int64, device=device)  # of each column; and how many were written
            sums[count] = len(written)
            add_by_column(sums, local.columns, local.names, local.sums)
            for column, _, number in local.numbers:
                sums[column] += number
            gathered = [torch.empty_like(sums) for _ in range(self._recipe.mesh.size)]
            self.cost.moved("all_gather", sums)
            dist.all_gather(gathered, sums)
            rank_sums = torch.stack(gathered).tolist()
        self._notes = self._new_notes()
        if any(sums_of_rank[count] for sums_of_rank in rank_sums):
            everywhere: list[Any] = [None] * self._recipe.mesh.size
            dist.all_gather_object(everywhere, written)
            lines = [_WRITTEN.format(few(sorted({n for names in everywhere for n in names})))]
            self.last = ReplicaComparison(step, local.counts(), tuple(lines))
            raise ReplicaError(step, lines, _FIX_WRITTEN)
        columns = enumerate(self._columns.values())
        differing = [i for i, column in columns if column.differing([sums_of_rank[i] for sums_of_rank in rank_sums])]
        lines = self._differences(local, differing) if differing else []
        self.last = ReplicaComparison(step, local.counts(), tuple(lines))
        if lines:
            raise ReplicaError(step, lines, _FIX.format(_ON_GPU if device.type == "cuda" else ""))

    def _differences(self, local: LocalChecksums, differing: Sequence[int]) -> list[str]:
        """The differences in some columns, in words; the same on every rank. Collective over all ranks.

        Args:
            differing: the numbers of the columns.
        """
        sums = listed(local.sums, self._groups.device)
        checksums = {
            (column, name): value
            for column, name, value in [*zip(local.columns, local.names, sums, strict=True), *local.numbers]
            if column in differing
        }
        # of each rank: (column, name) → checksum; and which were changed
        everywhere: list[tuple[dict[tuple[int, str], int], set[tuple[int, str]]]]
        everywhere = [({}, set())] * self._recipe.mesh.size
        dist.all_gather_object(everywhere, (checksums, local.changed))
        columns, lines = list(self._columns.values()), list[str]()
        for key in dict.fromkeys(key for values, _ in everywhere for key in values):
            if all(key in changed for values, changed in everywhere if key in values):
                continue  # changed on all ranks: it may depend on each rank's rows
            written = [
                rank for rank, (values, changed) in enumerate(everywhere) if key in changed and key not in values
            ]
            for ranks in columns[key[0]].differing([values.get(key) for values, _ in everywhere], written):
                lines.append(f"{key[1]}: {describe_difference(ranks)}")
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]

    def _local_checksums(self, losses: Sequence[Tensor]) -> LocalChecksums:
        """The checksums of everything that this rank compares."""
        local = LocalChecksums()
        steps = _update_counts(self.optimizers)
        for name, line, p in self._parameters():
            if not p.requires_grad and name in self._constants:
                continue
            column = self._index[key_of(line, self._recipe)]
            local.add(column, f"parameter {name}", checksum(local_tensor(p)))
            if (updates := steps.get(id(p))) is not None:
                local.add(column, f"steps of the optimizer, of parameter {name}", checksum(updates.to(p.device)))
        self._add_constants(local)
        for place in self._places:
            column = self._index["line", place]
            local.numbers.append(
                (column, "the order of collectives since the start", self._ledger.orders[place].number)
            )
        seen: dict[str, int] = {}
        for place, name, value in self._notes.activations:
            seen[name] = seen.get(name, 0) + 1
            local.add(self._index["line", place], f"{name} (tensor {seen[name]} of the step)", value)
        if 0 in self._places:
            for i, loss in enumerate(losses, 1):
                local.add(self._index["line", 0], f"loss of microbatch {i}", checksum(loss))
        return local

    def _add_constants(self, local: LocalChecksums) -> None:
        """Adds buffers and frozen parameters. Those that forwards write may depend on rows, or on random numbers that
        differ between data ranks: they are compared within tp groups only."""
        frozen = {
            name: (line, p) for name, line, p in self._parameters() if not p.requires_grad and name in self._constants
        }
        values = dict(self._buffers()) | {name: p for name, (_, p) in frozen.items()}
        sums = {name: checksum(local_tensor(t)) for name, t in values.items()}
        for (name, value), number in zip(sums.items(), listed(list(sums.values()), self._groups.device), strict=True):
            if name in frozen:
                line, kind = frozen[name][0], "parameter"
                key, place = key_of(line, self._recipe), line.place if line.tp == REPLICATE else -1
            else:
                kind, place = "buffer", self._recipe.buffer_place(name)
                key = "buffer", place
            initial = self._constants.get(name)
            written = initial is None or initial.written(values[name])
            if written or (initial is not None and initial.checksum != number):
                local.changed.add((self._index[key], f"{kind} {name}"))
            if not written:
                local.add(self._index[key], f"{kind} {name}", value)
            elif place in self._places:
                local.add(self._index["line", place], f"{kind} {name}", value)

    def _parameters(self) -> Iterator[tuple[str, ParameterRecipe, nn.Parameter]]:
        return parameters_of(self._model, self._recipe, self._groups.rank)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        return buffers_of(self._model, self._recipe, self._groups.rank)


def _update_counts(optimizers: Optimizers) -> Mapping[int, Tensor]:
    """id of a parameter → how often its optimizer has updated it, for optimizers with a ``step`` in their state."""
    steps: dict[int, Tensor] = {}
    for optimizer in [] if optimizers is None else [optimizers] if not isinstance(optimizers, Sequence) else optimizers:
        for p, state in optimizer.state.items():
            if (count := state.get("step")) is not None:
                steps[id(p)] = count if isinstance(count, Tensor) else torch.tensor(count)
    return steps
