"""``meshwright dryrun``: rehearses one step of one rank, for a mesh of any size."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from meshwright.cli import processes
from meshwright.cli.inputs import check_rank
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
from meshwright.cli.subject import Subject, without_warnings
from meshwright.draw.console import console


def dryrun(
    target: TargetArgument,
    rank: Annotated[int, typer.Option(help="The rank to rehearse")] = 0,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    hardware: HardwareOption = None,
    network: NetworkOption = None,
    global_batch: GlobalBatchOption = None,
    as_json: JSONOption = False,
    loss: LossOption = None,
    seq: SeqOption = None,
    ranks: RanksOption = None,
    device: Annotated[
        str | None, typer.Option(help="Also run the step on this device, without other ranks: cpu, cuda")
    ] = None,
) -> None:
    """Rehearse the step of one rank: its peak memory, its collectives, its functions.

    Runs the real code of that rank on the CPU, on tensors without values, for a mesh
    of any size; with --device also on real tensors: its peak memory and seconds there.
    Prints both beside the prediction. If the step reads a tensor's value on the host,
    which makes a GPU wait, the command names the model's line and exits with code 2.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler says on stderr that it begins and ends
    with processes.reported_errors():
        request = Request(
            target, mesh, plan, set_, loss, seq, ranks, device, hardware=hardware, network=network,
            global_batch=global_batch,
        )  # fmt: skip
        subject = Subject.read(request, lambda plan, profile: check_rank(plan.mesh, rank))
        processes.print_search_notes(subject.inputs)
        from meshwright.draw.prediction import rehearsed
        from meshwright.prediction.dryrun import dry_run
        from meshwright.prediction.host_reads import check_host_reads

        inputs = subject.inputs
        with without_warnings():
            run = dry_run(
                inputs.target.build, subject.batch, inputs.plan, rank,
                hardware=subject.profile, loss=inputs.loss, device=device,
            )  # fmt: skip
        if as_json:
            print(json.dumps(run.json()))
        else:
            console().print(rehearsed(run))
        check_host_reads(run.host_reads, rank)
