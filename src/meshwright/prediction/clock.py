"""``Clock``: seconds of each action of a rank, from its functions, its host, and its collectives, which may overlap.

| quantity | equation | function |
| --- | --- | --- |
| a function on the device | max(flops / (peak · e), bytes / (bandwidth · e), launch) | `Profile.compute` |
| a collective | α–β model, by algorithm and by how its group lies on nodes | `meshwright.hardware.collectives` |
| functions of clip and optimizer on the device | update_fraction · Σ of them | `Clock._phase` |
| host of an action | job_action + functions · host + collectives · host_collective | `Clock._phase` |
| of FSDP2's hooks, with their collectives | + spans · host_unit / 4, see `SPANS_OF_UNIT` | `Clock._phase` |
| its sends and receives | host_send in place of host_collective | `Clock._phase` |
| host of clip and optimizer | functions · host_update, or host_sharded if parameters are DTensors | `Profile.update` |
| host and device of an action | max(Σ device, Σ host) if the device has a queue; on a CPU their sum | `waits_for_host` |
| a gather over a data axis | begins with the compute of the previous unit; its own unit waits for it | `_ActionClock.gather` |
| a reduction over a data axis | overlaps later functions; the end of the backward waits for it | `_ActionClock.reduce` |
| a sum over replicas, in a backward | begins after its reduction; overlaps later functions | `_ActionClock.sum` |
| functions during a collective | + contention · seconds of collectives that overlap functions | `_ActionClock.end` |
| any other collective | overlaps nothing | `_ActionClock.exchange` |

FSDP2 prefetches one unit (torch/distributed/fsdp/_fully_shard, ``_fsdp_state.py``). It sums over replicas on a separate
stream, which waits for the stream of reduce-scatters; the end of the backward waits for both (``foreach_reduce`` in
``_fsdp_collectives.py``, ``finalize_backward`` in ``_fsdp_param_group.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.hardware.collectives import Group, collective
from meshwright.hardware.profile import NOTHING, Estimate, Profile
from meshwright.mesh import Mesh
from meshwright.prediction.exchanges import Exchanges, exchanges_in
from meshwright.prediction.trace import Began, Collective, Event, Op, Trace
from meshwright.schedule import Action

DATA = ("dp_replicate", "dp_shard")
SPAN, SPANS_OF_UNIT = "_record_function_enter_new", 4
"""FSDP2's hooks name parts of themselves for a profiler (``record_function``). They show where hooks run that gather and reduce
nothing, as those of replicated units. A gather, or a reduction, of a unit has four spans with the hooks around it."""
UPDATES = ("clip", "optimizer")
"""The labels of the phases that update parameters."""


@dataclass
class PhaseSeconds:
    """Seconds of one action or phase.

    Attributes:
        device: seconds of functions on the device.
        host: seconds in which the device waits for the host; on a CPU, all seconds of the host.
        exposed: axis → seconds of its collectives that overlap no function.
    """

    device: Estimate = NOTHING
    host: Estimate = NOTHING
    exposed: dict[str, Estimate] = field(default_factory=dict)

    @property
    def total(self) -> Estimate:
        """Seconds of the action."""
        return Estimate.total([self.device, self.host, *self.exposed.values()])

    def expose(self, axis: str, seconds: Estimate) -> None:
        """Adds exposed seconds of a collective over an axis."""
        self.exposed[axis] = self.exposed.get(axis, NOTHING) + seconds


@dataclass(frozen=True)
class Phase:
    """One action of the schedule (F, B …), or one phase of a step (clip, optimizer), with its cost.

    Attributes:
        label: the action, or the name of the phase.
        spent: its seconds.
        sends: bytes that it sends to another stage.
        exchanges: its collectives. Names of modules have ``*`` in place of numbers of blocks.
    """

    label: Action | str
    spent: PhaseSeconds
    sends: int = 0
    exchanges: tuple[Exchanges, ...] = ()


class Clock:
    """Computes the seconds of traces, for one profile and one mesh.

    Args:
        profile: of the hardware.
        mesh: of the run.
        dtensors: whether the parameters are DTensors.
    """

    def __init__(self, profile: Profile, mesh: Mesh, *, dtensors: bool) -> None:
        self._profile, self._mesh, self._dtensors = profile, mesh, dtensors
        self._axes: dict[tuple[int, ...], tuple[str, Group]] = {}

    def phases(self, trace: Trace) -> list[Phase]:
        """The seconds of each action and phase in the last step of a trace, in order."""
        return [self._phase(label, events) for label, events in last_step(trace)]

    def _phase(self, label: Action | str, events: Sequence[Event]) -> Phase:
        """The cost of one action or phase with these events."""
        clock = _ActionClock(self._profile)
        backward = isinstance(label, Action) and label.kind in ("B", "I", "W")
        host = self._host_seconds_per_function(label, backward=backward)
        clock.host += Estimate(self._job_seconds(label), self._profile.scatter)
        sends = 0
        for event in events:
            if isinstance(event, Op):
                if event.flops or event.moved:  # if both are 0, no kernel runs
                    clock.device += self._profile.compute(event.flops, event.moved, event.dtype, event.kind)
                hook = self._profile.unit / SPANS_OF_UNIT if event.name == SPAN else 0.0
                clock.host += Estimate(host + hook, self._profile.scatter)
            elif isinstance(event, Collective) and event.kind in ("send", "recv"):
                sends += event.nbytes if event.kind == "send" else 0
                clock.host += Estimate(self._profile.send, self._profile.scatter)
            elif isinstance(event, Collective):
                self._collective(event, clock, in_action=isinstance(label, Action), backward=backward)
        if label in UPDATES:
            clock.device *= self._profile.update_fraction
        return Phase(label, clock.end(), sends, exchanges_in(events, lambda ranks: self._axis_and_group(ranks)[0]))

    def _host_seconds_per_function(self, label: Action | str, *, backward: bool) -> float:
        """Seconds of the host for one function of an action or phase."""
        profile = self._profile
        if label in UPDATES:
            return profile.update(dtensors=self._dtensors)
        return profile.host_backward if backward else profile.host

    def _job_seconds(self, label: Action | str) -> float:
        """Seconds of the host that a job adds to an action, or to the begin of a step."""
        if isinstance(label, Action):
            return self._profile.job_action if label.kind in ("F", "B", "I", "W") else 0.0
        return self._profile.job_step if label.startswith("step") else 0.0

    def _collective(self, event: Collective, clock: _ActionClock, *, in_action: bool, backward: bool) -> None:
        """Adds a collective to the clock of its action or phase.

        ``in_action``: whether it is in an action of the schedule, in which only FSDP2 gathers and scatters over data axes.
        """
        axis, group = self._axis_and_group(event.ranks)
        if group.ranks == 1:
            return
        over_data = axis in (*DATA, "·".join(DATA))
        of_unit = over_data and in_action and event.kind in ("all_gather", "reduce_scatter")
        if not of_unit:  # else the spans of FSDP2's hooks have the host's time
            clock.host += Estimate(self._profile.host_collective, self._profile.scatter)
        seconds = collective(self._profile, event.kind, event.nbytes, group)  # type: ignore[arg-type]
        overlapping = {"all_gather": clock.gather, "reduce_scatter": clock.reduce}
        if backward:
            overlapping["all_reduce"] = clock.sum
        overlaps = _has_queue(self._profile) and over_data
        (overlapping.get(event.kind, clock.exchange) if overlaps else clock.exchange)(axis, seconds)

    def _axis_and_group(self, ranks: tuple[int, ...]) -> tuple[str, Group]:
        """(the mesh axes along which the ranks of a group differ, how the group is spread over nodes).

        ``Group.per_node`` is the largest number of its ranks on one node.
        """
        if ranks not in self._axes:
            per_node = self._profile.devices_per_node
            nodes = [rank // per_node for rank in ranks]
            most_on_a_node = max(nodes.count(node) for node in set(nodes))
            self._axes[ranks] = self._mesh.along(ranks), Group(len(ranks), most_on_a_node)
        return self._axes[ranks]


class _ActionClock:
    """The time within one action: of its functions, and of gathers and reductions that overlap them.

    Call one method for each collective, add to ``device`` and ``host`` for each function, and then call ``end``.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.device = self.host = NOTHING
        self._spent = PhaseSeconds()
        self._unit_start = 0.0  # when the compute of the current FSDP2 unit began
        self._overlapping = 0.0  # seconds of all collectives that may overlap functions
        self._waited = 0.0  # of these, seconds in which the device waited
        self._gathered_at = self._reduced_at = self._summed_at = 0.0  # when the last collective of each stream ends
        self._last_reduction: tuple[str, Estimate] = ("", NOTHING)  # (axis, seconds)
        self._last_sum: tuple[str, Estimate] = ("", NOTHING)

    @property
    def now(self) -> float:
        """Seconds since the begin of the action, without the host."""
        return Estimate.total([self.device, *self._spent.exposed.values()]).seconds

    def exchange(self, axis: str, seconds: Estimate) -> None:
        """A collective that overlaps nothing."""
        self._spent.expose(axis, seconds)

    def gather(self, axis: str, seconds: Estimate) -> None:
        """A gather that began with the compute of the previous unit. The functions after it wait for it."""
        self._gathered_at = max(self._gathered_at, self._unit_start) + seconds.seconds
        self._overlapping += seconds.seconds
        self._wait(self._gathered_at, axis, seconds.scatter)
        self._unit_start = self.now

    def reduce(self, axis: str, seconds: Estimate) -> None:
        """A reduction that overlaps the functions after it."""
        self._reduced_at = max(self._reduced_at, self.now) + seconds.seconds
        self._last_reduction = axis, seconds
        self._overlapping += seconds.seconds

    def sum(self, axis: str, seconds: Estimate) -> None:
        """A sum over replicas of the last reduction's result. It overlaps the functions and reductions after it."""
        self._summed_at = max(self._summed_at, self._reduced_at, self.now) + seconds.seconds
        self._last_sum = axis, seconds
        self._overlapping += seconds.seconds

    def _wait(self, until: float, axis: str, scatter: float) -> None:
        """The device waits until a collective ends."""
        if (wait := until - self.now) > 0:
            self._spent.expose(axis, Estimate(wait, scatter))
            self._waited += wait

    def end(self) -> PhaseSeconds:
        """Waits for all reductions and returns the seconds of the action."""
        for until, (axis, seconds) in ((self._reduced_at, self._last_reduction), (self._summed_at, self._last_sum)):
            self._wait(until, axis, seconds.scatter)
        overlapped = min(self.device.seconds, max(0.0, self._overlapping - self._waited))
        self.device += Estimate(self._profile.contention * overlapped, self._profile.scatter)
        self._spent.device = self.device
        self._spent.host = Estimate(waits_for_host(self._profile, self.host.seconds, self.now), self.host.scatter)
        return self._spent


def waits_for_host(profile: Profile, host: float, busy: float) -> float:
    """Seconds in which a device that computes for ``busy`` seconds waits for a host that needs ``host`` seconds.

    max(0, host − busy) if the device has a queue, which the host fills while the device computes; on a CPU ``host``.
    """
    return max(0.0, host - busy) if _has_queue(profile) else host


def _has_queue(profile: Profile) -> bool:
    """Whether functions are queued on the device while the host goes on, as on a GPU."""
    return profile.cores == 0


def last_step(trace: Trace) -> list[tuple[Action | str, list[Event]]]:
    """(label, events) of each action and phase in the last step of a trace."""
    phases: list[tuple[Action | str, list[Event]]] = []
    for event in trace.events:
        if isinstance(event, Began):
            if _is_step(event.label):
                phases = []
            phases.append((event.label, []))
        elif phases:
            phases[-1][1].append(event)
    return phases


def forward_flops(trace: Trace) -> int:
    """The floating-point operations of the forwards in the last step of a trace."""
    forwards = [events for label, events in last_step(trace) if isinstance(label, Action) and label.kind == "F"]
    return sum(event.flops for events in forwards for event in events if isinstance(event, Op))


def before_last_step(trace: Trace) -> Trace:
    """The trace without its last step."""
    begins = [i for i, event in enumerate(trace.events) if isinstance(event, Began) and _is_step(event.label)]
    return replace(trace, events=trace.events[: begins[-1]])


def _is_step(what: Action | str) -> bool:
    return isinstance(what, str) and what.startswith("step")
