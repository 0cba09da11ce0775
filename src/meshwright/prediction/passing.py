"""``pruned``: a ``build`` whose model passes some blocks through: they have no parameters, and give what they are given.

    kept     h, mask ──► attention, MLP ──► (h', weights)         ··► h' has the shape of h; weights that of nothing given
    passed   h, mask ─────────────────────► (h,  weights of the kept one)

What a block gives is read off one that is kept, is alike, and runs before it in the same forward: a tensor is passed through
if one of its shape and type was given, and stands for itself otherwise.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.deferred import Build
from meshwright.prediction.blocks import Pruned
from meshwright.private import pytree


class NotAlike(Exception):
    """A block cannot be passed through: the model is rehearsed whole."""


def pruned(build: Build, blocks: Pruned) -> Build:
    """A build function like ``build``, whose model passes the blocks of ``blocks`` through."""

    def build_pruned() -> nn.Module:
        model = build()
        modules = dict(model.named_modules())
        patterns: dict[str, _Pattern] = {}
        for block, pattern in blocks.blocks.items():
            if pattern not in patterns:
                patterns[pattern] = _Pattern(modules[pattern])
            _empty(modules[block])
            modules[block].forward = _in_place_of(modules[block].forward, patterns[pattern].pass_through)
        return model

    return build_pruned if blocks.blocks else build


def _in_place_of(forward: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """``other`` with the signature of ``forward``, because a model may inspect that signature."""
    return functools.wraps(forward)(functools.partial(other))


def _empty(block: nn.Module) -> None:
    """Removes a block's modules, parameters and buffers. Their names stay registered, as None."""
    while children := dict(block.named_children()):  # which leaves out a second name of one
        for name in children:
            block.register_module(name, None)
    for name, _ in list(block.named_parameters(recurse=False, remove_duplicate=False)):
        block.register_parameter(name, None)
    for name, _ in list(block.named_buffers(recurse=False, remove_duplicate=False)):
        block.register_buffer(name, None)


class _Pattern:
    """How a block's outputs follow from its inputs, as seen in its last call."""

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward
        self._spec: Any = None
        self._leaves: list[
            tuple[int | None, Any]
        ] = []  # for each output: the index of the input tensor that looks alike, or a function that returns the output
        block.forward = _in_place_of(block.forward, self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        before = [_looks(t) for t in tensors]
        result = self._forward(*args, **kwargs)
        leaves, self._spec = pytree.tree_flatten(result)
        unmatched = list(range(len(tensors)))
        self._leaves = []
        for leaf in leaves:
            which = next((i for i in unmatched if isinstance(leaf, Tensor) and before[i] == _looks(leaf)), None)
            if which is not None:
                unmatched.remove(which)
            self._leaves.append((which, None if which is not None else _weak(leaf)))
        return result

    def pass_through(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of a block that is alike, without computing them.

        Raises:
            NotAlike: the pattern was not called before, it had more input tensors, or a tensor that it returned is freed.
        """
        if self._spec is None:
            raise NotAlike("a block is called before one that is alike")
        tensors = _tensors((args, kwargs))
        if any(which is not None and which >= len(tensors) for which, _ in self._leaves):
            raise NotAlike("blocks that are alike are called with other arguments")
        leaves = [tensors[which] if which is not None else recall() for which, recall in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _looks(t: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.dtype


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _weak(value: Any) -> Callable[[], Any]:
    """A function that returns ``value``. It does not keep a tensor alive."""
    if not isinstance(value, Tensor):
        return lambda: value
    reference = weakref.ref(value)

    def recall() -> Tensor:
        if (t := reference()) is None:
            raise NotAlike("what a block gives besides its hidden values is not kept")
        return t

    return recall
