"""``--help`` of the commands: a few lines on what a command does, its options, and examples to paste."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from meshwright.draw.console import console


class CommandWithExamples(TyperCommand):
    """A command whose epilog is examples. They are printed below its options, line by line, without line breaks."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, super().format_help, ctx, formatter)


class GroupWithExamples(TyperGroup):
    """A group of commands whose epilog is examples, printed as ``CommandWithExamples`` prints them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, super().format_help, ctx, formatter)


def _print_help(command: Any, format_help: Any, ctx: Any, formatter: Any) -> None:
    """Prints typer's help of a command, then its examples.

    typer would wrap the lines of the examples, and would not wrap those of the text.
    """
    examples, text = command.epilog, command.help
    command.epilog, command.help = None, _one_line_a_paragraph(text or "")
    try:
        format_help(ctx, formatter)
    finally:
        command.epilog, command.help = examples, text
    console().print(Text("Examples", style="bold"), _examples_text(examples or ""), sep="\n", soft_wrap=True)


def _one_line_a_paragraph(text: str) -> str:
    """A docstring with each paragraph on one line, so that the terminal decides where lines end."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _examples_text(examples: str) -> Text:
    """The examples with dim comments, at the left margin: a shell does not see an indented ``END`` of a here-document."""
    lines = [Text(line, style="dim" if line.startswith("#") else "") for line in examples.strip().splitlines()]
    return Text("\n").join(lines)
