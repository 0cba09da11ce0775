"""Guards: whether Python raises an error if the value that it reads right now is true.

    if torch.isnan(loss):            # a guard: planning answers False
        raise FloatingPointError

A forward without values answers each read with an assumed value, and a bool with True. At a guard this would end the forward,
so that nothing of the model could be planned.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType

from meshwright.blame import OURS, TORCH

# The files between a line that reads a value and this package.
_BETWEEN = (OURS, *(f"{TORCH}{name}.py" for name in ("_tensor", "_ops", "overrides", "utils/_python_dispatch")))
# What stands between the read and its jump: conversions to bool of newer Pythons.
_CONVERTS = ("TO_BOOL", "CACHE", "EXTENDED_ARG")


def raises_if_true() -> bool:
    """Whether the code that reads a value right now goes on to a ``raise`` if the value is true, and nowhere else.

    Follows the bytecode from the read to its jump, and from there to the ``raise``, as far as there are no other jumps.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and _raises(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=4096)
def _raises(code: CodeType, read: int) -> bool:
    """Whether a true value leads to a ``raise``. ``read``: the offset of the instruction that reads it."""
    instructions = list(dis.get_instructions(code))
    jump = next(i for i, at in enumerate(instructions) if at.offset >= read)
    if not _is_conditional(instructions[jump]):
        jump += 1
        while jump < len(instructions) and instructions[jump].opname in _CONVERTS:
            jump += 1
    if jump >= len(instructions) or not _is_conditional(instructions[jump]):
        return False
    if instructions[jump].opname.endswith("IF_TRUE"):
        target = instructions[jump].argval
        return _ends_in_raise([at for at in instructions if at.offset >= target])
    return _ends_in_raise(instructions[jump + 1 :])


def _is_conditional(instruction: dis.Instruction) -> bool:
    """Whether it jumps, or not, by a bool that it takes off the stack."""
    return instruction.opname.startswith("POP_JUMP") and instruction.opname.endswith(("IF_TRUE", "IF_FALSE"))


def _ends_in_raise(instructions: Sequence[dis.Instruction]) -> bool:
    """Whether these instructions come to a ``raise`` before they jump or return."""
    for at in instructions:
        if at.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in at.opname or at.opname.startswith(("RETURN", "FOR_ITER", "SEND", "YIELD", "RERAISE")):
            return False
    return False
