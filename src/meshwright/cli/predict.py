"""``meshwright predict``: predicts memory and time of a training step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import processes
from meshwright.cli.options import (
    GlobalBatchOption,
    HardwareOption,
    JSONOption,
    LossOption,
    MeshOption,
    NetworkOption,
    PlanOption,
    RanksOption,
    SeqOption,
    SetOption,
    TargetArgument,
)  # fmt: skip
from meshwright.cli.request import Request
from meshwright.cli.subject import Subject, check_measurable, without_warnings
from meshwright.draw.console import console

if TYPE_CHECKING:
    from meshwright.prediction.result import Prediction


def predict(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    hardware: HardwareOption = None,
    network: NetworkOption = None,
    global_batch: GlobalBatchOption = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also run some steps in local processes, and print both with the prediction's errors"
        ),
    ] = False,
    as_json: JSONOption = False,
    loss: LossOption = None,
    seq: SeqOption = None,
    ranks: RanksOption = None,
) -> None:
    """Predict memory and time of a training step under a plan, before it runs.

    Runs the code of a step for one rank of each role, on tensors without values and
    without other ranks. A hardware profile turns the work into seconds. Starts no
    process and needs no GPU, so the mesh may have a thousand ranks. Exit code: 0 if
    the plan fits the devices' memory, 1 if not.
    """
    with processes.reported_errors():
        request = Request(
            target, mesh, plan, set_, loss, seq, ranks, hardware=hardware, network=network, global_batch=global_batch
        )
        subject = Subject.read(request, check_measurable if measure else lambda plan, profile: None)
        processes.print_search_notes(subject.inputs)
        with without_warnings():
            predicted = _predicted(subject)
        measured = _measured(subject) if measure else None
        if as_json:
            print(json.dumps(_data(subject, predicted, measured)))
        else:
            _print(subject, predicted, measured)
    raise typer.Exit(0 if predicted.fits else 1)


def _predicted(subject: Subject) -> Prediction:
    from meshwright.prediction.predict import predict as mw_predict

    inputs = subject.inputs
    return mw_predict(inputs.target.build, subject.batch, inputs.plan, hardware=subject.profile, loss=inputs.loss)


def _measured(subject: Subject) -> Prediction:
    """Memory and time of steps that run in local workers, each with as many threads as the profile was measured with."""
    from meshwright.prediction.predict import measure as mw_measure

    inputs = subject.inputs
    threads = max(1, processes.cores() // subject.profile.cores)
    with processes.workers(inputs, threads=threads) as workers:
        return mw_measure(inputs.target.build, subject.batch, inputs.plan, loss=inputs.loss, workers=workers)


def _data(subject: Subject, predicted: Prediction, measured: Prediction | None) -> dict[str, Any]:
    """The prediction and, if there is one, the measurement and the errors, as plain values for JSON."""
    from meshwright.runtime.rows.microbatches import amount_of

    unit, amount = amount_of(subject.batch)
    data = predicted.json() | {"unit": unit, "amount": amount, "rate": amount / predicted.seconds.seconds}
    if measured is None:
        return data
    return data | {"measured": measured.json(), "errors": predicted - measured}


def _print(subject: Subject, predicted: Prediction, measured: Prediction | None) -> None:
    from meshwright.draw.prediction import drawn, measured_table
    from meshwright.runtime.rows.microbatches import amount_of

    console().print(drawn(predicted, *amount_of(subject.batch)))
    if measured is not None:
        console().print(measured_table(predicted, measured))
