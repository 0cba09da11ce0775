"""``Stages``: those of one rank, and what their forwards and backwards run under."""

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
from meshwright.spmd import patches
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.switches import Switches
from meshwright.watch.timer import CommunicationTimer

if TYPE_CHECKING:
    from meshwright.runtime.observed import Observer


class Stages:
    """The stages of one rank. A model that is not in parts is one stage.

    Args:
        view: the SPMD mode, if anything is sharded over tp.
        halves: without it: what casts the parameters that FSDP2 leaves as they are.
        dispatchers: of the view: over the tp axis of each place of this rank.
        calls: of the model's modules, which ask which part of them is to run.
        branching: what forks and joins, if there are branches.
        streams: what runs blocks at the same time on this rank.

    Attributes:
        numbers: of the stages.
        generators: those that modules hold.
        modes: of the modules; ``switches``: what a person sets on them between steps.
        traffic: what was sent to other stages so far, and what this rank waits for.
        spans: of the last step: when each action ran, in seconds.
        action: begun last; a watch reads it from another thread.
        observer: follows the step that runs; None in most steps.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        groups: Groups,
        *,
        view: SpmdMode | None,
        halves: Halves | None = None,
        dispatchers: Collection[Dispatcher] = (),
        calls: ModuleCalls,
        branching: Branching | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.model, self.recipe, self.groups, self.calls = model, recipe, groups, calls
        self.branching, self.streams, self._dispatchers = branching, streams, dispatchers
        self._view, self._halves = view, halves
        self.rank = groups.pp_rank
        self.numbers = [s for s, rank in enumerate(recipe.stage_rank) if rank == self.rank]
        self.sync = GradientSync(model, at_end=recipe.in_parts)
        self.generators = generators_in(model)
        self.modes, self.switches = Modes(model), _switches(model, recipe)
        self.traffic = Traffic(CommunicationTimer(groups.device))
        self.spans: list[tuple[Action, float, float]] = []
        self.action: Action | None = None
        self.observer: Observer | None = None

    def view(self) -> AbstractContextManager[None]:
        """On during a forward or a backward; what a forward ran uncompiled, a recomputing backward does too."""
        if self._view is not None:
            return self._view.on()
        if self._halves is not None:
            return self._halves.on()
        return patches.UNCOMPILED.on() if self.recipe.in_parts else nullcontext()

    @contextmanager
    def doing(self, action: Action) -> Iterator[None]:
        """For the time of an action."""
        start, sent = time.perf_counter(), self.traffic.bytes
        with nullcontext() if self.observer is None else self.observer.doing(action):
            yield
        self.spans.append((action, start, time.perf_counter()))
        if self.observer is not None and action.kind in SENDS:
            self.observer.sent(action, self.traffic.bytes - sent)

    def phase(self, what: str) -> AbstractContextManager[None]:
        """For the time of a phase of the step in which this library runs, and no code of a person's."""
        return nullcontext() if self.observer is None else self.observer.phase(what)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """On during forwards of a trial, which may compute in a wider type than was recorded and than steps compute in
        (runtime/coupling/float64.py): what they decide is not kept for steps."""
        with ExitStack() as stack:
            for dispatcher in self._dispatchers:
                stack.enter_context(dispatcher.deciding_anew())
            if self.branching is not None:
                stack.enter_context(self.branching.in_trial())
            if self._view is not None:
                stack.callback(self._view.local.renew)
            yield

    def settle(self, same: object | None, *, listened: bool = True) -> None:
        """All parameters were looked at: ``same`` is the same object as before if they are; None: they may change unseen.
        ``listened``: whether hooks of modules may look at their gradients in a backward."""
        if self._view is not None:
            self._view.local.settle(same, listened=listened)

    def backward(self) -> AbstractContextManager[None]:
        """What is on during a backward, within ``view``."""
        return nullcontext() if self._view is None else self._view.local.backward()

    def describe(self, stage: int) -> str:
        """A stage and its ranks, for errors."""
        rank, mesh = self.recipe.stage_rank[stage], self.recipe.mesh
        ranks = [r for r in range(mesh.size) if mesh.coordinate(r).get("pp", 0) == rank]
        shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
        return f"stage {stage} ({shown})"


def _switches(model: nn.Module, recipe: Recipe) -> Switches:
    """What a person sets on modules; of none, if all rows run at once, in one part: nothing follows from it then."""
    divided = recipe.mesh.data_size * recipe.microbatches > 1
    return Switches(model if divided or recipe.in_parts else nn.Module())
