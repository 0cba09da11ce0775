"""``Observer``: when this rank began and ended what it does in one step: actions of the schedule, transfers, collectives,
clipping, the optimizer. Of each place on the pipeline axis the first rank is observed.

    with job.observe(optimizer) as seen:     a barrier, so that the clocks of nodes can be compared
        job.step(batch)
        job.clip_grad_norm_(1.0)
        optimizer.step()
    seen.timeline                            after one gather: a ``Timeline`` on rank 0, None on other ranks

Zero is the moment at which the first rank of a node leaves the barrier: ranks of one node share a clock, those of another
are off by no more than the time in which a barrier lets all ranks go. A step that nobody observes has neither barrier nor
gather, and asks once for each action and each collective whether it is observed.

A collective that the host waits for (on a CPU) ends when it has waited; any other when its future is done, for which the
work's own callback marks the moment. A receive ends when the action that needs it has waited for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from meshwright.described import nbytes_of
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.schedule import Action
from meshwright.spmd.comm import Ledger
from meshwright.spmd.one_process import hearing
from meshwright.watch.moments import Moment, Moments

if TYPE_CHECKING:
    from meshwright.draw.timeline import Timeline
    from meshwright.runtime.pipeline.stages import Stages

_KINDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "all_to_all": "all_to_all",
}  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """A collective of this rank.

    Attributes:
        axis: the axes along which the ranks of its group differ, joined by dots.
        start, stop: in seconds of the host's clock.
        bytes: the larger of what is put in and what comes out.
        waited: whether the host did nothing else until it had ended.
    """

    axis: str
    kind: str
    start: float
    stop: float
    bytes: int
    waited: bool


@dataclass(frozen=True)
class Seen:
    """What one rank did in a step, in seconds.

    Attributes:
        did: what, when it began, when it ended: actions; and ``step``, ``clip``, ``optimizer`` and other phases.
        sent: bytes of each send; ``arrived``: when a receive had come.
    """

    did: tuple[tuple[Action | str, float, float], ...]
    sent: tuple[tuple[Action, int], ...]
    arrived: tuple[tuple[Action, float], ...]
    collectives: tuple[Collective, ...]

    def since(self, zero: float) -> Seen:
        """The same in seconds since another moment."""
        return Seen(
            tuple((what, start - zero, stop - zero) for what, start, stop in self.did),
            self.sent,
            tuple((action, when - zero) for action, when in self.arrived),
            tuple(replace(one, start=one.start - zero, stop=one.stop - zero) for one in self.collectives),
        )


class Observer:
    """Follows one step of this rank.

    Attributes:
        timeline: the step in time, on rank 0, when it has been observed; None before, and on other ranks.
    """

    def __init__(self, recipe: Recipe, groups: Groups, ledger: Ledger) -> None:
        self._recipe, self._groups, self._ledger = recipe, groups, ledger
        self._moments = Moments(groups.device)
        self._did: list[tuple[Action | str, Moment, Moment]] = []
        self._sent: list[tuple[Action, int]] = []
        self._arrived: list[tuple[Action, Moment]] = []
        self._collectives: list[tuple[str, str, Moment, list[Moment], int, bool]] = []
        self._axes: dict[str, str] = {}  # name of a group → axes
        self.timeline: Timeline | None = None

    # --- while the step runs ------------------------------------------------------------------------------------------

    @contextmanager
    def doing(self, what: Action | str) -> Iterator[None]:
        """For the time of an action, or of a phase of the step."""
        start = self._moments.now()
        yield
        self._did.append((what, start, self._moments.now()))

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """A phase in which this library runs: its collectives are followed."""
        self._ledger.heard = self._heard
        try:
            with hearing(self._heard), self.doing(what):
                yield
        finally:
            self._ledger.heard = None

    def sent(self, action: Action, nbytes: int) -> None:
        """A send has begun."""
        self._sent.append((action, nbytes))

    def arrived(self, action: Action) -> None:
        """A receive has come, and was waited for."""
        self._arrived.append((action, self._moments.now()))

    @contextmanager
    def following(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """For its time the steps of optimizers are phases."""
        began: list[Moment] = []

        def before(*_: Any) -> None:
            began.append(self._moments.now())

        def after(*_: Any) -> None:
            self._did.append(("optimizer", began.pop(), self._moments.now()))

        with ExitStack() as stack:
            for one in optimizers:
                stack.callback(one.register_step_pre_hook(before).remove)
                stack.callback(one.register_step_post_hook(after).remove)
            yield

    def _heard(self, name: str, group: dist.ProcessGroup, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """A collective, called and followed. Sends and receives of a pipeline are followed as actions."""
        kind = next((kind for part, kind in _KINDS.items() if part in name), name.strip("_"))
        axis = self._axis(group)
        if kind in ("send", "recv", "recv_anysource") or not axis:
            return call()
        tensors = [_tensors(one) for one in arguments]
        on_host = all(t.device.type == "cpu" for those in tensors for t in those)
        now = time.perf_counter if on_host else self._moments.now
        start, stop = now(), list[Moment]()
        work = call()
        waited = on_host and not any(getattr(one, "asyncOp", False) for one in arguments)
        if work is not None and not waited:
            work.get_future().then(lambda _: stop.append(now()))
        else:
            if work is not None:
                work.wait()  # as the caller would do next
            stop.append(now())
        self._collectives.append((axis, kind, start, stop, max(map(nbytes_of, tensors), default=0), waited))
        return work

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group.group_name not in self._axes:
            self._axes[group.group_name] = self._recipe.mesh.along(dist.get_process_group_ranks(group))
        return self._axes[group.group_name]

    # --- when it has ended --------------------------------------------------------------------------------------------

    def seen(self, zero: float) -> Seen:
        """What was followed, in seconds since ``zero``. Waits until the device has done it."""

        at = self._moments.seconds
        seen = Seen(
            tuple((what, at(start), at(stop)) for what, start, stop in self._did),
            tuple(self._sent),
            tuple((action, at(moment)) for action, moment in self._arrived),
            tuple(
                Collective(axis, kind, at(start), at(stop[0]), nbytes, waited)
                for axis, kind, start, stop, nbytes, waited in self._collectives
                if stop
            ),
        )
        return seen.since(zero)


@contextmanager
def observing(stages: Stages, ledger: Ledger, optimizers: Sequence[Optimizer]) -> Iterator[Observer]:
    """For the time of one step, follows the first rank of each place on the pipeline axis. Collective."""
    recipe, groups = stages.recipe, stages.groups
    ranks, observer = observed_ranks(recipe), Observer(recipe, groups, ledger)
    zero, mine = _meet(groups), groups.rank in ranks
    with ExitStack() as stack:
        if mine:
            stages.observer = observer
            stack.callback(setattr, stages, "observer", None)
            stack.enter_context(observer.following(optimizers))
        yield observer
    everyone = _gathered(observer.seen(zero) if mine else None, groups)
    if groups.rank == 0:
        from meshwright.draw.timeline import measured  # drawing is loaded when something is drawn

        observer.timeline = measured(recipe, [seen for rank in ranks if (seen := everyone[rank]) is not None])


def observed_ranks(recipe: Recipe) -> list[int]:
    """The first rank of each place on the pipeline axis, in its order."""
    if not recipe.stages:
        return [0]
    return [recipe.stage_ranks_of(recipe.stage_rank.index(place))[0] for place in range(recipe.mesh.axis_size("pp"))]


def _meet(groups: Groups) -> float:
    """All ranks meet, which puts their clocks side by side: zero on this rank's clock. Collective."""
    if dist.get_world_size() == 1:
        return time.perf_counter()
    dist.barrier(group=groups.hosts[""])
    mine = (socket.gethostname(), time.perf_counter())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=groups.hosts[""])
    return min(float(left) for node, left in everyone if node == mine[0])


def _gathered(seen: Seen | None, groups: Groups) -> list[Seen | None]:
    """What each rank has seen, on every rank. Collective."""
    everyone: list[Seen | None] = [seen]
    if dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen, group=groups.hosts[""])
    return everyone


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in what a collective is given: one, or lists of them."""
    if isinstance(value, (list, tuple)):
        return [t for one in value for t in _tensors(one)]
    return [value] if isinstance(value, Tensor) else []
