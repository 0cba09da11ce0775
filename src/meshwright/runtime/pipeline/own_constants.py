"""What modules keep, if several ranks or several stages of one rank run forwards of the same microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from meshwright.calls.stage import StageProgram
from meshwright.calls.structure import attributes_in, owner_of
from meshwright.calls.tracer import Slot, slot_value
from meshwright.runtime.module_state import content_of, fill


@contextmanager
def kept_elsewhere(model: nn.Module, program: StageProgram) -> Iterator[None]:
    """What other stages change of what modules keep is, here, after a forward what it was before."""
    slots = [slot for slot, p in program.graph.changes.items() if not program.start <= p < program.stop]
    before = [_Held.of(model, slot) for slot in slots]
    try:
        yield
    finally:
        for held in before:
            if held.value is not None and held.value is not _MISSING:
                held.put_back(model)


class OwnConstants:
    """Constants of Python's that each stage changes (``ModelGraph.repeated``), if a rank has several stages: each of them
    goes on from what it has left itself, as a rank does that has this stage alone.

    Args:
        slots: where modules keep them.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], stages: Sequence[int]) -> None:
        self._model, self._slots = model, slots if len(stages) > 1 else []
        begin = [_Held.of(model, slot) for slot in self._slots]
        self._states = dict.fromkeys(stages, begin)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """For the time of a forward of a stage. What it leaves stays: all stages leave the same."""
        for held in self._states[stage]:
            held.put_back(self._model)
        yield
        self._states[stage] = [_Held.of(self._model, slot) for slot in self._slots]


_MISSING = object()


class _Held(NamedTuple):
    """What a slot held: the very thing, and of a container what was in it. ``_MISSING``: there was no such attribute."""

    slot: Slot
    value: Any
    content: Any

    @staticmethod
    def of(model: nn.Module, slot: Slot) -> _Held:
        value, owner = slot_value(model, slot), owner_of(model.get_submodule(slot[0]), slot[1])
        if value is None and (owner is None or owner[1] not in attributes_in(owner[0])):
            value = _MISSING
        return _Held(slot, value, content_of(value) if type(value) in (list, dict, set) else None)

    def put_back(self, model: nn.Module) -> None:
        """The slot has this again."""
        owner = owner_of(model.get_submodule(self.slot[0]), self.slot[1])
        if owner is None:
            return
        if self.value is _MISSING:
            attributes_in(owner[0]).pop(owner[1], None)
        elif slot_value(model, self.slot) is not self.value:
            if isinstance(owner[0], nn.Module):
                setattr(*owner, self.value)
            else:
                attributes_in(owner[0])[owner[1]] = self.value
        if self.content is not None:
            fill(self.value, self.content)
