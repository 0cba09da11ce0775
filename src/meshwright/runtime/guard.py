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

Ranks that enter different collectives may wait for each other for ever, or add up different tensors. So in a step that is
compared the ranks of a tp group say which one they enter, before they do.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.calls.placeholder import Placeholder
from meshwright.errors import ReplicaError
from meshwright.layout import REPLICATE, Shard
from meshwright.names import few
from meshwright.private import version, without_modes
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.checksum import checksum
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.fsdp import gathered
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.comm import Ledger
from meshwright.spmd.tensor import GlobalTensor
from meshwright.watch.report import spelled_ranks

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
_FIX_ORDER = (
    "The model takes another path on some ranks. Look for code that asks for its rank, the clock or random numbers that are "
    "not seeded; meshwright check tells what differs from one device"
)

_WRITTEN = "the forward writes to {}, which planning has not seen, and which is sharded: what it writes is lost"
_FIX_WRITTEN = (
    "The optimizer has not stepped. Have the constructor write what is written once; a forward that can be followed without "
    "values may write where it likes"
)

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Column:
    """Sets of ranks, each of which holds the same: rank → the set that it is of, or None."""

    sets: tuple[Hashable, ...]

    def differing(self, values: Sequence[Any], without: Collection[int] = ()) -> list[list[list[int]]]:
        """For each set whose ranks have different values: the ranks of each value, the most ranks first.

        Args:
            without: ranks that are not compared.
        """
        by_set: dict[Hashable, dict[Any, list[int]]] = {}
        for rank, (of, value) in enumerate(zip(self.sets, values, strict=True)):
            if of is not None and rank not in without:
                by_set.setdefault(of, {}).setdefault(value, []).append(rank)
        return [sorted(ranks.values(), key=len, reverse=True) for ranks in by_set.values() if len(ranks) > 1]


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
        self._places = [p for p in sorted(recipe.places.of(groups.rank)) if recipe.places.axis_size(p, "tp") > 1]
        self._activations: list[tuple[int, str, Tensor]] = []
        self._gathered: list[tuple[str, Tensor]] = []
        self._constants: dict[str, Constant] = {}
        if self.every:
            self._columns = _columns(recipe)
            self.begin()
        self._index = {key: i for i, key in enumerate(self._columns)}

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, compares."""
        return self.every > 0 and (step - 1) % self.every == 0

    def begin(self) -> None:
        """Buffers and frozen parameters are as they should be now: values were filled or loaded."""
        if self.every:
            values = [*self._buffers(), *((n, p) for n, _, p in self._parameters() if not p.requires_grad)]
            sums = _listed([checksum(local_tensor(t)) for _, t in values], self._groups.device)
            self._constants = {
                name: Constant(t, version(local_tensor(t)), number)
                for (name, t), number in zip(values, sums, strict=True)
            }

    # --- in a step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """For the time of a step's forwards and backwards: notes what enters and leaves blocks; ranks of a tp group tell
        each other which collective they enter.

        Raises:
            ReplicaError: ranks of a tp group enter different ones. On all of this group.
        """
        self._activations, self._gathered = [], []
        with ExitStack() as stack:
            self._watch_units(stack)
            for place in self._places:
                order = self._ledger.orders[place]
                stack.callback(setattr, order, "meet", None)
                order.meet = self._meeting(step, place)
            # Beside branches and streams a value may still be on its way, and a look at it would wait for it.
            if not self._recipe.streams and not self._recipe.branches:
                for unit in self._recipe.units:
                    if unit.name and unit.place in self._places:
                        module = self._model.get_submodule(unit.name)
                        before, after = self._noting(unit.name, unit.place)
                        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                        stack.callback(module.register_forward_hook(after).remove)
            yield
            for place in reversed(self._places):  # branches before what is around them
                if (meet := self._ledger.orders[place].meet) is not None:
                    meet("the end of the step")

    def _watch_units(self, stack: ExitStack) -> None:
        """Notes what FSDP2 has gathered of each unit, before its forward and after."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                noting = partial(self._note_gathered, names)
                stack.callback(module.register_forward_pre_hook(noting).remove)  # behind FSDP2's own, which gathers
                stack.callback(module.register_forward_hook(noting, prepend=True).remove)

    def _note_gathered(self, names: Mapping[int, str], module: FSDPModule, *_: Any) -> None:
        with without_modes(), torch.no_grad():
            for p, value in gathered(module):
                if id(p) in names:  # the others would all be taken for one
                    self._gathered.append((names[id(p)], checksum(value)))

    def _written(self) -> list[str]:
        """The parameters that forwards have written while they were gathered: what is written is gone with that."""
        seen: dict[str, set[int]] = {}
        for (name, _), number in zip(
            self._gathered, _listed([s for _, s in self._gathered], self._groups.device), strict=True
        ):
            seen.setdefault(name, set()).add(number)
        return sorted(name for name, numbers in seen.items() if len(numbers) > 1)

    def _noting(self, name: str, place: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks of a block."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(f"what enters {name}", place, [*args, *kwargs.values()])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._note(f"what leaves {name}", place, _items(output))

        return before, after

    def _note(self, name: str, place: int, values: Iterable[Any]) -> None:
        """Checksums of the tensors that this rank has whole."""
        with without_modes():  # none of this is the model's
            for t in values:
                is_whole = isinstance(t, Tensor) and not isinstance(t, (GlobalTensor, Placeholder, nn.Parameter))
                if is_whole and t.device == self._groups.device and _plain(t):
                    self._activations.append((place, name, checksum(t)))

    def _meeting(self, step: int, place: int) -> Callable[[str], None]:
        group, ranks = self._groups.meshes[place]["tp"].get_group(), self._recipe.places.line(place, self._groups.rank)

        def meet(collective: str) -> None:
            with without_modes():
                number = torch.tensor([_number(collective)], device=self._groups.device)
                numbers = [torch.empty_like(number) for _ in ranks]
                self.cost.moved("all_gather", number)
                dist.all_gather(numbers, number, group=group)
                if len({int(n) for n in numbers}) > 1:
                    self._meet_no_more()
                    told: list[Any] = [None] * len(ranks)
                    dist.all_gather_object(told, collective, group=group)
                    differs = [f"{spelled_ranks([rank])} enters {text}" for rank, text in zip(ranks, told, strict=True)]
                    lines = ["the order of collectives in a tp group: " + ", ".join(differs)]
                    self.last = Compared(step, {"collectives": 1}, tuple(lines))
                    raise ReplicaError(step, lines, _FIX_ORDER)

        return meet

    def _meet_no_more(self) -> None:
        for place in self._places:
            self._ledger.orders[place].meet = None

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
            written = self._written()
            mine = torch.zeros(count + 1, dtype=torch.int64, device=device)
            mine[count] = len(written)
            if entries.sums:
                factors = torch.tensor([_number(name) | 1 for name in entries.names], device=device)
                at = torch.tensor(entries.columns, device=device)
                mine.index_add_(0, at, torch.stack(entries.sums) * factors)
            for column, _, number in entries.numbers:
                mine[column] += number
            table = [torch.empty_like(mine) for _ in range(self._recipe.mesh.size)]
            self.cost.moved("all_gather", mine)
            dist.all_gather(table, mine)
            rows = torch.stack(table).tolist()
        self._activations, self._gathered = [], []
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
        sums = _listed(entries.sums, self._groups.device)
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
                lines.append(f"{key[1]}: {_told_apart(ranks)}")
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]

    def _entries(self, losses: Sequence[Tensor]) -> Entries:
        entries = Entries()
        steps = _steps_done(self.optimizers)
        for name, line, p in self._parameters():
            if not p.requires_grad and name in self._constants:
                continue
            column = self._index[_key(line, self._recipe)]
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
        for place, name, value in self._activations:
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
        for (name, value), number in zip(sums.items(), _listed(list(sums.values()), self._groups.device), strict=True):
            if name in frozen:
                line, what = frozen[name][0], "parameter"
                key, place = _key(line, self._recipe), line.place if line.tp == REPLICATE else -1
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
        for line in self._recipe.parameters:
            if self._recipe.holds(line, self._groups.rank):
                yield line.name, line, named[line.name]

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of which this rank has a copy that counts."""
        for name, b in self._model.named_buffers():
            if (
                self._recipe.owns_buffer(name, self._groups.rank)
                and not isinstance(b, (Placeholder, GlobalTensor))
                and _plain(b)
            ):
                yield name, b


def _items(output: Any) -> Iterable[Any]:
    """What a module returns, one by one; containers in it (a cache of all layers) are not looked into."""
    if isinstance(output, dict):
        return output.values()
    return output if isinstance(output, (tuple, list)) else [output]


def _plain(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_meta and not t.is_nested and not t.is_quantized


def _told_apart(ranks: Sequence[list[int]]) -> str:
    """In words which ranks differ from the most; ``ranks``: of each value, the most first.

    >>> _told_apart([[0, 2, 3], [1]])
    'rank 1 differs from ranks 0 2 3'
    """
    most, *others = ranks
    verb = "differs" if len(others) == len(others[0]) == 1 else "differ"
    return f"{', '.join(map(spelled_ranks, others))} {verb} from {spelled_ranks(most)}"


def _number(text: str) -> int:
    """A number that follows from a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _listed(sums: Sequence[Tensor], device: torch.device) -> list[int]:
    """Numbers on a device as integers, by one copy."""
    numbers: list[int] = torch.stack([s.to(device) for s in sums]).tolist() if sums else []
    return numbers


def _steps_done(optimizers: Optimizers) -> Mapping[int, Tensor]:
    """id of a parameter → how often an optimizer has updated it, for those that count."""
    steps: dict[int, Tensor] = {}
    for optimizer in [] if optimizers is None else [optimizers] if not isinstance(optimizers, Sequence) else optimizers:
        for p, state in optimizer.state.items():
            if (done := state.get("step")) is not None:
                steps[id(p)] = done if isinstance(done, Tensor) else torch.tensor(done)
    return steps


# --- which ranks hold the same ------------------------------------------------------------------------------------------


def _key(line: ParameterRecipe, recipe: Recipe) -> Key:
    """Parameters with the same key are held alike by the same ranks."""
    owners, shares = recipe.owners(line), (isinstance(line.tp, Shard), recipe.shards(line) > 1)
    return "parameter", line.places, shares, owners if len(owners) > 1 else ()


def _columns(recipe: Recipe) -> dict[Key, Column]:
    """The sets of ranks of each kind, in an order that is the same on every rank."""
    columns: dict[Key, Column] = {}
    ranks, places = range(recipe.mesh.size), recipe.places
    for line in recipe.parameters:
        key = _key(line, recipe)
        if key not in columns:
            columns[key] = Column(tuple(_set_of(line, recipe, rank) for rank in ranks))
    for place in range(len(places)):
        at = [places.at(rank, place) for rank in ranks]
        columns["buffer", place] = Column(tuple(None if c is None else c.pp for c in at))
        if places.axis_size(place, "tp") > 1:
            columns["line", place] = Column(
                tuple(None if c is None else (c.pp, c.dp_replicate, c.dp_shard) for c in at)
            )
    return columns


def _set_of(line: ParameterRecipe, recipe: Recipe, rank: int) -> Hashable:
    """Ranks with the same answer hold the same part of a parameter; None: none of it, or it is a stage's that may not."""
    several = len(recipe.owners(line)) > 1
    if several and not recipe.holds(line, rank):
        return None
    if len(line.places) > 1:  # each has it whole
        stage = recipe.mesh.coordinate(rank).get("pp", 0)
        held = any(recipe.places.at(rank, place) is not None for place in line.places)
        return (-1 if several else stage) if held else None
    at = recipe.places.at(rank, line.place)
    if at is None:
        return None
    tp = at.tp if isinstance(line.tp, Shard) else -1
    shard = at.dp_shard if recipe.shards(line) > 1 else -1
    return -1 if several else at.pp, tp, shard
