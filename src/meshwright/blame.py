"""Whose code is run: which source line is the model's, and whether an error is the model's or ours."""

from __future__ import annotations

import dis
import os
import sys
import traceback
from types import FrameType, TracebackType

import torch

import meshwright

_OURS = os.path.dirname(meshwright.__file__ or "") + os.sep
# Not just any path with "meshwright" in it: a checkout may be named so.
_NOT_THE_MODEL = (os.path.dirname(torch.__file__ or "") + os.sep, _OURS, "<frozen ")


def is_of_model(file: str) -> bool:
    """Whether a source file is the model's: neither torch's nor ours, nor one that Python has compiled in (``<frozen os>``)."""
    return not file.startswith(_NOT_THE_MODEL)


def called_by_model() -> bool:
    """Whether the function that asks, the caller of this one, was called by the model's own code."""
    return is_of_model(sys._getframe(2).f_code.co_filename)


def model_line(below: str = "") -> str:
    """The model's source line that is being run; empty outside of one.

    Args:
        below: a source file of ours that runs the model: what has called it is not the model's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        frame = frame.f_back if frame.f_code.co_filename != below else None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def line_of(error: BaseException) -> str:
    """The model's source line at which an error came up; empty if it did not go through the model."""
    frames = traceback.extract_tb(error.__traceback__)
    model = [f for f in frames if is_of_model(f.filename)]
    return f"{model[-1].filename}:{model[-1].lineno}" if model else ""


def is_ours(error: BaseException) -> bool:
    """Whether an error is a bug of ours: Python's own, in a frame of ours.

    What a call of torch's raises is the model's, wherever it was called: a shape that does not fit. So is what we raise
    ourselves, unless it is an assertion.
    """
    last: TracebackType | None = error.__traceback__
    if last is None:
        return False
    while last.tb_next is not None:
        last = last.tb_next
    if not last.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    at = next(i for i in dis.get_instructions(last.tb_frame.f_code) if i.offset == last.tb_lasti)
    if at.opname.startswith(("RAISE", "RERAISE")):
        return isinstance(error, AssertionError)
    return not at.opname.startswith("CALL")
