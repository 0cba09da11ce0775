"""``copies_of``: a build function that builds a model once, and returns a copy of it at each call.

Every rehearsal needs a new model, and to build 80 blocks takes longer than to rehearse four. A rehearsal needs no values of
parameters, so a copy is enough.
"""

from __future__ import annotations

import copy
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from meshwright.deferred import Build, record


class Copies:
    """A build function that returns copies of a model. The parameters of the model have shapes but no values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self._model)


def copies_of(build: Build, seed: int) -> Build:
    """A build function like ``build`` that calls ``build`` only once. If the model cannot be copied, ``build`` itself.

    Args:
        seed: for the random numbers that ``build`` draws.
    """
    if isinstance(build, Copies):
        return build
    model = record(build, seed=seed, draw=False).module
    if any(_refers(value) for module in model.modules() for value in vars(module).values()):
        return build
    copies = Copies(model)
    try:
        copies()
    except Exception:  # a model may hold anything, and so copying it may raise anything
        return build
    return copies


def _refers(value: Any) -> bool:
    """Whether a copy of ``value`` would share state with the original: ``deepcopy`` does not copy functions and closures."""
    if isinstance(value, dict):
        return any(map(_refers, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_refers, value))
    if isinstance(value, partial):
        return any(map(_refers, (value.func, *value.args, *value.keywords.values())))
    return isinstance(value, FunctionType) and value.__closure__ is not None
