"""``meshwright plan --compare``: what the plan of one file takes more or less than that of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.cli.given import Problems
from meshwright.cli.request import Request
from meshwright.cli.subject import Subject, plans_in, quiet
from meshwright.draw.console import console
from meshwright.errors import Findings


def compared(files: tuple[Path, Path], request: Request, others: dict[str, Any], *, as_json: bool) -> None:
    """Predicts both plans, and prints the difference.

    Args:
        others: options of the search that were given: they say nothing of plans that are there.

    Raises PlanError with every problem of both files, the target, the profile and the options.
    """
    problems = Problems()
    problems.of(lambda: _check_others(others))
    plans = problems.of(lambda: plans_in([str(file) for file in files], request.sets))
    subject = problems.of(lambda: Subject.read(request))
    problems.raise_if_any()
    assert plans is not None and subject is not None
    batch = subject.batch_of(plans, request.global_batch)
    from meshwright.draw.difference import drawn
    from meshwright.prediction.difference import compare

    with quiet(), console().status("rehearsing both plans", spinner="dots"):
        build, loss_of = subject.given.target.build, subject.given.loss
        difference = compare(build, batch, plans, hardware=subject.profile, loss=loss_of)
    if as_json:
        print(json.dumps(difference.json()))
    else:
        console().print(drawn(difference, [str(file) for file in files]))


def _check_others(others: dict[str, Any]) -> None:
    findings = Findings("this command")
    for option, value in others.items():
        findings.add(
            where=option, given=f"{value}, and --compare" if value is not True else "given, and --compare",
            required="plans that are there, and no search", fix=f"leave out {option}",
        )  # fmt: skip
    findings.raise_if_any()
