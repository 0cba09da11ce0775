"""Guards: whether Python raises an error if the value that it reads right now is true, or if it is false.

    if torch.isnan(loss):            # a guard: planning answers False
        raise FloatingPointError

A forward without values answers each read with an assumed value, and a bool with True, sometimes with False (loops.py). At a
guard this could end the forward, so that nothing of the model could be planned.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType

from meshwright.blame import OURS, TORCH
from meshwright.spmd import uncompiled

# The files of torch between a line that reads a value and this package.
_BETWEEN = tuple(
    f"{TORCH}{name}.py"
    for name in ("_tensor", "_ops", "_compile", "_dynamo/eval_frame", "overrides", "utils/_python_dispatch")
)
# What stands between the read and its jump: conversions to bool of newer Pythons.
_CONVERTS = ("TO_BOOL", "CACHE", "EXTENDED_ARG")


def is_of_package(code: CodeType) -> bool:
    """Whether a function is this package's. Those that stand for torch's control flow are part of the model's forward."""
    return code.co_filename.startswith(OURS) and code.co_filename != uncompiled.__file__


def reading_frame() -> FrameType | None:
    """The frame of the code that reads a value right now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_of_package(frame.f_code) or frame.f_code.co_filename.startswith(_BETWEEN)):
        frame = frame.f_back
    return frame


def raises_if(answer: bool) -> bool:
    """Whether the code that reads a value right now goes on to a ``raise`` if the value is ``answer``, and nowhere else."""
    frame = reading_frame()
    return frame is not None and _raises(frame.f_code, frame.f_lasti, answer)


@lru_cache(maxsize=4096)
def _raises(code: CodeType, read: int, answer: bool) -> bool:
    """Whether a value leads to a ``raise``. ``read``: the offset of the instruction that reads it."""
    for at in after_answer(code, read, answer):
        if at.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in at.opname or at.opname.startswith(("RETURN", "FOR_ITER", "SEND", "YIELD", "RERAISE")):
            return False
    return False


def after_answer(code: CodeType, read: int, answer: bool) -> Sequence[dis.Instruction]:
    """The instructions from where a value leads to its end; empty if no jump follows from the value.

    Args:
        read: the offset of the instruction that reads the value.
        answer: the value.
    """
    instructions = list(dis.get_instructions(code))
    jump = next(i for i, at in enumerate(instructions) if at.offset >= read)
    if not _is_conditional(instructions[jump]):
        jump += 1
        while jump < len(instructions) and instructions[jump].opname in _CONVERTS:
            jump += 1
    if jump >= len(instructions) or not _is_conditional(instructions[jump]):
        return ()
    if instructions[jump].opname.endswith("IF_TRUE") != answer:
        return instructions[jump + 1 :]
    return [at for at in instructions if at.offset >= instructions[jump].argval]


def _is_conditional(instruction: dis.Instruction) -> bool:
    """Whether it jumps, or not, by a bool that it takes off the stack."""
    return instruction.opname.startswith("POP_JUMP") and instruction.opname.endswith(("IF_TRUE", "IF_FALSE"))
