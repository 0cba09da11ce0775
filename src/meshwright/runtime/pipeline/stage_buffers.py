"""``StageBuffers``: buffers and attributes that one stage or branch has changed, for others that read them in a later forward.

    training    stage 0: seen += 1     ──► a value of this forward: stage 1 gets it as it gets activations
    evaluation  nobody changes seen    ──► stage 1 reads its own copy: it gets stage 0's before the forward

A buffer has one stage that changes it, and the copies of others are old from then on. As long as each forward changes the
buffer, nobody reads an old copy: the forward's first use of it, and all uses up to its last change, are on that one stage
(planning/memory.py). A forward that does not change it may read it anywhere. The same holds for branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.structure import is_constant, owner_of
from meshwright.calls.tracer import Slot, slot_value
from meshwright.private import without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.pipeline.program import Home, Program


class StageBuffers:
    """Which buffers and attributes stages and branches have changed since the others got them.

    Args:
        model: the model.
        recipe: every decision of the plan.
        groups: process groups and device.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups) -> None:
        self._model, self._recipe, self._groups = model, recipe, groups
        self._homes: dict[Slot, Home] = {}  # of the slots that were changed

    def note(self, programs: Iterable[Program]) -> None:
        """Call after the forwards of a step: notes what they have changed."""
        for program in programs:
            self._homes.update(program.changed)

    def bring(self, programs: Sequence[Program], *, lasting: bool) -> None:
        """Call before the forwards of a step: sends all ranks of a copy of the model what a forward does not change itself.

        Collective over these ranks, if there is anything to send.

        Args:
            lasting: whether the copies stay. After a trial, modules have what they had before it.
        """
        wanted = {
            slot: home for slot, home in self._homes.items() if any(slot not in program.changed for program in programs)
        }
        with without_modes(), torch.no_grad():
            for home in sorted(set(wanted.values())):
                if home.place and home.pp_rank == self._groups.pp_rank:
                    self._send([slot for slot in wanted if wanted[slot] == home], "tp", self._first_of(home.place))
            for pp_rank in sorted({home.pp_rank for home in wanted.values()}):
                self._send([slot for slot in wanted if wanted[slot].pp_rank == pp_rank], "pp", pp_rank)
        if lasting:
            for slot in wanted:
                del self._homes[slot]

    def _first_of(self, place: int) -> int:
        """The first rank, on the tp axis of this rank, that belongs to a place."""
        places, rank = self._recipe.places, self._groups.rank
        return next(i for i, other in enumerate(places.line(0, rank)) if places.at(other, place) is not None)

    def _send(self, slots: Sequence[Slot], axis: str, source: int) -> None:
        """Sends the tensors and constants in slots from one rank of an axis to the others. ``axis``: ``pp`` or ``tp``."""
        if axis not in self._groups.hosts:  # it has one rank
            return
        on_pp = axis == "pp"
        group = self._groups.pipeline if on_pp else self._groups.tp
        is_source = source == (self._groups.pp_rank if on_pp else self._groups.tp_rank)
        values = [slot_value(self._model, slot) for slot in slots] if is_source else []
        holder = [[_Facts.of(value) for value in values]]
        dist.broadcast_object_list(holder, group=self._groups.hosts[axis], group_src=source)
        for i, (slot, facts) in enumerate(zip(slots, holder[0], strict=True)):
            if facts.dtype is not None:
                value = (
                    values[i] if is_source else torch.empty(facts.shape, dtype=facts.dtype, device=self._groups.device)
                )
                dist.broadcast(as_bytes(value), group=group, group_src=source)
                if not is_source:
                    self._put(slot, value)
            elif facts.is_constant and not is_source:
                self._put(slot, facts.constant)

    def _put(self, slot: Slot, value: Any) -> None:
        """Writes a value to the tensor in a slot, or puts it there."""
        before: Any = slot_value(self._model, slot)
        if _are_alike(before, value):
            before.detach().copy_(value)
        elif (owner := owner_of(self._model.get_submodule(slot[0]), slot[1])) is not None:
            setattr(*owner, value)


class _Facts(NamedTuple):
    """What is sent of a value before its elements.

    Attributes:
        shape, dtype: of a tensor.
        is_constant, constant: whether it is a Python constant, and which.
    """

    shape: torch.Size = torch.Size()
    dtype: torch.dtype | None = None
    is_constant: bool = False
    constant: Any = None

    @classmethod
    def of(cls, value: Any) -> _Facts:
        """Those of a value. Neither a tensor nor a constant if it cannot be sent."""
        if isinstance(value, Tensor):
            return cls(value.shape, value.dtype) if value.layout is torch.strided and not value.is_meta else cls()
        return cls(is_constant=True, constant=value) if is_constant(value) else cls()


def _are_alike(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
