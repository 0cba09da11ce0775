"""``predict``: predicts the memory and seconds of a training step under a plan. ``measure``: measures them on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from meshwright.deferred import Build
from meshwright.generators import random_numbers_kept
from meshwright.hardware.collectives import Group, collective
from meshwright.hardware.profile import NOTHING, Estimate, Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan, PlanLike
from meshwright.prediction.clock import Phase
from meshwright.prediction.coupling import coupling_of
from meshwright.prediction.exchanges import Exchanges, summed
from meshwright.prediction.measure import measured_rank
from meshwright.prediction.memory import Memory
from meshwright.prediction.play import PlayedStep, Transfer, play
from meshwright.prediction.rehearsal import MakeOptimizer, rehearsal_of
from meshwright.prediction.result import Prediction, StepSeconds
from meshwright.prediction.role_costs import RoleCosts, RolePredictor, rehearsed_roles
from meshwright.prediction.roles import Role, roles_of
from meshwright.recipe import Recipe
from meshwright.runtime.rows.batch import plain
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.schedule import TRANSFERS, Action
from meshwright.workers.pool import LocalWorkers, local_workers


def predict(
    build: Build,
    batch: Any,
    plan: PlanLike,
    *,
    hardware: str | Profile = "h100",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    fold: bool = True,
) -> Prediction:
    """Predicts the memory and seconds of a training step: forwards, backwards, clipping and the optimizer.

    It runs the run's own code for one rank of each role, without values and without other ranks, and allocates no parameter.
    (If the rows of a small model may be coupled, it also runs the trial of rows that a run begins with.) Call it in a plain
    process, not on a rank of a run.

        prediction = predict(Model, batch, {"mesh": "dp_shard=8"}, hardware="h100")  # .peak in bytes, .seconds

    Args:
        build: a function that builds the model.
        batch: a batch of all data ranks together. Its shapes and dtypes matter; its values matter only if the model acts on
            them.
        plan: as for ``parallelize``.
        hardware: a profile, its name (``h100``), or the path of its YAML file.
        loss: output of the model → loss; default ``output.loss``.
        optimizer: parameters → their optimizer; default ``torch.optim.AdamW``, as it runs on the hardware.
        max_norm: the norm to which gradients are clipped; None: they are not clipped.
        fold: whether blocks, microbatches and stages that do the same are rehearsed once; False: all of them are rehearsed.

    Raises:
        PlanError: every problem of the plan or the profile.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    with random_numbers_kept():
        return RehearsedPlan.of(build, batch, plan, profile, loss, optimizer, max_norm, fold=fold).on(profile)


@dataclass(frozen=True)
class RehearsedPlan:
    """A plan whose training step was rehearsed, so that its memory and seconds can be predicted on any hardware.

    Attributes:
        recipe: the recipe of its plan.
        roles: the roles of the ranks.
        predictor: of the costs of these roles.
    """

    recipe: Recipe
    roles: tuple[Role, ...]
    predictor: RolePredictor

    @classmethod
    def of(
        cls,
        build: Build,
        batch: Any,
        plan: PlanLike,
        profile: Profile,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        max_norm: float | None = 1.0,
        *,
        fold: bool = True,
    ) -> RehearsedPlan:
        """Rehearses a step. For the arguments, and the errors, see ``predict``.

        Args:
            profile: of hardware like that for which the step is predicted: a CPU, or an accelerator.
        """
        make_optimizer, accelerator = optimizer or adamw_on(profile), not profile.cores
        rehearsal = rehearsal_of(
            build, batch, Plan.parse(plan), loss, make_optimizer, max_norm, accelerator=accelerator
        )
        roles = roles_of(rehearsal.recipe)
        predictor = rehearsed_roles(roles, rehearsal, profile, fold=fold)
        note = coupling_of(build, rehearsal, batch_statistics=predictor.batch_statistics, flops=predictor.flops_of_row)
        if note is not None:
            rehearsal = rehearsal.with_all_rows(note)
            predictor = rehearsed_roles(roles, rehearsal, profile, fold=fold)
        return cls(rehearsal.recipe, roles, predictor)

    def on(self, profile: Profile) -> Prediction:
        """The memory and seconds of the step on this hardware."""
        return _prediction(self.recipe, self.roles, self.predictor.costs(profile), profile)

    def seconds(self, profile: Profile) -> StepSeconds:
        """The seconds of the step on this hardware."""
        return _step(self.recipe, profile, self.roles, self.predictor.phases(profile))[1]


def _prediction(
    recipe: Recipe, roles: tuple[Role, ...], costs: Mapping[int, RoleCosts], profile: Profile
) -> Prediction:
    """The prediction of a step from the costs of its roles. ``costs``: by the first rank of each role."""
    phases = {rank: cost.phases for rank, cost in costs.items()}
    memories = {rank: cost.memory for rank, cost in costs.items()}
    assumed = dict.fromkeys(read for cost in costs.values() for read in cost.assumed)
    played, seconds = _step(recipe, profile, roles, phases)
    exchanges = {rank: _exchanges(phases_of_rank) for rank, phases_of_rank in phases.items()}
    return Prediction(
        roles, memories, seconds, profile.name, str(recipe.mesh),
        capacity=profile.memory, context=profile.context, notes=(*recipe.notes, *_notes(assumed)),
        recipe=recipe, played=played, exchanges=exchanges,
        ran_whole=tuple(dict.fromkeys(function for cost in costs.values() for function in cost.ran_whole)),
        per_node=profile.devices_per_node,
    )  # fmt: skip


def measure(
    build: Build,
    batch: Any,
    plan: PlanLike,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    steps: int = 4,
    workers: LocalWorkers | None = None,
    timeout: float = 600.0,
) -> Prediction:
    """Measures the memory and seconds of a training step on this machine. Call it in a plain process, not on a rank of a run.

    ``prediction - measurement`` gives the errors of a prediction.

    Args:
        steps: number of steps whose memory is measured, after three steps that need more (``prediction.measure``). Then
            ``steps`` further steps are timed; the result has the median of their seconds.
        workers: a pool of at least as many workers as the mesh has ranks. Default: workers are started for this call.
        timeout: seconds after which the measurement is aborted.

    The other arguments are those of ``predict``.

    Raises:
        PlanError: every problem of the plan.
    """
    plan = Plan.parse(plan)
    plan.check_mesh()
    with ExitStack() as stack:
        pool = workers or stack.enter_context(local_workers(plan.mesh.size))
        results = pool.run(
            measured_rank, build, plain(batch), plan, loss or output_loss, optimizer or torch.optim.AdamW, max_norm, steps,
            ranks=plan.mesh.size, timeout=timeout,
        )  # fmt: skip
    memories = {}
    for rank, result in enumerate(results):
        items = {"kept": result.persistent, "others": result.peak - result.persistent}
        memories[rank] = Memory(result.peak, items, persistent=result.persistent)
    times = [max(result.seconds[step] for result in results) for step in range(steps)]
    median = statistics.median(times)
    scatter = statistics.pstdev(times) / median
    roles = tuple(Role(rank, (rank,), 0, f"rank {rank}") for rank in memories)
    return Prediction(roles, memories, StepSeconds(median, scatter), "this machine", str(plan.mesh), source="measured")


def _notes(assumed: Iterable[tuple[str, str]]) -> list[str]:
    """A note for each value that the rehearsal assumed."""
    return [
        f"{function} at {line} reads a value that follows from parameters; it was assumed" for function, line in assumed
    ]


def _exchanges(phases: Iterable[Phase]) -> tuple[Exchanges, ...]:
    """The collectives of a step. If no module calls one, ``module`` is "forward", "backward" or the name of its phase."""
    named = ((phase.label, exchanges) for phase in phases for exchanges in phase.exchanges)
    return summed(replace(exchanges, module=exchanges.module or _during(label)) for label, exchanges in named)


def _during(label: Action | str) -> str:
    """The name of an action or phase, in place of a module's name."""
    if not isinstance(label, Action):
        return label
    if label.kind in TRANSFERS:
        return "values" if label.kind.endswith("F") else "gradients of values"
    return "forward" if label.kind == "F" else "backward"


def adamw_on(profile: Profile) -> MakeOptimizer:
    """AdamW as it runs on the hardware: on a GPU all parameters at once (foreach), which takes memory; on a CPU one by one."""
    return torch.optim.AdamW if profile.cores else lambda parameters: torch.optim.AdamW(parameters, foreach=True)


# --- the step ---------------------------------------------------------------------------------------------------------


def _step(
    recipe: Recipe, profile: Profile, roles: tuple[Role, ...], phases: Mapping[int, list[Phase]]
) -> tuple[PlayedStep, StepSeconds]:
    """(the step in time, its seconds with their terms on the rank that ends last)."""
    # Rank of the pipeline axis → its slowest role. The other roles on this rank wait for it at their joins.
    slowest: dict[int, Role] = {}
    for role in sorted(roles, key=lambda role: -_busy_seconds(phases[role.rank])):
        slowest.setdefault(role.pp_rank, role)
    played = play({stage: phases[role.rank] for stage, role in slowest.items()}, _transfer(recipe, profile))
    last = max(played.ends, key=lambda stage: played.ends[stage])
    terms = _terms(phases[slowest[last].rank], played.waits[last])
    scatter = Estimate.total(phase.spent.total for phase in phases[slowest[last].rank]).scatter
    seconds = max(played.ends[last], _shared_cores(recipe, profile, roles, phases))
    if seconds > played.ends[last]:
        terms["shared cores"] = seconds - played.ends[last]
    if waiting := profile.waiting(seconds, _synchronizations(phases[slowest[last].rank])):
        terms["waiting for other ranks"] = waiting
    return played, StepSeconds(seconds + waiting, scatter, terms)


def _synchronizations(phases: Iterable[Phase]) -> float:
    """How often a rank meets others in a step: its collectives and receives. A send waits for nobody."""
    return sum(exchanges.calls for phase in phases for exchanges in phase.exchanges if exchanges.kind != "send")


def _terms(phases: list[Phase], wait: float) -> dict[str, float]:
    """Term → its seconds in a step of a rank. ``wait``: seconds in which it waits for other stages."""
    terms: dict[str, float] = {"compute": 0.0, "host": 0.0}
    for phase in phases:
        if phase.label in ("clip", "optimizer"):
            terms[str(phase.label)] = phase.spent.total.seconds
            continue
        terms["compute"] += phase.spent.device.seconds
        terms["host"] += phase.spent.host.seconds
        for axis, seconds in phase.spent.exposed.items():
            name = f"communication over {axis}"
            terms[name] = terms.get(name, 0.0) + seconds.seconds
    if wait > 0:
        terms["waiting for other stages"] = wait
    return {term: seconds for term, seconds in terms.items() if seconds}


def _shared_cores(
    recipe: Recipe, profile: Profile, roles: tuple[Role, ...], phases: Mapping[int, list[Phase]]
) -> float:
    """T₁ / cores: least seconds of a step if ranks share the cores of one machine (Brent, see ``play``).

    T₁ is the sum over all ranks of the seconds of their functions and sends. 0 if ranks do not share cores.
    """
    if not profile.cores:
        return 0.0
    two_ranks, total = Group(2, 2), 0.0
    for role in roles:
        sent = sum(
            collective(profile, "send", phase.sends, two_ranks).seconds for phase in phases[role.rank] if phase.sends
        )
        total += role.count * (_busy_seconds(phases[role.rank]) + sent)
    return total / profile.cores


def _busy_seconds(phases: Iterable[Phase]) -> float:
    """Sum of the seconds of phases, without the time in which a rank waits for other stages."""
    return sum(phase.spent.total.seconds for phase in phases)


def _transfer(recipe: Recipe, profile: Profile) -> Transfer:
    """The function that gives the seconds of a send between two stages.

    If any rank of a stage sends to another node, all its sends count as sends across nodes.
    """

    def nodes(stage: int) -> list[int]:
        return [rank // profile.devices_per_node for rank in recipe.stage_ranks_of(stage)]

    @cache
    def group(stage: int, other: int) -> Group:
        return Group(2, 2 if nodes(stage) == nodes(other) else 1)

    def transfer(stage: int, other: int, nbytes: int) -> Estimate:
        if recipe.stage_rank[stage] == recipe.stage_rank[other]:
            return NOTHING
        return collective(profile, "send", nbytes, group(stage, other))

    return transfer
