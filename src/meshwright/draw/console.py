"""Where pictures and reports are printed."""

from __future__ import annotations

from rich.console import Console

_UNBROKEN = 1_000_000  # columns


def console(*, stderr: bool = False) -> Console:
    """Where pictures and reports are printed: as wide as the terminal; in a pipe or a file no line is broken."""
    printer = Console(
        stderr=stderr, highlight=False, emoji=False
    )  # names and slices have colons: 75:100: is no picture
    if not printer.is_terminal:
        printer.width = _UNBROKEN
    return printer
