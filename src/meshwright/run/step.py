"""One step: forward and backward over all microbatches, the mean over the global batch.

    rows of this rank ── split ──► microbatches, each: forward, loss · weight, backward
                                                   weight = its rows / rows of all ranks
    gradients are summed: over microbatches here, over data ranks by FSDP2, over tp by the view's conjugate moves

The mean is taken here and nowhere else: 1/N is in the weight, every reduction is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from math import isnan, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.place import bounds
from meshwright.private import python_body, pytree
from meshwright.run.counts import SLOTS, LabelCounter
from meshwright.run.waiting import Waiting

# backward() hands over to function modes, and those answer with themselves turned off; but what a backward makes again
# (recompute, a model's own checkpoints) needs the view. So its body is run, which keeps them on.
BACKWARD = python_body(torch.autograd.backward) or torch.autograd.backward


def called(model: nn.Module, batch: Any) -> Any:
    """What a model returns for a batch: a dict of keyword arguments, a tuple of arguments, or one argument."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def rows_of(batch: Any) -> int:
    """Rows of a batch: dim 0 of its first tensor that has dims."""
    for t in pytree.tree_leaves(batch):
        if isinstance(t, Tensor) and t.dim():
            return t.shape[0]
    raise ValueError("a batch needs at least one tensor with rows (dim 0)")


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of every tensor that has the batch's rows; the rest as it is."""
    rows = rows_of(batch)
    return pytree.tree_map(
        lambda t: t[start:stop] if isinstance(t, Tensor) and t.dim() and t.shape[0] == rows else t, batch
    )


def microbatches(batch: Any, pieces: int) -> Iterator[Any]:
    for start, stop in bounds(rows_of(batch), pieces):
        yield take_rows(batch, start, stop)


def weights(
    pieces: list[Any],
    counter: LabelCounter | None,
    copies: int,
    device: torch.device,
    *,
    alone: bool = False,
    waiting: Waiting | None = None,
) -> tuple[list[float], list[list[float] | None]]:
    """Each microbatch's weight in the mean, and the shares of its mean losses where that weight is not enough.

    Collective over all ranks, of which ``copies`` see the same rows; ``alone``: of this rank's pieces only.
    """
    unknown, none = [nan] * SLOTS, [0.0] * SLOTS

    def counted(piece: Any) -> list[float]:
        return none if not rows_of(piece) else counter.counts(piece) if counter else unknown

    local = [[float(rows_of(p)), *counted(p)] for p in pieces]
    total = torch.tensor(local, dtype=torch.float64, device=device).sum(0)
    if dist.get_world_size() > 1 and not alone:
        with waiting.on() if waiting is not None else nullcontext():
            dist.all_reduce(total)
        total = total / copies
    rows, *counts = total.tolist()
    found, shares = [], []
    for own_rows, *own in local:
        weight = own_rows / rows
        ratios = [_ratio(n, of, weight) for n, of in zip(own, counts, strict=True)]
        found.append(weight)
        shares.append(ratios if any(abs(r - 1) > 1e-12 for r in ratios) else None)
    return found, shares


def _ratio(count: float, total: float, weight: float) -> float:
    """By how much a loss over ``count`` of ``total`` labels must be scaled for its weight by rows to be right."""
    return 1.0 if isnan(total) or not total or not weight else count / total / weight


def gather_rows(batch: Any, groups: list[dist.ProcessGroup]) -> Any:
    """All rows of the global batch, on every rank: gathered over each group in turn, the innermost axis first."""
    for group in groups:
        rows = rows_of(batch)
        leaves, spec = pytree.tree_flatten(batch)
        leaves = [_gathered(t, rows, group) for t in leaves]
        batch = pytree.tree_unflatten(leaves, spec)
    return batch


def _gathered(t: Any, rows: int, group: dist.ProcessGroup) -> Any:
    if not isinstance(t, Tensor) or not t.dim() or t.shape[0] != rows:
        return t
    ranks = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=t.device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([rows], device=t.device), group=group)
    sizes = [int(c) for c in counts]
    padded = torch.cat([t, t.new_zeros((max(sizes) - rows, *t.shape[1:]))])
    chunks = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(chunks, padded.contiguous(), group=group)
    return torch.cat([chunk[:n] for chunk, n in zip(chunks, sizes, strict=True)])
