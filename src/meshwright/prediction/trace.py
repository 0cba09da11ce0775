"""``Trace``: what one rank does in a step, in order: functions, collectives, allocations. Plain values.

event         meaning
Began         the rank began an action of its schedule (F, B …), or a phase of the step (clip, optimizer)
Op            an ATen function ran: its operations, and the bytes that it read and wrote
Collective    tensors were exchanged with a group of ranks
Allocated     a storage was allocated, in a module, at a line of the model
Resized       the size of a storage changed: FSDP2 gathers into storages, and empties them afterwards
Freed         a storage was freed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.hardware.profile import CallKind
from meshwright.schedule import NO_EDGES, Action, Edges


class Began(NamedTuple):
    """The begin of an action or phase. ``label``: the action, or the name of the phase."""

    label: Action | str


class Op(NamedTuple):
    """An ATen function that ran.

    ``flops``: floating-point operations; ``moved``: bytes read and written; ``kind``: see `CallKind`; ``dtype``: of the
    computation;
    ``workspace``: bytes that a kernel on a CPU allocates while it runs.
    """

    name: str
    kind: CallKind
    flops: int
    moved: int
    dtype: str
    workspace: int = 0


@dataclass(frozen=True)
class Collective:
    """A collective, send or receive.

    ``nbytes``: bytes of the full tensor: the input of a reduction, the result of an all-gather; ``ranks``: those of the group;
    ``module``: the module whose forward calls it, empty in a backward. Comparisons ignore ``module``, so that the
    collectives of two blocks that do the same are equal.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    module: str = field(default="", compare=False)


class Allocated(NamedTuple):
    """The allocation of a storage, by an ATen function in a module, at a line of the model.

    ``storage``: number of the storage.
    """

    storage: int
    nbytes: int
    function: str
    module: str
    line: str


class Resized(NamedTuple):
    """A change of a storage's size. ``nbytes``: its new size."""

    storage: int
    nbytes: int


class Freed(NamedTuple):
    """The end of a storage."""

    storage: int


Event = Began | Op | Collective | Allocated | Resized | Freed


@dataclass
class Trace:
    """What a rank did in some steps.

    Attributes:
        events: in order.
        persistent: storage that lives between steps → its kind: ``parameters``, ``gradients``, ``optimizer``, ``buffers``
            or ``batch``.
        exchanged: the storages that collectives read or wrote.
        sent: the storages that were sent to another stage.
        assumed: (function, line of the model) of each read of a value that a rehearsal does not have.
        edges: the pairs of pipeline stages between which values are sent.
        ran_whole: (function, module, line of the model) of each function without a rule for shards: its inputs were gathered.
        batch_statistics: whether a forward computes statistics of several rows.
    """

    events: list[Event] = field(default_factory=list)
    persistent: dict[int, str] = field(default_factory=dict)
    exchanged: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    assumed: tuple[tuple[str, str], ...] = ()
    edges: Edges = NO_EDGES
    ran_whole: tuple[tuple[str, str, str], ...] = ()
    batch_statistics: bool = False
