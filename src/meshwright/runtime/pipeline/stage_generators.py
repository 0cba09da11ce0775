"""``StageGenerators``: a state of the modules' random generators for each stage, if a rank has several stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from meshwright.chance import set_state_of, state_of
from meshwright.generators import state_digest


class StageGenerators:
    """Gives each stage of a rank a separate state of the generators that modules hold.

    So a stage draws the numbers that it would draw on a rank with this stage alone (``StageProgram.other_stage_draws``). Does
    nothing if the rank has one stage.
    """

    def __init__(self, generators: Sequence[Any], stages: Sequence[int]) -> None:
        self._generators = generators if len(stages) > 1 else []
        self._begin = [state_of(g) for g in self._generators]
        self._states = dict.fromkeys(stages, self._begin)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """A context for a forward of a stage: the generators have the state of this stage."""
        for generator, state in zip(self._generators, self._states[stage], strict=True):
            set_state_of(generator, state)
        yield
        self._states[stage] = [state_of(g) for g in self._generators]

    def end(self) -> None:
        """Call after the last forward: each generator gets the state of the first stage that has drawn from it."""
        for i, (generator, begin) in enumerate(zip(self._generators, self._begin, strict=True)):
            digest_before = state_digest({"": begin})
            after = (states[i] for states in self._states.values())
            changed = (state for state in after if state_digest({"": state}) != digest_before)
            set_state_of(generator, next(changed, begin))
