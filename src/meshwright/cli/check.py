"""``meshwright check``: compares a plan with plain PyTorch on one device."""

from __future__ import annotations

import typer
from rich.text import Text

from meshwright.cli import processes
from meshwright.cli.given import Inputs
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
        inputs = Inputs.read(request, length=16, rows=lambda pieces: max(2 * pieces, 4))
        processes.print_search_notes(inputs)
        from meshwright.parity import check as compare

        with processes.workers(inputs) as workers:
            report = compare(inputs.target.build, inputs.target.batch, inputs.plan, loss=inputs.loss, workers=workers)
        console().print(Text(str(report)), soft_wrap=True)
    raise typer.Exit(0 if report.passed else 1)
