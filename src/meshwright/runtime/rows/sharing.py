"""Finds the tensors of a batch that have no rows and are shared by all rows (class weights, positions, a mask of tokens).

    dim 0 of the sample differs from its number of rows    shared, also in a batch that happens to have that many rows
    dim 0 is equal, but maybe by chance                    the model decides: its forward runs on meta with one row more

It may be by chance if the tensor is a list of real numbers (class weights, with as many classes as rows), or if another dim of
the batch has this size too (as many tokens as rows).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.rows.batch import copied, has_rows, mapped, names_in, tensors_in
from meshwright.runtime.rows.microbatches import rows_of

_MOST_FORWARDS = 16  # on meta


def shared_inputs(batch: Any, runs: Callable[[Any], bool]) -> tuple[str, ...]:
    """The names of the tensors of a sample that all rows share.

    Args:
        runs: tells whether the forward runs on the shapes of a batch.
    """
    rows, tensors, names = rows_of(batch), tensors_in(batch), names_in(batch)
    without_rows = [n for n, t in zip(names, tensors, strict=True) if t.dim() and not has_rows(t, rows)]
    with_rows = {n: t for n, t in zip(names, tensors, strict=True) if has_rows(t, rows)}
    sizes = {size for t in tensors for size in t.shape[1:]}
    doubtful = [n for n, t in with_rows.items() if rows in sizes or (t.dim() == 1 and t.is_floating_point())]
    if not doubtful or runs(_one_row_more(batch, rows, ())):
        return tuple(without_rows)
    others = [n for n in doubtful if n != next(iter(with_rows))]  # the first tensor with rows defines their number
    subsets = chain.from_iterable(combinations(others, size) for size in range(1, len(others) + 1))
    for shared in islice(subsets, _MOST_FORWARDS):
        if runs(_one_row_more(batch, rows, shared)):
            return (*without_rows, *shared)
    return tuple(without_rows)


def _one_row_more(batch: Any, rows: int, shared: Collection[str]) -> Any:
    """The batch with its first row appended, except in the tensors named in ``shared``."""
    names = iter(names_in(batch))

    def enlarged(t: Tensor) -> Tensor:
        return torch.cat([t, t[:1]]) if next(names) not in shared and has_rows(t, rows) else t

    return mapped(enlarged, copied(batch))
