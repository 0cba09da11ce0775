"""``running_optimizer``: the optimizer of whose methods one has called this code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType

from torch.optim import Optimizer


def running_optimizer(*, of_torch: bool) -> Optimizer | None:
    """The innermost optimizer of whose methods one is running in this thread; None if there is none.

    Args:
        of_torch: whether it may be one of ``torch.optim``.
    """
    codes = set(_codes_of_methods(Optimizer, of_torch))
    frame = sys._getframe(1)
    while frame is not None:
        # Of other functions no locals are asked for: a frame of Python 3.11 keeps those that it was asked for alive.
        if frame.f_code in codes:
            found = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(found, Optimizer):  # a static method has none
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_of_torch(kind: type) -> bool:
    """Whether a class is one of ``torch.optim``."""
    return kind.__module__.startswith("torch.optim.")


def _codes_of_methods(base: type[Optimizer], of_torch: bool) -> Iterator[CodeType]:
    """The code of each method with arguments of the subclasses of a class."""
    for cls in base.__subclasses__():
        yield from _codes_of_methods(cls, of_torch)
        if of_torch or not is_of_torch(cls):
            for method in filter(callable, vars(cls).values()):
                code = getattr(inspect.unwrap(method), "__code__", None)
                if code is not None and code.co_argcount:
                    yield code


__all__ = ["is_of_torch", "running_optimizer"]
