"""``MemoryProfile``: what is alive when on the ranks of each role, the peak marked. Facts before ink.

of a plan alone      the parameters that each role holds at rest, in bytes
of a prediction      also what lives at most in each action and phase of the step, by what it is
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.draw.facts import ShardMap
from meshwright.prediction.roles import roles_of

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.memory import Memory
    from meshwright.prediction.result import Prediction

_SITES = 12  # places that made what lives at a peak


@dataclass(frozen=True)
class Moment:
    """The most bytes that live in an action (``0F3``) or phase (``optimizer``), and what they are."""

    what: str
    bytes: int
    items: dict[str, int]


@dataclass(frozen=True)
class Site:
    """Bytes of activations and temporaries that live at a peak, by where they were made."""

    module: str
    line: str
    function: str
    bytes: int


@dataclass(frozen=True)
class RoleMemory:
    """The memory of ranks that do the same.

    Attributes:
        name: for a person; ``ranks``: all of them; ``stage``: their place on the pipeline axis.
        at_rest: bytes of the parameters that one of them holds between steps: the least and the most.
        moments: of the step, in order; empty for a plan alone.
        peak: the index of the moment at which most bytes live; -1 for a plan alone.
        device: bytes that a device must have: without what an allocator may hold besides, and with it.
        sites: where the largest activations and temporaries of the peak were made.
    """

    name: str
    ranks: tuple[int, ...]
    stage: int
    at_rest: tuple[int, int]
    moments: tuple[Moment, ...] = ()
    peak: int = -1
    device: tuple[int, int] = (0, 0)
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True)
class MemoryProfile:
    """The memory of every role.

    Attributes:
        capacity: bytes of a device; 0 for a plan alone.
        taken: of those, what a process takes besides its tensors.
    """

    roles: tuple[RoleMemory, ...]
    capacity: int = 0
    taken: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether every role fits its device; True where no device is known."""
        return not self.capacity or all(role.device[1] <= self.capacity for role in self.roles)


def memory_profile(shards: ShardMap, prediction: Prediction | None = None) -> MemoryProfile:
    """What lives on each role. ``prediction``: of the same plan."""
    sizes = shards.bytes_by_rank
    roles = []
    for role in roles_of(shards.recipe):
        held = [sizes[rank] for rank in role.ranks]
        base = RoleMemory(role.name, role.ranks, role.stage, (min(held), max(held)))
        roles.append(base if prediction is None else _predicted(base, prediction, role.rank))
    if prediction is None:
        return MemoryProfile(tuple(roles))
    return MemoryProfile(tuple(roles), prediction.capacity, prediction.taken)


def _predicted(base: RoleMemory, prediction: Prediction, rank: int) -> RoleMemory:
    memory = prediction.memory(rank)
    moments = tuple(Moment(phase.what, phase.nbytes, dict(phase.items)) for phase in memory.phases)
    peak = max(range(len(moments)), key=lambda i: moments[i].bytes, default=-1)
    return RoleMemory(
        base.name, base.ranks, base.stage, base.at_rest, moments, peak, prediction.device_bytes(rank), _sites(memory)
    )


def _sites(memory: Memory) -> tuple[Site, ...]:
    largest = sorted(memory.sites.items(), key=lambda item: -item[1])[:_SITES]
    return tuple(Site(*site, nbytes) for site, nbytes in largest)
