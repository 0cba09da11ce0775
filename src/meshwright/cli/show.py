"""``meshwright show``: which rank holds which part of each parameter; in the terminal, as JSON, or as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cli import processes
from meshwright.cli.files import write_whole
from meshwright.cli.inputs import Inputs, Problems, check_nodes, check_rank
from meshwright.cli.options import (
    GlobalBatchOption,
    HTMLOption,
    JSONOption,
    LossOption,
    MeshOption,
    NetworkOption,
    OnNodesOption,
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
from meshwright.cli.subject import Subject, plans_in, without_warnings
from meshwright.draw.console import console
from meshwright.draw.facts import ShardMap, shard_map
from meshwright.draw.plain import to_plain
from meshwright.draw.report import Report, report
from meshwright.draw.terminal import render
from meshwright.draw.topology import topology
from meshwright.errors import Findings
from meshwright.garbage import rare_garbage_collection
from meshwright.plan import Plan
from meshwright.target import with_rows

_LENGTH = 8  # tokens of a row if --seq is absent: which rank holds what does not depend on the length


def show(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    rank: ShownRankOption = None,
    parameter: ParameterOption = None,
    pictures: PicturesOption = None,
    nodes: OnNodesOption = None,
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
    and the reason, if there is one. Runs the model's own forward without values, and
    starts no process, so the mesh may have a thousand ranks. With --html, writes one
    file of pictures: mesh, parameters, timeline, memory, communication.
    """  # fmt: skip
    request = Request(
        target, mesh, plan, set_, loss, seq, ranks, hardware=hardware, network=network, global_batch=global_batch,
        nodes=nodes,
    )  # fmt: skip
    with processes.reported_errors():
        problems = Problems()
        problems.collect(lambda: _check_options(request, html, compare, nodes, as_json=as_json))
        if hardware is not None:
            _write(html, _predicted(request, rank, compare or (), problems), rank, parameter)
            return
        with rare_garbage_collection():
            inputs, shards = _shard_map(request, rank, problems)
        _check_parameter(shards, parameter)
        per_node = shards.mesh.size // nodes if nodes else 0
        if html is not None:
            _write(html, report(shards, title=inputs.target.spec, per_node=per_node), rank, parameter)
        elif as_json:
            shown = shards if rank is None else shard_map(shards.recipe, [rank])
            print(json.dumps(_data(shown, parameter, per_node)))
        else:
            console().print(render(shards, rank=rank, parameter=parameter, pictures=pictures, per_node=per_node))


def _shard_map(request: Request, rank: int | None, problems: Problems) -> tuple[Inputs, ShardMap]:
    """Reads the inputs, plans the model, and computes which rank holds which part of each parameter.

    Args:
        rank: of ``--rank``; must be in the mesh.
        problems: the problems that are known already.

    Raises:
        PlanError: with every problem, those in ``problems`` among them.
    """

    def check(plan: Plan) -> None:
        wrong = Problems()
        wrong.collect(lambda: check_rank(plan.mesh, rank))
        wrong.collect(lambda: check_nodes(plan.mesh, request.nodes))
        wrong.raise_if_any()

    inputs = problems.collect(lambda: Inputs.read(request, length=_LENGTH, check=check))
    problems.raise_if_any()
    assert inputs is not None
    processes.print_search_notes(inputs)
    from meshwright.planned import make_recipe

    batch = with_rows(inputs.target.batch, inputs.pieces)
    return inputs, shard_map(make_recipe(inputs.target.build, inputs.plan, batch, inputs.loss))


def _predicted(request: Request, rank: int | None, compare: Sequence[Path], problems: Problems) -> Report:
    """The predicted step of a plan on a profile, beside the predictions of other plans for the same model and batch.

    Args:
        rank: of ``--rank``; must be in the mesh.
        compare: YAML files of the other plans.
        problems: the problems that are known already.

    Raises:
        PlanError: with every problem, those in ``problems`` among them.
    """
    others = problems.collect(lambda: plans_in([str(file) for file in compare], request.sets))
    subject = problems.collect(lambda: Subject.read(request, lambda plan, profile: check_rank(plan.mesh, rank)))
    problems.raise_if_any()
    assert subject is not None and others is not None
    processes.print_search_notes(subject.inputs)
    from meshwright.prediction.predict import predict

    plans = [subject.inputs.plan, *others]
    batch = subject.batch_of(plans, request.global_batch) if others else subject.batch
    inputs = subject.inputs
    with without_warnings(), console(stderr=True).status("rehearsing the step", spinner="dots"):
        predictions = [
            predict(inputs.target.build, batch, plan, hardware=subject.profile, loss=inputs.loss) for plan in plans
        ]
    predictions_by_file = {str(file): prediction for file, prediction in zip(compare, predictions[1:], strict=True)}
    return report(predictions[0], title=inputs.target.spec, others=predictions_by_file)


def _write(file: Path | None, drawn: Report, rank: int | None, parameter: str | None) -> None:
    """Writes the HTML page, which opens at a rank and a parameter. Raises PlanError if the model lacks the parameter."""
    from meshwright.draw.html.page import page

    assert file is not None
    _check_parameter(drawn.shards, parameter)
    write_whole(file, page(drawn, rank=rank or 0, parameter=parameter))
    ranks = drawn.recipe.mesh.size
    console().print(f"{file}: {drawn.recipe.mesh}, {ranks:,} rank{'s' * (ranks > 1)}; a browser opens it from disk")


def _check_options(
    request: Request, html: Path | None, compare: list[Path] | None, nodes: int | None, *, as_json: bool
) -> None:
    """Raises PlanError for options that do not go together, and for options that need another one."""
    hardware = request.hardware
    findings = Findings("this command")
    if hardware is not None and html is None:
        findings.add(
            where="--hardware", given=f"{hardware}, and no file to write",
            required="--html FILE; for the numbers alone, use meshwright predict", fix="--html out.html",
        )  # fmt: skip
    if as_json and html is not None:
        findings.add(where="--json", given="given, and --html", required="one of the two", fix="leave out --json")
    if nodes is not None and hardware is not None:
        findings.add(
            where="--nodes", given=f"{nodes}, and --hardware {hardware}",
            required="one of the two: the profile has the number of devices in a node", fix="leave out --nodes",
        )  # fmt: skip
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


def _data(shards: ShardMap, parameter: str | None, per_node: int) -> dict[str, Any]:
    """The map as plain values, for JSON. With a glob, only the parameters that match it. ``per_node``: 0, or the number of
    ranks on a node."""
    data: dict[str, Any] = shards.to_dict()
    if per_node:
        data["topology"] = to_plain(topology(shards.mesh, per_node))
    if parameter is not None:
        names = {name for shard in shards.matching(parameter) for name in shard.names}
        data["parameters"] = [line for line in data["parameters"] if line["name"] in names]
    return data


def _check_parameter(shards: ShardMap, parameter: str | None) -> None:
    """Raises PlanError if no parameter of the model matches the glob."""
    findings = Findings("this command")
    try:
        if parameter is not None:
            shards.matching(parameter)
    except KeyError:
        similar = shards.near(parameter or "")
        findings.add(
            where="--parameter", given=f"{parameter}, which matches no parameter",
            required=f"such as {', '.join(similar)}", fix=f"--parameter {similar[0]}",
        )  # fmt: skip
    findings.raise_if_any()
