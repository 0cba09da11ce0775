"""``console``: the rich console for pictures and reports."""

from __future__ import annotations

from rich.console import Console

_UNBROKEN = 1_000_000  # columns: more than any line has, so that rich breaks none


def console(*, stderr: bool = False) -> Console:
    """A rich console: as wide as the terminal; in a pipe or a file, no line is broken."""
    printer = Console(stderr=stderr, highlight=False, emoji=False)  # no emoji: slices such as :100: are not emoji names
    if not printer.is_terminal:
        printer.width = _UNBROKEN
    return printer
