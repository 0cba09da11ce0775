"""``EventCosts``: the cost of some events of a forward and of their backward, on one device or over tensor-parallel ranks.

It is computed from a recorded forward (graph.py), with the equations of every prediction: a function on the device takes
``Profile.compute``, a collective ``hardware.collectives.collective``; ``clock.waits_for_host`` says how long the device waits
for the host. The backward of a product has one function for each input with a gradient, with the flops and bytes of the
forward; that of an attention 2.5 times the flops, in one function; that of a convolution is one function. The backward of
another function moves as many bytes as its forward; without gradients there is no backward. Functions that the profile has
measured apart take its times (`Profile.slower`). Collectives do not overlap functions. Optimizers are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from meshwright.graph import Event, ModelGraph
from meshwright.hardware.functions import OWN_RATE
from meshwright.hardware.profile import CallKind, Profile
from meshwright.layout import Shard
from meshwright.prediction.branches.traffic import NOTHING, Traffic, all_gather, all_reduce
from meshwright.prediction.clock import waits_for_host
from meshwright.recipe import Recipe

ATTENTION_BACKWARD = 2.5
"""Operations of the backward of an attention / those of its forward: five products for two (FlashAttention-2, arXiv 2307.08691,
section 3.1)."""
_ONE_BACKWARD = ("attention_backward", "convolution_backward")  # one function computes all gradients
_ATEN = {
    "layer_norm": "native_layer_norm", "group_norm": "native_group_norm", "softmax": "_softmax",
    "log_softmax": "_log_softmax", "relu": "threshold", "dropout": "native_dropout",
}  # fmt: skip
"""Function of torch → the ATen function that it calls, if its name is another."""


@dataclass(frozen=True)
class Parameters:
    """The sizes of the parameters of a model.

    Attributes:
        bytes: name → bytes in the dtype of the computation.
        reduced: name → bytes of its gradient when it is summed over ranks.
        trained: names of the parameters that require gradients.
        precision: the dtype of the computation, if it is not that of the parameters; else empty.
    """

    bytes: Mapping[str, int]
    reduced: Mapping[str, int]
    trained: frozenset[str]
    precision: str = ""

    @staticmethod
    def of(recipe: Recipe) -> Parameters:
        """The parameters of a recipe."""
        is_half = recipe.precision in ("bfloat16", "float16")
        sizes = {n: prod(p.shape) * _itemsize(p.dtype) for n, p in recipe.by_name.items()}
        computed = {n: prod(p.shape) * 2 if is_half else sizes[n] for n, p in recipe.by_name.items()}
        return Parameters(computed, sizes, frozenset(n for n, p in recipe.by_name.items() if p.requires_grad),
                          recipe.precision if is_half else "")  # fmt: skip


def _itemsize(dtype: str) -> int:
    """Bytes of an element: 4 for ``float32``, 1 for ``float8_e4m3fn`` and ``bool``."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return int(digits) // 8 if digits else 1


@dataclass(frozen=True)
class EventCost:
    """The cost of events on one rank: seconds of the device, seconds of the host, and collectives."""

    device: float = 0.0
    host: float = 0.0
    traffic: Traffic = NOTHING

    def __add__(self, other: EventCost) -> EventCost:
        return EventCost(self.device + other.device, self.host + other.host, self.traffic + other.traffic)

    def compute(self, profile: Profile) -> float:
        """Seconds without collectives: those of the device, and those in which it waits for the host."""
        return self.device + waits_for_host(profile, self.host, self.device)

    def seconds(self, profile: Profile) -> float:
        """Seconds with collectives. The device also waits for the host's calls of collectives."""
        busy = self.device + self.traffic.seconds(profile)
        return busy + waits_for_host(profile, self.host + self.traffic.calls * profile.host_collective, busy)


@dataclass
class _ShardedValues:
    """The values that are sharded while events run one after another.

    Attributes:
        shares: number of a sharded value → the fraction of it that a rank has.
        entered: numbers of the unsharded values whose gradient is summed, because sharded functions use them.
        traffic: the collectives so far.
    """

    shares: dict[int, float] = field(default_factory=dict)
    entered: set[int] = field(default_factory=set)
    traffic: Traffic = NOTHING


class EventCosts:
    """Computes the cost of events of a recorded forward. Events are named by their positions."""

    def __init__(self, graph: ModelGraph, profile: Profile, parameters: Parameters) -> None:
        self.graph, self.profile, self.parameters = graph, profile, parameters

    def names(self, positions: Iterable[int]) -> list[str]:
        """Names of the parameters that events use."""
        return list(dict.fromkeys(n for p in positions for n in self.graph.events[p].parameters))

    def bytes(self, positions: Iterable[int], shards: Mapping[str, Shard]) -> int:
        """Bytes of the parameters that events use, on one tp rank."""
        return sum(int(self.parameters.bytes[n] * _share(shards.get(n))) for n in self.names(positions))

    def reduced(self, positions: Iterable[int], shards: Mapping[str, Shard]) -> int:
        """Bytes of the gradients of the parameters that events use, on one tp rank."""
        names = [n for n in self.names(positions) if n in self.parameters.trained]
        return sum(int(self.parameters.reduced[n] * _share(shards.get(n))) for n in names)

    def on_one_device(self, positions: Iterable[int], rows: float = 1.0) -> EventCost:
        """The cost on one device. ``rows``: the fraction of the rows that it runs."""
        return sum((self._spent(self.graph.events[p], rows) for p in positions), EventCost())

    def over_tp(self, positions: list[int], shards: Mapping[str, Shard], ranks: int, rows: float = 1.0) -> EventCost:
        """The cost on one of ``ranks`` tensor-parallel ranks, as in Megatron's pairs of column- and row-parallel layers.

        Args:
            shards: the parameters that are sharded.
            rows: the fraction of the rows that the rank runs.
        """
        sharded, spent = _ShardedValues(), EventCost()
        for p in positions:
            event = self.graph.events[p]
            layouts = [shards[n] for n in event.parameters if n in shards]
            share = self._share_of_work(event, layouts, sharded, ranks, rows)
            spent += self._spent(event, rows, share)
        selected = set(positions)
        for number, share in sharded.shares.items():  # sharded values that other events use are gathered
            consumers = self.graph.consumers.get(number, ())
            if number in self.graph.returned or any(p not in selected for p in consumers):
                sharded.traffic += all_gather(int(self.graph.values[number].bytes * rows * share), ranks)
        return spent + EventCost(traffic=sharded.traffic)

    def _share_of_work(
        self, event: Event, shards: list[Shard], sharded: _ShardedValues, ranks: int, rows: float
    ) -> float:
        """The fraction of an event's work that a rank does. Adds its sharded results and its collectives to ``sharded``."""
        input_shares = [sharded.shares[n] for n in event.inputs if n in sharded.shares]
        outputs = [n for n in (*event.outputs, event.written) if n is not None]
        if not shards and not input_shares:
            return 1.0
        share = max([_share(c) for c in shards] or input_shares)
        is_lookup, values = event.function == "embedding", self.graph.values
        if (is_lookup and shards[0].dim == 0) or (event.flops and shards and input_shares):  # the results are summands
            for n in outputs:
                sharded.traffic += all_reduce(int(values[n].bytes * rows), ranks)
            return share
        if shards and not input_shares:
            for n in event.inputs:
                if n in self.graph.live and n not in sharded.entered:  # q, k and v have one all-reduce together
                    sharded.entered.add(n)
                    sharded.traffic += all_reduce(int(values[n].bytes * rows), ranks)
        sharded.shares |= dict.fromkeys(outputs, share)
        return share

    def _spent(self, event: Event, rows: float, share: float = 1.0) -> EventCost:
        """The cost of the forward and backward of an event, of which a rank does the fraction ``share``."""
        parameter_bytes, backward_calls = sum(self.parameters.bytes[n] for n in event.parameters), self._backward(event)
        moved = share * (min(parameter_bytes, event.moved) + max(event.moved - parameter_bytes, 0) * rows)
        flops, (forward, backward) = event.flops * rows * share, _kinds(event)
        seconds = self._seconds(event, flops, moved, forward)
        if backward in _ONE_BACKWARD and backward_calls:
            calls, times = 1, ATTENTION_BACKWARD if backward == "attention_backward" else backward_calls
        else:
            calls, times = backward_calls, 1.0
        seconds += calls * self._seconds(event, times * flops, times * moved, backward)
        return EventCost(seconds, self.profile.host + calls * self.profile.host_backward)

    def _seconds(self, event: Event, flops: float, moved: float, kind: CallKind) -> float:
        """Seconds of the device for a function; 0.0 if it computes and moves nothing."""
        return self.profile.compute(flops, moved, self._dtype(event), kind).seconds if flops or moved else 0.0

    def _dtype(self, event: Event) -> str:
        """The dtype in which an event computes."""
        values = (n for n in (*event.inputs, *event.outputs, event.written) if n is not None)
        floating = (dtype for n in values if (dtype := self.graph.values[n].dtype).startswith(("float", "bfloat")))
        return self.parameters.precision or next(floating, "float32")

    def _backward(self, event: Event) -> int:
        """Number of functions in the backward of an event. Each takes as long as the forward."""
        outputs = [n for n in (*event.outputs, event.written) if n is not None]
        if not self.graph.live.intersection(outputs):
            return 0
        if not event.flops:
            return 1
        gradients = sum(n in self.graph.live for n in event.inputs)
        # At most 2, since a bias needs no further product.
        return max(1, min(2, gradients + any(n in self.parameters.trained for n in event.parameters)))


def _kinds(event: Event) -> tuple[CallKind, CallKind]:
    """The kinds of an event's forward and of a function of its backward."""
    if "dot_product_attention" in event.function:
        return "attention", "attention_backward"
    if event.function.startswith("conv"):
        return "convolution", "convolution_backward"
    if event.flops:
        return "matmul", "matmul"
    name = _ATEN.get(event.function, event.function)
    return name if name in OWN_RATE else "other", next((b for b in _backwards(name) if b in OWN_RATE), "other")


def _backwards(name: str) -> tuple[str, ...]:
    """The names that ATen may have for the backward of a function."""
    return f"{name}_backward", f"{name}_backward_data", f"{name}_dense_backward"


def _share(shard: Shard | None) -> float:
    """The fraction of a parameter on the rank that has the most of it; 1 if it is not sharded."""
    return 1.0 if shard is None or not shard.size else max(shard.local(r) for r in range(shard.ranks)) / shard.size
