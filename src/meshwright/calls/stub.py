"""``stub``: the result of a call that runs on other ranks; ``without_values``: drops the values that no stub needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.changes import make_changes
from meshwright.calls.placeholder import PathError
from meshwright.calls.structure import put_tensors, tensors_of
from meshwright.graph import Call, ModelGraph, spelled


def stub(
    call: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stand_in: Callable[[int, Tensor], Tensor],
    mark: Callable[[Tensor, int], None],
) -> Any:
    """A copy of a call's recorded result, with this rank's tensors and arguments in place of the recorded ones.

    Args:
        call: the recorded call.
        args, kwargs: of the call in this forward.
        stand_in: (number of a value, its recorded tensor) → the tensor that stands for the value on this rank.
        mark: (tensor, number): marks a tensor as the value with this number.

    Raises:
        PathError: what the call changes in its arguments is not what it was before the recorded call.
    """
    memo: dict[int, Any] = {}  # id of a recorded object → the object in its place, as deepcopy takes it
    recorded_tensors, tensors = call.argument_tensors, tensors_of((args, kwargs))
    if len(recorded_tensors) == len(tensors):
        memo |= {id(old): new for old, new in zip(recorded_tensors, tensors, strict=True) if old is not None}
    recorded_args, recorded_kwargs = call.arguments
    positional = zip(recorded_args, args, strict=False)
    named = ((recorded_kwargs.get(key), value) for key, value in kwargs.items())
    for old, new in (*positional, *named):
        if not isinstance(old, (Tensor, str, int, float, bool, type(None))):
            memo[id(old)] = new
    parts = [(call.returned, call.outputs), *((change.items, change.values) for change in call.changes)]
    for value, numbers in parts:
        for t, number in zip(tensors_of(value), numbers, strict=True):
            # A result that is an argument, maybe written to, is this rank's argument itself.
            if number is not None and id(t) in memo:
                mark(memo[id(t)], number)
            elif number is not None:
                memo[id(t)] = stand_in(number, t)
    try:
        make_changes(call.changes, (args, kwargs), memo)
    except LookupError as missing:
        raise PathError(
            f"{spelled(call.path)} runs on other ranks, and an item of its arguments, {missing}, is not what it "
            "was before this call in the recorded forward"
        ) from missing
    return copy.deepcopy(call.returned, memo)


def without_values(graph: ModelGraph) -> None:
    """Drops the values in a recorded forward: it lives as long as a job, and needs no rows of a batch, nor masks made of them.

    Three things hold values: arguments of calls, their results, and the autograd graphs of both, which save tensors for the
    backward. Of the arguments a stub needs only to know which of them are part of the result.
    """
    shapes = _Shapes()
    for path, call in graph.calls.items():
        call = _without_unused_arguments(call)
        graph.calls[path] = replace(
            call,
            arguments=put_tensors(shapes.bare, call.arguments),
            argument_tensors=tuple(None if t is None else shapes.bare(t) for t in call.argument_tensors),
            returned=put_tensors(shapes.bare, call.returned),
            changes=tuple(replace(change, items=put_tensors(shapes.bare, change.items)) for change in call.changes),
        )
    graph.outputs = {at: put_tensors(shapes.bare, outputs) for at, outputs in graph.outputs.items()}


class _Shapes:
    """Replaces meta tensors that have an autograd graph by meta tensors without one."""

    def __init__(self) -> None:
        # id → (tensor, its replacement). The tensor is held, so that no other gets its id.
        self._replacements: dict[int, tuple[Tensor, Tensor]] = {}

    def bare(self, t: Tensor) -> Tensor:
        """The replacement for a tensor, the same each time; ``t`` itself if it needs none."""
        if not t.is_meta or t.layout is not torch.strided or not _has_graph(t):
            return t
        if id(t) not in self._replacements:
            bare = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            self._replacements[id(t)] = t, bare.requires_grad_(t.requires_grad)
        return self._replacements[id(t)][1]


def _has_graph(t: Tensor) -> bool:
    """Whether a tensor has an autograd graph; False if torch cannot say."""
    try:
        return t.grad_fn is not None
    except RuntimeError:  # a view that was made without gradients, whose base was written with gradients
        return False


def _without_unused_arguments(call: Call) -> Call:
    """A call without the arguments that hold values and are no part of its result."""
    results = (call.returned, [change.items for change in call.changes])
    # deepcopy enters every object that it copies into the memo. Tensors are not copied here; each has another object as its
    # copy, because deepcopy does not enter a tuple all of whose items stayed the same.
    memo: dict[int, Any] = {id(t): object() for t in tensors_of(results)}
    try:
        copy.deepcopy(results, memo)
    except Exception:  # an object may raise anything if it is copied
        return call

    def needed(argument: Any) -> Any:
        is_needed = id(argument) in memo or all(t.is_meta for t in tensors_of(argument))
        return argument if is_needed else None

    args, kwargs = call.arguments
    arguments = tuple(map(needed, args)), {name: needed(argument) for name, argument in kwargs.items()}
    return replace(call, arguments=arguments, argument_tensors=tuple(map(needed, call.argument_tensors)))
