"""Chains: what tp shards between two collectives: column-parallel layers, and the row-parallel one that ends them.

Attention and an MLP are chains; so are the embeddings and the head outside of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshwright.layout import Shard
from meshwright.recipe import ParameterRecipe, Recipe


class Chain(NamedTuple):
    """A chain of layers.

    Attributes:
        globs: of its modules, or parameters.
        share: of all elements of the model.
        in_blocks: whether each repeated block has it.
    """

    globs: tuple[str, ...]
    share: float
    in_blocks: bool


def chains_of(recipe: Recipe, kinds: Sequence[Sequence[str]]) -> tuple[Chain, ...]:
    """The chains of a model.

    Args:
        recipe: with tp. Of the repeated blocks it may have few.
        kinds: for each kind of repeated blocks, the names of its blocks in the full model.
    """
    numbers = {blocks[0]: len(blocks) for blocks in kinds if blocks}  # the first block stands for all
    others = [block for blocks in kinds for block in blocks[1:]]
    lines = [line for line in recipe.parameters if not _block(line.name, others)]
    sizes = {line.name: numbers.get(_block(line.name, numbers), 1) * line.numel for line in lines}
    sharded = [line for line in lines if isinstance(line.tp, Shard)]
    chains: list[Chain] = []
    for block in ("", *numbers):
        within = [line for line in sharded if _block(line.name, numbers) == block]
        starred = ".".join("*" if part.isdigit() else part for part in block.split("."))
        for names, links in _split(block, within):
            share = sum(sizes[line.name] for line in links) / sum(sizes.values())
            chains.append(Chain(tuple(starred + name.removeprefix(block) for name in names), share, bool(block)))
    return tuple(chains)


def _block(name: str, blocks: Iterable[str]) -> str:
    """The block, of some, that has this parameter; empty if none has it."""
    return next((block for block in blocks if name.startswith(block + ".")), "")


def _split(module: str, lines: Sequence[ParameterRecipe]) -> list[tuple[list[str], list[ParameterRecipe]]]:
    """(modules, their sharded parameters) of each chain within a module.

    A submodule with several sharded layers is a chain, such as attention or an MLP. The other layers are chains in their
    order: a row-parallel one ends its chain.
    """
    prefix = module and module + "."
    owners: dict[str, str] = {}  # parameter → its layer; for a parameter of the module itself, the parameter
    children: dict[str, list[ParameterRecipe]] = {}
    for line in lines:
        owner = line.name.rpartition(".")[0]
        owners[line.name] = line.name if owner == module else owner
        child = prefix + line.name.removeprefix(prefix).partition(".")[0]
        children.setdefault(child, []).append(line)
    submodules = {
        child: of_child for child, of_child in children.items() if len({owners[line.name] for line in of_child}) > 1
    }
    if len(children) == len(submodules) == 1:
        return _split(next(iter(submodules)), lines)
    chains = [([child], of_child) for child, of_child in submodules.items()]
    inside = {line.name for of_child in submodules.values() for line in of_child}
    ended = True
    for line in lines:
        if line.name in inside:
            continue
        if ended:
            chains.append(([], []))
        names, links = chains[-1]
        links.append(line)
        if owners[line.name] not in names:
            names.append(owners[line.name])
        ended = isinstance(line.tp, Shard) and line.tp.dim > 0
    return chains
