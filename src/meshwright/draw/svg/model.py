"""A model that falls onto its ranks: above, every parameter as one device has it; below, what each rank holds of it.

stage 0               stage 1             one column of cards an index of tp, one row an index of the data axes
┌──┬──┬────┐          ┌──┬──┬────┐
│  │  │    │          │  │  │    │        a parameter is a rectangle of its own proportions (rows go down), coloured by
└──┴──┴────┘          └──┴──┴────┘        the ranks that hold each piece; striped: several ranks hold the same
 ▼  rank 0  rank 1     ▼  rank 4  rank 5
    rank 2  rank 3        rank 6  rank 7
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshwright.amounts import count_text, size_text
from meshwright.draw.facts import ShardMap
from meshwright.draw.parameters import Row, elements, fold
from meshwright.draw.svg.canvas import Box, Canvas, Drawing, wide
from meshwright.draw.text import shape_text, slices_text
from meshwright.recipe import Slices

WIDTH, MARGIN, GAP = 1000.0, 22.0, 16.0
MOST_RANKS = 64
_BETWEEN = 0.045  # between rectangles, as a share of the longest side of any
_THIN = 0.02  # the least side, as a share of the same
_FALL = 96.0  # pixels from the model to its ranks
_CARD_GAP, _CARD_HEAD, _CARD_TALL = 10.0, 24.0, 78.0
_DIVIDES = {
    "pp": "pp divides the layers",
    "dp_replicate": "dp_replicate copies, and divides the batch",
    "dp_shard": "dp_shard divides rows of weights, and the batch",
    "tp": "tp divides rows or columns of weights",
}


def model_svg(shard_map: ShardMap, title: str) -> Drawing:
    """The drawing of a shard map, as the text of an SVG file. Repeated blocks are drawn once.

    Args:
        shard_map: of at most 64 ranks.
        title: the line above the drawing.

    Raises:
        ValueError: more ranks than that.
    """
    if shard_map.mesh.size > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS} ranks are drawn, given {shard_map.mesh.size}: use the text of `show`")
    canvas, groups = Canvas(), _groups(shard_map)
    width = (WIDTH - 2 * MARGIN - GAP * (len(groups) - 1)) / len(groups)
    packed = [_packed(group.rows) for group in groups]
    scale = min((width - 24) / max(p.width for p in packed), 150 / max(p.height for p in packed))
    cards = min(_card_scale(shard_map, width, pack) for pack in packed)
    top, tall = 78.0, max(p.height for p in packed) * scale
    below, bottom = top + tall + 14 + _FALL, 0.0
    for number, (group, pack) in enumerate(zip(groups, packed, strict=True)):
        left = MARGIN + number * (width + GAP)
        whole = Box(left, top - 28, width, tall + 42)
        bottom = max(bottom, _ranks(canvas, shard_map, group, pack, Box(left, below, width, 0), cards))
        _fall(canvas, whole, Box(left, below, width, 0))
        _whole(canvas, shard_map, group, pack, whole, scale)
    _plan(canvas, shard_map, below - _FALL / 2)
    return _page(canvas, shard_map, title, bottom)


# --- what is drawn together -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The ranks of one rank of the pipeline axis, and what they hold."""

    name: str
    ranks: tuple[int, ...]
    rows: tuple[Row, ...]


def _groups(shard_map: ShardMap) -> list[_Group]:
    recipe, mesh = shard_map.recipe, shard_map.mesh
    groups = []
    for place in range(mesh.axis_size("pp")):
        ranks = tuple(r for r in range(mesh.size) if mesh.coordinate(r).get("pp", 0) == place)
        here = [f for name, f in shard_map.parameters.items() if place in recipe.owners(recipe.by_name[name])]
        stages = [str(s) for s, where in enumerate(recipe.stage_rank) if where == place]
        several = f"stages {', '.join(stages)}" if len(stages) > 1 else f"stage {stages[0]}"
        groups.append(_Group(several if recipe.stages else "", ranks, fold(here)))
    return groups


# --- where rectangles stand -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """Rectangles of parameters beside and above each other, in elements."""

    boxes: tuple[Box, ...]
    width: float
    height: float


def _packed(rows: Sequence[Row]) -> _Packed:
    """Columns from left to right, each as tall as the tallest rectangle at most."""
    sizes = [_sides(row.first.shape) for row in rows]
    longest = max((max(side) for side in sizes), default=1.0)  # a stage may have no parameters
    least, between = longest * _THIN, longest * _BETWEEN
    sizes = [(max(across, least), max(down, least)) for across, down in sizes]
    tallest = max((down for _, down in sizes), default=1.0)
    boxes, x, y, column = [], 0.0, 0.0, 0.0
    for across, down in sizes:
        if y and y + down > tallest * 1.001:
            x, y, column = x + column + between, 0.0, 0.0
        boxes.append(Box(x, y, across, down))
        y, column = y + down + between, max(column, across)
    return _Packed(tuple(boxes), x + column or 1.0, tallest)


def _sides(shape: Sequence[int]) -> tuple[float, float]:
    """Across and down, in elements: the first dim goes down, all others go across."""
    return float(prod(shape[1:])) if shape else 1.0, float(shape[0]) if shape else 1.0


def _pieces(shape: Sequence[int], slices: Slices, box: Box) -> Iterator[Box]:
    """The rectangles of what a rank holds. Of dims after the first, the one that is cut is drawn, as if it were alone."""
    if not elements(slices):
        return
    rows = slices[0] if slices else ((0, 1),)
    cut = next((d for d in range(1, len(shape)) if slices[d] != ((0, shape[d]),)), None)
    columns, across = (((0, 1),), 1) if cut is None else (slices[cut], shape[cut])
    down = shape[0] if shape else 1
    for (top, bottom), (left, right) in product(rows, columns):
        yield Box(
            box.x + box.width * left / across,
            box.y + box.height * top / down,
            box.width * (right - left) / across,
            box.height * (bottom - top) / down,
        )


# --- ink --------------------------------------------------------------------------------------------------------------


def _whole(canvas: Canvas, shards: ShardMap, group: _Group, pack: _Packed, panel: Box, scale: float) -> None:
    """The group's part of the model, each piece in the colours of the ranks that hold it."""
    left = panel.x + (panel.width - pack.width * scale) / 2
    for row, at in zip(group.rows, pack.boxes, strict=True):
        box = Box(left + at.x * scale, panel.y + 28 + at.y * scale, at.width * scale, at.height * scale)
        facts = row.first
        for ranks, slices in shards.held_by(facts.name):
            here = [r for r in ranks if r in group.ranks]
            said = (
                f"{row}: {slices_text(slices, facts.shape)} on rank{'s'[: len(here) > 1]} {', '.join(map(str, here))}"
            )
            for piece in _pieces(facts.shape, slices, box) if here else ():
                canvas.box(piece, fill=canvas.colour(here), about=said)
        _name(canvas, row, box)
    if group.name:
        canvas.text(panel.x + 12, panel.y + 18, group.name, 12, weight=600)


def _name(canvas: Canvas, row: Row, box: Box) -> None:
    """The name of a parameter's module within its rectangle, if there is room for it, or for its first word."""
    parts = [part for part in row.label.split(".") if part not in ("weight", "bias")]
    name = parts[-1] if parts else row.label
    size = 9.5
    for words in (name, name.split("_")[0]):
        if wide(words, size) <= box.width - 4 and box.height >= size + 3:
            canvas.text(box.x + box.width / 2, box.y + box.height / 2 + 3.3, words, size, "on", "middle", 600)
            return


def _fall(canvas: Canvas, above: Box, below: Box) -> None:
    canvas.polygon(
        [(above.x, above.bottom), (above.right, above.bottom), (below.right, below.y), (below.x, below.y)], "fall"
    )
    canvas.box(above, "card", radius=8)


def _columns(shards: ShardMap) -> int:
    """How many cards stand beside each other: one an index of the innermost axis, at most four."""
    inner = [axis for axis in shards.mesh.names if axis != "pp"][-1:]
    return min(shards.mesh.axis_size(inner[0]) if inner else 1, 4)


def _card_scale(shards: ShardMap, width: float, pack: _Packed) -> float:
    """Pixels an element in a card; ``width``: of all cards beside each other."""
    columns = _columns(shards)
    room = (width - _CARD_GAP * (columns - 1)) / columns - 20
    return min(room / pack.width, _CARD_TALL / pack.height)


def _ranks(canvas: Canvas, shards: ShardMap, group: _Group, pack: _Packed, panel: Box, scale: float) -> float:
    """A card a rank; where the last one ends."""
    columns, gap, head = _columns(shards), _CARD_GAP, _CARD_HEAD
    width = (panel.width - gap * (columns - 1)) / columns
    height = head + pack.height * scale + 10
    bottom = panel.y
    for number, rank in enumerate(group.ranks):
        down, across = divmod(number, columns)
        card = Box(panel.x + across * (width + gap), panel.y + down * (height + gap), width, height)
        canvas.box(card, "card", radius=6)
        _rank(canvas, shards, rank, card)
        left = card.x + (card.width - pack.width * scale) / 2
        for row, at in zip(group.rows, pack.boxes, strict=True):
            box = Box(left + at.x * scale, card.y + head + at.y * scale, at.width * scale, at.height * scale)
            canvas.box(box, "ghost")
            slices = shards.slices(row.first.name, rank)
            said = f"rank {rank} holds {slices_text(slices, row.first.shape)} of {row} ({shape_text(row.first)})"
            for piece in _pieces(row.first.shape, slices, box):
                canvas.box(piece, fill=canvas.colour([rank]), about=said)
        bottom = max(bottom, card.bottom)
    return bottom


def _rank(canvas: Canvas, shards: ShardMap, rank: int, card: Box) -> None:
    """The head of a card: the rank, where it stands, and what it holds."""
    canvas.text(card.x + 10, card.y + 16, f"rank {rank}", 11, weight=600)
    held = size_text(shards.bytes_at(rank))
    canvas.text(card.right - 10, card.y + 16, held, 10, "dim", "end")
    where = " · ".join(f"{axis} {index}" for axis, index in shards.mesh.coordinate(rank).items() if axis != "pp")
    if wide(where, 10) < card.width - 30 - wide(f"rank {rank}", 11) - wide(held, 10):
        canvas.text(card.x + 18 + wide(f"rank {rank}", 11), card.y + 16, where, 10, "dim")


def _plan(canvas: Canvas, shards: ShardMap, middle: float) -> None:
    """The plan, between the model and its ranks."""
    words = "mesh: {" + ", ".join(f"{axis}: {size}" for axis, size in shards.mesh.axes) + "}"
    width = len(words) * 8.2 + 36
    canvas.box(Box((WIDTH - width) / 2, middle - 30, width, 30), "pill", radius=15)
    canvas.text(WIDTH / 2, middle - 10.2, words, 13.5, "pill-text mono", "middle", 600)
    canvas.text(WIDTH / 2, middle + 21, "  ·  ".join(_DIVIDES[a] for a in shards.mesh.names), 12, "dim", "middle")


def _page(canvas: Canvas, shards: ShardMap, title: str, bottom: float) -> Drawing:
    """The drawing on its page, with a line above and one below."""
    height = bottom + 40
    page = Canvas()
    page.box(Box(0.5, 0.5, WIDTH - 1, height - 1), "page", radius=12)
    page.text(MARGIN, 34, title, 17, weight=650)
    whole = f"{count_text(shards.numel)} parameters, {size_text(shards.bytes)}, on one device"
    page.text(WIDTH - MARGIN, 34, whole, 12, "dim", "end")
    legend = (
        "A rectangle is a parameter, in its own proportions. A colour: the rank that holds a piece; stripes: several."
    )
    page.text(MARGIN, height - 16, legend, 11, "dim")
    page.absorb(canvas)
    held = "; ".join(f"rank {r} holds {size_text(b)}" for r, b in enumerate(shards.bytes_by_rank))
    return page.svg(WIDTH, height, title, f"{whole}. Mesh: {shards.mesh}. {held}.")
