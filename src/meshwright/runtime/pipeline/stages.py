"""``Stages``: the pipeline stages of one rank, and the modes under which their forwards and backwards run."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from meshwright.calls.hook import ModuleCalls
from meshwright.chance import generators_in
from meshwright.evaluation import Modes
from meshwright.recipe import Recipe
from meshwright.runtime.branches.exchange import Branching
from meshwright.runtime.branches.streams import Streams
from meshwright.runtime.groups import Groups
from meshwright.runtime.pipeline.transfers import Traffic
from meshwright.runtime.weights.gradient_sync import GradientSync
from meshwright.runtime.weights.halves import Halves
from meshwright.schedule import SENDS, Action
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.uncompiled import UNCOMPILED
from meshwright.switches import Switches
from meshwright.watch.timer import CommunicationTimer

if TYPE_CHECKING:
    from meshwright.runtime.observed import Observer


_SHOWN = 8  # most ranks of a stage that an error names


class Stages:
    """The stages of one rank. A model without a pipeline is one stage.

    Args:
        model: the model.
        recipe: every decision of the plan.
        groups: process groups and device.
        spmd: the SPMD mode, if anything is sharded over tp.
        halves: without an SPMD mode, casts the parameters that FSDP2 leaves as they are.
        dispatchers: of the SPMD mode, one for the tp axis of each submesh of this rank.
        calls: the hook of module calls.
        branching: runs forks and joins, if there are branches.
        streams: runs blocks at the same time on this rank, if the plan has streams.

    Attributes:
        numbers: of the stages.
        sync: decides when FSDP2 reduces gradients.
        generators: random generators that modules hold.
        modes: train or eval mode of each module.
        switches: settings that a person changes on modules between steps.
        traffic: counts of sends, and the stages that this rank waits for.
        spans: (action, begin, end) of the last step, in seconds.
        action: the action that began last; a watchdog reads it from another thread.
        observer: records the running step; None in most steps.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        groups: Groups,
        *,
        spmd: SpmdMode | None,
        halves: Halves | None = None,
        dispatchers: Collection[Dispatcher] = (),
        calls: ModuleCalls,
        branching: Branching | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.model, self.recipe, self.groups, self.calls = model, recipe, groups, calls
        self.branching, self.streams, self._dispatchers = branching, streams, dispatchers
        self._spmd, self._halves = spmd, halves
        self.rank = groups.pp_rank
        self.numbers = [s for s, rank in enumerate(recipe.stage_rank) if rank == self.rank]
        self.sync = GradientSync(model, at_end=recipe.in_parts)
        self.generators = generators_in(model)
        self.modes, self.switches = Modes(model), _switches(model, recipe)
        self.traffic = Traffic(CommunicationTimer(groups.device))
        self.spans: list[tuple[Action, float, float]] = []
        self.action: Action | None = None
        self.observer: Observer | None = None

    def spmd_mode(self) -> AbstractContextManager[None]:
        """The mode for a forward or a backward: the SPMD mode, or without tp the mode that casts parameters.

        A backward needs the mode, too, since recompute runs parts of the forward again.
        """
        if self._spmd is not None:
            return self._spmd.on()
        if self._halves is not None:
            return self._halves.on()
        return self.uncompiled()

    def uncompiled(self) -> AbstractContextManager[None]:
        """A context in which nothing of the model runs compiled, if it runs under modes. Around a whole step it takes its time
        once, and not for each mode of each microbatch."""
        has_modes = self._spmd is not None or self._halves is not None or self.recipe.in_parts
        return UNCOMPILED.on() if has_modes else nullcontext()

    @contextmanager
    def doing(self, action: Action) -> Iterator[None]:
        """A context for an action. Measures the time of the action, and tells the observer."""
        start, bytes_before = time.perf_counter(), self.traffic.bytes
        with nullcontext() if self.observer is None else self.observer.doing(action):
            yield
        self.spans.append((action, start, time.perf_counter()))
        if self.observer is not None and action.kind in SENDS:
            self.observer.sent(action, self.traffic.bytes - bytes_before)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context for a phase of the step in which only this library's code runs, such as ``clip``. Tells the observer."""
        return nullcontext() if self.observer is None else self.observer.phase(name)

    @contextmanager
    def trying(self, *, wide: bool) -> Iterator[None]:
        """A context for forwards of a trial. Their decisions are not cached for steps, since a trial may compute in a wider
        type than steps. ``wide``: whether it computes in float64 (runtime/coupling/float64.py)."""
        with ExitStack() as stack:
            for dispatcher in self._dispatchers:
                stack.enter_context(dispatcher.deciding_anew())
            if self.branching is not None:
                stack.enter_context(self.branching.in_trial(wide=wide))
            if self._spmd is not None:
                stack.callback(self._spmd.local.end_trial)
            yield

    def begin_step(self, token: object | None, *, gradients_observed: bool) -> None:
        """Tells the SPMD mode that a step begins, and whether facts that the mode caches about parameters still hold.

        Args:
            token: the same object as in the last step if no parameter has changed since. None: a parameter may change during
                the step.
            gradients_observed: whether hooks of modules may read gradients of parameters while a backward runs.
        """
        if self._spmd is not None:
            self._spmd.local.begin_step(token, gradients_observed=gradients_observed)

    def end_step(self) -> None:
        """Tells the SPMD mode that the step has ended: from now on, a parameter may change at any time."""
        if self._spmd is not None:
            self._spmd.local.end_step()

    def around_backward(self) -> AbstractContextManager[None]:
        """A context for a backward, within ``spmd_mode``. If nobody reads gradients while the backward runs, its end moves them
        from local tensors to parameters together."""
        return nullcontext() if self._spmd is None else self._spmd.local.around_backward()

    def describe(self, stage: int) -> str:
        """A stage and its ranks as text, for errors."""
        pp, mesh = self.recipe.stage_rank[stage], self.recipe.mesh
        ranks = [rank for rank in range(mesh.size) if mesh.coordinate(rank).get("pp", 0) == pp]
        ranks_text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:_SHOWN]))}"
        return f"stage {stage} ({ranks_text})"


def _switches(model: nn.Module, recipe: Recipe) -> Switches:
    """The settings that a person changes on modules between steps.

    They matter only if rows are divided, or if the model runs in parts. Otherwise no module is watched.
    """
    divided = recipe.mesh.data_size * recipe.microbatches > 1
    return Switches(model if divided or recipe.in_parts else nn.Module())
