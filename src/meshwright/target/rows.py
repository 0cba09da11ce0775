"""``with_rows``: enlarges a batch by repeating its rows, for code that needs its shapes alone."""

from __future__ import annotations

from typing import Any


def with_rows(batch: Any, rows: int) -> Any:
    """A batch with at least ``rows`` rows: the rows of ``batch``, repeated. Tensors without rows stay as they are."""
    from torch import Tensor

    from meshwright.private import pytree

    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    count = len(tensors[0]) if tensors else 0
    if not count or count >= rows:
        return batch
    repeated = [i % count for i in range(rows)]

    def enlarged(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim() or len(t) != count:
            return t
        is_large = t.nbytes // count * rows > _LARGE
        return t[:1].expand(rows, *t.shape[1:]) if is_large else t[repeated]

    return pytree.tree_map(enlarged, batch)


_LARGE = 64 << 20  # bytes of a tensor above which its first row is expanded, which takes no memory
