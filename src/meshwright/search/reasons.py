"""Why a plan is the fastest, and why others are not: texts and tables about the candidates of a search."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.amounts import duration_text, size_text
from meshwright.errors import Findings, PlanError
from meshwright.hardware.profile import Profile
from meshwright.search.estimate import CandidateEstimate
from meshwright.search.result import Proposal, RejectedFamily
from meshwright.search.space import Candidate, Family

MOST_TIMES = 11  # if a plan does not fit, the most powers of two by which the number of devices is multiplied


def why(plans: Sequence[Proposal]) -> Iterable[str]:
    """Texts about each plan but the first: how much longer it takes, and the term that differs most.

    If the intervals of its seconds and those of the first plan overlap, another text says what to measure to decide.
    """
    best, *others = plans
    for other in others:
        more = {term: other.terms.get(term, 0.0) - best.terms.get(term, 0.0) for term in {**best.terms, **other.terms}}
        term, seconds = max(more.items(), key=lambda item: item[1])
        name = _name(other)
        yield f"{name} takes {duration_text(other.seconds - best.seconds)} longer: {term} {seconds * 1e3:+,.1f} ms"
        if best.interval[1] >= other.interval[0]:
            differs = max(more, key=lambda term: abs(more[term]))
            surer = f"to be surer, run both, or measure {_decides(differs)}"
            yield f"{name} is within the interval of the first: {surer}"


def _name(proposal: Proposal) -> str:
    """A plan for a person: its mesh, and whether it has branches."""
    return f"{proposal.plan.mesh}{' with branches' if proposal.estimate.candidate.branches else ''}"


def _decides(term: str) -> str:
    """What to measure of the hardware, as text, if two plans differ most in ``term``."""
    if term == "tp" or term == "data" or term.startswith("communication"):
        return f"collectives of these sizes on these devices, for the profile's links ({term} differs most)"
    if "host" in term or "clip" in term or "optimizer" in term:
        return f"what the host takes for a function, for the profile's host ({term} differs most)"
    return f"products of these sizes on a device, for the profile's curves ({term} differs most)"


def frontier(fitting: Iterable[CandidateEstimate]) -> tuple[CandidateEstimate, ...]:
    """The Pareto frontier of bytes and seconds, smallest bytes first."""
    frontier: list[CandidateEstimate] = []
    for estimate in sorted(fitting, key=lambda e: (e.nbytes, e.seconds)):
        if not frontier or estimate.seconds < frontier[-1].seconds:
            frontier.append(estimate)
    return tuple(frontier)


def rejected(
    estimates: Sequence[CandidateEstimate], capacity: float, memory: Callable[[Candidate], float]
) -> tuple[RejectedFamily, ...]:
    """The families of which no candidate fits into ``capacity`` bytes. ``memory``: candidate → its peak bytes."""
    families: dict[Family, list[CandidateEstimate]] = {}
    for estimate in estimates:
        families.setdefault(estimate.candidate.family, []).append(estimate)
    fitting = {family for family, members in families.items() if min(e.nbytes for e in members) <= capacity}
    rejected = []
    for family, members in sorted(families.items()):
        least = min(members, key=lambda e: (e.nbytes, e.seconds))
        if least.nbytes > capacity:
            change = _change(least.candidate, capacity, memory, fitting)
            rejected.append(RejectedFamily(family, len(members), least.candidate, least.nbytes, capacity, change))
    return tuple(rejected)


def _change(
    candidate: Candidate, capacity: float, memory: Callable[[Candidate], float], families: Collection[Family]
) -> str:
    """The smallest change with which a candidate would fit, as text: a larger family that fits, or more devices to shard over.

    Args:
        capacity: bytes of memory of a device.
        memory: candidate → its peak bytes.
        families: the families that fit.

    Returns:
        A text; empty if no change was found.
    """
    larger = [f for f in families if f.pp >= candidate.pp and f.tp >= candidate.tp]
    nearest = min(larger, key=lambda f: (f.pp * f.tp, f), default=None)
    changes = [f"{nearest.words} on as many devices"] if nearest else []
    for times in (2**i for i in range(1, MOST_TIMES)):
        if memory(replace(candidate, dp_shard=times * candidate.dp_shard)) <= capacity:
            changes.append(f"{times} times the devices, dp_shard={times * candidate.dp_shard}")
            break
    return " or ".join(changes)


def nothing(
    estimates: Sequence[CandidateEstimate],
    memory: Callable[[Candidate], float],
    devices: int,
    rows: int,
    profile: Profile,
    options: Mapping[str, Any],
) -> PlanError:
    """The error for a search in which no plan fits, or no mesh divides the batch.

    Args:
        estimates: of all candidates.
        memory: candidate → its peak bytes.
        devices, rows: of a step.
        profile: the hardware.
        options: settings of every plan.
    """
    findings = Findings("this search")
    if not estimates:
        pieces = options.get("microbatches") or 1
        divided = f" and {pieces} microbatches" if pieces > 1 else ""
        findings.add(
            where="global_batch", given=f"{rows} rows on {devices} devices",
            required=f"rows that divide over the data ranks{divided} of some mesh", fix=f"global_batch={devices * pieces}",
        )  # fmt: skip
        return findings.error()
    least = min(estimates, key=lambda e: e.nbytes)
    capacity = (profile.memory - profile.context) / (1 + profile.reserve)
    change = _change(least.candidate, capacity, memory, ())
    findings.add(
        where="devices",
        given=f"{devices} of {profile.name}; of {len(estimates)} plans, the one that needs least needs"
        f" {size_text(round(least.nbytes))} on a device: {least.candidate.words}",
        required=f"at most {size_text(round(capacity))}" + (f": {change}" if change else ""),
        fix=f"devices={2 * devices}",
    )  # fmt: skip
    return findings.error()


def notes(
    options: Mapping[str, Any], *, pipelines: bool, concurrent: bool, coupling: str | None, best: Proposal
) -> Iterator[str]:
    """The notes of a search: what it did not look at, and branches.

    Args:
        options: settings of every plan.
        pipelines: whether pipelines were among the candidates.
        concurrent: whether parts of the model could run at the same time, in branches.
        coupling: why every data rank runs all rows; None if each runs its own.
        best: the first plan.
    """
    if coupling is not None:
        yield coupling
    if concurrent and not best.estimate.candidate.branches:
        yield "branches: some modules could run at the same time, which is estimated to be slower"
    if options.get("branches") == "auto" and not concurrent:
        yield "branches: auto: nothing in this model was found that could run at the same time"
    if not pipelines:
        yield "nothing is repeated, or nowhere can be cut: no pipelines were looked at"
    if options.get("schedule") == "gpipe":
        yield "schedule: gpipe: pipelines were estimated as 1f1b"
    if options.get("schedule") == "zero_bubble":
        yield "schedule: zero_bubble: what halves of backwards copy and keep besides is not estimated, but rehearsed (--verify)"
