"""A shard map for the terminal: a tree of modules, a line a parameter, and pictures of who holds which part.

    parameter                          shape      dp_shard=2  tp=2   rank 3 holds
    ├── embed.weight                   256×64     rows        rows   rows 192:256
    └── layers.{0…3} ×4
        ├── up.weight                  256×64     rows        rows   rows 192:256
        └── down.weight                64×256     rows        cols   rows 32:64, cols 128:256

Words: *rows* are dim 0 and *cols* dim 1 of a matrix; of other tensors the dims go by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshwright.amounts import count_text, size_text
from meshwright.draw.branches import branches
from meshwright.draw.facts import FEW_RANKS, ShardMap
from meshwright.draw.parameters import Row
from meshwright.draw.picture import picture
from meshwright.draw.stages import stages
from meshwright.draw.tree import Listing


def render(
    shard_map: ShardMap,
    *,
    rank: int | None = None,
    width: int | None = None,
    parameter: str | None = None,
    pictures: int | None = None,
) -> RenderableType:
    """A shard map, as rich prints it.

    Args:
        rank: whose slices are shown; default 0.
        width: columns to use; default those of the console.
        parameter: only parameters that fit this glob.
        pictures: of how many lines a picture is drawn, of who holds which part, from the first on; default 3 where
            ``parameter`` is given, else 0.

    Raises:
        ValueError: the mesh has no such rank.
        KeyError: no parameter fits.
    """
    shown = 0 if rank is None else rank
    shard_map.mesh.coordinate(shown)  # raises for one that is not there
    rows = shard_map.rows if parameter is None else shard_map.matching(parameter)
    drawn = (0 if parameter is None else 3) if pictures is None else pictures
    above = () if parameter is not None else (heading(shard_map, shown), Text())
    below = (
        ()
        if parameter is not None
        else (
            *stages(shard_map),
            *branches(shard_map),
            *notes(shard_map),
        )
    )
    return Group(*above, Listing(shard_map, rows, shown, width), *below, *_drawings(shard_map, rows, rank, drawn))


def _drawings(shard_map: ShardMap, rows: Sequence[Row], rank: int | None, most: int) -> Iterator[RenderableType]:
    """Pictures of the first rows; and of how many there is none, where some were asked for."""
    for row in rows[:most]:
        yield Text()
        yield picture(shard_map, row, rank=rank)
    if 0 < most < len(rows):
        yield Text(f"\n{len(rows) - most} more without a picture", style="dim")


def heading(shard_map: ShardMap, rank: int) -> Text:
    """The mesh, who is with whom on it, and how large the model is."""
    mesh = shard_map.mesh
    few = mesh.size <= FEW_RANKS
    text = Text(mesh.picture() if few else f"{mesh}: {mesh.size} ranks")
    text.append("\n\n" if few else "\n")
    least, most = min(shard_map.bytes_by_rank), max(shard_map.bytes_by_rank)
    sizes = list(dict.fromkeys((size_text(least), size_text(most))))
    text.append(f"{count_text(shard_map.numel)} parameters, {size_text(shard_map.bytes)}", style="bold")
    text.append(f"; at rest a rank holds {' to '.join(sizes)}")
    text.append(f"\nrank {rank} holds {size_text(shard_map.bytes_at(rank))}" if len(sizes) > 1 else "")
    return text


def notes(shard_map: ShardMap) -> Iterator[RenderableType]:
    """What a person should know beyond the lines."""
    if shard_map.recipe.notes:
        yield Text("\nnotes", style="bold")
    for note in shard_map.recipe.notes:
        yield Padding(Text(f"– {note}"), (0, 0, 0, 2), expand=False)
