"""A batch with more rows than it has, for its shapes."""

from __future__ import annotations

from typing import Any


def with_rows(batch: Any, rows: int) -> Any:
    """A batch with at least so many rows, for its shapes: the rows there are, again and again."""
    from torch import Tensor

    from meshwright.private import pytree

    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    count = len(tensors[0]) if tensors else 0
    if not count or count >= rows:
        return batch
    again = [i % count for i in range(rows)]

    def more(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim() or len(t) != count:
            return t
        large = t.nbytes // count * rows > _LARGE
        return t[:1].expand(rows, *t.shape[1:]) if large else t[again]  # one row many times takes no memory

    return pytree.tree_map(more, batch)


_LARGE = 64 << 20  # bytes
