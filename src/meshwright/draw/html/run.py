"""``run_page``: the history of a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.amounts import duration_text
from meshwright.draw.html.page import filled
from meshwright.draw.html.payload import timeline_payload
from meshwright.draw.plain import to_plain
from meshwright.draw.run import StepInTime, step_names, verdict_text
from meshwright.draw.timeline import differences

if TYPE_CHECKING:  # histories are read where torch is loaded
    from meshwright.train.history import History

_SCRIPTS = ("text", "page", "timeline", "run")


def run_page(history: History, observed: Sequence[StepInTime] = (), at: int = -1) -> str:
    """The file as text. It refers to no other file and no address.

    Args:
        history: of the run.
        observed: timelines of steps, between which the reader can switch.
        at: index of the one that is shown first.
    """
    facts = to_plain(history) | {"observed": [step.step for step in history.observed]}
    facts["inTime"] = [
        _step_payload(step, f"{name}: {duration_text(step.measured.length)}")
        for name, step in zip(step_names(observed), observed, strict=True)
    ]
    facts["at"] = at % len(observed) if observed else 0
    verdict = verdict_text(history.comparisons) if history.comparisons else ""
    return filled("run.html.j2", _SCRIPTS, facts, run=history, steps=observed, at=at, verdict=verdict)


def _step_payload(step: StepInTime, name: str) -> dict[str, Any]:
    """The timelines of one step, as the page's scripts take them."""
    predicted, measured = step.predicted, step.measured
    return {
        "step": step.step,
        "name": name,
        "about": f"predicted for {step.hardware}" if predicted else f"not predicted: {step.why}",
        "measured": timeline_payload(measured),
        "predicted": None if predicted is None else timeline_payload(predicted),
        "differences": [[kind, *pair] for kind, pair in differences(predicted or measured, measured).items()],
    }
