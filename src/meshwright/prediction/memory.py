"""``Memory``: what of a trace is memory: the most bytes that live at once, itemised, and the moment of that.

A storage is called by when it comes and goes:

    parameters, buffers, batch, gradients, optimizer   what the run keeps, by what it is (``Trace.kept``)
    unsharded parameters                               storages that FSDP2 empties and fills again
    communication                                      of others, those that collectives read or write
    activations                                        made in a forward, and alive after it
    unreduced gradients                                made in a backward, and alive after it
    temporaries                                        the rest
    kernels and backends                               what they allocate while they run (``allocations``)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshwright.prediction.allocations import CPU, Allocations
from meshwright.prediction.trace import Allocated, Began, Collective, Event, Freed, Op, Resized, Trace
from meshwright.schedule import Action

TEMPORARIES, ACTIVATIONS, UNREDUCED = "temporaries", "activations", "unreduced gradients"
UNSHARDED = "unsharded parameters"
KERNELS = "kernels and backends"
Site = tuple[str, str, str]
"""(module, the model's line, function)"""


@dataclass(frozen=True)
class PhaseMemory:
    """The most bytes that live in an action of the schedule, or a phase of the step: bytes, and what they are."""

    label: str
    nbytes: int
    items: Mapping[str, int]


@dataclass(frozen=True)
class Memory:
    """The most bytes that live at once on a rank, and what they are.

    Attributes:
        peak: bytes.
        items: of them, by what they are.
        when: the action of the schedule, or the phase of the step.
        sites: bytes of activations and temporaries, by where they were made.
        kept: bytes that live between steps.
        reserve: fraction by which an allocator may hold more than what lives.
        phases: the same of each action and phase of the step, in order; none if only the peak is known.
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
        """Bytes that an allocator holds at least at the peak: those that live."""
        return self.peak

    @property
    def high(self) -> int:
        """Bytes that an allocator may hold at the peak: those that live, and what lies between them."""
        return round(self.peak * (1 + self.reserve))


@dataclass(frozen=True)
class Moment:
    """A stretch of a trace up to one function or collective.

    Attributes:
        name: of the function.
        nbytes: that live at most in it.
        at: the event at which they do; ``within``: of the bytes, those that live during that event only.
    """

    name: str
    nbytes: int
    at: int
    transient: int = 0


@dataclass(frozen=True)
class PhaseMoments:
    """The memory of an action or phase: bytes that live when it begins and when it has ended, and its moments."""

    label: Action | str
    start: int
    end: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class Levels:
    """The memory of a trace, phase by phase.

    Attributes:
        events: of the trace, those that are about memory in the order in which memory comes and goes.
    """

    trace: Trace
    events: list[Event]
    phases: list[PhaseMoments]

    def items(self, at: int) -> tuple[dict[str, int], dict[Site, int]]:
        """What lives after an event: bytes by kind, and by site."""
        return _items(self.trace, self.events[: at + 1])

    def kinds(self, after: Iterable[int]) -> dict[int, dict[str, int]]:
        """Event → what lives after it: bytes by kind. ``after``: the events that are asked about."""
        kinds, live, wanted = kinds_of(self.trace), dict[int, int](), frozenset(after)
        items: dict[str, int] = defaultdict(int)
        kinds_after: dict[int, dict[str, int]] = {-1: {}}
        for index, event in enumerate(self.events):
            if isinstance(event, (Allocated, Resized, Freed)):
                items[kinds[event.storage]] += _change(event, live)
            if index in wanted:
                kinds_after[index] = {kind: nbytes for kind, nbytes in items.items() if nbytes}
        return kinds_after

    @property
    def persistent(self) -> int:
        """Bytes that live between steps."""
        return _persistent_bytes(self.trace)


def levels_of(trace: Trace, allocations: Allocations = CPU) -> Levels:
    """The memory of a trace. ``allocations``: what kernels and backends allocate while they run."""
    events = _with_late_frees(trace) if allocations.keeps_sends else trace.events
    phases: list[PhaseMoments] = []
    moments: list[Moment] = []
    label: Action | str = ""
    live: dict[int, int] = {}
    total = start = 0
    highest = Moment("", 0, -1)  # of this stretch
    for index, event in enumerate(events):
        if isinstance(event, Began):
            phases.append(PhaseMoments(label, start, total, (*moments, highest)))
            label, start, moments, highest = event.label, total, [], Moment("", total, index)
            continue
        total += _change(event, live)
        transient = _transient_bytes(event, allocations)
        if total + transient > highest.nbytes:
            highest = Moment("", total + transient, index, transient)
        if isinstance(event, (Op, Collective)):
            moments.append(replace(highest, name=event.name if isinstance(event, Op) else event.kind))
            highest = Moment("", total, index)
    phases.append(PhaseMoments(label, start, total, (*moments, highest)))
    return Levels(trace, events, phases)


def memory_of(trace: Trace, allocations: Allocations = CPU, reserve: float = 0.0) -> Memory:
    """The moment of a trace at which most bytes live.

    Args:
        allocations: what kernels and backends allocate while they run.
        reserve: of the allocator.
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
    """Bytes that live only during an event: they are allocated and freed within it."""
    if isinstance(event, Collective):
        return round(allocations.collectives.get(event.kind, 0.0) * event.nbytes)
    return event.workspace if isinstance(event, Op) and allocations.workspaces else 0


def _change(event: Event, live: dict[int, int]) -> int:
    """Bytes that an event allocates, or frees if negative. Updates ``live``: storage → bytes."""
    if isinstance(event, (Allocated, Resized)):
        before = live.get(event.storage, 0)
        live[event.storage] = event.nbytes
        return event.nbytes - before
    return -live.pop(event.storage, 0) if isinstance(event, Freed) else 0


def _with_late_frees(trace: Trace) -> list[Event]:
    """The events of a trace, if each sent storage lives until the end of the schedule: its ``Freed`` moves there."""
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
    """What lives after these events of a trace: bytes by kind, and by site."""
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
    live: dict[int, int] = {}
    for event in trace.events:
        _change(event, live)
    return sum(nbytes for storage, nbytes in live.items() if storage in trace.persistent)


def kinds_of(trace: Trace) -> dict[int, str]:
    """Storage → its kind, one of those in this file's docstring."""
    resized = {event.storage for event in trace.events if isinstance(event, Resized)}
    allocated: dict[int, tuple[int, str]] = {}  # storage → the ordinal and kind of the action in which it was allocated
    kinds: dict[int, str] = {}
    ordinal, kind = 0, ""
    for event in trace.events:
        if isinstance(event, Began):
            ordinal, kind = ordinal + 1, event.label.kind if isinstance(event.label, Action) else ""
        elif isinstance(event, Allocated):
            allocated[event.storage] = ordinal, kind
            kinds[event.storage] = TEMPORARIES
            if event.storage in resized:
                kinds[event.storage] = UNSHARDED
            elif event.storage in trace.exchanged:
                kinds[event.storage] = "communication"
        elif (
            isinstance(event, Freed) and kinds[event.storage] == TEMPORARIES and allocated[event.storage][0] != ordinal
        ):
            begun = allocated[event.storage][1]
            kinds[event.storage] = ACTIVATIONS if begun == "F" else UNREDUCED if begun else TEMPORARIES
    return kinds | trace.persistent
