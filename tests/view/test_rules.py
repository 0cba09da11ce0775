"""Every rule of the view, judged by the whole computation: results, writes, gradients, random numbers."""

from __future__ import annotations

import pointwise_cases
import rule_cases
import unruled_cases
from harness import Outcome, Table, run_cases

CASES = Table({**pointwise_cases.CASES, **rule_cases.CASES, **unruled_cases.CASES})


def try_cases(names: list[str]) -> Outcome:
    return run_cases([CASES[name] for name in names])
