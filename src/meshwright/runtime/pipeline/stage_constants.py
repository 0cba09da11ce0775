"""State that modules keep in attributes, if several ranks, or several stages of a rank, run forwards of one microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from meshwright.calls.placeholder import Placeholder
from meshwright.calls.stage import StageProgram
from meshwright.calls.structure import attributes_in, owner_of
from meshwright.calls.tracer import Slot, slot_value
from meshwright.described import tensors_within
from meshwright.runtime.module_state import content_of, fill
from meshwright.runtime.pipeline.homes import Home


@contextmanager
def other_ranks_state_kept(model: nn.Module, program: StageProgram, changed: Mapping[Slot, Home]) -> Iterator[None]:
    """A context for a forward of one stage. Afterwards, attributes that other stages change have their values from before; and
    so have those in which a branch of other ranks has left what this rank does not have.

    A stage follows the whole forward, so it may also run code that changes attributes on behalf of others.

    Args:
        changed: the buffers and attributes that one stage or branch changes.
    """
    slots = [slot for slot, event in program.graph.changes.items() if not program.start <= event < program.stop]
    of_branches = [slot for slot, home in changed.items() if home.place not in program.rank_places]
    contents = [_SlotContent.of(model, slot) for slot in slots]
    contents_of_branches = [_SlotContent.of(model, slot) for slot in of_branches]
    try:
        yield
    finally:
        contents += [c for c in contents_of_branches if _has_placeholder(slot_value(model, c.slot))]
        for content in contents:
            if content.value is not None and content.value is not _MISSING:
                content.restore(model)


def _has_placeholder(value: Any) -> bool:
    return any(isinstance(t, Placeholder) for t in tensors_within(value))


class StageConstants:
    """Gives each stage of a rank separate values of the Python constants that every stage changes (``ModelGraph.repeated``).

    So a stage continues from the values that it has left itself, as on a rank with this stage alone. Does nothing if the rank
    has one stage.

    Args:
        model: the model.
        slots: the attributes with these constants.
        stages: numbers of this rank's stages.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], stages: Sequence[int]) -> None:
        self._model, self._slots = model, slots if len(stages) > 1 else []
        begin = [_SlotContent.of(model, slot) for slot in self._slots]
        self._contents = dict.fromkeys(stages, begin)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """A context for a forward of a stage: the attributes have the values of this stage.

        The new values stay in the model afterwards; all stages leave equal ones.
        """
        for content in self._contents[stage]:
            content.restore(self._model)
        yield
        self._contents[stage] = [_SlotContent.of(self._model, slot) for slot in self._slots]


_MISSING = object()


class _SlotContent(NamedTuple):
    """The value of an attribute at one moment.

    Attributes:
        slot: the module and the path of the attribute in it.
        value: the object itself; ``_MISSING`` if the attribute did not exist.
        content: a copy of the items of a list, dict or set; None for other values.
    """

    slot: Slot
    value: Any
    content: Any

    @staticmethod
    def of(model: nn.Module, slot: Slot) -> _SlotContent:
        """The present value of an attribute."""
        value, owner = slot_value(model, slot), owner_of(model.get_submodule(slot[0]), slot[1])
        if value is None and (owner is None or owner[1] not in attributes_in(owner[0])):
            value = _MISSING
        return _SlotContent(slot, value, content_of(value) if type(value) in (list, dict, set) else None)

    def restore(self, model: nn.Module) -> None:
        """Gives the attribute this value again; of a container, also its items."""
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
