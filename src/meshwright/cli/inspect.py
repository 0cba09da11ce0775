"""``meshwright inspect``: what is in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from meshwright.cli import processes
from meshwright.draw.console import console


def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of them", show_default=False)
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="A line for each tensor, not each module")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Compare the sizes of files only; read none")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead")] = False,
) -> None:
    """Show what is in a checkpoint: step, sizes, the layout it was saved under.

    All of it is read and compared with its checksums: what is missing, short or
    changed is told by file and tensor, and ends with exit code 2. Of a folder of
    checkpoints each has a line. Nothing of a checkpoint is run.
    """
    with processes.told():
        from meshwright.checkpoint.inspection import inspect as look
        from meshwright.checkpoint.inspection import raise_if_damaged, unfinished
        from meshwright.draw.checkpoints import one, several

        found = look(checkpoint, contents=not quick)
        alone = len(found) == 1 and found[0].path == checkpoint
        begun = () if alone else unfinished(checkpoint)
        if as_json:
            data = [inspection.to_dict() for inspection in found]
            of_folder = {"newest": found[-1].path.name, "unfinished": list(begun), "checkpoints": data}
            print(json.dumps(data[0] if alone else of_folder, indent=1))
        elif alone:
            console().print(one(found[0], tensors=tensors))
        else:
            console().print(several(found))
            for name in begun:
                console().print(Text(f"{name}: being written, or never completed; no checkpoint", style="dim"))
            if tensors:
                console().print("", one(found[-1], tensors=True), sep="\n")
        raise_if_damaged(found)
