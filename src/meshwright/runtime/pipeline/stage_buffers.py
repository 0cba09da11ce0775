"""``StageBuffers``: buffers and attributes that one stage or branch has changed, for others that read them in a later forward.

    training    stage 0: seen += 1     ──► a value of this forward: stage 1 gets it as it gets activations
    evaluation  nobody changes seen    ──► stage 1 reads its own copy: it gets stage 0's before the forward

A buffer has one stage that changes it, and the copies of others are old from then on. As long as each forward changes the
buffer, nobody reads an old copy: the forward's first use of it, and all uses up to its last change, are on that one stage
(planning/memory.py). A forward that does not change it may read it anywhere. The same holds for branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.structure import is_constant, owner_of
from meshwright.calls.tracer import Slot, slot_value
from meshwright.private import pytree, without_modes
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
        """Sends what is in slots from one rank of an axis to the others. ``axis``: ``pp`` or ``tp``."""
        if axis not in self._groups.hosts:  # it has one rank
            return
        on_pp = axis == "pp"
        group = self._groups.pipeline if on_pp else self._groups.tp
        is_source = source == (self._groups.pp_rank if on_pp else self._groups.tp_rank)
        values = [self._value(slot) for slot in slots] if is_source else []
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        holder: list[Any] = [pytree.tree_map_only(Tensor, lambda t: _TensorFacts(t.shape, t.dtype), values)]
        dist.broadcast_object_list(holder, group=self._groups.hosts[axis], group_src=source)
        nbytes = [leaf.nbytes for leaf in pytree.tree_leaves(holder) if isinstance(leaf, _TensorFacts)]
        elements = torch.empty(sum(nbytes), dtype=torch.uint8, device=self._groups.device)
        if tensors:
            torch.cat([as_bytes(t).to(elements.device) for t in tensors], out=elements)
        if len(elements):
            dist.broadcast(elements, group=group, group_src=source)
        if not is_source:
            parts = iter(elements.split(nbytes))
            received = pytree.tree_map_only(_TensorFacts, lambda facts: facts.filled(next(parts)), holder[0])
            for slot, value in zip(slots, received, strict=True):
                self._put(slot, value)

    def _value(self, slot: Slot) -> Any:
        """What a slot holds: a tensor, a constant, or a container of both; else ``_Unsent``."""
        value = slot_value(self._model, slot)
        leaves = pytree.tree_leaves(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = all(type(t) is Tensor and t.layout is torch.strided and not t.is_meta for t in tensors)
        return value if plain and all(isinstance(x, Tensor) or is_constant(x) for x in leaves) else _Unsent()

    def _put(self, slot: Slot, value: Any) -> None:
        """Writes a value to the tensor in a slot, or puts it there."""
        if isinstance(value, _Unsent):
            return
        before: Any = slot_value(self._model, slot)
        if _are_alike(before, value):
            before.detach().copy_(value)
        elif (owner := owner_of(self._model.get_submodule(slot[0]), slot[1])) is not None:
            setattr(*owner, value)


@dataclass(frozen=True)
class _TensorFacts:
    """A tensor without its elements."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def filled(self, elements: Tensor) -> Tensor:
        """The tensor with these bytes. They are copied, since elements of a dtype must be aligned."""
        return elements.clone().view(self.dtype).view(self.shape)


class _Unsent:
    """In the place of a value that cannot be sent."""


def _are_alike(a: Any, b: Any) -> bool:
    """Whether both are plain tensors of one shape and dtype. (A placeholder has a shape too, and no memory to write to.)"""
    return type(a) is Tensor and type(b) is Tensor and (a.shape, a.dtype) == (b.shape, b.dtype)
