"""``meshwright compare``: compares two recordings of ``mw.record``, of one process and of many."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli import processes
from meshwright.cli.options import JSONOption
from meshwright.draw.console import console
from meshwright.errors import Findings


def compare(
    one: Annotated[Path, typer.Argument(metavar="ONE", help="The recording of one process", show_default=False)],
    many: Annotated[Path, typer.Argument(metavar="MANY", help="The recording of many processes", show_default=False)],
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="REGEX=TEXT", show_default=False, help="Rename tensors of MANY: replace REGEX by TEXT"
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest error, as a fraction of a tensor's largest element; default: by its type", show_default=False,
            min=0,
        ),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False,
            help="A second recording of one process, in another order of rows: its differences show the rounding",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a line for each tensor that differs")] = False,
    as_json: JSONOption = False,
) -> None:  # fmt: skip
    """Say which gradients of a run are wrong, by what factor, and what that usually means.

    ONE and MANY are folders that mw.record wrote around the same steps of your
    script, on one process and on many. No plan and no model is needed. Compares
    weights, rows, losses, gradients and updates by name. Exit code: 0 if all are
    equal, 1 if not. To compare two plans, use meshwright plan --compare.
    """
    with processes.reported_errors():
        from meshwright.draw.recordings import drawn
        from meshwright.recording.causes import PAGE
        from meshwright.recording.compare import compare_recordings

        verdict = compare_recordings(one, many, renames=_renames(map_ or ()), tolerance=tolerance, again=again)
        if as_json:
            print(json.dumps(verdict.to_dict(), indent=1))
        else:
            console().print(drawn(verdict, page=PAGE, every=every))
    if not verdict:
        raise typer.Exit(1)


def _renames(texts: list[str] | tuple[str, ...]) -> list[tuple[str, str]]:
    """Splits each ``REGEX=TEXT`` into (regular expression, replacement).

    Raises:
        PlanError: with every text that has no ``=`` or no valid regular expression.
    """
    findings, renames = Findings("this command"), []
    for text in texts:
        pattern, equals_sign, replacement = text.partition("=")
        try:
            re.compile(pattern)
        except re.error as error:
            findings.add(where="--map", given=text, required=f"a regular expression: {error}", fix="--map '^model\\.='")
            continue
        if not equals_sign or not pattern:
            findings.add(where="--map", given=text, required="REGEX=TEXT", fix="--map '^model\\.='")
        renames.append((pattern, replacement))
    findings.raise_if_any()
    return renames
