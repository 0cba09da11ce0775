"""Every elementwise function that has a rule, under each of its names: torch.add, Tensor.add, Tensor.__add__, add_ …"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Case, Make, Table, rule_name
from torch import Tensor
from torch.nn import functional

from meshwright.spmd.decide import DECIDERS
from meshwright.spmd.decide.pointwise import copy_, pointwise

CASES = Table()

# The arguments that follow the tensor, where it does not stand alone.
_MORE: dict[str, tuple[Any, ...]] = {
    "clamp": (-0.3, 0.4),
    "clip": (-0.3, 0.4),
    "clamp_min": (-0.3,),
    "clamp_max": (0.4,),
    "threshold": (0.1, 0.7),
    "_threshold": (0.1, 0.7),
    "full_like": (0.7,),
    "fill": (0.7,),
    "fill_": (0.7,),
    "to": (torch.float32,),
    "type": (torch.float32,),
    "requires_grad": (True,),
}
_SIGNED = """abs absolute neg negative positive exp exp2 expm1 square sin cos tan sinh cosh tanh asin acos atan asinh atanh
sigmoid erf erfc erfinv floor ceil round trunc frac sign sgn relu relu6 gelu silu mish elu celu selu leaky_relu softplus
softsign tanhshrink hardtanh hardswish hardsigmoid log_sigmoid hardshrink softshrink threshold _threshold nan_to_num clamp
clip clamp_min clamp_max to float double half bfloat16 int long short bool byte type clone contiguous detach zeros_like
ones_like full_like isnan isinf isfinite isneginf isposinf logical_not fill angle sinc cpu resolve_conj resolve_neg data
real deg2rad rad2deg""".split()
_LIKE = ("type_as", "copy")
_INTEGERS = "bitwise_not bitwise_and bitwise_or bitwise_xor __invert__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__"
_COMPLEX = "conj imag view_as_real"
_TERNARY = "lerp addcmul addcdiv"
_UNWRITTEN = ("empty_like",)
_FLAT = "floor_divide rfloordiv ifloordiv floordiv heaviside nextafter".split()  # torch has no derivative
_ELSEWHERE = {"cuda"}  # needs another device


def _base(name: str) -> str:
    name = name.removesuffix(".get").removeprefix("special_")
    if name.startswith("__i") and name.endswith("__") and name != "__invert__":
        return name[3:-2]
    return name if name.startswith("__") else name.rstrip("_")


def _binary(base: str) -> bool:
    return base.strip("_") in _TWO


_TWO = set(
    """add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power maximum minimum fmax
    fmin eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or logical_xor atan2 hypot rsub
    xlogy heaviside copysign isclose logaddexp nextafter rpow rdiv radd rmul rfloordiv rmod mod truediv floordiv ifloordiv
    polar complex and or xor bitwise_and bitwise_or bitwise_xor rand ror rxor""".split()
)


def _values(make: Make, base: str, *shape: int) -> Tensor:
    if base in _INTEGERS.split() or base in ("and", "or", "xor"):
        return make.ints(13, *shape)
    if base in _COMPLEX.split():
        return torch.complex(make(*shape), make(*shape))
    if base == "acosh":
        return make(*shape, low=1.2, high=3.0)
    if base in _SIGNED:
        return make(*shape, low=-0.9, high=0.9)
    return make(*shape, low=0.15, high=0.85)


def _build_for(function: Any, base: str, kind: str) -> Callable[[Make], Any]:
    def build(make: Make) -> tuple[list[Tensor], Callable[..., Any]]:
        shape = make.sizes(3)
        x = _values(make, base, *shape)
        if kind == "unary":
            more = _MORE.get(base, ())
            return [x], lambda a: _run(function, a, *more)
        if kind == "pairs":
            return [make(*shape, 2)], lambda a: function(a)
        if kind == "number":
            number = 3 if not x.is_floating_point() else 0.4
            return [x], lambda a: _run(function, a, number)
        others = [_values(make, base, *_broadcast(make, shape, base)) for _ in range(2)]
        if kind == "two":
            return [x, others[0]], lambda a, b: _run(function, a, b)
        return [x, *others], lambda a, b, c: _run(function, a, b, c)

    return build


def _broadcast(make: Make, shape: list[int], base: str) -> list[int]:
    if base in ("polar", "complex"):
        return shape
    kept = [1 if make.choose.random() < 0.25 else n for n in shape]
    return kept[make.choose.choice([0, 0, 1, 2]) :]


def _run(function: Any, *args: Any) -> Any:
    result = function(*args)
    return args[0] if result is None else result


def _kind(base: str) -> str:
    if base == "view_as_complex":
        return "pairs"
    if base in _TERNARY.split():
        return "three"
    return "two" if _binary(base) or base in _LIKE else "unary"


def _works(function: Any, build: Callable[[Make], Any], name: str) -> bool:
    """Whether this name of the function takes these arguments: some private ones do not."""
    for turn in range(2):
        try:
            tensors, call = build(Make(f"{name} {turn}"))
            call(*[t.clone() for t in tensors])
        except (TypeError, RuntimeError, NotImplementedError):
            return False
    return True


def _register() -> None:
    counts: dict[str, int] = {}
    for function, rule in list(DECIDERS.items()):
        name = rule_name(function)
        base = _base(name)
        if rule not in (pointwise, copy_) or base in ("where", "masked_fill", "rrelu", "requires_grad", *_ELSEWHERE):
            continue
        counts[name] = counts.get(name, 0) + 1
        label = name if counts[name] == 1 else f"{name} ({counts[name]})"
        kinds = [_kind(base)]
        if kinds == ["two"] and base not in _LIKE and base not in ("polar", "complex", "nextafter", "heaviside"):
            kinds.append("number")
        for kind in kinds:
            build = _build_for(function, base, kind)
            if not _works(function, build, label):
                continue
            case = label if kind != "number" else f"{label} number"
            smooth = base.strip("_") not in _FLAT and name not in ("asinh_", "acosh_", "atanh_", "__rmod__")
            CASES[case] = Case(case, build, most=4, same=base not in _UNWRITTEN, gradients=smooth)


_register()


@CASES.add("where", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.bools(a, b), make(b), make(a, 1)], torch.where


@CASES.add("where method and numbers")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make.bools(a, 1), make(a, b)], lambda m, x: (
        x.where(m, 0.5),
        torch.where(m, 1.0, x),
        torch.where(m, x, -1.0),
    )


@CASES.add("masked_fill", rounds=2)
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, b, c), make.bools(b, 1)], lambda x, m: (
        x.masked_fill(m, float("-inf")),
        torch.masked_fill(x, m, 2.0),
    )


@CASES.add("masked_fill_ with a tensor")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make.bools(a, b), make()], lambda x, m, v: x.masked_fill_(m, v)


@CASES.add("clamp between tensors")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(b), make(a, 1)], lambda x, low, high: (x.clamp(min=low), torch.clamp(x, max=high))


@CASES.add("division that rounds")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(b, low=0.3)], lambda x, y: (
        torch.div(x, y, rounding_mode="floor"),
        x.div(0.3, rounding_mode="trunc"),
    )


@CASES.add("sums with alpha, of sums", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(a, b)], lambda x, y: (
        torch.add(x, y, alpha=3),
        x - 2 * y,
        (x / 4 + y).neg(),
        1 - x,
        x + 1,
        2 / (x + 5),
    )


@CASES.add("operators")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b, low=0.2), make(b, low=0.3)], lambda x, y: (
        x + y,
        x - y,
        x * y,
        x / y,
        x**2,
        2**x,
        x**y,
        -x,
        (x // y).detach(),
        x % y,
        3 - x,
        abs(x),
        x > y,
        x == x,
    )


@CASES.add("operators that write", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, y: Tensor) -> Tensor:
        x += y
        x *= 2
        x -= y * y
        x /= 3
        return x

    return [make(a, b), make(b)], run


@CASES.add("written through a slice", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2, 3)

    def run(x: Tensor) -> Tensor:
        x[0].mul_(2)
        x[:, 1:2].add_(1)
        x.transpose(0, 1)[1].zero_()
        x.narrow(0, 0, 2).sub_(3)
        return x * 1

    return [make(a, b)], run


@CASES.add("written through a slice that fell back", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2, 4, 7)

    def run(x: Tensor) -> Tensor:
        y = x[:, ::2]
        y.mul_(2)
        z = x[1::2]
        z[:, 1:].add_(1)
        return x * y.sum()

    return [make(a, b)], run


@CASES.add("written through pieces that fell back")
def _(make: Make) -> Any:
    a, b = make.sizes(2, 4, 7)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            first, *_ = x.split(3, 1)
            first.mul_(2)
            x.unbind(0)[1].add_(1)
            x.chunk(2, 0)[0].neg_()
            return x * 1

    return [make(a, b)], run


@CASES.add("a slice read after its tensor is written")
def _(make: Make) -> Any:
    a, b = make.sizes(2, 4, 7)

    def run(x: Tensor) -> Any:
        y, z = x[:, ::2], x[1:]
        x.mul_(3)
        return y * 2, z + 1

    return [make(a, b)], run


@CASES.add("written by index", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2, 4, 7)

    def run(x: Tensor, v: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        x[..., ::2] = v[..., ::2]
        x[0] = 1.5
        x[1:3, -1] = v[1:3, 0]
        x[rows] = v[rows] * 2
        x[mask] = 0.0
        x[:, 0] = v[0, 0]
        x[:, 1:] = v[:, :1]
        x[None, 0] = v[:1] * 3
        return x * 1

    return [make(a, b), make(a, b), make.ints(a, 2), make.bools(a, b)], run


@CASES.add("a full tensor written from a cut one")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, y: Tensor) -> Tensor:
        x[:, 0] = y[:, 0]
        x.add_(y)
        x[0].copy_(y[-1])
        return x * y

    return [make(a, b), make(a, b)], run


@CASES.add("value read before and after a write", rounds=2)
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor, w: Tensor) -> Any:
        before = functional.linear(x, w)
        x.mul_(2)
        after = functional.linear(x, w)
        x.clamp_(min=-0.5)
        return before, after, x.sum()

    def safe(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            return run(x, w)

    return [make(a, b), make(3, b)], safe


@CASES.add("activations in place")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b)], lambda x: functional.relu(functional.leaky_relu(x, 0.2, inplace=True) + 0.1, inplace=True)


@CASES.add("type_as and to of another shape")
def _(make: Make) -> Any:
    a, b, c = make.sizes(3)
    return [make(a, 1, 1), make(a, b, c), make(a)], lambda m, x, v: (
        m.type_as(x),
        m.to(x),
        v.type_as(x),
        x.to(v),
        x * m.type_as(x),
    )


@CASES.add("dims of size 1")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(1, b), make(a, b), make(a, 1)], lambda x, y, z: (x + y, x * z, y - z)


@CASES.add("lerp, addcmul, addcdiv with numbers")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b), make(b, low=0.5)], lambda x, y: (
        x.lerp(y, 0.3),
        torch.addcmul(x, x, y, value=2),
        x.addcdiv(x, y, value=0.5),
    )


@CASES.add("facts")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        return (
            x.shape,
            x.size(1),
            x.dim(),
            x.numel(),
            x.dtype == torch.float64,
            len(x),
            x.is_floating_point(),
            x.ndim,
            x.requires_grad,
            x.is_leaf,
            x.device.type,
            x.is_complex(),
            x.grad_fn is not None,
        )

    return [make(a, b)], run


@CASES.add("memory", same=False)
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [
        make(a, b)
    ], lambda x: (x.stride(), x.is_contiguous(), x.storage_offset(), x._version, x.output_nr) and x * 1


@CASES.add("requires_grad_")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b)], lambda x: x.detach().requires_grad_().requires_grad


@CASES.add("new tensors")
def _(make: Make) -> Any:
    a, b = make.sizes(2)

    def run(x: Tensor) -> Any:
        fresh = x.new_zeros(a, 3), x.new_ones(x.shape), x.new_full((2,), 0.3), x.new_tensor([1.0, 2.0])
        return fresh, x.new_empty((b, a)).shape, x * x.new_ones(x.shape)

    return [make(a, b)], run


@CASES.add("rrelu_ draws like one device")
def _(make: Make) -> Any:
    a, b = make.sizes(2)
    return [make(a, b)], lambda x: functional.rrelu(x * 1, training=True, inplace=True)
