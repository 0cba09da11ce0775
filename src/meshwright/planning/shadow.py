"""Running a forward for its shapes: parameters are on meta, the batch and the buffers are real and small.

What follows from parameters has a shape and no value; what follows from the batch alone (masks, positions, shifted
labels) is computed. A value that is read all the same is assumed (a mask is all true, a number is one): planning may
then see another path than a run takes. That costs nothing but speed, since the view is right for any path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from meshwright.blame import model_line
from meshwright.private import TorchDispatchMode, gives_fresh_memory, pytree, storage_of, written_by
from meshwright.view.functions import FunctionMode, transforming

aten = torch.ops.aten
META = torch.device("meta")
_SEED = torch.empty(0, device=META)


class Shadow(TorchDispatchMode):
    """Lets meta and real tensors meet: where they do, the result is meta; and answers reads of meta values.

    Args:
        contrary: answer every question the other way: masks are empty, what is true of the batch is not. A module that
            is called either way is called on every rank, whatever its rows.

    Attributes:
        reads: how many values were read, assumed or real.
        known: how many of them were real: the path that was taken is that of this batch.
        assumed: (function, the model's line) of each that was not.
        memory: storage → the name of the parameter whose it is, for whoever wants to know what is written.
        written: the names of parameters that were written.
    """

    def __init__(self, *, contrary: bool = False) -> None:
        super().__init__()
        self.contrary, self.reads, self.known = contrary, 0, 0
        self.assumed: list[tuple[str, str]] = []
        self.memory: dict[int, str] = {}
        self.written: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = _tensors((*args, *kwargs.values()))
        if self.memory:
            targets = pytree.tree_leaves([value for _, value in written_by(func, args, kwargs)])
            self.written |= {name for t in targets if (name := self.memory.get(storage_of(t)))}
        if func in _ASSUMED:
            self.reads += 1
            if tensors[0].is_meta:
                self.assumed.append((_READS.get(func, str(func)), model_line()))
            self.known += not tensors[0].is_meta
            if self.contrary and (tensors[0].is_meta or tensors[0].dtype == torch.bool) and func in _CONTRARY:
                return _CONTRARY[func](func, *args, **kwargs)
        if not any(t.is_meta for t in tensors):
            if kwargs.get("device") == META:  # a factory that asked a meta tensor for its device
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        if func in _ASSUMED:
            return _ASSUMED[func](*args, **kwargs)
        if func in _NO_META:
            return _NO_META[func](*args, **kwargs)
        if func is aten._to_copy.default or func is aten.to.device:
            kwargs["device"] = META
        given = args
        if not all(t.is_meta for t in tensors):
            args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._unsafe_index.Tensor):
            args = (args[0], [_positions(i) for i in given[1]], *args[2:])
            args = (args[0], [i for group in args[1] for i in group], *args[2:])
        return _by_shapes(func, args, kwargs)


# --- shapes that were asked before ------------------------------------------------------------------------------------


class _Laid(NamedTuple):
    """All that counts of a meta tensor, for a function that gives fresh memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


class _UnknownError(Exception):
    """A call whose result does not follow from what can be compared."""


def _by_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on meta tensors. Many meta kernels are Python, and the blocks of a model ask the same again and again."""
    if not _gives_fresh_memory(func):
        return func(*args, **kwargs)
    try:
        given = tuple(map(_described, args)), tuple((name, _described(x)) for name, x in kwargs.items())
        found = _shapes(func, torch.get_default_dtype(), *given)
    except (_UnknownError, TypeError):  # a TypeError: what cannot be hashed
        return func(*args, **kwargs)
    return found() if isinstance(found, _Laid) else tuple(x() for x in found)


_gives_fresh_memory = lru_cache(maxsize=4096)(gives_fresh_memory)


@lru_cache(maxsize=16384)
def _shapes(
    func: Any, default: torch.dtype, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> _Laid | tuple[_Laid, ...]:
    """What an op gives for arguments that are described. Raises _UnknownError if these are not tensors alone."""
    found = func(*map(_again, args), **{name: _again(x) for name, x in kwargs})
    several = found if isinstance(found, tuple) else (found,)
    if not all(_is_plain(t) for t in several):
        raise _UnknownError
    described = tuple(_Laid(tuple(t.shape), t.stride(), t.dtype) for t in several)
    return described if isinstance(found, tuple) else described[0]


def _is_plain(t: Any) -> bool:
    return type(t) in (Tensor, Parameter) and t.is_meta and t.layout is torch.strided and not t.is_complex()


def _described(x: Any) -> Any:
    """An argument as something that can be compared; with its type, as ``1 == 1.0 == True``."""
    if isinstance(x, Tensor):
        if not _is_plain(x):
            raise _UnknownError
        return _Laid(tuple(x.shape), x.stride(), x.dtype)
    return (type(x), tuple(map(_described, x))) if type(x) in (list, tuple) else (type(x), x)


def _again(x: Any) -> Any:
    if isinstance(x, _Laid):
        return x()
    kind, value = x
    return kind(map(_again, value)) if kind in (list, tuple) else value


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an op, which are in lists at most."""
    found: list[Tensor] = []
    for x in arguments:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [t for t in x if isinstance(t, Tensor)]
    return found


def _to_meta(t: Tensor) -> Tensor:
    # From a meta tensor: a factory that asks for meta by name is taken for one that asked a parameter's device.
    return t if t.is_meta else _SEED.new_empty_strided(t.size(), t.stride(), dtype=t.dtype)


def _positions(index: Tensor | None) -> list[Tensor | None]:
    """A mask as the positions it holds; all of them, if it has no values: meta kernels cannot count."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.empty(_held(index), dtype=torch.int64, device=META) for _ in range(index.dim())]


def _held(mask: Tensor) -> int:
    return mask.numel() if mask.is_meta else int(mask.count_nonzero())


def _item(x: Tensor) -> Any:
    return {True: 1.0, False: 1}[x.is_floating_point()] if x.dtype != torch.bool else True


def _nonzero(x: Tensor) -> Tensor:
    return torch.empty((x.numel(), x.dim()), dtype=torch.int64, device=META)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    held = _held(mask.expand(torch.broadcast_shapes(x.shape, mask.shape)))
    return torch.empty(held, dtype=x.dtype, device=META)


_ASSUMED: dict[Any, Any] = {
    aten._local_scalar_dense.default: _item,
    aten.item.default: _item,
    aten.is_nonzero.default: lambda x: True,
    aten.equal.default: lambda x, y: True,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
}


_READS = {  # as a person writes it
    aten._local_scalar_dense.default: "a number or a bool",
    aten.item.default: "a number or a bool",
    aten.is_nonzero.default: "a bool",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero, or a mask as an index",
    aten.masked_select.default: "masked_select",
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


def gradients_without_values(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """What ``torch.autograd.grad`` gives, for its shapes: a gradient asked for within a forward."""
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(torch.empty_like(_to_meta(x)) for x in inputs)


class Meeting(FunctionMode):
    """The same at the level of torch functions, for what never reaches the dispatcher with both kinds.

    Some functions compare devices first (RNNs, ``cdist``, attention): what such a function refuses, it is asked again with
    all of its tensors on meta. And ``tolist`` and ``numpy`` read past the dispatcher.

    Attributes:
        differentiates: whether the forward asked for gradients itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known, self.differentiates = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.differentiates |= transforming()
        if func in (Tensor.tolist, Tensor.numpy):
            self.known += not args[0].is_meta
        if func in (Tensor.tolist, Tensor.numpy) and args[0].is_meta:
            return func(torch.ones(args[0].shape, dtype=args[0].dtype))
        if func in (Tensor.register_hook, Tensor.retain_grad) and args[0].is_meta:
            return RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None  # no backward follows
        if func is torch.autograd.grad and any(isinstance(t, Tensor) and t.is_meta for t in pytree.tree_leaves(args)):
            self.differentiates = True
            return gradients_without_values(*args, **kwargs)
        if func is Tensor.__format__ and args[0].is_meta and not args[0].dim():
            return format(args[0].item(), *args[1:])  # a number in a text: in the name of a module, say
        name = getattr(func, "__name__", "")
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


def _half(t: Tensor) -> Tensor:
    t = _to_meta(t)
    return t.to(torch.bfloat16) if t.is_floating_point() else t
