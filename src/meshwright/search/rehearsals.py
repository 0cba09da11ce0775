"""``Rehearsals``: rehearses a model with few of its blocks, and computes the costs of its layers at each size of tp.

full model                               planned once, without tp: shows which blocks are alike (``prediction/blocks.py``)
few blocks, and one more of each kind    planned once at each size of tp; the models below use parts of this recipe
few blocks · one more block · more rows  rehearsed (``layer_costs.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.deferred import Build
from meshwright.errors import PlanError
from meshwright.plan import Plan
from meshwright.planning.concurrent import concurrent
from meshwright.prediction.blocks import Folding, PrunedModel, folding_of
from meshwright.prediction.branches.compare import PlannedRegions
from meshwright.prediction.clock import before_last_step
from meshwright.prediction.copies import copies_of
from meshwright.prediction.coupling import coupling_of
from meshwright.prediction.passing import pruned
from meshwright.prediction.rehearsal import TWO_STEPS, MakeOptimizer, Rehearsal, RehearsedStep, rehearsal_of, rehearse
from meshwright.prediction.shapes import Shapes
from meshwright.prediction.trace import Trace
from meshwright.recipe import Recipe
from meshwright.runtime.rows.batch import copied
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.runtime.rows.microbatches import call_model, take_rows
from meshwright.search.branch_costs import BranchCosts
from meshwright.search.layer_costs import LayerCosts, UpdateCosts, layer_costs_of
from meshwright.search.sizes import DP_SHARD, FEW_BLOCKS, FEW_ROWS, MANY_ROWS
from meshwright.search.space import Sharding
from meshwright.search.stages import StageParts
from meshwright.search.step_memory import StepMemory

ALONE = Sharding(1)
# The first forward allocates what FSDP2 gathers into. So the second is one of many.
WITHOUT_UPDATES = (RehearsedStep(most=1, backward=False, updated=False), RehearsedStep(updated=False))


@dataclass(frozen=True)
class FewBlocks:
    """A model with few blocks of each kind. The other blocks are passed through.

    Attributes:
        most: makes the model with ``FEW_BLOCKS`` + 1 blocks of each kind.
        base: passes through more of these blocks: ``FEW_BLOCKS`` of each kind remain.
        more: one for each kind: as ``base``, with one more block of this kind.
        kinds: for each kind, the names of its blocks in the full model.
    """

    most: Build
    base: PrunedModel = field(default_factory=lambda: PrunedModel({}))
    more: tuple[PrunedModel, ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of_folding(cls, build: Build, folding: Folding, seed: int) -> FewBlocks:
        """The model with the blocks that a folding keeps. ``build`` makes the full model."""
        most = _most(folding)
        more = tuple(_beyond(most, pruned_model) for pruned_model, _ in folding.more)
        return cls(copies_of(pruned(build, most), seed), _beyond(most, folding.base), more, folding.kinds)

    @property
    def numbers(self) -> list[int]:
        """For each kind, the number of its blocks in the full model."""
        return [len(blocks) for blocks in self.kinds]


def _most(folding: Folding) -> PrunedModel:
    """Passes through only the blocks that the base and all of ``more`` pass through."""
    all_pruned = [folding.base, *(pruned_model for pruned_model, _ in folding.more)]
    everywhere = set.intersection(*(set(each.blocks) for each in all_pruned))
    return PrunedModel({block: stand_in for block, stand_in in folding.base.blocks.items() if block in everywhere})


def _beyond(most: PrunedModel, less: PrunedModel) -> PrunedModel:
    """Passes through the blocks that ``less`` passes through and ``most`` does not."""
    return PrunedModel({block: stand_in for block, stand_in in less.blocks.items() if block not in most.blocks})


class _Alone(NamedTuple):
    """A model without tp.

    Attributes:
        full: its rehearsal.
        few: the model with few blocks.
        costs: of its layers.
        update: the costs of its update.
    """

    full: Rehearsal
    few: FewBlocks
    costs: LayerCosts
    update: UpdateCosts


@dataclass(frozen=True)
class Rehearsals:
    """Rehearses a model to compute the costs of its layers.

    Args:
        build: makes the full model.
        batch: at least ``MANY_ROWS`` · ``DP_SHARD`` rows.
        options: settings of every plan: precision, entries of ``modules``, ``sequence_parallel`` (default: on with tp).
        loss: the loss function.
        optimizer: makes the optimizer.
        max_norm: see ``find_plans``.
        accelerator: whether steps run on an accelerator, not on a CPU.
    """

    build: Build
    batch: Any
    options: dict[str, Any]
    loss: Loss | None
    optimizer: MakeOptimizer
    max_norm: float | None
    accelerator: bool
    _shapes: Shapes = field(default_factory=Shapes, init=False, compare=False, repr=False)

    def layer_costs(self, sharding: Sharding) -> LayerCosts | None:
        """The costs of the layers with one sharding; None if tp shards no parameter of the model.

        Options that say whether the sequence is sharded override the sharding.
        """
        if sharding.tp == 1:
            return self._alone.costs
        most = self._rehearsal(self._few.most, sharding)
        if all(p.local_shape(0) == p.shape for p in most.recipe.parameters):
            return None
        return self._layer_costs(self._few, most, self._alone.update)

    def stage_parts(self) -> StageParts | None:
        """The parts of the model as a pipeline is cut; None if it cannot be cut into stages."""
        plan = Plan.parse({**self.options, "mesh": {"pp": 2}, "microbatches": 1})
        batch = take_rows(self.batch, 0, FEW_ROWS)
        few = pruned(self._few.most, self._few.base)
        try:
            rehearsal = rehearsal_of(few, batch, plan, self.loss, self.optimizer, None)
            graph = rehearsal.planned.graph(lambda model: rehearsal.loss(call_model(model, copied(batch))))
        except PlanError:
            return None
        sizes = {name: p.numel() * p.element_size() for name, p in rehearsal.planned.model.named_parameters()}
        return StageParts.of_graph(graph, self._few.kinds, sizes, FEW_ROWS)

    def branch_costs(self, tp: int, *, few: bool = False) -> BranchCosts | None:
        """The branches of the model on slices of ``tp`` ranks; None if what is found cannot run at the same time.

        ``few``: of the model with few blocks, in a fraction of the time.
        """
        plan = Plan.parse({**self.options, "mesh": {"tp": tp}, "branches": "auto"})
        batch, loss = take_rows(self.batch, 0, FEW_ROWS), self.loss or output_loss
        try:
            return BranchCosts(PlannedRegions.of(self._few.most if few else self.build, batch, plan, loss))
        except PlanError:
            return None

    @cached_property
    def has_branches(self) -> bool:
        """Whether modules could run at the same time: in the model with few blocks, as in the full one.

        False if its forward cannot be recorded, as branches would need.
        """
        batch, loss = take_rows(self.batch, 0, FEW_ROWS), self.loss or output_loss
        planned = self._rehearsal(self._few.most, ALONE).planned
        try:
            return bool(concurrent(planned.graph(lambda model: loss(call_model(model, copied(batch))))))
        except PlanError:
            return False

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the repeated blocks of the full model, one kind after the other."""
        return tuple(name for kind in self._few.kinds for name in kind)

    def recomputed(self) -> float:
        """Bytes per row that a block stores for its backward if it is recomputed; an average over all blocks."""
        few = self._few
        if not few.more:
            return 0.0
        most = self._rehearsal(few.most, ALONE, recompute="blocks")
        models = (few.base, *few.more)
        step = RehearsedStep(updated=False)
        base, *more = (StepMemory.of_trace(rehearse(most.passing_through(model), 0, [step]), ()) for model in models)
        nbytes = sum(number * (longer.compute - base.compute) for number, longer in zip(few.numbers, more, strict=True))
        return max(0.0, nbytes / sum(few.numbers)) / FEW_ROWS

    @property
    def _few(self) -> FewBlocks:
        return self._alone.few

    def coupling(self) -> str | None:
        """Why every data rank runs all rows, for a person; None if each runs its own, or if the options say it."""
        alone = self._alone
        return coupling_of(
            self.build,
            alone.full,
            batch_statistics=alone.costs.batch_statistics,
            flops=alone.costs.flops_of_row,
        )

    @cached_property
    def _alone(self) -> _Alone:
        """The model without tp. All blocks run, if none can be passed through."""
        seed = Plan.parse({**self.options, "mesh": "dp_shard=1"}).seed
        build = copies_of(self.build, seed)
        full = self._rehearsal(build, ALONE)
        if not full.recipe.parameters:
            given, required = "a model without parameters", "a model to train: plans differ in where its parameters are"
            raise PlanError.of("this search", where="model", given=given, required=required, fix="nn.Linear(8, 8)")
        folding = self._folding(build, full)
        few = FewBlocks.of_folding(build, folding, seed)
        recipe = _most(folding).recipe(full.recipe)
        try:
            most = replace(full, build=few.most, planned=full.planned.of(few.most, recipe))
            return _Alone(full, few, *self._costs_alone(few, most))
        except PlanError:
            raise
        except Exception:  # a model with blocks passed through may raise any exception
            if not few.more:
                raise
            all_blocks = FewBlocks(build)
            return _Alone(full, all_blocks, *self._costs_alone(all_blocks, full))

    def _folding(self, build: Build, full: Rehearsal) -> Folding:
        """Finds the blocks that are alike.

        Entries of ``modules`` may shard only some blocks over tp. If there are entries, blocks count as alike only if they are
        alike with tp, too.

        Args:
            build: makes the full model.
            full: its rehearsal without tp.
        """
        rehearsals = [full, self._rehearsal(build, Sharding(2))] if self.options.get("modules") else [full]
        foldings = [folding_of(rehearsal.planned.model, rehearsal.recipe, FEW_BLOCKS) for rehearsal in rehearsals]
        return min(foldings, key=lambda folding: len(folding.base.blocks))

    def _costs_alone(self, few: FewBlocks, most: Rehearsal) -> tuple[LayerCosts, UpdateCosts]:
        """(the costs of the layers, those of the update) without tp. Arguments: as those of ``_layer_costs``."""
        recipe, base, wide, more = self._traces(few, most, TWO_STEPS)
        update = UpdateCosts.of_traces(recipe, base, more)
        return layer_costs_of(recipe, few.kinds, base, wide, more, update), update

    def _layer_costs(self, few: FewBlocks, most: Rehearsal, update: UpdateCosts) -> LayerCosts:
        """The costs of the layers.

        Args:
            few: the model with few blocks.
            most: the rehearsal of the model that ``few.most`` makes.
            update: the costs of the model's update.
        """
        recipe, base, wide, more = self._traces(few, most, WITHOUT_UPDATES)
        return layer_costs_of(recipe, few.kinds, base, wide, more, update)

    def _traces(
        self, few: FewBlocks, most: Rehearsal, steps: Sequence[RehearsedStep]
    ) -> tuple[Recipe, Trace, Trace, list[Trace]]:
        """The arguments ``recipe``, ``base``, ``wide`` and ``more`` of ``layer_costs_of``. ``steps``: those of few rows."""
        base = most.passing_through(few.base)
        wide = RehearsedStep(updated=False, batch=take_rows(self.batch, 0, DP_SHARD * MANY_ROWS))
        more = [rehearse(most.passing_through(model), 0, steps) for model in few.more]
        with_wide = rehearse(base, 0, (*steps, wide))
        return base.recipe, before_last_step(with_wide), with_wide, more

    def _rehearsal(self, build: Build, sharding: Sharding, **settings: Any) -> Rehearsal:
        """A model with the plan of a rehearsal: its sharding, ``DP_SHARD`` ranks of dp_shard, ``FEW_ROWS`` rows a data rank."""
        sharded = {"sequence_parallel": True} if sharding.tp > 1 and sharding.sequence else {}
        fixed = {"mesh": {"dp_shard": DP_SHARD, "tp": sharding.tp}, "microbatches": 1}
        modules = {"modules": sharding.modules(self.options.get("modules"))} if sharding.whole else {}
        plan = Plan.parse({**sharded, **self.options, **settings, **modules, **fixed})
        batch = take_rows(self.batch, 0, DP_SHARD * FEW_ROWS)
        rehearsal = rehearsal_of(
            build, batch, plan, self.loss, self.optimizer, self.max_norm, accelerator=self.accelerator
        )
        return replace(rehearsal, shapes=self._shapes)
