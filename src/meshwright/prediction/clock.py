"""Seconds of what a rank does: functions on the device, the host that calls them, and collectives, overlapped as a run does.

| what | equation | where |
| --- | --- | --- |
| a function on the device | max(flops / (peak · e), bytes / (bandwidth · e), launch) | `Profile.compute` |
| a collective | α–β by algorithm and by where its group stands | `meshwright.hardware.collectives` |
| host of an action | job_action + functions · host + collectives · host_collective (over data: host_unit) | `Clock._phase` |
| host of clip and optimizer | functions · host_update, or host_sharded where parameters are DTensors | `Clock._of_function` |
| host and device of an action | max(Σ device, Σ host) if the device has a queue; on a CPU their sum | `behind` |
| a gather of the data axes | begins with the compute of the unit before; its own unit waits for it | `_Playing.gather` |
| a reduction of the data axes | runs beside what follows; the backward's end waits for it | `_Playing.reduce` |
| a sum over replicas, in a backward | begins after its reduction; runs beside all that follows | `_Playing.sum` |
| functions beside a collective | contention · seconds of collectives that run beside functions | `_Playing.end` |
| any other collective | nothing runs beside it | `_Playing.exchange` |

FSDP2 prefetches one unit ahead (torch/distributed/fsdp/_fully_shard, ``_fsdp_state.py``). It sums over replicas on a stream of
its own, which waits for the stream of reduce-scatters; the end of the backward waits for it (``foreach_reduce`` in
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


@dataclass
class Spent:
    """Seconds of one action or phase.

    Attributes:
        device: of functions.
        host: that the device waits for the host; on a CPU, all of the host's.
        exposed: axis → of its collectives, what nothing runs beside.
    """

    device: Estimate = NOTHING
    host: Estimate = NOTHING
    exposed: dict[str, Estimate] = field(default_factory=dict)

    @property
    def total(self) -> Estimate:
        return Estimate.total([self.device, self.host, *self.exposed.values()])

    def expose(self, axis: str, seconds: Estimate) -> None:
        self.exposed[axis] = self.exposed.get(axis, NOTHING) + seconds


@dataclass(frozen=True)
class Phase:
    """One action or phase of a rank's step, in order.

    Attributes:
        spent: its seconds.
        sends: bytes that go to another stage.
        exchanges: its collectives, the numbers of blocks left out of the names of modules.
    """

    what: Action | str
    spent: Spent
    sends: int = 0
    exchanges: tuple[Exchanges, ...] = ()


class Clock:
    """Plays traces of ranks of a mesh."""

    def __init__(self, profile: Profile, mesh: Mesh) -> None:
        self._profile, self._mesh = profile, mesh
        self._axes: dict[tuple[int, ...], tuple[str, Group]] = {}

    def phases(self, trace: Trace) -> list[Phase]:
        """The seconds of each action and phase in the last step of a trace, in order."""
        return [self._phase(label, events) for label, events in last_step(trace)]

    def _phase(self, label: Action | str, events: Sequence[Event]) -> Phase:
        played = _Playing(self._profile)
        backward = isinstance(label, Action) and label.kind in ("B", "I", "W")
        host = self._host_seconds_per_function(label, backward=backward)
        played.host += Estimate(self._job_seconds(label), self._profile.scatter)
        sends = 0
        for event in events:
            if isinstance(event, Op):
                if event.flops or event.moved:  # else no kernel runs
                    played.device += self._profile.compute(event.flops, event.moved, event.dtype, event.kind)
                played.host += Estimate(host, self._profile.scatter)
            elif isinstance(event, Collective) and event.kind in ("send", "recv"):
                sends += event.nbytes if event.kind == "send" else 0
                played.host += Estimate(self._profile.host_collective, self._profile.scatter)
            elif isinstance(event, Collective):
                self._collective(event, played, backward=backward)
        return Phase(label, played.end(), sends, exchanges_in(events, lambda ranks: self._where(ranks)[0]))

    def _host_seconds_per_function(self, label: Action | str, *, backward: bool) -> float:
        """Seconds that the host takes for one function."""
        profile = self._profile
        if label in ("clip", "optimizer"):
            return profile.update(sharded=self._mesh.data_size * self._mesh.axis_size("tp") > 1)
        return profile.host_backward if backward else profile.host

    def _job_seconds(self, label: Action | str) -> float:
        """Seconds that a job adds on the host to an action, or to a step as it begins."""
        if isinstance(label, Action):
            return self._profile.job_action if label.kind in ("F", "B", "I", "W") else 0.0
        return self._profile.job_step if label.startswith("step") else 0.0

    def _collective(self, event: Collective, played: _Playing, *, backward: bool) -> None:
        axis, group = self._where(event.ranks)
        if group.ranks == 1:
            return
        over_data = axis in (*DATA, "·".join(DATA))
        host = (over_data and self._profile.host_unit) or self._profile.host_collective
        played.host += Estimate(host, self._profile.scatter)
        seconds = collective(self._profile, event.kind, event.nbytes, group)  # type: ignore[arg-type]
        beside = {"all_gather": played.gather, "reduce_scatter": played.reduce}
        if backward:
            beside["all_reduce"] = played.sum
        overlaps = _has_queue(self._profile) and over_data
        (beside.get(event.kind, played.exchange) if overlaps else played.exchange)(axis, seconds)

    def _where(self, ranks: tuple[int, ...]) -> tuple[str, Group]:
        """The mesh axes along which the ranks of a group differ, and how many of its ranks a node holds at most."""
        if ranks not in self._axes:
            per_node = self._profile.devices_per_node
            nodes = [rank // per_node for rank in ranks]
            most_on_a_node = max(nodes.count(node) for node in set(nodes))
            self._axes[ranks] = self._mesh.along(ranks), Group(len(ranks), most_on_a_node)
        return self._axes[ranks]


class _Playing:
    """The clocks of one action: of what computes, and of gathers and reductions that run beside it."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.device = self.host = NOTHING
        self._spent = Spent()
        self._begun = 0.0  # of the unit that computes
        self._moving = self._waited = 0.0  # seconds of collectives that may run beside functions; and of these, alone
        self._gathering = self._reducing = self._summing = 0.0  # until when
        self._reduces: tuple[str, Estimate] = ("", NOTHING)
        self._sums: tuple[str, Estimate] = ("", NOTHING)

    @property
    def now(self) -> float:
        return Estimate.total([self.device, *self._spent.exposed.values()]).seconds

    def exchange(self, axis: str, seconds: Estimate) -> None:
        """A collective that nothing runs beside."""
        self._spent.expose(axis, seconds)

    def gather(self, axis: str, seconds: Estimate) -> None:
        """A gather that began with the unit before; what follows waits for it."""
        self._gathering = max(self._gathering, self._begun) + seconds.seconds
        self._moving += seconds.seconds
        self._wait(self._gathering, axis, seconds.scatter)
        self._begun = self.now

    def reduce(self, axis: str, seconds: Estimate) -> None:
        """A reduction that runs beside what follows."""
        self._reducing = max(self._reducing, self.now) + seconds.seconds
        self._reduces = axis, seconds
        self._moving += seconds.seconds

    def sum(self, axis: str, seconds: Estimate) -> None:
        """A sum over replicas of what was reduced last, which runs beside what follows, and beside reductions."""
        self._summing = max(self._summing, self._reducing, self.now) + seconds.seconds
        self._sums = axis, seconds
        self._moving += seconds.seconds

    def _wait(self, until: float, axis: str, scatter: float) -> None:
        """The device waits for a collective."""
        if (wait := until - self.now) > 0:
            self._spent.expose(axis, Estimate(wait, scatter))
            self._waited += wait

    def end(self) -> Spent:
        for until, (axis, seconds) in ((self._reducing, self._reduces), (self._summing, self._sums)):
            self._wait(until, axis, seconds.scatter)
        beside = min(self.device.seconds, max(0.0, self._moving - self._waited))
        self.device += Estimate(self._profile.contention * beside, self._profile.scatter)
        self._spent.device = self.device
        self._spent.host = Estimate(behind(self._profile, self.host.seconds, self.now), self.host.scatter)
        return self._spent


def behind(profile: Profile, host: float, busy: float) -> float:
    """Seconds that a device waits for a host that takes ``host`` seconds, if it is busy for so many itself.

    max(0, host − busy) if the device has a queue, which the host fills while it works; on a CPU all of the host's.
    """
    return max(0.0, host - busy) if _has_queue(profile) else host


def _has_queue(profile: Profile) -> bool:
    return profile.cores == 0


def last_step(trace: Trace) -> list[tuple[Action | str, list[Event]]]:
    """The actions and phases of the last step."""
    phases: list[tuple[Action | str, list[Event]]] = []
    for event in trace.events:
        if isinstance(event, Began):
            if _is_step(event.what):
                phases = []
            phases.append((event.what, []))
        elif phases:
            phases[-1][1].append(event)
    return phases


def before_last_step(trace: Trace) -> Trace:
    """The trace without its last step."""
    begins = [i for i, event in enumerate(trace.events) if isinstance(event, Began) and _is_step(event.what)]
    return replace(trace, events=trace.events[: begins[-1]])


def _is_step(what: Action | str) -> bool:
    return isinstance(what, str) and what.startswith("step")
