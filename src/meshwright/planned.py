"""``make_job``: a model and a plan with a mesh → a job; and ``make_recipe``, its first half, which needs no processes.

build, plan, batch ──► Planned.recipe ──► make_groups ──► apply ──► Job
                       └ make_recipe ┘
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.code_state import code_state_kept
from meshwright.deferred import Build, record
from meshwright.errors import PlanError
from meshwright.evaluation import Evaluating, in_evaluation
from meshwright.generators import random_numbers_kept
from meshwright.graph import ModelGraph
from meshwright.mesh import Mesh
from meshwright.plan import Plan, PlanLike
from meshwright.planning.branch import slots_of_two_places
from meshwright.planning.capture import capture, computing_in
from meshwright.planning.constructed import refuse_overlaps, refusing, refusing_trained
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.module_state import undisturbed
from meshwright.planning.passes.checks import refuse_hidden, refuse_lazy
from meshwright.planning.pipeline import StageMemory, cut_as_before, recomputed_spans
from meshwright.planning.resolve import resolve
from meshwright.planning.rows import events_by_rows, rows_apart, rows_of_batch
from meshwright.planning.shadow import Shadow
from meshwright.private import unprofiled
from meshwright.recipe import Recipe
from meshwright.runtime.rows.batch import copied, mapped, plain, tensors_in
from meshwright.runtime.rows.label_program import CountRecorder
from meshwright.runtime.rows.loss import Loss, check_loss, one_number, output_loss
from meshwright.runtime.rows.microbatches import call_model
from meshwright.runtime.rows.sharing import shared_inputs
from meshwright.spmd.one_process import one_process
from meshwright.submesh import Submesh
from meshwright.switches import NO_SWITCHES, Switch, switched

if TYPE_CHECKING:
    from meshwright.runtime.apply import Transform
    from meshwright.runtime.job import Job


def make_job(
    build: Build,
    plan: Plan,
    *,
    batch: Any,
    loss: Loss | None = None,
    device: str | None = None,
    timeout: float = 600.0,
    dtype: torch.dtype | None = None,
    transform: Transform | None = None,
    notes: tuple[str, ...] = (),
) -> Job:
    """A model, laid out over the mesh of a plan. Collective: every rank calls it alike.

    Args:
        plan: a plan with one mesh, or with several, one of which has as many ranks as there are processes.
        notes: notes on how the plan was found; they come first in the job's notes.

    The other arguments are those of ``parallelize``.

    Raises:
        PlanError: with every problem of the plan, before anything starts.
    """
    # Imported here, so that a caller of ``make_recipe`` does not wait for it.
    from meshwright.runtime.apply import apply
    from meshwright.runtime.groups import ensure_world, make_groups

    loss = loss or output_loss
    this_device = ensure_world(device, timeout)
    plan = plan.at(dist.get_world_size())
    plan.check_mesh()
    check_world(plan.mesh, dist.get_world_size())
    dtype = dtype or (torch.float64 if plan.precision == "float64" else None)
    with _without_callers_modes():
        with code_state_kept(build):  # the model is built again, as if for the first time
            planned = Planned(build, plan, batch, loss, dtype)
        planned = planned.under(_agreed(replace(planned.recipe, notes=(*notes, *planned.recipe.notes))))
        groups = make_groups(planned.recipe, this_device, timeout)
        return apply(build, planned.recipe, groups, loss=loss, replanner=planned, dtype=dtype, transform=transform)


def make_recipe(build: Build, plan: PlanLike, batch: Any, loss: Loss | None = None) -> Recipe:
    """Every decision about a model under a plan. Starts no process and allocates no parameter.

    ``batch``: the batch of all data ranks together, with at least one row for each.

    Raises:
        PlanError: with every problem of the plan.
    """
    with _without_callers_modes(), code_state_kept(build):
        return Planned(build, Plan.parse(plan), batch, loss or output_loss, whole_batch=True).recipe


@contextmanager
def _without_callers_modes() -> Iterator[None]:
    """Inside the ``with``, gradients are on, inference mode is off, and the caller's profiler records nothing: a job is made
    for training, whatever is on while it is made."""
    with torch.inference_mode(False), torch.enable_grad(), unprofiled():
        yield


class Planned:
    """A model whose parameters have shapes only, with its recipe. Its forward can run again, to record it for other shapes."""

    @one_process()
    def __init__(
        self,
        build: Build,
        plan: Plan,
        batch: Any,
        loss: Loss,
        dtype: torch.dtype | None = None,
        *,
        whole_batch: bool = False,
    ) -> None:
        check_loss(loss)
        plan.check_mesh()
        batch = mapped(lambda t: t.clone() if t.is_inference() else t, batch)  # autograd saves no inference tensor
        recorded = record(build, seed=plan.seed, draw=False)
        self._model = recorded.module
        refuse_hidden(self._model)
        refuse_lazy(self._model)
        refuse_overlaps(recorded.shared.pairs)
        if dtype is not None:
            from meshwright.runtime.apply import cast, cast_type

            cast(self._model, dtype)
            batch = mapped(lambda t: t.to(cast_type(t.dtype, dtype)), batch)
        self._loss, self._precision, self._dtype, batch = loss, plan.precision, dtype, plain(batch)

        def forward(model: nn.Module) -> Any:
            rows = copied(batch)
            output = call_model(model, rows)
            with refusing_trained(tensors_in(rows)):
                return one_number(self._loss(output))

        run = refusing(forward, recorded.shared.origin) if recorded.shared else forward
        recipe = resolve(self._model, plan, run, batch, whole_batch=whole_batch)
        divided = recipe.mesh.data_size * recipe.microbatches > 1
        self.recipe = replace(recipe, shared_inputs=shared_inputs(batch, self._runs) if divided else ())
        self._homes = _homes(self.recipe)

    def _loss_of(self, model: nn.Module, batch: Any) -> Any:
        return one_number(self._loss(call_model(model, batch)))

    def under(self, recipe: Recipe) -> Planned:
        """This model under the recipe on which all ranks have agreed. (By the samples of data ranks, recipes may differ.)"""
        planned = copy(self)
        planned.recipe, planned._homes = recipe, _homes(recipe)
        return planned

    @property
    def model(self) -> nn.Module:
        """The model, whose parameters have shapes only."""
        return self._model

    @one_process()
    def of(self, build: Build, recipe: Recipe) -> Planned:
        """This plan for another model, with the recipe of that model: one that passes its input through some blocks, say."""
        planned = self.under(recipe)
        planned._model = record(build, seed=recipe.seed, draw=False).module
        if self._dtype is not None:
            from meshwright.runtime.apply import cast

            cast(planned._model, self._dtype)
        return planned

    @one_process()
    def graph(
        self,
        run: Callable[[nn.Module], Any],
        *,
        grad: bool = True,
        evaluating: Evaluating = frozenset(),
        switches: Mapping[Switch, Any] = NO_SWITCHES,
    ) -> ModelGraph:
        """Records a forward.

        Args:
            run: runs the forward of the model that it gets.
            grad: whether a backward follows.
            evaluating: the modules that are in evaluation mode.
            switches: attributes that a person has set on modules since.
        """
        recipe = self.recipe
        dividing = [p for p in recipe.branches if p.splits]
        with (
            switched(self._model, switches),
            computing_in(self._model, self._precision),
            in_evaluation(self._model, evaluating),
        ):
            graph = capture(
                self._model, run, staged=recipe.mesh.axis_size("pp") > 1, grad=grad, follow=bool(recipe.branches)
            )
            graph.cuts = self._cuts(graph)
            if not dividing or not all(rows_apart(self._model, p, graph) for p in dividing):
                return graph
            return replace(
                graph,
                rows=rows_of_batch(graph) or 0,
                by_rows=events_by_rows(self._model, undisturbed(self._model, run), graph),
            )

    def _cuts(self, graph: ModelGraph) -> tuple[int, ...] | None:
        """The positions at which stages begin in a forward, which may take another path than the sample's. Each stage must have
        the parameters that it uses, and the tensors of modules that it changes. None if there are no such positions."""
        recipe = self.recipe
        if recipe.branches or not recipe.stages:  # regions may not be cut: stages begin at the same events as before
            starts = [graph.positions.get(stage.first, -1) for stage in recipe.stages[1:]]
            apart = slots_of_two_places(recipe.placed, recipe.places, graph)
            return None if -1 in starts or starts != sorted(starts) or apart else tuple(starts)
        pinned = {
            position: frozenset.intersection(*(frozenset(recipe.by_name[name].stages) for name in event.parameters))
            for position, event in enumerate(graph.events) if event.parameters and not event.hands_on
        }  # fmt: skip
        every = frozenset(range(len(recipe.stages)))
        for slot, position in graph.changes.items():
            if slot in self._homes:
                pinned[position] = pinned.get(position, every) & {self._homes[slot]}
        nbytes = {name: p.numel() * p.element_size() for name, p in self._model.named_parameters()}
        uncut_modules = {*(unit.name for unit in recipe.units), *recipe.recompute} - {""}
        recomputed = recomputed_spans(graph, recipe.recompute)
        memory = StageMemory.of(
            recipe.mesh, recipe.schedule, len(recipe.stages), recipe.microbatches, nbytes, recomputed
        )
        cuts = cut_as_before(graph, recipe.stages, uncut_modules, memory, pinned)
        if cuts is not None:
            # The first forward that changes an attribute decides its stage.
            for slot, position in graph.changes.items():
                self._homes.setdefault(slot, bisect_right(cuts, position))
        return cuts

    @one_process()
    def _runs(self, batch: Any) -> bool:
        """Whether the forward runs on a batch, on meta tensors."""
        try:
            run = undisturbed(self._model, lambda model: self._loss_of(model, batch))
            with torch.no_grad(), Shadow(), MetaFunctions(), random_numbers_kept():
                run(self._model)
        except Exception:  # a model may raise anything for shapes that do not fit
            return False
        return True

    @one_process()
    def rows_apart(self, place: Submesh, graph: ModelGraph) -> bool:
        """Whether data ranks of a branch can each run their own rows of it. ``graph``: recorded for the same batch."""
        return rows_apart(self._model, place, graph)

    @one_process()
    def record(
        self,
        batch: Any,
        recorder: CountRecorder,
        evaluating: Evaluating = frozenset(),
        switches: Mapping[Switch, Any] = NO_SWITCHES,
    ) -> None:
        """Runs the forward on meta tensors under ``recorder``. ``evaluating``, ``switches``: as for ``graph``."""
        run = undisturbed(self._model, lambda model: self._loss_of(model, batch))
        with (
            switched(self._model, switches),
            Shadow(),
            MetaFunctions(),
            computing_in(self._model, self._precision),
            in_evaluation(self._model, evaluating),
            recorder.on(self._model),
        ):
            run(self._model)


def _homes(recipe: Recipe) -> dict[tuple[str, str], int]:
    """(module, name) of a buffer that a forward changes → the stage that changes it."""
    return {_slot(name): stage for name, stage, _ in recipe.buffers}


def _slot(buffer: str) -> tuple[str, str]:
    """The name of a buffer as (module, name)."""
    module, _, name = buffer.rpartition(".")
    return module, name


def _agreed(recipe: Recipe) -> Recipe:
    """Rank 0's recipe, on every rank: decisions of ranks could differ, as their Python may hash or order differently."""
    holder = [recipe]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(holder, src=0)
    return holder[0]


def check_world(mesh: Mesh, world: int) -> None:
    """Raises PlanError if the mesh and the number of processes differ."""
    if mesh.size == world:
        return
    raise PlanError.of(
        "this run",
        where="mesh",
        given=f"{mesh}: {mesh.size} ranks, and {world} process{'es' * (world > 1)}",
        required=f"as many processes as the mesh has ranks, {mesh.size}",
        fix=f"torchrun --nproc-per-node {mesh.size} {_script()}",
    )


def _script() -> str:
    import sys

    return " ".join(sys.argv) if sys.argv and sys.argv[0] else "train.py"
