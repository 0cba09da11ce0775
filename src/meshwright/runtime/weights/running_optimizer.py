"""``running_optimizer``: the optimizer of whose methods one has called this code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from torch.optim import Optimizer


def running_optimizer(*, of_torch: bool) -> Optimizer | None:
    """The innermost optimizer of whose methods one is running in this thread; None if there is none.

    Args:
        of_torch: whether it may be one of ``torch.optim``.
    """
    kinds = list(_kinds(Optimizer, of_torch))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Of other functions no locals are asked for: a frame of Python 3.11 keeps those that it was asked for alive.
        if any(_is_method(frame.f_code, kind) for kind in kinds):
            found = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(found, Optimizer):  # a static method has none
                return found
        frame = frame.f_back
    return None


def is_of_torch(kind: type) -> bool:
    """Whether a class is one of ``torch.optim``."""
    return kind.__module__.startswith("torch.optim.")


def _kinds(base: type[Optimizer], of_torch: bool) -> Iterator[type[Optimizer]]:
    """The subclasses of a class, and theirs."""
    for kind in base.__subclasses__():
        yield from _kinds(kind, of_torch)
        if of_torch or not is_of_torch(kind):
            yield kind


def _is_method(code: CodeType, kind: type) -> bool:
    """Whether a class has this code as a method with arguments. Found by its name: optimizers may ask for each parameter."""
    method = vars(kind).get(code.co_name)
    return method is not None and code.co_argcount > 0 and getattr(inspect.unwrap(method), "__code__", None) is code


__all__ = ["is_of_torch", "running_optimizer"]
