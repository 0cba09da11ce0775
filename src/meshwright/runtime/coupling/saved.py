"""What autograd saves of a forward for its backward, and whether the forward wrote to it afterwards.

A backward that needs a tensor ends in an error of autograd's if the tensor was written since. This tells without a backward.
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
    """For the time of a forward with gradients. At its end ``lines`` gets the model's lines that saved what was written."""
    saved: list[tuple[Tensor, int | None, str]] = []

    def note(t: Tensor) -> Tensor:
        # Of the same version; a graph that holds its own results would wait for the garbage collector. A checkpoint of the
        # model's own saves under the modes that are on, to which this is no part of the forward.
        with without_modes():
            held = t.detach()
        saved.append((held, version(held), model_line()))
        return held

    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with torch.enable_grad(), hooks, transformed_functions(partial(without_hooks, hooks)):
            yield
        lines.update(line for t, before, line in saved if version(t) != before)
    finally:
        saved.clear()  # the graph holds ``note``, and that what was saved


def without_hooks(
    hooks: Any, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What ``torch.func`` made is called without the hooks, which it refuses."""
    if transforming():  # (the one around it is)
        return call(*args, **kwargs)
    hooks.__exit__()
    try:
        return call(*args, **kwargs)
    finally:
        hooks.__enter__()
