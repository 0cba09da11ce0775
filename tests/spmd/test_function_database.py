"""Every function of torch's own database of functions, in models over tp and over a pipeline, against one device.

The database has a function's arguments for torch's tests. Each tensor among them is multiplied by the output of a layer, so that
it has a gradient, and over tp it is sharded over one of its dims. Functions are checked several at a time; if such a check fails,
they are checked in halves, down to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

pytest.importorskip("expecttest")  # which torch's database imports

WIDTH, AT_ONCE, MOST_ELEMENTS, MOST_SAMPLES = 4, 8, 3000, 40
# Functions that draw, or make tensors without an argument to shard; and torch.*, of formats of GPUs.
_LEFT_OUT = (
    "_refs",
    "rand",
    "normal",
    "empty",
    "ones",
    "zeros",
    "full",
    "eye",
    "arange",
    "linspace",
    "logspace",
    "new_",
    "torch.",
)
# In place over a pipeline: a stage has a stream of random numbers of its own.
_DRAWS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "uniform")
_NO_META = ("to_sparse", "linalg.lstsq", "linalg.lstsq.grad_oriented", "sparse.sampled_addmm", "sparse.mm.reduce")


@dataclass(frozen=True)
class Call:
    """One function with some of its arguments.

    Attributes:
        name: of the function in the database; ``variant``: "op", "method_variant" or "inplace_variant".
        which: which of the samples of arguments.
        dim: the dim over which its tensors are sharded, if they have it; else the first.
    """

    name: str
    variant: str
    which: int
    dim: int

    @property
    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(database()[self.name], self.variant)
        return function


@cache
def database() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


@cache
def arguments(name: str) -> Sequence[Any]:
    """Samples of a function's arguments in float64: the first, the one with the most elements, one in the middle, the last."""
    torch.manual_seed(0)
    samples = database()[name].sample_inputs("cpu", torch.float64, requires_grad=False)
    some = [
        sample for _, sample in zip(range(MOST_SAMPLES), samples, strict=False) if 0 < _size(sample) < MOST_ELEMENTS
    ]
    return [some[0], max(some, key=_size), some[len(some) // 2], some[-1]] if some else []


def _size(sample: Any) -> int:
    tensors = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


class Applies(nn.Module):
    """A function of tensors that are multiplied by the outputs of layers."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.layers, self.tensors = call, nn.ModuleList(), 0
        sample = arguments(call.name)[call.which]
        self.arguments = tree_map_only(Tensor, self._keep, (sample.input, tuple(sample.args), dict(sample.kwargs)))

    def _keep(self, t: Tensor) -> _Kept:
        name = f"tensor{self.tensors}"
        self.tensors += 1
        self.register_buffer(name, t.detach().clone())
        if t.dtype is not torch.float64 or t.layout is not torch.strided or not t.numel():
            return _Kept(name, None)
        self.layers.append(nn.Linear(WIDTH, t.numel()))
        return _Kept(name, len(self.layers) - 1)

    def _argument(self, value: Any, h: Tensor) -> Any:
        if not isinstance(value, _Kept):
            return value
        t: Tensor = getattr(self, value.name)
        if value.layer is None:
            return t
        dim = self.call.dim if t.dim() > self.call.dim else 0
        moved = t.movedim(dim, 0) if t.dim() else t
        factors = 1 + 0.01 * torch.tanh(self.layers[value.layer](h))  # small: some functions are defined in an interval
        product = (moved.flatten() * factors).reshape(moved.shape)
        return product.movedim(0, dim) if t.dim() else product

    def forward(self, h: Tensor) -> Tensor:
        first, positional, named = tree_map(partial(self._argument, h=h), self.arguments)
        if self.call.variant == "inplace_variant":
            first = first * 1.0
        results = tree_leaves(self.call.function(first, *positional, **named))
        return sum(map(_number, results), h.sum() * 0)


@dataclass(frozen=True)
class _Kept:
    """A tensor among arguments: the name of its buffer, and the number of the layer that it is multiplied by, if any."""

    name: str
    layer: int | None


def _number(result: Any) -> Tensor | float:
    if not isinstance(result, Tensor):
        return float(result) if isinstance(result, (int, float, bool)) else 0.0
    dense = result if result.layout is torch.strided else result.to_dense()
    dense = dense.abs() if dense.is_complex() else dense
    return torch.tanh(dense.double() * 0.3).mean() if dense.numel() else 0.0


class Applied(nn.Module):
    """Several functions of one vector; layers before and after them, so that a pipeline has where to cut."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.functions, self.last = nn.ModuleList(map(Applies, calls)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().mean(0)
        h = h + self.down(self.up(h).relu())
        return sum((function(h) for function in self.functions), self.last(h).sum())


def rows() -> tuple[Tensor]:
    return (torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


def loss(output: Tensor) -> Tensor:
    return output


def runs_alone(call: Call) -> bool:
    """Whether a function has these arguments, runs in a model on one device, and gives finite gradients."""
    try:
        torch.manual_seed(0)
        model = Applied([call]).double()
        output = model(*rows())
        output.backward()
    except Exception:  # not this variant, not this type; what a function raises differs
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    finite = isfinite(output.item()) and all(bool(g.isfinite().all()) for g in gradients)
    return finite and bool(len(model.functions[0].layers))


def wrong(calls: Sequence[Call], plan: str, workers: LocalWorkers) -> Iterator[str]:
    """Those calls whose check fails, and how."""
    try:
        build = partial(Applied, calls)
        report = mw.check(build, rows(), plan, loss=loss, workers=workers, dtype=torch.float64, steps=2, timeout=60)
        failed = "" if report else str(report)
    except mw.PlanError as error:
        failed = str(error)
    if failed and len(calls) == 1:
        yield f"{calls[0]}: {failed[:600]}"
    elif failed:
        yield from wrong(calls[: len(calls) // 2], plan, workers)
        yield from wrong(calls[len(calls) // 2 :], plan, workers)


@pytest.mark.proof
@pytest.mark.parametrize("plan", ["tp=2", "tp=3", "pp=2"])
@pytest.mark.parametrize(
    ("variant", "which", "dim"),
    [
        ("op", 0, 0),
        ("op", 1, 1),
        ("op", 2, 2),
        ("method_variant", 3, 1),
        ("inplace_variant", 0, 0),
        ("inplace_variant", 1, 1),
    ],
)
def test_functions_are_those_of_one_device(
    variant: str, which: int, dim: int, plan: str, workers: LocalWorkers
) -> None:
    names = [name for name in database() if not name.startswith(_LEFT_OUT)]
    if plan == "pp=2":
        names = [
            name for name in names if name not in _NO_META and not (variant == "inplace_variant" and name in _DRAWS)
        ]
    calls = [call for name in names if runs_alone(call := Call(name, variant, which, dim))]
    assert len(calls) > 100  # of 600
    found = [text for i in range(0, len(calls), AT_ONCE) for text in wrong(calls[i : i + AT_ONCE], plan, workers)]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        ("tp=2", ["linalg.solve", "scatter_reduce.amax", "nn.functional.conv_transpose1d", "index_put"]),
        pytest.param("pp=2", ["cumprod", "diff", "logcumsumexp"], marks=pytest.mark.proof),
    ],
    ids=["tp=2", "pp=2"],
)
def test_some_functions_are_those_of_one_device(plan: str, names: list[str], workers: LocalWorkers) -> None:
    calls = [call for name in names if runs_alone(call := Call(name, "op", 1, 1))]
    assert len(calls) == len(names)
    assert not list(wrong(calls, plan, workers))
