"""``Shadow``: runs a forward for its shapes. Parameters are on meta; the batch and the buffers are real and small.

A tensor that is computed from parameters has a shape and no values. A tensor that is computed from the batch alone (masks,
positions, shifted labels) has values. If the model reads a value that does not exist, one is assumed: a mask is all true, a
number is one, a bool is true, or false if the model raises an error then (guards.py). In a loop another value is
assumed now and then, so that the loop ends (loops.py). So planning may see another path than a run takes. This can cost speed,
not correctness: a plan is right for any path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from meshwright.blame import model_line
from meshwright.described import TensorMeta, described, from_description, tensor_meta, tensors_among
from meshwright.planning.assumed import (
    ASSUMED,
    CONTRARY,
    GIVES_BOOL,
    INDEXED,
    LENGTHS,
    META,
    NO_META,
    READS,
    SIZED,
    another_count,
    assumed_answer,
    aten,
    is_mask,
    of_another,
    to_meta,
)
from meshwright.planning.guards import raises_if
from meshwright.planning.loops import LoopsEnd
from meshwright.planning.origins import Origins
from meshwright.private import DispatchMode, pytree, storage_of
from meshwright.spmd.torch_functions import op_facts, written_by

Watch = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


class Shadow(LoopsEnd, DispatchMode):
    """Lets an op take meta and real tensors together (the result is on meta), and answers reads of values on meta.

    Args:
        contrary: give every read the opposite answer: masks are empty, a bool of the batch is inverted. Modules that are called
            under both answers are called on every rank, whatever its rows.
        fewer: assume that a mask without values selects half of the elements instead of all.
        fewer_known: assume that a mask of the batch selects another number of elements than it does.
        empty: assume that masks select nothing.
        origins: gets the memory on which the answers depend.
        watch: called for each op with its input tensors, those of them that it writes, and its result tensors.

    Attributes:
        reads: how many values were read, assumed or real.
        known: how many of these were real: then the path is that of this batch.
        assumed: (function, the model's line) of each assumed value.
        sized: how many assumed sizes depend on values.
        effects: how many ops did more than return tensors in new memory or as views.
        measured: how many sizes come from a mask of the batch. Another batch has other sizes.
        memory: storage → the parameter that it belongs to. Filled by a caller who wants to know which parameters are written.
        written: names of the parameters that were written; ``writes``: how many times.
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
        self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_among((*args, *kwargs.values()))
        is_watched = self.memory or self._watch is not None
        targets = tensors_among(value for _, value in written_by(func, args, kwargs)) if is_watched else []
        out = self._answer(func, args, kwargs, tensors, targets)
        self.tell(tensors, targets, out)
        return out

    def tell(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], out: Any) -> None:
        """Calls ``watch`` for an op, or for a function that stands for several ops.

        Args:
            tensors: its inputs; ``targets``: those that it writes; ``out``: its results.
        """
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
            written = [name for t in targets if (name := self.memory.get(storage_of(t)))]
            self.written.update(written)
            self.writes += len(written)
        if kind.is_asked:
            self.reads += 1
            if tensors[0].is_meta:
                self.assumed.append((READS.get(func, str(func)), model_line()))
            self.known += not tensors[0].is_meta
            another, without_values = self.loops.another(), any(t.is_meta for t in tensors)
            of_bool = tensors[0].dtype == torch.bool or func in GIVES_BOOL
            if self.contrary and (without_values or of_bool) and func in CONTRARY:
                if not another:
                    return self._contrary(func, args, kwargs, without_values)
                another -= 1
            if without_values:
                return self._assumed(func, args, kwargs, another)
        if not any(t.is_meta for t in tensors):
            if kind.gives_a_size:
                self.reads += 1
                self.known += 1
            out = func(*(self._of_other_sizes(func, args) if kind.is_indexed else args), **kwargs)
            if self._origins is not None:
                self._origins.end(func, args, kwargs, tensors, out)
            return out
        return self._without_values(func, args, kwargs, tensors, kind)

    def _assumed(self, func: Any, args: Any, kwargs: dict[str, Any], another: int) -> Any:
        """The assumed answer to a read. ``another``: see ``Loops``."""
        if func not in SIZED:
            return assumed_answer(func, args, kwargs, another)
        self.sized += func is not aten.masked_select.default or args[1].is_meta
        return SIZED[func](partial(self._selected_count, another=another > 0), *args, **kwargs)

    def _contrary(self, func: Any, args: Any, kwargs: dict[str, Any], without_values: bool) -> Any:
        """The opposite answer to a read. ``without_values``: of a tensor on meta."""
        if func in SIZED or not without_values:
            return CONTRARY[func](func, *args, **kwargs)
        answer = assumed_answer(func, args, kwargs)
        if isinstance(answer, bool):
            return answer if raises_if(not answer) else not answer
        return type(answer)(0)

    def _without_values(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], kind: _Kind) -> Any:
        """The result of an op with at least one input tensor on meta."""
        if kind.has_no_meta:
            return NO_META[func](*args, **kwargs)
        if func in LENGTHS and not args[1].is_meta:
            return self._by_lengths(func, args, tensors)
        if func is aten._to_copy.default or func is aten.to.device:
            kwargs["device"] = META
        with_values = args
        if not all(t.is_meta for t in tensors):
            if not (self.contrary or self.fewer or self._fewer_known or self._empty):
                _refuse_index_out_of_bounds(func, args)
            args, kwargs = pytree.tree_map_only(Tensor, to_meta, (args, kwargs))
        if kind.is_indexed:
            sizes_result = func in INDEXED  # the result has as many elements as the index selects
            positions = [self._positions(index, sizes_result) for index in with_values[1]]
            args = (args[0], [i for of_index in positions for i in of_index], *args[2:])
        out = _by_shapes(func, args, kwargs) if kind.is_fresh else func(*args, **kwargs)
        return out if func is not aten.native_batch_norm.default else (_as_suggested(args[0], out[0]), *out[1:])

    def _by_lengths(self, func: Any, args: Any, tensors: list[Tensor]) -> Any:
        """The result of a function that reads the lengths of rows, which follow from the batch, on the host."""
        self.reads, self.known, self.measured = self.reads + 1, self.known + 1, self.measured + 1
        out = func(to_meta(args[0]), *args[1:])
        if self._origins is not None:
            self._origins.look(args[1:2])
            self._origins.end(func, args, {}, tensors, out)
        return out

    def noted(self) -> tuple[int, ...]:
        """Counters that change if an op reads a value, writes, draws, or returns a size that depends on values."""
        return self.effects, self.reads, self.sized, self.measured

    def _of_other_sizes(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an op on tensors with values. If other sizes are to be assumed, masks by which it selects are
        replaced by masks that select another number of elements."""
        if func not in INDEXED or not any(map(is_mask, args[1])):
            return args
        self.measured += 1
        self.reads += 1
        if (not self._fewer_known and not self._empty) or self.loops.another():
            return args
        other = torch.zeros_like if self._empty else of_another
        return args[0], [other(i) if is_mask(i) else i for i in args[1]]

    def _selected_count(self, mask: Tensor, another: bool) -> int:
        """How many elements a mask selects. If it has no values: all of them, or half.

        Args:
            another: give another number, so that a loop comes to its end.
        """
        if mask.is_meta:
            if self._empty is not another:
                return 0
            return (mask.numel() + 1) // 2 if self.fewer else mask.numel()
        self.measured += not self._empty
        count = int(mask.count_nonzero())
        if another:
            return count
        if self._empty:
            return 0
        return another_count(count, mask.numel()) if self._fewer_known else count

    def _positions(self, index: Tensor | None, sizes_result: bool) -> list[Tensor | None]:
        """A mask as tensors of positions, one for each of its dims, on meta; another index unchanged, in a list.

        Args:
            sizes_result: whether the op's result has as many elements as the mask selects.
        """
        if index is None or not is_mask(index):
            return [index]
        self.sized += index.is_meta
        self.reads += sizes_result
        if sizes_result or index.is_meta:
            count = self._selected_count(index, self.loops.another() > 0)
        else:
            count = int(index.count_nonzero())
        return [torch.empty(count, dtype=torch.int64, device=META) for _ in range(index.dim())]


# Functions that take a tensor, a dim and an index into it.
_ALONG_A_DIM = (
    aten.index_select.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.gather.default,
    aten.scatter_add.default,
    aten.scatter_add_.default,
)


def _refuse_index_out_of_bounds(func: Any, args: Any) -> None:
    """Raises the IndexError that a function on a device raises for an index out of bounds, if the index has values and the
    tensor has none (edges of a graph that index a part of its nodes, for example). Kernels on meta do not check indices, and
    later only one rank would raise the error."""
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
    """The facts of an op that ``Shadow`` needs, in one look-up: finding an op in a table takes as long as running it on meta.

    Attributes:
        has_effects: whether it does more than return tensors in new memory or as views.
        is_fresh: see ``OpFacts``.
        is_asked: whether it is in ``ASSUMED`` or ``SIZED``; ``has_no_meta``: whether it is in ``NO_META``.
        is_indexed: whether it takes positions or masks.
        gives_a_size: whether its result has a size that depends on values (``repeat_interleave``), and it is in no table.
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


# --- results on meta, cached by shapes --------------------------------------------------------------------------------


class _UnknownError(Exception):
    """An op returns something else than plain tensors."""


def _by_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op on meta tensors whose results have new memory. Results for equal descriptions of arguments are cached."""
    if not all(map(is_plain_meta, tensors_among((*args, *kwargs.values())))):
        return func(*args, **kwargs)
    try:
        outputs = _shapes(func, torch.get_default_dtype(), described(args), described(kwargs))
    except (_UnknownError, TypeError):  # a TypeError: an argument cannot be hashed
        return func(*args, **kwargs)
    return outputs.on_meta() if isinstance(outputs, TensorMeta) else tuple(x.on_meta() for x in outputs)


@lru_cache(maxsize=16384)
def _shapes(func: Any, default: torch.dtype, args: Any, kwargs: Any) -> TensorMeta | tuple[TensorMeta, ...]:
    """The results of an op for arguments given by their descriptions. Raises _UnknownError if a result is no plain tensor."""
    outputs = func(*from_description(args), **from_description(kwargs))
    if not all(map(is_plain_meta, outputs if isinstance(outputs, tuple) else (outputs,))):
        raise _UnknownError
    return tuple(map(tensor_meta, outputs)) if isinstance(outputs, tuple) else tensor_meta(outputs)


def is_plain_meta(t: Any) -> bool:
    return type(t) in (Tensor, Parameter) and t.is_meta and t.layout is torch.strided and not t.is_complex()


def _as_suggested(x: Tensor, out: Tensor) -> Tensor:
    """The result of a batch norm with the strides that it has on a device: contiguous, or channels last.

    On meta, torch gives the result the strides of the input, which may be transposed. By these strides, a later stage would
    take a copy for a view.
    """
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if x.dim() == (4 if memory_format is torch.channels_last else 5) and x.is_contiguous(
            memory_format=memory_format
        ):
            return out
    return out if out.is_contiguous() else out.new_empty(out.size())
