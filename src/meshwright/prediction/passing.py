"""``pruned``: a build function whose model passes its inputs through some blocks. These blocks have no parameters.

    pattern   h, mask ──► attention, MLP ──► (h', weights)       h' has the shape of h; no input has the shape of weights
    passed    h, mask ─────────────────────► (h,  weights of the pattern)

The outputs of a block that is passed through follow from its pattern: a block that is alike and ran before it in the same
forward. An output is the input tensor with its shape and dtype; if there is none, it is the pattern's output itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.deferred import Build
from meshwright.prediction.blocks import PrunedModel
from meshwright.private import pytree


class UnlikePatternError(Exception):
    """A block cannot be passed through, because it differs from its pattern. The full model must be rehearsed."""


def pruned(build: Build, blocks: PrunedModel) -> Build:
    """A build function like ``build``, whose model passes its inputs through the blocks in ``blocks.blocks``."""

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


def _in_place_of(forward: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` with the signature of ``forward``, because a model may inspect this signature."""
    return functools.wraps(forward)(functools.partial(replacement))


def _empty(block: nn.Module) -> None:
    """Removes a block's modules, parameters and buffers. Their names stay registered, as None."""
    while children := dict(block.named_children()):  # named_children has a module with two names only once
        for name in children:
            block.register_module(name, None)
    for name, _ in list(block.named_parameters(recurse=False, remove_duplicate=False)):
        block.register_parameter(name, None)
    for name, _ in list(block.named_buffers(recurse=False, remove_duplicate=False)):
        block.register_buffer(name, None)


class _Pattern:
    """Records how the outputs of a block follow from its inputs, in its last call."""

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward
        self._spec: Any = None
        # For each output, (number of the input tensor with its shape and dtype, None), or (None, a function that returns it).
        self._outputs: list[tuple[int | None, Any]] = []
        block.forward = _in_place_of(block.forward, self._run_and_record)

    def _run_and_record(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block, and records which inputs its outputs look like."""
        tensors = _tensors((args, kwargs))
        looks = [_looks(t) for t in tensors]
        result = self._forward(*args, **kwargs)
        leaves, self._spec = pytree.tree_flatten(result)
        unmatched = list(range(len(tensors)))
        self._outputs = []
        for leaf in leaves:
            index = next((i for i in unmatched if isinstance(leaf, Tensor) and looks[i] == _looks(leaf)), None)
            if index is not None:
                unmatched.remove(index)
            self._outputs.append((index, None if index is not None else _weak(leaf)))
        return result

    def pass_through(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of a block that is alike, without computing them.

        Raises:
            NotAlike: the pattern was not called before, it had more input tensors, or a tensor that it returned is freed.
        """
        if self._spec is None:
            raise UnlikePatternError("a block is called before its pattern")
        tensors = _tensors((args, kwargs))
        if any(index is not None and index >= len(tensors) for index, _ in self._outputs):
            raise UnlikePatternError("a block is called with fewer tensors than its pattern")
        leaves = [tensors[index] if index is not None else recall() for index, recall in self._outputs]
        return pytree.tree_unflatten(leaves, self._spec)


def _looks(t: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype by which tensors are matched."""
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
            raise UnlikePatternError("an output of a block, other than its hidden values, has been freed")
        return t

    return recall
