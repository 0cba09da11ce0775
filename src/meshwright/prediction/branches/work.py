"""What a part of a forward takes, with its backward: on one device, on some of the rows, sharded over tensor-parallel ranks.

Arithmetic over a recorded forward (graph.py), with the seconds that every prediction has: a function on the device takes
``Profile.compute``, a collective ``hardware.collectives.collective``, and a device waits for its host as ``clock.behind`` says.
Backward is a function for each input of a product that wants a gradient, each with the flops and bytes of the forward; for
other functions, one as long as the forward; where nothing wants a gradient, none. What is sent waits for what is computed,
and the other way round. Optimizers are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from meshwright.graph import Event, ModelGraph
from meshwright.hardware.profile import Profile, Work
from meshwright.layout import Shard
from meshwright.prediction.branches.traffic import NOTHING, Traffic, all_gather, all_reduce
from meshwright.prediction.clock import behind
from meshwright.recipe import Recipe


@dataclass(frozen=True)
class Parameters:
    """Bytes of each parameter, as computed with; and which of them are trained.

    ``reduced``: bytes of their gradients, as they are summed over ranks. ``precision``: the type that the plan computes in,
    if it is not that of the parameters.
    """

    bytes: Mapping[str, int]
    reduced: Mapping[str, int]
    trained: frozenset[str]
    precision: str = ""

    @staticmethod
    def of(recipe: Recipe) -> Parameters:
        half = recipe.precision in ("bfloat16", "float16")
        sizes = {n: prod(p.shape) * _itemsize(p.dtype) for n, p in recipe.by_name.items()}
        computed = {n: prod(p.shape) * 2 if half else sizes[n] for n, p in recipe.by_name.items()}
        return Parameters(computed, sizes, frozenset(n for n, p in recipe.by_name.items() if p.requires_grad),
                          recipe.precision if half else "")  # fmt: skip


def _itemsize(dtype: str) -> int:
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return int(digits) // 8 if digits else 1


@dataclass(frozen=True)
class Spent:
    """Of one rank: seconds of the device and of the host, and what it exchanges with those that share its branch."""

    device: float = 0.0
    host: float = 0.0
    traffic: Traffic = NOTHING

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.device + other.device, self.host + other.host, self.traffic + other.traffic)

    def compute(self, profile: Profile) -> float:
        """Seconds without collectives: of the device, and what it waits for the host."""
        return self.device + behind(profile, self.host, self.device)

    def seconds(self, profile: Profile) -> float:
        """Of all of it; a host that calls collectives is waited for as one that calls functions is."""
        busy = self.device + self.traffic.seconds(profile)
        return busy + behind(profile, self.host + self.traffic.calls * profile.host_collective, busy)


@dataclass
class _Cutting:
    """Which values are cut on the way, and what share of each a rank has."""

    shares: dict[int, float] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    traffic: Traffic = NOTHING


class Meter:
    """Time and traffic of sets of events."""

    def __init__(self, graph: ModelGraph, profile: Profile, parameters: Parameters) -> None:
        self.graph, self.profile, self.parameters = graph, profile, parameters

    def names(self, positions: Iterable[int]) -> list[str]:
        """The parameters that events take."""
        return list(dict.fromkeys(n for p in positions for n in self.graph.events[p].parameters))

    def bytes(self, positions: Iterable[int], cuts: Mapping[str, Shard]) -> int:
        """Of the parameters that events take, on one tp rank."""
        return sum(int(self.parameters.bytes[n] * _share(cuts.get(n))) for n in self.names(positions))

    def reduced(self, positions: Iterable[int], cuts: Mapping[str, Shard]) -> int:
        """Of the gradients of the parameters that events take, on one tp rank."""
        names = [n for n in self.names(positions) if n in self.parameters.trained]
        return sum(int(self.parameters.reduced[n] * _share(cuts.get(n))) for n in names)

    def whole(self, positions: Iterable[int], rows: float = 1.0) -> Spent:
        """On one device; ``rows``: on this share of the rows."""
        return sum((self._spent(self.graph.events[p], rows) for p in positions), Spent())

    def cut(self, positions: list[int], cuts: Mapping[str, Shard], ranks: int, rows: float = 1.0) -> Spent:
        """On so many tensor-parallel ranks, with these parameters cut, as Megatron's pairs of column and row are."""
        state, spent = _Cutting(), Spent()
        for p in positions:
            event = self.graph.events[p]
            shards = [cuts[n] for n in event.parameters if n in cuts]
            share = self._follow(event, shards, state, ranks, rows)
            spent += self._spent(event, rows, share)
        inside = set(positions)
        for number, share in state.shares.items():  # what leaves, leaves whole
            used = self.graph.consumers.get(number, ())
            if number in self.graph.returned or any(p not in inside for p in used):
                state.traffic += all_gather(int(self.graph.values[number].bytes * rows * share), ranks)
        return spent + Spent(traffic=state.traffic)

    def _follow(self, event: Event, shards: list[Shard], state: _Cutting, ranks: int, rows: float) -> float:
        """The share of an event's work that a rank does; notes what of its results is cut, and what is exchanged."""
        taken = [state.shares[n] for n in event.inputs if n in state.shares]
        outputs = [n for n in (*event.outputs, event.written) if n is not None]
        if not shards and not taken:
            return 1.0
        share = max([_share(c) for c in shards] or taken)
        table, values = event.function == "embedding", self.graph.values
        if (table and shards[0].dim == 0) or (event.flops and shards and taken):  # summands
            for n in outputs:
                state.traffic += all_reduce(int(values[n].bytes * rows), ranks)
            return share
        if shards and not taken:
            for n in event.inputs:
                if n in self.graph.live and n not in state.entered:  # one for q, k and v together
                    state.entered.add(n)
                    state.traffic += all_reduce(int(values[n].bytes * rows), ranks)
        state.shares |= dict.fromkeys(outputs, share)
        return share

    def _spent(self, event: Event, rows: float, share: float = 1.0) -> Spent:
        """Forward and backward of an event, of which a rank does a share."""
        held, again = sum(self.parameters.bytes[n] for n in event.parameters), self._backward(event)
        moved = share * (min(held, event.moved) + max(event.moved - held, 0) * rows)
        flops = event.flops * rows * share
        once = self.profile.compute(flops, moved, self._dtype(event), _kind(event)).seconds if flops or moved else 0.0
        return Spent((1 + again) * once, self.profile.host + again * self.profile.host_backward)

    def _dtype(self, event: Event) -> str:
        """The type that an event computes in."""
        numbers = (n for n in (*event.inputs, *event.outputs, event.written) if n is not None)
        floating = (d for n in numbers if (d := self.graph.values[n].dtype).startswith(("float", "bfloat")))
        return self.parameters.precision or next(floating, "float32")

    def _backward(self, event: Event) -> int:
        """How many operations like the forward there are in its backward."""
        outputs = [n for n in (*event.outputs, event.written) if n is not None]
        if not self.graph.live.intersection(outputs):
            return 0
        if not event.flops:
            return 1
        wanted = sum(n in self.graph.live for n in event.inputs)
        # A bias is no further product.
        return max(1, min(2, wanted + any(n in self.parameters.trained for n in event.parameters)))


def _kind(event: Event) -> Work:
    return "attention" if "attention" in event.function else "matmul" if event.flops else "other"


def _share(cut: Shard | None) -> float:
    """Of a dim, what the rank with the most of it has."""
    return 1.0 if cut is None or not cut.size else max(cut.local(r) for r in range(cut.ranks)) / cut.size
