"""``LazyTensor``: a tensor in a file of which nothing is read before a part of it is asked for.

Joining, stacking, cutting and transposing one gives another, so that what transformers does to a folder's tensors on their
way into a model (experts that become one tensor, a fused tensor that becomes three) is done by its own code, and a rank
still reads its own slices only:

    FromFile    a tensor of a safetensors file
    Joined      torch.cat
    Stacked     torch.stack
    Part        an interval of one dim: torch.chunk, torch.split
    Swapped     torch.transpose
    Squeezed    a dim of size 1 less

Any other function gets the whole tensor, read then.
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

Box = tuple[Interval, ...]  # an interval of each dim


class LazyTensor:
    """A tensor by its shape and type.

    Attributes:
        shape: of the whole tensor.
        dtype: as the file has it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    def copy_to(self, out: Tensor, box: Box) -> None:
        """Reads the elements of ``box`` into ``out``, which has its shape, and may have another type."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """The whole tensor."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(out, tuple((0, n) for n in self.shape))
        return out

    # --- what code that knows tensors asks of it ---------------------------------------------------------------------

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


class Read(LazyTensor):
    """A tensor that is in memory already."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value.shape, value.dtype)
        self._value = value

    def copy_to(self, out: Tensor, box: Box) -> None:
        out.copy_(_narrowed(self._value, box))


class FromFile(LazyTensor):
    """A tensor of a safetensors file, by safetensors' own slice of it."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, part: Any) -> None:
        super().__init__(shape, dtype)
        self._part = part

    def copy_to(self, out: Tensor, box: Box) -> None:
        out.copy_(self._part[tuple(slice(*interval) for interval in box) or ...])


class Joined(LazyTensor):
    """Several, one after another along a dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        super().__init__(shape, parts[0].dtype)
        self._parts, self._dim = parts, dim

    def copy_to(self, out: Tensor, box: Box) -> None:
        first, last = box[self._dim]
        starts = accumulate((part.shape[self._dim] for part in self._parts), initial=0)
        for start, part in zip(starts, self._parts, strict=False):
            lo, hi = max(first, start), min(last, start + part.shape[self._dim])
            if lo < hi:
                part.copy_to(out.narrow(self._dim, lo - first, hi - lo), _with(box, self._dim, lo - start, hi - start))


class Stacked(LazyTensor):
    """Several of one shape along a new dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = parts[0].shape
        super().__init__((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype)
        self._parts, self._dim = parts, dim

    def copy_to(self, out: Tensor, box: Box) -> None:
        first, last = box[self._dim]
        for i in range(first, last):
            self._parts[i].copy_to(out.select(self._dim, i - first), (*box[: self._dim], *box[self._dim + 1 :]))


class Part(LazyTensor):
    """An interval of one dim of another."""

    def __init__(self, of: LazyTensor, dim: int, start: int, size: int) -> None:
        shape = list(of.shape)
        shape[dim] = size
        super().__init__(shape, of.dtype)
        self._of, self._dim, self._start = of, dim, start

    def copy_to(self, out: Tensor, box: Box) -> None:
        first, last = box[self._dim]
        self._of.copy_to(out, _with(box, self._dim, self._start + first, self._start + last))


class Swapped(LazyTensor):
    """Another with two dims swapped."""

    def __init__(self, of: LazyTensor, dim0: int, dim1: int) -> None:
        super().__init__(_swapped(of.shape, dim0, dim1), of.dtype)
        self._of, self._dims = of, (dim0, dim1)

    def copy_to(self, out: Tensor, box: Box) -> None:
        self._of.copy_to(out.transpose(*self._dims), _swapped(box, *self._dims))


class Squeezed(LazyTensor):
    """Another without one of its dims, of size 1."""

    def __init__(self, of: LazyTensor, dim: int) -> None:
        super().__init__((*of.shape[:dim], *of.shape[dim + 1 :]), of.dtype)
        self._of, self._dim = of, dim

    def copy_to(self, out: Tensor, box: Box) -> None:
        self._of.copy_to(out.unsqueeze(self._dim), (*box[: self._dim], (0, 1), *box[self._dim :]))


def read_slices(value: LazyTensor, slices: Slices, out: Tensor) -> None:
    """Fills ``out``, a rank's local tensor, with its slices of a whole one; reads nothing else, a box at a time."""
    places = [_places(ranges) for ranges in slices]
    for chosen in product(*places):
        here = _narrowed(out, tuple(at for at, _ in chosen))
        value.copy_to(here, tuple(interval for _, interval in chosen))


def _places(ranges: Sequence[Interval]) -> list[tuple[Interval, Interval]]:
    """(interval in the local tensor, interval in the whole one), of one dim."""
    starts = accumulate((stop - start for start, stop in ranges), initial=0)
    return [((at, at + stop - start), (start, stop)) for at, (start, stop) in zip(starts, ranges, strict=False)]


def _narrowed(value: Tensor, box: Box) -> Tensor:
    for dim, (start, stop) in enumerate(box):
        value = value.narrow(dim, start, stop - start)
    return value


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    return (*box[:dim], (start, stop), *box[dim + 1 :])


def _swapped(values: Sequence[Any], a: int, b: int) -> tuple[Any, ...]:
    swapped = list(values)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return tuple(swapped)


# --- torch's functions of them --------------------------------------------------------------------------------------


def _unread(values: Sequence[Any]) -> list[LazyTensor]:
    return [value if isinstance(value, LazyTensor) else Read(value) for value in values]


def _cat(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    return Joined(_unread(tensors), dim % tensors[0].ndim)


def _stack(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    return Stacked(_unread(tensors), dim % (tensors[0].ndim + 1))


def _split(tensor: LazyTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    dim, whole = dim % tensor.ndim, tensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        step = split_size_or_sections
        sizes = [min(step, whole - start) for start in range(0, whole, step)]
    else:
        sizes = list(split_size_or_sections)
    if sum(sizes) != whole:
        raise ValueError(f"sizes {sizes} of a dim of {whole}")
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
