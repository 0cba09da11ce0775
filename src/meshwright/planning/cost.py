"""``Cost``: counts flops, bytes and random draws of a forward, also on tensors without values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.described import nbytes_of, tensors_among
from meshwright.private import DispatchMode
from meshwright.spmd.torch_functions import flops_of, op_facts


@dataclass(frozen=True)
class OpCounts:
    """Counts over some ops.

    Attributes:
        flops: floating point operations.
        moved: bytes read and written.
        draws: how many ops drew random numbers.
        drawn_from: for each of these ops that drew from a generator of the model's own, the generator.
    """

    flops: int
    moved: int
    draws: int
    drawn_from: tuple[torch.Generator, ...]


class Cost(DispatchMode):
    """Counts flops (torch's formulas), bytes read and written, and draws of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = self._moved = self._draws = 0
        self._drawn_from: list[torch.Generator] = []

    def so_far(self) -> OpCounts:
        """The counts until now."""
        return OpCounts(self._flops, self._moved, self._draws, tuple(self._drawn_from))

    def since(self, before: OpCounts) -> OpCounts:
        """The counts since ``before``, a result of ``so_far``."""
        drawn_from = tuple(self._drawn_from[len(before.drawn_from) :])
        return OpCounts(self._flops - before.flops, self._moved - before.moved, self._draws - before.draws, drawn_from)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        facts = op_facts(func)
        self._draws += facts.draws
        if facts.draws:
            generators = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator))
            self._drawn_from += (x for x in generators if x is not torch.default_generator)
        self._flops += flops_of(func, args, kwargs, out)
        if not func.is_view:
            self._moved += nbytes_of(tensors_among((*args, *kwargs.values(), out)))
        return out
