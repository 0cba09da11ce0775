"""Draws a model and its ranks: above, every parameter as on one device; below, the parts that each rank holds.

stage 0               stage 1             a column of cards for each tp index, a row for each index of the data axes
┌──┬──┬────┐          ┌──┬──┬────┐
│  │  │    │          │  │  │    │        a parameter is a rectangle with its proportions (rows go down); each part has the
└──┴──┴────┘          └──┴──┴────┘        colour of the rank that holds it; stripes: several ranks hold the part
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
from meshwright.draw.svg.canvas import BOLD, DETAIL, LABEL, TEXT, Box, Canvas, Drawing, text_width
from meshwright.draw.text import shape_text, slices_text
from meshwright.recipe import Slices

WIDTH, MARGIN, GAP = 1000.0, 22.0, 16.0  # pixels: of the page, at its border, between stages
MOST_RANKS = 64  # more cards are too small to read
_BETWEEN = 0.045  # distance of rectangles, relative to the longest side of any
_THIN = 0.02  # least side of a rectangle, relative to the longest side of any
_FALL = 96.0  # pixels from the model to its ranks
_CARD_GAP, _CARD_HEAD, _CARD_TALL = 10.0, 24.0, 78.0  # pixels: between cards, of a card's head, of its drawing at most
# Distances and sizes in pixels. The card of a rank:
_CARD_PAD = 10.0  # from its border to what is in it
_CARD_BASELINE = 16.0  # from its top to the baseline of its head
_BEFORE_COORDINATE = 18.0  # left of the coordinate in its head
_CARD_SPACES = 30.0  # around and between the three texts of its head
_CARD_RADIUS = 6  # of its corners
# The panel of the model, for a group of ranks:
_MODEL_TOP = 78.0  # from the top of the page to the parameters
_MODEL_TALL = 150.0  # height of the parameters at most
_PANEL_HEAD, _PANEL_FOOT, _PANEL_PAD = 28.0, 14.0, 12.0  # above the parameters, below, and at each side
_PANEL_BASELINE = 18.0  # from the top of the panel to the name of its group
_PANEL_RADIUS = 8  # of its corners
# The name of a module in its rectangle:
_NAME_SIZE = 9.5  # font size, smaller than any other, as most rectangles are small
_NAME_ROOM = 4, 3  # a rectangle with a name is so much wider, and higher
_NAME_DROP = 3.3  # from the middle of the text to its baseline
# The mesh of the plan, between the model and its ranks:
_PLAN_SIZE, _PLAN_LETTER = 13.5, 8.2  # font size; width of a letter
_PLAN_HEIGHT, _PLAN_PAD = 30.0, 36.0  # height of the pill; space at both its ends together
_PLAN_DROP = 10.2  # from the baseline of the mesh down to the middle of the fall
_DIVIDES_DROP = 21.0  # from the middle of the fall down to the baseline of the text about axes
# The page:
_PAGE_FOOT = 40.0  # below the last card
_LEGEND = 16.0  # from the baseline of the legend to the bottom
_MOST_COLUMNS = 4  # of cards in a stage: narrower ones have no room for their text
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
        ValueError: the mesh has more than 64 ranks.
    """
    if shard_map.mesh.size > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS} ranks are drawn, given {shard_map.mesh.size}: use the text of `show`")
    canvas, groups = Canvas(), _groups(shard_map)
    width = (WIDTH - 2 * MARGIN - GAP * (len(groups) - 1)) / len(groups)
    packed = [_packed(group.rows) for group in groups]
    scale = min((width - 2 * _PANEL_PAD) / max(p.width for p in packed), _MODEL_TALL / max(p.height for p in packed))
    cards = min(_card_scale(shard_map, width, pack) for pack in packed)
    top, tall = _MODEL_TOP, max(p.height for p in packed) * scale
    below, bottom = top + tall + _PANEL_FOOT + _FALL, 0.0
    for number, (group, pack) in enumerate(zip(groups, packed, strict=True)):
        left = MARGIN + number * (width + GAP)
        panel = Box(left, top - _PANEL_HEAD, width, _PANEL_HEAD + tall + _PANEL_FOOT)
        bottom = max(bottom, _draw_ranks(canvas, shard_map, group, pack, Box(left, below, width, 0), cards))
        _fall(canvas, panel, Box(left, below, width, 0))
        _draw_model(canvas, shard_map, group, pack, panel, scale)
    _plan(canvas, shard_map, below - _FALL / 2)
    return _page(canvas, shard_map, title, bottom)


# --- groups: one for each rank of the pipeline axis -------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The ranks with one index on the pipeline axis, and the rows of parameters that they hold."""

    name: str
    ranks: tuple[int, ...]
    rows: tuple[Row, ...]


def _groups(shard_map: ShardMap) -> list[_Group]:
    recipe, mesh = shard_map.recipe, shard_map.mesh
    groups = []
    for pp in range(mesh.axis_size("pp")):
        ranks = tuple(rank for rank in range(mesh.size) if mesh.coordinate(rank).get("pp", 0) == pp)
        parameters = [f for name, f in shard_map.parameters.items() if pp in recipe.owners(recipe.by_name[name])]
        stages = [str(stage) for stage, pp_of_stage in enumerate(recipe.stage_rank) if pp_of_stage == pp]
        name = f"stages {', '.join(stages)}" if len(stages) > 1 else f"stage {stages[0]}"
        groups.append(_Group(name if recipe.stages else "", ranks, fold(parameters)))
    return groups


# --- positions of rectangles ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """The rectangles of parameters, packed in columns, in units of elements."""

    boxes: tuple[Box, ...]
    width: float
    height: float


def _packed(rows: Sequence[Row]) -> _Packed:
    """Packs the rectangles in columns from left to right. No column is taller than the tallest rectangle."""
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


def _scaled(box: Box, scale: float, left: float, top: float) -> Box:
    """A packed rectangle in pixels, in a drawing whose upper left corner is at (left, top)."""
    return Box(left + box.x * scale, top + box.y * scale, box.width * scale, box.height * scale)


def _sides(shape: Sequence[int]) -> tuple[float, float]:
    """(width, height) of a parameter in elements: the first dim is the height, the product of the others the width."""
    return float(prod(shape[1:])) if shape else 1.0, float(shape[0]) if shape else 1.0


def _pieces(shape: Sequence[int], slices: Slices, box: Box) -> Iterator[Box]:
    """The rectangles of the part that a rank holds. Of the dims after the first, only the sharded one is drawn."""
    if not elements(slices):
        return
    rows = slices[0] if slices else ((0, 1),)
    sharded = next((d for d in range(1, len(shape)) if slices[d] != ((0, shape[d]),)), None)
    columns, across = (((0, 1),), 1) if sharded is None else (slices[sharded], shape[sharded])
    down = shape[0] if shape else 1
    for (top, bottom), (left, right) in product(rows, columns):
        yield Box(
            box.x + box.width * left / across,
            box.y + box.height * top / down,
            box.width * (right - left) / across,
            box.height * (bottom - top) / down,
        )


# --- drawing ----------------------------------------------------------------------------------------------------------


def _draw_model(canvas: Canvas, shards: ShardMap, group: _Group, pack: _Packed, panel: Box, scale: float) -> None:
    """Draws the parameters of a group, each part in the colours of the ranks that hold it."""
    left = panel.x + (panel.width - pack.width * scale) / 2
    for row, packed_box in zip(group.rows, pack.boxes, strict=True):
        box = _scaled(packed_box, scale, left, panel.y + _PANEL_HEAD)
        facts = row.first
        for ranks, slices in shards.held_by(facts.name):
            holders = [rank for rank in ranks if rank in group.ranks]
            ranks_part = f"rank{'s'[: len(holders) > 1]} {', '.join(map(str, holders))}"
            tooltip = f"{row}: {slices_text(slices, facts.shape)} on {ranks_part}"
            for piece in _pieces(facts.shape, slices, box) if holders else ():
                canvas.box(piece, fill=canvas.colour(holders), about=tooltip)
        _name(canvas, row, box)
    if group.name:
        canvas.text(panel.x + _PANEL_PAD, panel.y + _PANEL_BASELINE, group.name, TEXT, weight=BOLD)


def _name(canvas: Canvas, row: Row, box: Box) -> None:
    """Draws the name of a parameter's module within its rectangle, or the first word of it, if there is room."""
    parts = [part for part in row.label.split(".") if part not in ("weight", "bias")]
    name = parts[-1] if parts else row.label
    more_width, more_height = _NAME_ROOM
    for words in (name, name.split("_")[0]):
        if text_width(words, _NAME_SIZE) <= box.width - more_width and box.height >= _NAME_SIZE + more_height:
            x, y = box.x + box.width / 2, box.y + box.height / 2 + _NAME_DROP
            canvas.text(x, y, words, _NAME_SIZE, "on", "middle", BOLD)
            return


def _fall(canvas: Canvas, above: Box, below: Box) -> None:
    canvas.polygon(
        [(above.x, above.bottom), (above.right, above.bottom), (below.right, below.y), (below.x, below.y)], "fall"
    )
    canvas.box(above, "card", radius=_PANEL_RADIUS)


def _columns(shards: ShardMap) -> int:
    """Number of cards beside each other: one for each index of the innermost axis, at most ``_MOST_COLUMNS``."""
    inner = [axis for axis in shards.mesh.names if axis != "pp"][-1:]
    return min(shards.mesh.axis_size(inner[0]) if inner else 1, _MOST_COLUMNS)


def _card_scale(shards: ShardMap, width: float, pack: _Packed) -> float:
    """Pixels for each element in a card. ``width``: of all cards beside each other, in pixels."""
    columns = _columns(shards)
    room = (width - _CARD_GAP * (columns - 1)) / columns - 2 * _CARD_PAD
    return min(room / pack.width, _CARD_TALL / pack.height)


def _draw_ranks(canvas: Canvas, shards: ShardMap, group: _Group, pack: _Packed, panel: Box, scale: float) -> float:
    """Draws a card for each rank. Returns the y coordinate of the lower end of the last one."""
    columns, gap, head = _columns(shards), _CARD_GAP, _CARD_HEAD
    width = (panel.width - gap * (columns - 1)) / columns
    height = head + pack.height * scale + _CARD_PAD
    bottom = panel.y
    for number, rank in enumerate(group.ranks):
        down, across = divmod(number, columns)
        card = Box(panel.x + across * (width + gap), panel.y + down * (height + gap), width, height)
        canvas.box(card, "card", radius=_CARD_RADIUS)
        _rank(canvas, shards, rank, card)
        left = card.x + (card.width - pack.width * scale) / 2
        for row, packed_box in zip(group.rows, pack.boxes, strict=True):
            box = _scaled(packed_box, scale, left, card.y + head)
            canvas.box(box, "ghost")
            slices = shards.slices(row.first.name, rank)
            tooltip = f"rank {rank} holds {slices_text(slices, row.first.shape)} of {row} ({shape_text(row.first)})"
            for piece in _pieces(row.first.shape, slices, box):
                canvas.box(piece, fill=canvas.colour([rank]), about=tooltip)
        bottom = max(bottom, card.bottom)
    return bottom


def _rank(canvas: Canvas, shards: ShardMap, rank: int, card: Box) -> None:
    """Draws the head of a card: the rank, its coordinate, and the bytes that it holds."""
    name, nbytes, baseline = f"rank {rank}", size_text(shards.bytes_at(rank)), card.y + _CARD_BASELINE
    canvas.text(card.x + _CARD_PAD, baseline, name, LABEL, weight=BOLD)
    canvas.text(card.right - _CARD_PAD, baseline, nbytes, DETAIL, "dim", "end")
    coordinate = shards.mesh.coordinate(rank)
    text = " · ".join(f"{axis} {index}" for axis, index in coordinate.items() if axis != "pp")
    if text_width(text, DETAIL) < card.width - _CARD_SPACES - text_width(name, LABEL) - text_width(nbytes, DETAIL):
        canvas.text(card.x + _BEFORE_COORDINATE + text_width(name, LABEL), baseline, text, DETAIL, "dim")


def _plan(canvas: Canvas, shards: ShardMap, middle: float) -> None:
    """Draws the mesh of the plan, between the model and its ranks."""
    text = "mesh: {" + ", ".join(f"{axis}: {size}" for axis, size in shards.mesh.axes) + "}"
    width = len(text) * _PLAN_LETTER + _PLAN_PAD
    pill = Box((WIDTH - width) / 2, middle - _PLAN_HEIGHT, width, _PLAN_HEIGHT)
    canvas.box(pill, "pill", radius=_PLAN_HEIGHT / 2)
    canvas.text(WIDTH / 2, middle - _PLAN_DROP, text, _PLAN_SIZE, "pill-text mono", "middle", BOLD)
    divides = "  ·  ".join(_DIVIDES[axis] for axis in shards.mesh.names)
    canvas.text(WIDTH / 2, middle + _DIVIDES_DROP, divides, TEXT, "dim", "middle")


def _page(canvas: Canvas, shards: ShardMap, title: str, bottom: float) -> Drawing:
    """The drawing on its page, with a title above and a legend below."""
    height = bottom + _PAGE_FOOT
    page = Canvas()
    size = f"{count_text(shards.numel)} parameters, {size_text(shards.bytes)}, on one device"
    page.page(WIDTH, height, MARGIN, title, size)
    legend = (
        "A rectangle is a parameter, in its own proportions. A colour: the rank that holds a piece; stripes: several."
    )
    page.text(MARGIN, height - _LEGEND, legend, LABEL, "dim")
    page.absorb(canvas)
    bytes_of_ranks = "; ".join(f"rank {r} holds {size_text(b)}" for r, b in enumerate(shards.bytes_by_rank))
    return page.svg(WIDTH, height, title, f"{size}. Mesh: {shards.mesh}. {bytes_of_ranks}.")
