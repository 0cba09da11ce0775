"""``Tracer``: follows a forward through its module calls, and meets every torch function that is an event of it.

Recording a model (planning/capture.py) and running a stage of it (calls/interpreter.py) are walks over the same program, so
that both mean the same by the n-th event of a call:

    call      a module's forward, as it runs
    event     a torch function of the model's own code with a parameter, with a value that an event gave, or that draws
              random numbers. What follows from the batch alone (masks, positions) is none: every rank computes it.

A tensor is a value if an event gave it, or if its memory is *shared*: an event wrote to it (``out = zeros(…)``, then
``out[:, 0].copy_(h)``: ``out`` follows from ``h`` now, by whatever name), or a module keeps it from one forward to the next
and a forward changes it (an average in a buffer).
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
from meshwright.private import storage_of
from meshwright.spmd.autograd_functions import (
    FunctionMode,
    custom_functions,
    followed_checkpoints,
    scripted_functions,
    transformed_functions,
    transforming,
)
from meshwright.spmd.torch_functions import LISTENING, is_fact, is_random, label_of, writes

# Python asks the right operand first if its class is a subclass of the left one's (a parameter, what stands for a value):
# `h > p` is `p < h` then. So that a comparison is the same event whatever its operands are here, one of the two is told.
_MIRRORED = {
    getattr(of, told): getattr(of, as_this)
    for of in (Tensor, torch) for told, as_this in (("lt", "gt"), ("le", "ge"), ("less", "gt"), ("less_equal", "ge"))
} | {Tensor.__lt__: Tensor.__gt__, Tensor.__le__: Tensor.__ge__}  # fmt: skip


def memory_of(t: Tensor) -> int:
    """Which memory a plain tensor is in: the same number for tensors that share it; 0 where a tensor has none of its own."""
    return storage_of(t) if type(t) is Tensor and t.layout is torch.strided else 0


Slot = tuple[str, str]
"""Where a module keeps something: the module's name, and the name of its buffer or attribute, or of an attribute of a plain
object within one (``stats.mean``)."""


def kept_in(model: nn.Module, slots: Iterable[Slot]) -> list[Tensor]:
    """The tensors that are kept in slots now."""
    return tensors_of([held_in(model, slot) for slot in slots])


def held_in(model: nn.Module, slot: Slot) -> Any:
    """What is kept in a slot now, or None. The attribute is not asked for: whoever watches attributes is told of the
    model's own uses alone."""
    owner, name = owner_of(model.get_submodule(slot[0]), slot[1]) or (model, "")
    attributes = attributes_in(owner)
    tables = (attributes, *(attributes[of] for of in ("_buffers", "_parameters") if isinstance(owner, nn.Module)))
    return next((table[name] for table in tables if name in table), None)


@dataclass
class Frame:
    """A call that is being followed: its path, how many events and checkpoints it had, how often it called each module."""

    path: Path
    events: int = 0
    checkpoints: int = 0
    calls: Counter[str] = field(default_factory=Counter)


def _no_walk() -> None:
    return None


class Mark:
    """What a value is marked with, besides its number: whose it is.

    Not the walk itself: tensors that autograd has saved are held where Python's collector does not see, and a walk that
    holds them would live as long as they, and they as long as it.
    """

    __slots__ = ("walk",)

    def __init__(self, walk: Tracer | None) -> None:
        self.walk: Callable[[], Tracer | None] = _no_walk if walk is None else weakref.ref(walk)

    def __reduce__(self) -> Any:  # outputs are saved, and sent to other processes, which know no walk
        return Mark, (None,)


class Tracer(FunctionMode):
    """Follows one forward. Subclasses say what becomes of calls, events and facts.

    Args:
        carried: tensors that modules keep from one forward to the next, and that a forward changes.

    Attributes:
        shared: the memories of which every tensor is a value, whether or not an event gave it. Each is held, as another
            memory would get its number once it has gone. Grows only.
        renamed: number of a value → its number since an event wrote to its memory by another name. Grows only.
    """

    def __init__(self, carried: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.shared: dict[int, Any] = {}
        self.renamed: dict[int, int] = {}
        for t in carried:
            self.share(t)
        self.mark = Mark(self)
        self.frames = [Frame(())]
        self.thread = threading.get_ident()
        self.closed = 0  # how many calls that are not looked into are running
        self.segments: list[Segment | None] = []  # of checkpoints that have begun; None where they are not looked into

    @contextmanager
    def on(self) -> Iterator[None]:
        """For the time of the forward."""
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
        listens = func in LISTENING and self.known(
            args[0]
        )  # what waits for the gradient of a value is where that is made
        is_text = func is Tensor.__format__ and args[0].dim()  # of a tensor, not of its value
        if is_text or (is_fact(func) and not listens):
            return self.fact(func, args, kwargs)
        return self._met(func, func, args, kwargs)

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An ``autograd.Function`` of the model's."""
        if self.closed or function.__module__.startswith("torch.") or self.thread != threading.get_ident():
            return apply(function, *args, **kwargs)

        return self._as_one(partial(apply, function), function.__name__, function, args, kwargs)

    def scripted(self, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function or a module's forward that ``torch.jit`` made."""
        if self.closed or self.thread != threading.get_ident():
            return call(function, *args, **kwargs)
        return self._as_one(partial(call, function), label_of(function), function, args, kwargs)

    def transformed(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``torch.func`` made of a function of the model's. Of what follows from the batch alone it is none of ours."""
        tensors = tensors_within((args, kwargs))
        ours = any(isinstance(t, nn.Parameter) or self.known(t) for t in tensors)
        if self.closed or not ours or self.thread != threading.get_ident():
            return call(*args, **kwargs)
        if name == "vjp" or transforming():
            self.untold(f"torch.func.{name}")
        return self._as_one(call, name, call, args, kwargs)

    def _as_one(
        self, call: Callable[..., Any], name: str, known_as: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that is one event: what it does is not looked at."""

        def whole(*args: Any, **kwargs: Any) -> Any:
            self.closed += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.closed -= 1

        whole.__name__ = name
        return self._met(whole, known_as, args, kwargs)

    def _met(self, func: Any, known_as: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _MIRRORED and len(args) == 2 and isinstance(args[1], Tensor) and not kwargs:
            func = known_as = _MIRRORED[func]
            args = (args[1], args[0])
        tensors = tensors_within((args, kwargs))
        if not is_random(known_as) and not any(isinstance(t, nn.Parameter) or self.known(t) for t in tensors):
            return func(*args, **kwargs)
        frame = self.frames[-1]
        index, frame.events = frame.events, frame.events + 1
        target = args[0] if args and writes(known_as, args, kwargs) else kwargs.get("out")
        foreign = isinstance(target, Tensor) and not self.known(target) and not isinstance(target, nn.Parameter)
        result = self.event(func, args, kwargs, tensors, frame.path, index)
        if foreign and isinstance(target, Tensor):
            self.share(target)
        return result

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's forward is called."""
        if self.closed:
            return forward.run(*args, **kwargs)
        frame, name = self.frames[-1], forward.name
        path = (*frame.path, (name, frame.calls[name]))
        frame.calls[name] += 1
        return self.entered(path, forward, args, kwargs)

    def follow(self, path: Path, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a forward, looking at what it does."""
        self.frames.append(Frame(path))
        try:
            return forward(*args, **kwargs)
        finally:
            self.frames.pop()

    # --- checkpoints of the model's own -----------------------------------------------------------------------------

    def checkpoint_begins(self) -> bool:
        """See ``Checkpoints``. In a call that is not looked into it is one."""
        if self.closed or self.thread != threading.get_ident():
            self.segments.append(None)
            return True
        frame = self.frames[-1]
        segment, frame.checkpoints = (frame.path, frame.checkpoints), frame.checkpoints + 1
        self.segments.append(segment)
        return self.segment_begins(segment)

    def checkpoint_returns(self) -> None:
        """See ``Checkpoints``."""
        self.closed += 1  # what autograd does then is no event

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
        """The number of a tensor's value in this walk."""
        mark, number = getattr(t, "_mw_value", (None, None))
        if mark is not self.mark:
            return None
        while number in self.renamed:
            number = self.renamed[number]
        return number

    def share(self, t: Tensor) -> None:
        """Every tensor in the memory of ``t`` is a value from now on."""
        if memory := memory_of(t):
            self.shared[memory] = t.untyped_storage()

    def marked(self, t: Tensor) -> bool:
        """Whether a tensor has been marked as a value."""
        mark, _ = getattr(t, "_mw_value", (None, None))
        return mark is self.mark

    def known(self, t: Tensor) -> bool:
        """Whether a tensor is a value: an event gave it, or its memory is shared."""
        return self.marked(t) or self.nameless(t)

    def nameless(self, t: Tensor) -> bool:
        """Whether a tensor is a value that has no number yet: of shared memory, and met for the first time."""
        return len(self.shared) > 0 and not self.marked(t) and memory_of(t) in self.shared

    def name_value(self, t: Tensor, number: int | None) -> None:
        """Marks a tensor as a value; None: one that is known and had no number when the forward was recorded."""
        t._mw_value = (self.mark, number)  # type: ignore[attr-defined]

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call."""
        raise NotImplementedError

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        """An event."""
        raise NotImplementedError

    def arrived(self, number: int) -> None:
        """Something outside the model reads a value."""

    def replaced(self, number: int, now: Tensor) -> None:
        """Something outside the model has put a tensor in place of a value's."""

    def handed(self, number: int, now: Tensor) -> None:
        """Something outside the model hands a module a tensor in place of a value's, for the time of its call."""
        self.name_value(now, number)

    def unavailable(self, number: int, function: str, line: str) -> RuntimeError:
        """The error for taking a value that is not here."""
        raise NotImplementedError

    def untold(self, function: str) -> None:
        """A function of a value is called, of which what it gives cannot be followed."""

    def segment_begins(self, segment: Segment) -> bool:
        """What a checkpoint of the model's would compute again begins; whether it may be computed again."""
        return True

    def segment_ends(self, segment: Segment) -> None:
        """It has ended."""

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function in a call that is not looked into."""
        return func(*args, **kwargs)

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``."""
        return self.closed > 0
