"""Cases by arithmetic: a few rehearsals for each model and size of tp, and ``meshwright.search``'s equations for the rest.

    model without its depth, tp ──► costs of layers, rehearsed once, with few blocks       search.layer_costs
    these costs, depth, layout  ──► seconds, and bytes of the fullest rank                  search.estimate

So the thousand rows of one table cost eight models' rehearsals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import nn

from meshwright.hardware.correction import Correction, Part, corrected, learnt
from meshwright.hardware.profile import Estimate
from meshwright.search.estimate import CandidateEstimate, Estimator
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.sizes import DP_SHARD, FEW_BLOCKS, MANY_ROWS
from meshwright.search.space import Candidate, Sharding
from published_cases.case import Case, Layout, Machine, ModelShape, Precision, Predicted
from published_cases.models import build_model
from published_cases.plans import batch_of, computed_in
from published_cases.profiles import profile_of

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FEW = FEW_BLOCKS + 2  # blocks, of which all but FEW_BLOCKS fold


@dataclass(frozen=True)
class Rehearsed:
    """What the costs of layers depend on."""

    shape: ModelShape
    tp: int
    computed_in: str
    sequence_parallel: bool


Factors = tuple[tuple[Part, float], ...]
"""(part of a profile, factor of its seconds): see ``meshwright.hardware.correction``."""


def estimate(case: Case, factors: Factors = ()) -> Predicted:
    """What the arithmetic says of a case, with the profile of its machine corrected by ``factors``.

    Raises:
        ValueError: nothing of the model is sharded over tp.
    """
    estimated = [_estimated(case, factors, recompute=recompute) for recompute in (False, True)]
    share = case.layout.recomputed_blocks / case.model.layers if case.layout.recompute == "full" else 0.0
    seconds, nbytes = (
        (1 - share) * without + share * full
        for without, full in zip(*((one.seconds, one.nbytes) for one in estimated), strict=True)
    )
    profile = profile_of(case.machine, case.precision.compute)
    spread = 1 + 2 * profile.scatter
    held = round(nbytes * (1 + profile.reserve)) + profile.context
    return Predicted(seconds, seconds / spread, seconds * spread, active=round(nbytes), reserved=held)


@dataclass(frozen=True)
class Learnt:
    """Estimates with profiles that some cases corrected.

    Attributes:
        factors: name of a profile → what they corrected of it.
        cases: how many they were.
    """

    factors: Mapping[str, Factors]
    cases: int

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Learnt:
        """What the measured seconds of these cases say of the profiles of their machines."""
        factors: dict[str, Factors] = {}
        for name in dict.fromkeys(case.machine.profile for case in cases):
            of_machine = [c for c in cases if c.machine.profile == name and _can(c)]
            if runs := [(c, c.measured.seconds) for c in of_machine if c.measured.seconds is not None]:
                factors[name] = tuple(_learnt(runs).factors.items())
        return cls(factors, len(cases))

    def estimate(self, case: Case) -> Predicted:
        return estimate(case, self.factors.get(case.machine.profile, ()))

    def fitted(self, table: str) -> str:
        """Where the constants come from, in a line of the report on ``table``."""
        factors = "; ".join(
            f"{name}: {', '.join(f'{part} × {factor:.2f}' for part, factor in parts) or 'nothing'}"
            for name, parts in self.factors.items()
        )
        return f"hardware profiles, corrected by {self.cases} other rows of {table}, spread evenly ({factors})"


def _can(case: Case) -> bool:
    """Whether there is an estimate of a case."""
    try:
        estimate(case)
    except ValueError:
        return False
    return True


def _learnt(runs: Sequence[tuple[Case, float]]) -> Correction:
    first = runs[0][0]
    return learnt(
        profile_of(first.machine, first.precision.compute),
        lambda factors: [estimate(case, tuple(factors.items())).seconds for case, _ in runs],
        [Estimate(seconds) for _, seconds in runs],
    )


def _estimated(case: Case, factors: Factors, *, recompute: bool) -> CandidateEstimate:
    layout, shape, precision = case.layout, case.model, case.precision
    sequence_parallel = layout.sequence_parallel and layout.tp > 1
    few = replace(shape, layers=_FEW)
    rehearsed = Rehearsed(few, layout.tp, computed_in(case), sequence_parallel)
    estimator = _estimator(rehearsed, shape.layers, precision, case.machine, factors)
    return estimator.estimate(_candidate(layout, recompute=recompute))


@lru_cache(4096)
def _estimator(
    rehearsed: Rehearsed, layers: int, precision: Precision, machine: Machine, factors: Factors
) -> Estimator:
    """For all rows of a model and a size of tp: it keeps what a block takes."""
    shape, itemsize = rehearsed.shape, ITEMSIZE[precision.compute]
    crossing = float(shape.sequence * shape.hidden * itemsize)  # of a row, between blocks
    layer_costs = replace(layer_costs_of(rehearsed), blocks=layers)
    profile = corrected(profile_of(machine, precision.compute), dict(factors))
    return Estimator(
        profile, {Sharding(rehearsed.tp): layer_costs}, crossing, crossing, itemsize,
        reduced=ITEMSIZE[precision.reduce], gathers=not precision.master,
    )  # fmt: skip


def _candidate(layout: Layout, *, recompute: bool) -> Candidate:
    reshard = layout.reshard_after_forward and layout.zero == 3
    return Candidate(
        layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp, layout.microbatches, layout.microbatch_rows,
        layout.stages_per_rank, recompute, reshard,
    )  # fmt: skip


@cache
def layer_costs_of(of: Rehearsed) -> LayerCosts:
    """The costs of the layers of a model with few blocks.

    Raises:
        ValueError: nothing of it is sharded over tp.
    """
    layer_costs = _measured(of.shape, of.computed_in, sequence_parallel=of.sequence_parallel).layer_costs(
        Sharding(of.tp)
    )
    if layer_costs is None:
        raise ValueError(f"nothing is sharded over {of.tp} ranks of tp")
    return layer_costs


@cache
def _measured(shape: ModelShape, computed_in: str, *, sequence_parallel: bool) -> Rehearsals:
    """For all sizes of tp: it keeps the few blocks."""
    rows = Layout(microbatches=1, microbatch_rows=MANY_ROWS * DP_SHARD)
    options = {"precision": computed_in, "sequence_parallel": sequence_parallel}
    return Rehearsals(build_model(shape), batch_of(shape, rows), options, None, _adamw, 1.0, accelerator=True)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As it runs on a GPU: many parameters at once."""
    return torch.optim.AdamW(parameters, foreach=True)


def fitted(table: str) -> str:
    """Where the constants come from, in a line of the report on ``table``."""
    return (
        "hardware profiles, each with its sources: nothing is fitted here; by arithmetic from a few rehearsals a model"
    )
