"""``meshwright report``: shows a training run from the files in its folder."""

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

    Reads the files that train wrote to the run's folder, and names those that are
    missing. Writes one HTML file, which a browser opens from disk. Draws each observed
    step (train --observe-every) beside its prediction for --hardware. Reads no
    tensors; use meshwright inspect to compare checkpoints with their checksums.
    """
    with processes.reported_errors():
        from meshwright.cli.step_timelines import steps_in_time
        from meshwright.draw.html.run import run_page
        from meshwright.draw.plain import to_plain
        from meshwright.draw.run import chosen, drawn
        from meshwright.train.history import history

        run_history = history(run)
        steps = steps_in_time(run, run_history, hardware, network, step)
        first_shown = chosen(steps, step)
        if as_json:
            print(json.dumps(to_plain(run_history) | {"in_time": to_plain(steps)}))
            return
        file = html or run / "report.html"
        write_whole(file, run_page(run_history, steps, first_shown))
        console().print(drawn(run_history, steps, first_shown))
        console().print(f"\n{file}: a browser opens it from disk")
