"""``stub``: what a call that runs on other ranks gives on this one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwright.calls.structure import lists_in, tensors_of
from meshwright.graph import Call


def stub(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    standing: Callable[[int, Tensor], Tensor],
    name: Callable[[Tensor, int], None],
) -> Any:
    """A copy of what a call returned when it was recorded, with what stands here for its tensors and arguments.

    Args:
        standing: (number, tensor as it was recorded) → what stands for a value here.
        name: marks a tensor as a value.
    """
    memo: dict[int, Any] = {}
    before, now = call.taken, tensors_of((args, kwargs))
    if len(before) == len(now):
        memo |= {id(b): n for b, n in zip(before, now, strict=True)}
    given_args, given_kwargs = call.given
    for b, n in (*zip(given_args, args, strict=False), *((given_kwargs.get(k), v) for k, v in kwargs.items())):
        if not isinstance(b, (Tensor, str, int, float, bool, type(None))):
            memo[id(b)] = n
    parts = [(call.returned, call.outputs), *((grown.items, grown.values) for grown in call.grown)]
    for value, numbers in parts:
        for t, number in zip(tensors_of(value), numbers, strict=True):
            # What it hands on as it was given, or written to, is the very thing.
            if number is not None and id(t) in memo:
                name(memo[id(t)], number)
            elif number is not None:
                memo[id(t)] = standing(number, t)
    lists = lists_in((args, kwargs)) if call.grown else []
    for grown in call.grown:
        lists[grown.which].extend(copy.deepcopy(grown.items, memo))
    return copy.deepcopy(call.returned, memo)
