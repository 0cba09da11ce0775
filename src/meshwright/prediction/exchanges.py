"""``Exchanges``: collectives counted, by kind, by axis and by the module that asks for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.names import pattern
from meshwright.prediction.trace import Collective, Event


@dataclass(frozen=True)
class Exchanges:
    """Collectives of one kind along one axis.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or recv.
        axis: of the mesh; several that one group lies along are joined, ``dp_replicate·dp_shard``.
        calls: how many; of a model whose blocks were not all rehearsed a mean, no whole number.
        nbytes: of the whole tensors, summed: what is reduced, or what all ranks have gathered.
        module: whose forward asks for them, with ``*`` for the numbers of blocks; empty in a backward.
    """

    kind: str
    axis: str
    calls: float
    nbytes: float
    module: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is counted together."""
        return self.axis, self.kind, self.module


def exchanges_in(events: Iterable[Event], axis_of: Callable[[tuple[int, ...]], str]) -> tuple[Exchanges, ...]:
    """The collectives among events of a trace; those of one rank alone move nothing, and are left out.

    Args:
        axis_of: the axes along which the ranks of a group differ.
    """
    return summed(
        Exchanges(event.kind, axis_of(event.ranks), 1, event.nbytes, module_pattern(event.module))
        for event in events
        if isinstance(event, Collective) and len(event.ranks) > 1
    )


def summed(exchanges: Iterable[Exchanges], weight: float = 1.0) -> tuple[Exchanges, ...]:
    """Those of one kind, axis and module added up, ``weight`` times; in the order of axis and kind."""
    calls: dict[tuple[str, str, str], float] = defaultdict(float)
    nbytes: dict[tuple[str, str, str], float] = defaultdict(float)
    for exchange in exchanges:
        calls[exchange.key] += weight * exchange.calls
        nbytes[exchange.key] += weight * exchange.nbytes
    return tuple(Exchanges(key[1], key[0], calls[key], nbytes[key], key[2]) for key in sorted(calls))


def extrapolated(
    base: Sequence[Exchanges], others: Sequence[Sequence[Exchanges]], weights: Sequence[int]
) -> tuple[Exchanges, ...]:
    """base + Σ weight · (other − base), each kind, axis and module for itself (see ``extrapolation``)."""
    parts = [*summed(base, 1 - sum(weights))]
    for other, weight in zip(others, weights, strict=True):
        parts += summed(other, weight)
    return tuple(exchange for exchange in summed(parts) if exchange.calls > 0)


def without_modules(exchanges: Iterable[Exchanges]) -> tuple[Exchanges, ...]:
    """By kind and axis alone."""
    return summed(replace(exchange, module="") for exchange in exchanges)


def module_pattern(module: str) -> str:
    """A place in a block, as that of all blocks: ``layers.*.mlp``."""
    return ".".join("*" if part == "#" else part for part in pattern(module)) if module else ""
