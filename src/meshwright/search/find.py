"""``find_plans``: the best plans of a model for so many devices, with what they take, and why.

    model ──► pieces at each size of tp          a few rehearsals each (pieces.py)
          ──► every candidate, estimated         arithmetic (estimate.py, space.py)
          ──► the best that fit, predicted       rehearsed as ``predict`` does
          ──► sorted by what was predicted

Deterministic: the same model and hardware give the same plans in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from meshwright.amounts import duration_text, size_text
from meshwright.deferred import Build
from meshwright.errors import Findings, PlanError
from meshwright.hardware.profile import Estimate, Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan
from meshwright.plan.keys import SEARCHED
from meshwright.prediction.predict import adamw_on, predict
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.prediction.result import Prediction
from meshwright.runtime.rows.batch import mapped, plain
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.search.estimate import Estimated, Estimator
from meshwright.search.pieces import MANY, SHARD, Pieces
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.space import Candidate, candidates, divisors

MOST_TIMES = 11  # powers of two of devices that are looked at where a plan does not fit
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Proposal:
    """A plan that was found.

    Attributes:
        plan: runs as it is.
        estimate: what the search ranked it by.
        prediction: what ``predict`` says of it; None if it was not asked.
        measured: what a run on this machine took; None if it was not run.
    """

    plan: Plan
    estimate: Estimated
    prediction: Prediction | None = None
    measured: Prediction | None = None

    @property
    def seconds(self) -> float:
        """Of a step, as predicted, or estimated."""
        return self.prediction.seconds.seconds if self.prediction is not None else self.estimate.seconds

    @property
    def nbytes(self) -> float:
        """That live on the fullest rank, as predicted, or estimated."""
        return float(self.prediction.peak) if self.prediction is not None else self.estimate.nbytes

    @property
    def interval(self) -> tuple[float, float]:
        """The seconds' lower and upper end."""
        if self.prediction is not None:
            return self.prediction.seconds.low, self.prediction.seconds.high
        seconds = Estimate(self.estimate.seconds, self.estimate.scatter)
        return seconds.low, seconds.high

    @property
    def terms(self) -> Mapping[str, float]:
        """Of the seconds."""
        return self.prediction.seconds.waterfall if self.prediction is not None else self.estimate.terms


@dataclass(frozen=True)
class Rejected:
    """Plans of one family, sizes of pp and tp, of which none fits.

    Attributes:
        least: of its plans the one that needs least, and ``nbytes`` of memory it needs on a device, of ``capacity``.
        change: the nearest change with which it would fit, in words; empty if none was found.
    """

    pp: int
    tp: int
    count: int
    least: Candidate
    nbytes: float
    capacity: float
    change: str = ""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        plans: the best ones, of one size of pp and tp each, best first.
        considered: how many candidates were estimated; ``fitting``: how many of them fit.
        frontier: of those that fit, those than which none is both faster and smaller, by their estimates; smallest first.
        rejected: families of which none fits.
        why: what makes the first faster than the next ones, in words.
        notes: what a reader should know.
    """

    plans: tuple[Proposal, ...]
    considered: int
    fitting: int
    frontier: tuple[Estimated, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def find_plans(
    build: Build,
    batch: Any,
    *,
    devices: int,
    global_batch: int | None = None,
    hardware: str | Profile = "h100",
    nodes: int | None = None,
    options: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    top: int = 3,
    verify: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """The best plans for a model on so many devices. From a plain process; it allocates no parameter.

    Args:
        build: makes the model.
        batch: a sample; its rows are repeated to ``global_batch`` of them.
        devices: ranks; ``nodes``: that they stand on, default as many as the profile's nodes take.
        global_batch: rows of a step; default those of ``batch``.
        hardware: a profile, its name, or the path of its YAML file.
        options: what every plan has: ``precision``, entries of ``modules``, and any other setting but the mesh; what is said
            there is not varied. Default: ``bfloat16``, and ``float32`` on a CPU.
        top: how many plans.
        verify: whether ``predict`` rehearses them: surer than an estimate, and slower.
        tell: is told what is done next.

    Raises:
        PlanError: wrong arguments, or no plan that fits.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    options = dict(options or {"precision": "float32" if profile.cores else "bfloat16"})
    batch = plain(batch)
    rows, optimizer = global_batch or rows_of(batch), optimizer or adamw_on(profile)
    model = _Model(build, batch, rows, profile, options, loss, optimizer, max_norm)
    capacity = (profile.memory - profile.context) / (1 + profile.reserve)
    space = _Space.of(model, devices, _per_node(devices, nodes, profile), capacity, tell)
    fitting = sorted((e for e in space.estimates if e.nbytes <= capacity), key=_order)
    proposed = partial(model.proposed, tell=tell) if verify else model.estimated
    plans = _best(fitting, partial(proposed, blocks=space.blocks), top)
    rejected = _rejected(space.estimates, capacity, space.memory)
    if not plans:
        raise _nothing(space, devices, rows, profile, options)
    return Found(
        tuple(plans), len(space.estimates), len(fitting), _frontier(fitting), rejected, tuple(_why(plans)),
        tuple(_notes(options, pipelines=space.pipelines)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Model:
    """What plans are searched for: a model, its batch of ``rows``, the devices, and what every plan has."""

    build: Build
    batch: Any
    rows: int
    profile: Profile
    options: Mapping[str, Any]
    loss: Loss | None
    optimizer: MakeOptimizer
    max_norm: float | None

    def estimated(self, estimate: Estimated, blocks: Sequence[str]) -> Proposal:
        """The plan of a candidate. ``blocks``: the names of the repeated blocks."""
        return Proposal(Plan.parse(estimate.candidate.plan(self.options, blocks)), estimate)

    def proposed(self, estimate: Estimated, blocks: Sequence[str], tell: Callable[[str], None]) -> Proposal | None:
        """The plan of a candidate, rehearsed; None if the model cannot be cut so, or if it does not fit after all.

        A pipeline is rehearsed with backwards in halves as well, if the plan may have them: what these copy and keep besides is
        not in an estimate.
        """
        of = estimate.candidate
        ways = [estimate]
        if of.pp > 1 and of.chunks == 1 and not of.recompute and self.options.get("schedule") is None:
            ways.append(replace(estimate, candidate=replace(of, split=True)))
        found = [one for way in ways if (one := self._rehearsed(way, blocks, tell)) is not None]
        return min(found, key=lambda proposal: proposal.seconds, default=None)

    def _rehearsed(self, estimate: Estimated, blocks: Sequence[str], tell: Callable[[str], None]) -> Proposal | None:
        proposal = self.estimated(estimate, blocks)
        tell(f"rehearsing {proposal.plan.mesh}")
        try:
            prediction = predict(
                self.build, repeated(self.batch, self.rows), proposal.plan, hardware=self.profile, loss=self.loss,
                optimizer=self.optimizer, max_norm=self.max_norm,
            )  # fmt: skip
        except PlanError:
            return None
        return replace(proposal, prediction=prediction) if prediction.fits else None


@dataclass(frozen=True)
class _Space:
    """Every candidate, estimated; whether pipelines are among them, where there could be some; the names of the repeated
    blocks; and the bytes that any candidate needs."""

    estimates: tuple[Estimated, ...]
    pipelines: bool
    blocks: tuple[str, ...]
    memory: Callable[[Candidate], float]

    @classmethod
    def of(cls, model: _Model, devices: int, per_node: int, capacity: float, tell: Callable[[str], None]) -> _Space:
        """From a few rehearsals at each size of tp.

        Args:
            capacity: bytes that may live on a device. Where it is too small for all activations, as many blocks keep theirs as
                fit.
        """
        options = model.options
        fixed = {key: value for key, value in options.items() if key not in SEARCHED}
        rehearsals = Rehearsals(
            model.build, repeated(model.batch, MANY * SHARD), fixed, model.loss, model.optimizer, model.max_norm
        )
        pieces = _pieces(rehearsals, devices, per_node, tell)
        blocks = max(one.blocks for one in pieces.values())
        alone = blocks and 1 in pieces  # a plan may ask for slices of tp
        sends = rehearsals.sends() if alone and devices > 1 else None
        recomputed = rehearsals.recomputed() if alone and options.get("recompute") != "none" else 0.0
        itemsize = _ITEMSIZE[options.get("precision", "float32")]
        estimator = Estimator(model.profile, pieces, recomputed, sends or 0.0, itemsize)
        staged = blocks if sends is not None else 0
        every = [*candidates(devices, per_node, model.rows, [*pieces], staged, options, recompute=bool(recomputed))]
        if options.get("recompute") is None:
            every += [some for one in every if (some := estimator.selected(one, capacity)) is not None]
        return cls(
            tuple(map(estimator.estimate, every)), bool(staged) or devices == 1, rehearsals.blocks, estimator.memory
        )


def _notes(options: Mapping[str, Any], *, pipelines: bool) -> Iterator[str]:
    if not pipelines:
        yield "nothing is repeated, or nowhere can be cut: no pipelines were looked at"
    if options.get("sequence_parallel") is False:
        yield "sequence_parallel: false: plans with tp were estimated as if it were true"
    if options.get("schedule") == "gpipe":
        yield "schedule: gpipe: pipelines were estimated as 1f1b"
    if options.get("schedule") == "zero_bubble":
        yield "schedule: zero_bubble: what halves of backwards copy and keep besides is not estimated, but rehearsed (--verify)"


def _order(estimate: Estimated) -> tuple[float, float, str]:
    return estimate.seconds, estimate.nbytes, str(estimate.candidate)


def _per_node(devices: int, nodes: int | None, profile: Profile) -> int:
    findings = Findings("this search")
    if devices < 1:
        findings.add(where="devices", given=str(devices), required="at least 1", fix="devices=8")
    elif nodes is not None and (nodes < 1 or devices % nodes):
        findings.add(
            where="nodes", given=f"{devices} devices on {nodes} nodes", required="as many devices on each node",
            fix=f"nodes={max(1, devices // profile.devices_per_node)}",
        )  # fmt: skip
    findings.raise_if_any()
    return devices // nodes if nodes is not None else min(devices, profile.devices_per_node)


def _pieces(rehearsals: Rehearsals, devices: int, per_node: int, tell: Callable[[str], None]) -> dict[int, Pieces]:
    """Raises PlanError if the model takes no size of tp under these settings: the first one's."""
    found: dict[int, Pieces] = {}
    problems: list[PlanError] = []
    for tp in divisors(devices):
        if tp <= per_node:
            tell(f"rehearsing a few blocks with tp={tp}")
            try:
                one = rehearsals.pieces(tp)
            except PlanError as problem:
                problems.append(problem)  # the model does not divide so
                continue
            if one is not None:
                found[tp] = one
    if not found:
        raise problems[0]
    return found


def repeated(batch: Any, rows: int) -> Any:
    """A batch of so many rows: those of the sample, again and again."""
    have = rows_of(batch)
    if rows <= have:
        return take_rows(batch, 0, rows)
    index = torch.arange(rows) % have
    return mapped(lambda t: t[index] if t.dim() and t.shape[0] == have else t, batch)


def _best(fitting: Sequence[Estimated], proposed: Callable[[Estimated], Proposal | None], top: int) -> list[Proposal]:
    """The fastest, of as many families: within one, plans differ little."""
    plans: list[Proposal] = []
    families: set[tuple[int, int]] = set()
    tried = 0
    for estimate in fitting:
        if estimate.candidate.family in families:
            continue
        families.add(estimate.candidate.family)
        tried += 1
        if (proposal := proposed(estimate)) is not None:
            plans.append(proposal)
        if len(plans) == top or tried == 4 * top:
            break
    return sorted(plans, key=lambda proposal: proposal.seconds)


def _frontier(fitting: Iterable[Estimated]) -> tuple[Estimated, ...]:
    """Those than which none is both faster and smaller, smallest first."""
    found: list[Estimated] = []
    for estimate in sorted(fitting, key=lambda e: (e.nbytes, e.seconds)):
        if not found or estimate.seconds < found[-1].seconds:
            found.append(estimate)
    return tuple(found)


def _rejected(
    estimates: Sequence[Estimated], capacity: float, memory: Callable[[Candidate], float]
) -> tuple[Rejected, ...]:
    families: dict[tuple[int, int], list[Estimated]] = {}
    for estimate in estimates:
        families.setdefault(estimate.candidate.family, []).append(estimate)
    fitting = {family for family, those in families.items() if min(e.nbytes for e in those) <= capacity}
    rejected = []
    for (pp, tp), those in sorted(families.items()):
        least = min(those, key=lambda e: (e.nbytes, e.seconds))
        if least.nbytes > capacity:
            change = _change(least.candidate, capacity, memory, fitting)
            rejected.append(Rejected(pp, tp, len(those), least.candidate, least.nbytes, capacity, change))
    return tuple(rejected)


def _change(
    of: Candidate, capacity: float, memory: Callable[[Candidate], float], families: Collection[tuple[int, int]]
) -> str:
    """The nearest change with which a candidate would fit: the next larger family that does, or more devices to shard over."""
    larger = [f for f in families if f[0] >= of.pp and f[1] >= of.tp]
    nearest = min(larger, key=lambda f: (f[0] * f[1], f), default=None)
    ways = [f"pp={nearest[0]}, tp={nearest[1]} on as many devices"] if nearest else []
    for times in (2**i for i in range(1, MOST_TIMES)):
        if memory(replace(of, dp_shard=times * of.dp_shard)) <= capacity:
            ways.append(f"{times} times the devices, dp_shard={times * of.dp_shard}")
            break
    return " or ".join(ways)


def _why(plans: Sequence[Proposal]) -> Iterable[str]:
    """What the first has less of than each of the others: the largest difference of their terms; and what to measure where
    their intervals meet."""
    best, *others = plans
    for other in others:
        more = {term: other.terms.get(term, 0.0) - best.terms.get(term, 0.0) for term in {**best.terms, **other.terms}}
        term, seconds = max(more.items(), key=lambda item: item[1])
        yield f"{other.plan.mesh} takes {duration_text(other.seconds - best.seconds)} longer: {term} {seconds * 1e3:+,.1f} ms"
        if best.interval[1] >= other.interval[0]:
            differs = max(more, key=lambda term: abs(more[term]))
            surer = f"to be surer, run both, or measure {_decides(differs)}"
            yield f"{other.plan.mesh} is within the interval of the first: {surer}"


def _decides(term: str) -> str:
    """What to measure of the hardware, where two plans differ most in this term."""
    if term == "tp" or term == "data" or term.startswith("communication"):
        return f"collectives of these sizes on these devices, for the profile's links ({term} differs most)"
    if "host" in term or "clip" in term or "optimizer" in term:
        return f"what the host takes for a function, for the profile's host ({term} differs most)"
    return f"products of these sizes on a device, for the profile's curves ({term} differs most)"


def _nothing(space: _Space, devices: int, rows: int, profile: Profile, options: Mapping[str, Any]) -> PlanError:
    findings, estimates = Findings("this search"), space.estimates
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
    change = _change(least.candidate, capacity, space.memory, ())
    findings.add(
        where="devices",
        given=f"{devices} of {profile.name}; of {len(estimates)} plans, the one that needs least needs"
        f" {size_text(round(least.nbytes))} on a device: {least.candidate.words}",
        required=f"at most {size_text(round(capacity))}" + (f": {change}" if change else ""),
        fix=f"devices={2 * devices}",
    )  # fmt: skip
    return findings.error()
