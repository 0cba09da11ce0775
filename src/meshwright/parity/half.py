"""The plan's own types: a job in half precision, against one device that computes in the same types.

    one device    parameters in float32; forward and backward on a copy of them in the half type, with inputs in it;
                  gradients are added up in float32 (what FSDP2's mixed precision does on one rank)
    its noise     the same again, with weights moved by less than the half type resolves: other values are rounded, and
                  other ways. What that changes is what rounding in another order may change

A layout adds in another order than one device. So its errors may be as large as that noise, times ``MARGIN``. This judge sees
what goes wrong in half types alone (a sum that overflows, a loss in the wrong type); float64 stays the sharp one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from meshwright.parity.case import Case
from meshwright.parity.compare import KINDS, differences
from meshwright.parity.sides import Reference, made, starting, trained
from meshwright.private import replace_tensors
from meshwright.runtime.rows.batch import mapped
from meshwright.runtime.rows.microbatches import called

HALF = ("bfloat16", "float16")
MARGIN = 8.0
_REPEATS = 2


def half_reference(case: Case, precision: str) -> tuple[Reference, float]:
    """One device's facts, computed in a half type, and the relative tolerance by which to judge a job in it."""
    case = replace(case, dtype=torch.float32)
    dtype = getattr(torch, precision)
    one = _one_device(case, dtype, 0)
    noise = 0.0
    for repeat in range(1, _REPEATS + 1):
        errors, _ = differences(one.start, one.facts, _one_device(case, dtype, repeat).facts)
        noise = max(noise, errors["loss"], *(e for kind in KINDS for e in errors[kind].values()))
    return one, MARGIN * max(noise, torch.finfo(dtype).eps)


def _one_device(case: Case, dtype: torch.dtype, repeat: int) -> Reference:
    model, low = made(case), made(case)
    start = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    moves = [1 + torch.finfo(dtype).eps / 4 * _noise(p, repeat) for p in model.parameters() if p.requires_grad]
    replace_tensors(low, lambda t: t.to(dtype) if isinstance(t, nn.Parameter) and t.is_floating_point() else t)
    pairs = [(p, q) for p, q in zip(model.parameters(), low.parameters(), strict=True) if p.requires_grad]
    batches = (mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, b) for b in case.batches())

    def step() -> Tensor:
        with torch.no_grad():
            for (p, q), move in zip(pairs, moves, strict=True):
                q.copy_(p * move if repeat else p)
        loss = case.loss(called(low, next(batches)))
        if loss.requires_grad:
            loss.backward()
        for p, q in pairs:
            if q.grad is not None:
                p.grad = q.grad.to(p.dtype) if p.grad is None else p.grad + q.grad
                q.grad = None
        return loss.detach()

    starting(case, low)
    return Reference(case, trained(model, low, case, step), start)


def _noise(p: Tensor, seed: int) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.device)
