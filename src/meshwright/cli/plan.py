"""``meshwright plan``: the best plans of a model for so many devices, found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import processes
from meshwright.cli.comparison import compared
from meshwright.cli.files import write_whole
from meshwright.cli.given import Problems
from meshwright.cli.options import (
    GlobalBatchOption,
    HardwareOption,
    JSONOption,
    LossOption,
    NetworkOption,
    SeqOption,
    SetOption,
    TargetArgument,
)  # fmt: skip
from meshwright.cli.subject import Subject, check_measurable, quiet
from meshwright.draw.console import console
from meshwright.errors import Findings
from meshwright.plan import Plan

if TYPE_CHECKING:
    from meshwright.hardware.profile import Profile
    from meshwright.search.find import Found, Proposal


def plan(
    target: TargetArgument,
    devices: Annotated[
        int | None, typer.Option(help="Devices to plan for: ranks of the mesh", min=1, show_default=False)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that they stand on; default: as many as the profile's nodes take", min=1)
    ] = None,
    set_: SetOption = None,
    hardware: HardwareOption = None,
    network: NetworkOption = None,
    global_batch: GlobalBatchOption = None,
    precision: Annotated[
        str | None, typer.Option(help="bfloat16, float32 or float64; default: bfloat16, and float32 on a CPU")
    ] = None,
    top: Annotated[int, typer.Option(help="How many plans", min=1)] = 3,
    verify: Annotated[
        bool, typer.Option("--verify", help="Rehearse the plans that are found, as predict does: surer, and slower")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the best plan to this file, for train", show_default=False, dir_okay=False),
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            show_default=False,
            min=2,
            help="Also run so many steps of each plan in local processes; sort by what was measured",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="FILE FILE", show_default=False, help="Search nothing: show what a second plan takes more"
        ),
    ] = None,
    as_json: JSONOption = False,
    loss: LossOption = None,
    seq: SeqOption = None,
) -> None:
    """Find the fastest plans that fit: mesh, pipeline, microbatches, recompute.

    A few blocks of the model are rehearsed with each size of tp; every plan is then
    estimated by arithmetic. The best ones are shown, of one size of pp and tp each.
    Needs no GPU, and starts no process but for --measure. With --compare, the plans
    of two files are predicted, and each term of the second shown against the first.
    """
    given: dict[str, Any] = {"hardware": hardware, "network": network, "global_batch": global_batch, "seq": seq}
    with processes.told():
        if compare is not None:
            others = {"--devices": devices, "--nodes": nodes, "--precision": precision, "--verify": verify or None,
                      "--out": out, "--measure": measure}  # fmt: skip
            others = {option: value for option, value in others.items() if value is not None}
            compared(compare, target, set_, loss, others, as_json=as_json, **given)
            return
        problems = Problems()
        problems.of(lambda: _check(devices, precision))
        subject = problems.of(
            lambda: Subject.read(
                target, "dp_shard=1", None, set_, loss, ranks=None, **given,
                check=lambda plan, profile: _check_measured(measure, devices, profile),
            )
        )  # fmt: skip
        problems.raise_if_any()
        assert subject is not None and devices is not None
        with quiet(), console(stderr=as_json).status("reading the model", spinner="dots") as status:
            found = _found(
                subject, devices, nodes, global_batch, precision, top, verify=verify or measure is not None,
                tell=status.update,
            )  # fmt: skip
            if measure is not None:
                found = _measured(subject, found, devices, global_batch, measure, status.update)
        if out is not None:
            write_whole(out, found.plans[0].plan.dump())
        if as_json:
            print(json.dumps(_data(found)))
        else:
            from meshwright.draw.plans import drawn

            console().print(drawn(found, subject.profile, str(out) if out is not None else None))


def _found(
    subject: Subject, devices: int, nodes: int | None, rows: int | None, precision: str | None, top: int, **how: Any
) -> Found:
    from meshwright.search.find import find_plans

    given = subject.given
    return find_plans(
        given.target.build, subject.batch, devices=devices, nodes=nodes, global_batch=rows, hardware=subject.profile,
        options={"precision": precision} if precision else None, loss=given.loss, top=top, **how,
    )  # fmt: skip


def _measured(
    subject: Subject, found: Found, devices: int, rows: int | None, steps: int, tell: Callable[[str], None]
) -> Found:
    """Its plans, run in as many local processes, with as many threads each as the profile was measured with."""
    from meshwright.search.measured import measured

    given = replace(subject.given, plan=Plan({"dp_shard": devices}))
    threads = max(1, processes.cores() // subject.profile.cores)
    with processes.workers(given, threads=threads) as workers:
        return measured(
            found, given.target.build, subject.batch, steps=steps, workers=workers, global_batch=rows, loss=given.loss,
            tell=tell,
        )  # fmt: skip


def _check(devices: int | None, precision: str | None) -> None:
    findings, known = Findings("this command"), ("bfloat16", "float32", "float64")
    if devices is None:
        findings.add(
            where="--devices", given="nothing", required="how many devices to plan for; or --compare", fix="--devices 8"
        )
    if precision not in (None, *known):
        findings.add(
            where="--precision", given=str(precision), required=f"one of {', '.join(known)}", fix="--precision bfloat16"
        )
    findings.raise_if_any()


def _check_measured(measure: int | None, devices: int | None, profile: Profile) -> None:
    if measure is not None and devices is not None:
        check_measurable(Plan({"dp_shard": devices}), profile)


def _data(found: Found) -> dict[str, Any]:
    """It as plain values."""
    return {
        "considered": found.considered,
        "fitting": found.fitting,
        "plans": [
            {
                "plan": proposal.plan.dump(),
                "seconds": proposal.seconds,
                "bytes": proposal.nbytes,
                "terms": dict(proposal.terms),
                "estimated": {"seconds": proposal.estimate.seconds, "bytes": proposal.estimate.nbytes},
                "prediction": proposal.prediction.json() if proposal.prediction is not None else None,
                **_run(proposal),
            }
            for proposal in found.plans
        ],
        "frontier": [{"seconds": e.seconds, "bytes": e.nbytes, "plan": e.candidate.plan({})} for e in found.frontier],
        "rejected": [
            {
                "pp": r.pp,
                "tp": r.tp,
                "plans": r.count,
                "bytes": r.nbytes,
                "capacity": r.capacity,
                "least": r.least.plan({}),
            }
            for r in found.rejected
        ],
        "why": list(found.why),
        "notes": list(found.notes),
    }


def _run(proposal: Proposal) -> dict[str, Any]:
    """What was measured, and the signed errors of the prediction."""
    if proposal.measured is None or proposal.prediction is None:
        return {"measured": None, "errors": None}
    return {"measured": proposal.measured.json(), "errors": proposal.prediction - proposal.measured}
