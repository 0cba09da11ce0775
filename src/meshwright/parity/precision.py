"""A check in the plan's own precision: compares the job with one device that computes in the same types.

    reference    parameters in float32; forward and backward in the precision of the plan. For a half type, they use a copy of
                 the parameters in that type, and gradients are accumulated in float32: as FSDP2 does on one rank
    noise        the same steps, repeated with weights that are moved by less than the type resolves. The move changes how
                 values are rounded. So the difference to the reference is the size of an error that rounding alone causes.
                 Repeats share what one device always rounds in the same way, as a long sum in one order (layer norm on a CPU
                 adds up the gradient of a bias in bfloat16), or the norm of all gradients: so the difference to the same steps
                 in float64 counts, too

A layout adds in another order than one device, so rounding changes its values, too. Errors of the job are therefore given in
units of the noise, for each tensor, and may be up to ``MARGIN``. The error of a tensor compares typical elements:

    rms(difference) / (rms(expected) + eps · largest element of all tensors of its kind)

A wrong gradient is thus found even if it is much smaller than others. A tensor that is off is compared again, from other
starting values (``other_values``): it is wrong if it is off there, too. This check finds mistakes that occur in these
types only (a sum that overflows, a loss or a gradient in the wrong type, a type error); the check in float64 is the sharp one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.code_state import code_state_kept
from meshwright.parity.case import Case
from meshwright.parity.compare import Errors, Findings, Measure, combined, differences, errors_of
from meshwright.parity.job import Outcome
from meshwright.parity.one_device import Reference, model_of, prepare_generators, train
from meshwright.parity.preparation import perturbed
from meshwright.parity.widening import widened
from meshwright.private import replace_tensors
from meshwright.runtime.rows.batch import mapped
from meshwright.runtime.rows.microbatches import call_model

MARGIN = 5.0  # largest error in units of the noise, which is the maximum of few repeats and so varies by a small factor
_MOVE = 1 / 4  # units in the last place by which starting weights move: as much as rounding them once, on average
_REPEATS = 3  # of the reference: more would take longer, and hardly change the maximum
HINT = (
    "the job is right in float64: a value that has another type than on one device, or a sum that is rounded too early"
)


def reference_in_precision(case: Case, precision: str) -> tuple[Reference, Errors]:
    """The reference in this precision, and its noise: the largest relative error of several repeats, for each tensor."""
    case = replace(case, dtype=torch.float32)
    dtype = getattr(torch, precision)
    one = _one_device(case, dtype, 0)
    repeats = [_one_device(case, dtype, repeat).facts for repeat in range(1, _REPEATS + 1)]
    if (precise := _in_float64(case)) is not None:
        repeats.append(precise.facts)
    next_parameters = {name: _with_next_bits(p) for name, p in one.facts.parameters.items()}
    repeats.append(replace(one.facts, parameters=next_parameters))  # an update may always differ by its last bit
    errors = [differences(one.start, one.facts, facts, _typical(dtype))[0] for facts in repeats]
    return one, combined(lambda *values: max(*values, torch.finfo(dtype).eps), *errors)


def _in_float64(case: Case) -> Reference | None:
    """The same steps in float64, with the norm that clips and the updates; None if the model does not run in it."""
    try:
        return _one_device(replace(case, dtype=torch.float64), torch.float64, 0)
    except Exception:  # a model may put float32 where only its parameters are float64; it may raise anything
        return None


def findings_in_precision(one: Reference, noise: Errors, outcome: Outcome, precision: str) -> Findings:
    """The errors of a job in this precision, in units of the noise.

    The error is 0 for a tensor whose noise is not finite: its values are not finite on one device, or only some repeats
    have it. Nothing can be said of such a tensor.
    """
    errors, words = errors_of(one, outcome, _typical(getattr(torch, precision)))
    in_units = combined(lambda error, unit: error / unit if isfinite(unit) else 0.0, errors, noise)
    return Findings(in_units, words, (HINT,))


def other_values(one: Reference) -> dict[str, Tensor]:
    """Starting values beside those of a reference.

    Where a value lies beside a kink (0 for relu), rounding decides which slope it gets, and a gradient changes by far more than
    rounding. Few repeats of a reference may all miss such a value, which the job then meets. From other starting values, other
    elements lie beside kinks; a mistake is there again.
    """
    return {name: perturbed(name, p) for name, p in one.start.items()}


def smaller(first: Findings, second: Findings) -> Findings:
    """For each tensor the smaller error of two comparisons."""
    return replace(first, errors=combined(min, first.errors, second.errors))


def _with_next_bits(p: Tensor) -> Tensor:
    """A parameter with each value changed by about one unit in the last place."""
    return p * (1 + torch.finfo(p.dtype).eps) if p.is_floating_point() or p.is_complex() else p


def _typical(dtype: torch.dtype) -> Measure:
    """Measures the root mean square of a difference, relative to that of the expected tensor."""
    eps = torch.finfo(dtype).eps

    def measure(difference: Tensor, expected: Tensor, scale: float) -> float:
        return _rms(difference) / (_rms(expected) + eps * scale)

    return measure


def _rms(x: Tensor) -> float:
    """The root mean square of the elements; 0 for an empty tensor."""
    return x.abs().square().mean().sqrt().item() if x.numel() else 0.0


def _one_device(case: Case, dtype: torch.dtype, repeat: int) -> Reference:
    """Trains with parameters in float32, and forward and backward in ``dtype``. ``repeat``: 0, or the seed of a small move."""
    with code_state_kept(case.build):
        return _trained(case, dtype, repeat)


def _trained(case: Case, dtype: torch.dtype, repeat: int) -> Reference:
    model, low = model_of(case), model_of(case)
    start = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    moves = [1 + torch.finfo(dtype).eps * _MOVE * _noise(p, repeat) for p in model.parameters() if p.requires_grad]
    replace_tensors(low, lambda t: t.to(dtype) if isinstance(t, nn.Parameter) and t.is_floating_point() else t)
    every = [*zip(model.parameters(), low.parameters(), strict=True)]
    pairs = [(p, q) for p, q in every if p.requires_grad]
    batches = _batches(case, dtype)

    def step() -> Tensor:
        with torch.no_grad():
            for (p, q), move in zip(pairs, moves, strict=True):
                q.copy_(p.to(move.dtype) * move if repeat else p)
        before = [q.detach().clone() for _, q in every]
        with widened(dtype):
            loss = case.loss(call_model(low, next(batches)))
        with torch.no_grad():
            for (p, q), value in zip(every, before, strict=True):
                # The forward may have written to it, also through ``.data``: a momentum teacher, say.
                if not torch.equal(q, value):
                    p.copy_(q)
        if loss.requires_grad:
            loss.backward()
        for p, q in pairs:
            if q.grad is not None:
                gradient = q.grad.to(p.dtype)
                p.grad = gradient if p.grad is None else p.grad + gradient
                q.grad = None
        return loss.detach()

    prepare_generators(case, low)
    return Reference(case, train(model, low, case, step), start)


def _batches(case: Case, dtype: torch.dtype) -> Iterator[Any]:
    """The batches of a case in ``dtype``."""
    for batch in case.batches():
        yield mapped(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def _noise(p: Tensor, seed: int) -> Tensor:
    """Normal noise in float64: ``1 + eps / 4 · noise`` would be 1 in the type itself."""
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(p.device)
    return noise.to(torch.complex128) if p.is_complex() else noise
