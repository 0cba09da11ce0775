"""``meshwright plan``: searches the fastest plans of a model for a number of devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli import processes
from meshwright.cli.comparison import print_comparison
from meshwright.cli.correction import keep_correction
from meshwright.cli.files import write_whole
from meshwright.cli.inputs import Problems
from meshwright.cli.options import (
    BestPlanOption,
    DevicesOption,
    GlobalBatchOption,
    HardwareOption,
    JSONOption,
    LossOption,
    MeasureOption,
    NetworkOption,
    NodesOption,
    PrecisionOption,
    SeqOption,
    SetOption,
    TargetArgument,
    TopOption,
    TwoPlansOption,
    VerifyOption,
)  # fmt: skip
from meshwright.cli.request import Request
from meshwright.cli.subject import Subject, check_measurable, without_warnings
from meshwright.draw.console import console
from meshwright.errors import Findings
from meshwright.plan import Plan

if TYPE_CHECKING:
    from meshwright.hardware.correction import Correction
    from meshwright.hardware.profile import Profile
    from meshwright.search.result import Proposal, SearchResult


@dataclass(frozen=True)
class Search:
    """The options of the search, as typed. None means that the option is absent.

    Attributes:
        devices: number of ranks to plan for.
        nodes: number of nodes of these devices.
        precision: the type to compute in.
        top: number of plans to return.
        verify: whether to rehearse these plans.
        out: the file to write the best plan to.
        measure: number of steps of each plan to run on this machine.
    """

    devices: int | None
    nodes: int | None
    precision: str | None
    top: int
    verify: bool
    out: Path | None
    measure: int | None

    def options(self) -> dict[str, Any]:
        """Option → value, for each option of the command line but ``--top``, which has a default."""
        options = {"--devices": self.devices, "--nodes": self.nodes, "--precision": self.precision,
                   "--verify": self.verify or None, "--out": self.out, "--measure": self.measure}  # fmt: skip
        return {option: value for option, value in options.items() if value is not None}


def plan(
    target: TargetArgument,
    devices: DevicesOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    hardware: HardwareOption = None,
    network: NetworkOption = None,
    global_batch: GlobalBatchOption = None,
    precision: PrecisionOption = None,
    top: TopOption = 3,
    verify: VerifyOption = False,
    out: BestPlanOption = None,
    measure: MeasureOption = None,
    compare: TwoPlansOption = None,
    as_json: JSONOption = False,
    loss: LossOption = None,
    seq: SeqOption = None,
) -> None:
    """Find the fastest plans that fit: mesh, pipeline, microbatches, recompute, branches.

    Rehearses a few blocks of the model with each size of tp, and estimates every plan
    from them by arithmetic. Shows the fastest plans, at most one of each size of pp and
    tp. Needs no GPU, and starts processes only with --measure. With --compare, predicts
    the plans of two files instead, and shows each term of the second against the first.
    """
    request = Request(
        target, "dp_shard=1", sets=set_, loss=loss, seq=seq, hardware=hardware, network=network,
        global_batch=global_batch,
    )  # fmt: skip
    search = Search(devices, nodes, precision, top, verify, out, measure)
    with processes.reported_errors():
        if compare is not None:
            print_comparison(compare, request, search.options(), as_json=as_json)
            return
        subject = _subject(request, search)
        with without_warnings(), console(stderr=as_json).status("reading the model", spinner="dots") as status:
            found = _best_plans(subject, request, search, status.update)
        kept = keep_correction(found.correction, subject.profile, request.hardware)
        if out is not None:
            write_whole(out, found.plans[0].plan.dump())
        if as_json:
            print(json.dumps(_data(found)))
        else:
            from meshwright.draw.plans import drawn

            console().print(drawn(found, subject.profile, str(out) if out is not None else None, kept))


def _subject(request: Request, search: Search) -> Subject:
    """The model, the batch and the profile. Raises PlanError with every problem of the request and of the search."""
    problems = Problems()
    problems.collect(lambda: _check(search.devices, search.precision))
    subject = problems.collect(
        lambda: Subject.read(request, lambda plan, profile: _check_measured(search.measure, search.devices, profile))
    )
    problems.raise_if_any()
    assert subject is not None
    return subject


def _best_plans(subject: Subject, request: Request, search: Search, tell: Callable[[str], None]) -> SearchResult:
    """Searches the plans, and with ``--measure`` also runs them here.

    Args:
        tell: called with a text about what is being done.
    """
    from meshwright.search.find import find_plans

    assert search.devices is not None
    inputs = subject.inputs
    found = find_plans(
        inputs.target.build, subject.batch, devices=search.devices, nodes=search.nodes, global_batch=request.global_batch,
        hardware=subject.profile, options={"precision": search.precision} if search.precision else None, loss=inputs.loss,
        top=search.top, verify=search.verify or search.measure is not None, tell=tell,
    )  # fmt: skip
    if search.measure is None:
        return found
    return _measured(subject, found, search.devices, request.global_batch, search.measure, tell)


def _measured(
    subject: Subject, found: SearchResult, devices: int, rows: int | None, steps: int, tell: Callable[[str], None]
) -> SearchResult:
    """The found plans with measurements: each runs ``steps`` steps in ``devices`` local processes.

    Each process has as many threads as the profile was measured with.
    """
    from meshwright.search.measured import measured

    inputs = replace(subject.inputs, plan=Plan({"dp_shard": devices}))
    threads = max(1, processes.cores() // subject.profile.cores)
    with processes.workers(inputs, threads=threads) as workers:
        return measured(
            found, inputs.target.build, subject.batch, steps=steps, workers=workers, global_batch=rows, loss=inputs.loss,
            tell=tell,
        )  # fmt: skip


def _check(devices: int | None, precision: str | None) -> None:
    """Raises PlanError if ``--devices`` is absent, or the precision is unknown."""
    findings = Findings("this command")
    known = ("bfloat16", "float32", "float64")
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
    """Raises PlanError if ``--measure`` cannot run so many devices here."""
    if measure is not None and devices is not None:
        check_measurable(Plan({"dp_shard": devices}), profile)


def _data(found: SearchResult) -> dict[str, Any]:
    """The result of the search as plain values, for JSON."""
    return {
        "considered": found.considered,
        "fitting": found.fitting,
        "plans": [
            {
                "plan": proposal.plan.dump(),
                "seconds": proposal.seconds,
                "bytes": proposal.nbytes,
                "interval": list(proposal.interval),
                "terms": dict(proposal.terms),
                "estimated": {"seconds": proposal.estimate.seconds, "bytes": proposal.estimate.nbytes},
                "prediction": proposal.prediction.json() if proposal.prediction is not None else None,
                **_measurement(proposal),
            }
            for proposal in found.plans
        ],
        "frontier": [{"seconds": e.seconds, "bytes": e.nbytes, "plan": e.candidate.plan({})} for e in found.frontier],
        "rejected": [
            {
                "pp": r.family.pp,
                "tp": r.family.tp,
                "branches": r.family.branches,
                "plans": r.count,
                "bytes": r.nbytes,
                "capacity": r.capacity,
                "least": r.least.plan({}),
                "change": r.change,
            }
            for r in found.rejected
        ],
        "why": list(found.why),
        "notes": list(found.notes),
        "correction": _correction(found.correction),
    }


def _correction(correction: Correction | None) -> dict[str, Any] | None:
    """What the runs say of the profile; None if no plan was run."""
    if correction is None:
        return None
    return {"factors": dict(correction.factors), "error": {"before": correction.before, "after": correction.after}}


def _measurement(proposal: Proposal) -> dict[str, Any]:
    """The measured numbers of a plan, and the signed errors of its prediction."""
    if proposal.measured is None or proposal.prediction is None:
        return {"measured": None, "errors": None}
    return {"measured": proposal.measured.json(), "errors": proposal.prediction - proposal.measured}
