"""``meshwright inspect``: shows what a checkpoint contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from meshwright.cli import processes
from meshwright.cli.options import JSONOption
from meshwright.draw.console import console


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of checkpoints", show_default=False)
    ],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="Print a line for each tensor, not for each module")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Compare only the sizes of files; read no file")] = False,
    as_json: JSONOption = False,
) -> None:
    """Show what is in a checkpoint: its step, sizes, and the layout that saved it.

    Reads all files and compares them with their checksums. If a file is missing,
    short or changed, the command names the file and its tensors, and exits with code 2.
    For a folder of checkpoints, it prints a line for each. It runs no code from a checkpoint.
    """
    with processes.reported_errors():
        from meshwright.checkpoint.inspection import inspect as look
        from meshwright.checkpoint.inspection import raise_if_damaged, unfinished
        from meshwright.draw.checkpoints import checkpoint_lines, checkpoint_page

        inspections = look(checkpoint, contents=not quick)
        single = len(inspections) == 1 and inspections[0].path == checkpoint
        incomplete = () if single else unfinished(checkpoint)
        if as_json:
            data = [inspection.to_dict() for inspection in inspections]
            folder_data = {"newest": inspections[-1].path.name, "unfinished": list(incomplete), "checkpoints": data}
            print(json.dumps(data[0] if single else folder_data, indent=1))
        elif single:
            console().print(checkpoint_page(inspections[0], tensors=tensors))
        else:
            console().print(checkpoint_lines(inspections))
            for name in incomplete:
                console().print(Text(f"{name}: being written, or never completed; not a checkpoint", style="dim"))
            if tensors:
                console().print("", checkpoint_page(inspections[-1], tensors=True), sep="\n")
        raise_if_damaged(inspections)
