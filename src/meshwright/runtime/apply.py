"""The one visible order in which a recipe becomes a job.

1  build on meta         deferred:    no rank holds the whole model
2  cut                   runtime/weights/parameters.py: tensor parallelism's DTensors
3  module calls          calls/hook.py: recompute, the sequence, and which part of a forward is this rank's
4  shard                 runtime/weights/fsdp.py: FSDP2 on units, then the root
5  allocate and fill     runtime/weights/parameters.py: each parameter's own slice of its one-device value
6  view                  the model's forward sees whole tensors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.calls.hook import ModuleCalls
from meshwright.calls.sequence import InputCut
from meshwright.deferred import Recorded, record
from meshwright.generators import Generators
from meshwright.layout import Shard
from meshwright.plan.keys import DRAWN
from meshwright.private import held_of, hooked, replace_tensors, storage_of
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.replay.replayed import LocalPrograms
from meshwright.runtime.branches.exchange import Branching
from meshwright.runtime.branches.streams import Streams, collectives_within
from meshwright.runtime.groups import Groups
from meshwright.runtime.job import Job
from meshwright.runtime.pipeline.program import Programs, Replanner
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.runner import Runner
from meshwright.runtime.weights.fsdp import keep_attributes, needs_fsdp, shard_units
from meshwright.runtime.weights.halves import as_computed, half_type, halves
from meshwright.runtime.weights.parameters import (
    Allocated,
    StandIns,
    allocate,
    attributes_of,
    cut_parameters,
    fill,
    give_attributes,
    local_part,
    make_gradients_dense,
    on_device,
    places,
    put_back,
)
from meshwright.runtime.weights.recompute import recomputed
from meshwright.runtime.weights.step_gradients import Hooks, StepGradients, take_hooks
from meshwright.runtime.weights.unused import Routed
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.one_process import one_process
from meshwright.spmd.tensor import GlobalTensor, local_of

Transform = Callable[[str, Tensor], Tensor]


def apply(
    build: Callable[[], nn.Module],
    recipe: Recipe,
    groups: Groups,
    *,
    loss: Loss,
    replanner: Replanner,
    dtype: torch.dtype | None = None,
    transform: Transform | None = None,
    rehearsed: Allocated | None = None,
) -> Job:
    """The job of a recipe. Collective over all ranks.

    Args:
        replanner: plans forwards again, for batches of other shapes than the sample's.
        dtype: what every floating parameter and buffer is cast to after it is initialised.
        transform: (name, whole value) → another value, for tests that want other values than fresh ones.
        rehearsed: gives what this rank holds memory, if the job is rehearsed without values: then nothing is filled.
    """
    with one_process():
        recorded = record(build, seed=recipe.seed, draw=rehearsed is None and recipe.weights == DRAWN)
        if rehearsed is None and recipe.weights != DRAWN and recorded.by_chance:  # what no file brings is drawn
            recorded = record(build, seed=recipe.seed)
    model = recorded.module
    hooks, attributes = take_hooks(model), attributes_of(model)
    make_gradients_dense(model)
    if dtype is not None:
        cast(model, dtype)
    objects = {name: p for name, p in model.named_parameters() if name in recipe.kept}
    cut_parameters(model, recipe, groups)
    random = Generators(groups.device, model)
    ledger = Ledger()
    dispatchers = _dispatchers(model, recipe, groups, ledger)
    local_programs = LocalPrograms(model, recipe.blocks) if dispatchers and not recipe.eager else None
    calls = _module_calls(model, recipe, dispatchers, random, local_programs)
    shard_units(model, recipe, groups)
    allocate(model, recipe, groups, rehearsed or on_device)
    if rehearsed is None:
        fill(model, recipe, groups, _values(recorded, dtype, transform) if recipe.weights == DRAWN else None)
    stand_ins = put_back(model, objects)
    give_attributes(model, attributes)
    keep_attributes(model, attributes)
    branching = Branching(recipe, groups, ledger, random) if recipe.branches else None
    view = _view(model, recipe, dispatchers, branching, stand_ins)
    # Ranks of one tp group draw the same numbers, which the view then takes slices of.
    random.start(recipe.seed, recipe.mesh.data_index(groups.rank), groups.pp_rank)
    stages = Stages(
        model,
        recipe,
        groups,
        view=view,
        halves=halves(model.named_parameters(), recipe) if view is None else None,
        dispatchers=dispatchers.values(),
        calls=calls,
        branching=branching,
        streams=_streams(recipe, groups),
    )
    runner = _runner(stages, hooks, replanner, loss, wholes=view is not None)
    several = recipe.mesh.data_size * recipe.microbatches > 1
    counter = LabelCounter(replanner.record, model, stages.modes) if several else None
    return Job(runner, ledger, counter, random, local_programs)


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
        cut=InputCut(dispatchers[0]) if dispatchers else None,
        recomputed=recomputed(model, recipe.recompute, random),
        replayed={n: programs.around(n, modules[n]) for n in programs.names} if programs is not None else None,
    )


def _runner(stages: Stages, hooks: Mapping[str, Hooks], replanner: Replanner, loss: Loss, *, wholes: bool) -> Runner:
    model, recipe, groups = stages.model, stages.recipe, stages.groups
    routed = Routed(model, recipe, groups, stages.sync) if recipe.routed and needs_fsdp(recipe) else None
    programs = _programs(recipe, groups, replanner, stages) if recipe.in_parts else None
    gradients = StepGradients(model, recipe, groups, hooks)
    return Runner(stages, programs, loss, gradients, routed=routed, wholes=wholes)


def _programs(recipe: Recipe, groups: Groups, replanner: Replanner, stages: Stages) -> Programs:
    among = [groups.hosts[axis] for axis in ("pp", "tp") if axis in groups.hosts]
    return Programs(
        recipe,
        replanner,
        stages.numbers,
        among,
        stages.modes,
        mine=None if stages.branching is None else stages.branching.mine,
        streamed=stages.streams is not None,
    )


def _streams(recipe: Recipe, groups: Groups) -> Streams | None:
    """What runs blocks at the same time on this rank: only blocks without collectives, whose order is the same on all ranks
    because one thread, or one stream, makes it."""
    if not recipe.streams or collectives_within(recipe):
        return None
    return Streams(1 + max(recipe.streams.values()), groups.device)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating parameters and buffers, and complex ones to the complex type of as many digits (``Module.to`` would make
    them real); integer ones stay."""
    replace_tensors(model, lambda t: t.to(cast_type(t.dtype, dtype)))


def cast_type(of: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What a tensor of a type is cast to, if floating ones are cast to ``dtype``."""
    if of.is_complex:
        return dtype.to_complex() if dtype.itemsize >= 4 else of
    return dtype if of.is_floating_point else of


def _values(
    recorded: Recorded, dtype: torch.dtype | None, transform: Transform | None
) -> Callable[[ParameterRecipe], Tensor]:
    def value(line: ParameterRecipe) -> Tensor:
        whole = recorded.value(line.name)
        if dtype is not None:
            whole = whole.to(cast_type(whole.dtype, dtype))
        return whole if transform is None else transform(line.name, whole)

    return value


def _dispatchers(model: nn.Module, recipe: Recipe, groups: Groups, ledger: Ledger) -> dict[int, Dispatcher]:
    """Place of this rank → the dispatcher over its tp axis; none without one."""
    if recipe.mesh.axis_size("tp") == 1:
        return {}
    names, works = {id(m): n for n, m in model.named_modules()}, {}
    for place in sorted(recipe.places.of(groups.rank)):
        at, size = recipe.places.at(groups.rank, place), recipe.places[place].tp
        assert at is not None
        axis = Axis("tp", size, at.tp, groups.meshes[place]["tp"].get_group(), ledger, place)
        works[place] = Dispatcher(axis, ledger, names)
    return works


def _view(
    model: nn.Module,
    recipe: Recipe,
    dispatchers: Mapping[int, Dispatcher],
    branching: Branching | None,
    stand_ins: StandIns,
) -> SpmdMode | None:
    """The view over tp, and over that of each branch; None without one."""
    if not dispatchers:
        return None
    local = LocalParameters(model, recipe, dispatchers, branching, stand_ins)
    return SpmdMode(dispatchers[0], local, local.forget, local.renew)


class _Counted(torch.autograd.Function):
    """A parameter that several places share: its gradient is counted on one rank of each, and zeros on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        ctx.set_materialize_grads(False)  # none stays none
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return g if g is None or ctx.counts else torch.zeros_like(g), None


def _state(p: DTensor) -> tuple[int, bool]:
    """What a part of a parameter rests on: its memory, and whether it has a gradient."""
    return storage_of(held_of(p)), p.requires_grad


def _forget_moves(part: Tensor) -> None:
    """Drops what the dispatcher noted on a tensor. A tensor without values (``FakeTensor``) has attributes of torch's."""
    noted = vars(part)
    for name in [name for name in noted if name.startswith("_mw_")]:
        del noted[name]


@dataclass(slots=True)
class _Part:
    """A parameter's local part, as it was made.

    Attributes:
        of: the parameter.
        held: what this rank held of it then.
        lasts: whether it begins no graph: it is as good in the next forward.
        forward: the last forward that used it.
    """

    of: Tensor
    held: Tensor
    part: Tensor
    lasts: bool
    forward: int


class LocalParameters:
    """A parameter → its local part, for the view.

    FSDP2 puts other Parameter objects in place while a unit is gathered; they are found by where they stand, once each.
    While the view is on, a parameter has one local part, so that a gradient by the parameter can be asked for.

    Args:
        stand_ins: what stands in modules in the place of objects that the model has elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        works: Mapping[int, Dispatcher],
        branching: Branching | None,
        stand_ins: StandIns,
    ) -> None:
        self._model, self._recipe, self._works, self._branching = model, recipe, works, branching
        self._stand_ins, self._low = stand_ins, half_type(recipe)
        self._several = any(len(line.places) > 1 for line in recipe.parameters)
        self._lines: dict[int, tuple[Tensor, ParameterRecipe]] = {}
        self._leaves: dict[int, tuple[Tensor, tuple[int, bool], Tensor]] = {}
        self._parts: dict[Any, _Part] = {}
        self._used: list[tuple[Any, _Part]] = []  # in this forward
        self._forward = 0

    def forget(self) -> None:
        """The view goes off: the graph that parts are the beginning of, and what moves remember of them, are not needed any
        more. What begins no graph stays for the next forward."""
        for key, known in self._used:
            part = known.part
            if not known.lasts:
                self._parts.pop(key, None)
            if not isinstance(part, GlobalTensor):
                _forget_moves(part)  # a leaf stays; what moves remember of it does not
                part._mw_is_parameter = True  # type: ignore[attr-defined]
            elif part._mw_silent or part._mw_apart:  # this forward noted something that is not true of the parameter
                self._parts.pop(key, None)
            else:
                part._mw_memo, part._mw_memory = {}, None
        self._used.clear()
        self._forward += 1

    def renew(self) -> None:
        """Parts are made anew in the next forward: what was noted on those of a trial, as their type, is not true of a step."""
        self._parts.clear()

    def __call__(self, x: Tensor) -> Tensor | None:
        if not isinstance(x, DTensor):
            if not self._stand_ins or (stand_in := self._stand_ins.get(id(x))) is None or stand_in[0] is not x:
                return None
            x = stand_in[1]
        running = self._branching.running[-1] if self._branching is not None and self._several else 0
        trains = x.requires_grad
        key = id(x), trains, trains and torch.is_grad_enabled(), torch.is_inference_mode_enabled(), running
        known = self._parts.get(key)
        if known is not None and known.of is x:
            if known.forward == self._forward:
                return known.part
            if held_of(x) is known.held and not hooked(x):
                known.forward = self._forward
                self._used.append((key, known))
                return known.part
        if x.device_mesh.ndim != 1 or (line := self._line(x)) is None:
            return None  # with more axes it is FSDP2's, at rest
        held, part = held_of(x), self._part(x, line)
        local = local_of(part)
        lasts = local.is_leaf and storage_of(local) == storage_of(held) and not torch.is_inference_mode_enabled()
        known = self._parts[key] = _Part(x, held, part, lasts, self._forward)
        self._used.append((key, known))
        return part

    def _part(self, x: DTensor, line: ParameterRecipe) -> Tensor:
        local = self._leaf(x)
        if len(line.places) > 1 and self._branching is not None:
            local = _Counted.apply(local, self._branching.counts(line.places))
        local = as_computed(local, line, self._low)
        local._mw_is_parameter = True  # type: ignore[attr-defined]
        if isinstance(line.tp, Shard):
            return GlobalTensor(local, line.tp, self._works[line.place], parameter=(line.name, tuple(range(x.dim()))))
        return local

    def _leaf(self, x: DTensor) -> Tensor:
        """The parameter's local part, the same for as long as nothing about it changes that autograd cares for."""
        if torch.is_inference_mode_enabled() or hooked(x):
            return local_part(x)
        state = _state(x)
        leaf = self._leaves.get(id(x))
        if leaf is None or leaf[0] is not x or leaf[1] != state:
            leaf = self._leaves[id(x)] = x, state, local_part(x)
        return leaf[2]

    def _line(self, x: Tensor) -> ParameterRecipe | None:
        known = self._lines.get(id(x))
        if known is None or known[0] is not x:
            for name, _, _, p in places(self._model):
                self._lines[id(p)] = (p, self._recipe.by_name[name])
            known = self._lines.get(id(x))
        return known[1] if known is not None and known[0] is x else None
