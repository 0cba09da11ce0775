"""``meshwright show``: who holds what."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from meshwright.cli import processes
from meshwright.cli.given import Given, check_rank
from meshwright.cli.options import (
    JSONOption,
    LossOption,
    MeshOption,
    PlanOption,
    RanksOption,
    SeqOption,
    SetOption,
    TargetArgument,
)  # fmt: skip
from meshwright.draw.console import console
from meshwright.draw.terminal import render
from meshwright.errors import Findings
from meshwright.target import with_rows


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
    as_json: JSONOption = False,
    loss: LossOption = None,
    seq: SeqOption = None,
    ranks: RanksOption = None,
) -> None:
    """Show which rank holds what of every parameter, and why.

    Each line shows how a parameter is sharded over each axis (rows, cols, Replicate),
    and why, if there is a reason. The model's own forward is run without values:
    no process starts, so the mesh may have a thousand ranks.
    """
    with processes.told():
        given = Given.read(
            target,
            mesh,
            plan,
            set_,
            loss,
            seq=seq,
            length=8,
            ranks=ranks,
            check=lambda plan: check_rank(plan.mesh, rank),
        )
        processes.tell_found(given)
        from meshwright.api import make_recipe
        from meshwright.draw.facts import shard_map

        batch = with_rows(given.target.batch, given.pieces)
        recipe = make_recipe(given.target.build, given.plan, batch, given.loss)
        everything = shard_map(recipe)
        _check_parameter(everything, parameter)
        if as_json:
            print(json.dumps(_data(shard_map(recipe, None if rank is None else [rank]), parameter)))
        else:
            console().print(render(everything, rank=rank, parameter=parameter, pictures=pictures))


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
