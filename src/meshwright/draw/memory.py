"""``MemoryProfile``: the memory of the ranks of each role over a step, with its peak.

from a plan alone      bytes of the parameters that each role holds at rest
from a prediction      also the most bytes in each action and phase of the step, by kind
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshwright.draw.facts import ShardMap
from meshwright.prediction.roles import roles_of

if TYPE_CHECKING:  # predictions are made where torch is loaded
    from meshwright.prediction.memory import Memory
    from meshwright.prediction.result import Prediction

_SITES = 12  # most source lines whose tensors are listed at a peak


@dataclass(frozen=True)
class Moment:
    """The largest memory within an action (``0F3``) or phase (``optimizer``) of a step.

    Attributes:
        what: the action or phase.
        bytes: of all tensors.
        items: kind of a tensor → bytes.
    """

    what: str
    bytes: int
    items: dict[str, int]


@dataclass(frozen=True)
class Site:
    """Activations and temporaries that are alive at a peak, made by one function in one line of one module."""

    module: str
    line: str
    function: str
    bytes: int


@dataclass(frozen=True)
class RoleMemory:
    """The memory of the ranks of one role.

    Attributes:
        name: of the role, for a person.
        ranks: all ranks of the role.
        stage: their index on the pipeline axis.
        at_rest: (least, most) bytes of parameters that one of them holds between steps.
        moments: of the step, in order; empty for a plan alone.
        peak: index of the moment with the most bytes; -1 for a plan alone.
        device: bytes that a device needs: (without, with) the extra memory that an allocator may hold.
        sites: the largest activations and temporaries at the peak.
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
        roles: one for each role.
        capacity: bytes of a device; 0 for a plan alone.
        context: bytes of the device that a process uses besides its tensors (of CUDA: its context).
        notes: texts for a reader.
    """

    roles: tuple[RoleMemory, ...]
    capacity: int = 0
    context: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether every role fits its device; True if no device is known."""
        return not self.capacity or all(role.device[1] <= self.capacity for role in self.roles)


def memory_profile(shards: ShardMap, prediction: Prediction | None = None) -> MemoryProfile:
    """The memory of each role.

    Args:
        shards: of the plan.
        prediction: of the same plan; None for a plan alone.
    """
    sizes = shards.bytes_by_rank
    roles = []
    for role in roles_of(shards.recipe):
        at_rest = [sizes[rank] for rank in role.ranks]
        memory = RoleMemory(role.name, role.ranks, role.pp_rank, (min(at_rest), max(at_rest)))
        roles.append(memory if prediction is None else _predicted(memory, prediction, role.rank))
    if prediction is None:
        return MemoryProfile(tuple(roles))
    return MemoryProfile(tuple(roles), prediction.capacity, prediction.context)


def _predicted(base: RoleMemory, prediction: Prediction, rank: int) -> RoleMemory:
    """The memory of a role with its moments, from the prediction of its rank."""
    memory = prediction.memory(rank)
    moments = tuple(Moment(phase.label, phase.nbytes, dict(phase.items)) for phase in memory.phases)
    peak = max(range(len(moments)), key=lambda i: moments[i].bytes, default=-1)
    return RoleMemory(
        base.name, base.ranks, base.stage, base.at_rest, moments, peak, prediction.device_bytes(rank), _sites(memory)
    )


def _sites(memory: Memory) -> tuple[Site, ...]:
    largest = sorted(memory.sites.items(), key=lambda item: -item[1])[:_SITES]
    return tuple(Site(*site, nbytes) for site, nbytes in largest)
