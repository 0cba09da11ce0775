"""``SlotUses``: which events use, and which change, the slots (attributes and buffers of modules) that a forward changes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

from torch import Tensor, nn

from meshwright.calls.structure import is_constant
from meshwright.calls.tracer import Slot, memory_of, slot_tensors, slot_value, value_in
from meshwright.described import tensor_meta
from meshwright.graph import ROOT, ModelGraph, Path, Span
from meshwright.planning.attribute_uses import AttributeUses, Use
from meshwright.planning.memory import Touches
from meshwright.planning.module_state import contents, has_memory


class SlotUses:
    """For each slot (an attribute or buffer of a module) that a forward changes: its content before, its uses and changes.

    Its tables:

        touched      memory → the events that use and change it, in order. A ``ForwardRecorder`` adds to it.
        changed_in   call → the slots that it changed. A ``ForwardRecorder`` adds to it.
        _carried     slot → the memories of the tensors that it held before the forward.
        _of_several  memories in which several tensors of slots were before the forward.
        _before      slot → its content before the forward; ``_tensor_meta``: the ``TensorMeta`` of a plain tensor.

    Args:
        changed: the slots that the forward changes.
        graph: the forward's graph, which grows while the forward runs.
        uses: the uses of attributes, recorded while the forward runs.
    """

    def __init__(self, model: nn.Module, changed: Sequence[Slot], graph: ModelGraph, uses: AttributeUses) -> None:
        self._model, self._graph, self._uses = model, graph, uses
        self.touched: dict[int, Touches] = {}
        self.changed_in: dict[Path, list[Slot]] = {}
        # Looked up once: each call reads all slots.
        self._modules = {slot: model.get_submodule(slot[0]) for slot in changed}
        self._carried = {slot: [memory_of(t) for t in slot_tensors(model, [slot])] for slot in changed}
        tensors = {id(t): memory_of(t) for t in slot_tensors(model, changed)}
        self._of_several = {memory for memory, count in Counter(tensors.values()).items() if memory and count > 1}
        self._before = {slot: slot_value(model, slot) for slot in changed}
        self._tensor_meta = {
            slot: tensor_meta(t) for slot, t in self._before.items() if type(t) is Tensor and has_memory(t)
        }

    def contents(self) -> dict[Slot, Any]:
        """Slot → identities of what it holds now, see ``contents``."""
        return {slot: contents(value_in(module, slot[1])) for slot, module in self._modules.items()}

    def memories(self, slots: Iterable[Slot]) -> set[int]:
        """The memories of the tensors that ``slots`` held before the forward."""
        return {memory for slot in slots for memory in self._carried[slot]}

    def tell(self, known: Callable[[Tensor], bool]) -> dict[Slot, Touches]:
        """Writes the slots' uses and changes to the graph. Called once, after the forward.

        Args:
            known: whether a tensor is a value of the graph.

        Returns:
            Slot → the events that use and change it, for the slots whose content one forward leaves to the next.
        """
        graph, slots = self._graph, dict[Slot, Touches]()
        for slot, uses in self._uses.by_slot.items():
            in_events = self._changes_in_events(slot)
            if self._is_repeated(slot) and not in_events:
                graph.repeated[slot] = self._last_changed(slot, uses)
                continue
            graph.spans += self._of_one_stage(slot, uses)
            graph.spans += self._of_event_and_uses(slot, uses) if in_events else []
            touched = self._touches_of(slot, uses)
            if touched.changed:
                graph.changes[slot] = min(max(touched.changed), len(graph.events) - 1)
            if touched.used and self._uses.carries(slot):
                slots[slot] = touched
            lasts = self._is_watched_tensor(slot) or self._uses.carries(slot)
            if touched.changed and (in_events or (lasts and self._holds_tensor(slot))):
                graph.slot_uses[slot] = self._used_and_changed(slot, uses, touched)
        # A tensor that is computed from the batch alone (a cache that was empty) is no value: each stage has its own.
        graph.carried = tuple(
            slot for slot in slots if self._carried[slot] or any(map(known, slot_tensors(self._model, [slot])))
        )
        return slots

    def reshaped(self) -> list[Slot]:
        """The slots whose tensor has another shape, stride or dtype after the forward: Python may act on that in the next."""
        after = {slot: slot_value(self._model, slot) for slot in self._tensor_meta}
        return [
            slot for slot, t in after.items() if isinstance(t, Tensor) and tensor_meta(t) != self._tensor_meta[slot]
        ]

    def _is_repeated(self, slot: Slot) -> bool:
        """Whether every stage can change its own copy of a slot: the slot holds a Python constant, and no call that changes it
        acts on a value. A computation from the constant alone is no event, and every stage runs it."""
        return self._is_constant(slot) and not self._acting(slot)

    def _is_constant(self, slot: Slot) -> bool:
        return is_constant(self._before[slot]) and is_constant(slot_value(self._model, slot))

    def _acting(self, slot: Slot) -> list[Path]:
        """The calls that change a slot and act on a value (``if x.any(): self.count += 1``)."""
        changed_in = (path for path, changed in self.changed_in.items() if slot in changed)
        return [path for path in changed_in if self._graph.calls[path].acts]

    def _of_one_stage(self, slot: Slot, uses: list[Use]) -> list[Span]:
        """The span for a Python constant that a call changes depending on a value: only that call's stage has the constant.

        Results that other calls compute from it (``x * self.count``) may be used up to the end. Empty if no other call uses
        the constant.
        """
        acting = self._acting(slot) if self._is_constant(slot) else []
        if not uses or all(self._uses.within(slot, path) and path != ROOT for path in acting):
            return []
        first, last = max(0, uses[0].events - 1), len(self._graph.events) - 1
        return [Span(first, last, f"a value decides how {'.'.join(filter(None, slot))} is changed")]

    def _changes_in_events(self, slot: Slot) -> bool:
        """Whether a slot is changed by code that runs within an event. A read of an object that is no tensor may change it."""
        return any(use.within_event and self._changes(slot, use) for use in self._uses.by_slot[slot])

    def _changes(self, slot: Slot, use: Use) -> bool:
        """Whether a use may have changed a slot. What Python does with an object that is no tensor is not recorded."""
        return use.is_set or not self._holds_tensor(slot)

    def _holds_tensor(self, slot: Slot) -> bool:
        return isinstance(slot_value(self._model, slot), Tensor)

    def _of_event_and_uses(self, slot: Slot, uses: list[Use]) -> list[Span]:
        """The span for a slot that code within an event changes: that code runs on the event's stage alone, and what it leaves
        in the slot is no result of the event. What is read outside of events may be used up to the end."""
        last = len(self._graph.events) - 1
        positions = [min(last, use.events - (use.within_event and use.is_set)) for use in uses]
        if not all(use.within_event for use in uses):
            positions += [max(0, positions[0] - 1), last]
        name = ".".join(filter(None, slot))
        return [Span(min(positions), max(positions), f"{name} is changed within a function that is not followed")]

    def _last_changed(self, slot: Slot, uses: list[Use]) -> int:
        """The position of the event before which a constant has its last change; the forward's end if uses may be missing."""
        if not uses or slot in self._uses.unobserved:
            return len(self._graph.events)
        # A container may be changed after it was read, which is not recorded: each read counts as a change.
        is_container = isinstance(slot_value(self._model, slot), (dict, list, set, deque))
        return max((use.events for use in uses if use.is_set or is_container), default=len(self._graph.events))

    def is_private(self, slot: Slot, call: Path) -> bool:
        """Whether a slot holds a tensor or None, before and after, and is used in one call alone. (Not a container: other code
        may hold a reference to it.)"""
        values = self._before[slot], slot_value(self._model, slot)
        return all(v is None or isinstance(v, Tensor) for v in values) and self._uses.within(slot, call)

    def is_own_count(self, slot: Slot, call: Path) -> bool:
        """Whether a slot holds a number, text or None, before and after, and is used in one call alone."""
        values = self._before[slot], slot_value(self._model, slot)
        observed = slot not in self._uses.unobserved and bool(self._uses.by_slot[slot])
        if not observed or not all(isinstance(v, (int, float, str, bytes, NoneType)) for v in values):
            return False
        return self._uses.within(slot, call)

    def _is_watched_tensor(self, slot: Slot) -> bool:
        """Whether a slot held a tensor and all of its uses were recorded. (Python may use other objects without a record.)"""
        return isinstance(self._before[slot], Tensor) and slot not in self._uses.unobserved

    def _used_and_changed(
        self, slot: Slot, uses: list[Use], touched: Touches
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(events that use the slot, events that change it)."""
        events = self._graph.events
        if slot in self._uses.unobserved:
            return tuple(p for p in touched.used if p < len(events)), tuple(touched.changed)
        of_memory = touched if self._is_watched_tensor(slot) else Touches()
        changing = [self._event_beside(use) for use in uses if self._changes(slot, use)]
        # If another tensor was assigned to the attribute, each read of the attribute may use that tensor.
        reads = [self._event_beside(use) for use in uses if not self._changes(slot, use)] if changing else []
        changed = {*of_memory.changed, *changing}
        return tuple(sorted({*of_memory.used, *changed, *reads})), tuple(sorted(changed))

    def _event_beside(self, use: Use) -> int:
        """The position of the event nearest to a use of an attribute, among the events of the call that uses it if it has any:
        an event of another call may run on another rank."""
        call = self._graph.calls.get(use.path)
        inside = range(len(self._graph.events))
        if call is not None and use.path != ROOT:
            inside = range(call.start, call.stop)
        nearby = [p for p in inside if self._graph.events[p].path == use.path] or list(inside) or [use.events]
        at = use.events - use.is_set
        return min(nearby, key=lambda p: (abs(p - at), p))

    def _touches_of(self, slot: Slot, uses: list[Use]) -> Touches:
        """Positions of the events that use the content that a slot had before the forward, and of those that change it."""
        touches = Touches()
        for memory in self._carried[slot]:
            touches.used += self.touched.get(memory, Touches()).used
            touches.changed += self.touched.get(memory, Touches()).changed
        if self._is_watched_tensor(slot):
            touches.changed += [max(0, use.events - 1) for use in uses if use.is_set]
            touches.changed += self._writes_to(slot_tensors(self._model, [slot]))
        elif uses:  # what Python does with the object is not recorded: the use may be before the event or after it
            touches.used += [uses[0].events - 1]
            touches.changed += [uses[-1].events]
            if slot in self._uses.unobserved:
                touches.changed += [self._graph.calls[use.path].stop for use in uses]
        touches.used = sorted({*touches.used, *touches.changed})
        if touches.changed and self._of_several.intersection(self._carried[slot]):
            touches.changed = touches.used  # no event gives another stage the other tensors of a memory that it writes
        return touches

    def _writes_to(self, tensors: list[Tensor]) -> list[int]:
        """The events that write to the memory of ``tensors``, for example of a new buffer that the forward has assigned."""
        memories = {memory_of(t) for t in tensors} - {0}
        numbers = {n for n, value in enumerate(self._graph.values) if value.storage in memories}
        return [p for p in range(len(self._graph.events)) if numbers.intersection(self._graph.writes(p))]
