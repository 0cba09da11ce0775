"""``run_page``: the history of a run as one HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.draw.html.page import filled
from meshwright.draw.plain import to_plain

if TYPE_CHECKING:  # histories are read where torch is loaded
    from meshwright.train.history import History

_SCRIPTS = ("text", "page", "run")


def run_page(history: History) -> str:
    """The file as text. It holds all that it shows, and names no other file and no address."""
    return filled("run.html.j2", _SCRIPTS, to_plain(history), run=history)
