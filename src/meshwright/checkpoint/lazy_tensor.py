"""``LazyTensor``: a tensor in a file, whose values are read when a part of it is asked for.

``torch.cat``, ``stack``, ``split``, ``chunk`` and ``transpose`` of lazy tensors are lazy again. So transformers' own code can
convert a folder's tensors for a model (stack experts into one tensor, split a fused tensor into three), and a rank still reads
its own slices only:

    FromFile        a tensor of a safetensors file
    InMemory        a tensor that has been read already
    Concatenated    torch.cat
    Stacked         torch.stack
    Part            an interval of one dim: torch.chunk, torch.split
    Swapped         torch.transpose
    Squeezed        a tensor without one of its dims, of size 1

Any other function reads the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Interval
from meshwright.private import pytree
from meshwright.recipe import Slices

Box = tuple[Interval, ...]
"""A part of a tensor: an interval of each dim."""


class LazyTensor:
    """A tensor with a shape and a dtype, whose values are read on demand.

    Attributes:
        shape: of the full tensor.
        dtype: as the file has it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def copy_to(self, out: Tensor, box: Box) -> None:
        """Reads the elements of ``box`` into ``out``, which has the shape of the box, and may have another dtype."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Reads the full tensor."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(out, tuple((0, n) for n in self.shape))
        return out

    # --- the interface of a tensor that conversions use --------------------------------------------------------------

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lazily = _LAZY.get(func)
        if lazily is not None:
            return lazily(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(lambda x: x.read() if isinstance(x, LazyTensor) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyTensor:
        return self

    def squeeze(self, dim: int) -> LazyTensor:
        return Squeezed(self, dim % self.ndim) if self.shape[dim] == 1 else self

    def transpose(self, dim0: int, dim1: int) -> LazyTensor:
        return Swapped(self, dim0 % self.ndim, dim1 % self.ndim)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)


class InMemory(LazyTensor):
    """A tensor that has been read already."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value.shape, value.dtype)
        self._value = value

    def copy_to(self, out: Tensor, box: Box) -> None:
        out.copy_(_narrowed(self._value, box))


class FromFile(LazyTensor):
    """A tensor of a safetensors file. ``file_slice`` is what ``safe_open(…).get_slice(name)`` returns."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, file_slice: Any) -> None:
        super().__init__(shape, dtype)
        self._file_slice = file_slice

    def copy_to(self, out: Tensor, box: Box) -> None:
        out.copy_(self._file_slice[tuple(slice(*interval) for interval in box) or ...])


class Concatenated(LazyTensor):
    """Lazy tensors, concatenated along a dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype)
        self._parts, self._dim = parts, dim

    def copy_to(self, out: Tensor, box: Box) -> None:
        first, last = box[self._dim]
        starts = accumulate((part.shape[self._dim] for part in self._parts), initial=0)
        for start, part in zip(starts, self._parts, strict=False):
            lo, hi = max(first, start), min(last, start + part.shape[self._dim])  # the overlap of the box and this part
            if lo < hi:
                out_part = out.narrow(self._dim, lo - first, hi - lo)
                part.copy_to(out_part, _with_interval(box, self._dim, lo - start, hi - start))


class Stacked(LazyTensor):
    """Lazy tensors of one shape, stacked along a new dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = parts[0].shape
        super().__init__((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype)
        self._parts, self._dim = parts, dim

    def copy_to(self, out: Tensor, box: Box) -> None:
        first, last = box[self._dim]
        for i in range(first, last):
            self._parts[i].copy_to(out.select(self._dim, i - first), (*box[: self._dim], *box[self._dim + 1 :]))


class Part(LazyTensor):
    """An interval of one dim of a lazy tensor."""

    def __init__(self, source: LazyTensor, dim: int, start: int, size: int) -> None:
        shape = list(source.shape)
        shape[dim] = size
        super().__init__(shape, source.dtype)
        self._source, self._dim, self._start = source, dim, start

    def copy_to(self, out: Tensor, box: Box) -> None:
        first, last = box[self._dim]
        self._source.copy_to(out, _with_interval(box, self._dim, self._start + first, self._start + last))


class Swapped(LazyTensor):
    """A lazy tensor with two dims swapped."""

    def __init__(self, source: LazyTensor, dim0: int, dim1: int) -> None:
        super().__init__(_swapped(source.shape, dim0, dim1), source.dtype)
        self._source, self._dims = source, (dim0, dim1)

    def copy_to(self, out: Tensor, box: Box) -> None:
        self._source.copy_to(out.transpose(*self._dims), _swapped(box, *self._dims))


class Squeezed(LazyTensor):
    """A lazy tensor without one of its dims, of size 1."""

    def __init__(self, source: LazyTensor, dim: int) -> None:
        super().__init__((*source.shape[:dim], *source.shape[dim + 1 :]), source.dtype)
        self._source, self._dim = source, dim

    def copy_to(self, out: Tensor, box: Box) -> None:
        self._source.copy_to(out.unsqueeze(self._dim), (*box[: self._dim], (0, 1), *box[self._dim :]))


def read_slices(lazy: LazyTensor, slices: Slices, out: Tensor) -> None:
    """Reads a rank's slices of a tensor into ``out``, the local tensor. Reads one box at a time, and nothing else.

    Args:
        slices: for each dim, ranges of the full tensor, in the order in which they lie in ``out``.
    """
    intervals = [_intervals(ranges) for ranges in slices]
    for combination in product(*intervals):
        local_box = tuple(local for local, _ in combination)
        lazy.copy_to(_narrowed(out, local_box), tuple(interval for _, interval in combination))


def _intervals(ranges: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    """For each range of a dim: (its interval in the local tensor, its interval in the full tensor).

    >>> _intervals([(0, 2), (4, 7)])
    [((0, 2), (0, 2)), ((2, 5), (4, 7))]
    """
    local_starts = accumulate((stop - start for start, stop in ranges), initial=0)
    return [
        ((local, local + stop - start), (start, stop))
        for local, (start, stop) in zip(local_starts, ranges, strict=False)
    ]


def _narrowed(value: Tensor, box: Box) -> Tensor:
    """The part of a tensor that a box covers, as a view."""
    for dim, (start, stop) in enumerate(box):
        value = value.narrow(dim, start, stop - start)
    return value


def _with_interval(box: Box, dim: int, start: int, stop: int) -> Box:
    """The box with another interval in one dim."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])


def _swapped(values: Sequence[Any], a: int, b: int) -> tuple[Any, ...]:
    """The values with those at ``a`` and ``b`` swapped."""
    swapped = list(values)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return tuple(swapped)


# --- torch's functions, for lazy tensors ------------------------------------------------------------------------------


def _as_lazy(values: Sequence[Any]) -> list[LazyTensor]:
    return [value if isinstance(value, LazyTensor) else InMemory(value) for value in values]


def _cat(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    return Concatenated(_as_lazy(tensors), dim % tensors[0].ndim)


def _stack(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    return Stacked(_as_lazy(tensors), dim % (tensors[0].ndim + 1))


def _split(tensor: LazyTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    dim, total = dim % tensor.ndim, tensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        step = split_size_or_sections
        sizes = [min(step, total - start) for start in range(0, total, step)]
    else:
        sizes = list(split_size_or_sections)
    if sum(sizes) != total:
        raise ValueError(f"sizes {sizes} of a dim of size {total}")
    starts = accumulate(sizes, initial=0)
    return tuple(Part(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    return tensor.transpose(dim0, dim1)


_LAZY: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}
