"""``copies_of``: a ``build`` that builds once, and gives a copy of that model at each call.

A rehearsal needs no values, and each builds its model anew: building 80 blocks takes longer than rehearsing four of them.
"""

from __future__ import annotations

import copy
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from meshwright.deferred import Build, record


class Copies:
    """A ``build`` that gives copies of one model, whose parameters have shapes only."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self._model)


def copies_of(build: Build, seed: int) -> Build:
    """``build``, called once. A model that cannot be copied is built each time."""
    if isinstance(build, Copies):
        return build
    model = record(build, seed=seed, draw=False).module
    if any(_refers(value) for module in model.modules() for value in vars(module).values()):
        return build
    copies = Copies(model)
    try:
        copies()
    except Exception:  # whatever a model keeps that cannot be copied
        return build
    return copies


def _refers(value: Any) -> bool:
    """Whether a copy would refer to what the original refers to: a function is not copied, nor is what it has closed over."""
    if isinstance(value, dict):
        return any(map(_refers, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_refers, value))
    if isinstance(value, partial):
        return any(map(_refers, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, FunctionType) and value.__closure__ is not None
