"""The branches of a recipe for the terminal: a table of them, and who runs what between fork and join; and streams.

place    ranks  mesh                     rows     modules  parameters  work  a rank
tp[0:2]  0, 1   tp=2                     all      block_a       8.2 k  16 %    57 %
tp[2:8]  2–7    dp_replicate=3 × tp=2    divided  block_b        43 k  84 %   100 %

ranks 0–7 ─ fork ─┬─ 0, 1  block_a ─┬─ join
                  └─ 2–7   block_b ─┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import count_text
from meshwright.draw.branch_facts import BranchFacts
from meshwright.draw.facts import ShardMap
from meshwright.draw.text import ranks_text
from meshwright.names import few, fold_names
from meshwright.recipe import Recipe
from meshwright.submesh import Submeshes

_MOST = 16  # branches in the table
_NAMES = 4  # modules of a branch that are named


def branches(shard_map: ShardMap) -> Iterator[RenderableType]:
    """The table of branches, and a picture of each set of them that may run at the same time; nothing without any.

    The table has the share of the work that a branch is, and what one of its ranks has to do, of what the busiest has.
    """
    yield from _streams(shard_map.recipe)
    facts = shard_map.branches
    if not facts:
        return
    yield Text()
    yield _table(facts)
    for around in dict.fromkeys(branch.parent for branch in facts):
        for beside in _beside([b for b in facts if b.parent == around], shard_map.recipe.places):
            yield Text()
            yield _region(beside, shard_map.recipe.places)


def _streams(recipe: Recipe) -> Iterator[RenderableType]:
    """What runs at the same time on one rank."""
    if recipe.streams:
        yield Text("\non every rank, at the same time where it can", style="bold")
    for stream in sorted(set(recipe.streams.values())):
        names = [folded.label for folded in fold_names(n for n, s in recipe.streams.items() if s == stream)]
        yield Text(f"  stream {stream}  {', '.join(names)}")


def modules_text(branch: BranchFacts, most: int = _NAMES) -> str:
    """What stands on a branch, repeated blocks folded: ``h.{0…1}.attn``; ``tower, call 2``."""
    said = [folded.label for folded in fold_names(name for name, turns in branch.modules if not turns)]
    said += [f"{name}, call{'s' * (len(turns) > 1)} {_calls(turns)}" for name, turns in branch.modules if turns]
    return few(said, most)


def _calls(turns: Sequence[int]) -> str:
    return " and ".join(str(turn + 1) for turn in turns)


def _table(facts: Sequence[BranchFacts]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("place", "ranks", "mesh", "rows", "modules"):
        table.add_column(title, no_wrap=title != "modules")
    for title in ("parameters", "work", "a rank"):
        table.add_column(title, justify="right", no_wrap=True)
    for b in facts[:_MOST]:
        rows = "divided" if b.splits else "all"
        table.add_row(b.on, ranks_text(b.ranks), str(b.mesh), rows, modules_text(b), count_text(b.numel),
                      f"{b.work:.0%}".replace("%", " %"), f"{b.load:.0%}".replace("%", " %"))  # fmt: skip
    if len(facts) > _MOST:
        table.add_row("…", *[""] * 7)
    return table


def _beside(siblings: list[BranchFacts], places: Submeshes) -> list[list[BranchFacts]]:
    """Branches of one place, in sets whose slices do not overlap: others cannot run at the same time."""
    sets: list[list[BranchFacts]] = []
    for branch in siblings:
        place = places[branch.number]
        for chosen in sets:
            others = [places[b.number] for b in chosen]
            if all(place.stop <= o.start or o.stop <= place.start for o in others):
                chosen.append(branch)
                break
        else:
            sets.append([branch])
    return sets


def _region(beside: Sequence[BranchFacts], places: Submeshes) -> Text:
    """Who runs what between fork and join, for the first of the groups of ranks that do so."""
    around = beside[0].parent
    everyone = [rank for branch in beside for rank in branch.ranks]
    groups = {(at.pp, at.dp_replicate, at.dp_shard) for rank in everyone if (at := places.at(rank, around))}
    first, others = places.line(around, min(everyone)), len(groups) - 1
    ranks = [ranks_text([r for r in branch.ranks if r in first]) for branch in beside]
    names = [modules_text(branch) for branch in beside]
    before = f"ranks {ranks_text(first)} ─ fork ─"
    wide, long = max(map(cell_len, ranks)), max(map(cell_len, names))
    text = Text()
    for i, (rank, name) in enumerate(zip(ranks, names, strict=True)):
        left, right = _corners(i, len(beside))
        text.append(before if not i else " " * cell_len(before), style="dim")
        text.append(f"{left}─ ", style="dim")
        text.append(f"{rank:<{wide}}", style="cyan")
        text.append(f"  {name} ")
        text.append("─" * (long - cell_len(name)) + f"─{right}" + ("─ join" if not i else ""), style="dim")
        text.append("\n" if i < len(beside) - 1 else "")
    if others:
        text.append(f"\nand so on {others} more group{'s' * (others > 1)} of ranks", style="dim")
    return text


def _corners(line: int, lines: int) -> tuple[str, str]:
    if lines == 1:
        return "─", "─"
    if line == 0:
        return "┬", "┬"
    return ("└", "┘") if line == lines - 1 else ("├", "┤")
