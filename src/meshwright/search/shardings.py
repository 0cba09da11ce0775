"""``Shardings``: the shardings that may be the fastest at each size of tp, with the costs of the layers.

| sharding | tried where |
| --- | --- |
| plain: all chains of layers, with sequence parallelism | always |
| without sequence parallelism | its collectives may be faster: see `may_gather_slowly` |
| with some chains whole | what their collectives take may exceed what their products then take more |

The others are tried only at sizes of tp with which a plan may then be the fastest (``Estimator.at_best``).

A chain (chains.py) that is sharded has a part of its products, and one that is whole needs no collectives:

    products of a chain: share · C (tp - 1) more if it is whole
    saved: at most all collectives over tp within blocks if it is in blocks, else at most those outside of them

Here C are the seconds of all functions at this size of tp, and the share is that of the chain's elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import PlanError
from meshwright.hardware.profile import Profile
from meshwright.search.calls import Calls
from meshwright.search.chains import Chain
from meshwright.search.estimate import Estimator
from meshwright.search.layer_costs import LayerCosts
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.space import Candidate, Sharding

_LEAST = 0.02  # of a step, that a chain has to save to be left whole: each is a setting of the plan, and takes memory
_MOST = 4  # chains that are tried at one size of tp
_NEARLY = 0.5  # of a chain's products, that have to be saved for it to be tried: its share of elements is not that of products


@dataclass(frozen=True)
class Shardings:
    """Rehearses a model with the shardings that may be the fastest.

    Args:
        rehearsals: of the model.
        profile: the hardware.
        options: settings of every plan.
        itemsize: bytes per element in the precision of compute.
        tell: is called with a text before each rehearsal.
    """

    rehearsals: Rehearsals
    profile: Profile
    options: Mapping[str, Any]
    itemsize: int
    tell: Callable[[str], None]

    def plain(self, tps: Iterable[int]) -> dict[Sharding, LayerCosts]:
        """The costs of the layers with all chains sharded and with sequence parallelism, for those of ``tps`` that are allowed.

        Raises:
            PlanError: the model allows none. The error is that of the first.
        """
        found: dict[Sharding, LayerCosts] = {}
        problems: list[PlanError] = []
        for tp in tps:
            try:
                found |= self._rehearsed(Sharding(tp))
            except PlanError as problem:
                problems.append(problem)  # the model cannot be sharded over this size
        if problems and not found:
            raise problems[0]
        return found

    def others(self, plain: Mapping[Sharding, LayerCosts], tps: Iterable[int]) -> dict[Sharding, LayerCosts]:
        """The costs with other shardings over sizes ``tps``, where these are faster than ``plain``."""
        found = dict(plain)
        for tp in tps:
            base = Sharding(tp)
            if self.options.get("sequence_parallel") is None and may_gather_slowly(plain[base], self.profile):
                found |= self._faster(Sharding(tp, sequence=False), base, plain[base])
            fastest = Sharding(tp, sequence=False) if Sharding(tp, sequence=False) in found else base
            if not self.options.get("modules"):
                found |= self._left_whole(fastest, found[fastest])
        return {sharding: costs for sharding, costs in found.items() if sharding not in plain}

    def _left_whole(self, base: Sharding, costs: LayerCosts) -> dict[Sharding, LayerCosts]:
        """Shardings that leave more and more chains whole, each faster than the one before; the first is faster than ``base``.

        Chains are tried by their shares: a small one saves as many collectives as a large one.

        Args:
            base: leaves none whole.
            costs: of ``base``.
        """
        worth = [chain for chain in costs.chains if may_pay(costs, chain, self.profile)]
        found = {base: costs}
        for chain in sorted(worth, key=lambda chain: chain.share)[:_MOST]:
            fastest = [*found][-1]
            sharding = Sharding(base.tp, base.sequence, (*fastest.whole, *chain.globs))
            found |= self._faster(sharding, fastest, found[fastest], _LEAST)
        return found

    def _faster(
        self, sharding: Sharding, base: Sharding, costs: LayerCosts, least: float = 0.0
    ) -> dict[Sharding, LayerCosts]:
        """The costs with a sharding, if it is allowed and faster than ``base``, whose ``costs`` are given."""
        tried = self._tried(sharding)
        candidate, other = Candidate.over_tp(sharding), Candidate.over_tp(base)
        pays = tried and self._estimator({base: costs, **tried}).pays(candidate, other, least)
        return tried if pays else {}

    def _estimator(self, costs: Mapping[Sharding, LayerCosts]) -> Estimator:
        return Estimator(self.profile, costs, 0.0, 0.0, self.itemsize)

    def _tried(self, sharding: Sharding) -> dict[Sharding, LayerCosts]:
        """As `_rehearsed`; nothing if the model does not allow it."""
        try:
            return self._rehearsed(sharding)
        except PlanError:
            return {}

    def _rehearsed(self, sharding: Sharding) -> dict[Sharding, LayerCosts]:
        """The costs with one sharding; nothing if tp shards no parameter of the model."""
        self.tell(", ".join(filter(None, [f"rehearsing a few blocks with tp={sharding.tp}", sharding.words])))
        costs = self.rehearsals.layer_costs(sharding)
        return {} if costs is None else {sharding: costs}


def may_gather_slowly(costs: LayerCosts, profile: Profile) -> bool:
    """Whether tp may be faster without sequence parallelism, whose ``costs`` are given.

    It has an all-gather and a reduce-scatter in place of an all-reduce, which take equally long in a ring, and small sums of
    the gradients of what runs on parts of the sequence. So it is slower if a backend is (gloo runs an all-reduce for a
    reduce-scatter), or if the latency of collectives takes longer than their bytes, with one row.
    """
    times = [profile.node.kinds.get(kind, 1.0) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    one, two = (_collectives(_calls(costs), profile, rows) for rows in (1, 2))
    return times[0] + times[1] > 1.1 * 2 * times[2] or 2 * one - two > two - one


def may_pay(costs: LayerCosts, chain: Chain, profile: Profile) -> bool:
    """Whether a chain may be faster if it is whole. With few rows collectives weigh most."""
    device = sum(number * calls.device(profile, 1) for number, calls in _calls(costs))
    saved = _collectives(_calls(costs, chain.in_blocks), profile, 1)
    return chain.share < 1 and saved > _NEARLY * chain.share * device * (costs.tp - 1)


def _collectives(calls: Iterable[tuple[int, Calls]], profile: Profile, rows: int) -> float:
    """Seconds of collectives over tp in a microbatch, and of the host that calls them."""
    return sum(
        number * (each.exchange(profile, rows) + each.collectives * profile.host_collective) for number, each in calls
    )


def _calls(costs: LayerCosts, in_blocks: bool | None = None) -> list[tuple[int, Calls]]:
    """(number, calls) of each part of the model, in the forward and in the backward.

    ``in_blocks``: of blocks alone, or of what is outside of them.
    """
    ways = costs.forward, costs.backward
    blocks = [(costs.blocks, way.block) for way in ways]
    outside = [(1, calls) for way in ways for calls in (way.first, way.last)]
    return blocks if in_blocks else outside if in_blocks is False else [*blocks, *outside]
