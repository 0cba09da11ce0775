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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from meshwright.hardware.collectives import CollectiveKind
from meshwright.prediction.clock import last_step
from meshwright.prediction.memory import UNREDUCED, UNSHARDED, levels_of
from meshwright.prediction.trace import Collective, Event, Op, Trace
from meshwright.recipe import Recipe
from meshwright.schedule import Action
from meshwright.search.calls import NO_CALLS, Calls, ExchangeKey, Line, OpKey

SHARD = 2  # ranks of dp_shard in a rehearsal: as few as have something to gather
FEW, MANY = 2, 4  # rows of a rank
KEPT = 2  # blocks of a kind: the first is computed with others' parameters on their way, the last without
OF_UNITS = frozenset(["_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"])
"""FSDP2's own copies around its collectives: as many as units are gathered and reduced, however many microbatches there are.
``Estimator`` counts them."""
_COUNTED = ("parameters", "buffers", "batch", "optimizer", "gradients", UNREDUCED, UNSHARDED)
"""What ``Estimator`` counts by the elements that a rank holds."""


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
        forward, backward: the functions and collectives of the forward and of the backward.
        persistent: bytes per element that live between steps.
        activations: bytes per row that a block stores for its backward.
        other: bytes at the peak of forward and backward besides these, as a line in the rows. Neither gradients nor
            ``unsharded`` are counted.
        unsharded: bytes of the parameters that FSDP2 has gathered at the peak.
        updating: temporary bytes per element in clipping and the optimizer, including gradients.
        update: the functions of clipping and the optimizer per element, with the sizes for an unsharded parameter.
        updates: number of functions of clipping and the optimizer, as a line in the blocks of a rank.
    """

    tp: int
    sequence: bool
    blocks: int
    elements: tuple[float, float, float]
    forward: Way
    backward: Way
    persistent: float
    activations: float
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


# --- from rehearsals --------------------------------------------------------------------------------------------------


def pieces_of(
    recipe: Recipe, kinds: Sequence[Sequence[str]], base: Trace, wide: Trace, more: Sequence[Trace]
) -> Pieces:
    """What a model takes, from rehearsals of few of its blocks.

    Args:
        recipe: of ``base``.
        kinds: of each kind of repeated blocks, the names of all that the whole model has.
        base: with ``KEPT`` blocks of each kind and ``FEW`` rows; ``wide``: with ``MANY`` rows.
        more: with one block more, of one kind after the other.
    """
    numbers = [len(blocks) for blocks in kinds]
    low, high = Lives.of(base), Lives.of(wide)
    above = [Lives.of(trace) for trace in more]
    held = (
        sum(n * max(0, one.most - low.most) for n, one in zip(numbers, above, strict=True)) / max(sum(numbers), 1) / FEW
    )
    kept = KEPT * len(numbers)
    spare = [lives.most - kept * held * rows for rows, lives in ((FEW, low), (MANY, high))]
    elements, tied = _elements(recipe, kinds)
    local = sum(math.prod(line.local_shape(0)) for line in recipe.parameters)
    tp = recipe.mesh.axis_size("tp")
    forward, backward = (_way(base, wide, more, numbers, kind, tp) for kind in "FB")
    return Pieces(
        tp, bool(recipe.sequence), sum(numbers), elements, forward, backward, low.kept / (local / SHARD), held,
        _line(max(0.0, spare[0]), max(0.0, spare[1])), low.unsharded, low.updating / (local / SHARD),
        _update(base).times(1 / local), _updates(base, more), tied,
    )  # fmt: skip


@dataclass(frozen=True)
class Lives:
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
    def of(cls, trace: Trace) -> Lives:
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


def _elements(recipe: Recipe, kinds: Sequence[Sequence[str]]) -> tuple[tuple[float, float, float], float]:
    """Elements that one rank of tp holds: of a block on average, of what comes before all blocks, and after; and of these,
    those that stand before and after."""
    often = {block: len(blocks) / KEPT for blocks in kinds for block in blocks}
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
            tied += size if line.aliases and kinds else 0.0  # a tied table is in the last stage as well
    count = sum(map(len, kinds))
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


def _line(few: float, many: float) -> Line:
    slope = (many - few) / (MANY - FEW)
    return few - FEW * slope, slope
