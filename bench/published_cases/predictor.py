"""Meshwright as a predictor of cases."""

from __future__ import annotations

from published_cases.case import Case, Predicted
from published_cases.models import build_model
from published_cases.plans import batch_of, plan_of
from published_cases.profiles import profile_of


def predict(case: Case) -> Predicted:
    """What ``meshwright.predict`` says of a case, on the profile of its machine with the row's network and capacity.

    Memory is that of the fullest rank. Only the first rank of each pipeline stage is asked: ranks that differ in other axes
    hold alike.
    """
    import meshwright as mw

    batch = batch_of(case.model, case.layout, "cpu" if case.layout.pp > 1 else "meta")
    profile = profile_of(case.machine, case.precision.compute)
    prediction = mw.predict(build_model(case.model), batch, plan_of(case), hardware=profile)
    step = prediction.seconds
    ranks = range(0, case.layout.devices, case.layout.devices // case.layout.pp)
    fullest = max(ranks, key=lambda rank: prediction.memory(rank).peak)
    active, (_, held) = prediction.memory(fullest).peak, prediction.device_bytes(fullest)
    return Predicted(step.seconds, step.low, step.high, active=active, reserved=held)


def fitted(table: str) -> str:
    """Where the constants come from, in a line of the report on ``table``."""
    return "hardware profiles, each with its sources: nothing is fitted here; each case by mw.predict"
