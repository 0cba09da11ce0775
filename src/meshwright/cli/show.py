"""``meshwright show``: who holds what; in the terminal, as data, or as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli import processes
from meshwright.cli.files import write_whole
from meshwright.cli.given import Given, Problems, check_rank
from meshwright.cli.options import (
    GlobalBatchOption,
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
from meshwright.cli.subject import Subject, plans_in, quiet
from meshwright.draw.console import console
from meshwright.draw.terminal import render
from meshwright.errors import Findings
from meshwright.target import with_rows

if TYPE_CHECKING:
    from meshwright.draw.report import Report


def show(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    rank: Annotated[int | None, typer.Option(help="The rank whose shards are shown; default: 0")] = None,
    parameter: Annotated[
        str | None, typer.Option(help="Show only parameters that match this glob, with pictures")
    ] = None,
    pictures: Annotated[
        int | None,
        typer.Option(help="Number of pictures of which rank holds which part; default: 3 with --parameter", min=0),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            show_default=False,
            help="Write all pictures to this one file, which a browser opens from disk",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="With --html: also predict the step on these devices, as predict does (h100, a YAML file, cpu-local)",
        ),
    ] = None,
    network: NetworkOption = None,
    global_batch: GlobalBatchOption = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", show_default=False, help="With --hardware: also predict this plan; may be repeated"
        ),
    ] = None,
    as_json: JSONOption = False,
    loss: LossOption = None,
    seq: SeqOption = None,
    ranks: RanksOption = None,
) -> None:
    """Show which rank holds what of every parameter, and why.

    Each line shows how a parameter is sharded over each axis (rows, cols, Replicate),
    and why, if there is a reason. The model's own forward is run without values:
    no process starts, so the mesh may have a thousand ranks. With --html, the pictures
    are one file: mesh, parameters, timeline, memory, communication.
    """  # fmt: skip
    with processes.told():
        problems = Problems()
        problems.of(lambda: _check_options(html, hardware, network, global_batch, compare, as_json=as_json))
        if hardware is not None:
            _show_predicted(
                html, problems, compare or (), target, mesh, plan, set_, loss, hardware=hardware, network=network,
                global_batch=global_batch, seq=seq, ranks=ranks, rank=rank, parameter=parameter,
            )  # fmt: skip
            return
        given = problems.of(
            lambda: Given.read(
                target, mesh, plan, set_, loss, seq=seq, length=8, ranks=ranks,
                check=lambda plan: check_rank(plan.mesh, rank),
            )
        )  # fmt: skip
        problems.raise_if_any()
        assert given is not None
        processes.tell_found(given)
        from meshwright.draw.facts import shard_map
        from meshwright.draw.report import report
        from meshwright.planned import make_recipe

        batch = with_rows(given.target.batch, given.pieces)
        recipe = make_recipe(given.target.build, given.plan, batch, given.loss)
        everything = shard_map(recipe)
        _check_parameter(everything, parameter)
        if html is not None:
            _write(html, report(everything, title=given.target.spec), rank, parameter)
        elif as_json:
            print(json.dumps(_data(shard_map(recipe, None if rank is None else [rank]), parameter)))
        else:
            console().print(render(everything, rank=rank, parameter=parameter, pictures=pictures))


def _show_predicted(
    file: Path | None, problems: Problems, compare: Sequence[Path], target: str, mesh: str | None, plan: str | None,
    sets: Sequence[str] | None, loss: str | None, *, rank: int | None, parameter: str | None, **given: Any,
) -> None:  # fmt: skip
    """Writes what there is to see of a plan on some hardware, beside other plans of the same model and batch.

    Args:
        problems: those that are known already.
        compare: files of the other plans.
        given: as for ``Subject.read``.
    """
    from meshwright.draw.report import report
    from meshwright.prediction.predict import predict

    others = problems.of(lambda: plans_in([str(one) for one in compare], sets))
    subject = problems.of(
        lambda: Subject.read(
            target, mesh, plan, sets, loss, check=lambda plan, profile: check_rank(plan.mesh, rank), **given
        )
    )
    problems.raise_if_any()
    assert subject is not None and others is not None and file is not None
    processes.tell_found(subject.given)
    plans = [subject.given.plan, *others]
    batch = subject.batch_of(plans, given["global_batch"]) if others else subject.batch
    build, loss_of = subject.given.target.build, subject.given.loss
    with quiet(), console(stderr=True).status("rehearsing the step", spinner="dots"):
        predictions = [predict(build, batch, one, hardware=subject.profile, loss=loss_of) for one in plans]
    beside = dict(zip(map(str, compare), predictions[1:], strict=True))
    _write(file, report(predictions[0], title=subject.given.target.spec, others=beside), rank, parameter)


def _write(file: Path, report: Report, rank: int | None, parameter: str | None) -> None:
    """The page, opened at a rank and a parameter. Raises PlanError if the model lacks the parameter."""
    from meshwright.draw.html.page import page

    _check_parameter(report.shards, parameter)
    text = page(report, rank=rank or 0, parameter=parameter)
    write_whole(file, text)
    ranks = report.recipe.mesh.size
    console().print(f"{file}: {report.recipe.mesh}, {ranks:,} rank{'s' * (ranks > 1)}; a browser opens it from disk")


def _check_options(
    html: Path | None, hardware: str | None, network: str | None, rows: int | None, compare: list[Path] | None, *,
    as_json: bool,
) -> None:  # fmt: skip
    """Raises PlanError where an option is given without the one that it belongs to."""
    findings = Findings("this command")
    if hardware is not None and html is None:
        findings.add(
            where="--hardware", given=f"{hardware}, and no file to write",
            required="--html FILE; the numbers alone are those of meshwright predict", fix="--html out.html",
        )  # fmt: skip
    if as_json and html is not None:
        findings.add(where="--json", given="given, and --html", required="one of the two", fix="leave out --json")
    for option, value in (("--network", network), ("--global-batch", rows), ("--compare", compare or None)):
        if value is not None and hardware is None:
            findings.add(
                where=option, given="given, and no --hardware", required="devices to predict the step on",
                fix="--hardware h100",
            )  # fmt: skip
    findings.raise_if_any()


def _data(shard_map: Any, parameter: str | None) -> dict[str, Any]:
    """The map as plain values; with a glob, of the parameters that fit."""
    data: dict[str, Any] = shard_map.to_dict()
    if parameter is not None:
        names = {name for row in shard_map.matching(parameter) for name in row.names}
        data["parameters"] = [line for line in data["parameters"] if line["name"] in names]
    return data


def _check_parameter(shard_map: Any, parameter: str | None) -> None:
    """Raises PlanError if the model lacks the parameter."""
    findings = Findings("this command")
    try:
        if parameter is not None:
            shard_map.matching(parameter)
    except KeyError:
        near = shard_map.near(parameter)
        given = f"{parameter}, which fits no parameter"
        findings.add(
            where="--parameter", given=given, required=f"such as {', '.join(near)}", fix=f"--parameter {near[0]}"
        )
    findings.raise_if_any()
