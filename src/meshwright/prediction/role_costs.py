"""``RolePredictor``: the memory and seconds of each role in a step, from as few rehearsals as possible.

    role ──► rehearsals with few blocks, and with one more    blocks.py, passing.py
             and with three microbatches                      composition.py
                 │ traces
                 ▼
         memory and seconds of all blocks                     extrapolation.py
         ──► of all microbatches, in the order of the schedule

Stages of a pipeline that do the same are rehearsed once. So 126 blocks in 16 stages with 64 microbatches take as long as five
blocks in three stages with three microbatches. If a model's blocks cannot be passed through, the full model is rehearsed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from meshwright.hardware.profile import Profile
from meshwright.names import pattern
from meshwright.prediction.allocations import CPU, GPU
from meshwright.prediction.blocks import Folding, PrunedModel, folding_of
from meshwright.prediction.clock import Clock, Phase, PhaseSeconds, forward_flops
from meshwright.prediction.composition import REHEARSED, Templates
from meshwright.prediction.exchanges import module_pattern
from meshwright.prediction.extrapolation import PhaseLevels, items_of, kinds_at, linear, phase_levels, phases_of
from meshwright.prediction.memory import ACTIVATIONS, UNREDUCED, Levels, Memory, PhaseMemory, levels_of
from meshwright.prediction.rehearsal import Rehearsal, rehearse
from meshwright.prediction.roles import Role
from meshwright.prediction.trace import Trace
from meshwright.recipe import Stage
from meshwright.runtime.rows.batch import tensors_in
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.runtime.weights.fsdp import holds_dtensors
from meshwright.schedule import Action, Edges, Schedule, make_schedule, with_transfers


@dataclass(frozen=True)
class RoleCosts:
    """The memory and seconds of a role in a step.

    Attributes:
        memory: peak memory.
        phases: its actions and phases with their seconds, in order.
        assumed, ran_whole: see ``Trace``.
    """

    memory: Memory
    phases: list[Phase]
    assumed: tuple[tuple[str, str], ...] = ()
    ran_whole: tuple[tuple[str, str, str], ...] = ()


def rehearsed_roles(
    roles: Sequence[Role], rehearsal: Rehearsal, profile: Profile, *, fold: bool = True
) -> RolePredictor:
    """The rehearsals of all roles, from which ``RolePredictor.costs`` computes memory and seconds on any hardware.

    Args:
        rehearsal: of the full model with all microbatches.
        profile: of hardware for which the costs are tried.
        fold: whether blocks and microbatches that do the same are rehearsed once. If this fails, all of them are rehearsed.
    """
    predictor = RolePredictor(roles, rehearsal, fold=fold)
    try:
        predictor.costs(profile)
    except Exception:  # a model may raise any exception if some of its blocks are passed through
        if not predictor.folds:
            raise
        return rehearsed_roles(roles, rehearsal, profile, fold=False)
    return predictor


class RolePredictor:
    """Predicts the memory and seconds of the roles of a step.

    Args:
        roles: the roles of the ranks.
        rehearsal: of the full model with all microbatches.
        fold: whether blocks and microbatches that do the same are rehearsed once.

    Attributes:
        costs: a profile → first rank of each role → its memory and seconds.
    """

    def __init__(self, roles: Sequence[Role], rehearsal: Rehearsal, *, fold: bool = True) -> None:
        self._roles, self._rehearsal = roles, rehearsal
        self._short = rehearsal.shortened(REHEARSED) if fold else rehearsal
        self._folding = folding_of(rehearsal.planned.model, rehearsal.recipe) if fold else Folding(PrunedModel({}))
        self._traces: dict[Hashable, tuple[int, list[Trace]]] = {}
        self.costs = lru_cache(1)(self._costs)

    @property
    def folds(self) -> bool:
        """Whether the rehearsals leave out blocks or microbatches."""
        return bool(self._folding.base.blocks) or self._short is not self._rehearsal

    @cached_property
    def _rehearsals(self) -> list[Rehearsal]:
        """The rehearsal of the base, and of each model with one more block."""
        models = [self._folding.base, *(pruned for pruned, _ in self._folding.more)]
        return [self._short.passing_through(blocks) for blocks in models]

    @property
    def batch_statistics(self) -> bool:
        """Whether a rehearsed forward computes statistics of several rows."""
        return any(trace.batch_statistics for _, traces in self._traces.values() for trace in traces)

    def flops_of_row(self) -> float:
        """Floating-point operations of a forward of one row, on all ranks together."""
        total = 0.0
        for role in self._roles:
            base, *others = map(forward_flops, self._rehearsed(role)[1])
            total += role.count * linear(base, others, self._weights(role))
        return total / self._short.rows

    def _costs(self, profile: Profile) -> dict[int, RoleCosts]:
        return {role.rank: self._predict(role, profile) for role in self._roles}

    def phases(self, profile: Profile) -> dict[int, list[Phase]]:
        """First rank of each role → its actions and phases with their seconds: the costs without the memory."""
        return {role.rank: self._phases(role, profile) for role in self._roles}

    def _phases(self, role: Role, profile: Profile) -> list[Phase]:
        first, traces = self._rehearsed(role)
        clock = Clock(profile, self._rehearsal.recipe.mesh, dtensors=holds_dtensors(self._rehearsal.recipe))
        seconds = phases_of([clock.phases(trace) for trace in traces], self._weights(role))
        return seconds if self._is_whole(role, first) else _timed(seconds, self._schedule.ranks[role.pp_rank])

    def _is_whole(self, role: Role, rehearsed: int) -> bool:
        """Whether a rehearsal has all actions of a role in their order. ``rehearsed``: the rank that was rehearsed."""
        return rehearsed == role.rank and self._short is self._rehearsal

    def _weights(self, role: Role) -> list[int]:
        """How often each further block counts on the rank of a role."""
        return [counts[role.pp_rank] for _, counts in self._folding.more]

    def _predict(self, role: Role, profile: Profile) -> RoleCosts:
        """Rehearses a role if no other that does the same has been, and returns its memory and seconds."""
        first, traces = self._rehearsed(role)
        weights = self._weights(role)
        levels = [levels_of(trace, CPU if profile.cores else GPU) for trace in traces]
        assumed = tuple(dict.fromkeys(read for trace in traces for read in trace.assumed))
        ran_whole = tuple(
            dict.fromkeys((f, module_pattern(module), line) for trace in traces for f, module, line in trace.ran_whole)
        )
        phases = phase_levels(levels, weights)
        if self._is_whole(role, first):
            in_order = [_InOrder(phase.label, phase) for phase in phases]
        else:
            in_order = _in_order(phases, self._schedule.ranks[role.pp_rank], self._left_out_bytes(role.rank))
        memory = self._memory(levels, weights, in_order, profile.reserve)
        return RoleCosts(memory, self._phases(role, profile), assumed, ran_whole)

    # --- rehearsals ---------------------------------------------------------------------------------------------------

    def _rehearsed(self, role: Role) -> tuple[int, list[Trace]]:
        """(the rank that was rehearsed for a role, its traces: of the base, and of each model with one more block)."""
        work = self._work(role)
        if work not in self._traces:
            traces = [rehearse(rehearsal, role.rank) for rehearsal in self._rehearsals]
            self._traces[work] = role.rank, traces
            # The key None has the first rehearsal, whose edges are used for every role.
            self._traces.setdefault(None, (role.rank, traces))
        return self._traces[work]

    def _work(self, role: Role) -> Hashable:
        """A key that is equal for roles whose stages do equal work."""
        recipe = self._rehearsal.recipe
        if not recipe.stages or not self._traces or self._short is self._rehearsal:
            return role.rank
        edges = self._traces[None][1][0].edges
        stages = [stage for stage in recipe.stages if recipe.stage_rank[stage.index] == role.pp_rank]
        work = tuple(_work_of_stage(stage, edges) for stage in stages)
        tp = recipe.mesh.coordinate(role.rank).get("tp", 0)
        return work, tp, tuple(sorted(recipe.places.of(role.rank))) if recipe.branches else ()

    # --- all microbatches ---------------------------------------------------------------------------------------------

    @cached_property
    def _schedule(self) -> Schedule:
        """The schedule of the step with all its microbatches. Its transfers are known only after the first rehearsal."""
        recipe, edges = self._rehearsal.recipe, self._traces[None][1][0].edges
        ranks = recipe.mesh.axis_size("pp")
        plain = make_schedule(recipe.schedule, ranks, len(recipe.stage_rank), recipe.microbatches)
        return with_transfers(plain, edges.forward, edges.backward)

    def _left_out_bytes(self, rank: int) -> int:
        """Bytes of this rank's rows of the batch that the rehearsal left out."""
        return self._rows_bytes(self._rehearsal, rank) - self._rows_bytes(self._short, rank)

    def _rows_bytes(self, rehearsal: Rehearsal, rank: int) -> int:
        """Bytes of a rank's rows of the batch."""
        rows = rows_of_rank(rehearsal.batch, rehearsal.recipe, rank)
        return sum(t.nbytes for t in tensors_in(rows))

    def _memory(
        self, levels: Sequence[Levels], weights: Sequence[int], phases: Sequence[_InOrder], reserve: float
    ) -> Memory:
        """The peak memory over all actions and phases of the full model. ``reserve``: see ``Profile``."""
        fullest = max(phases, key=lambda phase: phase.highest)
        items, sites = items_of(levels, fullest.levels.highest)
        rehearsed = round(linear(levels[0].persistent, [other.persistent for other in levels[1:]], weights))
        gradients = _gradients(levels, phases)
        return Memory(
            fullest.highest, fullest.with_others(items, gradients), str(fullest.label), sites, rehearsed + fullest.rows,
            reserve,
            _by_phase(levels, phases, gradients),
        )  # fmt: skip


def _work_of_stage(stage: Stage, edges: Edges) -> Hashable:
    """A key that is equal for stages that do equal work, with equally many transfers."""
    modules = tuple(map(pattern, stage.modules))
    transfers = tuple(ends.count(stage.index) for direction in edges for ends in zip(*direction, strict=True))
    return stage.flops, stage.moved, stage.sends, stage.parameters, modules, transfers


def _by_phase(levels: Sequence[Levels], phases: Sequence[_InOrder], gradients: str) -> tuple[PhaseMemory, ...]:
    """The peak memory of each action and phase of the last step."""
    step_start = max((i for i, phase in enumerate(phases) if str(phase.label).startswith("step")), default=0)
    step = [phase for phase in phases[step_start:] if phase.label]
    kinds = kinds_at([phase.levels.highest for phase in step], levels)
    return tuple(
        PhaseMemory(str(phase.label), phase.highest, phase.with_others(kinds[phase.levels.highest], gradients))
        for phase in step
    )


def _gradients(levels: Sequence[Levels], phases: Sequence[_InOrder]) -> str:
    """The kind of the gradients to which backwards add: with FSDP2, they are unreduced until the last backward."""
    backwards = [phase.levels for phase in phases if isinstance(phase.label, Action) and phase.label.kind in ("B", "I")]
    items = items_of(levels, backwards[-1].highest)[0] if backwards else {}
    return max(("gradients", UNREDUCED), key=lambda kind: items.get(kind, 0))


@dataclass(frozen=True)
class _InOrder:
    """The memory of an action or phase in the step with all its microbatches.

    Attributes:
        label: the action, or the name of the phase.
        levels: the memory of the rehearsed action that stands for this one.
        in_flight: bytes of activations that live in addition to those in the rehearsal.
        gradients: bytes of other memory that live in addition.
        rows: bytes of the batch that the rehearsal left out.
    """

    label: Action | str
    levels: PhaseLevels
    in_flight: int = 0
    gradients: int = 0
    rows: int = 0

    @property
    def highest(self) -> int:
        """Peak bytes."""
        return self.levels.highest.nbytes + self.in_flight + self.gradients + self.rows

    def with_others(self, items: Mapping[str, int], gradients: str) -> dict[str, int]:
        """Kind → bytes at the peak. ``items``: those of the rehearsal. ``gradients``: the kind that ``_gradients`` returns."""
        totals = dict(items)
        activations = totals.get(ACTIVATIONS, 0) + self.in_flight + min(0, self.gradients)
        totals[ACTIVATIONS] = max(0, activations)  # below 0: fewer live than in the rehearsal, and fewer gradients, too
        additions = {"batch": self.rows, gradients: max(0, self.gradients) + min(0, activations)}
        for kind, nbytes in additions.items():
            totals[kind] = totals.get(kind, 0) + nbytes
        return {kind: nbytes for kind, nbytes in totals.items() if nbytes}


def _in_order(phases: Sequence[PhaseLevels], actions: Sequence[Action], rows: int) -> list[_InOrder]:
    """The memory of each action and phase of the last step with all its microbatches, in order.

    Args:
        phases: those of the rehearsal.
        actions: the schedule of the rank.
        rows: bytes of the batch that the rehearsal left out.
    """
    step_start = max(i for i, phase in enumerate(phases) if str(phase.label).startswith("step"))
    step = phases[step_start:]
    rehearsed = [(phase.label, phase) for phase in step if isinstance(phase.label, Action)]
    rehearsed_live = {
        id(levels): (total, in_flight)
        for (_, levels), (total, in_flight) in zip(rehearsed, _live(rehearsed), strict=True)
    }
    templates = Templates(rehearsed).for_actions(actions)
    in_schedule = [(action, levels) for action, levels in zip(actions, templates, strict=True) if levels is not None]
    placed = []
    for (action, levels), (total, in_flight) in zip(in_schedule, _live(in_schedule), strict=True):
        rehearsed_total, rehearsed_in_flight = rehearsed_live[id(levels)]
        activations = in_flight - rehearsed_in_flight
        gradients = total - in_flight - (rehearsed_total - rehearsed_in_flight)
        placed.append(_InOrder(action, levels, activations, gradients, rows))
    first = next(i for i, phase in enumerate(step) if isinstance(phase.label, Action))
    before, after = (
        [_InOrder(phase.label, phase, rows=rows) for phase in phases if not isinstance(phase.label, Action)]
        for phases in (step[:first], step[first:])
    )
    return [*before, *placed, *after]


def _live(actions: Sequence[tuple[Action, PhaseLevels]]) -> Iterator[tuple[int, int]]:
    """For each action, (bytes that live when it begins, bytes of these that forwards allocated).

    Bytes that live at the step's start are not counted.
    """
    total = in_flight = 0
    forwards: dict[tuple[int, int], int] = defaultdict(int)
    added = [levels.end - levels.start for _, levels in actions]
    # (kind, stage) → bytes that an action of this kind adds, at least: the first forward also gathers parameters.
    least: dict[tuple[str, int], int] = {}
    for (action, _), nbytes in zip(actions, added, strict=True):
        key = action.kind, action.stage
        least[key] = min(least.get(key, nbytes), nbytes)
    for (action, _), nbytes in zip(actions, added, strict=True):
        yield total, in_flight
        total += nbytes
        if action.kind in ("F", "SEND_F", "RECV_F"):
            forwards[action.stage, action.microbatch] += least[action.kind, action.stage]
            in_flight += least[action.kind, action.stage]
        elif action.kind in ("B", "W"):
            in_flight -= forwards.pop((action.stage, action.microbatch), 0)


def _timed(phases: Sequence[Phase], actions: Sequence[Action]) -> list[Phase]:
    """The seconds of each action and phase of the step with all its microbatches, in order."""
    rehearsed = [(phase.label, phase) for phase in phases if isinstance(phase.label, Action)]
    templates = Templates(rehearsed).for_actions(actions)
    placed = [
        replace(phase, label=action) if phase is not None else Phase(action, PhaseSeconds())
        for action, phase in zip(actions, templates, strict=True)
    ]
    first = next(i for i, phase in enumerate(phases) if isinstance(phase.label, Action))
    last = max(i for i, phase in enumerate(phases) if isinstance(phase.label, Action))
    return [*phases[:first], *placed, *phases[last + 1 :]]
