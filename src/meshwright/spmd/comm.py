"""One axis of the mesh: this rank's coordinate on it and the collectives over it, which a ``Ledger`` counts.

``Axis`` uses a process group. ``PlannedAxis`` gives shapes alone: planning runs the same deciders over it, on meta tensors and
without processes.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.layout import Shard
from meshwright.private import without_modes

Heard = Callable[[str, Any, Callable[[], Any], tuple[Any, ...]], Any]
"""(method of a process group, the group, a function that calls the method, its arguments) → the method's result"""

Finish = Callable[[], Tensor]
"""Waits for a collective that has begun, and returns its result. On NCCL, the current stream waits, and not the host."""


def finished(x: Tensor) -> Finish:
    """The ``Finish`` of a result that nobody has to wait for."""
    return lambda: x


@dataclass(eq=False)
class Order:
    """A hash of the collectives of a group, in the order in which this rank has entered them.

    Ranks that entered the same collectives, on tensors of the same global shapes and dtypes, have the same number.

    Attributes:
        number: the hash of all collectives so far.
        meet: if set, it is called with a description before each collective in which ranks wait. So ranks see a difference
            before they wait for each other in different collectives (runtime/guard.py).
    """

    number: int = 0
    meet: Callable[[str], None] | None = None

    def enter(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """A collective begins in which ranks wait. ``shape``: the global shape, as local shapes may differ."""
        self.note(kind, shape, dtype)
        if self.meet is not None:
            self.meet(f"{kind} of {tuple(shape)} {str(dtype).removeprefix('torch.')}")

    def note(self, kind: str, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> None:
        """A collective begins in which ranks do not wait."""
        # The hash of integers is the same in every process; the hash of a string is not.
        self.number = hash((self.number, _KINDS[kind], *shape, -1 if dtype is None else _DTYPES[dtype]))


_KINDS = {"all_reduce": 0, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 3, "fork": 4, "join": 5}
_DTYPES = {
    dtype: i for i, dtype in enumerate(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
}


@dataclass(eq=False)
class Ledger:
    """Counts of a run: collectives by kind (calls, and bytes that this rank puts in), and fallbacks by where they happen.

    Attributes:
        calls, bytes: by kind of collective.
        fallbacks: how often each happened.
        orders: submesh (its number) → the order of the collectives of its tp group, for each submesh of this rank.
        heard: while a step is observed, calls the collectives that bypass the stand-ins of ``one_process``; else None.
        timed: whether a step is observed.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    orders: defaultdict[int, Order] = field(default_factory=lambda: defaultdict(Order))
    heard: Heard | None = None
    timed: bool = False

    def moved(self, kind: str, tensor: Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Fallback:
    """Where a function ran on gathered arguments: its name, the module, and the model's source line. Right, but not sharded."""

    function: str
    module: str
    line: str

    def __str__(self) -> str:
        return f"{self.function} in {self.module or 'the model'} at {self.line}"


def _named(name: str, before: str) -> Any:
    """A collective of one tensor, by its name; torch had them under other names before 2.13, which now warn."""
    return getattr(dist, name, None) or getattr(dist, before, None)


gather_single = _named("all_gather_single", "all_gather_into_tensor")
scatter_single = _named("reduce_scatter_single", "reduce_scatter_tensor")

Method = TypeVar("Method", bound=Callable[..., Any])


def without_function_modes(method: Method) -> Method:
    """A decorator: the method runs without function modes. It works on local tensors, and the SPMD mode, which is on in a
    backward, would look at every function."""

    @functools.wraps(method)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return method(*args, **kwargs)

    return without_mode  # type: ignore[return-value]


class Axis:
    """One axis of the mesh as one rank sees it. Collectives take and return local tensors.

    Args:
        name: the axis, as in the plan.
        size: the number of ranks on the axis.
        rank: this rank's coordinate on the axis.
        group: the process group of the ranks whose coordinates differ from this rank's on this axis alone.
        ledger: counts calls and bytes.
        place: the number of the submesh that the axis belongs to; the ledger has the order of its collectives.
    """

    def __init__(
        self, name: str, size: int, rank: int, group: dist.ProcessGroup | None, ledger: Ledger, place: int = 0
    ) -> None:
        self.name, self.size, self.rank, self.group, self.ledger = name, size, rank, group, ledger
        self.order = ledger.orders[place]

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        with without_modes():  # asked most of all: without a function around it
            self._enter("all_reduce", x, x.shape)
            out = _carried(x).clone(memory_format=torch.contiguous_format)
            _add_up(out, op, self.group, self.ledger.heard)
            return _no_view(_delivered(out, x.dtype)) if out.dtype is not x.dtype else out

    def begin_all_reduce(self, x: Tensor) -> Finish:
        """Begins ``all_reduce`` of a tensor that nobody else reads or writes any more: its memory becomes that of the sum."""
        if self._is_timed(x):
            return finished(self.all_reduce(x))
        with without_modes():
            self._enter("all_reduce", x, x.shape)
            out = _carried(x).contiguous()
            work = _asked(out, _ASYNC_SUM, self.group, self.ledger.heard)
        return partial(_finished, work, out, x.dtype)

    @without_function_modes
    def all_gather(self, x: Tensor, layout: Shard) -> Tensor:
        """This rank's slice → the full tensor."""
        self._enter("all_gather", x, _with_size(x, layout))
        padded = _pad(x, layout.dim, self._widest(layout))
        sent = _flat(padded)
        received = sent.new_empty(self.size * sent.numel())
        gather_single(received, sent, group=self.group)
        chunks = received.view(x.dtype).view(self.size, *padded.shape)
        if layout.dim == 0 and layout.parts == 1 and len(set(layout.locals)) == 1:
            return _no_view(chunks.flatten(0, 1))  # they are the whole as they came
        return layout.merge([c.narrow(layout.dim, 0, layout.local(r)) for r, c in enumerate(chunks.unbind())])

    @without_function_modes
    def reduce_scatter(self, x: Tensor, layout: Shard) -> Tensor:
        """This rank's summand of the full tensor → this rank's slice of the sum."""
        out, sent = self._scattered(x, layout)
        scatter_single(out, sent, group=self.group)
        return _no_view(_delivered(out.narrow(layout.dim, 0, layout.local(self.rank)), x.dtype))

    @without_function_modes
    def begin_reduce_scatter(self, x: Tensor, layout: Shard) -> Finish:
        """Begins ``reduce_scatter`` of a tensor that nobody writes to before it has ended."""
        if self._is_timed(x):
            return finished(self.reduce_scatter(x, layout))
        out, sent = self._scattered(x, layout)
        work = scatter_single(out, sent, group=self.group, async_op=True)
        return partial(_finished, work, out.narrow(layout.dim, 0, layout.local(self.rank)), x.dtype, sent)

    def _is_timed(self, x: Tensor) -> bool:
        """Whether the step is observed on a CPU. Its seconds can be told apart only if the host waits for each collective."""
        return self.ledger.timed and x.device.type == "cpu"

    def _scattered(self, x: Tensor, layout: Shard) -> tuple[Tensor, Tensor]:
        """(the memory for this rank's slice of the sum, padded to the widest; what to send: the slices for all ranks)."""
        self._enter("reduce_scatter", x, x.shape)
        width, carried = self._widest(layout), _carried(x)
        if layout.dim == 0 and layout.parts == 1 and len(set(layout.locals)) == 1:
            sent = carried.contiguous()  # the slices of all ranks, one after another
        else:
            sent = torch.stack([_pad(layout.take(carried, r), layout.dim, width) for r in range(self.size)]).flatten(
                0, 1
            )
        return sent.new_empty(sent.shape[0] // self.size, *sent.shape[1:]), sent

    @without_function_modes
    def all_to_all(self, x: Tensor, source: Shard, target: Shard) -> Tensor:
        """This rank's slice in layout ``source`` → its slice in layout ``target``, along another dim."""
        self._enter("all_to_all", x, _with_size(x, source))
        # Flat, with split sizes: gloo's all_to_all of a list needs equal sizes.
        sent = [_flat(target.take(x, r)) for r in range(self.size)]
        shapes = []
        for r in range(self.size):
            shape = list(x.shape)
            shape[source.dim] = source.local(r)
            shape[target.dim] = target.local(self.rank)
            shapes.append(shape)
        width = x.element_size() // sent[0].element_size()
        sizes = [prod(shape) * width for shape in shapes]
        out = sent[0].new_empty(sum(sizes))
        dist.all_to_all_single(out, torch.cat(sent), sizes, [t.numel() for t in sent], group=self.group)
        pieces = zip(out.view(x.dtype).split([prod(shape) for shape in shapes]), shapes, strict=True)
        return source.merge([piece.view(shape) for piece, shape in pieces])

    def _enter(self, kind: str, x: Tensor, shape: Sequence[int]) -> None:
        """Counts a collective. ``shape``: the global shape."""
        self.ledger.moved(kind, x)
        self.order.enter(kind, shape, x.dtype)

    def _widest(self, layout: Shard) -> int:
        return max(layout.local(r) for r in range(self.size))


class PlannedAxis(Axis):
    """An axis without processes: its collectives are counted, and give meta tensors of the right shapes."""

    def __init__(self, name: str, size: int, rank: int, ledger: Ledger) -> None:
        super().__init__(name, size, rank, None, ledger)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        self.ledger.moved("all_reduce", x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def begin_all_reduce(self, x: Tensor) -> Finish:
        return finished(self.all_reduce(x))

    def begin_reduce_scatter(self, x: Tensor, layout: Shard) -> Finish:
        return finished(self.reduce_scatter(x, layout))

    def all_gather(self, x: Tensor, layout: Shard) -> Tensor:
        self.ledger.moved("all_gather", x)
        return _resized(x, layout.dim, layout.size)

    def reduce_scatter(self, x: Tensor, layout: Shard) -> Tensor:
        self.ledger.moved("reduce_scatter", x)
        return _resized(x, layout.dim, layout.local(self.rank))

    def all_to_all(self, x: Tensor, source: Shard, target: Shard) -> Tensor:
        self.ledger.moved("all_to_all", x)
        return _resized(_resized(x, source.dim, source.size), target.dim, target.local(self.rank))


def _all_reduce_options(op: Any, in_background: bool = False) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, in_background  # (NCCL: on the stream of the caller, or on one of its own)
    return options


_OPTIONS: dict[str, Any] = (
    {"sum": _all_reduce_options(dist.ReduceOp.SUM), "max": _all_reduce_options(dist.ReduceOp.MAX)}
    if dist.is_available()
    else {}
)
_ASYNC_SUM = _all_reduce_options(dist.ReduceOp.SUM, in_background=True) if dist.is_available() else None
# The method itself: while a model runs, a stand-in is in its place (``one_process``).
_ALL_REDUCE: Any = dist.ProcessGroup.allreduce if dist.is_available() else None


def _add_up(x: Tensor, op: str, group: dist.ProcessGroup | None, heard: Heard | None) -> None:
    """``dist.all_reduce`` in place, without its checks of arguments, which take longer than the sum of a small tensor.

    It bypasses the stand-in for the method of the group, which would call ``heard``; so ``heard`` is called here.
    """
    work = _asked(x, _OPTIONS[op], group, heard)
    if work is not None:
        work.wait()


def _asked(x: Tensor, options: Any, group: dist.ProcessGroup | None, heard: Heard | None) -> Any:
    """Asks a group for an all-reduce in place. Returns the work to wait for, or None."""
    arguments = [x], options
    if heard is None:
        return _ALL_REDUCE(group, *arguments)
    return heard("allreduce", group, partial(_ALL_REDUCE, group, *arguments), arguments)


def _finished(work: Any, out: Tensor, dtype: torch.dtype, *_kept: Tensor) -> Tensor:
    """Waits for a collective; returns what it gave. ``_kept``: what it reads, which must not be freed before."""
    with without_modes():
        if work is not None:
            work.wait()
        return _no_view(_delivered(out, dtype))


# Dtypes that gloo or NCCL cannot add up → the dtype in which they are added up.
_NARROW = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


def _carried(x: Tensor) -> Tensor:
    """``x`` in a dtype that every backend can add up; complex numbers as pairs, in an additional last dim."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.to(_NARROW[x.dtype]) if x.dtype in _NARROW else x


def _delivered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``_carried``."""
    if dtype.is_complex:
        return torch.view_as_complex(x.contiguous())
    return x.to(dtype) if dtype in _NARROW else x


def _no_view(x: Tensor) -> Tensor:
    """``x``, which autograd does not take for a view: the model may not write in place to a view that a Function returns."""
    return x.detach()


def _flat(x: Tensor) -> Tensor:
    """The elements of ``x`` in one dim; as bytes, if gloo or NCCL does not know the dtype."""
    x = x.resolve_conj().resolve_neg()
    if x.dtype in _UNKNOWN:
        return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return x.reshape(-1)


_UNKNOWN = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _with_size(x: Tensor, layout: Shard) -> list[int]:
    """The global shape of the tensor whose slice in ``layout`` is ``x``."""
    shape = list(x.shape)
    shape[layout.dim] = layout.size
    return shape


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` with dim ``dim`` padded with zeros to ``size``: collectives need equal sizes on all ranks."""
    missing = size - x.size(dim)
    if not missing:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
