"""``written_after_saved``: finds tensors that autograd saved for the backward, and to which the forward wrote afterwards.

The backward of such a forward ends in an error of autograd. No backward is needed to find these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.blame import model_line
from meshwright.private import version, without_modes
from meshwright.spmd.autograd_functions import transformed_functions, transforming


@contextmanager
def written_after_saved(lines: set[str]) -> Iterator[None]:
    """A context for a forward with gradients.

    Args:
        lines: gets, at the end of the forward, the model's lines that saved a tensor to which the forward then wrote.
    """
    saved: list[tuple[Tensor, int | None, str]] = []

    def note(t: Tensor) -> Tensor:
        # Detached: a graph that refers to its own results would live until the next garbage collection. The detached tensor
        # shares the version counter. Without modes: they may be on here, in a checkpoint of the model, and this call is not
        # the model's.
        with without_modes():
            detached = t.detach()
        saved.append((detached, version(detached), model_line()))
        return detached

    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with torch.enable_grad(), hooks, transformed_functions(partial(without_hooks, hooks)):
            yield
        lines.update(line for t, version_then, line in saved if version(t) != version_then)
    finally:
        saved.clear()  # the graph refers to ``note``, and through it to the saved tensors


def without_hooks(
    hooks: Any, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a transformed function of ``torch.func`` while ``hooks`` are off: transforms refuse hooks on saved tensors."""
    if transforming():  # (the outer transform has switched them off)
        return call(*args, **kwargs)
    hooks.__exit__()
    try:
        return call(*args, **kwargs)
    finally:
        hooks.__enter__()
