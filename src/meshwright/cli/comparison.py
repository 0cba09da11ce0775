"""``meshwright plan --compare``: the predicted difference in time and memory between the plans of two files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.cli.inputs import Problems
from meshwright.cli.request import Request
from meshwright.cli.subject import Subject, plans_in, without_warnings
from meshwright.draw.console import console
from meshwright.errors import Findings


def print_comparison(
    files: tuple[Path, Path], request: Request, search_options: dict[str, Any], *, as_json: bool
) -> None:
    """Predicts the plans of two files, and prints the difference.

    Args:
        files: YAML files with a plan each.
        request: the model, the batch and the hardware that both plans are predicted for.
        search_options: options of the search that the command line has. Each is an error, since nothing is searched.
        as_json: print JSON.

    Raises:
        PlanError: with every problem of both files, the target, the profile and the options.
    """
    problems = Problems()
    problems.collect(lambda: _refuse(search_options))
    plans = problems.collect(lambda: plans_in([str(file) for file in files], request.sets))
    subject = problems.collect(lambda: Subject.read(request))
    problems.raise_if_any()
    assert plans is not None and subject is not None
    batch = subject.batch_of(plans, request.global_batch)
    from meshwright.draw.difference import drawn
    from meshwright.prediction.difference import compare

    with without_warnings(), console().status("rehearsing both plans", spinner="dots"):
        inputs = subject.inputs
        difference = compare(inputs.target.build, batch, plans, hardware=subject.profile, loss=inputs.loss)
    if as_json:
        print(json.dumps(difference.json()))
    else:
        console().print(drawn(difference, [str(file) for file in files]))


def _refuse(search_options: dict[str, Any]) -> None:
    """Raises PlanError if the command line has an option of the search."""
    findings = Findings("this command")
    for option, value in search_options.items():
        findings.add(
            where=option, given=f"{value}, and --compare" if value is not True else "given, and --compare",
            required="plans that are there, and no search", fix=f"leave out {option}",
        )  # fmt: skip
    findings.raise_if_any()
