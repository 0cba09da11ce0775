"""Running a forward for its shapes: parameters are on meta, the batch and the buffers are real and small.

What follows from parameters has a shape and no value; what follows from the batch alone (masks, positions, shifted
labels) is computed. A value that is read all the same is assumed (a mask is all true, a number is one): planning may
then see another path than a run takes. That costs nothing but speed, since the view is right for any path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from meshwright.blame import model_line
from meshwright.described import Laid, described, laid, made_again, tensors_among
from meshwright.planning.assumed import (
    ASSUMED,
    CONTRARY,
    INDEXED,
    META,
    NO_META,
    READS,
    SIZED,
    another,
    aten,
    is_mask,
    of_another,
    to_meta,
)
from meshwright.planning.origins import Origins
from meshwright.private import DispatchMode, pytree, storage_of
from meshwright.spmd.torch_functions import op_facts, written_by

Watch = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


class Shadow(DispatchMode):
    """Lets meta and real tensors meet: where they do, the result is meta; and answers reads of meta values.

    Args:
        contrary: answer every question the other way: masks are empty, what is true of the batch is not. A module that
            is called either way is called on every rank, whatever its rows.
        fewer: assume that a mask without values holds half of what there is, and not all.
        fewer_known: take it that a mask of the batch selects another number than it does.
        empty: take it that masks select nothing.
        origins: gets the memory that the answers follow from.
        watch: is told of each op: the tensors that it takes, those of them that it writes, and what it gives.

    Attributes:
        reads: how many values were read, assumed or real.
        known: how many of them were real: the path that was taken is that of this batch.
        assumed: (function, the model's line) of each that was not.
        sized: how many sizes were assumed that follow from values.
        effects: how many ops did something else than to give tensors, in memory of their own or as views.
        measured: how many sizes are those of what a mask of the batch selects. Another batch has others.
        memory: storage → the name of the parameter whose it is, for whoever wants to know what is written.
        written: the names of parameters that were written.
    """

    def __init__(
        self,
        *,
        contrary: bool = False,
        fewer: bool = False,
        fewer_known: bool = False,
        empty: bool = False,
        origins: Origins | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__()
        self._origins, self._watch = origins, watch
        self.contrary, self.fewer, self._fewer_known, self._empty = contrary, fewer, fewer_known, empty
        self.reads = self.known = self.sized = self.measured = self.effects = 0
        self.assumed: list[tuple[str, str]] = []
        self.memory: dict[int, str] = {}
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_among((*args, *kwargs.values()))
        listened = self.memory or self._watch is not None
        targets = tensors_among(value for _, value in written_by(func, args, kwargs)) if listened else []
        out = self._answer(func, args, kwargs, tensors, targets)
        self.tell(tensors, targets, out)
        return out

    def tell(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], out: Any) -> None:
        """Tells whoever watches of an op, or of a function that stands for its ops: what it took, wrote and gave."""
        if self._watch is not None:
            self._watch(tensors, targets, tensors_among(out if isinstance(out, (tuple, list)) else (out,)))

    def _answer(
        self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], targets: list[Tensor]
    ) -> Any:
        if self._origins is not None:
            self._origins.begin(func, tensors)
        kind = _kind_of(func)
        self.effects += kind.has_effects
        if targets and self.memory:
            self.written |= {name for t in targets if (name := self.memory.get(storage_of(t)))}
        if kind.is_asked:
            self.reads += 1
            if tensors[0].is_meta:
                self.assumed.append((READS.get(func, str(func)), model_line()))
            self.known += not tensors[0].is_meta
            if self.contrary and (tensors[0].is_meta or tensors[0].dtype == torch.bool) and func in CONTRARY:
                return CONTRARY[func](func, *args, **kwargs)
        if not any(t.is_meta for t in tensors):
            if kind.gives_a_size:
                self.reads += 1
                self.known += 1
            out = func(*(self._of_other_sizes(func, args) if kind.is_indexed else args), **kwargs)
            if self._origins is not None:
                self._origins.end(func, args, kwargs, tensors, out)
            return out
        return self._without_values(func, args, kwargs, tensors, kind)

    def _without_values(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], kind: _Kind) -> Any:
        """What an op gives of which a tensor has no values."""
        if kind.is_asked and func in SIZED:
            self.sized += func is not aten.masked_select.default or tensors[1].is_meta
            return SIZED[func](self._held, *args, **kwargs)
        if kind.is_asked:
            return ASSUMED[func](*args, **kwargs)
        if kind.has_no_meta:
            return NO_META[func](*args, **kwargs)
        if func is aten._to_copy.default or func is aten.to.device:
            kwargs["device"] = META
        with_values = args
        if not all(t.is_meta for t in tensors):
            if not (self.contrary or self.fewer or self._fewer_known or self._empty):
                _refuse_what_lies_outside(func, args)
            args, kwargs = pytree.tree_map_only(Tensor, to_meta, (args, kwargs))
        if kind.is_indexed:
            gives = func in INDEXED  # something of as many elements
            args = (args[0], [self._positions(i, gives) for i in with_values[1]], *args[2:])
            args = (args[0], [i for group in args[1] for i in group], *args[2:])
        out = _by_shapes(func, args, kwargs) if kind.is_fresh else func(*args, **kwargs)
        return out if func is not aten.native_batch_norm.default else (_as_suggested(args[0], out[0]), *out[1:])

    def noted(self) -> tuple[int, ...]:
        """Is another after an op that read or wrote something, drew, or gave a size that follows from values."""
        return self.effects, self.reads, self.sized, self.measured

    def _of_other_sizes(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a function of the batch alone; masks by which it selects hold another number than they do, if other
        sizes are asked for: as many as of what has no values."""
        if func not in INDEXED or not any(map(is_mask, args[1])):
            return args
        self.measured += 1
        self.reads += 1
        if not self._fewer_known and not self._empty:
            return args
        other = torch.zeros_like if self._empty else of_another
        return args[0], [other(i) if is_mask(i) else i for i in args[1]]

    def _held(self, mask: Tensor) -> int:
        """How many elements a mask selects; all, or half of them, if it has no values: meta kernels cannot count."""
        if self._empty:
            return 0
        if not mask.is_meta:
            self.measured += 1
            held = int(mask.count_nonzero())
            return another(held, mask.numel()) if self._fewer_known else held
        return (mask.numel() + 1) // 2 if self.fewer else mask.numel()

    def _positions(self, index: Tensor | None, gives: bool) -> list[Tensor | None]:
        """A mask as the positions it holds; ``gives``: of which there are as many as of what the function gives."""
        if index is None or not is_mask(index):
            return [index]
        self.sized += index.is_meta
        self.reads += gives
        held = self._held(index) if gives or index.is_meta else int(index.count_nonzero())
        return [torch.empty(held, dtype=torch.int64, device=META) for _ in range(index.dim())]


# Functions that take a tensor, a dim and an index into it.
_ALONG_A_DIM = (
    aten.index_select.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.gather.default,
    aten.scatter_add.default,
    aten.scatter_add_.default,
)


def _refuse_what_lies_outside(func: Any, args: Any) -> None:
    """Raises the IndexError that a function raises where an index of known values lies outside of a tensor without values: the
    edges of a graph in a part of its nodes, say. On meta it looks at no index, and one rank alone would meet the error."""
    if func in _ALONG_A_DIM:
        pairs = [(args[0].shape[args[1]] if args[0].dim() else 1, args[2])]
    elif func in INDEXED:
        pairs = list(zip(args[0].shape, args[1], strict=False)) if not any(map(is_mask, args[1])) else []
    else:
        return
    for size, index in pairs:
        if index is None or index.is_meta or not index.numel():
            continue
        lowest, highest = (int(x) for x in index.aminmax())
        if highest >= size or lowest < -size:
            outside = highest if highest >= size else lowest
            raise IndexError(f"index {outside} is out of bounds for a dimension with size {size}")


class _Kind(NamedTuple):
    """What ``Shadow`` wants to know of an op, looked up at once: to find an op in a table takes as long as to answer it.

    Attributes:
        has_effects: whether it does something else than to give tensors, in memory of their own or as views.
        is_fresh: see ``OpFacts``.
        is_asked: whether it is one of ``ASSUMED`` or ``SIZED``; ``has_no_meta``: of ``NO_META``.
        is_indexed: whether it takes positions or masks.
        gives_a_size: whether it gives a tensor whose size follows from values (``repeat_interleave``), and nothing else is
            known of it.
    """

    has_effects: bool
    is_fresh: bool
    is_asked: bool
    has_no_meta: bool
    is_indexed: bool
    gives_a_size: bool


@lru_cache(maxsize=4096)
def _kind_of(func: Any) -> _Kind:
    facts = op_facts(func)
    return _Kind(
        has_effects=facts.draws or not (facts.is_fresh or facts.is_view),
        is_fresh=facts.is_fresh,
        is_asked=func in ASSUMED or func in SIZED,
        has_no_meta=func in NO_META,
        is_indexed=func in (*INDEXED, aten.index_put_.default, aten.index_put.default),
        gives_a_size=torch.Tag.dynamic_output_shape in func.tags and func not in (*INDEXED, *SIZED),
    )


# --- shapes that were asked before ------------------------------------------------------------------------------------


class _UnknownError(Exception):
    """A call that gives other things than plain tensors."""


def _by_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that gives fresh memory, on meta tensors; or what it gave for others of the same shapes."""
    if not all(map(is_plain_meta, tensors_among((*args, *kwargs.values())))):
        return func(*args, **kwargs)
    try:
        outputs = _shapes(func, torch.get_default_dtype(), described(args), described(kwargs))
    except (_UnknownError, TypeError):  # a TypeError: what cannot be hashed
        return func(*args, **kwargs)
    return outputs.on_meta() if isinstance(outputs, Laid) else tuple(x.on_meta() for x in outputs)


@lru_cache(maxsize=16384)
def _shapes(func: Any, default: torch.dtype, args: Any, kwargs: Any) -> Laid | tuple[Laid, ...]:
    """What an op gives for arguments that are described. Raises _UnknownError if these are not tensors alone."""
    outputs = func(*made_again(args), **made_again(kwargs))
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    if not all(map(is_plain_meta, several)):
        raise _UnknownError
    return tuple(map(laid, outputs)) if isinstance(outputs, tuple) else laid(outputs)


def is_plain_meta(t: Any) -> bool:
    return type(t) in (Tensor, Parameter) and t.is_meta and t.layout is torch.strided and not t.is_complex()


def _as_suggested(x: Tensor, out: Tensor) -> Tensor:
    """What a batch norm gives, as it lies in memory: contiguous, or with channels last. On meta, torch gives it the strides of
    what was normed, transposed perhaps; by these, a later stage would take a copy for a view."""
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if x.dim() == (4 if memory_format is torch.channels_last else 5) and x.is_contiguous(
            memory_format=memory_format
        ):
            return out
    return out if out.is_contiguous() else out.new_empty(out.size())
