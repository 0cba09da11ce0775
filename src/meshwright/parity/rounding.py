"""How much of a job's errors rounding alone explains, for a model that multiplies it.

    noise        the reference's steps, repeated from starting values that are moved by a few units in the last place: the
                 largest error of a repeat, for each tensor

Most models keep such a move small. Batch statistics of few values, or of values that are nearly equal, divide by almost
nothing, and a discrete choice (an argmax) may turn over: then one device's own results differ after three steps in the first
digits. A job adds up in another order, so its results do, too. The first gradients have a noise of their own, which is small
in most such models, so that they are still judged. What several steps have changed (parameters, buffers) has at least the
median noise of its kind: a few repeats may all miss a choice that turns over in the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from statistics import median

import torch
from torch import Tensor

from meshwright.parity.compare import KINDS, Errors, Findings, combined, differences
from meshwright.parity.one_device import Reference, repeated
from meshwright.spmd.one_process import one_process

MARGIN = 10.0  # times the noise that errors may have: it is the maximum of few repeats, and a job rounds more than once
_MOVE = 4  # units in the last place by which starting values move, on average
_REPEATS = 3


@one_process()
def rounding_noise(one: Reference) -> Errors:
    """For each tensor, the largest error of several repeats of a reference whose starting values are moved."""
    starts = ({name: _moved(p, repeat) for name, p in one.start.items()} for repeat in range(1, _REPEATS + 1))
    moved = [repeated(replace(one.case, start=start)) for start in starts]
    return combined(max, *(differences(one.start, one.facts, repeat.facts)[0] for repeat in moved))


def beyond_rounding(findings: Findings, noise: Errors) -> Findings:
    """The findings without the errors that are at most ``MARGIN`` times the noise: these are 0."""
    least = Errors(
        loss=noise["loss"], gradients=noise["gradients"],
        parameters=_at_least_median(noise["parameters"]), buffers=_at_least_median(noise["buffers"]),
    )  # fmt: skip
    return replace(findings, errors=combined(_beyond, findings.errors, least))


def largest_noise(noise: Errors) -> tuple[str, float]:
    """(kind and name of the tensor with the largest noise that is finite, the noise)."""
    named = [("loss", noise["loss"]), *((f"{kind} {n}", e) for kind in KINDS for n, e in noise[kind].items())]
    return max(((name, error) for name, error in named if isfinite(error)), key=lambda item: item[1], default=("", 0.0))


def _at_least_median(noise: Mapping[str, float]) -> dict[str, float]:
    finite = [error for error in noise.values() if isfinite(error)]
    return {name: max(error, median(finite)) for name, error in noise.items()} if finite else dict(noise)


def _beyond(error: float, noise: float) -> float:
    return 0.0 if isfinite(noise) and error <= MARGIN * noise else error


def _moved(p: Tensor, seed: int) -> Tensor:
    """A parameter with each value moved at random, by ``_MOVE`` units in the last place on average."""
    if not (p.is_floating_point() or p.is_complex()):
        return p
    noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (p * (1 + _MOVE * torch.finfo(p.dtype).eps * noise)).to(p.dtype)
