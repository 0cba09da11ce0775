"""A plan's own types: a job in the precision that it trains in, against one device that computes in the same types.

    one device    parameters in float32; forward and backward in the precision of the plan. If that is a half type, on a copy of
                  them in it, with inputs in it, and gradients are added up in float32: as by FSDP2 on one rank
    its noise     the same again, with weights moved by less than the type resolves: other values are rounded, and
                  other ways. What that changes in a tensor is what rounding in another order may change in it

A layout adds in another order than one device. So its errors are told in units of that noise, tensor by tensor, and may be
``MARGIN`` of it. The error of a tensor is that of a typical element of it, against a typical element:

    rms(difference) / (rms(expected) + eps · the largest of its kind)

so that a wrong gradient is seen however small it is beside others. This judge sees what goes wrong in these types alone (a sum
that overflows, a loss or a gradient in the wrong type, an error of types); float64 stays the sharp one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite

import torch
from torch import Tensor, nn

from meshwright.parity.case import Case
from meshwright.parity.compare import Errors, Findings, Kind, Measure, differences, errors_of
from meshwright.parity.one_device import Reference, made, starting, trained
from meshwright.parity.the_job import Outcome
from meshwright.private import replace_tensors
from meshwright.runtime.rows.batch import mapped
from meshwright.runtime.rows.microbatches import called

MARGIN = 5.0
_REPEATS = 3
HINT = (
    "the job is right in float64: a value that has another type than on one device, or a sum that is rounded too early"
)


def own_reference(case: Case, precision: str) -> tuple[Reference, Errors]:
    """One device's facts, computed in this precision, and its noise: relative errors of repeating it."""
    case = replace(case, dtype=torch.float32)
    dtype = getattr(torch, precision)
    one = _one_device(case, dtype, 0)
    repeats = [_one_device(case, dtype, repeat).facts for repeat in range(1, _REPEATS + 1)]
    repeats.append(replace(one.facts, parameters={n: _next(p) for n, p in one.facts.parameters.items()}))
    found = [differences(one.start, one.facts, facts, _typical(dtype))[0] for facts in repeats]
    return one, _each(lambda *errors: max(*errors, torch.finfo(dtype).eps), *found)


def own_findings(one: Reference, noise: Errors, outcome: Outcome, precision: str) -> Findings:
    """What differs between one device and a job in this precision: errors are in units of the noise.

    Of a tensor that is not finite on one device, or there in some of its repeats alone, nothing can be said.
    """
    errors, words = errors_of(one, outcome, _typical(getattr(torch, precision)))
    told = _each(lambda error, unit: error / unit if isfinite(unit) else 0.0, errors, noise)
    return Findings(told, words, (HINT,))


def _next(p: Tensor) -> Tensor:
    """A parameter whose last bits are others: they are rounded whatever its gradients are."""
    return p * (1 + torch.finfo(p.dtype).eps) if p.is_floating_point() or p.is_complex() else p


def _typical(dtype: torch.dtype) -> Measure:
    """The error of a typical element of a tensor, against a typical element."""
    eps = torch.finfo(dtype).eps

    def measure(difference: Tensor, expected: Tensor, scale: float) -> float:
        return _rms(difference) / (_rms(expected) + eps * scale)

    return measure


def _rms(x: Tensor) -> float:
    """The root of the mean of squares of the elements."""
    return x.abs().square().mean().sqrt().item() if x.numel() else 0.0


def _each(what: Callable[..., float], *errors: Errors) -> Errors:
    """Errors that ``what`` makes of those of one tensor in each of ``errors``."""
    first = errors[0]

    def of(kind: Kind) -> dict[str, float]:
        return {name: what(*(e[kind].get(name, inf) for e in errors)) for name in first[kind]}

    return Errors(
        loss=what(*(e["loss"] for e in errors)),
        gradients=of("gradients"), parameters=of("parameters"), buffers=of("buffers"),
    )  # fmt: skip


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
                q.copy_(p.to(move.dtype) * move if repeat else p)
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
    """In float64: one plus less than float32 resolves is one in float32."""
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(p.device)
    return noise.to(torch.complex128) if p.is_complex() else noise
