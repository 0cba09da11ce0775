"""``Trace``: what one rank does in a step, in order: functions, collectives, and memory that comes and goes. Plain values.

event         what it says
Began         the rank begins an action of its schedule (F, B …), or a phase of the step (clip, optimizer)
Op            a function of ATen ran: its operations, and the bytes that it reads and writes
Collective    tensors were exchanged with a group of ranks
Allocated     a storage came into being, in a module, at a line of the model
Resized       a storage has other bytes now: FSDP2 gathers into storages that it empties in between
Freed         nothing holds a storage any more
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.hardware.profile import Work
from meshwright.schedule import NO_EDGES, Action, Edges


class Began(NamedTuple):
    """``what``: an action of the schedule, or the name of a phase."""

    label: Action | str


class Op(NamedTuple):
    """``flops``: floating-point operations; ``moved``: bytes read and written; ``kind``: see `Work`;
    ``workspace``: bytes that a kernel on a CPU takes while it runs."""

    name: str
    kind: Work
    flops: int
    moved: int
    dtype: str
    workspace: int = 0


@dataclass(frozen=True)
class Collective:
    """``nbytes``: of the whole tensor: what is reduced, or what all ranks have gathered; ``ranks``: of the group.

    ``module``: whose forward asks for it; empty in a backward. Collectives of two blocks that do the same are equal.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    module: str = field(default="", compare=False)


class Allocated(NamedTuple):
    """``storage``: its number; ``function``: that made it, in ``module``, at ``line`` of the model's source."""

    storage: int
    nbytes: int
    function: str
    module: str
    line: str


class Resized(NamedTuple):
    storage: int
    nbytes: int


class Freed(NamedTuple):
    storage: int


Event = Began | Op | Collective | Allocated | Resized | Freed


@dataclass
class Trace:
    """What a rank did, in order.

    Attributes:
        events: in order.
        kept: storage → what it is for the run as a whole: ``parameters``, ``gradients``, ``optimizer``, ``buffers``, ``batch``.
        exchanged: the storages that collectives read or wrote.
        sent: those that were sent to another stage.
        assumed: (function, the model's line) of each read of a value that was not there.
        edges: the stages of a pipeline between which values cross.
        ran_whole: (function, module, the model's line) of each function that ran whole, for want of a rule for its shards.
    """

    events: list[Event] = field(default_factory=list)
    persistent: dict[int, str] = field(default_factory=dict)
    exchanged: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    assumed: tuple[tuple[str, str], ...] = ()
    edges: Edges = NO_EDGES
    ran_whole: tuple[tuple[str, str, str], ...] = ()
