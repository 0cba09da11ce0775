"""HTML for notebooks: the picture that the terminal shows of a recipe, a shard map, a prediction or a verdict."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from meshwright.draw.facts import ShardMap, shard_map
from meshwright.draw.terminal import render
from meshwright.recipe import Recipe

_COLUMNS = 140  # characters of a line: a notebook on a usual screen shows them without a scroll bar
_CODE = '<pre style="font-family:ui-monospace,Menlo,Consolas,monospace;line-height:1.25;overflow-x:auto">{code}</pre>'


def html_of(shards: ShardMap | Recipe) -> str:
    """The shard map of a recipe, as HTML."""
    return as_html(render(shards if isinstance(shards, ShardMap) else shard_map(shards), width=_COLUMNS))


def as_html(drawn: RenderableType) -> str:
    """Anything that rich prints, as a self-contained piece of HTML."""
    console = Console(
        width=_COLUMNS, file=io.StringIO(), record=True, force_terminal=True, highlight=False, emoji=False
    )
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=_CODE)
