"""``Tape``: the part of a forward that depends on the batch alone, as operations on named tensors.

    recorded        ``NameTracker`` (runtime/rows/name_tracker.py) follows a forward on real tensors of a batch, with parameters
                    that have only shapes. A torch function of these tensors alone becomes an ``Operation``; its results get
                    names
    replayed        ``NamedValues`` computes the values of names for another batch, without the rest of the forward
    recognized      in a forward with values, ``NameTracker`` finds the tensors that have these names

A name follows from the computation (the function, the names of its arguments, its constants), not from its position. So a stage
that runs a part of the forward, and a checkpoint that recomputes a part, find the same names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree


@dataclass(frozen=True)
class Name:
    """Identifies a tensor that depends on the batch alone."""

    number: int


@dataclass(frozen=True)
class Operation:
    """One torch function on named tensors.

    Attributes:
        flat: its arguments, flattened by ``spec``, with names in place of tensors.
        outputs: the names of its results.
        writes: whether it writes to its first argument, which then gets the name of the first output.
        line: the model's source line, for operations that may sum over rows.
    """

    func: Any
    flat: tuple[Any, ...]
    spec: Any
    outputs: tuple[Name, ...]
    writes: bool
    line: str = ""

    @property
    def inputs(self) -> tuple[Name, ...]:
        """The names among its arguments."""
        return tuple(x for x in self.flat if isinstance(x, Name))

    @property
    def function(self) -> str:
        """The name of its torch function."""
        return getattr(self.func, "__name__", "")


_DEVICE = object()  # stands for the device of the batch: the recording moves labels to meta


class Tape:
    """Operations, in the order of the forward. The first names are those of the tensors (leaves) of the batch.

    Args:
        leaves: the number of tensors in the batch.

    Attributes:
        by_signature: signature → operation.
        types: number of a leaf → the dtype in which the model sees it, after the casts of mixed precision.
        buffers: path of a buffer of the model → its name.
    """

    def __init__(self, leaves: int) -> None:
        self.operations: list[Operation] = []
        self.by_signature: dict[Any, Operation] = {}
        self.types: dict[int, torch.dtype] = {}
        self.buffers: dict[str, Name] = {}
        self._makers: dict[Name, Operation] = {}
        self._next = leaves

    def new_name(self) -> Name:
        """A name that no tensor has yet."""
        self._next += 1
        return Name(self._next - 1)

    def buffer_name(self, path: str) -> Name:
        """The name of a buffer; a new one, if it has none."""
        if path not in self.buffers:
            self.buffers[path] = self.new_name()
        return self.buffers[path]

    def add(self, signature: Any, func: Any, flat: Sequence[Any], spec: Any, outputs: int, **facts: Any) -> Operation:
        """The operation with a signature; a new one, if there is none. ``outputs``: how many results it has."""
        if signature not in self.by_signature:
            names = tuple(self.new_name() for _ in range(outputs))
            flat = tuple(_DEVICE if isinstance(x, torch.device) else x for x in flat)
            operation = self.by_signature[signature] = Operation(func, flat, spec, names, **facts)
            self.operations.append(operation)
            self._makers |= dict.fromkeys(names, operation)
        return self.by_signature[signature]

    def maker(self, name: Name) -> Operation | None:
        """The operation that computes a name; None for a leaf or a buffer."""
        return self._makers.get(name)

    def drop_all_but(self, wanted: set[Name]) -> None:
        """Drops the operations on which these names do not depend."""
        needed = set(wanted)
        for operation in reversed(self.operations):
            if needed.intersection(operation.outputs):
                needed.update(operation.inputs)
        self.operations = [x for x in self.operations if needed.intersection(x.outputs)]
        ids = set(map(id, self.operations))
        self.by_signature = {signature: x for signature, x in self.by_signature.items() if id(x) in ids}
        self.buffers = {path: name for path, name in self.buffers.items() if name in needed}
        self._makers = {name: x for x in self.operations for name in x.outputs}

    def is_like(self, other: Tape) -> bool:
        """Whether both have the same operations. (Sizes of their batches do not count.)"""
        facts, facts_of_other = ([(x.func, x.flat, x.outputs) for x in tape.operations] for tape in (self, other))
        return facts == facts_of_other and self.buffers == other.buffers


class NamedValues:
    """The values of names for one batch.

    Args:
        leaves: the tensors of the batch.
        buffers: path → buffer of the model.

    Attributes:
        device: the device of the batch.
    """

    def __init__(self, tape: Tape, leaves: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._tape, self.device = tape, next((leaf.device for leaf in leaves), None)
        self._values: dict[Name, Any] = {}
        for i, leaf in enumerate(leaves):
            is_cast = leaf.is_floating_point() and i in tape.types
            self._values[Name(i)] = leaf.to(tape.types[i]) if is_cast else leaf
        self._values |= {name: buffers[path] for path, name in tape.buffers.items()}

    def copied(self) -> NamedValues:
        """A copy, in which values can be replaced."""
        other = copy.copy(self)
        other._values = dict(self._values)
        return other

    def replace(self, name: Name, value: Any) -> None:
        """Sets the value of a name. Values that depend on it and have been computed before do not change."""
        self._values[name] = value

    @torch.no_grad()
    def value(self, name: Name) -> Any:
        """The value of a name. Computes the operations that it needs."""
        pending = [name]
        while pending:
            last = pending[-1]
            operation = None if last in self._values else self._tape.maker(last)
            missing = [n for n in operation.inputs if n not in self._values] if operation is not None else []
            if missing:
                pending += missing
                continue
            pending.pop()
            if operation is not None:
                self._values |= dict(zip(operation.outputs, self.results(operation), strict=True))
        return self._values[name]

    @torch.no_grad()
    def results(self, operation: Operation, *, wide: bool = False) -> list[Any]:
        """The results of an operation. ``wide``: computed in float64."""
        flat = [self._argument(x, wide) for x in operation.flat]
        args, kwargs = pytree.tree_unflatten(flat, operation.spec)
        if operation.writes:
            args = (args[0].clone(), *args[1:])
        result = operation.func(*args, **kwargs)
        return [args[0]] if operation.writes else pytree.tree_leaves(result)

    def _argument(self, x: Any, wide: bool) -> Any:
        """The argument of an operation, for this batch: the value of a name, the device of the batch, or a constant."""
        if x is _DEVICE:
            return self.device
        value = self.value(x) if isinstance(x, Name) else x
        return value.double() if wide and isinstance(value, Tensor) and value.is_floating_point() else value


def constant_key(x: Any) -> Any:
    """A constant of an operation as a part of its signature: hashable, and equal in every precision and on every device."""
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    if isinstance(x, torch.device):
        return torch.device
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.dtype
    hash(x)
    return type(x), x
