"""What a forward computes from its batch alone, by name: recorded once, computed without the forward, and known again in it.

    recorded      a forward in which parameters have shapes only runs on real tensors of a batch; each torch function that
                  takes nothing but those is a ``Step``, and what it gives has a ``Name``
    computed      ``Replay``: the values of names for another batch, without any of the model's work
    known again   ``Follower``: in a forward with values, the tensors that have the same names

A name follows from what was done (the function, the names that it took, its constants), not from when. So a stage that
runs a part of the forward, and a checkpoint that runs a part again, know the same names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.private import pytree, storage_of, version
from meshwright.runtime.rows.batch import tensors_in
from meshwright.spmd.autograd_functions import FunctionMode, Segment, recomputations
from meshwright.spmd.torch_functions import GET_DATA, SET_DATA, is_fact, is_random, writes


@dataclass(frozen=True)
class Name:
    """A tensor that follows from the batch alone."""

    number: int


@dataclass(frozen=True)
class Step:
    """One torch function on named tensors.

    Attributes:
        flat: its arguments, flattened by ``spec``; tensors by their names.
        outputs: the names of the tensors that it gives.
        writes: whether it writes to its first argument, which has its first output's name from then on.
        line: the model's source line, for steps that may sum over rows.
    """

    func: Any
    flat: tuple[Any, ...]
    spec: Any
    outputs: tuple[Name, ...]
    writes: bool
    line: str = ""

    @property
    def inputs(self) -> tuple[Name, ...]:
        return tuple(x for x in self.flat if isinstance(x, Name))

    @property
    def function(self) -> str:
        return getattr(self.func, "__name__", "")


_DEVICE = object()  # the batch's: what a label was moved to was meta when that was recorded


class Tape:
    """Steps in order; the first names are those of the batch's leaves.

    Attributes:
        types: leaf → the type that the model sees it in, which mixed precision may have cast it to.
        buffers: name of a buffer of the model → its name here.
    """

    def __init__(self, leaves: int) -> None:
        self.steps: list[Step] = []
        self.known: dict[Any, Step] = {}
        self.types: dict[int, torch.dtype] = {}
        self.buffers: dict[str, Name] = {}
        self._made: dict[Name, Step] = {}
        self._next = leaves

    def new(self) -> Name:
        self._next += 1
        return Name(self._next - 1)

    def buffer(self, name: str) -> Name:
        if name not in self.buffers:
            self.buffers[name] = self.new()
        return self.buffers[name]

    def add(self, signature: Any, func: Any, flat: Sequence[Any], spec: Any, outputs: int, **more: Any) -> Step:
        """The step of a signature, made if it is new."""
        if signature not in self.known:
            names = tuple(self.new() for _ in range(outputs))
            flat = tuple(_DEVICE if isinstance(x, torch.device) else x for x in flat)
            step = self.known[signature] = Step(func, flat, spec, names, **more)
            self.steps.append(step)
            self._made |= dict.fromkeys(names, step)
        return self.known[signature]

    def maker(self, name: Name) -> Step | None:
        return self._made.get(name)

    def keep(self, wanted: set[Name]) -> None:
        """Forgets steps that these names do not follow from."""
        needed = set(wanted)
        for step in reversed(self.steps):
            if needed.intersection(step.outputs):
                needed.update(step.inputs)
        self.steps = [s for s in self.steps if needed.intersection(s.outputs)]
        kept = set(map(id, self.steps))
        self.known = {signature: s for signature, s in self.known.items() if id(s) in kept}
        self.buffers = {name: n for name, n in self.buffers.items() if n in needed}
        self._made = {n: s for s in self.steps for n in s.outputs}

    def like(self, other: Tape) -> bool:
        """Whether both do the same, whatever the sizes of their batches."""
        mine = [(s.func, s.flat, s.outputs) for s in self.steps]
        return mine == [(s.func, s.flat, s.outputs) for s in other.steps] and self.buffers == other.buffers


class Replay:
    """The values of names for one batch.

    Args:
        leaves: the batch's tensors.
        buffers: the model's, by name.

    Attributes:
        device: where the batch is.
    """

    def __init__(self, tape: Tape, leaves: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._tape, self.device = tape, next((x.device for x in leaves), None)
        self._values: dict[Name, Any] = {}
        for i, leaf in enumerate(leaves):
            is_cast = leaf.is_floating_point() and i in tape.types
            self._values[Name(i)] = leaf.to(tape.types[i]) if is_cast else leaf
        self._values |= {n: buffers[name] for name, n in tape.buffers.items()}

    def again(self) -> Replay:
        """The same, in which other values can be put."""
        other = copy.copy(self)
        other._values = dict(self._values)
        return other

    def put(self, name: Name, value: Any) -> None:
        """From now on this is a name's value: for what follows from it and was not asked for before."""
        self._values[name] = value

    @torch.no_grad()
    def value(self, name: Name) -> Any:
        pending = [name]
        while pending:
            last = pending[-1]
            step = None if last in self._values else self._tape.maker(last)
            missing = [n for n in step.inputs if n not in self._values] if step is not None else []
            if missing:
                pending += missing
                continue
            pending.pop()
            if step is not None:
                self._values |= dict(zip(step.outputs, self.results(step), strict=True))
        return self._values[name]

    @torch.no_grad()
    def results(self, step: Step, *, wide: bool = False) -> list[Any]:
        """What a step gives. ``wide``: computed in float64."""
        flat = [self._argument(x, wide) for x in step.flat]
        args, kwargs = pytree.tree_unflatten(flat, step.spec)
        if step.writes:
            args = (args[0].clone(), *args[1:])
        result = step.func(*args, **kwargs)
        return [args[0]] if step.writes else pytree.tree_leaves(result)

    def _argument(self, x: Any, wide: bool) -> Any:
        if x is _DEVICE:
            return self.device
        value = self.value(x) if isinstance(x, Name) else x
        return value.double() if wide and isinstance(value, Tensor) and value.is_floating_point() else value


# Functions that take nothing but a type or a shape of their second tensor: what says the same without it.
_BY_ANOTHER: dict[Any, tuple[Any, Callable[[Tensor], Any]]] = {
    Tensor.type_as: (Tensor.to, lambda t: t.dtype),
    Tensor.to: (Tensor.to, lambda t: t.dtype),
    Tensor.expand_as: (Tensor.expand, lambda t: t.shape),
    Tensor.view_as: (Tensor.view, lambda t: t.shape),
    Tensor.reshape_as: (Tensor.reshape, lambda t: t.shape),
}


class Follower(FunctionMode):
    """Knows the names of tensors while a forward runs. Subclasses say what becomes of functions with and without names."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.tensors: dict[str, Tensor] = {}  # of the model, by name
        self._names: dict[int, tuple[Tensor, Name, int | None]] = {}  # the tensors live on: their ids stay theirs
        self._silent = False  # whether the forward asked for a ``.data``: what is written to it no version tells

    # --- names ------------------------------------------------------------------------------------------------------

    def name(self, x: Any) -> Name | None:
        """The name of a tensor that has not been written to since it got it."""
        found = self._names.get(id(x))
        return found[1] if found is not None and found[0] is x and found[2] == version(x) else None

    def give_name(self, t: Any, name: Name | None) -> None:
        if isinstance(t, Tensor) and name is not None:
            self._names[id(t)] = t, name, version(t)

    @contextmanager
    def entering(self, model: nn.Module) -> Iterator[None]:
        """For the time of a forward of ``model``: what it is given are the batch's leaves, its buffers have names."""
        self.tensors = dict(tensors_of_model(model)) if self.names_tensors else {}
        for name, t in self.tensors.items():
            self.give_name(t, self.buffer(name))
        # Registered last, it sees what the hooks of mixed precision have cast.
        handle = model.register_forward_pre_hook(self._entered, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _entered(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        for i, t in enumerate(tensors_in((args, kwargs))):
            self.give_name(t, self.leaf(i, t))

    def _forget_memory_of(self, written: Any) -> None:
        """The other tensors of a memory that was written past autograd's counting have no names any more."""
        if not isinstance(written, Tensor) or not _has_memory(written):
            return
        memory = storage_of(written)
        for key, (t, *_) in list(self._names.items()):
            if t is not written and _has_memory(t) and storage_of(t) == memory:
                del self._names[key]

    # --- functions --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA:
            self._names.pop(id(args[0]), None)
        if is_fact(func):
            return func(*args, **kwargs)
        result = self._named(func, args, kwargs)
        if self._silent and args and writes(func, args, kwargs):
            self._forget_memory_of(args[0])
        self._silent = self._silent or func == GET_DATA
        return result

    def _named(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a function gives that is no fact; its tensors have names, if they follow from the batch alone."""
        tensors = [x for x in _shallow(args, kwargs) if isinstance(x, Tensor)]
        names = [self.name(t) for t in tensors]
        if is_random(func) or (tensors and not any(names)):
            return self.apart(func, args, kwargs, tensors)
        if all(names):
            return self.known(func, args, kwargs, tensors)
        if func in _BY_ANOTHER and len(args) == 2 and not kwargs and len(tensors) == 2 and names[0] is not None:
            by, fact = _BY_ANOTHER[func]
            return self._follow(by, (args[0], fact(args[1])), {}, self.by_another(func, args, by, fact))
        return self.met(func, args, kwargs, tensors, names)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        is_write = bool(args) and isinstance(args[0], Tensor) and writes(func, args, kwargs)
        outputs = [args[0]] if is_write else pytree.tree_leaves(result)
        if kwargs.get("out") is not None:  # to compute it again would write to what it is of
            return result
        if not outputs or not all(isinstance(t, Tensor) and not t.is_meta for t in outputs):
            return result
        flat, spec = pytree.tree_flatten((args, kwargs))
        # What was written to has another version by now, and had its name before.
        flat = [self._names[id(x)][1] if isinstance(x, Tensor) else x for x in flat]
        try:
            signature = func, tuple(map(token, flat)), spec
            step = self.step(signature, func, flat, spec, len(outputs), is_write)
        except TypeError:  # a constant that is not hashable
            return result
        if step is not None:
            for t, name in zip(outputs, step.outputs, strict=True):
                self.give_name(t, name)
        return result

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """For the time of a forward. What a checkpoint runs again knows the names that it knew."""
        with self, self.entering(model), recomputations(self._again):
            yield

    def _again(self, function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
        names = [self.name(x) for x in args]

        def again(*arguments: Any, **named: Any) -> Any:
            for x, name in zip(arguments, names, strict=False):
                self.give_name(x, name)
            with self:
                return function(*arguments, **named)

        return again, args

    @property
    def names_tensors(self) -> bool:
        """Whether tensors of the model have names that are of use."""
        return bool(self.tape.buffers)

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def leaf(self, i: int, t: Tensor) -> Name | None:
        """The name of the i-th leaf of the batch, as the model sees it."""
        return Name(i)

    def buffer(self, name: str) -> Name | None:
        """The name of a buffer."""
        return self.tape.buffers.get(name)

    def step(
        self, signature: Any, func: Any, flat: Sequence[Any], spec: Any, outputs: int, is_write: bool
    ) -> Step | None:
        """The step that a function with named arguments is, if it is of use."""
        return self.tape.known.get(signature)

    def known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """A function of tensors with names alone: so has its result."""
        return self._follow(func, args, kwargs, func(*args, **kwargs))

    def by_another(self, func: Any, args: tuple[Any, ...], by: Any, fact: Callable[[Tensor], Any]) -> Any:
        """What a function gives that takes only the type or shape of another tensor, which has no name."""
        return func(*args)

    def met(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], names: list[Name | None]
    ) -> Any:
        """A function of tensors with names and without."""
        return func(*args, **kwargs)

    def apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """A function of tensors without names, or one that draws random numbers."""
        return func(*args, **kwargs)


def tensors_of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that are plain attributes of modules, by name."""
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, x in vars(module).items():
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and not x.is_meta:
                yield f"{path}.{key}" if path else key, x


def _has_memory(t: Tensor) -> bool:
    """Whether a tensor lies in a memory of its own, or of others."""
    return type(t) is Tensor and t.layout is torch.strided and not t.is_meta


def _shallow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments, and what is in their lists and tuples."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from pytree.tree_leaves(x)
        else:
            yield x


def token(x: Any) -> Any:
    """A constant of a step as a part of its name: hashable; the same in any precision and on any device."""
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    if isinstance(x, torch.device):
        return torch.device
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.dtype
    hash(x)
    return type(x), x
