"""Meshwright as a predictor of cases."""

from __future__ import annotations

from published_cases.case import Case, Predicted
from published_cases.models import build_model
from published_cases.plans import batch_of, plan_of


def predict(case: Case) -> Predicted:
    """What ``meshwright.predict`` says of a case on the hardware profile of its machine.

    Memory is that of the fullest rank. Only the first rank of each pipeline stage is asked: ranks that differ in other axes
    hold alike. The links between nodes are the profile's; those of the row (``case.machine.network``) are not handed on.
    """
    import meshwright as mw

    prediction = mw.predict(build_model(case.model), batch_of(case), plan_of(case), hardware=case.machine.profile)
    step = prediction.seconds
    ranks = range(0, case.layout.devices, case.layout.devices // case.layout.pp)
    return Predicted(step.seconds, step.low, step.high, active=max(prediction.memory(rank).peak for rank in ranks))


def fitted(table: str) -> str:
    """Where the constants come from, in a line of the report on ``table``."""
    return "hardware profiles, each with its sources: nothing is fitted here"
