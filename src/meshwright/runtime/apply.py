"""``apply``: turns a recipe into a job, in this order:

1  build on meta         deferred: no rank allocates the full model
2  shard over tp         runtime/weights/parameters.py: DTensors of tensor parallelism
3  wrap module calls     calls/hook.py: activation checkpointing, sequence parallelism, this rank's part of a forward
4  shard over data       runtime/weights/fsdp.py: FSDP2 on units, then on the root
5  allocate and fill     runtime/weights/parameters.py: each rank fills its slices of the one-device values
6  equal replicas        runtime/starting_values.py: replicas start alike, whatever the constructor did
7  spmd                  the SPMD mode, under which the model's forward sees full tensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from meshwright.calls.hook import ModuleCalls
from meshwright.calls.sequence import InputSharder
from meshwright.deferred import Build, RecordedModule, record
from meshwright.generators import Generators
from meshwright.names import few
from meshwright.plan.keys import DRAWN
from meshwright.private import replace_tensors
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.replay.replayed import LocalPrograms
from meshwright.runtime.branches.exchange import Branching
from meshwright.runtime.branches.streams import Streams, collectives_within
from meshwright.runtime.groups import Groups
from meshwright.runtime.job import Job
from meshwright.runtime.local_parameters import LocalParameters
from meshwright.runtime.pipeline.program import Programs, Replanner
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.runner import Runner
from meshwright.runtime.starting_values import make_equal
from meshwright.runtime.weights.fsdp import keep_attributes, needs_fsdp, shard_units
from meshwright.runtime.weights.halves import halves
from meshwright.runtime.weights.parameters import (
    Allocated,
    StandIns,
    allocate,
    attributes_of,
    fill,
    give_attributes,
    make_gradients_dense,
    on_device,
    put_back,
    shard_parameters,
)
from meshwright.runtime.weights.recompute import recomputed
from meshwright.runtime.weights.step_gradients import Hooks, StepGradients, take_hooks
from meshwright.runtime.weights.unused import UnusedParameters
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.one_process import one_process

_UNEQUAL = (
    "ranks that built the model from the same seed had other values of {}: its constructor does not repeat itself. All have "
    "those of the lowest rank now; parts of sharded parameters are as each rank has built them"
)
Transform = Callable[[str, Tensor], Tensor]


def apply(
    build: Build,
    recipe: Recipe,
    groups: Groups,
    *,
    loss: Loss,
    replanner: Replanner,
    dtype: torch.dtype | None = None,
    transform: Transform | None = None,
    rehearsed: Allocated | None = None,
) -> Job:
    """Turns a recipe into a job. Collective over all ranks.

    Args:
        build: returns the model.
        loss: computes the loss from the model's output.
        replanner: traces forwards again, for batches of other shapes than the sample.
        dtype: every floating-point parameter and buffer is cast to it after initialization.
        transform: (name, full value) → another value, for tests that want other values than fresh ones.
        rehearsed: allocates this rank's tensors, if the job is rehearsed without values; then nothing is filled.
    """
    recorded = _recorded(build, recipe, filled=rehearsed is None)
    model = recorded.module
    hooks, attributes = take_hooks(model), attributes_of(model)
    make_gradients_dense(model)
    if dtype is not None:
        cast(model, dtype)
    objects = {name: p for name, p in model.named_parameters() if name in recipe.referenced_outside}
    shard_parameters(model, recipe, groups)
    random, ledger = Generators(groups.device, model), Ledger()
    dispatchers = _dispatchers(model, recipe, groups, ledger)
    local_programs = _local_programs(model, recipe) if dispatchers and not recipe.eager else None
    calls = _module_calls(model, recipe, dispatchers, random, local_programs)
    shard_units(model, recipe, groups)
    allocate(model, recipe, groups, rehearsed or on_device)
    if rehearsed is None:
        fill(model, recipe, groups, _values(recorded, dtype, transform) if recipe.weights == DRAWN else None)
    stand_ins = put_back(model, objects)
    give_attributes(model, attributes)
    keep_attributes(model, attributes)
    unequal = make_equal(model, recipe, groups) if rehearsed is None else ()
    # Ranks of one tp group draw the same numbers; the SPMD mode takes slices of them.
    random.start(recipe.seed, recipe.mesh.data_index(groups.rank), groups.pp_rank)
    branching = Branching(recipe, groups, ledger, random) if recipe.branches else None
    spmd = _spmd_mode(model, recipe, dispatchers, branching, stand_ins)
    streams = _streams(recipe, groups)
    stages = Stages(
        model, recipe, groups,
        spmd=spmd, halves=halves(model.named_parameters(), recipe) if spmd is None else None,
        dispatchers=dispatchers.values(), calls=calls, branching=branching, streams=streams,
    )  # fmt: skip
    runner = _runner(stages, hooks, replanner, loss, leaves_global_tensors=spmd is not None)
    notes = [_UNEQUAL.format(few(unequal))] if unequal else []
    return Job(runner, ledger, _label_counter(stages, replanner), random, local_programs, notes)


def _recorded(build: Build, recipe: Recipe, *, filled: bool) -> RecordedModule:
    """The model on meta. Initialization is recorded, if values are needed (``filled``) that no file has."""
    with one_process():
        recorded = record(build, seed=recipe.seed, draw=filled and recipe.weights == DRAWN)
        if filled and recipe.weights != DRAWN and recorded.by_chance:  # random values that no file has
            recorded = record(build, seed=recipe.seed)
    return recorded


def _local_programs(model: nn.Module, recipe: Recipe) -> LocalPrograms:
    return LocalPrograms(model, recipe.blocks, compile=recipe.compile, recomputed=bool(recipe.recompute))


def _label_counter(stages: Stages, replanner: Replanner) -> LabelCounter | None:
    """Counts the labels of batches; None if batches are not divided."""
    divided = stages.recipe.mesh.data_size * stages.recipe.microbatches > 1
    return LabelCounter(replanner.record, stages.model, stages.modes, stages.switches) if divided else None


def _module_calls(
    model: nn.Module,
    recipe: Recipe,
    dispatchers: Mapping[int, Dispatcher],
    random: Generators,
    programs: LocalPrograms | None,
) -> ModuleCalls:
    modules = dict(model.named_modules())
    return ModuleCalls(
        model,
        followed=recipe.in_parts,
        blocks=recipe.sequence if dispatchers else (),
        shard_inputs=InputSharder(dispatchers[0]) if dispatchers else None,
        recomputed=recomputed(model, recipe.recompute, random),
        replayed={n: programs.around(n, modules[n]) for n in programs.names} if programs is not None else None,
    )


def _runner(
    stages: Stages, hooks: Mapping[str, Hooks], replanner: Replanner, loss: Loss, *, leaves_global_tensors: bool
) -> Runner:
    model, recipe, groups = stages.model, stages.recipe, stages.groups
    unused = UnusedParameters(model, recipe, groups, stages.sync) if recipe.routed and needs_fsdp(recipe) else None
    programs = _programs(recipe, groups, replanner, stages) if recipe.in_parts else None
    gradients = StepGradients(model, recipe, groups, hooks)
    return Runner(stages, programs, loss, gradients, unused=unused, leaves_global_tensors=leaves_global_tensors)


def _programs(recipe: Recipe, groups: Groups, replanner: Replanner, stages: Stages) -> Programs:
    among = [groups.hosts[axis] for axis in ("pp", "tp") if axis in groups.hosts]
    return Programs(
        recipe,
        replanner,
        stages.numbers,
        among,
        stages.modes,
        stages.switches,
        rank_places=None if stages.branching is None else stages.branching.rank_places,
        streamed=stages.streams is not None,
    )


def _streams(recipe: Recipe, groups: Groups) -> Streams | None:
    """The streams that run blocks of this rank at the same time. Only blocks without collectives: these must be in the
    same order on all ranks, which only a single stream ensures."""
    if not recipe.streams or collectives_within(recipe):
        return None
    return Streams(1 + max(recipe.streams.values()), groups.device)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers; complex ones to the complex dtype of the same precision (``Module.to`` would
    make them real). Integer ones stay."""
    replace_tensors(model, lambda t: t.to(cast_type(t.dtype, dtype)))


def cast_type(of: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor of dtype ``of`` is cast to, if floating-point ones are cast to ``dtype``."""
    if of.is_complex:
        return dtype.to_complex() if dtype.itemsize >= 4 else of
    return dtype if of.is_floating_point else of


def _values(
    recorded: RecordedModule, dtype: torch.dtype | None, transform: Transform | None
) -> Callable[[ParameterRecipe], Tensor]:
    """Returns a function: a parameter's line of the recipe → its full initial value."""

    def value(line: ParameterRecipe) -> Tensor:
        full = recorded.value(line.name)
        if dtype is not None:
            full = full.to(cast_type(full.dtype, dtype))
        return full if transform is None else transform(line.name, full)

    return value


def _dispatchers(model: nn.Module, recipe: Recipe, groups: Groups, ledger: Ledger) -> dict[int, Dispatcher]:
    """Submesh of this rank → the dispatcher of its tp axis; empty without tensor parallelism."""
    if recipe.mesh.axis_size("tp") == 1:
        return {}
    names, dispatchers = {id(m): n for n, m in model.named_modules()}, {}
    for place in sorted(recipe.places.of(groups.rank)):
        coordinate, size = recipe.places.at(groups.rank, place), recipe.places[place].tp
        assert coordinate is not None
        axis = Axis("tp", size, coordinate.tp, groups.meshes[place]["tp"].get_group(), ledger, place)
        dispatchers[place] = Dispatcher(axis, ledger, names)
    return dispatchers


def _spmd_mode(
    model: nn.Module,
    recipe: Recipe,
    dispatchers: Mapping[int, Dispatcher],
    branching: Branching | None,
    stand_ins: StandIns,
) -> SpmdMode | None:
    """The SPMD mode over the tp axis of the mesh and of each branch; None without tensor parallelism."""
    if not dispatchers:
        return None
    local = LocalParameters(model, recipe, dispatchers, branching, stand_ins)
    return SpmdMode(dispatchers[0], local)
