"""``meshwright export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from meshwright.cli import processes
from meshwright.draw.console import console
from meshwright.draw.text import size_text


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of them: the newest", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make", show_default=False)],
    shard_size: Annotated[str, typer.Option(help="The most bytes of a file, as 500MB")] = "5GB",
    dtype: Annotated[
        str | None, typer.Option(help="Of floating-point weights, as bfloat16; default as they are", show_default=False)
    ] = None,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder.

    Safetensors with their index, and config.json where the model has one: what
    from_pretrained loads. Any layout that was saved will do. One process, without
    the model's code, holds one tensor at a time; optimizer state stays behind.
    """
    with processes.told():
        from meshwright.checkpoint.export import export as write

        found = write(checkpoint, out, shard_size=shard_size, dtype=dtype)
    files = f"{len(found.files)} file{'s' if len(found.files) > 1 else ''}"
    text = f"{found.folder}: step {found.step}, {found.tensors} tensors, {size_text(found.bytes)} in {files}"
    console().print(Text(text), soft_wrap=True)
    if not found.config:
        note = "no config.json: the checkpoint has none, so these are weights alone; job.load_pretrained reads them"
        console().print(Text(note, style="dim"), soft_wrap=True)
