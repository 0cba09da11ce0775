"""``KeptUses``: of what modules keep and a forward changes, where it is used and where it is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

from torch import Tensor, nn

from meshwright.calls.structure import is_constant
from meshwright.calls.tracer import Slot, memory_of, slot_tensors, slot_value, value_in
from meshwright.described import laid
from meshwright.graph import ROOT, ModelGraph, Path, Span
from meshwright.planning.attribute_uses import AttributeUses, Use
from meshwright.planning.kept import contents, has_memory
from meshwright.planning.memory import Touches


class KeptUses:
    """Of each slot (an attribute or buffer of a module) that a forward changes, what it held and what became of it.

    Its tables, each with what holds of it throughout:

        touched      memory that is shared → the events that use and change it, in order. A ``Recorder`` adds to it.
        changed_in   call → the slots that it changed. A ``Recorder`` adds to it.
        _carried     slot → the memories of the tensors that it held before the forward.
        _kept        slot → what it held before the forward; ``_laid``: of a plain tensor, its shape, type and strides.

    Args:
        changed: the slots.
        graph: of the forward, as far as it has come.
        uses: of attributes, which are told while the forward runs.
    """

    def __init__(self, model: nn.Module, changed: Sequence[Slot], graph: ModelGraph, uses: AttributeUses) -> None:
        self._model, self._graph, self._uses = model, graph, uses
        self.touched: dict[int, Touches] = {}
        self.changed_in: dict[Path, list[Slot]] = {}
        self._modules = {slot: model.get_submodule(slot[0]) for slot in changed}  # each call asks, of each slot
        self._carried = {slot: [memory_of(t) for t in slot_tensors(model, [slot])] for slot in changed}
        self._kept = {slot: slot_value(model, slot) for slot in changed}
        self._laid = {slot: laid(t) for slot, t in self._kept.items() if type(t) is Tensor and has_memory(t)}

    def contents(self) -> dict[Slot, Any]:
        """What the slots hold now."""
        return {slot: contents(value_in(module, slot[1])) for slot, module in self._modules.items()}

    def memories(self, slots: Iterable[Slot]) -> set[int]:
        """The memories that some slots held before the forward."""
        return {memory for slot in slots for memory in self._carried[slot]}

    def tell(self, known: Callable[[Tensor], bool]) -> dict[Slot, Touches]:
        """Writes to the graph what is known of the slots after its forward.

        Args:
            known: whether a tensor is a value.

        Returns:
            The slots that are carried on to the next forward, with the events that use and change them.
        """
        graph, slots = self._graph, dict[Slot, Touches]()
        for slot, uses in self._uses.found.items():
            if self._is_repeated(slot):
                graph.repeated[slot] = self._last_changed(slot, uses)
                continue
            graph.spans += self._of_one_stage(slot, uses)
            touched = self._touches_of(slot, uses)
            if touched.changed:
                graph.changes[slot] = min(max(touched.changed), len(graph.events) - 1)
            if touched.used and self._uses.carries(slot):
                slots[slot] = touched
            lasts = self._is_watched_tensor(slot) or self._uses.carries(slot)
            if touched.changed and lasts and isinstance(slot_value(self._model, slot), Tensor):
                graph.kept[slot] = self._uses_of_tensor(slot, uses, touched)
        # What follows from the batch alone, a cache that was empty, is no value: each stage has its own.
        graph.carried = tuple(
            slot for slot in slots if self._carried[slot] or any(map(known, slot_tensors(self._model, [slot])))
        )
        return slots

    def reshaped(self) -> list[Slot]:
        """The slots whose tensor has another shape or type after the forward: Python may act on that in the next."""
        after = {slot: slot_value(self._model, slot) for slot in self._laid}
        return [slot for slot, t in after.items() if isinstance(t, Tensor) and laid(t) != self._laid[slot]]

    def _is_repeated(self, slot: Slot) -> bool:
        """Whether a slot holds a constant of Python's, and no call that changes it acts on a value: each stage can change its
        own. What follows from the constant alone (``x * self.count``) is no event, and every stage computes it."""
        return self._is_constant(slot) and not self._acting(slot)

    def _is_constant(self, slot: Slot) -> bool:
        return is_constant(self._kept[slot]) and is_constant(slot_value(self._model, slot))

    def _acting(self, slot: Slot) -> list[Path]:
        """The calls that change what a slot holds, and act on a value."""
        changed_in = (path for path, changed in self.changed_in.items() if slot in changed)
        return [path for path in changed_in if self._graph.calls[path].acts]

    def _of_one_stage(self, slot: Slot, uses: list[Use]) -> list[Span]:
        """A constant of Python's that a call changes as a value decides is had by the stage of that call. What is made of it
        elsewhere (``x * self.count``) may be used to the end."""
        acting = self._acting(slot) if self._is_constant(slot) else []
        if not uses or all(self._uses.within(slot, path) and path != ROOT for path in acting):
            return []
        what = ".".join(filter(None, slot))
        return [Span(max(0, uses[0].events - 1), len(self._graph.events) - 1, f"a value decides how {what} is changed")]

    def _last_changed(self, slot: Slot, uses: list[Use]) -> int:
        """The position by which a constant has been changed for the last time."""
        if not uses or slot in self._uses.within_others:
            return len(self._graph.events)
        of_container = isinstance(
            slot_value(self._model, slot), (dict, list, set, deque)
        )  # what is done with it is not told
        return max((use.events for use in uses if use.is_set or of_container), default=len(self._graph.events))

    def is_private(self, slot: Slot, call: Path) -> bool:
        """Whether what a slot holds is used in one call alone. Of a container others may have a name of their own."""
        values = self._kept[slot], slot_value(self._model, slot)
        return all(v is None or isinstance(v, Tensor) for v in values) and self._uses.within(slot, call)

    def is_own_count(self, slot: Slot, call: Path) -> bool:
        """Whether a slot holds a number or the like, before and after, that is used in one call alone."""
        values = self._kept[slot], slot_value(self._model, slot)
        told = slot not in self._uses.within_others and bool(self._uses.found[slot])
        return (
            told
            and all(isinstance(v, (int, float, str, bytes, NoneType)) for v in values)
            and self._uses.within(slot, call)
        )

    def _is_watched_tensor(self, slot: Slot) -> bool:
        """Whether a slot held a tensor, and all its uses are told: what else there is, Python may use at other times."""
        return isinstance(self._kept[slot], Tensor) and slot not in self._uses.within_others

    def _uses_of_tensor(self, slot: Slot, uses: list[Use], touched: Touches) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The events at which a slot that holds a tensor in the end is used, and at which it is changed."""
        events = self._graph.events
        if slot in self._uses.within_others:
            return tuple(p for p in touched.used if p < len(events)), tuple(touched.changed)
        of_memory = touched if self._is_watched_tensor(slot) else Touches()
        is_set = [self._event_beside(use) for use in uses if use.is_set]
        # (Once another was set in its place, who asks for the attribute has that.)
        asked = [self._event_beside(use) for use in uses if not use.is_set] if is_set else []
        changed = {*of_memory.changed, *is_set}
        return tuple(sorted({*of_memory.used, *changed, *asked})), tuple(sorted(changed))

    def _event_beside(self, use: Use) -> int:
        """The event nearest to a use of an attribute, of the call that uses it: one of another call may be another rank's."""
        call = self._graph.calls.get(use.path)
        inside = (
            range(call.start, call.stop) if call is not None and use.path != ROOT else range(len(self._graph.events))
        )
        nearby = [p for p in inside if self._graph.events[p].path == use.path] or list(inside) or [use.events]
        at = use.events - use.is_set
        return min(nearby, key=lambda p: (abs(p - at), p))

    def _touches_of(self, slot: Slot, uses: list[Use]) -> Touches:
        """Positions at which what a slot held is used, and at which that, or what it holds, is changed."""
        touches = Touches()
        for memory in self._carried[slot]:
            touches.used += self.touched.get(memory, Touches()).used
            touches.changed += self.touched.get(memory, Touches()).changed
        if self._is_watched_tensor(slot):
            touches.changed += [max(0, use.events - 1) for use in uses if use.is_set]
            touches.changed += self._writes_to(slot_tensors(self._model, [slot]))
        elif uses:  # what Python does with it is not looked at: it may stand before the event as well as after
            touches.used += [uses[0].events - 1]
            touches.changed += [uses[-1].events]
            if slot in self._uses.within_others:
                touches.changed += [self._graph.calls[use.path].stop for use in uses]
        touches.used = sorted({*touches.used, *touches.changed})
        return touches

    def _writes_to(self, tensors: list[Tensor]) -> list[int]:
        """The events that write to the memory of tensors: of another buffer that a forward has assigned, say."""
        memories = {memory_of(t) for t in tensors} - {0}
        numbers = {n for n, value in enumerate(self._graph.values) if value.storage in memories}
        return [p for p in range(len(self._graph.events)) if numbers.intersection(self._graph.writes(p))]
