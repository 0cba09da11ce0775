"""Facts of two sides → errors, each against the scale of the whole, and what a pattern of errors tells.

    loss         max over steps   |l − l'| / max(1, |l'|)
    gradients    max|g − g'| / max over all parameters of |g'|         some are zero but for rounding
    parameters   max|p − p'| / max over all parameters of |p' − start|
    buffers      max|b − b'| / max(1, max|b'|)                         after every step, of every rank, the worst

A value that is not a number, or is missing on one side, is an error without bound. Another ``Measure`` weighs a tensor's
error otherwise: that of half types does, in which these scales would leave a small gradient unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, TypedDict

import torch
from torch import Tensor

from meshwright.parity.facts import Facts
from meshwright.parity.one_device import Reference
from meshwright.parity.the_job import Outcome


class Errors(TypedDict):
    """Each error, for parameters and buffers by name."""

    loss: float
    gradients: dict[str, float]
    parameters: dict[str, float]
    buffers: dict[str, float]


Kind = Literal["gradients", "parameters", "buffers"]
KINDS: tuple[Kind, ...] = ("gradients", "parameters", "buffers")
Measure = Callable[
    [Tensor, Tensor, float], float
]  # the difference, the value on one device, the scale of its kind → an error


def largest(difference: Tensor, expected: Tensor, scale: float) -> float:
    """The error of the worst element, against the scale of all tensors of a kind."""
    return size([difference]) / scale


@dataclass(frozen=True)
class Findings:
    """All errors, words for those that a number does not tell (by kind and name), and likely causes."""

    errors: Errors
    words: dict[tuple[str, str], str]
    hints: tuple[str, ...]


def compare(reference: Reference, outcome: Outcome, tolerance: float) -> Findings:
    """What differs between one device and the job."""
    errors, words = errors_of(reference, outcome)
    return Findings(errors, words, tuple(_hints(errors, reference, outcome, tolerance)))


def errors_of(
    reference: Reference, outcome: Outcome, measure: Measure = largest
) -> tuple[Errors, dict[tuple[str, str], str]]:
    """The errors of a job, buffers of every rank among them, and words for what a number does not tell."""
    errors, words = differences(reference.start, reference.facts, outcome.facts, measure)
    for rank, actual in sorted(outcome.buffers.items()):
        expected = {n: b for n, b in reference.facts.buffers[-1].items() if n in actual}
        _worse(f"on rank {rank}", actual, expected, errors["buffers"], words, measure)
    return errors, words


def differences(
    start: Mapping[str, Tensor], one: Facts, job: Facts, measure: Measure = largest
) -> tuple[Errors, dict[tuple[str, str], str]]:
    """The errors of one side's facts against another's, and words for what a number does not tell.

    Args:
        start: parameters before the first step.
    """
    moved, expected_moves = _moves(job.parameters, start), _moves(one.parameters, start)
    words: dict[tuple[str, str], str] = {}
    gradients, moves = size(one.gradients.values()) or 1.0, size(expected_moves.values()) or 1.0
    errors = Errors(
        loss=max(_loss_error(a, b) for a, b in zip(job.losses, one.losses, strict=True)),
        gradients=_errors("gradients", job.gradients, one.gradients, gradients, words, measure),
        parameters=_errors("parameters", moved, expected_moves, moves, words, measure),
        buffers=_errors("buffers", job.buffers[0], one.buffers[0], None, words, measure),
    )
    for step, (actual, expected) in enumerate(zip(job.buffers[1:], one.buffers[1:], strict=True), 2):
        _worse(f"after step {step}", actual, expected, errors["buffers"], words, measure)
    if (names := list(job.buffers[-1])) != list(one.buffers[-1]) and names:
        errors["buffers"][names[0]] = inf
        words["buffers", names[0]] = f"in another order: {', '.join(names[:8])}"
    return errors, words


def _moves(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far parameters were moved; one of another shape than before as it is."""
    before = {name: start.get(name) for name in parameters}
    return {
        name: p if (b := before[name]) is None or b.shape != p.shape else _wide(p) - _wide(b)
        for name, p in parameters.items()
    }


def _loss_error(loss: float, expected: float) -> float:
    error = abs(loss - expected) / max(1.0, abs(expected))
    return error if isfinite(error) else inf


def _errors(
    kind: str,
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    scale: float | None,
    words: dict[tuple[str, str], str],
    measure: Measure,
) -> dict[str, float]:
    """``scale``: None takes each tensor's own."""
    errors = {}
    for name in [*expected, *(n for n in actual if n not in expected)]:
        a, b = actual.get(name), expected.get(name)
        if scale is None and a is not None and b is not None and a.shape == b.shape:
            same = a == b  # a buffer may well hold infinities: a mask does
            a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
        errors[name] = _error(a, b, scale if scale is not None else max(1.0, size([b])), measure)
        if said := _words(a, b):
            words[kind, name] = said
    return errors


def _worse(
    when: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    errors: dict[str, float],
    words: dict[tuple[str, str], str],
    measure: Measure,
) -> None:
    """Puts in errors of buffers that are above those known before, and says of which rank or step they are."""
    said: dict[tuple[str, str], str] = {}
    for name, error in _errors("buffers", actual, expected, None, said, measure).items():
        if not error <= errors.get(name, 0.0):
            errors[name] = error
            words["buffers", name] = ", ".join(filter(None, [when, said.get(("buffers", name))]))


def _error(actual: Tensor | None, expected: Tensor | None, scale: float, measure: Measure) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else inf
    if actual.shape != expected.shape:
        return inf
    error = measure(_wide(actual) - _wide(expected), _wide(expected), scale)
    return error if isfinite(error) else inf


def _words(actual: Tensor | None, expected: Tensor | None) -> str:
    if actual is None or expected is None:
        side = "job" if actual is None else "reference"
        return "" if actual is expected else f"none in the {side}, and one in the other"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, on one device {tuple(expected.shape)}"
    bad = [where for where, t in (("the job", actual), ("one device", expected)) if not _wide(t).isfinite().all()]
    return f"not finite on {' and '.join(bad)}" if bad else ""


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def size(tensors: Iterable[Tensor | None]) -> float:
    """The largest absolute value; not a number where there is one."""
    sizes = [_wide(t).abs().max() for t in tensors if t is not None and t.numel()]
    return torch.stack(sizes).max().item() if sizes else 0.0


# --- likely causes --------------------------------------------------------------------------------------------------


def _hints(errors: Errors, reference: Reference, outcome: Outcome, tolerance: float) -> list[str]:
    mesh, one, hints = outcome.recipe.mesh, reference.facts, []
    if reference.draws and not errors["loss"] <= tolerance and (said := _of_draws(reference, outcome)):
        return [said]
    first = not _loss_error(outcome.facts.losses[0], one.losses[0]) <= tolerance
    wrong = [name for name, error in errors["gradients"].items() if not error <= tolerance]
    if wrong:
        hints.append(_gradient_hint(wrong, one, outcome, tolerance, loss_is_right=not first))
    elif not first and any(not error <= tolerance for error in errors["parameters"].values()):
        hints.append(
            "the first backward's gradients are right, the update is not: gradients of two backwards that add up otherwise, "
            "clipping by another norm, a later step's forward, or the optimizer's state"
        )
    if first and mesh.data_size > 1:
        hints.append(
            f"the loss differs under {mesh.data_size} data ranks: a mean over rows or labels divided unevenly, "
            "or a model that couples the rows of a batch (BatchNorm, losses over pairs of rows)"
        )
    if any(not error <= tolerance for error in errors["buffers"].values()):
        hints.append("buffers differ: the forward changes them from this rank's part of the batch, not from all of it")
    return [hint for hint in hints if hint]


def _of_draws(reference: Reference, outcome: Outcome) -> str:
    """What keeps the two sides from drawing the same numbers, if something does."""
    mesh, recipe = outcome.recipe.mesh, outcome.recipe
    draws = "; ".join(reference.draws[:3]) + f" and {len(reference.draws) - 3} more" * (len(reference.draws) > 3)
    if mesh.data_size * recipe.microbatches > 1:
        return (
            f"the model draws random numbers in its forward ({draws}), for the rows it sees: with data ranks or microbatches "
            "they are others than on one device. To compare, make them a part of the batch"
        )
    if mesh.axis_size("pp") > 1 or recipe.branches:
        return (
            f"the model draws random numbers in its forward ({draws}): stages and branches draw from streams of their own, so "
            "these are others than on one device, and the two cannot be compared. To compare, draw them from a torch.Generator "
            "that the model holds, from which stages and branches draw what one device draws"
        )
    return ""


def _gradient_hint(wrong: list[str], one: Facts, outcome: Outcome, tolerance: float, *, loss_is_right: bool) -> str:
    mesh, gradients = outcome.recipe.mesh, outcome.facts.gradients
    if any((gradients.get(name) is None) != (one.gradients.get(name) is None) for name in wrong):
        return "a gradient is there on one side only: ranks that disagree on what was used, or a part that is cut off"
    pairs = [(name, gradients.get(name), one.gradients.get(name)) for name in one.gradients]
    together = _factor([(a, b) for _, a, b in pairs], tolerance)
    if together is not None:
        also = "" if loss_is_right else ", the loss too" if _loss_follows(together, one, outcome) else ""
        return (
            f"every gradient is scaled by {together:.6g}{also}: a mean taken twice or not at all "
            f"({mesh.data_size} data ranks, {outcome.recipe.microbatches} microbatches, tp={mesh.axis_size('tp')})"
        )
    factors = {name: _factor([(a, b)], tolerance) for name, a, b in pairs if name in wrong}
    known = {f"{k:.6g}" for k in factors.values() if k is not None}
    if len(known) == 1 and None not in factors.values():
        return (
            f"the gradients that differ are scaled by {known.pop()}, the rest is right: a sum taken twice or left out"
        )
    if loss_is_right:
        return (
            "the loss is right and gradients are not: a whole value used in sharded work, its gradient not summed, say"
        )
    return ""


def _factor(pairs: list[tuple[Tensor | None, Tensor | None]], tolerance: float) -> float | None:
    """k, by least squares, where actual = k · expected for all pairs and k is not one."""
    both = [(_wide(a).flatten(), _wide(b).flatten()) for a, b in pairs if a is not None and b is not None]
    if not both or any(a.shape != b.shape or a.is_complex() for a, b in both):
        return None
    actual, expected = (torch.cat(side) for side in zip(*both, strict=True))
    square = expected.dot(expected).item()
    if not square or not isfinite(square):
        return None
    k = actual.dot(expected).item() / square
    off = (actual - k * expected).abs().max() / expected.abs().max()
    return k if off <= 10 * tolerance * max(1.0, abs(k)) and abs(k - 1) > tolerance else None


def _loss_follows(k: float, one: Facts, outcome: Outcome) -> bool:
    return abs(outcome.facts.losses[0] - k * one.losses[0]) <= 1e-6 * max(1.0, abs(k * one.losses[0]))
