"""``meshwright show``: who holds what; in the terminal, as data, or as one HTML file."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.cli import processes
from meshwright.cli.files import write_whole
from meshwright.cli.given import Given, Problems, check_rank
from meshwright.cli.options import (
    GlobalBatchOption,
    HTMLOption,
    JSONOption,
    LossOption,
    MeshOption,
    NetworkOption,
    OtherPlansOption,
    ParameterOption,
    PicturesOption,
    PlanOption,
    PredictedHardwareOption,
    RanksOption,
    SeqOption,
    SetOption,
    ShownRankOption,
    TargetArgument,
)  # fmt: skip
from meshwright.cli.request import Request
from meshwright.cli.subject import Subject, plans_in, quiet
from meshwright.draw.console import console
from meshwright.draw.facts import ShardMap, shard_map
from meshwright.draw.report import Report, report
from meshwright.draw.terminal import render
from meshwright.errors import Findings
from meshwright.target import with_rows


def show(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    rank: ShownRankOption = None,
    parameter: ParameterOption = None,
    pictures: PicturesOption = None,
    html: HTMLOption = None,
    hardware: PredictedHardwareOption = None,
    network: NetworkOption = None,
    global_batch: GlobalBatchOption = None,
    compare: OtherPlansOption = None,
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
    request = Request(
        target, mesh, plan, set_, loss, seq, ranks, hardware=hardware, network=network, global_batch=global_batch
    )
    with processes.told():
        problems = Problems()
        problems.of(lambda: _check_options(request, html, compare, as_json=as_json))
        if hardware is not None:
            _write(html, _predicted(request, rank, compare or (), problems), rank, parameter)
            return
        with _seldom_collected():
            given, shards = _shard_map(request, rank, problems)
        _check_parameter(shards, parameter)
        if html is not None:
            _write(html, report(shards, title=given.target.spec), rank, parameter)
        elif as_json:
            print(json.dumps(_data(shards if rank is None else shard_map(shards.recipe, [rank]), parameter)))
        else:
            console().print(render(shards, rank=rank, parameter=parameter, pictures=pictures))


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """For the time of a block, Python's collector looks for garbage a tenth as often as in other commands. Most of what is made
    here stays (modules of torch and transformers, the model), holds no memory of tensors, and would be looked at in vain."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _shard_map(request: Request, rank: int | None, problems: Problems) -> tuple[Given, ShardMap]:
    """What the request names, and which rank holds what of it.

    Args:
        rank: which must be in the mesh.
        problems: those that are known already.
    """
    given = problems.of(lambda: Given.read(request, length=8, check=lambda plan: check_rank(plan.mesh, rank)))
    problems.raise_if_any()
    assert given is not None
    processes.tell_found(given)
    from meshwright.planned import make_recipe

    batch = with_rows(given.target.batch, given.pieces)
    return given, shard_map(make_recipe(given.target.build, given.plan, batch, given.loss))


def _predicted(request: Request, rank: int | None, compare: Sequence[Path], problems: Problems) -> Report:
    """What there is to see of a plan on some hardware, beside other plans of the same model and batch.

    Args:
        rank: which must be in the mesh.
        compare: files of the other plans.
        problems: those that are known already.
    """
    others = problems.of(lambda: plans_in([str(one) for one in compare], request.sets))
    subject = problems.of(lambda: Subject.read(request, lambda plan, profile: check_rank(plan.mesh, rank)))
    problems.raise_if_any()
    assert subject is not None and others is not None
    processes.tell_found(subject.given)
    from meshwright.prediction.predict import predict

    plans = [subject.given.plan, *others]
    batch = subject.batch_of(plans, request.global_batch) if others else subject.batch
    build, loss_of = subject.given.target.build, subject.given.loss
    with quiet(), console(stderr=True).status("rehearsing the step", spinner="dots"):
        predictions = [predict(build, batch, one, hardware=subject.profile, loss=loss_of) for one in plans]
    beside = dict(zip(map(str, compare), predictions[1:], strict=True))
    return report(predictions[0], title=subject.given.target.spec, others=beside)


def _write(file: Path | None, drawn: Report, rank: int | None, parameter: str | None) -> None:
    """The page, opened at a rank and a parameter. Raises PlanError if the model lacks the parameter."""
    from meshwright.draw.html.page import page

    assert file is not None
    _check_parameter(drawn.shards, parameter)
    write_whole(file, page(drawn, rank=rank or 0, parameter=parameter))
    ranks = drawn.recipe.mesh.size
    console().print(f"{file}: {drawn.recipe.mesh}, {ranks:,} rank{'s' * (ranks > 1)}; a browser opens it from disk")


def _check_options(request: Request, html: Path | None, compare: list[Path] | None, *, as_json: bool) -> None:
    """Raises PlanError if an option is given without the one that it belongs to."""
    hardware = request.hardware
    findings = Findings("this command")
    if hardware is not None and html is None:
        findings.add(
            where="--hardware", given=f"{hardware}, and no file to write",
            required="--html FILE; the numbers alone are those of meshwright predict", fix="--html out.html",
        )  # fmt: skip
    if as_json and html is not None:
        findings.add(where="--json", given="given, and --html", required="one of the two", fix="leave out --json")
    for option, value in (
        ("--network", request.network),
        ("--global-batch", request.global_batch),
        ("--compare", compare or None),
    ):
        if value is not None and hardware is None:
            findings.add(
                where=option, given="given, and no --hardware", required="devices to predict the step on",
                fix="--hardware h100",
            )  # fmt: skip
    findings.raise_if_any()


def _data(shards: ShardMap, parameter: str | None) -> dict[str, Any]:
    """The map as plain values; with a glob, of the parameters that fit."""
    data: dict[str, Any] = shards.to_dict()
    if parameter is not None:
        names = {name for row in shards.matching(parameter) for name in row.names}
        data["parameters"] = [line for line in data["parameters"] if line["name"] in names]
    return data


def _check_parameter(shards: ShardMap, parameter: str | None) -> None:
    """Raises PlanError if the model lacks the parameter."""
    findings = Findings("this command")
    try:
        if parameter is not None:
            shards.matching(parameter)
    except KeyError:
        near = shards.near(parameter or "")
        given = f"{parameter}, which fits no parameter"
        findings.add(
            where="--parameter", given=given, required=f"such as {', '.join(near)}", fix=f"--parameter {near[0]}"
        )
    findings.raise_if_any()
