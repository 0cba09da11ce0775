"""``StepMemory``: the memory of a rehearsed step, moment by moment, and ``Temporaries``: what lives at its peaks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from meshwright.prediction.memory import (
    ACTIVATIONS,
    BATCH,
    COMMUNICATION,
    OPTIMIZER,
    UNREDUCED,
    UNSHARDED,
    Levels,
    PhaseMoments,
    kinds_of,
    levels_of,
)
from meshwright.prediction.trace import Allocated, Trace
from meshwright.schedule import Action
from meshwright.search.calls import Line
from meshwright.search.sizes import FEW_ROWS, MANY_ROWS, line_through

_NEARLY_ALL = 0.9  # of the most bytes of activations: then all blocks keep theirs
_ALL, _LAST = 0.9, 1.5
"""Numbers of blocks whose activations are freed. Below ``_ALL``, all blocks count as keeping theirs; from there to ``_LAST``,
the last block's are freed, and the block before it uses its own."""
_COUNTED = ("parameters", "buffers", BATCH, OPTIMIZER, "gradients", UNREDUCED)
"""Kinds of memory that ``Estimator`` computes from the number of elements of a rank."""


@dataclass(frozen=True)
class Temporaries:
    """Bytes at a peak, without gradients.

    Attributes:
        computed: as a line in the rows, without the others.
        unsharded: of the parameters that FSDP2 has gathered.
        communication: of the buffers of collectives, as a line in the rows.
    """

    computed: Line
    unsharded: float
    communication: Line


@dataclass(frozen=True)
class MomentMemory:
    """Bytes at a moment of a forward or backward, without those that live between steps, and without gradients.

    Attributes:
        activations: stored for a backward.
        freed: number of blocks that have freed their activations; a block that has freed half of them counts as half.
        unsharded: of the parameters that FSDP2 has gathered.
        communication: of the buffers of collectives.
        computed: all others, and ``activations``.
    """

    activations: int
    freed: float
    unsharded: int
    communication: int
    computed: int

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.computed + self.unsharded + self.communication


@dataclass(frozen=True)
class StepMemory:
    """Bytes in the last step of a rehearsal.

    Attributes:
        parameters: of parameters and buffers.
        batch: those of the batch.
        before: of the activations that the layers before all blocks store.
        moments: of the forward and the backward, in order.
    """

    parameters: int
    batch: int
    before: int
    moments: tuple[MomentMemory, ...]

    @classmethod
    def of_trace(cls, trace: Trace, blocks: Collection[str]) -> StepMemory:
        """Reads them from the trace of a rehearsal. ``blocks``: names of blocks."""
        levels = levels_of(trace)
        actions = [phase for phase in last_step_phases(levels) if isinstance(phase.label, Action)]
        moments = [moment for phase in actions for moment in phase.moments]
        kinds = levels.kinds(moment.at for moment in moments)
        activations = _Activations(levels, blocks, [moment.at for moment in moments])
        batch = max(kinds[moment.at].get(BATCH, 0) for moment in moments)
        memories = tuple(
            _moment_memory(m.nbytes, kinds[m.at], number)
            for m, number in zip(moments, activations.freed(), strict=True)
        )
        end = at_end(levels)
        parameters = levels.persistent - end.get(BATCH, 0) - end.get(OPTIMIZER, 0)
        return cls(parameters, batch, activations.before_blocks(), memories)

    @property
    def compute(self) -> int:
        """Bytes at the peak while all blocks keep their activations, without gathered parameters."""
        activations = max(moment.activations for moment in self.moments)
        kept = [m for m in self.moments if m.activations >= _NEARLY_ALL * activations]
        return max(m.computed + m.communication for m in kept)

    def while_freed(self, least: float, most: float) -> list[MomentMemory]:
        """The moments at which ``least`` to ``most`` blocks have freed their activations; if none, one with 0 bytes."""
        return [m for m in self.moments if least <= m.freed < most] or [NO_MEMORY]


def last_step_phases(levels: Levels) -> Sequence[PhaseMoments]:
    """The actions and phases of the last step of a trace."""
    start = max((i for i, p in enumerate(levels.phases) if str(p.label).startswith("step")), default=0)
    return levels.phases[start:]


def at_end(levels: Levels) -> Mapping[str, int]:
    """Kind → bytes that live when a trace ends."""
    end = len(levels.events) - 1
    return levels.kinds([end])[end]


NO_MEMORY = MomentMemory(0, 0.0, 0, 0, 0)


def _nbytes(memory: MomentMemory) -> int:
    return memory.nbytes


def _moment_memory(nbytes: int, kinds: Mapping[str, int], freed: float) -> MomentMemory:
    """The memory of a moment at which ``nbytes`` live. ``kinds``: kind → bytes. ``freed``: see ``MomentMemory``."""
    unsharded, communication = kinds.get(UNSHARDED, 0), kinds.get(COMMUNICATION, 0)
    counted = sum(kinds.get(kind, 0) for kind in _COUNTED) + unsharded + communication
    return MomentMemory(kinds.get(ACTIVATIONS, 0), freed, unsharded, communication, nbytes - counted)


class _Activations:
    """The activations of the last step of a trace: those of blocks, and those before all blocks.

    Args:
        blocks: names of blocks.
        after: events, in order, after which they are counted.
    """

    def __init__(self, levels: Levels, blocks: Collection[str], after: Sequence[int]) -> None:
        self._levels, self._after = levels, after
        self._of_blocks, self._before = defaultdict[str, set[int]](set), set[int]()
        kinds = kinds_of(levels.trace)
        block_of = cache(lambda module: next((b for b in blocks if module == b or module.startswith(b + ".")), None))
        begun = False  # the first block of the last step
        for at, event in enumerate(levels.trace.events):
            if isinstance(event, Allocated) and kinds[event.storage] == ACTIVATIONS:
                if block := block_of(event.module):
                    self._of_blocks[block].add(event.storage)
                    begun |= at >= after[0]
                elif not begun:
                    self._before.add(event.storage)

    def freed(self) -> list[float]:
        """After each event, the number of blocks without activations: 1 - activations / most activations, summed."""
        freed = [0.0] * len(self._after)
        for of_block in self._of_blocks.values():
            nbytes = self._levels.nbytes(of_block, self._after)
            most = max(nbytes[at] for at in self._after)
            fractions = (1 - nbytes[at] / most if most else 0.0 for at in self._after)
            freed = [number + fraction for number, fraction in zip(freed, fractions, strict=True)]
        return freed

    def before_blocks(self) -> int:
        """The most bytes of what is stored before all blocks, once the last step has begun; 0 if there are no blocks."""
        return max(self._levels.nbytes(self._before, self._after).values()) if self._of_blocks else 0


def temporaries(low: StepMemory, high: StepMemory, blocks: int, activations: float) -> tuple[Temporaries, ...]:
    """What ``LayerCosts`` calls (full, within, drained).

    Args:
        low, high: of rehearsals with few rows and with many rows.
        blocks: number of blocks in these rehearsals.
        activations: bytes per row that a block stores for its backward.
    """
    parts = []
    for (least, most), keeping in (((0, _ALL), blocks), ((_ALL, _LAST), blocks - 1), ((_LAST, math.inf), 0)):
        few_moments, many_moments = (memory.while_freed(least, most) for memory in (low, high))
        few, many = max(few_moments, key=_nbytes), max(many_moments, key=_nbytes)
        kept = max(0, keeping) * activations
        computed = line_through(max(0.0, few.computed - kept * FEW_ROWS), max(0.0, many.computed - kept * MANY_ROWS))
        # In a model with more blocks, FSDP2 has gathered the next one at the peak of this one.
        unsharded = max(m.unsharded for m in few_moments) if least == _ALL else few.unsharded
        parts.append(Temporaries(computed, unsharded, line_through(few.communication, many.communication)))
    return tuple(parts)
