"""``Observer``: records when this rank began and ended each part of one step: actions of the schedule, transfers, collectives,
clipping, the optimizer. The first rank at each coordinate of the pipeline axis is observed.

    with job.observe(optimizer) as seen:     a barrier, so that the clocks of nodes can be compared
        job.step(batch)
        job.clip_grad_norm_(1.0)
        optimizer.step()
    seen.timeline                            after one gather: a ``Timeline`` on rank 0, None on other ranks

Time is measured from the moment at which the first rank of a node leaves the barrier. Ranks of one node share a clock;
clocks of different nodes are off by at most the time in which a barrier releases all ranks. A step that is not observed
has no barrier and no gather; it checks once for each action and collective whether it is observed.

A collective that the host waits for ends when the wait ends. On a CPU the host waits for each at once: an observed step
overlaps none over tp. Any other collective ends when its future is done, in whose callback the time is taken. A receive ends
when the action that needs it has waited for it.
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

# part of the name of a function of torch.distributed → the kind of collective
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
        bytes: of its inputs or of its outputs, whichever are more.
        waited: whether the host was blocked until it had ended.
    """

    axis: str
    kind: str
    start: float
    stop: float
    bytes: int
    waited: bool


@dataclass(frozen=True)
class RankTimes:
    """What one rank did in a step, in seconds.

    Attributes:
        activities: (action, or ``step``, ``clip``, ``optimizer`` and other phases; its start; its end).
        sent: (send, its bytes); ``arrived``: (receive, when it had arrived).
    """

    activities: tuple[tuple[Action | str, float, float], ...]
    sent: tuple[tuple[Action, int], ...]
    arrived: tuple[tuple[Action, float], ...]
    collectives: tuple[Collective, ...]

    def since(self, zero: float) -> RankTimes:
        """These facts, with times in seconds since ``zero``."""
        return RankTimes(
            tuple((activity, start - zero, stop - zero) for activity, start, stop in self.activities),
            self.sent,
            tuple((action, when - zero) for action, when in self.arrived),
            tuple(replace(c, start=c.start - zero, stop=c.stop - zero) for c in self.collectives),
        )


class Observer:
    """Records one step of this rank.

    Attributes:
        timeline: the times of the step, on rank 0, once it has been observed; None before, and on other ranks.
    """

    def __init__(self, recipe: Recipe, groups: Groups, ledger: Ledger) -> None:
        self._recipe, self._groups, self._ledger = recipe, groups, ledger
        self._moments = Moments(groups.device)
        self._activities: list[tuple[Action | str, Moment, Moment]] = []
        self._sent: list[tuple[Action, int]] = []
        self._arrived: list[tuple[Action, Moment]] = []
        self._collectives: list[tuple[str, str, Moment, list[Moment], int, bool]] = []
        self._axes: dict[str, str] = {}  # name of a group → axes
        self.timeline: Timeline | None = None

    # --- while the step runs ------------------------------------------------------------------------------------------

    @contextmanager
    def doing(self, activity: Action | str) -> Iterator[None]:
        """Records the block as an action, or as a phase of the step."""
        start = self._moments.now()
        yield
        self._activities.append((activity, start, self._moments.now()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Records the block as a phase of the step, and the collectives in it."""
        self._ledger.heard, self._ledger.timed = self._heard, True
        try:
            with hearing(self._heard), self.doing(name):
                yield
        finally:
            self._ledger.heard, self._ledger.timed = None, False

    def sent(self, action: Action, nbytes: int) -> None:
        """Records a send that has begun."""
        self._sent.append((action, nbytes))

    def arrived(self, action: Action) -> None:
        """Records that a receive has arrived, and was waited for."""
        self._arrived.append((action, self._moments.now()))

    @contextmanager
    def following(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """A context in which the steps of these optimizers are recorded as phases."""
        began: list[Moment] = []

        def before(*_: Any) -> None:
            began.append(self._moments.now())

        def after(*_: Any) -> None:
            self._activities.append(("optimizer", began.pop(), self._moments.now()))

        with ExitStack() as stack:
            for optimizer in optimizers:
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(after).remove)
            yield

    def _heard(self, name: str, group: dist.ProcessGroup, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Calls a collective and records it. Sends and receives of a pipeline are not: they are recorded as actions."""
        kind = next((kind for part, kind in _KINDS.items() if part in name), name.strip("_"))
        axis = self._axis(group)
        if kind in ("send", "recv", "recv_anysource") or not axis:
            return call()
        tensors = [_tensors(argument) for argument in arguments]
        on_host = all(t.device.type == "cpu" for of_argument in tensors for t in of_argument)
        now = time.perf_counter if on_host else self._moments.now
        start, stop = now(), list[Moment]()
        work = call()
        waited = on_host and not any(getattr(argument, "asyncOp", False) for argument in arguments)
        if work is not None and not waited:
            work.get_future().then(lambda _: stop.append(now()))
        else:
            if work is not None:
                work.wait()  # as the caller would do next
            stop.append(now())
        self._collectives.append((axis, kind, start, stop, max(map(nbytes_of, tensors), default=0), waited))
        return work

    def _axis(self, group: dist.ProcessGroup) -> str:
        """The axes along which the ranks of a group differ, joined by dots."""
        if group.group_name not in self._axes:
            self._axes[group.group_name] = self._recipe.mesh.along(dist.get_process_group_ranks(group))
        return self._axes[group.group_name]

    # --- when it has ended --------------------------------------------------------------------------------------------

    def seen(self, zero: float) -> RankTimes:
        """What was recorded, in seconds since ``zero``. Waits until the device has done it."""
        at = self._moments.seconds
        seen = RankTimes(
            tuple((activity, at(start), at(stop)) for activity, start, stop in self._activities),
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
    """Observes the step within the block, on the first rank at each coordinate of the pipeline axis. Collective."""
    recipe, groups = stages.recipe, stages.groups
    ranks, observer = observed_ranks(recipe), Observer(recipe, groups, ledger)
    zero, is_observed = _meet(groups), groups.rank in ranks
    with ExitStack() as stack:
        if is_observed:
            stages.observer = observer
            stack.callback(setattr, stages, "observer", None)
            stack.enter_context(observer.following(optimizers))
        yield observer
    everywhere = _gathered(observer.seen(zero) if is_observed else None, groups)
    if groups.rank == 0:
        from meshwright.draw.timeline import measured  # drawing is loaded when something is drawn

        observer.timeline = measured(recipe, [seen for rank in ranks if (seen := everywhere[rank]) is not None])


def observed_ranks(recipe: Recipe) -> list[int]:
    """The first rank at each coordinate of the pipeline axis, in ascending order of the coordinates."""
    if not recipe.stages:
        return [0]
    return [recipe.stage_ranks_of(recipe.stage_rank.index(pp))[0] for pp in range(recipe.mesh.axis_size("pp"))]


def _meet(groups: Groups) -> float:
    """A barrier over all ranks. Returns the common zero, on this rank's clock. Collective."""
    if dist.get_world_size() == 1:
        return time.perf_counter()
    dist.barrier(group=groups.hosts[""])
    host, now = socket.gethostname(), time.perf_counter()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (host, now), group=groups.hosts[""])
    return min(float(left_at) for other_host, left_at in everywhere if other_host == host)


def _gathered(seen: RankTimes | None, groups: Groups) -> list[RankTimes | None]:
    """What each rank has recorded, on every rank. Collective."""
    everywhere: list[RankTimes | None] = [seen]
    if dist.get_world_size() > 1:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, seen, group=groups.hosts[""])
    return everywhere


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument of a collective: a tensor, or nested lists of tensors."""
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []
