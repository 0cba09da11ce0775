"""``Pieces``: what a block of a model takes, and what the rest takes, with so many ranks of tp; linear in a microbatch's rows.

Three rehearsals say it: of few blocks with two rows, of one block more, and of few blocks with four rows. So a search can tell
thousands of plans apart by arithmetic alone (``estimate.py``).

    few blocks, two rows     first  b b    last       b = (f(4) - f(2)) / 2,  a = f(2) - 2 b   of each function
    one block more           first  b b b  last       the function list of a block is what is more here
    few blocks, four rows    first  b b    last

Not one row: a dim of size 1 needs no copy, where one of another size does.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

from meshwright.deferred import Build
from meshwright.errors import PlanError
from meshwright.graph import INTENSITY
from meshwright.hardware.collectives import CollectiveKind, collective, neighbours
from meshwright.hardware.profile import Profile, Work
from meshwright.plan import Plan
from meshwright.prediction.blocks import Folding, folding_of
from meshwright.prediction.clock import last_step
from meshwright.prediction.copies import copies_of
from meshwright.prediction.memory import UNREDUCED, UNSHARDED, levels_of
from meshwright.prediction.passing import pruned
from meshwright.prediction.rehearsal import MakeOptimizer, Rehearsal, rehearsal_of, rehearse
from meshwright.prediction.trace import Collective, Event, Op, Trace
from meshwright.recipe import Recipe
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import take_rows
from meshwright.schedule import Action

SHARD = 2  # ranks of dp_shard in a rehearsal: as few as have something to gather
FEW, MANY = 2, 4  # rows of a rank
KEPT = 2  # blocks of a kind: the first is computed with others' parameters on their way, the last without
OF_UNITS = frozenset(["_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"])
"""FSDP2's own copies around its collectives: as many as units are gathered and reduced, however many microbatches there are.
``Estimator`` counts them."""
_COUNTED = ("parameters", "buffers", "batch", "optimizer", "gradients", UNREDUCED, UNSHARDED)
"""What ``Estimator`` counts by the elements that a rank holds."""
Line = tuple[float, float]
"""(a, b): a + b · rows"""
OpKey = tuple[Work, str, Line, Line]
"""(kind, dtype, operations, bytes)"""
ExchangeKey = tuple[CollectiveKind, int, Line]
"""(kind, ranks, bytes)"""
K = TypeVar("K", OpKey, ExchangeKey)


@dataclass(frozen=True)
class Calls:
    """Functions and collectives, counted: (what, its sizes as lines) → how often."""

    ops: Mapping[OpKey, float]
    exchanges: Mapping[ExchangeKey, float]

    def __add__(self, other: Calls) -> Calls:
        return Calls(_added(self.ops, other.ops, 1), _added(self.exchanges, other.exchanges, 1))

    def __sub__(self, other: Calls) -> Calls:
        return Calls(_added(self.ops, other.ops, -1), _added(self.exchanges, other.exchanges, -1))

    def times(self, number: float) -> Calls:
        """So many of these."""
        nothing = NO_CALLS
        return Calls(_added(nothing.ops, self.ops, number), _added(nothing.exchanges, self.exchanges, number))

    @property
    def count(self) -> float:
        """Functions."""
        return sum(self.ops.values())

    def host(self, profile: Profile, seconds: float) -> float:
        """Seconds of a host that takes so many for a function."""
        moved = sum(n for (_, ranks, _), n in self.exchanges.items() if ranks > 1)
        return self.count * seconds + moved * profile.host_collective

    def work(self, rows: float) -> float:
        """Operations and bytes, as planning weighs them when it cuts stages (``graph.Event.work``)."""
        return sum(n * (at(flops, rows) + INTENSITY * at(moved, rows)) for (_, _, flops, moved), n in self.ops.items())

    def device(self, profile: Profile, rows: float) -> float:
        """Seconds on the device."""
        return sum(
            n * profile.compute(at(flops, rows), at(moved, rows), dtype, kind).seconds
            for (kind, dtype, flops, moved), n in self.ops.items()
            if any((*flops, *moved))  # else no kernel runs
        )

    def exchange(self, profile: Profile, rows: float) -> float:
        """Seconds of collectives over tp, whose ranks are neighbours."""
        return sum(
            n * collective(profile, kind, round(at(nbytes, rows)), neighbours(profile, ranks)).seconds
            for (kind, ranks, nbytes), n in self.exchanges.items()
            if ranks > 1
        )


NO_CALLS = Calls({}, {})


@dataclass(frozen=True)
class Way:
    """A forward, or a backward: what a block takes, what comes before all blocks in the forward's order, and after them."""

    block: Calls
    first: Calls
    last: Calls


@dataclass(frozen=True)
class Pieces:
    """What a model takes at one size of tp.

    Attributes:
        tp: ranks; ``sequence``: whether sequence parallelism is on.
        blocks: how many; 0: nothing is repeated, and ``forward.last`` is all.
        elements: of parameters that one rank of tp holds: of a block, of what comes before, of what comes after.
        tied: of ``elements``, those that stand before and after: a pipeline's last stage has a copy of them.
        kept: bytes that live between steps, for an element.
        held: bytes for the backward, of a block, for a row.
        other: bytes besides at the peak of a forward and backward, as a line in the rows: without gradients, and without
            ``unsharded``, those of the parameters that FSDP2 has gathered at that moment.
        updating: bytes that clipping and the optimizer need besides, gradients among them, for an element.
        update: what clipping and the optimizer call, for an element; their sizes are for a rank that holds all of it.
        updates: how many functions they call, as a line in the blocks of a rank.
    """

    tp: int
    sequence: bool
    blocks: int
    elements: tuple[float, float, float]
    forward: Way
    backward: Way
    kept: float
    held: float
    other: Line
    unsharded: float
    updating: float
    update: Calls
    updates: Line
    tied: float = 0.0

    @cached_property
    def total_elements(self) -> float:
        """Of all parameters, each once."""
        block, first, last = self.elements
        return self.blocks * block + first + last - self.tied


@dataclass(frozen=True)
class Few:
    """A model with few blocks of each kind.

    Attributes:
        base: makes it, with ``KEPT`` blocks of each kind.
        more: of each kind, makes it with one more of that kind.
        kinds: of each kind, the names of all its blocks in the whole model.
    """

    base: Build
    more: tuple[Build, ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, build: Build, folding: Folding, seed: int) -> Few:
        """What a folding keeps."""
        base, *more = (
            copies_of(pruned(build, blocks), seed) for blocks in (folding.base, *(more for more, _ in folding.more))
        )
        return cls(base, tuple(more), folding.kinds)

    @property
    def numbers(self) -> list[int]:
        """Of each kind, how many blocks the whole model has."""
        return [len(blocks) for blocks in self.kinds]


@dataclass(frozen=True)
class Measured:
    """Rehearses a model for its pieces.

    Args:
        options: of every plan: precision, entries of modules, ``sequence_parallel`` (default: with tp).
    """

    build: Build
    batch: Any
    options: dict[str, Any]
    loss: Loss | None
    optimizer: MakeOptimizer
    max_norm: float | None

    def pieces(self, tp: int) -> Pieces | None:
        """The model's pieces with so many ranks of tp; None if nothing of it is sharded over tp then."""
        return self._alone[1] if tp == 1 else self._pieces(self._few, tp)

    def sends(self) -> float | None:
        """Bytes that go from one stage of a pipeline to the next, for a row; None if the model cannot be cut."""
        plan = Plan.parse({**self.options, "mesh": {"pp": 2}, "microbatches": 1})
        batch = take_rows(self.batch, 0, 1)
        try:
            recipe = rehearsal_of(self._few.base, batch, plan, self.loss, self.optimizer, None).recipe
        except PlanError:
            return None
        return float(max(stage.sends for stage in recipe.stages))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the repeated blocks of the whole model: of one kind after the other."""
        return tuple(name for kind in self._few.kinds for name in kind)

    def recomputed(self) -> float:
        """Bytes for a row that a block keeps for its backward if it is computed again."""
        few = self._few
        if not few.more:
            return 0.0
        base, *more = (
            _Lives.of(rehearse(self._rehearsal(build, 1, recompute="blocks"), 0)) for build in (few.base, *few.more)
        )
        held = sum(number * (one.most - base.most) for number, one in zip(few.numbers, more, strict=True))
        return max(0.0, held / sum(few.numbers)) / FEW

    @property
    def _few(self) -> Few:
        return self._alone[0]

    @cached_property
    def _alone(self) -> tuple[Few, Pieces]:
        """The few blocks that stand for all, and the pieces without tp. If blocks cannot be passed through, all stand there."""
        seed = Plan.parse({**self.options, "mesh": "dp_shard=1"}).seed
        build = copies_of(self.build, seed)
        few = Few.of(build, self._folding(build), seed)
        try:
            return few, _some(self._pieces(few, 1))
        except PlanError:
            raise
        except Exception:  # whatever a model raises, some of whose blocks are passed through
            if not few.more:
                raise
            every = Few(build)
            return every, _some(self._pieces(every, 1))

    def _folding(self, build: Build) -> Folding:
        """Blocks are alike if they are so without tp and, where entries may shard some of them, with it."""
        sizes = (1, 2) if self.options.get("modules") else (1,)
        wholes = [self._rehearsal(build, tp) for tp in sizes]
        foldings = [folding_of(whole.planned.model, whole.recipe, KEPT) for whole in wholes]
        return min(foldings, key=lambda folding: len(folding.base.blocks))

    def _pieces(self, few: Few, tp: int) -> Pieces | None:
        base = self._rehearsal(few.base, tp)
        if tp > 1 and all(p.local_shape(0) == p.shape for p in base.recipe.parameters):
            return None
        wide = replace(base, batch=take_rows(self.batch, 0, SHARD * MANY))
        more = [rehearse(self._rehearsal(build, tp), 0) for build in few.more]
        return _pieces(base.recipe, few, rehearse(base, 0), rehearse(wide, 0), more)

    def _rehearsal(self, build: Build, tp: int, **more: Any) -> Rehearsal:
        sequence = {"sequence_parallel": True} if tp > 1 else {}
        plan = Plan.parse({**sequence, **self.options, **more,
                           "mesh": {"dp_shard": SHARD, "tp": tp}, "microbatches": 1})  # fmt: skip
        batch = take_rows(self.batch, 0, SHARD * FEW)
        return rehearsal_of(build, batch, plan, self.loss, self.optimizer, self.max_norm)


def _some(pieces: Pieces | None) -> Pieces:
    assert pieces is not None  # only with tp is there nothing to be found
    return pieces


# --- from rehearsals --------------------------------------------------------------------------------------------------


def _pieces(recipe: Recipe, few: Few, base: Trace, wide: Trace, more: Sequence[Trace]) -> Pieces:
    numbers = few.numbers
    low, high = _Lives.of(base), _Lives.of(wide)
    above = [_Lives.of(trace) for trace in more]
    held = (
        sum(n * max(0, one.most - low.most) for n, one in zip(numbers, above, strict=True)) / max(sum(numbers), 1) / FEW
    )
    kept = KEPT * len(numbers)
    spare = [lives.most - kept * held * rows for rows, lives in ((FEW, low), (MANY, high))]
    elements, tied = _elements(recipe, few)
    local = sum(math.prod(line.local_shape(0)) for line in recipe.parameters)
    tp = recipe.mesh.axis_size("tp")
    forward, backward = (_way(base, wide, more, numbers, kind, tp) for kind in "FB")
    return Pieces(
        tp, bool(recipe.sequence), sum(numbers), elements, forward, backward, low.kept / (local / SHARD), held,
        _line(max(0.0, spare[0]), max(0.0, spare[1])), low.unsharded, low.updating / (local / SHARD),
        _update(base).times(1 / local), _updates(base, more), tied,
    )  # fmt: skip


@dataclass(frozen=True)
class _Lives:
    """What lives in the last step of a rehearsal, beside what the run keeps.

    Attributes:
        kept: bytes that the run keeps.
        most: in its forward and backward, without gradients and gathered parameters.
        unsharded: gathered parameters at that moment.
        updating: in clipping and the optimizer, with gradients.
    """

    kept: int
    most: int
    unsharded: int
    updating: int

    @classmethod
    def of(cls, trace: Trace) -> _Lives:
        levels = levels_of(trace)
        began = max((i for i, p in enumerate(levels.phases) if str(p.what).startswith("step")), default=0)
        last = levels.phases[began:]
        moments = [moment for phase in last if isinstance(phase.what, Action) for moment in phase.moments]
        kinds = levels.kinds(moment.at for moment in moments)
        beside = [moment.nbytes - sum(kinds[moment.at].get(kind, 0) for kind in _COUNTED) for moment in moments]
        at = max(range(len(moments)), key=beside.__getitem__)
        updates = [m.nbytes for phase in last if phase.what in ("clip", "optimizer") for m in phase.moments]
        unsharded = kinds[moments[at].at].get(UNSHARDED, 0)
        return cls(levels.kept, beside[at], unsharded, max(0, max(updates, default=0) - levels.kept))


def _elements(recipe: Recipe, few: Few) -> tuple[tuple[float, float, float], float]:
    """Elements that one rank of tp holds: of a block on average, of what comes before all blocks, and after; and of these,
    those that stand before and after."""
    often = {block: len(blocks) / KEPT for blocks in few.kinds for block in blocks}
    blocks = first = last = tied = 0.0
    for line in recipe.parameters:
        size = float(math.prod(line.local_shape(0)))
        kind = next((block for block in often if line.name.startswith(block + ".")), None)
        if kind is not None:
            blocks += often[kind] * size
        elif blocks:
            last += size
        else:
            first += size
            tied += size if line.aliases and few.kinds else 0.0  # a tied table is in the last stage as well
    count = sum(few.numbers)
    return ((blocks / count, first, last + tied), tied) if count else ((0.0, 0.0, first), 0.0)


def _way(base: Trace, wide: Trace, more: Sequence[Trace], numbers: Sequence[int], kind: str, tp: int) -> Way:
    """What the functions of a block are is what a rehearsal with one block more has more of, wherever they stand."""
    ops = _events(base, kind)
    lined = _lined(ops, _events(wide, kind))
    rest = _calls(lined, tp)
    if not more:
        return Way(NO_CALLS, NO_CALLS, rest)
    wider = dict(reversed(lined))
    longer = [_events(trace, kind) for trace in more]
    chunks = []
    for events in longer:
        block = (Counter(events) - Counter(ops)).elements()
        chunk = _calls([(event, wider.get(event, _doubled(event))) for event in block], tp)
        chunks.append(chunk)
        rest = rest - chunk.times(KEPT)
    blocks = sum(numbers)
    average = NO_CALLS  # as many of each kind as there are, over all of them
    for chunk, number in zip(chunks, numbers, strict=True):
        average = average + chunk.times(number / blocks)
    before = _common(ops, longer[0]) - KEPT * (len(longer[0]) - len(ops)) if kind == "F" and len(more) == 1 else 0
    head = _calls(lined[: max(0, before)], tp)
    return Way(average, head, rest - head)


def _events(trace: Trace, kind: str) -> list[Event]:
    """Functions and collectives of the last step's forward, or backward, without those of FSDP2's units."""
    return [
        event
        for what, events in last_step(trace) if isinstance(what, Action) and what.kind == kind
        for event in events if isinstance(event, (Op, Collective)) and _name(event)[0] not in OF_UNITS
    ]  # fmt: skip


def _common(one: Sequence[Event], other: Sequence[Event]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if _name(a) != _name(b):
            return i
    return min(len(one), len(other))


def _name(event: Event) -> tuple[str, ...]:
    return (
        (event.name, event.dtype) if isinstance(event, Op) else (event.kind,) if isinstance(event, Collective) else ()
    )


def _lined(ops: Sequence[Event], wider: Sequence[Event]) -> list[tuple[Event, Event]]:
    """Each function with few rows and with many; if another path is taken with many, as with few."""
    if [_name(event) for event in ops] == [_name(event) for event in wider]:
        return list(zip(ops, wider, strict=True))
    return [(event, _doubled(event)) for event in ops]


def _doubled(event: Event) -> Event:
    if isinstance(event, Op):
        return Op(event.name, event.kind, 2 * event.flops, 2 * event.moved, event.dtype, event.workspace)
    assert isinstance(event, Collective)
    return Collective(event.kind, 2 * event.nbytes, event.ranks)


def _calls(lined: Sequence[tuple[Event, Event]], tp: int) -> Calls:
    ops: dict[OpKey, float] = defaultdict(float)
    exchanges: dict[ExchangeKey, float] = defaultdict(float)
    for one, two in lined:
        if isinstance(one, Op) and isinstance(two, Op):
            ops[one.kind, one.dtype, _line(one.flops, two.flops), _line(one.moved, two.moved)] += 1
        elif isinstance(one, Collective) and isinstance(two, Collective) and _of_tp(one.ranks, tp):
            exchanges[_kind(one), len(one.ranks), _line(one.nbytes, two.nbytes)] += 1
    return Calls(ops, exchanges)


def _of_tp(ranks: Sequence[int], tp: int) -> bool:
    """Whether a group is one of tp: the innermost axis of a rehearsal's mesh."""
    return tp > 1 and len(ranks) == tp and ranks[1] - ranks[0] == 1


def _kind(event: Collective) -> CollectiveKind:
    return cast(CollectiveKind, event.kind)


def _update(trace: Trace) -> Calls:
    """Functions of clipping and the optimizer. Their sizes are lines in the share of a parameter that a rank holds."""
    ops: dict[OpKey, float] = defaultdict(float)
    for what, events in last_step(trace):
        for event in events if what in ("clip", "optimizer") else ():
            if isinstance(event, Op):
                ops[event.kind, event.dtype, (0.0, SHARD * event.flops), (0.0, SHARD * event.moved)] += 1
    return Calls(ops, {})


def _updates(base: Trace, more: Sequence[Trace]) -> Line:
    """How many functions clipping and the optimizer call: as a line in the blocks."""
    few = _update(base).count
    slope = sum(_update(trace).count - few for trace in more) / max(1, len(more))
    return few - KEPT * len(more) * slope, slope


def _added(one: Mapping[K, float], other: Mapping[K, float], times: float) -> dict[K, float]:
    """One and so many times the other; nothing below zero."""
    found = dict(one)
    for key, number in other.items():
        found[key] = found.get(key, 0.0) + times * number
    return {key: number for key, number in found.items() if number > 1e-9}


def _line(few: float, many: float) -> Line:
    slope = (many - few) / (MANY - FEW)
    return few - FEW * slope, slope


def at(line: Line, number: float) -> float:
    """The line's value, not below zero."""
    return max(0.0, line[0] + line[1] * number)
