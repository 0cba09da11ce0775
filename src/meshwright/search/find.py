"""``find_plans``: searches the fastest plans of a model for a number of devices.

    model ──► costs of layers, at each size of tp   a few rehearsals for each size (layer_costs.py)
          ──► costs of its branches                 if it has any (branch_costs.py)
          ──► estimate of every candidate           arithmetic (estimate.py, space.py)
          ──► prediction of the best that fit       rehearsals by ``predict``, if asked for
          ──► sorted by predicted seconds

Deterministic: the same model and hardware give the same plans in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshwright.deferred import Build
from meshwright.errors import Findings, PlanError
from meshwright.generators import random_numbers_kept
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan
from meshwright.plan.keys import SEARCHED
from meshwright.prediction.predict import adamw_on, predict
from meshwright.prediction.rehearsal import MakeOptimizer
from meshwright.runtime.rows.batch import mapped, plain
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.search import reasons
from meshwright.search.branch_costs import BranchCosts
from meshwright.search.estimate import CandidateEstimate, Estimator
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.result import Proposal, SearchResult
from meshwright.search.shardings import Shardings
from meshwright.search.sizes import DP_SHARD, MANY_ROWS
from meshwright.search.space import Candidate, Family, Sharding, candidates, divisors
from meshwright.search.stages import StageCuts

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8}


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
            settings that are in ``options``; ``branches: auto`` lets it place branches where they pay, as if it were absent.
            Default: ``bfloat16``; on a CPU, ``float32``.
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
    with random_numbers_kept():
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

    def rehearsals(self) -> Rehearsals:
        """Rehearsals of this model, with the settings that the search does not vary."""
        fixed = {key: value for key, value in self.options.items() if key not in SEARCHED or key == "sequence_parallel"}
        if fixed.get("rows") == "whole":
            del fixed["rows"]  # rehearsals are of few rows on each data rank
        rows = repeat_rows(self.batch, MANY_ROWS * DP_SHARD)
        accelerator = not self.profile.cores
        return Rehearsals(self.build, rows, fixed, self.loss, self.optimizer, self.max_norm, accelerator=accelerator)

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
        concurrent: whether parts of the model could run at the same time, in branches.
        coupling: why every data rank runs all rows; None if each runs its own.
        blocks: the names of the repeated blocks.
        estimator: of the candidates.
    """

    estimates: tuple[CandidateEstimate, ...]
    pipelines: bool
    concurrent: bool
    coupling: str | None
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
        options, rehearsals = model.options, model.rehearsals()
        itemsize = _ITEMSIZE[options.get("precision", "float32")]
        shardings = Shardings(rehearsals, model.profile, options, itemsize, tell)
        layer_costs = shardings.plain(tp for tp in divisors(devices) if tp <= per_node)
        tps = sorted(sharding.tp for sharding in layer_costs)
        blocks = max(costs.blocks for costs in layer_costs.values())
        alone = blocks and 1 in tps  # a plan may ask for slices of tp
        parts = rehearsals.stage_parts() if alone and devices > 1 else None
        recomputed = rehearsals.recomputed() if alone and options.get("recompute") != "none" else 0.0
        cuts = StageCuts(parts, blocks, model.rows) if parts else None
        estimator_of = partial(
            Estimator, model.profile, recomputed=recomputed, sends=parts.received if parts else 0.0, itemsize=itemsize,
            cuts=cuts,
        )  # fmt: skip
        concurrent = _may_have_branches(rehearsals, tps, options)
        branches = _branch_costs(rehearsals, tps, partial(estimator_of, layer_costs), tell) if concurrent else {}
        staged = blocks if parts is not None else 0
        coupling = rehearsals.coupling() if devices > 1 and 1 in tps and options.get("rows") != "whole" else None

        def estimated(costs: Mapping[Sharding, LayerCosts]) -> tuple[Estimator, tuple[CandidateEstimate, ...]]:
            """All candidates with these shardings."""
            estimator = estimator_of(costs, branches=branches)
            every = [
                *candidates(
                    devices, per_node, model.rows, tps, staged, options, recompute=bool(recomputed),
                    coupled=coupling is not None or options.get("rows") == "whole", branches=branches,
                    shardings=[each for each in costs if each not in layer_costs],
                )
            ]  # fmt: skip
            if options.get("recompute") is None:
                selective = (estimator.memory.selected(candidate, capacity) for candidate in every)
                every = [*every, *(candidate for candidate in selective if candidate is not None)]
            return estimator, tuple(map(estimator.estimate, every))

        estimator, estimates = estimated(layer_costs)
        if others := shardings.others(layer_costs, _may_win(estimates, estimator, capacity)):
            estimator, estimates = estimated({**layer_costs, **others})
        return cls(estimates, bool(staged) or devices == 1, concurrent, coupling, rehearsals.blocks, estimator)


def _may_win(estimates: Sequence[CandidateEstimate], estimator: Estimator, capacity: float) -> list[int]:
    """The sizes of tp with which a plan may be the fastest that fits if its layers are sharded otherwise."""
    fitting = [estimate for estimate in estimates if estimate.nbytes <= capacity]
    fastest = min((estimate.seconds for estimate in fitting), default=0.0)
    return sorted(
        {
            estimate.candidate.tp
            for estimate in fitting
            if estimate.candidate.sharding.tp > 1 and estimator.at_best(estimate) < fastest
        }
    )


def _search(model: _Model, devices: int, top: int, *, verify: bool, tell: Callable[[str], None]) -> SearchResult:
    """The best plans of all candidates. For the arguments, and the error if no plan fits, see ``find_plans``."""
    profile = model.profile
    capacity = (profile.memory - profile.context) / (1 + profile.reserve)
    space = _Space.of_model(model, devices, min(devices, profile.devices_per_node), capacity, tell)
    fitting = sorted((e for e in space.estimates if e.nbytes <= capacity), key=_order)
    proposed = partial(model.proposed, tell=tell) if verify else model.estimated
    plans = _best(fitting, partial(proposed, blocks=space.blocks), top)
    rejected = reasons.rejected(space.estimates, capacity, space.estimator.memory.peak)
    if not plans:
        memory = space.estimator.memory.peak
        raise reasons.nothing(space.estimates, memory, devices, model.rows, profile, model.options)
    return SearchResult(
        tuple(plans), len(space.estimates), len(fitting), reasons.frontier(fitting), rejected, tuple(reasons.why(plans)),
        tuple(
            reasons.notes(
                model.options, pipelines=space.pipelines, concurrent=space.concurrent, coupling=space.coupling, best=plans[0]
            )
        ),
        space.estimator,
    )  # fmt: skip


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


def _may_have_branches(rehearsals: Rehearsals, tps: Collection[int], options: Mapping[str, Any]) -> bool:
    """Whether the options allow branches, and parts of the model could run at the same time."""
    excluded = options.get("branches") == "said" or options.get("sequence_parallel") or 1 not in tps or max(tps) == 1
    return not excluded and rehearsals.has_branches


def _branch_costs(
    rehearsals: Rehearsals,
    tps: Collection[int],
    estimator_with: Callable[..., Estimator],
    tell: Callable[[str], None],
) -> dict[int, BranchCosts]:
    """Size of tp → the costs of the model's branches on slices of it, for those of ``tps`` where they may pay.

    A model with few blocks shows it in a fraction of the time. Branches are left out where tp without them is faster.

    Args:
        estimator_with: makes an estimator with ``branches``.
    """
    branches: dict[int, BranchCosts] = {}
    for tp in tps:
        if tp > 1:
            tell(f"planning branches on slices of tp={tp}")
            few = rehearsals.branch_costs(tp, few=True)
            over_tp = Candidate.over_tp(Sharding(tp))
            pays = few is not None and estimator_with(branches={tp: few}).pays(replace(over_tp, branches=True), over_tp)
            if pays and (costs := rehearsals.branch_costs(tp)) is not None:
                branches[tp] = costs
    return branches


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
    families: set[Family] = set()
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
