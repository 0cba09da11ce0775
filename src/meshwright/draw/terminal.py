"""Prints a shard map: a tree of modules with a line for each parameter, and pictures of which rank holds which part.

    parameter                          shape      dp_shard=2  tp=2   rank 3 holds
    ├── embed.weight                   256×64     rows        rows   rows 192:256
    └── layers.{0…3} ×4
        ├── up.weight                  256×64     rows        rows   rows 192:256
        └── down.weight                64×256     rows        cols   rows 32:64, cols 128:256

*rows* are dim 0 and *cols* dim 1 of a matrix. Dims of other tensors have numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshwright.amounts import count_text, size_text
from meshwright.draw.branches import branches
from meshwright.draw.facts import FEW_RANKS, ShardMap
from meshwright.draw.nodes import Nodes, links
from meshwright.draw.parameters import Row
from meshwright.draw.picture import picture
from meshwright.draw.stages import stages
from meshwright.draw.topology import topology
from meshwright.draw.tree import Listing
from meshwright.mesh import Mesh


def render(
    shard_map: ShardMap,
    *,
    rank: int | None = None,
    width: int | None = None,
    parameter: str | None = None,
    pictures: int | None = None,
    per_node: int = 0,
) -> RenderableType:
    """A shard map, as a renderable for rich.

    Args:
        shard_map: the facts.
        rank: the rank whose slices are shown. Default: 0.
        width: columns to use. Default: those of the console.
        parameter: a glob. Only parameters that match it are shown, without stages, branches and notes.
        pictures: number of lines of the listing, from the first on, whose parameters also get a picture: which rank holds
            which part. Default: 3 with ``parameter``, else 0.
        per_node: number of ranks on a node, to draw the nodes and the links of each axis. 0: not known.

    Raises:
        ValueError: the mesh has no such rank.
        KeyError: no parameter matches the glob.
    """
    shown_rank = 0 if rank is None else rank
    shard_map.mesh.coordinate(shown_rank)  # raises ValueError for an unknown rank
    if parameter is not None:
        rows = shard_map.matching(parameter)
        most = _PICTURES if pictures is None else pictures
        return Group(Listing(shard_map, rows, shown_rank, width), *_pictures(shard_map, rows, rank, most))
    rows = shard_map.rows
    return Group(
        *mesh_picture(shard_map.mesh, per_node), sizes(shard_map, shown_rank), Text(),
        Listing(shard_map, rows, shown_rank, width),
        *stages(shard_map), *branches(shard_map), *notes(shard_map),
        *_pictures(shard_map, rows, rank, pictures or 0),
    )  # fmt: skip


_PICTURES = 3  # of single parameters by default: they fit a screen


def _pictures(shard_map: ShardMap, rows: Sequence[Row], rank: int | None, most: int) -> Iterator[RenderableType]:
    """Pictures of the first rows, and a line with the number of rows without a picture."""
    for row in rows[:most]:
        yield Text()
        yield picture(shard_map, row, rank=rank)
    if 0 < most < len(rows):
        yield Text(f"\n{len(rows) - most} more without a picture", style="dim")


def mesh_picture(mesh: Mesh, per_node: int = 0) -> Iterator[RenderableType]:
    """The mesh with its rank groups; if its nodes are known, with each node's ranks and the links of each axis."""
    if per_node:
        placed = topology(mesh, per_node)
        ranks = f"{mesh.size} rank{'s'[: mesh.size > 1]}"
        yield Text(f"{mesh}: {ranks} on {placed.nodes} node{'s'[: placed.nodes > 1]}\n")
        yield Nodes(placed)
        yield from (Text(), links(placed)) if placed.axes else ()
        yield Text()
    elif mesh.size <= FEW_RANKS:
        yield Text(f"{mesh.picture()}\n")
    else:
        yield Text(f"{mesh}: {mesh.size} ranks")


def sizes(shard_map: ShardMap, rank: int) -> Text:
    """The size of the model, and how much of it a rank holds."""
    least, most = min(shard_map.bytes_by_rank), max(shard_map.bytes_by_rank)
    ends = list(dict.fromkeys((size_text(least), size_text(most))))
    text = Text(f"{count_text(shard_map.numel)} parameters, {size_text(shard_map.bytes)}", style="bold")
    text.append(f"; at rest a rank holds {' to '.join(ends)}", style="not bold")
    text.append(f"\nrank {rank} holds {size_text(shard_map.bytes_at(rank))}" if len(ends) > 1 else "", style="not bold")
    return text


def notes(shard_map: ShardMap) -> Iterator[RenderableType]:
    """The recipe's notes."""
    if shard_map.recipe.notes:
        yield Text("\nnotes", style="bold")
    for note in shard_map.recipe.notes:
        yield Padding(Text(f"– {note}"), (0, 0, 0, 2), expand=False)
