"""Every weight, gradient and update of a step, judged; one tensor at a time.

weights     before the first step: equal, bit for bit or nearly
gradients   as the optimizers got them
updates     parameters after the step less those before it, where the gradient is right
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.names import few, fold_names
from meshwright.recording.alike import Tolerance, largest, tolerance_of, wide
from meshwright.recording.folder import Recorded, Seen
from meshwright.recording.joined import Joined, joined
from meshwright.recording.pairs import Pair
from meshwright.recording.pattern import Pattern
from meshwright.recording.verdict import Kind, Wrong

_EXACT = 1e-6  # relative: weights are copied, and at most cast
_UNSURE = 20.0  # times what is allowed of a gradient: an optimizer that divides by its size makes anything of less


@dataclass
class Judged:
    """What was judged of one kind: which names are wrong, how many were looked at, what is worth knowing."""

    kind: Kind
    wrong: dict[str, Wrong] = field(default_factory=dict)
    total: int = 0
    notes: dict[str, list[str]] = field(default_factory=dict)  # what → names
    zeros: set[str] = field(default_factory=set)  # gradients that are zeros where one process has none

    def add(self, pair: Pair, name: str, made: Joined) -> None:
        self.total += 1
        if not made.pattern.same:
            self.wrong[name] = Wrong(self.kind, name, made.pattern, pair.layout(name))
        elif made.note:
            self.note(made.note, name)

    def note(self, text: str, name: str) -> None:
        self.notes.setdefault(text, []).append(name)


def judge_weights(pair: Pair) -> Judged:
    """What both began with."""
    judged = Judged("weights")
    for name in pair.names:
        one, many = pair.seen("start", name)
        expected = _value(one)
        if expected is not None and many:
            judged.add(pair, name, joined(many, expected, Tolerance(_EXACT, 0.0, 0.02), pair.sizes))
    return judged


def judge_gradients(pair: Pair, step: int, given: float | None) -> Judged:
    """The gradients of a step. ``given``: the tolerance that a person asks for."""
    judged, file = Judged("gradients"), f"gradients-{step}"
    tolerance = gradient_tolerance(pair, step, given)
    for name in pair.trained():
        one, many = pair.seen(file, name)
        judged.add(pair, name, _gradient(pair, file, name, one, many, tolerance, judged))
    return judged


def gradient_tolerance(pair: Pair, step: int, given: float | None) -> Tolerance:
    """Of the gradients of a step."""
    scale, dtypes = 0.0, set()
    for name in pair.trained():
        one, many = pair.seen(f"gradients-{step}", name)
        value = _value(one)
        if value is not None and value.numel():
            scale = max(scale, largest(wide(value).nan_to_num(0.0, 0.0, 0.0)))
            dtypes |= {str(s.value.dtype).removeprefix("torch.") for s in (*one, *many) if s.value is not None}
    return tolerance_of(dtypes, scale, given)


def _gradient(
    pair: Pair, file: str, name: str, one: list[Seen], many: list[Seen], tolerance: Tolerance, judged: Judged
) -> Joined:
    expected, have = _value(one), any(seen.value is not None for seen in many)
    if expected is None:
        sizes = [largest(seen.value) for seen in many if seen.value is not None]
        if any(sizes):
            return Joined(Pattern("extra", float("inf")))
        if sizes:
            judged.note("zeros where one process has no gradient", name)
            judged.zeros.add(name)
        return Joined(Pattern("same"))
    if not have:
        if largest(expected):
            return Joined(Pattern("none", float("inf")))
        judged.note("no gradient where one process has zeros", name)
        return Joined(Pattern("same"))
    return joined(many, expected, tolerance, pair.sizes, _noise(pair.again, file, name, expected))


def judge_updates(pair: Pair, step: int, gradients: Judged, given: float | None) -> Judged:
    """What the step made of the parameters, where their gradients are right."""
    judged = Judged("updates")
    unsure = _UNSURE * gradient_tolerance(pair, step, given).relative
    for name in pair.trained():
        if name in gradients.wrong:
            continue
        one, many = pair.seen(f"parameters-{step}", name)
        expected = _value(one)
        if expected is None:
            continue
        if not many:
            judged.total += 1
            judged.wrong[name] = Wrong("updates", name, Pattern("not_stepped", float("inf")), pair.layout(name))
            continue
        made = _update(pair, step, name, expected, many, unsure, given)
        if name in gradients.zeros and not made.pattern.same:
            made = Joined(replace(made.pattern, kind="none_zeros"))
        judged.add(pair, name, made)
    return judged


def _update(
    pair: Pair, step: int, name: str, after: Tensor, many: list[Seen], unsure: float, given: float | None
) -> Joined:
    """The update against that of one process; elements whose gradient is all rounding are taken to be right."""
    one_before, many_before = pair.seen(f"parameters-{step - 1}" if step > 1 else "start", name)
    before = _value(one_before)
    if before is None or not many_before:
        return Joined(Pattern("same"))
    moved = wide(after) - wide(before)
    gradient = _value(pair.one.views(f"gradients-{step}", name))
    rounding = torch.zeros_like(moved, dtype=torch.bool)
    if gradient is not None:
        rounding = wide(gradient).abs() <= unsure * largest(gradient)
    usual = tolerance_of([str(after.dtype).removeprefix("torch.")], largest(moved), given)
    last_bits = 4 * torch.finfo(after.dtype).eps * largest(wide(after))
    tolerance = Tolerance(usual.relative, usual.floor + last_bits, usual.fit)
    noise = _noise(pair.again, f"parameters-{step}", name, after)
    made = joined(
        [_masked(seen, moved, rounding) for seen in _moved(many, many_before)], moved, tolerance, pair.sizes, noise
    )
    if made.pattern.same or made.value is None:
        return made
    whole = _masked(Seen((), made.value), moved, rounding)
    return replace(joined([whole], moved, tolerance, pair.sizes, noise), note=made.note)


def _moved(after: Iterable[Seen], before: Iterable[Seen]) -> Iterator[Seen]:
    """How far each rank's values went in a step; ranks that went equally far together."""
    was = {rank: seen.value for seen in before for rank in seen.ranks}
    for seen in after:
        starts: dict[int, list[int]] = {}
        for rank in seen.ranks:
            starts.setdefault(id(was.get(rank)), []).append(rank)
        for ranks in starts.values():
            start = was.get(ranks[0])
            known = seen.value is not None and start is not None and start.shape == seen.value.shape
            yield Seen(tuple(ranks), wide(seen.value) - wide(start) if known else seen.value)  # type: ignore[arg-type]


def _masked(seen: Seen, expected: Tensor, right: Tensor) -> Seen:
    """A value, where it is of the expected shape, with some elements as they are expected."""
    if seen.value is None or seen.value.shape != expected.shape:
        return seen
    return Seen(seen.ranks, torch.where(right, expected, seen.value))


def _value(seen: Iterable[Seen]) -> Tensor | None:
    """The one value of a process (the first, where its ranks differ)."""
    return next((s.value for s in seen if s.value is not None), None)


def _noise(again: Recorded | None, file: str, name: str, expected: Tensor) -> float:
    """The largest difference between two runs of one process."""
    value = _value(again.views(file, name)) if again is not None else None
    return largest(wide(value) - wide(expected)) if value is not None and value.shape == expected.shape else 0.0


def note_lines(all_judged: Iterable[Judged]) -> Iterator[str]:
    """Notes with their names folded, each once."""
    told: dict[str, dict[str, None]] = {}
    for judged in all_judged:
        for text, names in judged.notes.items():
            told.setdefault(text, {}).update(dict.fromkeys(names))
    for text, named in told.items():
        yield f"{few([str(folded) for folded in fold_names(named)])}: {text}"
