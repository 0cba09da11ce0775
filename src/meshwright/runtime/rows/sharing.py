"""Which tensors of a batch have no rows: all rows share them (weights of classes, positions, a mask of tokens).

    dim 0 of the sample is not its number of rows       shared, also in a batch that happens to have as many rows
    it is, and could be by chance                       asked of the model: the forward is run, for its shapes, with a row more

By chance: a plain list of real numbers (weights of as many classes as there are rows), or a size that another dim of the batch
has too (as many tokens as rows).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.rows.batch import copied, has_rows, mapped, names_in, tensors_in
from meshwright.runtime.rows.microbatches import rows_of

_MOST_TRIES = 16  # forwards, for their shapes


def shared_inputs(batch: Any, runs: Callable[[Any], bool]) -> tuple[str, ...]:
    """The names of a sample's tensors that all rows share.

    Args:
        runs: whether the forward runs on a batch of these shapes.
    """
    rows, tensors, names = rows_of(batch), tensors_in(batch), names_in(batch)
    apart = [n for n, t in zip(names, tensors, strict=True) if t.dim() and not has_rows(t, rows)]
    with_rows = {n: t for n, t in zip(names, tensors, strict=True) if has_rows(t, rows)}
    sizes = {size for t in tensors for size in t.shape[1:]}
    doubtful = [n for n, t in with_rows.items() if rows in sizes or (t.dim() == 1 and t.is_floating_point())]
    if not doubtful or runs(_one_row_more(batch, rows, ())):
        return tuple(apart)
    others = [n for n in doubtful if n != next(iter(with_rows))]  # the first tensor says how many rows there are
    subsets = chain.from_iterable(combinations(others, size) for size in range(1, len(others) + 1))
    for shared in islice(subsets, _MOST_TRIES):
        if runs(_one_row_more(batch, rows, shared)):
            return (*apart, *shared)
    return tuple(apart)


def _one_row_more(batch: Any, rows: int, shared: Collection[str]) -> Any:
    names = iter(names_in(batch))

    def more(t: Tensor) -> Tensor:
        return torch.cat([t, t[:1]]) if next(names) not in shared and has_rows(t, rows) else t

    return mapped(more, copied(batch))
