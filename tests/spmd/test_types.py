"""What a rule takes apart keeps the type and the exactness of the whole function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.layout import Shard, even_shard
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.workers.pool import LocalWorkers

LABELS = torch.tensor([1, 0, 5, 3])
ONES = torch.ones(6)


def logits(dtype: torch.dtype = torch.float32) -> Tensor:
    """Of which some are far below the largest: their probabilities show in what type they were made."""
    return (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)


def mean_loss(x: Tensor) -> Tensor:
    return functional.cross_entropy(x.expand(6000, 6), LABELS.repeat(1500))


# name: (the input, its sharded dim, the function, the type of autocast)
CASES: dict[str, tuple[Tensor, int, Callable[[Tensor], Any], torch.dtype | None]] = {
    "mean of float16": (torch.full((2, 1000), 200.0).half(), 1, lambda x: x.mean(), None),
    "mean of float16 over one dim": (torch.full((2, 1000), 200.0).half(), 1, lambda x: x.mean(1, True), None),
    "mean as float16": (torch.full((2, 1000), 200.0), 1, lambda x: x.mean(dtype=torch.float16), None),
    "sum of bfloat16": (torch.tensor([[1000.0, 3, -1000, 1]]).bfloat16(), 1, lambda x: x.sum(1), None),
    "cross entropy of float16, rows cut": (torch.full((6000, 2), -50.0).half(), 0, lambda x: functional.cross_entropy(
        x * torch.tensor([1, -1]).half(), torch.zeros(6000, dtype=torch.long)), None),
    "cross entropy of bfloat16": (logits(torch.bfloat16), 1, lambda x: functional.cross_entropy(x, LABELS), None),
    "cross entropy under autocast": (logits(torch.bfloat16), 1, lambda x: functional.cross_entropy(x, LABELS), torch.bfloat16),
    "cross entropy of rows under autocast": (
        logits(torch.bfloat16), 0, lambda x: functional.cross_entropy(x, LABELS), torch.bfloat16
    ),
    "softmax of bfloat16": (logits(torch.bfloat16), 1, lambda x: x.softmax(1), None),
    "softmax under autocast": (logits(torch.bfloat16), 1, lambda x: x.softmax(1), torch.bfloat16),
    "softmax of float32 under autocast": (logits(), 1, lambda x: functional.softmax(x, 1), torch.bfloat16),
    "log softmax under autocast": (logits(), 1, lambda x: functional.log_softmax(x, 1), torch.bfloat16),
    "log softmax of float16": (logits(torch.float16), 1, lambda x: functional.log_softmax(x, 1), None),
    "softmax as float32": (logits(torch.bfloat16), 1, lambda x: functional.softmax(x, 1, dtype=torch.float32), None),
    "softmax as bfloat16": (logits(), 1, lambda x: functional.softmax(x, 1, dtype=torch.bfloat16), None),
    "dot and mv under autocast": (logits(), 1, lambda x: (torch.mv(x, ONES), torch.dot(x[0], ONES)), torch.bfloat16),
    "addmm under autocast": (logits(), 1, lambda x: torch.addmm(x, x, torch.eye(6), beta=0.5, alpha=2), torch.bfloat16),
    "einsum over one element a rank under autocast": (
        logits()[:, :2], 1, lambda x: torch.einsum("ab,cb->ac", x, x), torch.bfloat16
    ),
    "attention with dropout under autocast": (
        torch.stack([logits()] * 2), 0, lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=1e-12), torch.bfloat16
    ),
    "cat with an empty tensor": (logits(torch.bfloat16), 0, lambda x: torch.cat([torch.empty(0), x]), None),
}  # fmt: skip


def results() -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """For each case: of the cut input, of the input on one device, of its values in float64."""
    found = {}
    for name, (x, dim, function, autocast) in CASES.items():
        ledger = Ledger()
        dispatcher = Dispatcher(Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, ledger), ledger)
        layout: Shard = even_shard(dim, x.shape[dim], dispatcher.axis.size)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            with SpmdMode(dispatcher, lambda p: None).on():
                ours = [
                    dispatcher.full_tensor(y)
                    for y in _each(function(dispatcher.global_tensor(layout.take(x, dispatcher.axis.rank), layout)))
                ]
            theirs = _each(function(x))
        found[name] = (ours, theirs, [y.double() for y in theirs] if autocast else _exact(function, x))
    return found


def _each(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _exact(function: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    if x.dtype == torch.float32:  # with dtype=: rounded at the end
        return [y.double() for y in _each(function(x))]
    return [y.double() for y in _each(function(x.double()))] if _takes_double(function) else []


def _takes_double(function: Callable[[Tensor], Any]) -> bool:
    try:
        function(torch.ones(2, 2, dtype=torch.float64))
    except Exception:
        return False
    return True


def test_types_are_those_of_one_device_and_values_are_rounded_once(workers: LocalWorkers) -> None:
    for name, (ours, theirs, exact) in workers.run(results, ranks=2)[0].items():
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype, f"{name}: {a.dtype}, not {b.dtype}"
            assert a.isfinite().all(), f"{name}: {a}"
        for a, b in zip(ours, exact, strict=True) if exact else ():
            # Relative to each value: a small probability made of a rounded logarithm is far off.
            step = 2 * torch.finfo(a.dtype).eps
            torch.testing.assert_close(
                a.double(), b, rtol=step, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
