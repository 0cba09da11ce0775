"""``find_plans``: searches the fastest plans of a model for a number of devices.

    model ──► costs of layers, at each size of tp   a few rehearsals for each size (layer_costs.py)
          ──► estimate of every candidate           arithmetic (estimate.py, space.py)
          ──► prediction of the best that fit       rehearsals by ``predict``, if asked for
          ──► sorted by predicted seconds

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
from meshwright.hardware.correction import Correction
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
from meshwright.search.estimate import CandidateEstimate, Estimator
from meshwright.search.layer_costs import DP_SHARD, MANY_ROWS, LayerCosts
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.space import Candidate, candidates, divisors

MOST_TIMES = 11  # if a plan does not fit, the most powers of two by which the number of devices is multiplied
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Proposal:
    """A plan that was found.

    Attributes:
        plan: a complete plan, ready to run.
        estimate: the search ranked the plan by it.
        prediction: of ``predict``; None if the plan was not rehearsed.
        measured: of a run on this machine; None if the plan was not run.
    """

    plan: Plan
    estimate: CandidateEstimate
    prediction: Prediction | None = None
    measured: Prediction | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step: the prediction; without it, the estimate."""
        return self.prediction.seconds.seconds if self.prediction is not None else self.estimate.seconds

    @property
    def nbytes(self) -> float:
        """Peak bytes of the rank that needs most memory: the prediction; without it, the estimate."""
        return float(self.prediction.peak) if self.prediction is not None else self.estimate.nbytes

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the seconds."""
        if self.prediction is not None:
            return self.prediction.seconds.low, self.prediction.seconds.high
        seconds = Estimate(self.estimate.seconds, self.estimate.scatter)
        return seconds.low, seconds.high

    @property
    def terms(self) -> Mapping[str, float]:
        """Name of a part of the step → its seconds."""
        return self.prediction.seconds.waterfall if self.prediction is not None else self.estimate.terms


@dataclass(frozen=True)
class RejectedFamily:
    """A family of plans, with equal pp and tp, of which none fits in memory.

    Attributes:
        pp, tp: the sizes of these axes.
        count: number of plans in the family.
        least: the plan of the family that needs least memory.
        nbytes: the bytes of a device that ``least`` needs.
        capacity: the bytes that a device has.
        change: the smallest change with which ``least`` would fit, as text; empty if there is none.
    """

    pp: int
    tp: int
    count: int
    least: Candidate
    nbytes: float
    capacity: float
    change: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        plans: the best plans, at most one of each family (pp, tp), fastest first.
        considered: number of candidates that were estimated.
        fitting: number of these that fit in memory.
        frontier: the Pareto frontier of seconds and bytes, by the estimates of the candidates that fit; smallest bytes first.
        rejected: families of which no plan fits.
        why: texts: why the first plan is faster than each of the others.
        notes: texts about the limits of the search.
        estimator: of all candidates.
        correction: what the measured seconds of the plans say of the profile; None if no plan was run.
    """

    plans: tuple[Proposal, ...]
    considered: int
    fitting: int
    frontier: tuple[CandidateEstimate, ...] = ()
    rejected: tuple[RejectedFamily, ...] = ()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    estimator: Estimator | None = field(default=None, repr=False, compare=False)
    correction: Correction | None = None


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
) -> SearchResult:
    """Searches the fastest plans of a model for a number of devices.

    Call it in a plain process, without a process group. It allocates no parameter.

    Args:
        build: makes the model.
        batch: a sample. Its rows are repeated up to ``global_batch``.
        devices: number of ranks.
        nodes: number of nodes of these ranks. Default: as many as the profile needs for them.
        global_batch: rows of a step. Default: the rows of ``batch``.
        hardware: a profile, its name, or the path of its YAML file.
        options: settings of every plan, such as ``precision`` and ``modules``, but not ``mesh``. The search does not vary
            settings that are in ``options``. Default: ``bfloat16``; on a CPU, ``float32``.
        loss: the loss function; see ``parallelize``.
        optimizer: makes the optimizer. Default: AdamW.
        max_norm: the largest gradient norm after clipping; None: no clipping.
        top: number of plans in the result.
        verify: whether ``predict`` rehearses the best plans: more accurate than an estimate, and slower.
        tell: is called with a text before each rehearsal.

    Raises:
        PlanError: an argument is wrong, or no plan fits.
    """
    profile = _on_nodes(hardware if isinstance(hardware, Profile) else read_profile(hardware), devices, nodes)
    options = dict(options or {"precision": "float32" if profile.cores else "bfloat16"})
    batch = plain(batch)
    rows, optimizer = global_batch or rows_of(batch), optimizer or adamw_on(profile)
    model = _Model(build, batch, rows, profile, options, loss, optimizer, max_norm)
    return _search(model, devices, top, verify=verify, tell=tell)


@dataclass(frozen=True)
class _Model:
    """The inputs of a search: see the arguments of ``find_plans``. ``rows``: of a step."""

    build: Build
    batch: Any
    rows: int
    profile: Profile
    options: Mapping[str, Any]
    loss: Loss | None
    optimizer: MakeOptimizer
    max_norm: float | None

    def estimated(self, estimate: CandidateEstimate, blocks: Sequence[str]) -> Proposal:
        """The plan of an estimated candidate. ``blocks``: the names of the repeated blocks."""
        return Proposal(Plan.parse(estimate.candidate.plan(self.options, blocks)), estimate)

    def proposed(
        self, estimate: CandidateEstimate, blocks: Sequence[str], tell: Callable[[str], None]
    ) -> Proposal | None:
        """The plan of an estimated candidate, rehearsed by ``predict``.

        A pipeline is also rehearsed with split backwards (zero bubble), if the options allow that schedule. The estimates
        do not include its extra copies and memory.

        Returns:
            None if the model cannot be cut into these stages, or if the plan does not fit by its prediction.
        """
        candidate = estimate.candidate
        estimates = [estimate]
        may_split = candidate.pp > 1 and candidate.chunks == 1 and not candidate.recompute
        if may_split and self.options.get("schedule") is None:
            estimates.append(replace(estimate, candidate=replace(candidate, split=True)))
        rehearsed = [self._rehearsed(each, blocks, tell) for each in estimates]
        proposals = [proposal for proposal in rehearsed if proposal is not None]
        return min(proposals, key=lambda proposal: proposal.seconds, default=None)

    def _rehearsed(
        self, estimate: CandidateEstimate, blocks: Sequence[str], tell: Callable[[str], None]
    ) -> Proposal | None:
        proposal = self.estimated(estimate, blocks)
        tell(f"rehearsing {proposal.plan.mesh}")
        try:
            prediction = predict(
                self.build, repeat_rows(self.batch, self.rows), proposal.plan, hardware=self.profile, loss=self.loss,
                optimizer=self.optimizer, max_norm=self.max_norm,
            )  # fmt: skip
        except PlanError:
            return None
        return replace(proposal, prediction=prediction) if prediction.fits else None


@dataclass(frozen=True)
class _Space:
    """All candidates of a search.

    Attributes:
        estimates: of every candidate.
        pipelines: whether pipelines are among the candidates; True also for one device, where there can be none.
        blocks: the names of the repeated blocks.
        estimator: of the candidates.
    """

    estimates: tuple[CandidateEstimate, ...]
    pipelines: bool
    blocks: tuple[str, ...]
    estimator: Estimator

    @classmethod
    def of_model(
        cls, model: _Model, devices: int, per_node: int, capacity: float, tell: Callable[[str], None]
    ) -> _Space:
        """Rehearses the model a few times at each size of tp, and estimates all candidates.

        Args:
            model: the inputs of the search.
            devices: number of ranks.
            per_node: devices of a node.
            capacity: bytes of memory of a device. If it is too small for all activations, candidates with selective
                recomputation are added: as many blocks as fit keep their activations.
            tell: see ``find_plans``.
        """
        options = model.options
        fixed = {key: value for key, value in options.items() if key not in SEARCHED}
        rehearsals = Rehearsals(
            model.build,
            repeat_rows(model.batch, MANY_ROWS * DP_SHARD),
            fixed,
            model.loss,
            model.optimizer,
            model.max_norm,
        )
        layer_costs = _layer_costs(rehearsals, devices, per_node, tell)
        blocks = max(of_tp.blocks for of_tp in layer_costs.values())
        alone = blocks and 1 in layer_costs  # a plan may ask for slices of tp
        sends = rehearsals.sends() if alone and devices > 1 else None
        recomputed = rehearsals.recomputed() if alone and options.get("recompute") != "none" else 0.0
        itemsize = _ITEMSIZE[options.get("precision", "float32")]
        estimator = Estimator(model.profile, layer_costs, recomputed, sends or 0.0, itemsize)
        staged = blocks if sends is not None else 0
        every = [
            *candidates(devices, per_node, model.rows, [*layer_costs], staged, options, recompute=bool(recomputed))
        ]
        if options.get("recompute") is None:
            selective = [estimator.memory.selected(candidate, capacity) for candidate in every]
            every += [candidate for candidate in selective if candidate is not None]
        return cls(
            tuple(map(estimator.estimate, every)),
            bool(staged) or devices == 1,
            rehearsals.blocks,
            estimator,
        )


def _search(model: _Model, devices: int, top: int, *, verify: bool, tell: Callable[[str], None]) -> SearchResult:
    """The best plans of all candidates. For the arguments, and the error if no plan fits, see ``find_plans``."""
    profile = model.profile
    capacity = (profile.memory - profile.context) / (1 + profile.reserve)
    space = _Space.of_model(model, devices, min(devices, profile.devices_per_node), capacity, tell)
    fitting = sorted((e for e in space.estimates if e.nbytes <= capacity), key=_order)
    proposed = partial(model.proposed, tell=tell) if verify else model.estimated
    plans = _best(fitting, partial(proposed, blocks=space.blocks), top)
    rejected = _rejected(space.estimates, capacity, space.estimator.memory.peak)
    if not plans:
        raise _nothing(space, devices, model.rows, profile, model.options)
    return SearchResult(
        tuple(plans), len(space.estimates), len(fitting), _frontier(fitting), rejected, tuple(_why(plans)),
        tuple(_notes(model.options, pipelines=space.pipelines)), space.estimator,
    )  # fmt: skip


def _notes(options: Mapping[str, Any], *, pipelines: bool) -> Iterator[str]:
    if not pipelines:
        yield "nothing is repeated, or nowhere can be cut: no pipelines were looked at"
    if options.get("sequence_parallel") is False:
        yield "sequence_parallel: false: plans with tp were estimated as if it were true"
    if options.get("schedule") == "gpipe":
        yield "schedule: gpipe: pipelines were estimated as 1f1b"
    if options.get("schedule") == "zero_bubble":
        yield "schedule: zero_bubble: what halves of backwards copy and keep besides is not estimated, but rehearsed (--verify)"


def _order(estimate: CandidateEstimate) -> tuple[float, float, str]:
    """Sort key: fastest first; among equally fast candidates, the smaller one first."""
    return estimate.seconds, estimate.nbytes, str(estimate.candidate)


def _on_nodes(profile: Profile, devices: int, nodes: int | None) -> Profile:
    """The profile for these devices: with ``nodes``, each node has an equal number of them.

    Raises:
        PlanError: the devices do not divide over the nodes; or there are several nodes, and the profile has no network.
    """
    findings = Findings("this search")
    if devices < 1:
        findings.add(where="devices", given=str(devices), required="at least 1", fix="devices=8")
    elif nodes is not None and (nodes < 1 or devices % nodes):
        findings.add(
            where="nodes", given=f"{devices} devices on {nodes} nodes", required="as many devices on each node",
            fix=f"nodes={max(n for n in divisors(devices) if n <= max(1, nodes))}",
        )  # fmt: skip
    findings.raise_if_any()
    if nodes is not None:
        profile = replace(profile, devices_per_node=devices // nodes)
    if devices > profile.devices_per_node and profile.network is None:
        findings.add(
            where="hardware",
            given=f"{profile.name}, which has no network, for {devices} devices on nodes of {profile.devices_per_node}",
            required="a profile with networks, by which nodes are connected", fix='hardware="h100"',
        )  # fmt: skip
    findings.raise_if_any()
    return profile


def _layer_costs(
    rehearsals: Rehearsals, devices: int, per_node: int, tell: Callable[[str], None]
) -> dict[int, LayerCosts]:
    """Size of tp → the costs of the layers, for the sizes that the model allows.

    Raises:
        PlanError: the model allows no size of tp. The error is that of the first size.
    """
    layer_costs: dict[int, LayerCosts] = {}
    problems: list[PlanError] = []
    for tp in divisors(devices):
        if tp <= per_node:
            tell(f"rehearsing a few blocks with tp={tp}")
            try:
                costs_of_tp = rehearsals.layer_costs(tp)
            except PlanError as problem:
                problems.append(problem)  # the model cannot be sharded over this size
                continue
            if costs_of_tp is not None:
                layer_costs[tp] = costs_of_tp
    if not layer_costs:
        raise problems[0]
    return layer_costs


def repeat_rows(batch: Any, rows: int) -> Any:
    """A batch of ``rows`` rows: the rows of the sample, repeated in their order or cut off."""
    sample_rows = rows_of(batch)
    if rows <= sample_rows:
        return take_rows(batch, 0, rows)
    index = torch.arange(rows) % sample_rows
    return mapped(lambda t: t[index] if t.dim() and t.shape[0] == sample_rows else t, batch)


def _best(
    fitting: Sequence[CandidateEstimate], proposed: Callable[[CandidateEstimate], Proposal | None], top: int
) -> list[Proposal]:
    """The fastest plan of each of ``top`` families, fastest first. (Within a family, plans differ little.)

    Args:
        fitting: the candidates that fit, fastest first.
        proposed: makes the plan of a candidate; None if the plan cannot be used.
        top: number of plans. At most four times as many candidates are tried.
    """
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


def _frontier(fitting: Iterable[CandidateEstimate]) -> tuple[CandidateEstimate, ...]:
    """The Pareto frontier of bytes and seconds, smallest bytes first."""
    frontier: list[CandidateEstimate] = []
    for estimate in sorted(fitting, key=lambda e: (e.nbytes, e.seconds)):
        if not frontier or estimate.seconds < frontier[-1].seconds:
            frontier.append(estimate)
    return tuple(frontier)


def _rejected(
    estimates: Sequence[CandidateEstimate], capacity: float, memory: Callable[[Candidate], float]
) -> tuple[RejectedFamily, ...]:
    """The families of which no candidate fits into ``capacity`` bytes. ``memory``: candidate → its peak bytes."""
    families: dict[tuple[int, int], list[CandidateEstimate]] = {}
    for estimate in estimates:
        families.setdefault(estimate.candidate.family, []).append(estimate)
    fitting = {family for family, members in families.items() if min(e.nbytes for e in members) <= capacity}
    rejected = []
    for (pp, tp), members in sorted(families.items()):
        least = min(members, key=lambda e: (e.nbytes, e.seconds))
        if least.nbytes > capacity:
            change = _change(least.candidate, capacity, memory, fitting)
            rejected.append(RejectedFamily(pp, tp, len(members), least.candidate, least.nbytes, capacity, change))
    return tuple(rejected)


def _change(
    candidate: Candidate, capacity: float, memory: Callable[[Candidate], float], families: Collection[tuple[int, int]]
) -> str:
    """The smallest change with which a candidate would fit, as text: a larger family that fits, or more devices to shard over.

    Args:
        capacity: bytes of memory of a device.
        memory: candidate → its peak bytes.
        families: (pp, tp) of the families that fit.

    Returns:
        A text; empty if no change was found.
    """
    larger = [f for f in families if f[0] >= candidate.pp and f[1] >= candidate.tp]
    nearest = min(larger, key=lambda f: (f[0] * f[1], f), default=None)
    changes = [f"pp={nearest[0]}, tp={nearest[1]} on as many devices"] if nearest else []
    for times in (2**i for i in range(1, MOST_TIMES)):
        if memory(replace(candidate, dp_shard=times * candidate.dp_shard)) <= capacity:
            changes.append(f"{times} times the devices, dp_shard={times * candidate.dp_shard}")
            break
    return " or ".join(changes)


def _why(plans: Sequence[Proposal]) -> Iterable[str]:
    """Texts about each plan but the first: how much longer it takes, and the term that differs most.

    If the intervals of its seconds and those of the first plan overlap, another text says what to measure to decide.
    """
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
    """What to measure of the hardware, as text, if two plans differ most in ``term``."""
    if term == "tp" or term == "data" or term.startswith("communication"):
        return f"collectives of these sizes on these devices, for the profile's links ({term} differs most)"
    if "host" in term or "clip" in term or "optimizer" in term:
        return f"what the host takes for a function, for the profile's host ({term} differs most)"
    return f"products of these sizes on a device, for the profile's curves ({term} differs most)"


def _nothing(space: _Space, devices: int, rows: int, profile: Profile, options: Mapping[str, Any]) -> PlanError:
    """The error for a search in which no plan fits, or no mesh divides the batch."""
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
    change = _change(least.candidate, capacity, space.estimator.memory.peak, ())
    findings.add(
        where="devices",
        given=f"{devices} of {profile.name}; of {len(estimates)} plans, the one that needs least needs"
        f" {size_text(round(least.nbytes))} on a device: {least.candidate.words}",
        required=f"at most {size_text(round(capacity))}" + (f": {change}" if change else ""),
        fix=f"devices={2 * devices}",
    )  # fmt: skip
    return findings.error()
