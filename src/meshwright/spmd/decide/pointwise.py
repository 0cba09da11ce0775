"""Elementwise functions, with broadcasting: they run on local tensors if one operand is sharded.

The other operands take the same layout: an operand that has the sharded dim is sliced, and one that broadcasts over it is
used whole. Sums stay lazy: partial ± partial is partial, and so is partial times a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, REPLICATE, Layout, Partial, Shard
from meshwright.spmd.alias import cached_geometries
from meshwright.spmd.decide.registry import ANSWERS, DECIDERS, ELEMENTWISE, decider
from meshwright.spmd.decide.types import like_here
from meshwright.spmd.decision import (
    GATHER,
    Answer,
    Body,
    Choice,
    Decision,
    matching,
    use_as,
    use_local,
    use_original,
    use_plain,
    use_replicated,
    use_varying,
)
from meshwright.spmd.signature import Call, Operand, is_undecided
from meshwright.spmd.tensor import GlobalTensor, geometry_of
from meshwright.spmd.torch_functions import functions, writes

_UNARY = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan sinh cosh tanh
asin acos atan asinh acosh atanh sigmoid logit erf erfc erfinv floor ceil round trunc frac sign sgn reciprocal isnan
isinf isfinite isneginf isposinf logical_not bitwise_not relu relu6 gelu silu mish elu celu selu leaky_relu softplus
softsign tanhshrink hardtanh hardswish hardsigmoid logsigmoid hardshrink softshrink threshold nan_to_num clamp clip
clamp_min clamp_max to float double half bfloat16 int long short bool byte type type_as clone contiguous detach
zeros_like ones_like full_like empty_like conj angle real imag sinc digamma lgamma i0 deg2rad rad2deg
view_as_real view_as_complex cpu cuda data resolve_conj resolve_neg alias fill zero
""".split()
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum minimum
fmax fmin eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or
logical_xor bitwise_and bitwise_or bitwise_xor atan2 hypot where masked_fill lerp addcmul addcdiv rsub xlogy
heaviside copysign  isclose logaddexp nextafter polar complex  __and__ __or__ __xor__ __rpow__ __rdiv__
__rtruediv__ __radd__ __rmul__ __rsub__ __rfloordiv__ __rmod__ __add__ __sub__ __mul__ __truediv__ __floordiv__
__mod__ __pow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__ __abs__ __invert__ __pos__ __rand__ __ror__
__rxor__
""".split()
_IN_PLACE = "iadd isub imul itruediv ifloordiv ipow iand ior ixor imod".split()
_NAMES = [*_UNARY, *_BINARY, *(f"__{n}__" for n in _IN_PLACE)]

# These add or drop the last dim: the sharded dim keeps its number, counted from the front.
_FROM_THE_FRONT = {f for n in ("view_as_real", "view_as_complex") for f in functions(n)}

_ADDITIVE = {
    f
    for n in "add sub subtract __add__ __sub__ __radd__ __rsub__ rsub add_ sub_ __iadd__ __isub__".split()
    for f in functions(n)
}
_SCALING = {
    f
    for n in "mul multiply div divide true_divide __mul__ __rmul__ __truediv__ mul_ div_ __imul__ __itruediv__".split()
    for f in functions(n)
}
_COPYING = {
    f
    for n in "clone contiguous detach neg negative __neg__ __pos__ positive requires_grad_ data alias".split()
    for f in functions(n)
}


@decider(*_NAMES, *(f"{n}_" for n in _UNARY + _BINARY))
def pointwise(call: Call) -> Answer:
    """The decider of elementwise functions, casts, copies, and writes of these in place."""
    func, args, kwargs = call.func, call.args, call.kwargs
    if writes(func, args, kwargs):
        return _in_place(call)
    if func in _MOVING:
        return _cast(call)
    if func in _CONTIGUOUS:
        return _contiguous(call)
    if func in _WHERE and len(args) + len(kwargs) == 1:
        return GATHER  # ``where(condition)`` returns indices, which are global
    tensors = call.operands
    if any(isinstance(t.layout, Partial) for t in tensors) and _linear(call):
        return of_each(call, use_local, PARTIAL)
    target = shard_of_result(tensors, func)
    if target is None:
        if func in _COPYING and (parameter := _copied_parameter(call)) is not None:
            return parameter
        return of_each(call, use_plain, REPLICATE)
    if func in _FROM_THE_FRONT:
        if target.dim == args[0].dim() - 1 and func.__name__ == "view_as_complex":
            return GATHER  # the real and the imaginary parts may be on different ranks
        return of_each(call, use_local, target)
    align = Aligner(target, rank_of(tensors))
    return of_each(call, align, target, align.choices)


def of_each(call: Call, change: Callable[[Any], Any], out: Layout, choices: Sequence[Choice] = ()) -> Decision:
    """The Decision to call the function itself, with ``change`` applied to each argument."""
    args, kwargs = tuple(map(change, call.args)), {k: change(v) for k, v in call.kwargs.items()}
    return Decision(call.func, args, kwargs, out, choices=tuple(choices))


def _cast(call: Call) -> Answer:
    """``to`` and its kin: another dtype, device or memory format; the tensor itself if there is nothing to change."""
    func, args, kwargs = call.func, call.args, call.kwargs
    x = args[0]
    if isinstance(other := args[1] if len(args) > 1 else kwargs.get("other"), Operand):
        # Only dtype and device of the other tensor count, not its shape or layout.
        named = {**dict(zip(("non_blocking", "copy"), args[2:], strict=False)), **kwargs}
        named.pop("other", None)
        return Body(Tensor.to, (use_original(x),), {"dtype": other.dtype, "device": other.device, **named})
    if (memory_format := kwargs.get("memory_format", torch.preserve_format)) != torch.preserve_format:
        named = {k: v for k, v in kwargs.items() if k != "memory_format"}
        return Body(_converted, (func, memory_format, use_original(x), *args[1:]), named)
    if isinstance(x.layout, Shard):
        return of_each(call, use_local, x.layout)
    tried = like_here(func, x, *args[1:], **kwargs)
    if tried is None:
        return of_each(call, use_local, REPLICATE)  # ``type()`` without arguments returns a name
    if tried == (x.dtype, x.device) and not kwargs.get("copy"):
        return replace(of_each(call, use_local, REPLICATE), itself=x.index)
    return _copied_parameter(call) or of_each(call, use_plain, REPLICATE)


def _converted(func: Any, memory_format: torch.memory_format, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A cast with a memory format.

    If dtype and device stay, ``to`` copies less often than ``contiguous``: to it, a transposed tensor has
    ``torch.contiguous_format``, because its strides fit no other format.
    """
    converted: Tensor = func(x, *args, **kwargs)
    if converted is x:
        places = cached_geometries(Tensor.to, (geometry_of(x),), (("memory_format", memory_format),))
        if places is not None and places[0].itself:
            return x
    return _laid(converted, memory_format)


def _laid(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    return x if x.is_contiguous(memory_format=memory_format) else x.clone(memory_format=memory_format)


def _contiguous(call: Call) -> Answer:
    """``contiguous``: the tensor itself if it is contiguous on one device; else a copy."""
    x, memory_format = call.args[0], [*call.args[1:], *call.kwargs.values()]
    if memory_format and memory_format[0] != torch.contiguous_format:
        return Body(_laid, (use_original(x), *memory_format), {})
    if x.spec.is_contiguous:
        return Decision(_identity, (use_local(x),), {}, itself=x.index)
    copied = pointwise(replace(call, func=Tensor.clone, args=(x,), kwargs={}))
    assert isinstance(copied, Decision)
    return replace(copied, kwargs={"memory_format": torch.contiguous_format})


def _identity(x: Tensor) -> Tensor:
    return x


_WHERE = set(functions("where"))
_CONTIGUOUS = set(functions("contiguous"))
_MOVING = {
    f
    for n in "to float double half bfloat16 int long short bool byte type type_as cpu cuda".split()
    for f in functions(n)
}


class Aligner:
    """Gives the Use of each operand of an elementwise function whose result has ``rank`` dims and the layout ``target``.

    ``choices``: the choices for the undecided parameters among the operands so far.
    """

    def __init__(self, target: Shard, rank: int) -> None:
        self.target, self.rank = target, rank
        self.choices: list[Choice] = []

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Operand):
            return x
        dim = self.target.dim - (self.rank - x.dim())
        if dim < 0 or x.shape[dim] == 1 != self.target.size:
            return use_varying(x)
        layout = self.target.on(dim)
        self.choices += matching(x, layout)
        return use_as(x, layout)


def shard_of_result(tensors: Sequence[Operand], func: Any) -> Shard | None:
    """The layout of the result: that of the largest sharded operand, for the broadcast shape; None if none is sharded."""
    rank, best, size = rank_of(tensors), None, -1
    for x in tensors:
        layout = x.layout
        if isinstance(layout, Shard) and x.numel() > size:
            dim = layout.dim + (0 if func in _FROM_THE_FRONT else rank - x.dim())
            if layout.size == 1 and torch.broadcast_shapes(*[t.shape for t in tensors])[dim] != 1:
                continue  # the sharded dim broadcasts over a dim of the others
            best, size = layout.on(dim), x.numel()
    return best


def rank_of(tensors: Sequence[Operand]) -> int:
    """The number of dims of the broadcast shape."""
    return max(t.dim() for t in tensors)


# Other linear functions whose result may alias their argument: f(a + b) = f(a) + f(b).
_LINEAR_ALIASES = {
    f for n in "conj resolve_conj resolve_neg view_as_real view_as_complex".split() for f in functions(n)
} | {getattr(Tensor, n).__get__ for n in ("real", "imag")}


def _linear(call: Call) -> bool:
    """Whether each rank's result, computed from its summands of partial operands, is its summand of the result."""
    func, args, tensors = call.func, call.args, call.operands
    if func in _COPYING or func in _LINEAR_ALIASES:
        return True
    if func in _ADDITIVE:  # a number added on every rank would count once a rank
        both = all(isinstance(a, Operand) for a in args[:2])
        return both and all(isinstance(t.layout, Partial) for t in tensors)
    return func in _SCALING and len(tensors) == 1 and args[0] is tensors[0] and "rounding_mode" not in call.kwargs


def _copied_parameter(call: Call) -> Decision | None:
    """A copy or cast of an undecided parameter is still that parameter."""
    x: Any = call.args[0] if call.args else None
    if not is_undecided(x):
        return None
    decision = of_each(call, use_replicated, REPLICATE)
    return replace(decision, follows=(x.index, tuple(range(x.dim()))))


def _in_place(call: Call) -> Answer:
    """A write to the first argument, which keeps its layout: the other operands take it."""
    target = call.args[0]
    layout = target.layout
    choices: Sequence[Choice] = ()
    if isinstance(layout, Partial):
        if not _linear(call):
            return GATHER
        decision = of_each(call, use_local, layout)
    elif isinstance(layout, Shard):
        align = Aligner(layout, target.dim())
        decision = of_each(call, lambda x: use_local(x) if x is target else align(x), layout)
        choices = align.choices
    else:
        decision = of_each(call, lambda x: use_local(x) if x is target else use_replicated(x), layout)
    return replace(decision, choices=tuple(choices), itself=target.index, writes=True)


@decider("requires_grad_")
def requires_grad_(call: Call) -> Answer:
    """Not cacheable: for a parameter the call must reach the parameter itself."""
    x = call.args[0]
    return replace(of_each(call, use_local, REPLICATE), itself=x.index, cacheable=False)


@decider("copy_", "fill_", "zero_")
def copy_(call: Call) -> Answer:
    return _in_place(call)


def _from_wrapper(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Facts of memory: as on one device, which the global tensor knows."""
    return getattr(GlobalTensor, func.__name__)(*args, **kwargs)


def _from_local(dispatcher: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Facts of autograd, in which the wrapper and the local tensor differ."""
    return func(args[0]._mw_local, *args[1:], **kwargs)


for _name in ("requires_grad", "is_leaf", "grad_fn", "_version", "output_nr"):
    ANSWERS[getattr(Tensor, _name).__get__] = _from_local
for _name in ("stride", "is_contiguous", "storage_offset", "data_ptr"):
    ANSWERS[getattr(Tensor, _name)] = _from_wrapper
for _name in ("real", "imag", "data"):
    DECIDERS[getattr(Tensor, _name).__get__] = pointwise
_COPYING.add(getattr(Tensor, "data").__get__)  # noqa: B009  (a property of the class, not of a tensor)


@decider("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def new(call: Call) -> Answer:
    """A new tensor of a given shape, on every rank. Of the first argument only dtype and device count; the fill value may be
    a global tensor too."""
    x = call.args[0]
    return of_each(call, lambda y: use_local(y) if y is x else use_replicated(y), REPLICATE)


ELEMENTWISE.update(func for func, its_decider in DECIDERS.items() if its_decider is pointwise)
