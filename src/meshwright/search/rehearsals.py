"""``Rehearsals``: rehearses a model with few of its blocks, and says what its pieces are at each size of tp.

whole model, planned once without tp     which blocks are alike (``prediction/blocks.py``)
one block more of each kind than few     planned once at each size of tp; its recipe holds for the models below
few blocks · one block more · wide       rehearsed (``pieces.py``)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshwright.deferred import Build
from meshwright.errors import PlanError
from meshwright.plan import Plan
from meshwright.prediction.blocks import Folding, Pruned, folding_of
from meshwright.prediction.copies import copies_of
from meshwright.prediction.passing import pruned
from meshwright.prediction.rehearsal import MakeOptimizer, Rehearsal, rehearsal_of, rehearse
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import take_rows
from meshwright.search.pieces import FEW, KEPT, MANY, SHARD, Lives, Pieces, pieces_of


@dataclass(frozen=True)
class Few:
    """A model with few blocks of each kind.

    Attributes:
        most: makes it, with one block more of each kind than ``base`` has.
        base: leaves ``KEPT`` blocks of each kind of that.
        more: of each kind, leaves one more of that kind.
        kinds: of each kind, the names of all its blocks in the whole model.
    """

    most: Build
    base: Pruned = field(default_factory=lambda: Pruned({}))
    more: tuple[Pruned, ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, build: Build, folding: Folding, seed: int) -> Few:
        """What a folding keeps."""
        base, more = folding.base, [one for one, _ in folding.more]
        most = _most(folding)
        within = (_less(one, most) for one in more)
        return cls(copies_of(pruned(build, most), seed), _less(base, most), tuple(within), folding.kinds)

    @property
    def numbers(self) -> list[int]:
        """Of each kind, how many blocks the whole model has."""
        return [len(blocks) for blocks in self.kinds]


def _most(folding: Folding) -> Pruned:
    """What leaves every block that the base or one of ``more`` has."""
    passed = folding.base.blocks.items()
    return Pruned({block: kept for block, kept in passed if all(block in one.blocks for one, _ in folding.more)})


def _less(one: Pruned, most: Pruned) -> Pruned:
    """What is passed through in one, and is there in another."""
    return Pruned({block: kept for block, kept in one.blocks.items() if block not in most.blocks})


@dataclass(frozen=True)
class Rehearsals:
    """Rehearses a model for its pieces.

    Args:
        options: of every plan: precision, entries of modules, ``sequence_parallel`` (default: with tp).
    """

    build: Build
    batch: Any
    options: dict[str, Any]
    loss: Loss | None
    optimizer: MakeOptimizer
    max_norm: float | None

    def pieces(self, tp: int) -> Pieces | None:
        """The model's pieces with so many ranks of tp; None if nothing of it is sharded over tp then."""
        if tp == 1:
            return self._alone[1]
        most = self._rehearsal(self._few.most, tp)
        if all(p.local_shape(0) == p.shape for p in most.recipe.parameters):
            return None
        return self._pieces(self._few, most)

    def sends(self) -> float | None:
        """Bytes that go from one stage of a pipeline to the next, for a row; None if the model cannot be cut."""
        plan = Plan.parse({**self.options, "mesh": {"pp": 2}, "microbatches": 1})
        batch = take_rows(self.batch, 0, 1)
        base = pruned(self._few.most, self._few.base)
        try:
            recipe = rehearsal_of(base, batch, plan, self.loss, self.optimizer, None).recipe
        except PlanError:
            return None
        return float(max(stage.sends for stage in recipe.stages))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the repeated blocks of the whole model: of one kind after the other."""
        return tuple(name for kind in self._few.kinds for name in kind)

    def recomputed(self) -> float:
        """Bytes for a row that a block keeps for its backward if it is computed again."""
        few = self._few
        if not few.more:
            return 0.0
        most = self._rehearsal(few.most, 1, recompute="blocks")
        base, *more = (Lives.of(rehearse(most.of(blocks), 0, updated=False)) for blocks in (few.base, *few.more))
        held = sum(number * (one.most - base.most) for number, one in zip(few.numbers, more, strict=True))
        return max(0.0, held / sum(few.numbers)) / FEW

    @property
    def _few(self) -> Few:
        return self._alone[0]

    @cached_property
    def _alone(self) -> tuple[Few, Pieces]:
        """The few blocks that stand for all, and the pieces without tp. If blocks cannot be passed through, all stand there."""
        seed = Plan.parse({**self.options, "mesh": "dp_shard=1"}).seed
        build = copies_of(self.build, seed)
        whole = self._rehearsal(build, 1)
        folding = self._folding(build, whole)
        few = Few.of(build, folding, seed)
        recipe = _most(folding).recipe(whole.recipe)
        try:
            most = replace(whole, build=few.most, planned=whole.planned.of(few.most, recipe))
            return few, self._pieces(few, most)
        except PlanError:
            raise
        except Exception:  # whatever a model raises, some of whose blocks are passed through
            if not few.more:
                raise
            every = Few(build)
            return every, self._pieces(every, whole)

    def _folding(self, build: Build, whole: Rehearsal) -> Folding:
        """Blocks are alike if they are so without tp and, where entries may shard some of them, with it.

        Args:
            whole: the model without tp.
        """
        wholes = [whole, self._rehearsal(build, 2)] if self.options.get("modules") else [whole]
        foldings = [folding_of(one.planned.model, one.recipe, KEPT) for one in wholes]
        return min(foldings, key=lambda folding: len(folding.base.blocks))

    def _pieces(self, few: Few, most: Rehearsal) -> Pieces:
        """The pieces of the model.

        Args:
            most: what ``few.most`` makes, under its plan.
        """
        base = most.of(few.base)
        wide = replace(base, batch=take_rows(self.batch, 0, SHARD * MANY))
        more = [rehearse(most.of(blocks), 0) for blocks in few.more]
        return pieces_of(base.recipe, few.kinds, rehearse(base, 0), rehearse(wide, 0, updated=False), more)

    def _rehearsal(self, build: Build, tp: int, **more: Any) -> Rehearsal:
        sequence = {"sequence_parallel": True} if tp > 1 else {}
        plan = Plan.parse({**sequence, **self.options, **more,
                           "mesh": {"dp_shard": SHARD, "tp": tp}, "microbatches": 1})  # fmt: skip
        batch = take_rows(self.batch, 0, SHARD * FEW)
        return rehearsal_of(build, batch, plan, self.loss, self.optimizer, self.max_norm)
