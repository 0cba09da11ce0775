"""``Loops``: ends the loops of a forward without values.

    while error > tolerance:         # the error has no value: planning answers True, and sometimes False
        h, error = self.step(h)

Such a forward gives each read the same answer whenever it is asked. A loop that goes on until a value says so would end at
once, so that nothing is seen of its other turns, or never. So a bool gets the answer that stays in the loop, some times.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from meshwright.planning.guards import after_answer, is_of_package, reading_frame
from meshwright.private import TorchDispatchMode

IN_WHILE, IN_FOR = 8, 1000
"""A read in a ``while`` loop, or in a ``for`` loop, gets the usual answer so many times, and then another one as many times.
Most ``for`` loops end by themselves."""


class LoopsEnd(TorchDispatchMode):
    """A mode under which a forward runs without values. While it is on, ``loops`` counts the reads."""

    loops: Loops

    def __enter__(self) -> Any:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == contextlib.__file__ and frame.f_back is not None:
            frame = frame.f_back
        self.loops = Loops(frame.f_code)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.loops.end()


class Loops:
    """Counts the reads of one forward that stand in loops.

    Args:
        outside: the code of the function that runs the forward: its own loops, and its callers', are not the model's.
    """

    def __init__(self, outside: CodeType) -> None:
        self._outside = outside
        # By the call whose loop it is. The frame is held, so that no other call is taken for it.
        self._asked: dict[FrameType, Counter[Any]] = {}

    def another(self) -> int:
        """0: the read that runs right now gets the usual answer. Else the number of the other answer that it gets, from 1.

        A read is told from others by its instruction, and by the call of the function whose loop it is in: the next layer
        that runs the same loop begins anew. Of ``for`` loops, the innermost one counts.
        """
        answers, at, is_innermost, running = 0, None, True, list(self._frames())
        for frame in [frame for frame in self._asked if frame not in running and not _may_go_on(frame)]:
            del self._asked[frame]
        for frame in running:
            at = at or (frame.f_code, frame.f_lasti)
            usual = _usual_answers(frame.f_code, frame.f_lasti)
            if usual == IN_WHILE or (usual == IN_FOR and is_innermost):
                asked = self._asked.setdefault(frame, Counter())
                answers = answers or _number_of_answer(asked[at], usual)
                asked[at] += 1
            is_innermost = is_innermost and not usual
        return answers

    def end(self) -> None:
        """The forward has ended: what its calls hold is free."""
        self._asked.clear()

    def _frames(self) -> Iterator[FrameType]:
        """The frames of the model's code, from the read outwards."""
        frame = reading_frame()
        while frame is not None and frame.f_code is not self._outside:
            if not is_of_package(frame.f_code):
                yield frame
            frame = frame.f_back


def leaves_if(answer: bool) -> bool:
    """Whether the code that reads a value right now leaves its loop, or does not enter it, if the value is ``answer``; and goes
    on with the loop otherwise."""
    frame = reading_frame()
    return frame is not None and _leaves(frame.f_code, frame.f_lasti, answer)


@lru_cache(maxsize=4096)
def _leaves(code: CodeType, read: int, answer: bool) -> bool:
    path, other = after_answer(code, read, answer), after_answer(code, read, not answer)
    if not path or not other:
        return False
    # Python asks the condition of a ``while`` loop before the loop, and again at its end.
    around = [(first, last) for first, last, _ in _loops(code) if first <= read <= last or first == other[0].offset]
    return bool(around) and _is_outside(path, *max(around)) and not _is_outside(other, *max(around))


def _is_outside(path: Sequence[dis.Instruction], first: int, last: int) -> bool:
    """Whether a path leads out of the loop between two offsets, without other jumps on the way."""
    for at in path:
        if not first <= at.offset <= last or at.opname.startswith("RETURN"):
            return True
        if "JUMP" in at.opname:
            return isinstance(at.argval, int) and not first <= at.argval <= last and "IF" not in at.opname
    return False


def _may_go_on(frame: FrameType) -> bool:
    """Whether a call that is not running may go on later: a generator."""
    return bool(frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def _number_of_answer(asked: int, usual: int) -> int:
    """The number of the answer to a read that was asked so many times before; 0: the usual one.

    After ``usual`` usual answers come as many other ones, then twice as many usual ones, and so on. So the loop ends also if
    several reads of one turn, in a row or at several places, must get other answers.
    """
    number = 0
    while asked >= usual:
        asked, number = asked - usual, number + 1
        if asked < usual:
            return number
        asked, usual = asked - usual, 2 * usual
    return 0


@lru_cache(maxsize=4096)
def _usual_answers(code: CodeType, at: int) -> int:
    """``IN_WHILE`` or ``IN_FOR`` if an instruction is in such a loop, or 0. ``at``: its offset."""
    return min((usual for first, last, usual in _loops(code) if first <= at <= last), default=0)


@lru_cache(maxsize=1024)
def _loops(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    """(the first offset, the last, ``IN_WHILE`` or ``IN_FOR``) of each loop: the last instruction jumps back to the first."""
    instructions = list(dis.get_instructions(code))
    loops = []
    for jump in instructions:
        if "JUMP" not in jump.opname or not isinstance(jump.argval, int) or jump.argval >= jump.offset:
            continue
        begins = next(i for i in instructions if i.offset >= jump.argval and i.opname not in ("CACHE", "EXTENDED_ARG"))
        if begins.opname != "SEND":  # a generator that waits for another
            loops.append((jump.argval, jump.offset, IN_FOR if begins.opname == "FOR_ITER" else IN_WHILE))
    return tuple(loops)
