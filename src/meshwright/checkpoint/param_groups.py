"""The groups of an optimizer in a checkpoint: the settings that parameters share, by the parameters' names.

A rank's optimizer has groups of the parameters that this rank has. Over a pipeline the ranks of one stage may lack a group that
others have, or have another one under its number (a learning rate for each layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.private import pytree

_PARAMETERS = ("params", "param_names")
# Lists in the state of torch's schedulers: other schedulers (SequentialLR, ChainedScheduler), the steps at which one takes over
# from another (SequentialLR), and a function for each group (LambdaLR).
_SCHEDULERS, _MILESTONES, _FUNCTIONS = "_schedulers", "_milestones", "lr_lambdas"


@dataclass
class MergedGroup:
    """Parameters that have the same settings.

    Attributes:
        settings: learning rate and the like.
        names: the parameters' names.
        rank, number: a rank that has it, and its index among the groups of that rank's optimizer.
    """

    settings: Mapping[str, Any]
    names: list[str]
    rank: int
    number: int

    def saved(self) -> dict[str, Any]:
        return {**self.settings, "names": self.names}


def named_group(group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """A group of an optimizer as a rank saves it: its settings, and the names of those of its parameters that the rank has."""
    return {key: value for key, value in group.items() if key not in _PARAMETERS} | {"names": names}


def settings_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved group has besides names."""
    return {key: value for key, value in saved.items() if key not in ("names", *_PARAMETERS)}


def merged_groups(groups_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[MergedGroup]:
    """The groups on all ranks: parameters that have one number and equal settings are one group.

    The first of each number comes first, in the order of numbers: a load takes its settings for a group without parameters. If
    ranks have other settings for one parameter, those of the lowest rank count.
    """
    by_number: dict[int, list[MergedGroup]] = {}
    seen: set[str] = set()
    for rank, groups in enumerate(groups_by_rank):
        for number, group in enumerate(groups):
            names = [name for name in group["names"] if name not in seen]
            seen.update(names)
            known, settings = by_number.setdefault(number, []), settings_of(group)
            if known and not names:
                continue
            alike = next((other for other in known if same_settings(other.settings, settings)), None)
            if alike is None:
                known.append(MergedGroup(settings, names, rank, number))
            else:
                alike.names += names
    known_by_number = [by_number[number] for number in sorted(by_number)]
    return [*(known[0] for known in known_by_number), *(group for known in known_by_number for group in known[1:])]


def same_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether the settings of two groups are equal; tensors (a learning rate) by their values."""
    (values_a, form_a), (values_b, form_b) = pytree.tree_flatten(dict(a)), pytree.tree_flatten(dict(b))
    return form_a == form_b and all(_equal(x, y) for x, y in zip(values_a, values_b, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b or (a != a and b != b))


def merged_schedule(states: Sequence[Any], counts: Sequence[int], merged: Sequence[MergedGroup]) -> Any:
    """The state of a learning rate scheduler, whose lists have one element for each of the merged groups.

    Args:
        states: for each rank, what its scheduler's ``state_dict()`` returned.
        counts: for each rank, the number of groups of the scheduler's optimizer.
    """

    def merge(lists: list[list[Any]]) -> list[Any]:
        return [lists[group.rank][group.number] for group in merged]

    return _by_group(list(states), list(counts), merge)


def schedule_for(state: Any, saved: int, sources: Sequence[int]) -> Any:
    """The state of a scheduler for the groups of this rank.

    Args:
        state: what ``merged_schedule`` returned for ``saved`` groups.
        sources: for each group of this rank, the index of the saved group that it was.
    """
    if any(source >= saved for source in sources):
        return state
    return _by_group([state], [saved], lambda lists: [lists[0][source] for source in sources])


def _by_group(states: list[Any], counts: list[int], change: Callable[[list[list[Any]]], list[Any]]) -> Any:
    """The first state, with ``change(lists)`` for each list that has one number for each group, in all states."""
    first = states[0]
    if not all(isinstance(state, dict) for state in states):
        return first
    changed = dict(first)
    for key, value in first.items():
        of_all = [state.get(key) for state in states]
        if not isinstance(value, list) or not all(isinstance(one, list) for one in of_all):
            continue
        if key == _SCHEDULERS:
            changed[key] = [_by_group(list(inner), counts, change) for inner in zip(*of_all, strict=False)]
        elif [len(one) for one in of_all] == counts and (key == _FUNCTIONS or _has_numbers(key, of_all)):
            changed[key] = change(of_all)
    return changed


def _has_numbers(key: str, lists: list[list[Any]]) -> bool:
    """Whether an attribute has numbers, which may be those of groups. (The phases of OneCycleLR are dicts.)"""
    return key != _MILESTONES and all(isinstance(x, int | float | Tensor) for one in lists for x in one)


__all__ = ["merged_groups", "merged_schedule", "named_group", "same_settings", "schedule_for", "settings_of"]
