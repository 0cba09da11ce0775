"""Prints the branches of a recipe: a table, and the ranks of each branch between fork and join; and streams.

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

_MOST = 16  # most branches in the table
_NAMES = 4  # most modules of a branch that are named


def branches(shard_map: ShardMap) -> Iterator[RenderableType]:
    """The table of branches, and a picture of each set of branches that may run at the same time.

    Yields nothing if there are no branches.

    The table shows the share of the work of each branch, and the work of one of its ranks relative to the busiest rank.
    """
    yield from _streams(shard_map.recipe)
    facts = shard_map.branches
    if not facts:
        return
    yield Text()
    yield _table(facts)
    for parent in dict.fromkeys(branch.parent for branch in facts):
        siblings = [branch for branch in facts if branch.parent == parent]
        for concurrent in _concurrent_sets(siblings, shard_map.recipe.places):
            yield Text()
            yield _region(concurrent, shard_map.recipe.places)


def _streams(recipe: Recipe) -> Iterator[RenderableType]:
    """The modules of each stream. Modules of different streams run at the same time on one rank."""
    if recipe.streams:
        yield Text("\non every rank, at the same time where it can", style="bold")
    for stream in sorted(set(recipe.streams.values())):
        names = [folded.label for folded in fold_names(n for n, s in recipe.streams.items() if s == stream)]
        yield Text(f"  stream {stream}  {', '.join(names)}")


def modules_text(branch: BranchFacts, most: int = _NAMES) -> str:
    """The modules of a branch, with repeated blocks folded: ``h.{0…1}.attn``; ``tower, call 2``."""
    texts = [folded.label for folded in fold_names(name for name, turns in branch.modules if not turns)]
    texts += [f"{name}, call{'s' * (len(turns) > 1)} {_calls(turns)}" for name, turns in branch.modules if turns]
    return few(texts, most)


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


def _concurrent_sets(siblings: list[BranchFacts], submeshes: Submeshes) -> list[list[BranchFacts]]:
    """Divides branches of one parent into sets whose slices do not overlap. Only these can run at the same time."""
    sets: list[list[BranchFacts]] = []
    for branch in siblings:
        submesh = submeshes[branch.number]
        for chosen in sets:
            others = [submeshes[other.number] for other in chosen]
            if all(submesh.stop <= other.start or other.stop <= submesh.start for other in others):
                chosen.append(branch)
                break
        else:
            sets.append([branch])
    return sets


def _region(concurrent: Sequence[BranchFacts], submeshes: Submeshes) -> Text:
    """A picture of the branches between a fork and a join, for the first group of ranks that runs them."""
    parent = concurrent[0].parent
    all_ranks = [rank for branch in concurrent for rank in branch.ranks]
    groups = {(at.pp, at.dp_replicate, at.dp_shard) for rank in all_ranks if (at := submeshes.at(rank, parent))}
    first_group, others = submeshes.line(parent, min(all_ranks)), len(groups) - 1
    ranks = [ranks_text([rank for rank in branch.ranks if rank in first_group]) for branch in concurrent]
    names = [modules_text(branch) for branch in concurrent]
    fork = f"ranks {ranks_text(first_group)} ─ fork ─"
    ranks_width, names_width = max(map(cell_len, ranks)), max(map(cell_len, names))
    text = Text()
    for i, (rank, name) in enumerate(zip(ranks, names, strict=True)):
        left, right = _corners(i, len(concurrent))
        text.append(fork if not i else " " * cell_len(fork), style="dim")
        text.append(f"{left}─ ", style="dim")
        text.append(f"{rank:<{ranks_width}}", style="cyan")
        text.append(f"  {name} ")
        text.append("─" * (names_width - cell_len(name)) + f"─{right}" + ("─ join" if not i else ""), style="dim")
        text.append("\n" if i < len(concurrent) - 1 else "")
    if others:
        text.append(f"\nand so on {others} more group{'s' * (others > 1)} of ranks", style="dim")
    return text


def _corners(line: int, lines: int) -> tuple[str, str]:
    """The characters at the left and right end of a line of the picture."""
    if lines == 1:
        return "─", "─"
    if line == 0:
        return "┬", "┬"
    return ("└", "┘") if line == lines - 1 else ("├", "┤")
