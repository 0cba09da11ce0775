"""Help that teaches: a few lines on what a command does, its options, and examples that can be pasted as they stand."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from meshwright.draw.console import console


class Taught(TyperCommand):
    """A command whose epilog is examples: printed below its options, line by line, and none broken."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _above(self, super().format_help, ctx, formatter)


class TaughtGroup(TyperGroup):
    """The same of a group of commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _above(self, super().format_help, ctx, formatter)


def _above(command: Any, format_help: Any, ctx: Any, formatter: Any) -> None:
    examples, text = command.epilog, command.help
    command.epilog, command.help = (
        None,
        _filled(text or ""),
    )  # typer would wrap the lines of the one, and not of the other
    try:
        format_help(ctx, formatter)
    finally:
        command.epilog, command.help = examples, text
    console().print(Text("Examples", style="bold"), _text(examples or ""), sep="\n", soft_wrap=True)


def _filled(text: str) -> str:
    """A docstring whose paragraphs are a line each: where lines end is for the terminal to say."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _text(examples: str) -> Text:
    """Examples with their comments dim; at the left margin, where an indented end of a here-document would be none."""
    lines = [Text(line, style="dim" if line.startswith("#") else "") for line in examples.strip().splitlines()]
    return Text("\n").join(lines)
