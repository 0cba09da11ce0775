"""``Guard``: do ranks that should hold the same bits, and do the same, do so? Compared every so many steps.

    what                                                            equal on all ranks that
    a parameter, and how often an optimizer has updated it          hold the same part of it (dp, tp, ties over stages)
    a buffer, or frozen parameter, that no forward writes           hold it
    a buffer that forwards write, which may follow from rows        run the same rows: a tp group
    what enters and leaves a block as a whole tensor; the loss      run the same rows: a tp group
    the collectives of tensor parallelism, in their order           are of a tp group

And of each rank: what FSDP2 has gathered is after a forward what it was before. What a forward writes there is lost; planning
keeps what is written out of units, if it can follow the forward.

Each rank has one number for each of these sets of ranks: a sum of the checksums of all that it holds. The numbers of all
ranks are gathered at the end of the step, a few on each; only if some differ do ranks tell each other what stands behind
them. So a difference is one error, the same on all ranks.
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

from meshwright.calls.placeholder import Placeholder
from meshwright.errors import ReplicaError
from meshwright.layout import REPLICATE
from meshwright.names import few
from meshwright.private import version, without_modes
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.checksum import checksum
from meshwright.runtime.groups import Groups
from meshwright.runtime.replicas import Column, Key, columns_of, key_of, told_apart
from meshwright.runtime.step_notes import StepNotes, is_plain, listed, number_of
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.comm import Ledger
from meshwright.spmd.tensor import GlobalTensor

if TYPE_CHECKING:
    from meshwright.checkpoint.contents import Optimizers

_KINDS = {
    "parameter ": "parameters", "buffer ": "buffers", "steps of the optimizer": "optimizer steps",
    "what enters ": "activations", "what leaves ": "activations", "loss of ": "losses", "the order ": "collectives",
}  # fmt: skip
_SHOWN = 8  # differences that an error tells
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
class Compared:
    """What came of a comparison; the same on every rank but for ``counts``.

    Attributes:
        step: after which it was made.
        counts: how many parameters, buffers, activations … this rank had to compare, by kind.
        differences: in words; empty: equal.
    """

    step: int
    counts: Mapping[str, int]
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constant:
    """A buffer, or frozen parameter, as it was when values were filled or loaded; its checksum then."""

    value: Tensor
    version: int | None
    checksum: int

    def written(self, now: Tensor) -> bool:
        """Whether something has written to it since, or put another tensor in its place."""
        return now is not self.value or version(local_tensor(now)) != self.version


@dataclass
class Entries:
    """What a rank holds, each with its column and its checksum.

    Attributes:
        numbers: of what is known as a number already.
        changed: buffers and frozen parameters that were written; and, of the others, those that have other bits than in the
            beginning.
    """

    columns: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    numbers: list[tuple[int, str, int]] = field(default_factory=list)
    changed: set[tuple[int, str]] = field(default_factory=set)

    def add(self, column: int, name: str, value: Tensor) -> None:
        self.columns.append(column)
        self.names.append(name)
        self.sums.append(value)

    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        names = [*self.names, *(name for _, name, _ in self.numbers)]
        return dict(
            Counter(next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), name) for name in names)
        )


class Guard:
    """Compares what ranks of a job should have in common.

    Args:
        every: steps from one comparison to the next; the first step compares. 0: never.

    Attributes:
        optimizers: whose counts of steps are compared as well.
        cost: the all-gathers of comparisons: calls, and bytes that this rank puts in.
        last: what came of the last comparison; None before the first.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, ledger: Ledger, every: int) -> None:
        self._model, self._recipe, self._groups, self._ledger = model, recipe, groups, ledger
        self.every = every if recipe.mesh.size > 1 else 0
        self.optimizers: Optimizers = None
        self.cost = Ledger()
        self.last: Compared | None = None
        self._columns: dict[Key, Column] = {}
        self._new_notes = partial(StepNotes, model, recipe, groups, ledger, self.cost)
        self._noted = self._new_notes()
        self._places = self._noted.places
        self._constants: dict[str, Constant] = {}
        if self.every:
            self._columns = columns_of(recipe)
            self.begin()
        self._index = {key: i for i, key in enumerate(self._columns)}

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, compares."""
        return self.every > 0 and (step - 1) % self.every == 0

    def begin(self) -> None:
        """Buffers and frozen parameters are as they should be now: values were filled or loaded."""
        if self.every:
            values = [*self._buffers(), *((n, p) for n, _, p in self._parameters() if not p.requires_grad)]
            sums = listed([checksum(local_tensor(t)) for _, t in values], self._groups.device)
            self._constants = {
                name: Constant(t, version(local_tensor(t)), number)
                for (name, t), number in zip(values, sums, strict=True)
            }

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """For the time of a step's forwards and backwards: notes what the step does.

        Raises:
            ReplicaError: ranks of a tp group enter different collectives. On all of this group.
        """
        self._noted = self._new_notes()
        try:
            with self._noted.watching(step):
                yield
        except ReplicaError as error:
            self.last = Compared(step, {"collectives": 1}, error.differences)
            raise

    # --- at its end ---------------------------------------------------------------------------------------------------

    def compare(self, step: int, losses: Sequence[Tensor] = ()) -> None:
        """Compares everything. Collective over all ranks.

        Args:
            step: as errors call it.
            losses: of this rank's microbatches, on the ranks that have them.

        Raises:
            ReplicaError: something differs. On every rank.
        """
        with torch.no_grad(), without_modes():
            entries = self._entries(losses)
            device, count = self._groups.device, len(self._columns)
            written = self._noted.written()
            mine = torch.zeros(count + 1, dtype=torch.int64, device=device)
            mine[count] = len(written)
            if entries.sums:
                factors = torch.tensor([number_of(name) | 1 for name in entries.names], device=device)
                at = torch.tensor(entries.columns, device=device)
                mine.index_add_(0, at, torch.stack(entries.sums) * factors)
            for column, _, number in entries.numbers:
                mine[column] += number
            table = [torch.empty_like(mine) for _ in range(self._recipe.mesh.size)]
            self.cost.moved("all_gather", mine)
            dist.all_gather(table, mine)
            rows = torch.stack(table).tolist()
        self._noted = self._new_notes()
        if any(row[count] for row in rows):
            everywhere: list[Any] = [None] * self._recipe.mesh.size
            dist.all_gather_object(everywhere, written)
            lines = [_WRITTEN.format(few(sorted({n for names in everywhere for n in names})))]
            self.last = Compared(step, entries.counts(), tuple(lines))
            raise ReplicaError(step, lines, _FIX_WRITTEN)
        differs = [i for i, c in enumerate(self._columns.values()) if c.differing([row[i] for row in rows])]
        lines = self._differences(entries, differs) if differs else []
        self.last = Compared(step, entries.counts(), tuple(lines))
        if lines:
            raise ReplicaError(step, lines, _FIX.format(_ON_GPU if device.type == "cuda" else ""))

    def _differences(self, entries: Entries, differs: Sequence[int]) -> list[str]:
        """What differs in some columns, in words; the same on every rank. Collective over all ranks."""
        sums = listed(entries.sums, self._groups.device)
        mine = {
            (column, name): value
            for column, name, value in [*zip(entries.columns, entries.names, sums, strict=True), *entries.numbers]
            if column in differs
        }
        told: list[tuple[dict[tuple[int, str], int], set[tuple[int, str]]]] = [({}, set())] * self._recipe.mesh.size
        dist.all_gather_object(told, (mine, entries.changed))
        columns, lines = list(self._columns.values()), list[str]()
        for key in dict.fromkeys(key for values, _ in told for key in values):
            if all(key in changed for values, changed in told if key in values):
                continue  # all ranks have changed it, from their own rows perhaps
            written = [rank for rank, (values, changed) in enumerate(told) if key in changed and key not in values]
            for ranks in columns[key[0]].differing([values.get(key) for values, _ in told], written):
                lines.append(f"{key[1]}: {told_apart(ranks)}")
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]

    def _entries(self, losses: Sequence[Tensor]) -> Entries:
        entries = Entries()
        steps = _steps_done(self.optimizers)
        for name, line, p in self._parameters():
            if not p.requires_grad and name in self._constants:
                continue
            column = self._index[key_of(line, self._recipe)]
            entries.add(column, f"parameter {name}", checksum(local_tensor(p)))
            if (done := steps.get(id(p))) is not None:
                entries.add(column, f"steps of the optimizer, of parameter {name}", checksum(done.to(p.device)))
        self._add_constants(entries)
        for place in self._places:
            column = self._index["line", place]
            entries.numbers.append(
                (column, "the order of collectives since the start", self._ledger.orders[place].number)
            )
        seen: dict[str, int] = {}
        for place, name, value in self._noted.activations:
            seen[name] = seen.get(name, 0) + 1
            entries.add(self._index["line", place], f"{name} (tensor {seen[name]} of the step)", value)
        if 0 in self._places:
            for i, loss in enumerate(losses, 1):
                entries.add(self._index["line", 0], f"loss of microbatch {i}", checksum(loss))
        return entries

    def _add_constants(self, entries: Entries) -> None:
        """Buffers and frozen parameters. Those that forwards write may follow from rows, or from random numbers that differ
        between data ranks, so they are compared over tp alone."""
        frozen = {
            name: (line, p) for name, line, p in self._parameters() if not p.requires_grad and name in self._constants
        }
        values = dict(self._buffers()) | {name: p for name, (_, p) in frozen.items()}
        sums = {name: checksum(local_tensor(t)) for name, t in values.items()}
        for (name, value), number in zip(sums.items(), listed(list(sums.values()), self._groups.device), strict=True):
            if name in frozen:
                line, what = frozen[name][0], "parameter"
                key, place = key_of(line, self._recipe), line.place if line.tp == REPLICATE else -1
            else:
                what, place = "buffer", self._recipe.buffer_place(name)
                key = "buffer", place
            before = self._constants.get(name)
            written = before is None or before.written(values[name])
            if written or (before is not None and before.checksum != number):
                entries.changed.add((self._index[key], f"{what} {name}"))
            if not written:
                entries.add(self._index[key], f"{what} {name}", value)
            elif place in self._places:
                entries.add(self._index["line", place], f"{what} {name}", value)

    def _parameters(self) -> Iterator[tuple[str, ParameterRecipe, nn.Parameter]]:
        """(name, line of the recipe, parameter) of each one that this rank holds."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for line in self._recipe.held_by(self._groups.rank):
            yield line.name, line, named[line.name]

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of which this rank has a copy that counts."""
        for name, b in self._model.named_buffers():
            if (
                self._recipe.owns_buffer(name, self._groups.rank)
                and not isinstance(b, (Placeholder, GlobalTensor))
                and is_plain(b)
            ):
                yield name, b


def _steps_done(optimizers: Optimizers) -> Mapping[int, Tensor]:
    """id of a parameter → how often an optimizer has updated it, for those that count."""
    steps: dict[int, Tensor] = {}
    for optimizer in [] if optimizers is None else [optimizers] if not isinstance(optimizers, Sequence) else optimizers:
        for p, state in optimizer.state.items():
            if (done := state.get("step")) is not None:
                steps[id(p)] = done if isinstance(done, Tensor) else torch.tensor(done)
    return steps
