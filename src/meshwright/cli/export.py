"""``meshwright export``: writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from meshwright.amounts import size_text
from meshwright.cli import processes
from meshwright.draw.console import console


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A checkpoint, or a folder of checkpoints: then the newest is exported",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to create", show_default=False)],
    shard_size: Annotated[str, typer.Option(help="Largest size of a file, such as 500MB")] = "5GB",
    dtype: Annotated[
        str | None,
        typer.Option(help="Type of floating-point weights, such as bfloat16; default: as saved", show_default=False),
    ] = None,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder.

    Writes what from_pretrained loads: safetensors files with their index, and
    config.json if the model has one. The checkpoint may have any layout. The command
    is one process. It needs no model code, and holds one tensor in memory at a time.
    It does not export optimizer state.
    """
    with processes.reported_errors():
        from meshwright.checkpoint.export import export as write

        exported = write(checkpoint, out, shard_size=shard_size, dtype=dtype)
    files = f"{len(exported.files)} file{'s' if len(exported.files) > 1 else ''}"
    text = (
        f"{exported.folder}: step {exported.step}, {exported.tensors} tensors, {size_text(exported.bytes)} in {files}"
    )
    console().print(Text(text), soft_wrap=True)
    if not exported.config:
        note = "no config.json: the checkpoint has none, so these are weights alone; job.load_pretrained reads them"
        console().print(Text(note, style="dim"), soft_wrap=True)
