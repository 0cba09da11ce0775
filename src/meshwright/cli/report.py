"""``meshwright report``: what a run's folder tells of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import processes
from meshwright.cli.files import write_whole
from meshwright.cli.options import JSONOption, RunHTMLOption
from meshwright.draw.console import console


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of train", show_default=False)],
    html: RunHTMLOption = None,
    as_json: JSONOption = False,
) -> None:
    """Show a run: loss, rate, memory, waiting, checkpoints.

    Reads what train wrote to the run's folder, and says what is not there. Writes
    one HTML file, which a browser opens from disk. Reads no tensor: meshwright
    inspect compares what checkpoints hold with their checksums.
    """
    with processes.told():
        from meshwright.draw.html.run import run_page
        from meshwright.draw.plain import to_plain
        from meshwright.draw.run import drawn
        from meshwright.train.history import history

        told = history(run)
        if as_json:
            print(json.dumps(to_plain(told)))
            return
        file = html or run / "report.html"
        write_whole(file, run_page(told))
        console().print(drawn(told))
        console().print(f"\n{file}: a browser opens it from disk")
