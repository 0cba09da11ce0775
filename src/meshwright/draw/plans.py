"""Plans that were found, for the terminal: a table, why the first is the fastest, and why others are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.amounts import duration_text, size_text

if TYPE_CHECKING:
    from meshwright.hardware.profile import Profile
    from meshwright.search.find import Found, Proposal
    from meshwright.search.space import Candidate

_REJECTED = 6  # families that do not fit
_FRONTIER = 8  # plans between the smallest and the fastest


def drawn(found: Found, profile: Profile, file: str | None) -> RenderableType:
    """What a search found. ``file``: where the best plan was written."""
    heading = Text.assemble(
        (f"{found.considered:,} plans", "bold"),
        f" on {profile.name}, of which {found.fitting:,} fit {size_text(profile.memory)}",
    )
    parts: list[RenderableType] = [heading, Text(), _plans(found)]
    if any(proposal.measured is not None for proposal in found.plans):
        parts += [Text(), Text("predicted and measured", style="bold"), beside(found)]
    if found.why:
        parts += [Text(), Text("why the first", style="bold"), *(Text(f"  {line}") for line in found.why)]
    if found.rejected:
        parts += [Text(), Text("what does not fit", style="bold"), *_rejected(found)]
    if len(found.frontier) > 1:
        parts += [Text(), Text("less memory for more time (estimated)", style="bold"), _frontier(found)]
    parts += [Text(note, style="dim") for note in found.notes]
    best = found.plans[0].plan.dump().strip()
    parts += [Text(), Text(f"written to {file}" if file else "the first, as a plan", style="bold"), Text(best)]
    return Group(*parts)


def _plans(found: Found) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mesh", "microbatches", "schedule", "recompute"):
        table.add_column(name)
    for name in ("a step", "interval", "memory of a rank", "most of the time"):
        table.add_column(name, justify="right" if name != "most of the time" else "left")
    for proposal in found.plans:
        of = proposal.estimate.candidate
        table.add_row(
            str(proposal.plan.mesh), f"{of.microbatches} of {of.rows} row{'s' * (of.rows > 1)}", _schedule(of),
            _recompute(of), duration_text(proposal.seconds), _interval(proposal),
            size_text(proposal.nbytes), _most(proposal),
        )  # fmt: skip
    return table


def beside(found: Found) -> Table:
    """A line for each plan, the fastest that was measured first; errors: (predicted - measured) / measured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mesh")
    for name in ("predicted", "measured", "error", "memory", "measured", "error"):
        table.add_column(name, justify="right")
    for proposal in found.plans:
        predicted, run = proposal.prediction, proposal.measured
        if predicted is None or run is None:
            continue
        seconds, ran = predicted.seconds.seconds, run.seconds.seconds
        table.add_row(
            str(proposal.plan.mesh), duration_text(seconds), duration_text(ran), f"{100 * (seconds / ran - 1):+.0f} %",
            size_text(predicted.peak), size_text(run.peak), f"{100 * (predicted.peak / run.peak - 1):+.0f} %",
        )  # fmt: skip
    return table


def _schedule(of: Candidate) -> str:
    return "–" if of.pp == 1 else "1f1b" if of.chunks == 1 else f"interleaved × {of.chunks}"


def _recompute(of: Candidate) -> str:
    if not of.recompute:
        return "none"
    return f"all but {of.kept * of.pp} blocks" if of.kept else "blocks"


def _interval(proposal: Proposal) -> str:
    if proposal.prediction is None:
        return "estimated"
    seconds = proposal.prediction.seconds
    return f"{duration_text(seconds.low)} to {duration_text(seconds.high)}"


def _most(proposal: Proposal) -> str:
    """The largest terms of a step, in percent."""
    terms = sorted(proposal.terms.items(), key=lambda item: -item[1])[:3]
    shares = {term: seconds / proposal.seconds for term, seconds in terms}
    return ", ".join(f"{term} {share:.0%}" for term, share in shares.items() if share > 0.005)


def _rejected(found: Found) -> list[Text]:
    lines = [
        Text(
            f"  pp={r.pp}, tp={r.tp}: {r.count} plans; the smallest ({_named(r.least)}) needs {size_text(r.nbytes)} on a rank,"
            f" {size_text(r.nbytes - r.capacity)} too much"
        )
        for r in found.rejected[:_REJECTED]
    ]
    more = len(found.rejected) - _REJECTED
    return lines + ([Text(f"  and {more} more families", style="dim")] if more > 0 else [])


def _frontier(found: Found) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    step = max(1, len(found.frontier) // _FRONTIER)
    for estimate in found.frontier[::-1][::step][:_FRONTIER]:
        table.add_row(size_text(estimate.nbytes), duration_text(estimate.seconds), _named(estimate.candidate))
    return table


def _named(of: Candidate) -> str:
    sizes = {"pp": of.pp, "dp_replicate": of.dp_replicate, "dp_shard": of.dp_shard, "tp": of.tp}
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
    more = [
        f"{of.microbatches} microbatches" if of.microbatches > 1 else "",
        f"recompute {_recompute(of)}" if of.recompute else "",
    ]
    return ", ".join(filter(None, [mesh, *more, _schedule(of) if of.pp > 1 else ""]))
