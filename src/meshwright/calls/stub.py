"""``stub``: what a call that runs on other ranks gives on this one; ``without_values``: all that it needs of a recording."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.structure import lists_in, put_tensors, tensors_of
from meshwright.graph import Call, ModelGraph


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
        memo |= {id(b): n for b, n in zip(before, now, strict=True) if b is not None}
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


def without_values(graph: ModelGraph) -> None:
    """A recorded forward keeps shapes: it lives as long as a job, and rows of a batch, and masks made of them, need not.

    Three things held them: what calls were given, what they gave, and the history of both, in which autograd saves what a
    backward takes. A stub asks of what a call was given one thing only: which of it stands in what the call gave.
    """
    shapes = _Shapes()
    for path, call in graph.calls.items():
        call = _without_what_it_keeps(call)
        graph.calls[path] = replace(
            call,
            given=put_tensors(shapes.of, call.given),
            taken=tuple(None if t is None else shapes.of(t) for t in call.taken),
            returned=put_tensors(shapes.of, call.returned),
            grown=tuple(replace(grown, items=put_tensors(shapes.of, grown.items)) for grown in call.grown),
        )
    graph.outputs = {at: put_tensors(shapes.of, gave) for at, gave in graph.outputs.items()}


class _Shapes:
    """For each tensor without values that has a history, one without: the same at each place."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the first is held, so that no other gets its id

    def of(self, t: Tensor) -> Tensor:
        if not t.is_meta or t.layout is not torch.strided or not _has_history(t):
            return t
        if id(t) not in self._made:
            bare = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            self._made[id(t)] = t, bare.requires_grad_(t.requires_grad)
        return self._made[id(t)][1]


def _has_history(t: Tensor) -> bool:
    """Whether autograd has a graph behind a tensor; False where it will not say."""
    try:
        return t.grad_fn is not None
    except RuntimeError:  # a view made without gradients, whose base was written to with them
        return False


def _without_what_it_keeps(call: Call) -> Call:
    """A call without the tensors with values that it was given and does not hand on."""
    gave = (call.returned, [grown.items for grown in call.grown])
    # What deepcopy has met it has put into its memo. Tensors need no copy here, and each has another stand-in: a tuple of
    # tensors that stayed the same would not be in the memo.
    met: dict[int, Any] = {id(t): object() for t in tensors_of(gave)}
    try:
        copy.deepcopy(gave, met)
    except Exception:  # whatever an object may say to being copied
        return call

    def kept(b: Any) -> Any:
        return b if id(b) in met or all(t.is_meta for t in tensors_of(b)) else None

    args, kwargs = call.given
    given = tuple(map(kept, args)), {name: kept(b) for name, b in kwargs.items()}
    return replace(call, given=given, taken=tuple(map(kept, call.taken)))
