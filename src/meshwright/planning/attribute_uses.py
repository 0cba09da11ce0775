"""``AttributeUses``: when a forward reads and sets attributes of modules, and of the plain objects within them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from meshwright.blame import called_by_model
from meshwright.calls.structure import owner_of, plain_objects
from meshwright.calls.tracer import Slot
from meshwright.graph import Path
from meshwright.planning.module_state import own_attributes


class Use(NamedTuple):
    """One use of an attribute.

    Attributes:
        events: how many events the forward had had before it, with the event within which it was set.
        is_set: whether the attribute was set; else it was read.
        path: the call whose forward used it.
        within_event: whether it was within an event, as a call of a function that ``torch.func`` transformed is. Only the
            stage of the event runs what is within.
    """

    events: int
    is_set: bool
    path: Path
    within_event: bool = False


class AttributeUses:
    """Records when attributes are read and set. Inside ``with uses.watched()``, their owners (modules and plain objects) have
    classes that record each access.

    The class of some objects cannot be changed (``types.SimpleNamespace``). Then only the reads of the module's attribute that
    holds the object are recorded, not what is done with the object.

    Args:
        slots: the attributes.
        now: returns how many events the forward has had.
        where: returns the call whose forward runs.
        within_event: returns whether an event runs.

    Attributes:
        by_slot: attribute → its uses, in order.
        unobserved: attributes of which some uses may be missing: their object's class cannot be changed, or the model has read
            the ``__dict__`` of their owner.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Iterable[Slot],
        now: Callable[[], int],
        where: Callable[[], Path],
        within_event: Callable[[], bool],
    ) -> None:
        self._model, self._now, self._where, self._within_event = model, now, where, within_event
        self.by_slot: dict[Slot, list[Use]] = {slot: [] for slot in slots}
        self.unobserved: set[Slot] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Records each use of a slot."""
        before: list[tuple[Any, type]] = []
        try:
            for owner, slots in self._owners():
                before.append((owner, type(owner)))
                object.__setattr__(owner, "__class__", self._recording_class(type(owner), slots))
            yield
        finally:
            for owner, cls in before:
                object.__setattr__(owner, "__class__", cls)

    def _owners(self) -> list[tuple[Any, dict[str, list[Slot]]]]:
        """The modules and objects to watch: (owner, name of its attribute → the slots of which a use is recorded)."""
        owners: dict[int, tuple[Any, dict[str, list[Slot]]]] = {}
        silent: dict[int, list[Slot]] = {}
        for slot in self.by_slot:
            if (owned := owner_of(self._model.get_submodule(slot[0]), slot[1])) is not None:
                owner, name = owned
                if _class_can_change(owner):
                    owners.setdefault(id(owner), (owner, {}))[1].setdefault(name, []).append(slot)
                else:
                    silent.setdefault(id(owner), []).append(slot)
        self.unobserved = {slot for slots in silent.values() for slot in slots}
        for module in self._model.modules() if silent else ():
            for name in own_attributes(vars(module)):
                objects = plain_objects(name, vars(module)[name], set())
                slots_within = [slot for _, item in objects for slot in silent.get(id(item), ())]
                if slots_within:
                    owners.setdefault(id(module), (module, {}))[1].setdefault(name, []).extend(slots_within)
        return list(owners.values())

    def _recording_class(self, cls: Any, slots: Mapping[str, Sequence[Slot]]) -> type:
        """A subclass of ``cls`` that records each read and write of the attributes in ``slots``."""

        def note(name: str, is_set: bool) -> None:
            within_event = self._within_event()
            for slot in slots.get(name, ()):
                events = self._now() + (is_set and within_event)
                self.by_slot[slot].append(Use(events, is_set, self._where(), within_event))

        def get(owner: Any, name: str) -> Any:
            if name == "__dict__" and called_by_model():  # what the model does with the dict is not recorded
                self.unobserved.update(slot for of_attribute in slots.values() for slot in of_attribute)
                for attribute in slots:
                    note(attribute, False)
            note(name, False)
            return cls.__getattribute__(owner, name)

        def put(owner: Any, name: str, value: Any) -> None:
            note(name, True)
            cls.__setattr__(owner, name, value)

        return _like(cls, {"__getattribute__": get, "__setattr__": put})

    def within(self, slot: Slot, call: Path) -> bool:
        """Whether every use of the slot was within one call, or in calls that it made."""
        return all(use.path[: len(call)] == call for use in self.by_slot[slot])

    def carries(self, slot: Slot) -> bool:
        """Whether the forward may use what the slot held before it: the slot's first use was not a write."""
        return not self.by_slot[slot] or not self.by_slot[slot][0].is_set


def _class_can_change(owner: Any) -> bool:
    """Whether an object's class can be changed for a while. Tries it."""
    if isinstance(owner, nn.Module):
        return True
    cls = type(owner)
    try:
        object.__setattr__(owner, "__class__", _like(cls, {}))
        object.__setattr__(owner, "__class__", cls)
    except Exception:  # a class may raise anything if it is subclassed
        return False
    return True


def _like(cls: Any, methods: Mapping[str, Any]) -> type:
    """A subclass of ``cls`` with more methods. Its objects have the same memory layout, so ``__class__`` may be assigned."""
    slots = {} if issubclass(cls, nn.Module) else {"__slots__": ()}
    return type(cls)(cls.__name__, (cls,), {**slots, **methods, "__module__": cls.__module__})
