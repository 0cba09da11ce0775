"""``OwnNumbers``: the generators that modules hold, if a rank has several stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from meshwright.chance import set_state_of, state_of
from meshwright.generators import state_digest


class OwnNumbers:
    """Each stage draws from the generators in all of its forwards, as a rank does that has this stage alone
    (``StageProgram.along``)."""

    def __init__(self, generators: Sequence[Any], stages: Sequence[int]) -> None:
        self._generators = generators if len(stages) > 1 else []
        self._begin = [state_of(g) for g in self._generators]
        self._states = dict.fromkeys(stages, self._begin)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """For the time of a forward of a stage."""
        for generator, state in zip(self._generators, self._states[stage], strict=True):
            set_state_of(generator, state)
        yield
        self._states[stage] = [state_of(g) for g in self._generators]

    def end(self) -> None:
        """After the last forward: what one stage alone has drawn has been drawn."""
        for i, (generator, begin) in enumerate(zip(self._generators, self._begin, strict=True)):
            before = state_digest({"": begin})
            after = (states[i] for states in self._states.values())
            drawn = (state for state in after if state_digest({"": state}) != before)
            set_state_of(generator, next(drawn, begin))
