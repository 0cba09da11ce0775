"""The part of a forward that depends on the batch alone, as steps between named tensors.

    recorded        a forward whose parameters have only shapes runs on real tensors of a batch. Each torch function of these
                    tensors alone is a ``Step``, and its results have ``Name`` s
    replayed        ``Replay``: the values of names for another batch, without the rest of the forward
    recognized      ``Follower``: in a forward with values, the tensors that have these names

A name follows from the computation (the function, the names of its arguments, its constants), not from its position. So a stage
that runs a part of the forward, and a checkpoint that recomputes a part, find the same names.
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
    """Identifies a tensor that depends on the batch alone."""

    number: int


@dataclass(frozen=True)
class Step:
    """One torch function on named tensors.

    Attributes:
        flat: its arguments, flattened by ``spec``, with names in place of tensors.
        outputs: the names of its results.
        writes: whether it writes to its first argument, which then gets the name of the first output.
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


_DEVICE = object()  # stands for the device of the batch: in the recording, labels were moved to meta


class Tape:
    """The steps in order. The first names are those of the tensors (leaves) of the batch.

    Attributes:
        known: signature → step.
        types: number of a leaf → the dtype in which the model sees it, after the casts of mixed precision.
        buffers: name of a buffer of the model → its ``Name``.
    """

    def __init__(self, leaves: int) -> None:
        self.steps: list[Step] = []
        self.known: dict[Any, Step] = {}
        self.types: dict[int, torch.dtype] = {}
        self.buffers: dict[str, Name] = {}
        self._makers: dict[Name, Step] = {}
        self._next = leaves

    def new(self) -> Name:
        self._next += 1
        return Name(self._next - 1)

    def buffer(self, name: str) -> Name:
        if name not in self.buffers:
            self.buffers[name] = self.new()
        return self.buffers[name]

    def add(self, signature: Any, func: Any, flat: Sequence[Any], spec: Any, outputs: int, **more: Any) -> Step:
        """The step with a signature; a new one if there is none."""
        if signature not in self.known:
            names = tuple(self.new() for _ in range(outputs))
            flat = tuple(_DEVICE if isinstance(x, torch.device) else x for x in flat)
            step = self.known[signature] = Step(func, flat, spec, names, **more)
            self.steps.append(step)
            self._makers |= dict.fromkeys(names, step)
        return self.known[signature]

    def maker(self, name: Name) -> Step | None:
        return self._makers.get(name)

    def keep(self, wanted: set[Name]) -> None:
        """Drops the steps on which these names do not depend."""
        needed = set(wanted)
        for step in reversed(self.steps):
            if needed.intersection(step.outputs):
                needed.update(step.inputs)
        self.steps = [s for s in self.steps if needed.intersection(s.outputs)]
        kept_ids = set(map(id, self.steps))
        self.known = {signature: s for signature, s in self.known.items() if id(s) in kept_ids}
        self.buffers = {name: n for name, n in self.buffers.items() if n in needed}
        self._makers = {n: s for s in self.steps for n in s.outputs}

    def like(self, other: Tape) -> bool:
        """Whether both have the same steps. (Sizes of their batches do not count.)"""
        steps, other_steps = ([(s.func, s.flat, s.outputs) for s in tape.steps] for tape in (self, other))
        return steps == other_steps and self.buffers == other.buffers


class Replay:
    """The values of names for one batch.

    Args:
        leaves: the tensors of the batch.
        buffers: name → buffer of the model.

    Attributes:
        device: the device of the batch.
    """

    def __init__(self, tape: Tape, leaves: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._tape, self.device = tape, next((x.device for x in leaves), None)
        self._values: dict[Name, Any] = {}
        for i, leaf in enumerate(leaves):
            is_cast = leaf.is_floating_point() and i in tape.types
            self._values[Name(i)] = leaf.to(tape.types[i]) if is_cast else leaf
        self._values |= {n: buffers[name] for name, n in tape.buffers.items()}

    def again(self) -> Replay:
        """A copy, in which values can be replaced."""
        other = copy.copy(self)
        other._values = dict(self._values)
        return other

    def put(self, name: Name, value: Any) -> None:
        """Sets the value of a name. Values that depend on it and have been computed before do not change."""
        self._values[name] = value

    @torch.no_grad()
    def value(self, name: Name) -> Any:
        """The value of a name; computes the steps that it needs."""
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
        """The results of a step. ``wide``: computed in float64."""
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


# Functions for which only the dtype or the shape of the second tensor counts → (the function to call with that fact, the fact).
_BY_ANOTHER: dict[Any, tuple[Any, Callable[[Tensor], Any]]] = {
    Tensor.type_as: (Tensor.to, lambda t: t.dtype),
    Tensor.to: (Tensor.to, lambda t: t.dtype),
    Tensor.expand_as: (Tensor.expand, lambda t: t.shape),
    Tensor.view_as: (Tensor.view, lambda t: t.shape),
    Tensor.reshape_as: (Tensor.reshape, lambda t: t.shape),
}


class Follower(FunctionMode):
    """Tracks the names of tensors while a forward runs. Subclasses decide what happens to calls with and without names."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.tensors: dict[str, Tensor] = {}  # buffers and plain tensor attributes of the model, by name
        # id → (tensor, its name, its version). The tensors are held, so that their ids are not reused.
        self._names: dict[int, tuple[Tensor, Name, int | None]] = {}
        self._silent = False  # whether the forward used ``.data``: version counters do not show writes to it

    # --- names ------------------------------------------------------------------------------------------------------

    def name(self, x: Any) -> Name | None:
        """The name of a tensor, if it has one and has not been written since; else None."""
        entry = self._names.get(id(x))
        return entry[1] if entry is not None and entry[0] is x and entry[2] == version(x) else None

    def give_name(self, t: Any, name: Name | None) -> None:
        if isinstance(t, Tensor) and name is not None:
            self._names[id(t)] = t, name, version(t)

    @contextmanager
    def entering(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward of ``model``: the tensors of the batch and the buffers get their names."""
        self.tensors = dict(tensors_of_model(model)) if self.names_tensors else {}
        for name, t in self.tensors.items():
            self.give_name(t, self.buffer(name))
        # Registered last, so that it sees the casts of mixed precision.
        handle = model.register_forward_pre_hook(self._entered, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _entered(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        for i, t in enumerate(tensors_in((args, kwargs))):
            self.give_name(t, self.leaf(i, t))

    def _forget_memory_of(self, written: Any) -> None:
        """Removes the names of other tensors in a memory to which autograd does not count a write."""
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
        """Calls a function that is no fact. Its results get names, if they depend on the batch alone."""
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
        """Names the results of a call whose arguments all have names."""
        is_write = bool(args) and isinstance(args[0], Tensor) and writes(func, args, kwargs)
        outputs = [args[0]] if is_write else pytree.tree_leaves(result)
        if kwargs.get("out") is not None:  # a replay would write to the tensor of the recording
            return result
        if not outputs or not all(isinstance(t, Tensor) and not t.is_meta for t in outputs):
            return result
        flat, spec = pytree.tree_flatten((args, kwargs))
        # Not ``self.name``: an argument that was just written has another version, and its old name counts here.
        flat = [self._names[id(x)][1] if isinstance(x, Tensor) else x for x in flat]
        try:
            signature = func, tuple(map(token, flat)), spec
            step = self.step(signature, func, flat, spec, len(outputs), is_write)
        except TypeError:  # a constant that cannot be hashed
            return result
        if step is not None:
            for t, name in zip(outputs, step.outputs, strict=True):
                self.give_name(t, name)
        return result

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """A context for a forward. When a checkpoint recomputes a segment, its arguments get the same names again."""
        with self, self.entering(model), recomputations(self._again):
            yield

    def _again(self, function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
        """A handler for ``recomputations``: the recomputed segment runs under this mode, its arguments have their names."""
        names = [self.name(x) for x in args]

        def again(*arguments: Any, **named: Any) -> Any:
            for x, name in zip(arguments, names, strict=False):
                self.give_name(x, name)
            with self:
                return function(*arguments, **named)

        return again, args

    @property
    def names_tensors(self) -> bool:
        """Whether tensors of the model need names."""
        return bool(self.tape.buffers)

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def leaf(self, i: int, t: Tensor) -> Name | None:
        """The name of tensor number i of the batch, as the model sees it."""
        return Name(i)

    def buffer(self, name: str) -> Name | None:
        """The name of a buffer."""
        return self.tape.buffers.get(name)

    def step(
        self, signature: Any, func: Any, flat: Sequence[Any], spec: Any, outputs: int, is_write: bool
    ) -> Step | None:
        """The step for a call whose arguments all have names; None if it is not needed."""
        return self.tape.known.get(signature)

    def known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """A call in which all tensors have names: its results get names too."""
        return self._follow(func, args, kwargs, func(*args, **kwargs))

    def by_another(self, func: Any, args: tuple[Any, ...], by: Any, fact: Callable[[Tensor], Any]) -> Any:
        """A call for which only the dtype or shape of the second tensor counts, which has no name."""
        return func(*args)

    def met(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], names: list[Name | None]
    ) -> Any:
        """A call in which some tensors have names and some have not."""
        return func(*args, **kwargs)

    def apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """A call in which no tensor has a name, or that draws random numbers."""
        return func(*args, **kwargs)


def tensors_of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each buffer, and for each tensor that is a plain attribute of a module."""
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for key, x in vars(module).items():
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and not x.is_meta:
                yield f"{path}.{key}" if path else key, x


def _has_memory(t: Tensor) -> bool:
    """Whether a tensor is plain and strided, with real memory."""
    return type(t) is Tensor and t.layout is torch.strided and not t.is_meta


def _shallow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a call, including the items of lists and tuples."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from pytree.tree_leaves(x)
        else:
            yield x


def token(x: Any) -> Any:
    """A constant of a step as a part of its signature: hashable, and equal in every precision and on every device."""
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    if isinstance(x, torch.device):
        return torch.device
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.dtype
    hash(x)
    return type(x), x
