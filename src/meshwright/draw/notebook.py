"""What a notebook shows of a plan, a recipe, a shard map, a prediction or a verdict: what the terminal shows, as HTML."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from meshwright.draw.facts import ShardMap, shard_map
from meshwright.draw.terminal import render
from meshwright.recipe import Recipe

_COLUMNS = 140
_CODE = '<pre style="font-family:ui-monospace,Menlo,Consolas,monospace;line-height:1.25;overflow-x:auto">{code}</pre>'


def html_of(shards: ShardMap | Recipe) -> str:
    """Which rank holds what."""
    return as_html(render(shards if isinstance(shards, ShardMap) else shard_map(shards), width=_COLUMNS))


def as_html(drawn: RenderableType) -> str:
    """Anything that rich prints, as a piece of HTML that stands by itself."""
    console = Console(
        width=_COLUMNS, file=io.StringIO(), record=True, force_terminal=True, highlight=False, emoji=False
    )
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=_CODE)
