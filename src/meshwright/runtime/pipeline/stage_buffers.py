"""``StageBuffers``: buffers and attributes that one stage or branch has changed, for others that read them in a later forward.

    training    stage 0: seen += 1     ──► a value of this forward: stage 1 gets it as it gets activations
    evaluation  nobody changes seen    ──► stage 1 reads its own copy: it gets stage 0's before the forward

A buffer has one stage that changes it, and the copies of others are old from then on. As long as each forward changes the
buffer, nobody reads an old copy: the forward's first use of it, and all uses up to its last change, are on that one stage
(planning/memory.py). A forward that does not change it may read it anywhere. The same holds for branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.structure import owner_of
from meshwright.calls.tracer import Slot, slot_value
from meshwright.runtime.pipeline.homes import Home, Homes
from meshwright.runtime.pipeline.program import Program


class StageBuffers:
    """Which buffers and attributes stages and branches have changed since the others got them.

    Args:
        model: the model.
        sharing: sends values from their homes.
    """

    def __init__(self, model: nn.Module, sharing: Homes) -> None:
        self._model, self._sharing = model, sharing
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
        received = self._sharing.share(wanted, lambda slot: slot_value(self._model, slot))
        with torch.no_grad():
            for slot, value in received.items():
                self._put(slot, value)
        if lasting:
            for slot in wanted:
                del self._homes[slot]

    def _put(self, slot: Slot, value: Any) -> None:
        """Writes a value to the tensor in a slot, or puts it there."""
        before: Any = slot_value(self._model, slot)
        if _are_alike(before, value):
            before.detach().copy_(value)
        elif (owner := owner_of(self._model.get_submodule(slot[0]), slot[1])) is not None:
            setattr(*owner, value)


def _are_alike(a: Any, b: Any) -> bool:
    """Whether both are plain tensors of one shape and dtype. (A placeholder has a shape too, and no memory to write to.)"""
    return type(a) is Tensor and type(b) is Tensor and (a.shape, a.dtype) == (b.shape, b.dtype)
