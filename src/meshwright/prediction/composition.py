"""``Templates``: the cost of each action in a step of many microbatches, from a rehearsal of three microbatches.

    rehearsed    F0 F1 B0 F2 B1 B2
    the step     F0 F1 B0 F2 B1 F3 B2 … F63 B62 B63      F1 to F62 cost as much as F1, B1 to B62 as much as B1

The cost of an action depends on whether it is the first of its kind, the last, or one in between: the first backward
allocates gradients, later ones add to them, and the last one reduces them. The memory at each action follows from the
schedule: an action adds as many bytes as in the rehearsal, for any number of microbatches in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from meshwright.schedule import Action

REHEARSED = 3  # microbatches in a rehearsal: the first, the last, and one that stands for all others
T = TypeVar("T")
_Key = tuple[str, int, int]
"""(kind of action, number of its stage among the rank's stages, number of the other stage among those it exchanges with)"""


class Templates(Generic[T]):
    """The costs (memory or seconds) of the actions of a rank.

    Args:
        rehearsed: (action, its cost) for each action of the rehearsal, in order.
    """

    def __init__(self, rehearsed: Iterable[tuple[Action, T]]) -> None:
        actions_and_costs = list(rehearsed)
        keys = _keys([action for action, _ in actions_and_costs])
        self._costs: dict[_Key, list[T]] = defaultdict(list)
        for key, (_, cost) in zip(keys, actions_and_costs, strict=True):
            self._costs[key].append(cost)

    def for_actions(self, actions: Sequence[Action]) -> list[T | None]:
        """The cost of each action, in the order of ``actions``; None for an action that did nothing in the rehearsal.

        Args:
            actions: those of the rehearsed rank, or of a rank whose stages do the same work.
        """
        keys = _keys(actions)
        counts, seen = Counter(keys), Counter[_Key]()
        templates: list[T | None] = []
        for key in keys:
            costs = self._costs.get(key)
            number, seen[key] = seen[key], seen[key] + 1
            last = number == counts[key] - 1
            templates.append(None if costs is None else costs[-1 if last else min(number, 1, len(costs) - 1)])
        return templates


def _keys(actions: Sequence[Action]) -> list[_Key]:
    """The key of each action. Equal keys of two ranks mean equal work, since stages are counted from each rank's first."""
    stages = sorted({action.stage for action in actions})
    peers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for action in actions:
        if action.other is not None:
            peers[action.kind, action.stage].add(action.other)
    sorted_peers = {key: sorted(numbers) for key, numbers in peers.items()}
    return [
        (
            action.kind,
            stages.index(action.stage),
            sorted_peers[action.kind, action.stage].index(action.other) if action.other is not None else 0,
        )
        for action in actions
    ]
