"""Running a forward for its shapes: parameters are on meta, the batch and the buffers are real and small.

What follows from parameters has a shape and no value; what follows from the batch alone (masks, positions, shifted
labels) is computed. A value that is read all the same is assumed (a mask is all true, a number is one): planning may
then see another path than a run takes. That costs nothing but speed, since the view is right for any path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from meshwright.blame import model_line
from meshwright.described import Laid, described, laid, made_again, tensors_among
from meshwright.planning.origins import Origins
from meshwright.private import (
    TorchDispatchMode,
    autocast_is_on,
    python_body,
    pytree,
    storage_of,
    without_any_mode,
)
from meshwright.spmd.autograd_functions import FunctionMode, transforming
from meshwright.spmd.torch_functions import FACTS, op_facts, written_by

aten = torch.ops.aten
META = torch.device("meta")
_SEED = torch.empty(0, device=META)
_DEVICE = Tensor.device.__get__
Watch = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


class Shadow(TorchDispatchMode):
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
        facts = op_facts(func)
        self.effects += facts.draws or not (facts.is_fresh or facts.is_view)
        self.written |= {name for t in targets if self.memory and (name := self.memory.get(storage_of(t)))}
        if func in ASSUMED or func in SIZED:
            self.reads += 1
            if tensors[0].is_meta:
                self.assumed.append((_READS.get(func, str(func)), model_line()))
            self.known += not tensors[0].is_meta
            if self.contrary and (tensors[0].is_meta or tensors[0].dtype == torch.bool) and func in _CONTRARY:
                return _CONTRARY[func](func, *args, **kwargs)
        if not any(t.is_meta for t in tensors):
            if _gives_a_size(func):
                self.reads += 1
                self.known += 1
            out = func(*self._of_other_sizes(func, args), **kwargs)
            if self._origins is not None:
                self._origins.end(func, args, kwargs, tensors, out)
            return out
        if func in SIZED:
            self.sized += func is not aten.masked_select.default or tensors[1].is_meta
            return SIZED[func](self._held, *args, **kwargs)
        if func in ASSUMED:
            return ASSUMED[func](*args, **kwargs)
        if func in _NO_META:
            return _NO_META[func](*args, **kwargs)
        if func is aten._to_copy.default or func is aten.to.device:
            kwargs["device"] = META
        with_values = args
        if not all(t.is_meta for t in tensors):
            args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        if func in (*INDEXED, aten.index_put_.default, aten.index_put.default):
            gives = func in INDEXED  # something of as many elements
            args = (args[0], [self._positions(i, gives) for i in with_values[1]], *args[2:])
            args = (args[0], [i for group in args[1] for i in group], *args[2:])
        out = _by_shapes(func, args, kwargs)
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
        other = torch.zeros_like if self._empty else _of_another
        return args[0], [other(i) if is_mask(i) else i for i in args[1]]

    def _held(self, mask: Tensor) -> int:
        """How many elements a mask selects; all, or half of them, if it has no values: meta kernels cannot count."""
        if self._empty:
            return 0
        if not mask.is_meta:
            self.measured += 1
            held = int(mask.count_nonzero())
            return _another(held, mask.numel()) if self._fewer_known else held
        return (mask.numel() + 1) // 2 if self.fewer else mask.numel()

    def _positions(self, index: Tensor | None, gives: bool) -> list[Tensor | None]:
        """A mask as the positions it holds; ``gives``: of which there are as many as of what the function gives."""
        if index is None or not is_mask(index):
            return [index]
        self.sized += index.is_meta
        self.reads += gives
        held = self._held(index) if gives or index.is_meta else int(index.count_nonzero())
        return [torch.empty(held, dtype=torch.int64, device=META) for _ in range(index.dim())]


INDEXED = (aten.index.Tensor, aten._unsafe_index.Tensor)


@lru_cache(maxsize=4096)
def _gives_a_size(func: Any) -> bool:
    """Whether an op gives a tensor whose size follows from values (``repeat_interleave``), and nothing else is known of it."""
    return torch.Tag.dynamic_output_shape in func.tags and func not in (*INDEXED, *SIZED)


def is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _another(held: int, most: int) -> int:
    """Another number than a mask of ``most`` elements holds."""
    return held // 2 if held > 1 or held == most else min(2, most)


def _of_another(mask: Tensor) -> Tensor:
    """A mask that holds another number of elements."""
    held, most = int(mask.count_nonzero()), mask.numel()
    order = mask.flatten().bool().to(torch.uint8).argsort(descending=True, stable=True)  # those that it holds first
    made = torch.zeros(most, dtype=torch.bool)
    made[order[: _another(held, most)]] = True
    return made.view(mask.shape)


# --- shapes that were asked before ------------------------------------------------------------------------------------


class _UnknownError(Exception):
    """A call that gives other things than plain tensors."""


def _by_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on meta tensors, or what it gave for others of the same shapes."""
    if not op_facts(func).is_fresh or not all(map(is_plain_meta, tensors_among((*args, *kwargs.values())))):
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


def _to_meta(t: Tensor) -> Tensor:
    # From a meta tensor: a factory that asks for meta by name is taken for one that asked a parameter's device.
    return t if t.is_meta else _SEED.new_empty_strided(t.size(), t.stride(), dtype=t.dtype)


def _item(x: Tensor) -> Any:
    return {True: 1.0, False: 1}[x.is_floating_point()] if x.dtype != torch.bool else True


def _nonzero(held: Held, x: Tensor) -> Tensor:
    return torch.empty((held(x), x.dim()), dtype=torch.int64, device=META)


def _masked_select(held: Held, x: Tensor, mask: Tensor) -> Tensor:
    selected = held(mask.expand(torch.broadcast_shapes(x.shape, mask.shape)))
    return torch.empty(selected, dtype=x.dtype, device=META)


def _unique(held: Held, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = _to_meta(x)
    return x.new_empty(held(x)), x.new_empty(x.shape, dtype=torch.int64), x.new_empty(held(x), dtype=torch.int64)


def _unique_dim(held: Held, x: Tensor, dim: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = _to_meta(x)
    unique = held(x.new_empty(x.shape[dim]))
    shape = (*x.shape[:dim], unique, *x.shape[dim + 1 :])
    count = x.new_empty(unique, dtype=torch.int64)
    return x.new_empty(shape), x.new_empty(x.shape[dim], dtype=torch.int64), count


def _bincount(held: Held, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.empty(minlength or held(x), dtype=dtype, device=META)


Held = Callable[[Tensor], int]
SIZED: dict[Any, Any] = {  # what they give has a size that follows from values
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_dim,
    aten.bincount.default: _bincount,
}

ASSUMED: dict[Any, Any] = {
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.is_nonzero.default: lambda x: True,
    aten.equal.default: lambda x, y: True,
}


_READS = {  # as a person writes it
    aten._local_scalar_dense.default: "a number or a bool",
    aten.item.default: "a number or a bool",
    aten.is_nonzero.default: "a bool",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero, or a mask as an index",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}


def _ctc_loss(log_probs: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """A loss a row, and what only its backward reads."""
    rows = log_probs.shape[1:2]
    return torch.empty(rows, dtype=log_probs.dtype, device=META), torch.empty(0, dtype=log_probs.dtype, device=META)


# Functions that have no meta kernel in torch: their shapes.
_NO_META: dict[Any, Any] = {aten._ctc_loss.Tensor: _ctc_loss, aten._ctc_loss.default: _ctc_loss}

# The other answers: to a question about a value of the batch, the opposite; of what has no value, nothing is true.
_CONTRARY: dict[Any, Any] = {
    aten._local_scalar_dense.default: lambda func, x: False if x.is_meta else not func(x),
    aten.item.default: lambda func, x: False if x.is_meta else not func(x),
    aten.is_nonzero.default: lambda func, x: False if x.is_meta else not func(x),
    aten.nonzero.default: lambda func, x: x.new_empty((0, x.dim()), dtype=torch.int64),
}


def gradients_without_values(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """What ``torch.autograd.grad`` gives, for its shapes: a gradient asked for within a forward."""
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    made = (torch.empty_like(_to_meta(x), requires_grad=False) for x in inputs)
    if not create_graph or transforming():  # (a transform's own gradients are told apart by it)
        return tuple(made)
    return tuple(x.requires_grad_().clone() if x.is_floating_point() else x for x in made)


def _autocast_types() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices for which autocast is on, and its types."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def _device() -> torch.device:
    """One on which autocast does what it does on the model's: where it is on for CUDA without CUDA, the CPU must do."""
    return torch.device("cuda" if torch.is_autocast_enabled("cuda") and torch.cuda.is_available() else "cpu")


def _on_a_device() -> AbstractContextManager[Any]:
    return torch.autocast(_device().type, dtype=_autocast_types()[-1][1])


_READ_AS_ONES = frozenset([Tensor.tolist, Tensor.numpy])
_READ_PAST = _READ_AS_ONES | {Tensor.__array__, Tensor.__dlpack__}  # the dispatcher
# What ``Meeting`` may answer itself.
_ANSWERED = _READ_PAST | {
    _DEVICE,
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.type,
    Tensor.__format__,
    torch.autograd.grad,
}


def _type(x: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """``Tensor.type``, which has names for types of a device (``torch.DoubleTensor``) and none for those of meta."""
    if dtype is None:
        return x.type().replace("torch.meta.", "torch.")
    if isinstance(dtype, str):
        dtype = torch.empty(0).type(f"torch.{dtype.rpartition('.')[2]}").dtype
    return x.type(dtype)


class Meeting(FunctionMode):
    """The same at the level of torch functions, for what never reaches the dispatcher with both kinds.

    Some functions compare devices first (RNNs, ``cdist``, attention): what such a function refuses, it is asked again with
    all of its tensors on meta. And ``tolist`` and ``numpy`` read past the dispatcher.

    Args:
        origins: gets the memory that the answers follow from.

    Attributes:
        differentiates: whether the forward asked for gradients itself.
    """

    def __init__(self, origins: Origins | None = None) -> None:
        super().__init__()
        self._origins = origins
        self.known, self.differentiates = 0, False
        self._types: dict[Any, torch.dtype] = {}  # of what functions give under autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.differentiates |= transforming()
        if func in _ANSWERED and (answer := self._answered(func, args, kwargs)) is not NotImplemented:
            return answer
        if func in FACTS:  # most of what is asked
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if autocast_is_on() and _autocast_types():
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if META in {t.device for t in tensors}:
                return self._autocast(func, name, args, kwargs)
        return self.met(func, name, args, kwargs)

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What is asked of a tensor without values, or past the dispatcher; NotImplemented where torch is to answer."""
        if func is torch.autograd.grad:
            if not any(isinstance(t, Tensor) and t.is_meta for t in pytree.tree_leaves(args)):
                return NotImplemented
            self.differentiates = True
            return gradients_without_values(*args, **kwargs)
        x = args[0]
        if func in _READ_PAST:
            self.known += func in _READ_AS_ONES and not x.is_meta
            if self._origins is not None:
                self._origins.look(args[:1])
            return func(torch.ones(x.shape, dtype=x.dtype)) if func in _READ_AS_ONES and x.is_meta else NotImplemented
        if not x.is_meta:
            return NotImplemented
        if func == _DEVICE:  # what a model makes there, or asks of it (``torch.autocast(x.device.type)``), is real
            return torch.device("cpu")
        if func is Tensor.type:
            return _type(*args, **kwargs)
        if func is Tensor.__format__:  # a number in a text: in the name of a module, say
            return NotImplemented if x.dim() else format(x.item(), *args[1:])
        return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None  # no backward follows

    def _autocast(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Under autocast, which has nothing for tensors on meta: in the type that it gives on a device.

        A function that is written in Python has functions within that have types of their own.
        """
        written_in_python = getattr(func, "__module__", "") in ("torch.nn.functional", "torch.functional")
        if written_in_python and (body := python_body(func)) is not None:
            with self:
                return body(*args, **kwargs)
        result = self.met(func, name, args, kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point() or "out" in kwargs or name.endswith("_"):
            return result
        dtype = self._type_under_autocast(func, args, kwargs)
        return result if dtype is None or dtype == result.dtype else result.to(dtype)

    def _type_under_autocast(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.dtype | None:
        """Asked of torch itself, with small tensors; None if the function takes none such. What has one element in a dim may be
        computed in another way, and type (``einsum``)."""
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        key = func, tuple((t.dtype, *(n == 1 for n in t.shape)) for t in tensors), _autocast_types()
        alone = tuple(t for t in args if isinstance(t, Tensor))  # without how many groups of channels there are, say
        ways: list[tuple[tuple[Any, Any], int]] = [((args, kwargs), 2), ((args, kwargs), 1), ((alone, {}), 1)]
        for way, most in ways if key not in self._types else ():
            with (
                suppress(Exception),
                without_any_mode(),
                torch.no_grad(),
                torch.random.fork_rng(devices=[]),
                _on_a_device(),
            ):
                inputs, named = pytree.tree_map_only(Tensor, partial(_small, most), way)
                self._types[key] = func(*inputs, **named).dtype
                break
        return self._types.get(key)

    def met(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What a function gives, where tensors of both kinds may meet."""
        if name in ("_grouped_mm", "grouped_mm") and args[0].is_meta:  # its meta kernel insists on bfloat16
            args, kwargs = pytree.tree_map_only(Tensor, _half, (args, kwargs))
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            devices = {t.device for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            if META not in devices or len(devices) == 1:
                raise
        args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        return func(*args, **kwargs)


def _small(most: int, t: Tensor) -> Tensor:
    """A tensor like another on a device, of at most so many elements a dim."""
    return t.new_zeros([min(n, most) for n in t.shape], device=_device())


def _half(t: Tensor) -> Tensor:
    t = _to_meta(t)
    return t.to(torch.bfloat16) if t.is_floating_point() else t
