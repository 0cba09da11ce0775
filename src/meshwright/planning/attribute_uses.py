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
from meshwright.planning.kept import own_attributes


class Use(NamedTuple):
    """Of an attribute: how many events there had been, whether it was set, and the call whose forward did it."""

    events: int
    is_set: bool
    path: Path


class AttributeUses:
    """When attributes are read and set: for the time of a ``with``, the modules and objects that have them are of classes that
    tell.

    Attributes:
        found: of each attribute its uses, in order.
        within_others: attributes of objects that cannot tell, or whose ``__dict__`` the model has asked for.

    Of an object whose class cannot be changed (``types.SimpleNamespace``) it is told when a module's attribute is read that it
    is within; what is done with it then is not.
    """

    def __init__(
        self, model: nn.Module, slots: Iterable[Slot], now: Callable[[], int], where: Callable[[], Path]
    ) -> None:
        self._model, self._now, self._where = model, now, where
        self.found: dict[Slot, list[Use]] = {slot: [] for slot in slots}
        self.within_others: set[Slot] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes each use of a slot."""
        before: list[tuple[Any, type]] = []
        try:
            for owner, slots in self._owners():
                before.append((owner, type(owner)))
                object.__setattr__(owner, "__class__", self._telling(type(owner), slots))
            yield
        finally:
            for owner, cls in before:
                object.__setattr__(owner, "__class__", cls)

    def _owners(self) -> list[tuple[Any, dict[str, list[Slot]]]]:
        """What has the attributes, and will tell of them: (the module or object, its attribute → what is told of it)."""
        owners: dict[int, tuple[Any, dict[str, list[Slot]]]] = {}
        silent: dict[int, list[Slot]] = {}
        for slot in self.found:
            if (owned := owner_of(self._model.get_submodule(slot[0]), slot[1])) is not None:
                owner, name = owned
                if _can_tell(owner):
                    owners.setdefault(id(owner), (owner, {}))[1].setdefault(name, []).append(slot)
                else:
                    silent.setdefault(id(owner), []).append(slot)
        self.within_others = {slot for slots in silent.values() for slot in slots}
        for module in self._model.modules() if silent else ():
            for name in own_attributes(vars(module)):
                told = [s for _, o in plain_objects(name, vars(module)[name], set()) for s in silent.get(id(o), ())]
                if told:
                    owners.setdefault(id(module), (module, {}))[1].setdefault(name, []).extend(told)
        return list(owners.values())

    def _telling(self, cls: Any, slots: Mapping[str, Sequence[Slot]]) -> type:
        def note(name: str, is_set: bool) -> None:
            for slot in slots.get(name, ()):
                self.found[slot].append(Use(self._now(), is_set, self._where()))

        def get(owner: Any, name: str) -> Any:
            if name == "__dict__" and called_by_model():  # what is done with it is not told
                self.within_others.update(slot for told in slots.values() for slot in told)
                for any_of_them in slots:
                    note(any_of_them, False)
            note(name, False)
            return cls.__getattribute__(owner, name)

        def put(owner: Any, name: str, value: Any) -> None:
            note(name, True)
            cls.__setattr__(owner, name, value)

        return _like(cls, {"__getattribute__": get, "__setattr__": put})

    def within(self, slot: Slot, call: Path) -> bool:
        """Whether the slot was used in a call alone."""
        return all(use.path[: len(call)] == call for use in self.found[slot])

    def carries(self, slot: Slot) -> bool:
        """Whether what the slot held before may be used: it was not set first of all."""
        return not self.found[slot] or not self.found[slot][0].is_set


def _can_tell(owner: Any) -> bool:
    """Whether an object can be of another class for a while."""
    if isinstance(owner, nn.Module):
        return True
    cls = type(owner)
    try:
        object.__setattr__(owner, "__class__", _like(cls, {}))
        object.__setattr__(owner, "__class__", cls)
    except Exception:  # whatever a class may say to having a subclass
        return False
    return True


def _like(cls: Any, methods: Mapping[str, Any]) -> type:
    """A class whose objects are laid out as those of ``cls``."""
    slots = {} if issubclass(cls, nn.Module) else {"__slots__": ()}
    return type(cls)(cls.__name__, (cls,), {**slots, **methods, "__module__": cls.__module__})
