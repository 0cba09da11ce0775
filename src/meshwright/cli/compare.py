"""``meshwright compare``: two recordings of ``mw.record``, judged."""

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
    many: Annotated[Path, typer.Argument(metavar="MANY", help="That of many processes", show_default=False)],
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="REGEX=TEXT", show_default=False, help="Change the names of MANY: what matches becomes the text"
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Of the largest element of a tensor; default: by its type", show_default=False, min=0),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False,
            help="A second recording of one process, in another order of rows: what it differs by is rounding",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="A line for each tensor that differs")] = False,
    as_json: JSONOption = False,
) -> None:  # fmt: skip
    """Say which gradients of a run are wrong, by what factor, and what that usually means.

    ONE and MANY are folders that mw.record wrote, around the same steps of a
    script of yours on one process and on many. No plan and no model is needed.
    Compares weights, rows, losses, gradients and updates by name; if something
    differs, the exit code is 1. For two plans: meshwright plan --compare.
    """
    with processes.told():
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
    """``REGEX=TEXT`` as pairs. Raises PlanError with every one that is none."""
    findings, renames = Findings("this command"), []
    for text in texts:
        pattern, found, replacement = text.partition("=")
        try:
            re.compile(pattern)
        except re.error as error:
            findings.add(where="--map", given=text, required=f"a regular expression: {error}", fix="--map '^model\\.='")
            continue
        if not found or not pattern:
            findings.add(where="--map", given=text, required="REGEX=TEXT", fix="--map '^model\\.='")
        renames.append((pattern, replacement))
    findings.raise_if_any()
    return renames
