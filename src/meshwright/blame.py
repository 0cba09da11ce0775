"""Whose code runs: the model's source line, and whether an error is the model's or a bug of this package."""

from __future__ import annotations

import dis
import os
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

import meshwright

# Not every path with "meshwright" in it: a checkout may have that name.
OURS = os.path.dirname(meshwright.__file__ or "") + os.sep
TORCH = os.path.dirname(torch.__file__ or "") + os.sep
_NOT_THE_MODEL = (TORCH, OURS, "<frozen ")


def is_of_model(file: str) -> bool:
    """Whether a source file is the model's: not of torch, not of this package, not frozen into Python (``<frozen os>``)."""
    return not file.startswith(_NOT_THE_MODEL)


def called_by_model() -> bool:
    """Whether the caller of this function was itself called by the model's code."""
    return is_of_model(sys._getframe(2).f_code.co_filename)


def model_line(below: str = "") -> str:
    """The source line of the model that is running, ``file:line``; empty if no model is running.

    Args:
        below: a source file of this package that runs the model: callers of it are not the model's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        frame = frame.f_back if frame.f_code.co_filename != below else None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def variables_below(code: CodeType, where: Callable[[FrameType], bool]) -> list[Any]:
    """The values in the local variables of the functions that are running, from the caller outwards to a function of this
    package. Variables of this package's own functions are left out.

    Args:
        code: the code of the function at which to stop.
        where: (a frame of this function) → whether to stop there: the function may call itself.
    """
    frame: FrameType | None = sys._getframe(1)
    found: list[Any] = []
    while frame is not None and not (frame.f_code is code and where(frame)):
        if not frame.f_code.co_filename.startswith(OURS):
            found += frame.f_locals.values()
        frame = frame.f_back
    return found


def line_of(error: BaseException) -> str:
    """The source line of the model at which an error was raised, ``file:line``; empty if no frame is the model's."""
    frames = traceback.extract_tb(error.__traceback__)
    model = [f for f in frames if is_of_model(f.filename)]
    return f"{model[-1].filename}:{model[-1].lineno}" if model else ""


def is_ours(error: BaseException) -> bool:
    """Whether an error is a bug of this package: Python raised it in a frame of ours.

    An error that a call of torch raises is the model's, wherever the call was: a shape that does not fit, say. So is an error
    that we raise, unless it is an assertion.
    """
    last: TracebackType | None = error.__traceback__
    if last is None:
        return False
    while last.tb_next is not None:
        last = last.tb_next
    if not last.tb_frame.f_code.co_filename.startswith(OURS):
        return False
    at = next(i for i in dis.get_instructions(last.tb_frame.f_code) if i.offset == last.tb_lasti)
    if at.opname.startswith(("RAISE", "RERAISE")):
        return isinstance(error, AssertionError)
    return not at.opname.startswith("CALL")
