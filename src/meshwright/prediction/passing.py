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
    """``build``, its blocks passed through."""

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
    """Another forward, with the signature of a module's own, which a model may ask for."""
    return functools.wraps(forward)(functools.partial(other))


def _empty(block: nn.Module) -> None:
    """Takes its modules, parameters and buffers away; their names stay, and are None."""
    while children := dict(block.named_children()):  # which leaves out a second name of one
        for name in children:
            block.register_module(name, None)
    for name, _ in list(block.named_parameters(recurse=False, remove_duplicate=False)):
        block.register_parameter(name, None)
    for name, _ in list(block.named_buffers(recurse=False, remove_duplicate=False)):
        block.register_buffer(name, None)


class _Pattern:
    """How what a block gives follows from what it is given, as its last call showed."""

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward
        self._spec: Any = None
        self._leaves: list[tuple[int | None, Any]] = []  # of each: which of the tensors given, or what stands for it
        block.forward = _in_place_of(block.forward, self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        before = [_looks(t) for t in given]
        result = self._forward(*args, **kwargs)
        leaves, self._spec = pytree.tree_flatten(result)
        left = list(range(len(given)))
        self._leaves = []
        for leaf in leaves:
            which = next((i for i in left if isinstance(leaf, Tensor) and before[i] == _looks(leaf)), None)
            if which is not None:
                left.remove(which)
            self._leaves.append((which, None if which is not None else _weak(leaf)))
        return result

    def pass_through(self, *args: Any, **kwargs: Any) -> Any:
        """What a block that is alike gives in place of what it would compute."""
        if self._spec is None:
            raise NotAlike("a block is called before one that is alike")
        given = _tensors((args, kwargs))
        if any(which is not None and which >= len(given) for which, _ in self._leaves):
            raise NotAlike("blocks that are alike are called with other arguments")
        leaves = [given[which] if which is not None else held() for which, held in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def _looks(t: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.dtype


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _weak(value: Any) -> Callable[[], Any]:
    """What gives a value again, without keeping a tensor alive."""
    if not isinstance(value, Tensor):
        return lambda: value
    reference = weakref.ref(value)

    def held() -> Tensor:
        if (t := reference()) is None:
            raise NotAlike("what a block gives besides its hidden values is not kept")
        return t

    return held
