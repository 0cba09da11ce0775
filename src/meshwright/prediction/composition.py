"""A step of many microbatches, from a rehearsal of three: what each action takes depends on whether it is the first of its
kind, the last, or one in between.

    rehearsed    F0 F1 B0 F2 B1 B2
    the step     F0 F1 B0 F2 B1 F3 B2 … F63 B62 B63      F1 to F62 as F1, B1 to B62 as B1

The first backward makes gradients and later ones add to them; the last one reduces them. What lives follows from the schedule:
each action adds what it added in the rehearsal, however many microbatches are in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from meshwright.schedule import Action

REHEARSED = 3  # microbatches: the first, the last, and one that stands for all others
T = TypeVar("T")
_Key = tuple[str, int, int]
"""(kind, which of the rank's stages, which of the stages that it exchanges with)"""


class Templates(Generic[T]):
    """What each action of a rank takes.

    Args:
        rehearsed: the actions of a rank, with what each took.
    """

    def __init__(self, rehearsed: Iterable[tuple[Action, T]]) -> None:
        those = list(rehearsed)
        keys = _keys([action for action, _ in those])
        self._costs: dict[_Key, list[T]] = defaultdict(list)
        for key, (_, taken) in zip(keys, those, strict=True):
            self._costs[key].append(taken)

    def for_actions(self, actions: Sequence[Action]) -> list[T | None]:
        """What each of these actions takes: of this rank, or of one whose stages do the same. In the order of the actions.

        None for an action that did nothing in the rehearsal, and left no trace.
        """
        keys = _keys(actions)
        counts, done = Counter(keys), Counter[_Key]()
        outcomes: list[T | None] = []
        for key in keys:
            taken = self._costs.get(key)
            number, done[key] = done[key], done[key] + 1
            last = number == counts[key] - 1
            outcomes.append(None if taken is None else taken[-1 if last else min(number, 1, len(taken) - 1)])
        return outcomes


def _keys(actions: Sequence[Action]) -> list[_Key]:
    stages = sorted({action.stage for action in actions})
    others: dict[tuple[str, int], set[int]] = defaultdict(set)
    for action in actions:
        if action.other is not None:
            others[action.kind, action.stage].add(action.other)
    ordered = {key: sorted(those) for key, those in others.items()}
    return [
        (
            action.kind,
            stages.index(action.stage),
            ordered[action.kind, action.stage].index(action.other) if action.other is not None else 0,
        )
        for action in actions
    ]
