"""``Exchanges``: calls and bytes of collectives, by kind, by axis and by the module that calls them."""

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
        axis: the mesh axis. If a group lies along several axes, their names are joined: ``dp_replicate·dp_shard``.
        calls: number of calls. It may be a fraction if only some of the model's blocks were rehearsed.
        nbytes: sum of the bytes of the full tensors: the input of a reduction, the result of an all-gather.
        module: the module whose forward calls them, with ``*`` for the numbers of blocks; empty in a backward.
    """

    kind: str
    axis: str
    calls: float
    nbytes: float
    module: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Exchanges with equal keys are added."""
        return self.axis, self.kind, self.module


def exchanges_in(events: Iterable[Event], axis_of: Callable[[tuple[int, ...]], str]) -> tuple[Exchanges, ...]:
    """The collectives among the events of a trace. Collectives over one rank are left out, since they move nothing.

    Args:
        axis_of: the ranks of a group → the mesh axis along which they differ.
    """
    return summed(
        Exchanges(event.kind, axis_of(event.ranks), 1, event.nbytes, module_pattern(event.module))
        for event in events
        if isinstance(event, Collective) and len(event.ranks) > 1
    )


def summed(exchanges: Iterable[Exchanges], weight: float = 1.0) -> tuple[Exchanges, ...]:
    """``weight`` · the sum of exchanges with the same axis, kind and module; sorted by these."""
    calls: dict[tuple[str, str, str], float] = defaultdict(float)
    nbytes: dict[tuple[str, str, str], float] = defaultdict(float)
    for exchange in exchanges:
        calls[exchange.key] += weight * exchange.calls
        nbytes[exchange.key] += weight * exchange.nbytes
    return tuple(Exchanges(key[1], key[0], calls[key], nbytes[key], key[2]) for key in sorted(calls))


def extrapolated(
    base: Sequence[Exchanges], others: Sequence[Sequence[Exchanges]], weights: Sequence[int]
) -> tuple[Exchanges, ...]:
    """base + Σ weight · (other − base), for each kind, axis and module (see ``extrapolation``).

    Args:
        base: exchanges of the rehearsal with the fewest blocks.
        others: exchanges of the rehearsals with one more block, one for each kind of block.
        weights: for each of ``others``, the number of blocks that the base lacks.
    """
    weighted = [*summed(base, 1 - sum(weights))]
    for other, weight in zip(others, weights, strict=True):
        weighted += summed(other, weight)
    return tuple(exchange for exchange in summed(weighted) if exchange.calls > 0)


def without_modules(exchanges: Iterable[Exchanges]) -> tuple[Exchanges, ...]:
    """Exchanges by kind and axis alone: those of all modules are added."""
    return summed(replace(exchange, module="") for exchange in exchanges)


def module_pattern(module: str) -> str:
    """A module's name with ``*`` in place of numbers, which is equal for all blocks.

    >>> module_pattern("layers.3.mlp")
    'layers.*.mlp'
    """
    return ".".join("*" if part == "#" else part for part in pattern(module)) if module else ""
