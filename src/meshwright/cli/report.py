"""``meshwright report``: what a run's folder tells of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import processes
from meshwright.cli.files import write_whole
from meshwright.cli.options import HardwareOption, JSONOption, NetworkOption, ObservedStepOption, RunHTMLOption
from meshwright.draw.console import console


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of train", show_default=False)],
    html: RunHTMLOption = None,
    hardware: HardwareOption = None,
    network: NetworkOption = None,
    step: ObservedStepOption = None,
    as_json: JSONOption = False,
) -> None:
    """Show a run: loss, rate, memory of each rank, waiting, verdicts, checkpoints.

    Reads what train wrote to the run's folder, and says what is not there. Writes
    one HTML file, which a browser opens from disk. Steps that were observed (train
    --observe-every) are drawn beside the same step predicted for --hardware. Reads no
    tensor: meshwright inspect compares what checkpoints hold with their checksums.
    """
    with processes.told():
        from meshwright.cli.foretold import steps_in_time
        from meshwright.draw.html.run import run_page
        from meshwright.draw.plain import to_plain
        from meshwright.draw.run import chosen, drawn
        from meshwright.train.history import history

        told = history(run)
        steps = steps_in_time(run, told, hardware, network, step)
        at = chosen(steps, step)
        if as_json:
            print(json.dumps(to_plain(told) | {"in_time": to_plain(steps)}))
            return
        file = html or run / "report.html"
        write_whole(file, run_page(told, steps, at))
        console().print(drawn(told, steps, at))
        console().print(f"\n{file}: a browser opens it from disk")
