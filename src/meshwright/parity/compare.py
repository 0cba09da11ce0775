"""Compares the facts of two sides: an error for each tensor, and likely causes of the pattern of errors.

    loss         max over forwards   |l − l'| / max(1, |l'|)
    gradients    max|g − g'| / max over all parameters of |g'|         since some gradients are zero but for rounding
    parameters   max|p − p'| / max over all parameters of |p' − start|
    buffers      max|b − b'| / max(1, max|b'|)                         the worst of all steps and ranks

Values with a prime are the reference's. The error is inf if a value is nan, or if only one side has the tensor. In half types
another ``Measure`` is used (``precision``): a wrong gradient that is much smaller than others would be missed on these scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, TypedDict

import torch
from torch import Tensor

from meshwright.parity.facts import Facts
from meshwright.parity.job import Outcome
from meshwright.parity.one_device import Reference


class Errors(TypedDict):
    """The error of the loss, and of each tensor by name."""

    loss: float
    gradients: dict[str, float]
    parameters: dict[str, float]
    buffers: dict[str, float]


_SHOWN = 8  # most buffers that are named in an error
_SHOWN_DRAWS = 3  # most random functions that are named in a hint
_FACTOR_SLACK = 10  # tolerances by which a gradient may miss a common factor: the factor itself has a rounding error
_LOSS_SLACK = 1e-6  # relative: a hint only says that the loss is scaled, so its rounding does not matter

Kind = Literal["gradients", "parameters", "buffers"]
KINDS: tuple[Kind, ...] = ("gradients", "parameters", "buffers")
Measure = Callable[[Tensor, Tensor, float], float]
"""(difference, expected value, scale of all tensors of the kind) → error of a tensor."""


def relative_difference(difference: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference of an element, relative to the scale of all tensors of the kind."""
    return largest_value([difference]) / scale


@dataclass(frozen=True)
class Findings:
    """The result of a comparison.

    Attributes:
        errors: of all tensors.
        words: (kind, name) → text, for errors that a number does not describe, such as another shape.
        hints: likely causes.
    """

    errors: Errors
    words: dict[tuple[str, str], str]
    hints: tuple[str, ...]


def compare(reference: Reference, outcome: Outcome, tolerance: float) -> Findings:
    """Compares the job's outcome with the reference."""
    errors, words = errors_of(reference, outcome)
    return Findings(errors, words, tuple(_hints(errors, reference, outcome, tolerance)))


def errors_of(
    reference: Reference, outcome: Outcome, measure: Measure = relative_difference
) -> tuple[Errors, dict[tuple[str, str], str]]:
    """The errors of a job, including buffers of every rank, and words as in ``Findings``."""
    errors, words = differences(reference.start, reference.facts, outcome.facts, measure)
    for rank, actual in sorted(outcome.buffers.items()):
        expected = {n: b for n, b in reference.facts.buffers[-1].items() if n in actual}
        _add_larger(f"on rank {rank}", actual, expected, errors["buffers"], words, measure)
    return errors, words


def differences(
    start: Mapping[str, Tensor], one: Facts, job: Facts, measure: Measure = relative_difference
) -> tuple[Errors, dict[tuple[str, str], str]]:
    """The errors of a job's facts relative to those of one device, and words as in ``Findings``.

    Args:
        start: parameters before the first step.
    """
    updates, expected_updates = _updates(job.parameters, start), _updates(one.parameters, start)
    words: dict[tuple[str, str], str] = {}
    gradient_scale, update_scale = (
        largest_value(one.gradients.values()) or 1.0,
        largest_value(expected_updates.values()) or 1.0,
    )
    errors = Errors(
        loss=max(_loss_error(a, b) for a, b in zip(job.losses, one.losses, strict=True)),
        gradients=_errors("gradients", job.gradients, one.gradients, gradient_scale, words, measure),
        parameters=_errors("parameters", updates, expected_updates, update_scale, words, measure),
        buffers=_errors("buffers", job.buffers[0], one.buffers[0], None, words, measure),
    )
    for step, (actual, expected) in enumerate(zip(job.buffers[1:], one.buffers[1:], strict=True), 2):
        _add_larger(f"after step {step}", actual, expected, errors["buffers"], words, measure)
    if (names := list(job.buffers[-1])) != list(one.buffers[-1]) and names:
        errors["buffers"][names[0]] = inf
        words["buffers", names[0]] = f"in another order: {', '.join(names[:_SHOWN])}"
    return errors, words


def combined(combine: Callable[..., float], *errors: Errors) -> Errors:
    """For each tensor, ``combine`` of its error in each of ``errors``. A tensor that is absent in one has the error inf."""
    first = errors[0]

    def of_kind(kind: Kind) -> dict[str, float]:
        return {name: combine(*(e[kind].get(name, inf) for e in errors)) for name in first[kind]}

    return Errors(
        loss=combine(*(e["loss"] for e in errors)),
        gradients=of_kind("gradients"), parameters=of_kind("parameters"), buffers=of_kind("buffers"),
    )  # fmt: skip


def _updates(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The change of each parameter since the start; for one that is new or has another shape, its value."""
    updates = {}
    for name, parameter in parameters.items():
        before = start.get(name)
        if before is None or before.shape != parameter.shape:
            updates[name] = parameter
        else:
            updates[name] = _wide(parameter) - _wide(before)
    return updates


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
    """The error of each tensor of a kind. Adds to ``words``.

    Args:
        scale: of all tensors of the kind. None: each tensor is compared on its own scale, and at least 1.
    """
    errors = {}
    for name in [*expected, *(n for n in actual if n not in expected)]:
        a, b = actual.get(name), expected.get(name)
        if scale is None and a is not None and b is not None and a.shape == b.shape:
            # Equal infinities are no error (a buffer may be an attention mask), nor nan on both sides (what is missing in a
            # table): if it came from the computation, the loss or a gradient is nan, too.
            equal = (a == b) | (a.isnan() & b.isnan())
            a, b = a.masked_fill(equal, 0), b.masked_fill(equal, 0)
        errors[name] = _error(a, b, scale if scale is not None else max(1.0, largest_value([b])), measure)
        if text := _words(a, b):
            words[kind, name] = text
    return errors


def _add_larger(
    when: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    errors: dict[str, float],
    words: dict[tuple[str, str], str],
    measure: Measure,
) -> None:
    """Compares buffers of another rank or step, and keeps the errors that are larger than those in ``errors``.

    Args:
        when: the rank or step, as text.
        errors, words: of buffers so far; changed.
    """
    new_words: dict[tuple[str, str], str] = {}
    for name, error in _errors("buffers", actual, expected, None, new_words, measure).items():
        if not error <= errors.get(name, 0.0):
            errors[name] = error
            words["buffers", name] = ", ".join(filter(None, [when, new_words.get(("buffers", name))]))


def _error(actual: Tensor | None, expected: Tensor | None, scale: float, measure: Measure) -> float:
    """The error of one tensor: 0 if both sides lack it, inf if one does, the shapes differ, or the result is not finite."""
    if actual is None or expected is None:
        return 0.0 if actual is expected else inf
    if actual.shape != expected.shape:
        return inf
    error = measure(_wide(actual) - _wide(expected), _wide(expected), scale)
    return error if isfinite(error) else inf


def _words(actual: Tensor | None, expected: Tensor | None) -> str:
    """A description of an error that a number does not describe; empty if there is none."""
    if actual is None or expected is None:
        side = "job" if actual is None else "reference"
        return "" if actual is expected else f"none in the {side}, and one in the other"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, on one device {tuple(expected.shape)}"
    sides = [side for side, t in (("the job", actual), ("one device", expected)) if not _wide(t).isfinite().all()]
    return f"not finite on {' and '.join(sides)}" if sides else ""


def _wide(t: Tensor) -> Tensor:
    """The tensor in float64 or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def largest_value(tensors: Iterable[Tensor | None]) -> float:
    """The largest absolute value of all elements; nan if one is nan, 0 if there are none."""
    sizes = [_wide(t).abs().max() for t in tensors if t is not None and t.numel()]
    return torch.stack(sizes).max().item() if sizes else 0.0


# --- likely causes --------------------------------------------------------------------------------------------------


def _hints(errors: Errors, reference: Reference, outcome: Outcome, tolerance: float) -> list[str]:
    """Likely causes of the errors above the tolerance, as sentences."""
    mesh, one, hints = outcome.recipe.mesh, reference.facts, []
    if reference.draws and not errors["loss"] <= tolerance and (hint := _draws_hint(reference, outcome)):
        return [hint]
    loss_is_right = _loss_error(outcome.facts.losses[0], one.losses[0]) <= tolerance
    wrong = [name for name, error in errors["gradients"].items() if not error <= tolerance]
    if wrong:
        hints.append(_gradient_hint(wrong, one, outcome, tolerance, loss_is_right=loss_is_right))
    elif loss_is_right and any(not error <= tolerance for error in errors["parameters"].values()):
        hints.append(
            "the first backward's gradients are right, the update is not: gradients of two backwards that add up otherwise, "
            "clipping by another norm, a later step's forward, or the optimizer's state"
        )
    if not loss_is_right and mesh.data_size > 1:
        hints.append(
            f"the loss differs under {mesh.data_size} data ranks: a mean over rows or labels divided unevenly, "
            "or a model that couples the rows of a batch (BatchNorm, losses over pairs of rows)"
        )
    if any(not error <= tolerance for error in errors["buffers"].values()):
        hints.append("buffers differ: the forward changes them from this rank's part of the batch, not from all of it")
    return [hint for hint in hints if hint]


def _draws_hint(reference: Reference, outcome: Outcome) -> str:
    """Why the job draws other random numbers than one device; empty if its layout gives no reason."""
    mesh, recipe = outcome.recipe.mesh, outcome.recipe
    more = len(reference.draws) - _SHOWN_DRAWS
    draws = "; ".join(reference.draws[:_SHOWN_DRAWS]) + (f" and {more} more" if more > 0 else "")
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
    """A likely cause of wrong gradients: one factor for all, one factor for those that are wrong, or a missing sum."""
    mesh, gradients = outcome.recipe.mesh, outcome.facts.gradients
    if any((gradients.get(name) is None) != (one.gradients.get(name) is None) for name in wrong):
        return "a gradient is there on one side only: ranks that disagree on what was used, or a part that is cut off"
    pairs = [(name, gradients.get(name), one.gradients.get(name)) for name in one.gradients]
    common_factor = _factor([(a, b) for _, a, b in pairs], tolerance)
    if common_factor is not None:
        loss_too = not loss_is_right and _loss_is_scaled(common_factor, one, outcome)
        also = ", the loss too" if loss_too else ""
        return (
            f"every gradient is scaled by {common_factor:.6g}{also}: a mean taken twice or not at all "
            f"({mesh.data_size} data ranks, {outcome.recipe.microbatches} microbatches, tp={mesh.axis_size('tp')})"
        )
    factors = {name: _factor([(a, b)], tolerance) for name, a, b in pairs if name in wrong}
    distinct = {f"{k:.6g}" for k in factors.values() if k is not None}
    if len(distinct) == 1 and None not in factors.values():
        return f"the gradients that differ are scaled by {distinct.pop()}, the rest is right: a sum taken twice or left out"
    if loss_is_right:
        return (
            "the loss is right and gradients are not: perhaps a replicated value is used in sharded work, and its gradient is "
            "not summed over ranks"
        )
    return ""


def _factor(pairs: list[tuple[Tensor | None, Tensor | None]], tolerance: float) -> float | None:
    """The factor k with actual = k · expected for all (actual, expected) pairs; None if there is none, or if it is 1.

    k is found by least squares. It holds if no element is off by more than ``_FACTOR_SLACK`` tolerances.
    """
    both = [(_wide(a).flatten(), _wide(b).flatten()) for a, b in pairs if a is not None and b is not None]
    if not both or any(a.shape != b.shape or a.is_complex() for a, b in both):
        return None
    actual, expected = (torch.cat(side) for side in zip(*both, strict=True))
    square = expected.dot(expected).item()
    if not square or not isfinite(square):
        return None
    k = actual.dot(expected).item() / square
    off = (actual - k * expected).abs().max() / expected.abs().max()
    return k if off <= _FACTOR_SLACK * tolerance * max(1.0, abs(k)) and abs(k - 1) > tolerance else None


def _loss_is_scaled(k: float, one: Facts, outcome: Outcome) -> bool:
    """Whether the first loss of the job is k times that of one device."""
    return abs(outcome.facts.losses[0] - k * one.losses[0]) <= _LOSS_SLACK * max(1.0, abs(k * one.losses[0]))
