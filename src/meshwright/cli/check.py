"""``meshwright check``: compares a plan with plain PyTorch on one device."""

from __future__ import annotations

import typer
from rich.text import Text

from meshwright.cli import processes
from meshwright.cli.inputs import Inputs
from meshwright.cli.options import (
    DeviceOption,
    LossOption,
    MeshOption,
    PlanOption,
    RanksOption,
    SeqOption,
    SetOption,
    TargetArgument,
)  # fmt: skip
from meshwright.cli.request import Request
from meshwright.draw.console import console

_LENGTH = 16  # tokens of a row if --seq is absent: few, and usual sizes of tp divide it
_ROWS_OF_PIECE = 2  # rows of each microbatch, as a wrong mean over rows is not seen with one
_FEWEST_ROWS = 4  # rows of the batch in all: so many also if the plan does not divide it


def check(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    loss: LossOption = None,
    device: DeviceOption = None,
    seq: SeqOption = None,
    ranks: RanksOption = None,
) -> None:
    """Check that a plan computes the same as one device.

    Compares the loss, every gradient and every parameter after three optimizer
    steps with plain PyTorch in one process, in float64, without dropout; then in the
    precision of the plan, against one device in the same types. Starts a local
    process for each rank. Exit code: 0 if all are equal, 1 if not.
    """
    with processes.reported_errors():
        request = Request(target, mesh, plan, set_, loss, seq, ranks, device)
        inputs = Inputs.read(request, length=_LENGTH, rows=lambda pieces: max(_ROWS_OF_PIECE * pieces, _FEWEST_ROWS))
        processes.print_search_notes(inputs)
        from meshwright.parity import check as compare

        with processes.workers(inputs) as workers:
            report = compare(inputs.target.build, inputs.target.batch, inputs.plan, loss=inputs.loss, workers=workers)
        console().print(Text(str(report)), soft_wrap=True)
    raise typer.Exit(0 if report.passed else 1)
