"""Prints the result of a search for plans: a table, why the first plan is the fastest, and the plans that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import duration_text, size_text
from meshwright.draw.correction import correction_text

if TYPE_CHECKING:
    from meshwright.hardware.profile import Profile
    from meshwright.search.result import Proposal, SearchResult

_REJECTED = 6  # most families of plans that do not fit
_FRONTIER = 8  # most plans between the smallest and the fastest
_TERMS = 3  # most terms of a step that are named
_SMALL = 0.005  # terms with a smaller share of a step are left out: they would print as 0 %


def drawn(result: SearchResult, profile: Profile, file: str | None, kept: str = "") -> RenderableType:
    """The result of a search as a renderable for rich.

    Args:
        file: the best plan was written to it; None if to none.
        kept: what was done with the corrected profile; empty if there is none.
    """
    heading = Text.assemble(
        (f"{result.considered:,} plans", "bold"),
        f" on {profile.name}, of which {result.fitting:,} fit {size_text(profile.memory)}",
    )
    parts: list[RenderableType] = [heading, Text(), _plans(result)]
    if any(proposal.measured is not None for proposal in result.plans):
        parts += [Text(), Text("predicted and measured", style="bold"), measured_table(result)]
    if result.correction is not None:
        parts += [Text(), Text(f"what these runs say of {profile.name}", style="bold")]
        parts += [Text(f"  {line}") for line in (correction_text(result.correction), kept) if line]
    if result.why:
        parts += [Text(), Text("why the first", style="bold"), *(Text(f"  {line}") for line in result.why)]
    if result.rejected:
        parts += [Text(), Text("what does not fit", style="bold"), *_rejected(result)]
    if len(result.frontier) > 1:
        parts += [Text(), Text("less memory for more time (estimated)", style="bold"), _frontier(result)]
    parts += [Text(note, style="dim") for note in result.notes]
    best = result.plans[0].plan.dump().strip()
    parts += [Text(), Text(f"written to {file}" if file else "the first, as a plan", style="bold"), Text(best)]
    return Group(*parts)


def _plans(result: SearchResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mesh", "microbatches", "schedule", "recompute"):
        table.add_column(name)
    for name in ("a step", "interval", "memory of a rank", "most of the time"):
        table.add_column(name, justify="right" if name != "most of the time" else "left")
    for proposal in result.plans:
        candidate = proposal.estimate.candidate
        rows = candidate.rows
        mesh = f"{proposal.plan.mesh}{', branches' * candidate.branches}"
        table.add_row(
            mesh, f"{candidate.microbatches} of {rows} row{'s' * (rows > 1)}", candidate.schedule_words,
            candidate.recompute_words, duration_text(proposal.seconds), _interval(proposal),
            size_text(proposal.nbytes), _largest_terms(proposal),
        )  # fmt: skip
    return table


def measured_table(result: SearchResult) -> Table:
    """A line for each measured plan, the fastest first. Errors are (predicted - measured) / measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mesh")
    for name in ("predicted", "measured", "error", "memory", "measured", "error"):
        table.add_column(name, justify="right")
    for proposal in result.plans:
        predicted, run = proposal.prediction, proposal.measured
        if predicted is None or run is None:
            continue
        seconds, measured = predicted.seconds.seconds, run.seconds.seconds
        table.add_row(
            str(proposal.plan.mesh), duration_text(seconds), duration_text(measured),
            f"{100 * (seconds / measured - 1):+.0f} %",
            size_text(predicted.peak), size_text(run.peak), f"{100 * (predicted.peak / run.peak - 1):+.0f} %",
        )  # fmt: skip
    return table


def _interval(proposal: Proposal) -> str:
    low, high = proposal.interval
    return f"{duration_text(low)} to {duration_text(high)}" + (" estimated" if proposal.prediction is None else "")


def _largest_terms(proposal: Proposal) -> str:
    """The largest terms of a step, in percent."""
    terms = sorted(proposal.terms.items(), key=lambda item: -item[1])[:_TERMS]
    shares = {term: seconds / proposal.seconds for term, seconds in terms}
    return ", ".join(f"{term} {share:.0%}" for term, share in shares.items() if share > _SMALL)


def _rejected(result: SearchResult) -> list[Text]:
    lines = []
    for family in result.rejected[:_REJECTED]:
        smallest = f"the smallest ({family.least.words}) needs {size_text(family.nbytes)} on a rank"
        excess = size_text(family.nbytes - family.capacity)
        fits = f"; fits with {family.change}" if family.change else ""
        lines.append(Text(f"  {family.family.words}: {family.count} plans; {smallest}, {excess} too much{fits}"))
    more = len(result.rejected) - _REJECTED
    return lines + ([Text(f"  and {more} more families", style="dim")] if more > 0 else [])


def _frontier(result: SearchResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    step = max(1, len(result.frontier) // _FRONTIER)
    for estimate in result.frontier[::-1][::step][:_FRONTIER]:
        table.add_row(size_text(estimate.nbytes), duration_text(estimate.seconds), estimate.candidate.words)
    return table
