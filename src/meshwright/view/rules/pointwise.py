"""Functions of each element, with broadcasting: local wherever one operand is cut.

The other operands are brought to the same cut: those that have the cut dim take their slice, those that broadcast over
it enter the cut work whole. Sums stay lazy: partial ± partial is partial, and so is partial times a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, WHOLE, Cut, Partial
from meshwright.view.rules.registry import RULES, functions, rule, writes
from meshwright.view.tensor import View, local_of

_UNARY = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan sinh cosh tanh
asin acos atan asinh acosh atanh sigmoid logit erf erfc erfinv floor ceil round trunc frac sign sgn reciprocal isnan
isinf isfinite isneginf isposinf logical_not bitwise_not relu relu6 gelu silu mish elu celu selu leaky_relu softplus
softsign tanhshrink hardtanh hardswish hardsigmoid logsigmoid hardshrink softshrink threshold nan_to_num clamp clip
clamp_min clamp_max to float double half bfloat16 int long short bool byte type type_as clone contiguous detach
requires_grad_ zeros_like ones_like full_like empty_like conj angle real imag sinc digamma lgamma i0 deg2rad rad2deg
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

# view_as_real, view_as_complex and as_real pairs change the number of dims at the end: the cut dim keeps its number.
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


@rule(*_NAMES, *(f"{n}_" for n in _UNARY + _BINARY))
def pointwise(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("out") is not None:
        return NotImplemented
    if writes(func, args, kwargs):
        return _in_place(work, func, args, kwargs)
    if func in _MOVING:
        return _moved(work, func, args, kwargs)
    if func in _CONTIGUOUS:
        return _contiguous(func, args[0], *args[1:], **kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    layouts = [work.layout(t) for t in tensors]
    if any(isinstance(t, Partial) for t in layouts) and _linear(func, args, kwargs, tensors, layouts):
        return work.view(_local(func, args, kwargs), PARTIAL)
    target = cut_of_result(tensors, layouts, func)
    if target is None:
        if all(layout == WHOLE for layout in layouts) and func in _COPYING:
            return _same_parameter(work, func, args, kwargs)
        return func(*map(work.plain, args), **{k: work.plain(v) for k, v in kwargs.items()})
    if func in _FROM_THE_FRONT:
        if target.dim == args[0].dim() - 1 and func.__name__ == "view_as_complex":
            return NotImplemented  # the real and the imaginary parts are on different ranks
        return work.view(func(args[0]._mw_local), target)
    rank = _rank(tensors)
    align = Aligner(work, target, rank)
    local = func(*map(align, args), **{k: align(v) for k, v in kwargs.items()})
    if not isinstance(local, Tensor):
        return NotImplemented
    return work.view(local, target)


def _moved(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another type, device or order of memory: the tensor itself, if it is so already."""
    if isinstance(other := args[1] if len(args) > 1 else kwargs.get("other"), Tensor):
        # Of the other tensor only dtype and device count, not its shape or layout.
        named = {**dict(zip(("non_blocking", "copy"), args[2:], strict=False)), **kwargs}
        named.pop("other", None)
        return args[0].to(dtype=other.dtype, device=other.device, **named)
    x = args[0]
    if (memory_format := kwargs.get("memory_format", torch.preserve_format)) != torch.preserve_format:
        plain = func(x, *args[1:], **{k: v for k, v in kwargs.items() if k != "memory_format"})
        return _contiguous(func, plain, memory_format)
    local = func(x._mw_local, *args[1:], **kwargs)
    if local is x._mw_local:
        return x
    if not isinstance(local, Tensor):
        return local  # ``type()`` says a type's name
    if isinstance(x._mw_layout, Cut):
        return work.view(local, x._mw_layout)
    if x._mw_layout == WHOLE:
        return _same_parameter(work, func, args, kwargs)
    return func(work.plain(x), *args[1:], **kwargs)


def _contiguous(func: Any, x: View, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """The tensor itself, if its memory on one device is in that order; else a copy."""
    return x if x.is_contiguous(memory_format) else x.clone(memory_format=memory_format)


_CONTIGUOUS = set(functions("contiguous"))
_MOVING = {
    f
    for n in "to float double half bfloat16 int long short bool byte type type_as cpu cuda".split()
    for f in functions(n)
}


class Aligner:
    """Brings each operand of an elementwise function to the cut ``target`` of its result, which has ``rank`` dims."""

    def __init__(self, work: Any, target: Cut, rank: int) -> None:
        self.work, self.target, self.rank = work, target, rank

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dim = self.target.dim - (self.rank - x.dim())
        if dim < 0 or x.size(dim) == 1 != self.target.size:
            return self.work.varying(x)
        layout = self.target.on(dim)
        return self.work.cut(self.work.match(x, layout), layout)


def cut_of_result(tensors: list[Tensor], layouts: list[Any], func: Any) -> Cut | None:
    """The cut of the result: that of the largest cut operand, as a dim of the broadcast shape."""
    rank, best, size = _rank(tensors), None, -1
    for x, layout in zip(tensors, layouts, strict=True):
        if isinstance(layout, Cut) and x.numel() > size:
            dim = layout.dim + (0 if func in _FROM_THE_FRONT else rank - x.dim())
            if layout.size == 1 and torch.broadcast_shapes(*[t.shape for t in tensors])[dim] != 1:
                continue  # it is spread over a dim of the others
            best, size = layout.on(dim), x.numel()
    return best


def _rank(tensors: list[Tensor]) -> int:
    return max(t.dim() for t in tensors)


# Other functions that give, of a sum, the sum of what they give of each summand, and that can alias.
_LINEAR_ALIASES = {
    f for n in "conj resolve_conj resolve_neg view_as_real view_as_complex".split() for f in functions(n)
} | {getattr(Tensor, n).__get__ for n in ("real", "imag")}


def _linear(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], layouts: list[Any]) -> bool:
    """Whether the result, for partial operands, is the sum over ranks of what each computes from its summands."""
    if func in _COPYING or func in _LINEAR_ALIASES:
        return True
    if func in _ADDITIVE:  # a number added on every rank would count once a rank
        return all(isinstance(a, Tensor) for a in args[:2]) and all(isinstance(t, Partial) for t in layouts)
    return func in _SCALING and len(tensors) == 1 and args[0] is tensors[0] and "rounding_mode" not in kwargs


def _local(func: Any, args: Any, kwargs: Any) -> Tensor:
    result: Tensor = func(*(a._mw_local if isinstance(a, View) else a for a in args), **kwargs)
    return result


def _same_parameter(work: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy or cast of an undecided parameter is still that parameter."""
    plain = [a._mw_local if isinstance(a, View) else a for a in args]
    result = func(*plain, **{k: work.whole(v) for k, v in kwargs.items()})
    source = args[0] if args else None
    if isinstance(source, View) and source._mw_parameter is not None and isinstance(result, Tensor):
        return View(result, WHOLE, work, parameter=source._mw_parameter)
    return result


def _in_place(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The written tensor keeps its layout: the others come to it."""
    target = args[0]
    layout = work.layout(target)
    others = (*args[1:], *kwargs.values())
    if isinstance(layout, Partial):
        tensors = [a for a in (target, *others) if isinstance(a, Tensor)]
        if not _linear(func, args, kwargs, tensors, [work.layout(a) for a in tensors]):
            return NotImplemented
        _local(func, args, kwargs)
        return target
    if isinstance(layout, Cut):
        align = Aligner(work, layout, target.dim())
        func(target._mw_local, *map(align, args[1:]), **{k: align(v) for k, v in kwargs.items()})
        return target
    local = target._mw_local if isinstance(target, View) else target
    func(local, *map(work.whole, args[1:]), **{k: work.whole(v) for k, v in kwargs.items()})
    return target


@rule("copy_", "fill_", "zero_")
def copy_(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in_place(work, func, args, kwargs)


def _of_view(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Facts of memory: those of one device, which the View knows."""
    return getattr(View, func.__name__)(*args, **kwargs)


def _of_local(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Facts of autograd, in which the wrapper and the local tensor differ."""
    return func(args[0]._mw_local, *args[1:], **kwargs)


for _name in ("requires_grad", "is_leaf", "grad_fn", "_version", "output_nr"):
    RULES[getattr(Tensor, _name).__get__] = _of_local
for _name in ("stride", "is_contiguous", "storage_offset", "data_ptr"):
    RULES[getattr(Tensor, _name)] = _of_view
for _name in ("real", "imag", "data"):
    RULES[getattr(Tensor, _name).__get__] = pointwise
_COPYING.add(getattr(Tensor, "data").__get__)  # noqa: B009  (a property of the class, not of a tensor)


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
def new(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fresh tensor of a given shape: whole, on every rank the same."""
    kwargs = {k: work.whole(v) for k, v in kwargs.items()}  # a value to fill with may be the View, and not the tensor
    return func(local_of(args[0]), *map(work.whole, args[1:]), **kwargs)


ELEMENTWISE = frozenset(func for func, its_rule in RULES.items() if its_rule is pointwise)
