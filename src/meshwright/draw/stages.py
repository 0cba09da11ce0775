"""Prints the stages of a pipeline and the timeline of its schedule.

stage  ranks  from                to              work  parameters  sends   a rank holds at rest
0      0, 1   model.embed_tokens  model.layers.3   49 %      1.6 M  64 KiB  ███████████▌ 3.1 MiB
1      2, 3   model.layers.4      lm_head          51 %      1.6 M  –       ████████████ 3.2 MiB

1f1b, 4 microbatches; time goes right, a backward takes two forwards
rank 0   0 1 0…  2 1…  3 2…  3…
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text, size_text
from meshwright.draw.facts import ShardMap
from meshwright.draw.parameters import Row
from meshwright.draw.text import bar, ranks_text
from meshwright.recipe import Recipe
from meshwright.schedule import Schedule, Span, idle, make_schedule, most_in_flight, timeline

_MOST = 16  # most ranks whose line is drawn, and most stages in the table
_COLUMNS = 120  # most characters of a line of the timeline
_BAR = 12  # cells of a bar of memory
_STYLES = {"F": "cyan", "B": "green", "I": "green", "W": "magenta"}


def stages(shard_map: ShardMap) -> Iterator[RenderableType]:
    """The table of stages and the timeline; nothing without a pipeline."""
    recipe = shard_map.recipe
    if not recipe.stages:
        return
    yield Text()
    yield _table(recipe, shard_map.bytes_by_rank)
    yield Text()
    yield from drawn(recipe)


def stages_text(row: Row) -> str:
    """The stages that use the parameters of a row: ``stage 1``; ``stages 0–7 (10 each)``; of a tied one ``stages 0, 2``."""
    indices = sorted({stage for stages in row.by_stage for stage in stages})
    counts = {len(names) for names in row.by_stage.values()}
    each = f" ({min(counts)} each)" if len(row.by_stage) > 1 and len(counts) == 1 else ""
    return f"stage{'s' * (len(indices) > 1)} {ranks_text(indices)}{each}"


def _table(recipe: Recipe, sizes: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("stage", "ranks", "from", "to"):
        table.add_column(title, no_wrap=True)
    for title in ("work", "parameters", "sends"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("a rank holds at rest", no_wrap=True)
    total_work, most = sum(stage.work for stage in recipe.stages) or 1, max(sizes)
    for stage in recipe.stages[:_MOST]:
        last = stage.modules[-1] if stage.modules else "–"
        sends = size_text(stage.sends) if stage.sends else "–"
        ranks = recipe.stage_ranks_of(stage.index)
        rank_sizes = [sizes[rank] for rank in ranks]
        # Uneven shards may give the last ranks less.
        ends = dict.fromkeys((size_text(min(rank_sizes)), size_text(max(rank_sizes))))
        table.add_row(
            str(stage.index), ranks_text(ranks), stage.where, last, f"{100 * stage.work / total_work:.0f} %",
            count_text(stage.parameters), sends,
            Text.assemble((bar(max(rank_sizes) / most, _BAR) if most else " " * _BAR, "blue"), f" {' to '.join(ends)}"),
        )  # fmt: skip
    if len(recipe.stages) > _MOST:
        table.add_row("…", *[""] * 7)
    return table


def drawn(recipe: Recipe) -> Iterator[Text]:
    """The timeline: a line for each rank of the pipeline axis. An action shows its kind and its microbatch, such as ``F0``."""
    ranks, count = recipe.mesh.axis_size("pp"), recipe.microbatches
    schedule = make_schedule(recipe.schedule, ranks, len(recipe.stages), count)
    spans = timeline(schedule)
    text = Text(f"{recipe.schedule}, {count} microbatch{'es' * (count > 1)} a step", style="bold")
    yield text.append("; time goes right, a backward takes two forwards", style="not bold")
    width = max(len(str(count - 1)), 1) + 1 + (len(recipe.stages) > ranks)
    for rank, line in groupby(sorted(spans, key=lambda s: (s.rank, s.start)), key=lambda s: s.rank):
        if rank >= _MOST:
            yield Text(f"… and {ranks - _MOST} more ranks", style="dim")
            break
        cut_off = Text(f"pp {rank:<3} ", no_wrap=True, overflow="ellipsis")  # where the terminal ends
        yield cut_off.append_text(_line(list(line), width, len(recipe.stages) > ranks))
    yield _legend(recipe, schedule, idle(spans))


def _legend(recipe: Recipe, schedule: Schedule, bubble: float) -> Text:
    """The colours of a timeline, and how long ranks are idle."""
    ranks, count = recipe.mesh.axis_size("pp"), recipe.microbatches
    text = Text().append("F forward", style=_STYLES["F"]).append("  ")
    text.append("B backward", style=_STYLES["B"])
    if recipe.schedule == "zero_bubble":
        text.append("  W of weights, later", style=_STYLES["W"])
    text.append(f"\nidle: {100 * bubble:.0f} % of the ranks' time")
    if recipe.schedule in ("gpipe", "1f1b") and len(recipe.stages) == ranks:
        text.append(f" = (p−1)/(m+p−1) = {ranks - 1}/{count + ranks - 1}")
    text.append(f"; rank 0 holds the activations of at most {most_in_flight(schedule, 0)} microbatches")
    return text


def _line(spans: list[Span], width: int, staged: bool) -> Text:
    """The line of one rank: ``F0 F1 B0···``. An action is as wide as it is long.

    Args:
        spans: of the rank, in order.
        width: characters of one forward, without the space after it.
        staged: whether an action also shows its stage, since the rank has several.
    """
    line, at = Text(), 0.0
    for span in spans:
        line.append(" " * int((span.start - at) * (width + 1)))
        name = f"{span.action.kind.replace('I', 'B')}{span.action.microbatch}"
        name = f"{span.action.stage}{name}" if staged else name
        cells = int((span.stop - span.start) * (width + 1))
        line.append(name.ljust(cells - 1, "·")[: max(cells - 1, len(name))] + " ", style=_STYLES[span.action.kind])
        at = span.stop
        if len(line) > _COLUMNS:
            return line[:_COLUMNS] + Text("…")
    return line
