"""``Folding``: which repeated blocks a rehearsal leaves out, and which rehearsals then predict the full model.

    full model      embed  b0 b1 b2 b3 b4 … b78 b79  norm  head
    base            embed  b0 b1 b2  ·  · …  ·  b79  norm  head      · is passed through: a block without parameters
    one more        embed  b0 b1 b2 b3  · …  ·  b79  norm  head

The memory and seconds of a step are linear in the number of repeated blocks, so ``full = base + 76 · (one more − base)``, at
every moment that both rehearsals have (``extrapolation.py``). Blocks are alike if they differ in nothing but their number:
they have equal classes, shapes, layouts, and plain attributes of their modules. Of blocks that are alike, the base has the
first three and the last of each pipeline stage, so that the blocks left out are consecutive.

Where blocks of several kinds alternate, what a block needs depends on the blocks beside it. Then the base has the first three
and the last three of a stage, whatever their kinds, and the first and the last of each kind:

    full model      r0 r1 r2 k3 r4 r5 r6 k7 … k75 r76 r77 r78 k79        r: recomputed, k: keeps its activations
    base            r0 r1 r2 k3  ·  ·  ·  · …  ·   ·  r77 r78 k79
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from torch import nn

from meshwright.recipe import ParameterRecipe, Recipe

BASE_BLOCKS = 4
"""Blocks in each stage of the base, if all are alike: three that FSDP2 may gather or reduce at the same time, and the last."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PrunedModel:
    """A model without some of its blocks: they pass their inputs through (``passing.py``).

    Attributes:
        blocks: name of a block that is passed through → name of its pattern: a block that is alike, runs before it, and is
            not passed through.
    """

    blocks: Mapping[str, str]

    def holds(self, name: str) -> bool:
        """Whether the pruned model still has a module or parameter of this name."""
        return not any(_is_within(name, block) for block in self.blocks)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of the pruned model."""
        return replace(
            recipe,
            parameters=tuple(p for p in recipe.parameters if self.holds(p.name)),
            units=tuple(u for u in recipe.units if self.holds(u.name)),
            recompute=tuple(filter(self.holds, recipe.recompute)),
            sequence=tuple(filter(self.holds, recipe.sequence)),
            buffers=tuple(b for b in recipe.buffers if self.holds(b[0])),
            referenced_outside=tuple(filter(self.holds, recipe.referenced_outside)),
        )


@dataclass(frozen=True)
class Folding:
    """The models whose rehearsals predict a full model.

    Attributes:
        base: the model with the fewest blocks.
        more: for each kind, (the base with one more block of this kind in each stage, weights). ``weights[r]`` is the number
            of blocks that are left out of each stage on rank r of the pipeline axis: the factor of the difference to the base.
        kinds: for each kind, the names of its blocks, in order.
    """

    base: PrunedModel
    more: tuple[tuple[PrunedModel, tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()


def folding_of(model: nn.Module, recipe: Recipe, base_blocks: int = BASE_BLOCKS) -> Folding:
    """The folding of a model under its recipe.

    If no block is repeated, or the plan has branches or streams, the base is the full model. ``base_blocks``: number of
    blocks in each stage of the base, if all are alike; at least 2.
    """
    if recipe.branches or recipe.streams:
        return Folding(PrunedModel({}))
    kinds = [kind for kind in _kinds(model, recipe, base_blocks) if kind.removable]
    fewest = [kind.passed(kind.removable) for kind in kinds]
    more = []
    for grown_kind, kind in enumerate(kinds):
        one_more = kind.passed(kind.removable, but=1)
        passed_by_kind = [one_more if i == grown_kind else passed for i, passed in enumerate(fewest)]
        weights = tuple(kind.removable.get(rank, 0) for rank in range(recipe.mesh.axis_size("pp")))
        more.append((PrunedModel(_merged(passed_by_kind)), weights))
    blocks = tuple(tuple(chain.from_iterable(kind.blocks.values())) for kind in kinds)
    return Folding(PrunedModel(_merged(fewest)), tuple(more), blocks)


@dataclass(frozen=True)
class _Kind:
    """Blocks that are alike.

    Attributes:
        blocks: stage → their names, in order.
        spare: stage → those that may be left out.
        stage_rank: stage → its rank of the pipeline axis.
    """

    blocks: Mapping[int, Sequence[str]]
    spare: Mapping[int, Sequence[str]]
    stage_rank: tuple[int, ...]

    @cached_property
    def removable(self) -> dict[int, int]:
        """Rank of the pipeline axis → the number of blocks that can be removed from each of its stages."""
        counts: dict[int, int] = {}
        for stage, spare in self.spare.items():
            rank = self.stage_rank[stage]
            counts[rank] = min(counts.get(rank, len(spare)), len(spare))
        # "One more" rehearses a single block anyway.
        return {rank: count for rank, count in counts.items() if count > 1}

    def passed(self, counts: Mapping[int, int], but: int = 0) -> dict[str, str]:
        """Block that is passed through → its pattern, if ``counts[rank]`` blocks are removed from each stage of a rank.

        ``but``: the first ones of these stay.
        """
        passed: dict[str, str] = {}
        for stage, spare in self.spare.items():
            if removed := spare[but : counts.get(self.stage_rank[stage], 0)]:
                passed |= dict.fromkeys(removed, self._pattern(stage))
        return passed

    def _pattern(self, stage: int) -> str:
        """The last block of a stage before those that may be left out: the first of a model may take other arguments."""
        return self.blocks[stage][self.blocks[stage].index(self.spare[stage][0]) - 1]


def _merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """All mappings as one."""
    return {block: pattern for part in parts for block, pattern in part.items()}


# --- kinds of blocks --------------------------------------------------------------------------------------------------


def _kinds(model: nn.Module, recipe: Recipe, base_blocks: int) -> list[_Kind]:
    """Each kind of blocks of which some may be left out. A block within a block of a kind is no block of its own."""
    kinds: list[_Kind] = []
    blocks_of_kinds: set[str] = set()
    for name, module in model.named_modules():  # outer modules come first
        children = [(part, child) for part, child in module.named_children() if part.isdigit()]
        if len(children) <= base_blocks or any(_is_within(name, block) for block in blocks_of_kinds):
            continue
        by_structure: dict[Hashable, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        distinguishing = _distinguishing([child for _, child in children])
        for (part, child), plain in zip(children, distinguishing, strict=True):
            block = f"{name}.{part}" if name else part
            if (stage_and_structure := _stage_and_structure(block, child, recipe)) is not None:
                stage, structure = stage_and_structure
                by_structure[structure, plain][stage].append(block)
        edges = _edges(by_structure.values(), base_blocks - 1)
        for blocks in by_structure.values():
            spare = {stage: _spare(names, edges) for stage, names in blocks.items()}
            if any(spare.values()):
                kinds.append(_Kind(blocks, spare, recipe.stage_rank))
                blocks_of_kinds |= set(chain.from_iterable(blocks.values()))
    return kinds


def _edges(kinds: Collection[Mapping[int, list[str]]], width: int) -> set[str]:
    """The blocks that no rehearsal leaves out, whatever their kinds: the first ``width`` blocks of each stage and the last.

    If a stage has several kinds, its last ``width`` blocks. ``kinds``: for each kind, stage → names of its blocks.
    """
    edges: set[str] = set()
    for stage in set(chain.from_iterable(kinds)):
        here = [kind[stage] for kind in kinds if stage in kind]
        names = sorted(chain.from_iterable(here), key=_number)
        edges |= {*names[:width], *names[-(width if len(here) > 1 else 1) :]}
    return edges


def _spare(names: Sequence[str], edges: Collection[str]) -> list[str]:
    """The blocks of a kind in a stage that may be left out: not the first and the last of this kind, and none in ``edges``."""
    return [name for name in names[1:-1] if name not in edges]


def _number(block: str) -> int:
    """The number of a block in its sequence: 3 of ``layers.3``."""
    return int(block.rpartition(".")[2])


def _stage_and_structure(name: str, block: nn.Module, recipe: Recipe) -> tuple[int, Hashable] | None:
    """(the block's stage, its structure). Blocks with equal structures have equal classes, shapes and layouts.

    None if the block cannot be left out: it has no parameters, it is in several stages, or other modules use its parameters.
    """
    lines: list[Hashable] = []
    stages: set[int] = set()
    parameters = list(block.named_parameters())
    for local_name, _ in parameters:
        line = recipe.by_name.get(f"{name}.{local_name}")
        if line is None or line.aliases or len(line.stages) > 1 or line.name in recipe.referenced_outside:
            return None
        stages.add(line.stages[0])
        lines.append((local_name, _layout(line, name)))
    if len(stages) != 1:
        return None
    modules = tuple((local_name, type(m)) for local_name, m in block.named_modules())
    buffers = tuple((local_name, tuple(b.shape), b.dtype) for local_name, b in block.named_buffers())
    units = tuple((u.name.removeprefix(name), u.data, u.recompute) for u in recipe.units if _is_within(u.name, name))
    recomputed_or_sequence = tuple(
        n.removeprefix(name) for n in (*recipe.recompute, *recipe.sequence) if _is_within(n, name)
    )
    return stages.pop(), (modules, tuple(lines), buffers, units, recomputed_or_sequence)


def _layout(line: ParameterRecipe, block: str) -> Hashable:
    """The shape and layout of a parameter, with names relative to its block."""
    unit = line.unit.removeprefix(block) if _is_within(line.unit, block) else line.unit
    return line.shape, line.dtype, line.requires_grad, str(line.tp), line.data, unit, line.places


def _is_within(name: str, block: str) -> bool:
    """Whether ``name`` is a block, or a module or parameter in it."""
    return name == block or name.startswith(block + ".")


def _distinguishing(blocks: list[nn.Module]) -> list[Hashable]:
    """For each block, the plain attributes of its modules, without those that only number the blocks.

    An integer that grows by one from block to block numbers the blocks. A float that differs in every block (a drop-path
    rate) changes values, but not which functions run.
    """
    attributes = [_plain_attributes(block) for block in blocks]
    return [
        frozenset((key, repr(value)) for key, value in one.items() if not _counts([a.get(key) for a in attributes]))
        for one in attributes
    ]


def _plain_attributes(block: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (name, key): value
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
    }


def _counts(values: list[Any]) -> bool:
    """Whether the values of an attribute, one for each block, only number the blocks."""
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return all(v - values[0] == i for i, v in enumerate(values))
    if all(isinstance(v, str) for v in values):
        return len({re.sub(r"\d+", "", v) for v in values}) == 1
    return all(isinstance(v, float) for v in values) and len(set(values)) == len(values)
