"""``run_page``: the history of a run as one HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.draw.html.page import filled
from meshwright.draw.html.payload import timeline_payload
from meshwright.draw.plain import to_plain
from meshwright.draw.run import StepInTime, verdict_text
from meshwright.draw.timeline import differences

if TYPE_CHECKING:  # histories are read where torch is loaded
    from meshwright.train.history import History

_SCRIPTS = ("text", "page", "timeline", "run")


def run_page(history: History, step: StepInTime | None = None) -> str:
    """The file as text. It holds all that it shows, and names no other file and no address."""
    facts = to_plain(history) | {"observed": [one.step for one in history.observed], "inTime": None}
    if step is not None:
        predicted = step.predicted
        facts["inTime"] = {
            "step": step.step,
            "measured": timeline_payload(step.measured),
            "predicted": None if predicted is None else timeline_payload(predicted),
            "differences": [
                [kind, *pair] for kind, pair in differences(predicted or step.measured, step.measured).items()
            ],
        }
    verdict = verdict_text(history.comparisons) if history.comparisons else ""
    return filled("run.html.j2", _SCRIPTS, facts, run=history, step=step, verdict=verdict)
