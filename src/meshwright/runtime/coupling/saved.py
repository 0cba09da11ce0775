"""Finds tensors that autograd saved for the backward of a forward, and that the forward wrote to afterwards.

If a saved tensor has been written, the backward ends in an error of autograd. This finds it without a backward.
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
    """A context for a forward with gradients. At its end, the model's lines whose saved tensors were written since are added
    to ``lines``."""
    saved: list[tuple[Tensor, int | None, str]] = []

    def note(t: Tensor) -> Tensor:
        # Detached, with the same version counter: a graph that holds its own results would live until the next garbage
        # collection. Without modes: a checkpoint of the model saves while modes are on, and this call is not the model's.
        with without_modes():
            detached = t.detach()
        saved.append((detached, version(detached), model_line()))
        return detached

    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with torch.enable_grad(), hooks, transformed_functions(partial(without_hooks, hooks)):
            yield
        lines.update(line for t, before, line in saved if version(t) != before)
    finally:
        saved.clear()  # the graph holds ``note``, and through it the saved tensors


def without_hooks(
    hooks: Any, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a function that ``torch.func`` transformed without saved-tensor hooks, which it refuses."""
    if transforming():  # (the outer transform has done so)
        return call(*args, **kwargs)
    hooks.__exit__()
    try:
        return call(*args, **kwargs)
    finally:
        hooks.__enter__()
