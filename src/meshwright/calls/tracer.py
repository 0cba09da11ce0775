"""``Tracer``: follows a forward through its module calls, and sees every torch function that is an event.

A tracer records a model (planning/capture.py), another runs a stage of it (calls/interpreter.py). Both number calls and events
alike, so that the n-th event of a call is the same in both:

    call      a call of a module's forward
    event     a torch function that the model's own code calls with a parameter or a value, or that draws random numbers.
              A function of the batch alone (masks, positions) is no event: every rank computes it.

A tensor is a value if it is the result of an event, or if its memory is *shared*. Memory is shared if an event wrote to it
(``out = zeros(…)``, then ``out[:, 0].copy_(h)``: now ``out`` depends on ``h``, through any view), or if a module keeps it from
one forward to the next and a forward changes it (an average in a buffer).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.hook import Forward
from meshwright.calls.structure import attributes_in, owner_of, tensors_of
from meshwright.described import tensors_within
from meshwright.graph import Path, Segment
from meshwright.private import storage_of, storage_within
from meshwright.spmd.autograd_functions import (
    FunctionMode,
    custom_functions,
    followed_checkpoints,
    scripted_functions,
    transformed_functions,
    transforming,
)
from meshwright.spmd.torch_functions import LISTENING, is_fact, is_random, label_of, target_of

# If the class of the right operand is a subclass of the left one's (a parameter, a placeholder), Python calls the right one
# first: `h > p` becomes `p < h`. So that a comparison is the same event on every rank, each is turned into its mirror image.
_MIRRORED = {
    getattr(namespace, less): getattr(namespace, greater)
    for namespace in (Tensor, torch)
    for less, greater in (("lt", "gt"), ("le", "ge"), ("less", "gt"), ("less_equal", "ge"))
} | {Tensor.__lt__: Tensor.__gt__, Tensor.__le__: Tensor.__ge__}


def is_hook_node(function: Any) -> bool:
    """Whether an ``autograd.Function`` is torch's own, whose node runs the backward hooks of a module."""
    return bool(function.__name__ == "BackwardHookFunction")


def memory_of(t: Tensor) -> int:
    """A number for the memory of a plain tensor, equal for tensors that share it; 0 for a tensor without memory of its own."""
    return storage_of(t) if type(t) is Tensor and t.layout is torch.strided else 0


Slot = tuple[str, str]
"""(name of a module, name of its buffer or attribute, or of an attribute of a plain object within one: ``stats.mean``)."""


def slot_tensors(model: nn.Module, slots: Iterable[Slot]) -> list[Tensor]:
    """The tensors that are in these slots now."""
    return tensors_of([slot_value(model, slot) for slot in slots])


def slot_value(model: nn.Module, slot: Slot) -> Any:
    """The value in a slot now, or None. It is read without an attribute access, as planning watches the model's accesses."""
    return value_in(model.get_submodule(slot[0]), slot[1])


def value_in(module: nn.Module, key: str) -> Any:
    """The value of a buffer or attribute of one module now, or None. ``key``: its name, such as ``stats.mean``."""
    owner_and_name = owner_of(module, key)
    if owner_and_name is None:
        return None
    owner, name = owner_and_name
    attributes = attributes_in(owner)
    tables = (attributes, *(attributes[table] for table in ("_buffers", "_parameters") if isinstance(owner, nn.Module)))
    return next((table[name] for table in tables if name in table), None)


@dataclass
class Frame:
    """A call that is being traced.

    Attributes:
        path: its path.
        events: how many events it has had so far; ``checkpoints``: how many checkpoints.
        code_calls: how many times it has called a function that runs code of the model (an ``autograd.Function``, say) with
            arguments that follow from the batch alone.
        calls: how many times it has called each module.
    """

    path: Path
    events: int = 0
    checkpoints: int = 0
    code_calls: int = 0
    calls: Counter[str] = field(default_factory=Counter)


def _no_tracer() -> None:
    return None


class Mark:
    """Marks a tensor as a value of a tracer, besides the number of the value.

    It holds a weak reference. Autograd holds saved tensors where Python's garbage collector does not look; if they held the
    tracer, which holds tensors, neither would ever be freed.
    """

    __slots__ = ("tracer",)

    def __init__(self, tracer: Tracer | None) -> None:
        self.tracer: Callable[[], Tracer | None] = _no_tracer if tracer is None else weakref.ref(tracer)

    def __reduce__(self) -> Any:  # outputs are pickled, for other processes, which have no tracer
        return Mark, (None,)


class Tracer(FunctionMode):
    """Follows one forward. Subclasses decide what becomes of calls, events and facts.

    Args:
        carried: tensors that modules keep from one forward to the next, and that a forward changes.

    Attributes:
        shared: number of a memory → its storage: every tensor in it is a value. The storage is held, so that no other memory
            gets its number. It only grows.
        renamed: number of a value → its number since an event wrote to its memory through another tensor. It only grows.
        closed: how many calls are running that are not traced. While it is not 0, no function is an event.
    """

    def __init__(self, carried: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.shared: dict[int, Any] = {}
        self.renamed: dict[int, int] = {}
        for t in carried:
            self.share_memory(t)
        self.mark = Mark(self)
        self.frames = [Frame(())]
        self.thread = threading.get_ident()
        self.closed = 0
        self.segments: list[Segment | None] = []  # of checkpoints that have begun; None for one that is not traced

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context for the forward: this mode and its hooks."""
        with (
            self,
            custom_functions(self.custom),
            transformed_functions(self.transformed),
            scripted_functions(self.scripted),
            followed_checkpoints(self),
        ):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.closed:
            return self.within(func, types, args, kwargs)
        # A hook on a gradient is an event: it belongs to the rank that makes the value.
        listens = func in LISTENING and self.is_value(args[0])
        # The text of a tensor with dims contains no values.
        is_text = func is Tensor.__format__ and args[0].dim()
        if is_text or (is_fact(func) and not listens):
            return self.fact(func, args, kwargs)
        return self._called(func, func, args, kwargs)

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``apply`` of an ``autograd.Function`` of the model. See ``_code_called``."""
        if self.closed or function.__module__.startswith("torch.") or self.thread != threading.get_ident():
            return apply(function, *args, **kwargs)

        return self._code_called(partial(apply, function), function.__name__, function, args, kwargs)

    def scripted(self, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a scripted function, or of a scripted module's forward. See ``_code_called``."""
        if self.closed or self.thread != threading.get_ident():
            return call(function, *args, **kwargs)
        return self._code_called(partial(call, function), label_of(function), function, args, kwargs)

    def transformed(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function that ``torch.func`` transformed. See ``_code_called``."""
        if self.closed or self.thread != threading.get_ident():
            return call(*args, **kwargs)
        return self._code_called(call, name, call, args, kwargs, is_transform=True)

    def _code_called(
        self,
        call: Callable[..., Any],
        name: str,
        identity: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_transform: bool = False,
    ) -> Any:
        """A call of a function that runs code of the model.

        The call is one event, and the functions that the code calls are not traced. If all of it follows from the batch alone
        (see ``is_hiding``), it is no event: every rank runs it.

        Args:
            call: makes the call.
            name: the name of the function, for the event.
            identity: see ``_called``.
            is_transform: whether ``torch.func`` transformed the function.
        """
        of_the_batch = not any(isinstance(t, nn.Parameter) or self.is_value(t) for t in tensors_within((args, kwargs)))
        if of_the_batch:
            frame = self.frames[-1]
            code_call, frame.code_calls = (frame.path, frame.code_calls), frame.code_calls + 1
            if not self.is_hiding(code_call, call, args, kwargs):
                return call(*args, **kwargs)
        if is_transform and (name == "vjp" or transforming()):
            self.untraceable(f"torch.func.{name}")
        untraced = partial(self.untraced, call)
        untraced.__name__ = name  # type: ignore[attr-defined]
        return self._called(untraced, identity, args, kwargs, hidden=of_the_batch)

    def runs_code(self, func: Any) -> bool:
        """Whether an event runs code of the model (a Function of autograd, what ``torch.func`` transforms)."""
        return isinstance(func, partial) and func.func == self.untraced

    def untraced(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function; the functions that it calls are not traced."""
        self.closed += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.closed -= 1

    def _called(
        self, func: Any, identity: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hidden: bool = False
    ) -> Any:
        """The model calls a function that may be an event. Returns the result.

        Args:
            func: the function to call.
            identity: the function that the tables of torch_functions know.
            hidden: whether it uses parameters or values that are not among its arguments.
        """
        if func in _MIRRORED and len(args) == 2 and isinstance(args[1], Tensor) and not kwargs:
            func = identity = _MIRRORED[func]
            args = (args[1], args[0])
        tensors = tensors_within((args, kwargs))
        uses_values = hidden or any(isinstance(t, nn.Parameter) or self.is_value(t) for t in tensors)
        if not uses_values and not is_random(identity):
            return func(*args, **kwargs)
        frame = self.frames[-1]
        index, frame.events = frame.events, frame.events + 1
        target = target_of(identity, args, kwargs)
        is_plain = target is not None and not isinstance(target, nn.Parameter) and not self.is_value(target)
        result = self.event(func, args, kwargs, tensors, frame.path, index)
        if is_plain and target is not None:
            self.share_memory(target)  # from now on the memory depends on values
        return result

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called. See ``CallTracer``."""
        if self.closed:
            return forward.run(*args, **kwargs)
        frame, name = self.frames[-1], forward.name
        path = (*frame.path, (name, frame.calls[name]))
        frame.calls[name] += 1
        return self.entered(path, forward, args, kwargs)

    def follow(self, path: Path, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward and traces the functions that it calls."""
        self.frames.append(Frame(path))
        try:
            return forward(*args, **kwargs)
        finally:
            self.frames.pop()

    # --- checkpoints of the model's own -----------------------------------------------------------------------------

    def checkpoint_begins(self, *, reentrant: bool) -> bool:
        """See ``Checkpoints``. In a call that is not traced, activations may be recomputed."""
        if self.closed or self.thread != threading.get_ident():
            self.segments.append(None)
            return True
        frame = self.frames[-1]
        segment, frame.checkpoints = (frame.path, frame.checkpoints), frame.checkpoints + 1
        self.segments.append(segment)
        return self.segment_begins(segment, reentrant=reentrant)

    def checkpoint_runs(self, before: Any, now: Any) -> None:
        """See ``Checkpoints``. Over tp a checkpoint keeps local tensors, and its function gets new global ones."""
        for old, t in zip(tensors_of(before), tensors_of(now), strict=True):
            if t is not old and (number := self.number(old)) is not None:
                self.replaced_within(number, t)

    def checkpoint_returns(self) -> None:
        """See ``Checkpoints``."""
        self.closed += 1  # the functions that autograd calls now are no events

    def checkpoint_ends(self, before: Any = None, now: Any = None) -> None:
        """See ``Checkpoints``."""
        segment = self.segments.pop()
        self.closed -= before is not None
        if segment is None:
            return
        for old, t in zip(tensors_of(before), tensors_of(now), strict=True):
            if t is not old and (number := self.number(old)) is not None:
                self.replaced(number, t)
        self.segment_ends(segment)

    # --- values -----------------------------------------------------------------------------------------------------

    def number(self, t: Tensor) -> int | None:
        """The number of a tensor's value; None if the tensor is no value of this forward, or has no number."""
        mark, number = getattr(t, "_mw_value", (None, None))
        if mark is not self.mark:
            return None
        while number in self.renamed:
            number = self.renamed[number]
        return number

    def share_memory(self, t: Tensor) -> None:
        """From now on every tensor in the memory of ``t`` is a value."""
        if memory := memory_of(t):
            self.shared[memory] = storage_within(t)

    def is_marked(self, t: Tensor) -> bool:
        """Whether a tensor has been marked as a value."""
        mark, _ = getattr(t, "_mw_value", (None, None))
        return mark is self.mark

    def is_value(self, t: Tensor) -> bool:
        """Whether a tensor is a value: the result of an event, or in shared memory."""
        return self.is_marked(t) or self.is_unnumbered(t)

    def is_unnumbered(self, t: Tensor) -> bool:
        """Whether a tensor is a value without a number yet: in shared memory, and seen for the first time."""
        return len(self.shared) > 0 and not self.is_marked(t) and memory_of(t) in self.shared

    def name_value(self, t: Tensor, number: int | None) -> None:
        """Marks a tensor as a value. ``number``: of the value; None if the recorded tensor had no number."""
        t._mw_value = (self.mark, number)  # type: ignore[attr-defined]

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called: runs the call, or gives its result."""
        raise NotImplementedError

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        """An event: event number ``index`` of the call ``path``, with these tensors among its arguments. Returns its result."""
        raise NotImplementedError

    def wait_for(self, number: int) -> None:
        """Code outside the model is about to read a value."""

    def place_of(self, number: int) -> int:
        """The number of the submesh in which a value was made; 0 is the trunk."""
        return 0

    def replaced(self, number: int, now: Tensor) -> None:
        """Code outside the model has replaced the tensor of a value by ``now``."""

    def replaced_within(self, number: int, now: Tensor) -> None:
        """Code outside the model passes ``now`` to a module in place of a value's tensor, for this call alone."""
        self.name_value(now, number)

    def unavailable(self, number: int, function: str, line: str) -> RuntimeError:
        """The error if a function takes a value that this rank does not have."""
        raise NotImplementedError

    def is_hiding(
        self, code_call: Segment, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a function that runs code of the model uses parameters or values, though none is among its arguments
        (``torch.vmap(self.layer)(x)``), or draws random numbers.

        Args:
            code_call: the path of the call that calls it, and its number there.
        """
        return False

    def untraceable(self, function: str) -> None:
        """The model calls a function of a value, and the result of that function cannot be traced."""

    def segment_begins(self, segment: Segment, *, reentrant: bool) -> bool:
        """A segment begins: the model calls a checkpoint. Returns whether the segment may be recomputed."""
        return True

    def segment_ends(self, segment: Segment) -> None:
        """The segment has ended."""

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that asks for a fact (see ``is_fact``)."""
        return func(*args, **kwargs)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function in a call that is not traced."""
        return func(*args, **kwargs)

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``."""
        return self.closed > 0
