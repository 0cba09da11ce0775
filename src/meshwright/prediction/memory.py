"""``Memory``: the peak memory of a trace, by kind, and when it is reached.

The kind of a storage follows from when it is allocated and freed:

    parameters, buffers, batch, gradients, optimizer   persistent storages, which the run has labelled (``Trace.persistent``)
    unsharded parameters                               storages that FSDP2 empties and fills again
    communication                                      other storages that collectives read or write
    activations                                        allocated in a forward, and freed in a later action
    unreduced gradients                                allocated in another action, and freed in a later one
    temporaries                                        all other storages
    kernels and backends                               memory that they allocate while they run (``allocations``)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.prediction.allocations import CPU, Allocations
from meshwright.prediction.trace import Allocated, Began, Collective, Event, Freed, Op, Resized, Trace
from meshwright.schedule import Action

TEMPORARIES, ACTIVATIONS, UNREDUCED = "temporaries", "activations", "unreduced gradients"
UNSHARDED, COMMUNICATION = "unsharded parameters", "communication"
BATCH, OPTIMIZER = "batch", "optimizer"
KERNELS = "kernels and backends"
Site = tuple[str, str, str]
"""The place where a storage was allocated: (module, line of the model, function)."""


@dataclass(frozen=True)
class PhaseMemory:
    """The peak memory of an action of the schedule, or of a phase of the step.

    Attributes:
        label: the action, or the name of the phase.
        nbytes: bytes at the peak.
        items: kind → bytes at the peak.
    """

    label: str
    nbytes: int
    items: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """The peak memory of a rank in a step.

    Attributes:
        peak: bytes that live at the peak.
        items: kind → bytes at the peak.
        when: the action or phase in which the peak is reached.
        sites: site → bytes of activations and temporaries at the peak.
        persistent: bytes that live between steps.
        reserve: bytes that an allocator may hold beyond those that live, as a fraction of them.
        phases: the peak of each action and phase of the step, in order. Empty in a measurement and in a dry run.
    """

    peak: int
    items: Mapping[str, int] = field(default_factory=dict)
    when: str = ""
    sites: Mapping[Site, int] = field(default_factory=dict)
    persistent: int = 0
    reserve: float = 0.0
    phases: tuple[PhaseMemory, ...] = ()

    @property
    def low(self) -> int:
        """Least bytes that an allocator holds at the peak: those that live."""
        return self.peak

    @property
    def high(self) -> int:
        """Most bytes that an allocator may hold at the peak: those that live, and the gaps between them."""
        return round(self.peak * (1 + self.reserve))


@dataclass(frozen=True)
class Moment:
    """The events of a trace between two functions or collectives, including the second one.

    Attributes:
        name: name of the function, or kind of the collective, at its end.
        nbytes: the most bytes that live during these events.
        at: number of the event at which they live.
        transient: of the bytes, those that live only during that event.
        module: the module of a forward that allocated last. It tells blocks apart that call the same functions. Backwards have
            none.
    """

    name: str
    nbytes: int
    at: int
    transient: int = 0
    module: str = ""


@dataclass(frozen=True)
class PhaseMoments:
    """The memory of an action or phase of a trace.

    Attributes:
        label: the action, or the name of the phase.
        start, end: bytes that live when it begins, and when it has ended.
        moments: its moments, in order.
    """

    label: Action | str
    start: int
    end: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Levels:
    """The memory of a trace over time.

    Attributes:
        trace: the trace.
        events: its events. If the backend keeps sent tensors, their ``Freed`` events come later than in the trace.
        phases: the memory of each action and phase, in order.
    """

    trace: Trace
    events: list[Event]
    phases: list[PhaseMoments]

    def items(self, at: int) -> tuple[dict[str, int], dict[Site, int]]:
        """The memory after an event: (kind → bytes, site → bytes). ``at``: number of the event."""
        return _items(self.trace, self.events[: at + 1])

    def kinds(self, after: Iterable[int]) -> dict[int, dict[str, int]]:
        """Number of an event → kind → bytes that live after it. ``after``: numbers of events."""
        kinds, live, wanted = kinds_of(self.trace), dict[int, int](), frozenset(after)
        items: dict[str, int] = defaultdict(int)
        kinds_after: dict[int, dict[str, int]] = {-1: {}}
        for index, event in enumerate(self.events):
            if isinstance(event, (Allocated, Resized, Freed)):
                items[kinds[event.storage]] += _change(event, live)
            if index in wanted:
                kinds_after[index] = {kind: nbytes for kind, nbytes in items.items() if nbytes}
        return kinds_after

    def nbytes(self, storages: Collection[int], after: Iterable[int]) -> dict[int, int]:
        """Number of an event → bytes of these storages that live after it. ``after``: numbers of events."""
        live, wanted, nbytes = dict[int, int](), frozenset(after), 0
        bytes_after = {-1: 0}
        for index, event in enumerate(self.events):
            if isinstance(event, (Allocated, Resized, Freed)) and event.storage in storages:
                nbytes += _change(event, live)
            if index in wanted:
                bytes_after[index] = nbytes
        return bytes_after

    @property
    def persistent(self) -> int:
        """Bytes that live between steps."""
        return _persistent_bytes(self.trace)


def levels_of(trace: Trace, allocations: Allocations = CPU) -> Levels:
    """The memory of a trace over time. ``allocations``: those of the machine's kernels and backends."""
    events = _with_late_frees(trace) if allocations.keeps_sends else trace.events
    phases: list[PhaseMoments] = []
    moments: list[Moment] = []
    label: Action | str = ""
    live: dict[int, int] = {}
    total = start = 0
    module = ""  # of the last allocation
    highest = Moment("", 0, -1)  # the highest since the last function or collective
    for index, event in enumerate(events):
        if isinstance(event, Began):
            phases.append(PhaseMoments(label, start, total, (*moments, highest)))
            label, start, moments, module, highest = event.label, total, [], "", Moment("", total, index)
            continue
        module = event.module if isinstance(event, Allocated) else module
        total += _change(event, live)
        transient = _transient_bytes(event, allocations)
        if total + transient > highest.nbytes:
            highest = Moment("", total + transient, index, transient)
        if isinstance(event, (Op, Collective)):
            name = event.name if isinstance(event, Op) else event.kind
            moments.append(replace(highest, name=name, module=module))
            highest = Moment("", total, index)
    phases.append(PhaseMoments(label, start, total, (*moments, highest)))
    return Levels(trace, events, phases)


def memory_of(trace: Trace, allocations: Allocations = CPU, reserve: float = 0.0) -> Memory:
    """The peak memory of a trace.

    Args:
        allocations: those of the machine's kernels and backends.
        reserve: of the allocator; see ``Memory``.
    """
    levels = levels_of(trace, allocations)
    phase, moment = max(
        ((phase, moment) for phase in levels.phases for moment in phase.moments), key=lambda pair: pair[1].nbytes
    )
    items, sites = levels.items(moment.at)
    if moment.transient:
        items[KERNELS] = moment.transient
    return Memory(moment.nbytes, items, str(phase.label), sites, levels.persistent, reserve)


def _transient_bytes(event: Event, allocations: Allocations) -> int:
    """Bytes that kernels and backends allocate and free within an event."""
    if isinstance(event, Collective):
        return round(allocations.collectives.get(event.kind, 0.0) * event.nbytes)
    return event.workspace if isinstance(event, Op) and allocations.workspaces else 0


def _change(event: Event, live: dict[int, int]) -> int:
    """Bytes that an event allocates; negative if it frees them. Updates ``live``: storage → bytes."""
    if isinstance(event, (Allocated, Resized)):
        before = live.get(event.storage, 0)
        live[event.storage] = event.nbytes
        return event.nbytes - before
    return -live.pop(event.storage, 0) if isinstance(event, Freed) else 0


def _with_late_frees(trace: Trace) -> list[Event]:
    """The events of a trace in which each sent storage lives until the end of the schedule: its ``Freed`` event moves there."""
    events: list[Event] = []
    late_frees: list[Event] = []
    for event in trace.events:
        if isinstance(event, Began) and isinstance(event.label, str):
            events += late_frees
            late_frees = []
        late = isinstance(event, Freed) and event.storage in trace.sent
        (late_frees if late else events).append(event)
    return events + late_frees


def _items(trace: Trace, events: list[Event]) -> tuple[dict[str, int], dict[Site, int]]:
    """The memory after the first events of a trace: (kind → bytes, site → bytes)."""
    kinds, live = kinds_of(trace), dict[int, int]()
    allocated = {event.storage: event for event in trace.events if isinstance(event, Allocated)}
    for event in events:
        _change(event, live)
    items: dict[str, int] = defaultdict(int)
    sites: dict[Site, int] = defaultdict(int)
    for storage, nbytes in live.items():
        items[kinds[storage]] += nbytes
        if kinds[storage] in (ACTIVATIONS, TEMPORARIES):
            sites[allocated[storage].module, allocated[storage].line, allocated[storage].function] += nbytes
    return {kind: nbytes for kind, nbytes in items.items() if nbytes}, dict(sites)


def _persistent_bytes(trace: Trace) -> int:
    """Bytes of persistent storages at the end of a trace."""
    live: dict[int, int] = {}
    for event in trace.events:
        _change(event, live)
    return sum(nbytes for storage, nbytes in live.items() if storage in trace.persistent)


def kinds_of(trace: Trace) -> dict[int, str]:
    """Storage → its kind. The kinds are in this file's docstring."""
    resized = {event.storage for event in trace.events if isinstance(event, Resized)}
    allocated: dict[int, tuple[int, str]] = {}  # storage → (number, kind) of the action in which it was allocated
    kinds: dict[int, str] = {}
    number, kind = 0, ""
    for event in trace.events:
        if isinstance(event, Began):
            number, kind = number + 1, event.label.kind if isinstance(event.label, Action) else ""
        elif isinstance(event, Allocated):
            allocated[event.storage] = number, kind
            kinds[event.storage] = TEMPORARIES
            if event.storage in resized:
                kinds[event.storage] = UNSHARDED
            elif event.storage in trace.exchanged:
                kinds[event.storage] = COMMUNICATION
        elif isinstance(event, Freed) and kinds[event.storage] == TEMPORARIES and allocated[event.storage][0] != number:
            action_kind = allocated[event.storage][1]
            kinds[event.storage] = ACTIVATIONS if action_kind == "F" else UNREDUCED if action_kind else TEMPORARIES
    return kinds | trace.persistent
