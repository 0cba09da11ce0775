"""``meshwright dryrun``: what one rank of a run of any size does in a step."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from meshwright.cli import processes
from meshwright.cli.given import check_rank
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
from meshwright.cli.subject import Subject, quiet
from meshwright.draw.console import console


def dryrun(
    target: TargetArgument,
    rank: Annotated[int, typer.Option(help="The rank that is rehearsed")] = 0,
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
) -> None:
    """Rehearse the step of one rank: its peak memory, its collectives, its functions.

    Runs the real code of that rank of a run of any size, on the CPU, on tensors
    without values, and prints the memory beside what predict says of its role. If the
    step reads a value on the host, for which a GPU would wait, the model's line is told
    and the exit code is 2.
    """
    with processes.told():
        request = Request(
            target, mesh, plan, set_, loss, seq, ranks, hardware=hardware, network=network, global_batch=global_batch
        )
        subject = Subject.read(request, lambda plan, profile: check_rank(plan.mesh, rank))
        processes.tell_found(subject.given)
        from meshwright.draw.prediction import rehearsed
        from meshwright.prediction.dryrun import dry_run
        from meshwright.prediction.host_reads import check_host_reads

        given = subject.given
        with quiet():
            run = dry_run(
                given.target.build, subject.batch, given.plan, rank, hardware=subject.profile, loss=given.loss
            )
        if as_json:
            print(json.dumps(run.json()))
        else:
            console().print(rehearsed(run))
        check_host_reads(run.host_reads, rank)
