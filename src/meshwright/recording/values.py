"""Compares every weight, gradient and update of two recordings, one tensor at a time.

weights     before the first step: must be equal, except for a cast
gradients   as the optimizers got them
updates     parameters after a step minus those before it; only of parameters whose gradient is right
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.names import few, fold_names
from meshwright.recording.assembly import AssembledTensor, assemble
from meshwright.recording.folder import RankValue, RecordingFolder
from meshwright.recording.pairs import Pair
from meshwright.recording.pattern import Pattern, what_remains
from meshwright.recording.tolerance import FIT, Tolerance, in_float64, largest, tolerance_of
from meshwright.recording.verdict import Kind, TensorDifference

_EXACT = 1e-6  # relative tolerance of weights, which are copied, and at most cast
_UNSURE = 20.0  # tolerances: a smaller gradient may be all rounding, of which Adam, which divides by its size, makes any update
_LAST_BITS = 4  # units in the last place by which an update may differ: it is a difference of two rounded values


@dataclass
class KindComparison:
    """The result of comparing all tensors of one kind.

    Attributes:
        kind: what was compared.
        wrong: name → difference.
        total: number of compared tensors.
        notes: text → names.
        zeros: names of gradients that are zeros on the ranks, but absent in one process.
    """

    kind: Kind
    wrong: dict[str, TensorDifference] = field(default_factory=dict)
    total: int = 0
    notes: dict[str, list[str]] = field(default_factory=dict)
    zeros: set[str] = field(default_factory=set)

    def add(self, pair: Pair, name: str, result: AssembledTensor) -> None:
        self.total += 1
        if not result.pattern.same:
            self.wrong[name] = TensorDifference(self.kind, name, result.pattern, pair.layout(name))
        elif result.note:
            self.note(result.note, name)

    def note(self, text: str, name: str) -> None:
        self.notes.setdefault(text, []).append(name)


def judge_weights(pair: Pair) -> KindComparison:
    """Compares the parameters before the first step."""
    judged = KindComparison("weights")
    for name in pair.names:
        one, many = pair.seen("start", name)
        expected = _value(one)
        if expected is not None and many:
            judged.add(pair, name, assemble(many, expected, Tolerance(_EXACT, 0.0, FIT), pair.sizes))
    return judged


def judge_gradients(pair: Pair, step: int, relative: float | None) -> KindComparison:
    """Compares the gradients of a step. ``relative``: the tolerance that a person chose; default: by type."""
    judged, file = KindComparison("gradients"), f"gradients-{step}"
    tolerance = gradient_tolerance(pair, step, relative)
    for name in pair.trained():
        one, many = pair.seen(file, name)
        result = _gradient(pair, file, name, one, many, tolerance, judged)
        if step > 1 and not result.pattern.same:
            result = _with_step_before(pair, step, name, result, tolerance)
        judged.add(pair, name, result)
    return judged


def gradient_tolerance(pair: Pair, step: int, relative: float | None) -> Tolerance:
    """The tolerance for the gradients of a step, from their types and their largest element."""
    scale, dtypes = 0.0, set()
    for name in pair.trained():
        one, many = pair.seen(f"gradients-{step}", name)
        value = _value(one)
        if value is not None and value.numel():
            scale = max(scale, largest(in_float64(value).nan_to_num(0.0, 0.0, 0.0)))
            dtypes |= {str(s.value.dtype).removeprefix("torch.") for s in (*one, *many) if s.value is not None}
    return tolerance_of(dtypes, scale, relative)


def _gradient(
    pair: Pair,
    file: str,
    name: str,
    one: list[RankValue],
    many: list[RankValue],
    tolerance: Tolerance,
    judged: KindComparison,
) -> AssembledTensor:
    """Compares one gradient. An absent gradient equals one of zeros, with a note."""
    expected = _value(one)
    if expected is None:
        sizes = [largest(seen.value) for seen in many if seen.value is not None]
        if any(sizes):
            return AssembledTensor(Pattern("extra", float("inf")))
        if sizes:
            judged.note("zeros, but no gradient in one process", name)
            judged.zeros.add(name)
        return AssembledTensor(Pattern("same"))
    if all(seen.value is None for seen in many):
        if largest(expected):
            return AssembledTensor(Pattern("none", float("inf")))
        judged.note("no gradient, but zeros in one process", name)
        return AssembledTensor(Pattern("same"))
    return assemble(many, expected, tolerance, pair.sizes, _noise(pair.again, file, name, expected))


def _with_step_before(
    pair: Pair, step: int, name: str, result: AssembledTensor, tolerance: Tolerance
) -> AssembledTensor:
    """A wrong gradient, compared once more: is the gradient of the step before still in it?"""
    expected, before = (_value(pair.seen(f"gradients-{n}", name)[0]) for n in (step, step - 1))
    if expected is None or before is None or result.value is None or result.value.shape != expected.shape:
        return result
    return replace(
        result, pattern=what_remains(result.value, expected, before, tolerance, pair.sizes) or result.pattern
    )


def judge_updates(pair: Pair, step: int, gradients: KindComparison, relative: float | None) -> KindComparison:
    """Compares the updates of a step, for parameters whose gradients are right."""
    judged = KindComparison("updates")
    unsure = _UNSURE * gradient_tolerance(pair, step, relative).relative
    for name in pair.trained():
        if name in gradients.wrong:
            continue
        one, many = pair.seen(f"parameters-{step}", name)
        expected = _value(one)
        if expected is None:
            continue
        if not many:
            judged.total += 1
            judged.wrong[name] = TensorDifference(
                "updates", name, Pattern("not_stepped", float("inf")), pair.layout(name)
            )
            continue
        result = _update(pair, step, name, expected, many, unsure, relative)
        if name in gradients.zeros and not result.pattern.same:
            result = AssembledTensor(replace(result.pattern, kind="none_zeros"))
        judged.add(pair, name, result)
    return judged


def _update(
    pair: Pair, step: int, name: str, after: Tensor, many: list[RankValue], unsure: float, relative: float | None
) -> AssembledTensor:
    """Compares the update of one parameter. Elements whose gradient may be all rounding are taken to be right.

    Args:
        after: the parameter of one process, after the step.
        many: the parameter on the ranks, after the step.
        unsure: fraction of the largest gradient below which an element may be all rounding.
    """
    one_before, many_before = pair.seen(f"parameters-{step - 1}" if step > 1 else "start", name)
    before = _value(one_before)
    if before is None or not many_before:
        return AssembledTensor(Pattern("same"))
    expected = in_float64(after) - in_float64(before)
    gradient = _value(pair.one.views(f"gradients-{step}", name))
    is_rounding = torch.zeros_like(expected, dtype=torch.bool)
    if gradient is not None:
        is_rounding = in_float64(gradient).abs() <= unsure * largest(gradient)
    by_type = tolerance_of([str(after.dtype).removeprefix("torch.")], largest(expected), relative)
    last_bits = _LAST_BITS * torch.finfo(after.dtype).eps * largest(in_float64(after))
    tolerance = Tolerance(by_type.relative, by_type.floor + last_bits, by_type.fit)
    noise = _noise(pair.again, f"parameters-{step}", name, after)
    updates = [_masked(seen, expected, is_rounding) for seen in _updates(many, many_before)]
    result = assemble(updates, expected, tolerance, pair.sizes, noise)
    if result.pattern.same or result.value is None:
        return result
    full = _masked(
        RankValue((), result.value), expected, is_rounding
    )  # shards could not be masked before they were assembled
    return replace(assemble([full], expected, tolerance, pair.sizes, noise), note=result.note)


def _updates(after: Iterable[RankValue], before: Iterable[RankValue]) -> Iterator[RankValue]:
    """The difference of each rank's values after and before a step. Ranks with the same two values are kept together."""
    before_of = {rank: seen.value for seen in before for rank in seen.ranks}
    for seen in after:
        ranks_by_value: dict[int, list[int]] = {}  # id of the value before → ranks
        for rank in seen.ranks:
            ranks_by_value.setdefault(id(before_of.get(rank)), []).append(rank)
        for ranks in ranks_by_value.values():
            value, value_before = seen.value, before_of.get(ranks[0])
            if value is not None and value_before is not None and value_before.shape == value.shape:
                value = in_float64(value) - in_float64(value_before)
            yield RankValue(tuple(ranks), value)


def _masked(seen: RankValue, expected: Tensor, mask: Tensor) -> RankValue:
    """The value with the expected elements where ``mask`` is true. A value of another shape stays as it is."""
    if seen.value is None or seen.value.shape != expected.shape:
        return seen
    return RankValue(seen.ranks, torch.where(mask, expected, seen.value))


def _value(seen: Iterable[RankValue]) -> Tensor | None:
    """The value of the recording of one process; the first one, if its ranks differ."""
    return next((s.value for s in seen if s.value is not None), None)


def _noise(again: RecordingFolder | None, file: str, name: str, expected: Tensor) -> float:
    """The largest difference between two runs of one process in a tensor; 0 if there is no second run."""
    value = _value(again.views(file, name)) if again is not None else None
    return (
        largest(in_float64(value) - in_float64(expected))
        if value is not None and value.shape == expected.shape
        else 0.0
    )


def note_lines(all_judged: Iterable[KindComparison]) -> Iterator[str]:
    """One line for each note, with its names folded."""
    names_of: dict[str, dict[str, None]] = {}  # text → names
    for judged in all_judged:
        for text, names in judged.notes.items():
            names_of.setdefault(text, {}).update(dict.fromkeys(names))
    for text, unique_names in names_of.items():
        yield f"{few([str(folded) for folded in fold_names(unique_names)])}: {text}"
