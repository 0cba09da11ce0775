"""Plain attributes that a forward changes: numbers, tensors, and containers of these, which are no buffers. They are attributes
of modules, or of plain objects in modules (``self.stats.mean``).

After a step of several microbatches an attribute has the value that the first microbatch left; on one device it has the value
that the whole batch left (``self.rows += len(x)``, the mean of an activation). So the trial of rows (runtime/coupling/trial.py)
compares the attributes after a forward of all rows with the attributes after a forward of a part:

    VALUES    the values differ: a person should know
    ROWS      tensors have another shape: they have the rows of the forward (a stored activation)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.placeholder import Placeholder
from meshwright.calls.structure import attributes_in, owner_of, plain_objects, tensors_of
from meshwright.described import dense
from meshwright.private import version, without_modes
from meshwright.runtime.module_state import attributes_of, holds_parameters, is_state
from meshwright.spmd.tensor import GlobalTensor, local_of

Name = tuple[str, str]
"""(name of a module, name of its attribute). For an attribute of an object in the module: ``stats.mean``."""

VALUES, ROWS = "values", "rows"
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, deque)
_DEPTH = 4  # how many levels of nested containers are read
_CLOSE = 1e-6  # the relative difference of numbers that may be rounding


def marks(model: nn.Module) -> dict[Name, Any]:
    """For each attribute a value that differs after the attribute has been changed."""
    return {name: _mark(value) for name, value in _attributes(model)}


def changed(model: nn.Module, before: Mapping[Name, Any]) -> dict[Name, Any]:
    """A copy of each attribute that has changed, if its value is on this rank. ``before``: the result of ``marks``."""
    copies: dict[Name, Any] = {}
    for name, value in _attributes(model):
        has_changed = before.get(name, ...) != _mark(value)
        if has_changed and not any(isinstance(t, Placeholder) for t in tensors_of(value)):
            copies[name] = copied(value)
    return copies


def _attributes(model: nn.Module) -> Iterator[tuple[Name, Any]]:
    """Every attribute of modules, and of the plain objects in them, each object once."""
    visited: set[int] = set()
    for path, module in model.named_modules():
        for key, value in list(attributes_of(module)):
            if holds_parameters(value):
                continue
            yield (path, key), value
            for name, plain_object in plain_objects(key, value, visited):
                for attribute, inner in list(attributes_in(plain_object).items()):
                    yield (path, f"{name}.{attribute}"), inner


def differing(of_all: Mapping[Name, Any], of_part: Mapping[Name, Any]) -> dict[Name, str]:
    """How attributes differ after a forward of all rows and after a forward of a part: name → ``VALUES`` or ``ROWS``."""
    differences: dict[Name, str] = {}
    for name in [*of_all, *(name for name in of_part if name not in of_all)]:
        in_both = name in of_all and name in of_part
        how = _difference(of_all[name], of_part[name]) if in_both else VALUES
        if how:
            differences[name] = how
    return differences


def set_attributes(model: nn.Module, values: Mapping[Name, Any]) -> None:
    """Sets attributes to copies of these values."""
    for (path, key), value in values.items():
        owner_and_key = owner_of(model.get_submodule(path), key)
        if owner_and_key is not None:
            owner, attribute = owner_and_key
            attributes_in(owner)[attribute] = copied(value)


def copied(value: Any) -> Any:
    """A copy of a value, with copies of its containers and plain tensors."""
    with torch.no_grad(), without_modes():
        return _mapped(lambda t: t if isinstance(t, GlobalTensor) else t.detach().clone(), value)


def perturbed(value: Any) -> Any:
    """A copy of a value, with slightly changed numbers in its plain floating-point tensors."""

    def changed_tensor(t: Tensor) -> Tensor:
        return t * 1.1 + 0.01 if t.is_floating_point() and not isinstance(t, GlobalTensor) else t

    with torch.no_grad(), without_modes():
        return _mapped(changed_tensor, value)


def _mapped(function: Callable[[Tensor], Any], value: Any, depth: int = _DEPTH) -> Any:
    """A copy of a value's containers, with ``function`` applied to the plain tensors in them. Other values are not copied."""
    if is_state(value):
        return function(value)
    if not depth:
        return value
    if type(value) is dict:
        return {key: _mapped(function, v, depth - 1) for key, v in value.items()}
    if type(value) is deque:
        return deque((_mapped(function, v, depth - 1) for v in value), value.maxlen)
    if type(value) in _CONTAINERS:
        return type(value)(_mapped(function, v, depth - 1) for v in value)
    return set(value) if type(value) is set else value


def _mark(value: Any, depth: int = _DEPTH) -> Any:
    """A value that differs after ``value`` has been changed or replaced."""
    if isinstance(value, _NUMBERS):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), None if isinstance(value, (Placeholder, GlobalTensor)) else version(value)
    if depth and isinstance(value, dict):
        return id(value), [(id(key), _mark(v, depth - 1)) for key, v in value.items()]
    if depth and isinstance(value, _CONTAINERS):
        return [_mark(v, depth - 1) for v in value]
    return (id(value), len(value)) if isinstance(value, set) else id(value)


def _difference(a: Any, b: Any, depth: int = _DEPTH) -> str:
    """How two values differ: ``VALUES`` or ``ROWS``; empty if they are equal, or cannot be compared."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = [*a.keys(), *a.values()], [*b.keys(), *b.values()]
    if isinstance(a, _CONTAINERS) and isinstance(b, _CONTAINERS) and depth:
        differences = {_difference(x, y, depth - 1) for x, y in zip(a, b, strict=False)}
        if len(a) != len(b) or VALUES in differences:
            return VALUES
        return ROWS if ROWS in differences else ""
    if isinstance(a, set) and isinstance(b, set):
        return "" if a == b else VALUES
    if not isinstance(a, _NUMBERS) or not isinstance(b, _NUMBERS):
        return ""
    if isinstance(a, float) and isinstance(b, float):
        is_nan = a != a
        return "" if is_nan or isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE) else VALUES
    return "" if a == b else VALUES


def _tensor_difference(a: Tensor, b: Tensor) -> str:
    """How two tensors differ: ``ROWS`` by shape, ``VALUES`` by values; empty if they are equal or placeholders."""
    if isinstance(a, (Placeholder, nn.Parameter)) or isinstance(b, (Placeholder, nn.Parameter)):
        return ""
    if a.shape != b.shape:
        return ROWS
    with torch.no_grad(), without_modes():
        x, y = dense(local_of(a).detach()), dense(local_of(b).detach())
        if x.shape != y.shape or x.dtype != y.dtype:
            return VALUES
        if x.is_floating_point():
            are_equal = torch.allclose(x, y, _CLOSE, _CLOSE, equal_nan=True)
        else:
            are_equal = torch.equal(x, y)
    return "" if are_equal else VALUES


__all__ = ["ROWS", "VALUES", "Name", "changed", "differing", "marks", "perturbed", "set_attributes"]
