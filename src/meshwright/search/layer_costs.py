"""``LayerCosts``: the costs of a block of a model, and of its other layers, at one size of tp, as lines in a microbatch's rows.

Three rehearsals give them: few blocks with two rows, one block more, and few blocks with four rows. Then a search compares
thousands of plans by arithmetic alone (``estimate.py``).

    few blocks, two rows     first  b b    last       each function f: b = (f(4) - f(2)) / 2,  a = f(2) - 2 b
    one block more           first  b b b  last       the functions of a block are those that only this rehearsal has
    few blocks, four rows    first  b b    last

No rehearsal has one row: torch skips copies for dims of size 1 that other sizes need.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from meshwright.hardware.collectives import CollectiveKind
from meshwright.prediction.clock import SPAN, last_step
from meshwright.prediction.memory import OPTIMIZER, levels_of
from meshwright.prediction.trace import Collective, Event, Op, Trace
from meshwright.recipe import Recipe
from meshwright.schedule import Action
from meshwright.search.calls import NO_CALLS, Calls, ExchangeKey, Line, OpKey
from meshwright.search.chains import Chain, chains_of
from meshwright.search.sizes import DP_SHARD, FEW_BLOCKS, FEW_ROWS, MANY_ROWS, line_through
from meshwright.search.step_memory import StepMemory, Temporaries, at_end, last_step_phases, temporaries

OF_UNITS = frozenset([
    "_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat",
    SPAN, "_record_function_exit",
])  # fmt: skip
"""FSDP2's copies around its collectives, and the spans of its hooks. Their number depends on the gathers and reductions of a
candidate's units, so ``Units`` counts them."""


@dataclass(frozen=True)
class PassCalls:
    """The calls of a forward, or of a backward.

    Attributes:
        block: of one block.
        first: of the layers before all blocks, in the order of the forward.
        last: of the layers after all blocks.
    """

    block: Calls
    first: Calls
    last: Calls


@dataclass(frozen=True)
class LayerCosts:
    """The costs of a model's layers at one size of tp.

    Attributes:
        tp: size of the axis.
        sequence: whether sequence parallelism is on.
        blocks: number of blocks. 0: no block is repeated, and ``forward.last`` is the full forward.
        elements: parameter elements on one rank of tp: of (a block, the layers before all blocks, the layers after them).
        tied: number of ``elements`` counted both before and after: tied weights, of which a pipeline's last stage has a copy.
        forward, backward: the functions and collectives of the forward and of the backward.
        persistent: bytes per element that live between steps, without the batch.
        batch: bytes per row of the batch.
        activations: bytes per row that a block stores for its backward.
        before: bytes per row that the layers before all blocks store for theirs.
        full: at the peak of forward and backward while all blocks keep their activations, besides these.
        within: at the peak of the backward of the block before the last one, besides all activations.
        drained: at the peak after that, besides all activations.
        updating: temporary bytes per element in clipping and the optimizer, including gradients.
        update: the functions of clipping and the optimizer per element, with the sizes for an unsharded parameter.
        updates: number of functions of clipping and the optimizer, as a line in the blocks of a rank.
        tensors: number of parameters, as a line in the blocks of a rank.
        chains: the chains of layers that tp shards.
        batch_statistics: whether the forward computes statistics of several rows.
    """

    tp: int
    sequence: bool
    blocks: int
    elements: tuple[float, float, float]
    forward: PassCalls
    backward: PassCalls
    persistent: float
    batch: float
    activations: float
    before: float
    full: Temporaries
    within: Temporaries
    drained: Temporaries
    updating: float
    update: Calls
    updates: Line
    tensors: Line
    tied: float = 0.0
    chains: tuple[Chain, ...] = ()
    batch_statistics: bool = False

    def flops_of_row(self) -> float:
        """Floating-point operations of a forward of one row."""
        return self.blocks * self.forward.block.flops + self.forward.first.flops + self.forward.last.flops

    @cached_property
    def total_elements(self) -> float:
        """Elements of all parameters. Tied ones count once."""
        block, first, last = self.elements
        return self.blocks * block + first + last - self.tied


# --- from rehearsals --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateCosts:
    """The costs of clipping and the optimizer: of an element of a shard, the same at each size of tp.

    Attributes:
        optimizer: bytes of optimizer states per element.
        temporary, calls, number: ``updating``, ``update`` and ``updates`` of ``LayerCosts``.
    """

    optimizer: float
    temporary: float
    calls: Calls
    number: Line

    @classmethod
    def of_traces(cls, recipe: Recipe, base: Trace, more: Sequence[Trace]) -> UpdateCosts:
        """Reads them from rehearsals whose steps update parameters. Arguments: as those of ``layer_costs_of``."""
        levels, elements = levels_of(base), _local_elements(recipe)
        phases = last_step_phases(levels)
        nbytes = [m.nbytes for phase in phases if phase.label in ("clip", "optimizer") for m in phase.moments]
        temporary = max(0, max(nbytes, default=0) - levels.persistent)
        optimizer = at_end(levels).get(OPTIMIZER, 0)
        shard = elements / DP_SHARD
        return cls(optimizer / shard, temporary / shard, _update(base).times(1 / elements), _updates(base, more))


def layer_costs_of(
    recipe: Recipe,
    kinds: Sequence[Sequence[str]],
    base: Trace,
    wide: Trace,
    more: Sequence[Trace],
    update: UpdateCosts,
) -> LayerCosts:
    """The costs of a model's layers, from rehearsals of few of its blocks.

    Args:
        recipe: of ``base``.
        kinds: for each kind of repeated blocks, the names of its blocks in the full model.
        base: rehearsal with ``FEW_BLOCKS`` blocks of each kind and ``FEW_ROWS`` rows.
        wide: as ``base``, with ``MANY_ROWS`` rows.
        more: for each kind, as ``base`` with one more block of this kind.
        update: of the model.
    """
    numbers = [len(blocks) for blocks in kinds]
    names = [name for blocks in kinds for name in blocks]
    # The batch with many rows is there beside that with few.
    low, high, *longer = (StepMemory.of_trace(trace, names) for trace in (base, wide, *more))
    differences = [max(0, memory.compute - low.compute) for memory in longer]
    of_all_blocks = sum(number * nbytes for number, nbytes in zip(numbers, differences, strict=True))
    activations = of_all_blocks / max(sum(numbers), 1) / FEW_ROWS
    full, within, drained = temporaries(low, high, FEW_BLOCKS * len(kinds), activations)
    elements, tied = _elements(recipe, kinds)
    tp = recipe.mesh.axis_size("tp")
    forward, backward = (_pass_calls(base, wide, more, numbers, kind, tp) for kind in "FB")
    return LayerCosts(
        tp, bool(recipe.sequence), sum(numbers), elements, forward, backward,
        low.parameters / (_local_elements(recipe) / DP_SHARD) + update.optimizer, (high.batch - low.batch) / MANY_ROWS,
        activations, low.before / FEW_ROWS, full, within, drained, update.temporary, update.calls, update.number,
        _tensors(recipe, kinds), tied, chains_of(recipe, kinds), base.batch_statistics,
    )  # fmt: skip


def _local_elements(recipe: Recipe) -> int:
    """The number of parameter elements on one rank of tp."""
    return sum(math.prod(line.local_shape(0)) for line in recipe.parameters)


def _elements(recipe: Recipe, kinds: Sequence[Sequence[str]]) -> tuple[tuple[float, float, float], float]:
    """((elements of an average block, of the layers before all blocks, of those after), tied elements), on one rank of tp.

    Tied elements count both before and after.
    """
    # block of this model → number of blocks of the full model that it stands for
    weights = {block: len(blocks) / FEW_BLOCKS for blocks in kinds for block in blocks}
    blocks = first = last = tied = 0.0
    for line in recipe.parameters:
        size = float(math.prod(line.local_shape(0)))
        kind = next((block for block in weights if line.name.startswith(block + ".")), None)
        if kind is not None:
            blocks += weights[kind] * size
        elif blocks:
            last += size
        else:
            first += size
            tied += size if line.aliases and kinds else 0.0  # the last stage has a copy of tied weights
    count = sum(map(len, kinds))
    return ((blocks / count, first, last + tied), tied) if count else ((0.0, 0.0, first), 0.0)


def _tensors(recipe: Recipe, kinds: Sequence[Sequence[str]]) -> Line:
    """The number of parameters outside of blocks, and of an average block."""
    numbers = {block: len(blocks) for blocks in kinds for block in blocks}
    in_blocks = [
        number for line in recipe.parameters for block, number in numbers.items() if line.name.startswith(block + ".")
    ]
    blocks = sum(map(len, kinds))
    return float(len(recipe.parameters) - len(in_blocks)), sum(in_blocks) / FEW_BLOCKS / blocks if blocks else 0.0


def _pass_calls(
    base: Trace, wide: Trace, more: Sequence[Trace], numbers: Sequence[int], kind: str, tp: int
) -> PassCalls:
    """The calls of a forward (kind ``F``) or backward (``B``).

    The functions of a block are those that a rehearsal with one more block has in addition, in any order.

    Args:
        numbers: for each kind of blocks, their number in the full model.
        tp: size of the axis.
    """
    ops = _events(base, kind)
    pairs = _paired(ops, _events(wide, kind))
    rest = _calls(pairs, tp)
    if not more:
        return PassCalls(NO_CALLS, NO_CALLS, rest)
    with_many_rows = dict(reversed(pairs))
    longer = [_events(trace, kind) for trace in more]
    chunks = []
    for events in longer:
        block = (Counter(events) - Counter(ops)).elements()
        chunk = _calls([(event, with_many_rows.get(event, _doubled(event))) for event in block], tp)
        chunks.append(chunk)
        rest = rest - chunk.times(FEW_BLOCKS)
    blocks = sum(numbers)
    average = NO_CALLS  # weighted by the numbers of blocks of each kind
    for chunk, number in zip(chunks, numbers, strict=True):
        average = average + chunk.times(number / blocks)
    before = _common(ops, longer[0]) - FEW_BLOCKS * (len(longer[0]) - len(ops)) if kind == "F" and len(more) == 1 else 0
    head = _calls(pairs[: max(0, before)], tp)
    return PassCalls(average, head, rest - head)


def _events(trace: Trace, kind: str) -> list[Event]:
    """Functions and collectives of the last step's forward or backward, without FSDP2's copies around its collectives."""
    return [
        event
        for activity, events in last_step(trace) if isinstance(activity, Action) and activity.kind == kind
        for event in events if isinstance(event, (Op, Collective)) and _name(event)[0] not in OF_UNITS
    ]  # fmt: skip


def _common(first: Sequence[Event], second: Sequence[Event]) -> int:
    """The length of the common prefix of two lists of events; events with equal names count as equal."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if _name(a) != _name(b):
            return i
    return min(len(first), len(second))


def _name(event: Event) -> tuple[str, ...]:
    """The name of a function and its dtype, or the kind of a collective."""
    return (
        (event.name, event.dtype) if isinstance(event, Op) else (event.kind,) if isinstance(event, Collective) else ()
    )


def _paired(ops: Sequence[Event], wider: Sequence[Event]) -> list[tuple[Event, Event]]:
    """(event with few rows, the same event with many rows) for each event.

    If the two rehearsals differ in their functions, the sizes with few rows are doubled instead.
    """
    if [_name(event) for event in ops] == [_name(event) for event in wider]:
        return list(zip(ops, wider, strict=True))
    return [(event, _doubled(event)) for event in ops]


def _doubled(event: Event) -> Event:
    """An event with twice the size: ``MANY_ROWS`` rows are twice ``FEW_ROWS`` rows."""
    if isinstance(event, Op):
        return Op(event.name, event.kind, 2 * event.flops, 2 * event.moved, event.dtype, event.workspace)
    assert isinstance(event, Collective)
    return Collective(event.kind, 2 * event.nbytes, event.ranks)


def _calls(pairs: Sequence[tuple[Event, Event]], tp: int) -> Calls:
    """Counts functions and collectives over tp. Their sizes are lines through those with few and with many rows."""
    ops: dict[OpKey, float] = defaultdict(float)
    exchanges: dict[ExchangeKey, float] = defaultdict(float)
    for few, many in pairs:
        if isinstance(few, Op) and isinstance(many, Op):
            ops[few.kind, few.dtype, line_through(few.flops, many.flops), line_through(few.moved, many.moved)] += 1
        elif isinstance(few, Collective) and isinstance(many, Collective) and _of_tp(few.ranks, tp):
            exchanges[_kind(few), len(few.ranks), line_through(few.nbytes, many.nbytes)] += 1
    return Calls(ops, exchanges)


def _of_tp(ranks: Sequence[int], tp: int) -> bool:
    """Whether these ranks are a group of the tp axis, which is the innermost axis of a rehearsal's mesh."""
    return tp > 1 and len(ranks) == tp and ranks[1] - ranks[0] == 1


def _kind(event: Collective) -> CollectiveKind:
    return cast(CollectiveKind, event.kind)


def _update(trace: Trace) -> Calls:
    """The functions of clipping and the optimizer. Their sizes are proportional to the fraction of a parameter on a rank."""
    ops: dict[OpKey, float] = defaultdict(float)
    for activity, events in last_step(trace):
        for event in events if activity in ("clip", "optimizer") else ():
            if isinstance(event, Op):
                ops[event.kind, event.dtype, (0.0, DP_SHARD * event.flops), (0.0, DP_SHARD * event.moved)] += 1
    return Calls(ops, {})


def _updates(base: Trace, more: Sequence[Trace]) -> Line:
    """The number of functions that clipping and the optimizer call, as a line in the number of blocks."""
    few = _update(base).count
    slope = sum(_update(trace).count - few for trace in more) / max(1, len(more))
    return few - FEW_BLOCKS * len(more) * slope, slope
