"""``Folding``: which repeated blocks need not be rehearsed, as others do the same; and the rehearsals that stand for all.

    whole model     embed  b0 b1 b2 b3 b4 … b78 b79  norm  head
    base            embed  b0 b1 b2  ·  · …  ·  b79  norm  head      · is passed through: a block without parameters
    one more        embed  b0 b1 b2 b3  · …  ·  b79  norm  head

What a step takes is linear in the number of such blocks, so ``whole = base + 76 · (one more − base)``: for every moment of the
step that both have (``extrapolation.py``). Blocks are alike if nothing but their number tells them apart: class, shapes,
layouts, and the numbers and words that their modules keep. Of blocks that are alike, each stage of a pipeline keeps the first
three and the last, and what is taken away is in one piece.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from meshwright.recipe import ParameterRecipe, Recipe

BASE_BLOCKS = 4  # blocks of a kind and stage in a base: those that FSDP2 has on their way at once, and the last
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Pruned:
    """A model some of whose blocks are passed through.

    Attributes:
        blocks: a block that is passed through → one that is kept, is alike, and runs before it.
    """

    blocks: Mapping[str, str]

    def holds(self, name: str) -> bool:
        """Whether the pruned model still has a module or parameter of this name."""
        return not any(name == block or name.startswith(block + ".") for block in self.blocks)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of the pruned model."""
        return replace(
            recipe,
            parameters=tuple(p for p in recipe.parameters if self.holds(p.name)),
            units=tuple(u for u in recipe.units if self.holds(u.name)),
            recompute=tuple(filter(self.holds, recipe.recompute)),
            sequence=tuple(filter(self.holds, recipe.sequence)),
            buffers=tuple(b for b in recipe.buffers if self.holds(b[0])),
            kept=tuple(filter(self.holds, recipe.kept)),
        )


@dataclass(frozen=True)
class Folding:
    """The rehearsals that stand for a whole model.

    Attributes:
        base: of all kinds, as few blocks as can be: ``kept`` in a stage.
        kinds: the blocks of each kind that was folded, in order.
        more: of each kind, one more block in each stage than the base; and for each rank of the pipeline axis
            how often the difference between the two counts.
    """

    base: Pruned
    more: tuple[tuple[Pruned, tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()
    base_blocks: int = BASE_BLOCKS


def folding_of(model: nn.Module, recipe: Recipe, base_blocks: int = BASE_BLOCKS) -> Folding:
    """How the blocks of a model fold under its recipe. Without repeated blocks the base is the whole model.

    ``kept``: blocks of a kind and stage in the base, 2 at least.
    """
    if recipe.branches or recipe.streams:
        return Folding(Pruned({}), base_blocks=base_blocks)
    kinds = [by_stage for by_stage in _kinds(model, recipe, base_blocks) if _removable(by_stage, base_blocks)]
    fewest = [_passed(by_stage, _removable(by_stage, base_blocks), base_blocks) for by_stage in kinds]
    more = []
    for chosen, by_stage in enumerate(kinds):
        counts = _removable(by_stage, base_blocks)
        one_more = _passed(by_stage, {rank: count - 1 for rank, count in counts.items()}, base_blocks)
        parts = [one_more if number == chosen else passed for number, passed in enumerate(fewest)]
        weights = tuple(counts.get(rank, 0) for rank in range(recipe.mesh.axis_size("pp")))
        more.append((Pruned(_merged(parts)), weights))
    blocks = tuple(tuple(block for those in by_stage.values() for block in those) for by_stage in kinds)
    return Folding(Pruned(_merged(fewest)), tuple(more), blocks, base_blocks)


class _ByStage(dict[int, list[str]]):
    """Stage → blocks of one kind in it, in order; and the rank of the pipeline axis that each stage is on."""

    def __init__(self, blocks: Mapping[int, list[str]], stage_rank: tuple[int, ...]) -> None:
        super().__init__(blocks)
        self.stage_rank = stage_rank


def _removable(by_stage: _ByStage, base_blocks: int) -> dict[int, int]:
    """Rank of the pipeline axis → the number of blocks that can be removed from each of its stages."""
    counts: dict[int, int] = {}
    for stage in range(len(by_stage.stage_rank)):
        rank, blocks = by_stage.stage_rank[stage], by_stage.get(stage, [])
        spare = len(blocks) - base_blocks
        if blocks:
            counts[rank] = min(counts.get(rank, spare), spare)
    return {rank: count for rank, count in counts.items() if count > 1}  # one would be rehearsed by "one more" anyway


def _passed(by_stage: _ByStage, counts: Mapping[int, int], base_blocks: int) -> dict[str, str]:
    """The blocks that are passed through, if ``counts[rank]`` blocks are removed from each stage of a rank."""
    passed: dict[str, str] = {}
    for stage, blocks in by_stage.items():
        count = counts.get(by_stage.stage_rank[stage], 0)
        passed |= dict.fromkeys(blocks[base_blocks - 1 : base_blocks - 1 + count], blocks[base_blocks > 2])
    return passed


def _merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {block: pattern for part in parts for block, pattern in part.items()}


# --- kinds of blocks --------------------------------------------------------------------------------------------------


def _kinds(model: nn.Module, recipe: Recipe, base_blocks: int) -> list[_ByStage]:
    """Blocks that are alike, by stage. Blocks within blocks are parts of those."""
    kinds: list[_ByStage] = []
    within: set[str] = set()
    for name, module in model.named_modules():  # the outer ones come first
        children = [(part, child) for part, child in module.named_children() if part.isdigit()]
        if len(children) <= base_blocks or any(name == w or name.startswith(w + ".") for w in within):
            continue
        by_structure: dict[Hashable, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        distinguishing = _distinguishing([child for _, child in children])
        for (part, child), plain in zip(children, distinguishing, strict=True):
            block = f"{name}.{part}" if name else part
            if (stage_and_structure := _stage_and_structure(block, child, recipe)) is not None:
                stage, structure = stage_and_structure
                by_structure[structure, plain][stage].append(block)
        alike = [by_stage for by_stage in by_structure.values() if max(map(len, by_stage.values())) > base_blocks]
        kinds += [_ByStage(by_stage, recipe.stage_rank) for by_stage in alike]
        within |= {block for by_stage in alike for blocks in by_stage.values() for block in blocks}
    return kinds


def _stage_and_structure(name: str, block: nn.Module, recipe: Recipe) -> tuple[int, Hashable] | None:
    """(its stage, its structure); None if the block cannot be left out: it has no parameters, or others use some of them."""
    lines: list[Hashable] = []
    stages: set[int] = set()
    parameters = list(block.named_parameters())
    for local_name, _ in parameters:
        line = recipe.by_name.get(f"{name}.{local_name}")
        if line is None or line.aliases or len(line.stages) > 1 or line.name in recipe.kept:
            return None
        stages.add(line.stages[0])
        lines.append((local_name, _layout(line, name)))
    if len(stages) != 1:
        return None
    modules = tuple((local_name, type(m)) for local_name, m in block.named_modules())
    buffers = tuple((local_name, tuple(b.shape), b.dtype) for local_name, b in block.named_buffers())
    units = tuple((u.name.removeprefix(name), u.data, u.recompute) for u in recipe.units if _is_within(u.name, name))
    others = tuple(n.removeprefix(name) for n in (*recipe.recompute, *recipe.sequence) if _is_within(n, name))
    return stages.pop(), (modules, tuple(lines), buffers, units, others)


def _layout(line: ParameterRecipe, block: str) -> Hashable:
    unit = line.unit.removeprefix(block) if _is_within(line.unit, block) else line.unit
    return line.shape, line.dtype, line.requires_grad, str(line.tp), line.data, unit, line.places


def _is_within(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def _distinguishing(blocks: list[nn.Module]) -> list[Hashable]:
    """For each block, the plain attributes of its modules, without those that only number the blocks.

    An integer that goes up by one from block to block numbers the blocks. A float that differs in every block (the rate at
    which a path is dropped) changes values, but not which functions run.
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
    """Whether an attribute tells blocks apart by their number alone."""
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return all(v - values[0] == i for i, v in enumerate(values))
    if all(isinstance(v, str) for v in values):
        return len({re.sub(r"\d+", "", v) for v in values}) == 1
    return all(isinstance(v, float) for v in values) and len(set(values)) == len(values)
