"""Gradients of tensors of a batch that require them (adversarial examples, a prompt that is learned): those of one device.

    the caller's tensor ──► a leaf of the job's own ──► forwards and backwards of this rank
            ▲                                                       │ its gradient, summed over stages
            └──────────────── one backward from here ◄──────────────┘

So microbatches need not go through the caller's graph several times, and what several stages, or the rows of all data ranks,
have to do with a tensor arrives in it once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.groups import Groups
from meshwright.runtime.rows.batch import as_leaf, has_rows, mapped, tensors_in
from meshwright.runtime.rows.microbatches import Microbatches, rows_of


def with_leaves(batch: Any) -> Any:
    """A batch in the same memory, with leaves in place of tensors that require gradients."""
    if not any(t.requires_grad for t in tensors_in(batch)):
        return batch
    return mapped(lambda t: as_leaf(t) if t.requires_grad else t, batch)


class InputGradients:
    """The tensors of a batch that require gradients, before its forwards: these may put others into its containers.

    Args:
        given: the caller's batch.
        batch: the same ``with_leaves``.
        microbatches: what is run of it.
    """

    def __init__(self, given: Any, batch: Any, microbatches: Microbatches) -> None:
        theirs, self._first_row, self._rows = tensors_in(given), microbatches.first_row, rows_of(batch)
        self._tensors: list[tuple[Tensor, Tensor, Tensor]] = []
        if any(t.requires_grad for t in theirs):
            leaves = tensors_in(batch)
            run = leaves if self._first_row is None else tensors_in(microbatches.batches[0])
            self._tensors = [each for each in zip(theirs, leaves, run, strict=True) if each[0].requires_grad]

    def give(self, groups: Groups) -> None:
        """Call after a backward: passes the gradients on to the caller's tensors. Collective over the stages of a copy of the
        model, if a tensor requires one. Not for branches, of which each has only its part of such a gradient."""
        for theirs, leaf, ours in self._tensors:
            gradient = _of_all_stages(ours, groups)
            if gradient is None:
                continue
            if self._first_row is not None and has_rows(leaf, self._rows):
                gradient = gradient[self._first_row : self._first_row + self._rows]
            theirs.backward(gradient)


def _of_all_stages(t: Tensor, groups: Groups) -> Tensor | None:
    """The gradient of a leaf, summed over stages; None if no stage has one."""
    if "pp" not in groups.hosts:  # there is one
        return t.grad
    flat = torch.zeros(t.numel() + 1, dtype=t.dtype, device=groups.device)
    if t.grad is not None:
        flat[:-1], flat[-1] = t.grad.flatten(), 1
    dist.all_reduce(flat, group=groups.pipeline)
    return flat[:-1].view(t.shape).to(t.device) if flat[-1].item() else None
