"""What means divide by: so that the mean over a batch that is divided unevenly is the mean over all of it.

A model that takes the mean of its own loss takes it over the rows it sees. With rows divided over data ranks and
microbatches, and labels ignored or masked here and there, the mean of those means is not the mean over the batch; weighing
them by rows is not enough. So, before a step, the *label program* runs: the part of the forward that follows from the
batch alone (runtime/rows/label_program.py), as far as a mean is divided by it:

    F.cross_entropy(x, labels)            the labels that are not ignored, or their weights
    (losses * mask).sum() / mask.sum()    whatever a number is divided by, or multiplied with, that is summed over rows
    losses[mask].mean()                   how many elements there are, if values of the batch say so

One all-reduce makes sums over rows those of all ranks and microbatches. While the forward runs, a mean over labels or
elements is scaled by its own share, and what divides is what it is on one device (``mask.sum().clamp(min=1)`` of the
whole batch).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.generators import random_numbers_kept
from meshwright.private import pytree
from meshwright.runtime.recent import Lengths, Points, sizes_of
from meshwright.runtime.rows.batch import copied, doubled, tensors_in
from meshwright.runtime.rows.label_program import Follower, Name, Replay, Step, Tape, tensors_of_model, token
from meshwright.spmd.losses import mean_target

MEAN, SUM, RATIO, SPLIT = "mean", "sum", "ratio", "split"
"""How the losses of pieces make the loss of the batch:

    mean     their mean, weighed by rows; a sum that is divided by a count takes the count of all rows
    sum      their sum
    ratio    as mean, for a mean that is itself divided by another mean: the other is that of all rows
    split    as mean, because the plan says so: only means over labels take the count of all rows
"""

Slot = tuple[str, int, int]
"""Which sum over rows: the model's line, how many there were before on that line, and how many numbers it has."""


# --- where a forward uses what it counts ------------------------------------------------------------------------------


def labels_counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean over labels divides by: their number, or their weights."""
    valid = target != ignore_index
    return valid.sum() if weight is None else (weight[torch.where(valid, target, 0)] * valid).sum()


def elements_counted(mask: Tensor) -> Tensor:
    """How many elements a mask picks."""
    return mask.sum()


_DIVIDES = frozenset("div div_ divide divide_ true_divide true_divide_ __truediv__ __itruediv__ __rtruediv__".split())
_MULTIPLIES = frozenset("mul mul_ multiply multiply_ __mul__ __imul__ __rmul__".split())
_MEANS = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits".split()
)


def _is_mean_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "mean":
        return len(args) == 1 and not {"dim", "axis"} & kwargs.keys()
    plain = all(kwargs.get(old) is None for old in ("size_average", "reduce", "weight"))
    return name in _MEANS and kwargs.get("reduction", "mean") == "mean" and plain


class CountedUses(Follower):
    """Finds where a forward uses what it counts: ``mean``, ``part`` and ``uncounted`` say what becomes of it."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self._picked: dict[int, tuple[Tensor, Name]] = {}  # tensors whose dim 0 is as long as a mask says → that count

    def met(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], names: list[Name | None]
    ) -> Any:
        """See ``Follower``."""
        if mean_target(func, args, kwargs) is not None:
            return self._of_labels(func, args, kwargs)
        if (mask := self._mask(func, args)) is not None:
            result = func(*args, **kwargs)
            self._pick(result, self.counted(elements_counted, mask))
            return result
        does = getattr(func, "__name__", "")
        if does in _DIVIDES | _MULTIPLIES and len(tensors) == 2 and tensors[0] is args[0] and not all(names):
            at = 0 if names[0] is not None else 1
            name = names[at]
            if name is not None and len(args) == 2:
                return self.part(name, at, does in _DIVIDES, func, args, kwargs)
        return self._of_picked(_called, func, args, kwargs, tensors)

    def known(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """See ``Follower``. A mean over labels, or over what a mask picked, has no name: it is scaled by its count."""
        if mean_target(func, args, kwargs) is not None:
            return self._of_labels(func, args, kwargs)
        if (mask := self._mask(func, args)) is not None:
            result = super().known(func, args, kwargs, tensors)
            self._pick(result, self.counted(elements_counted, mask))
            return result
        return self._of_picked(super().known, func, args, kwargs, tensors)

    def apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """See ``Follower``."""
        if mean_target(func, args, kwargs) is not None:
            return self._of_labels(func, args, kwargs)
        return self._of_picked(_called, func, args, kwargs, tensors)

    def counted(self, count: Callable[..., Tensor], *operands: Any) -> Name | None:
        """The name of what ``count`` gives for named operands, a step that the forward itself does not do."""
        flat, spec = pytree.tree_flatten((operands, {}))
        step = self.step((count, tuple(map(token, flat)), spec), count, flat, spec, 1, False)
        return None if step is None else step.outputs[0]

    def _of_labels(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = mean_target(func, args, kwargs)
        assert found is not None
        target, weight, ignored = found
        names = self.name(target), None if weight is None else self.name(weight)
        if names[0] is None or (weight is not None and names[1] is None):
            return self.uncounted(target, ignored, func, args, kwargs)
        return self.mean(self.counted(labels_counted, *names, ignored), func, args, kwargs)

    def _mask(self, func: Any, args: tuple[Any, ...]) -> Name | None:
        """The mask by which values are picked into dim 0."""
        if getattr(func, "__name__", "") not in ("__getitem__", "masked_select") or len(args) != 2:
            return None
        mask = args[1]
        return self.name(mask) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None

    def _pick(self, result: Any, count: Name | None) -> None:
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.dim() and count is not None:
                self._picked[id(t)] = t, count

    def _of_picked(
        self,
        call: Callable[..., Any],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """A function of what was picked, perhaps. ``call``: runs it."""
        picked = [found for t in tensors if (found := self._picked.get(id(t))) is not None and found[0] is t]
        if not picked or len({count for _, count in picked}) > 1:
            return call(func, args, kwargs, tensors)
        of, count = picked[0]
        if _is_mean_of_all(func, args, kwargs):
            return self.mean(count, func, args, kwargs)
        result = call(func, args, kwargs, tensors)
        self._pick(
            [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.shape[:1] == of.shape[:1]], count
        )
        return result

    def mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mean over as many as ``count``."""
        raise NotImplementedError

    def part(self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product or quotient of what has no name and, as the argument ``at``, of what has one."""
        raise NotImplementedError

    def uncounted(self, target: Tensor, ignored: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mean over labels that do not follow from the batch alone."""
        raise NotImplementedError


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    return func(*args, **kwargs)


# --- the label program ------------------------------------------------------------------------------------------------


class Recorder(CountedUses):
    """Records while a forward runs for its shapes."""

    def __init__(self, leaves: int) -> None:
        super().__init__(Tape(leaves))
        self.used: list[Name] = []
        self.lines: list[str] = []  # of means whose count is not known

    @property
    def names_tensors(self) -> bool:
        """See ``Follower``."""
        return True

    def leaf(self, i: int, t: Tensor) -> Name | None:
        """See ``Follower``."""
        if t.is_floating_point():
            self.tape.types[i] = t.dtype
        return None if t.is_meta else Name(i)

    def buffer(self, name: str) -> Name | None:
        """See ``Follower``."""
        return self.tape.buffer(name)

    def step(self, signature: Any, func: Any, flat: Any, spec: Any, outputs: int, is_write: bool) -> Step | None:
        """See ``Follower``."""
        may_sum = getattr(func, "__name__", "") in _SUMS
        # Ranks know sums by their lines: without the folder, which may be another on another machine.
        line = os.path.basename(model_line()) if may_sum else ""
        return self.tape.add(signature, func, flat, spec, outputs, writes=is_write, line=line)

    def by_another(self, func: Any, args: tuple[Any, ...], by: Any, fact: Callable[[Tensor], Any]) -> Any:
        """See ``Follower``: the other tensor has no value here, and this one shall keep its own."""
        return by(args[0], fact(args[1]))

    def mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        assert count is not None
        self.used.append(count)
        return func(*args, **kwargs)

    def part(self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        self.used.append(name)
        return func(*args, **kwargs)

    def uncounted(self, target: Tensor, ignored: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        self.lines.append(model_line() or "an unknown line")
        return func(*args, **kwargs)


_SUMS = frozenset(["sum", "count_nonzero", "mean", labels_counted.__name__, elements_counted.__name__])


@dataclass(frozen=True)
class Program:
    """What a forward counts of its batch.

    Attributes:
        slots: sum over rows → what it is known by on all ranks.
        from_sums: names that follow from a sum over rows.
        given: numbers of the batch itself, the same for all its rows, by which something is divided.
        lines: of means over labels whose count is not known.
        why: what ended the recording; empty if nothing did.
    """

    tape: Tape
    slots: Mapping[Name, Slot] = field(default_factory=dict)
    from_sums: frozenset[Name] = frozenset()
    given: frozenset[Name] = frozenset()
    lines: tuple[str, ...] = ()
    why: str = ""

    def like(self, other: Program) -> bool:
        """Whether both count the same, whatever the sizes of their batches."""
        return self.tape.like(other.tape) and all(
            getattr(self, name) == getattr(other, name) for name in ("slots", "from_sums", "given", "lines", "why")
        )

    @property
    def divides(self) -> bool:
        """Whether more than means over labels is counted."""
        return bool(self.from_sums or self.given)

    @property
    def matters(self) -> bool:
        return bool(self.slots or self.divides or self.lines)


def _program(recorder: Recorder, shapes: Callable[[Name], tuple[torch.Size, torch.Size]], leaves: int) -> Program:
    """What is summed over rows in what was recorded.

    Args:
        shapes: the shape of what has a name, for a batch, and for one of twice as many rows.
    """
    tape = recorder.tape
    tape.keep(set(recorder.used))
    rows: dict[Name, bool] = {}  # whether it has a dim that grows with the rows
    slots: dict[Name, Slot] = {}
    from_sums, unknown, seen = set[Name](), set[Name](), Counter[str]()

    def has_rows(name: Name) -> bool:
        if name not in rows:
            once, twice = shapes(name)
            maker = tape.maker(name)
            empty = not once.numel() and maker is not None and any(map(has_rows, maker.inputs))
            rows[name] = once != twice or empty
        return rows[name]

    for step in tape.steps:
        from_unknown = bool(unknown.intersection(step.inputs))
        over_rows = any(map(has_rows, step.inputs)) and not any(map(has_rows, step.outputs))
        names = set(step.outputs)
        if over_rows and step.line and not from_unknown and not from_sums.intersection(step.inputs):
            (name,) = names
            slots[name] = step.line, seen[step.line], shapes(name)[0].numel()
            seen[step.line] += 1
            from_sums |= names
        elif (
            over_rows or from_unknown
        ):  # a maximum over rows, a sum of what was divided by a sum: not to be told of others
            unknown |= names
        elif from_sums.intersection(step.inputs):
            from_sums |= names
    scalars = frozenset(n for n in recorder.used if n.number < leaves and not shapes(n)[0])
    known = frozenset(from_sums - unknown)
    tape.keep({n for n in recorder.used if n in known or n in scalars})
    slots = {n: slot for n, slot in slots.items() if tape.maker(n) is not None}
    return Program(tape, slots, known, scalars, tuple(dict.fromkeys(recorder.lines)))


def _between(points: Points[Program]) -> Callable[[int], Program] | None:
    """The program for lengths between those that were recorded, if it is the same."""
    first, *others = (program for _, program in points)
    return (lambda length: first) if all(map(first.like, others)) else None


@dataclass
class Counted:
    """What a program counts in one piece of a batch.

    Attributes:
        sums: slot → the piece's own sum, of float64, on CPU; of a mean over rows, that times the rows.
        types: slot → the type that it has in the forward; ``device``: where it is then.
    """

    program: Program
    replay: Replay
    rows: int
    sums: dict[Slot, Tensor] = field(default_factory=dict)
    types: dict[Slot, torch.dtype] = field(default_factory=dict)
    device: torch.device | None = None

    def __post_init__(self) -> None:
        for name, slot in self.program.slots.items():
            step = self.program.tape.maker(name)
            assert step is not None
            (plain,) = self.replay.results(step)
            (wide,) = self.replay.results(step, wide=True) if plain.is_floating_point() else (plain,)
            self.types[slot] = plain.dtype
            self.sums[slot] = wide.detach().double().cpu() * (self.rows if step.function == "mean" else 1)
            self.device = plain.device

    def whole(self, name: Name, total: Tensor, rows: float) -> Tensor:
        """A sum over all rows, as the model has it on one device."""
        step, slot = self.program.tape.maker(name), self.program.slots[name]
        assert step is not None
        total = total / rows if step.function == "mean" else total
        return total.view(self.sums[slot].shape).to(self.device, self.types[slot])


class LabelCounter:
    """Counts in pieces of batches; records one program for each set of shapes, or for all of them.

    Args:
        record: runs the forward for its shapes on a batch, under the mode that it is given.
        model: whose buffers are used.

    Attributes:
        slots: those that all ranks know of, in one order.
    """

    def __init__(self, record: Callable[[Any, Recorder], None], model: nn.Module) -> None:
        self._record, self._model = record, model
        self._programs = Lengths(_between)
        self.slots: tuple[Slot, ...] = ()
        self.notes: dict[str, None] = {}

    def counted(self, batch: Any, rows: int) -> Counted:
        """What is counted in a piece of a batch of so many rows."""
        leaves = tensors_in(batch)
        program = self._programs.made(sizes_of(batch, rows), lambda: self._new_program(batch, leaves, rows))
        buffers = dict(tensors_of_model(self._model)) if program.tape.buffers else {}
        try:
            return Counted(program, Replay(program.tape, leaves, buffers), rows)
        except Exception as error:
            program = Program(Tape(len(leaves)), why=_said(error))
            self._note(program)
            return Counted(program, Replay(program.tape, leaves, buffers), rows)

    def _new_program(self, batch: Any, leaves: list[Any], rows: int) -> Program:
        try:
            with torch.no_grad(), random_numbers_kept():
                recorder = self._recorded(batch, len(leaves))
                program = _program(recorder, self._shapes(recorder, batch, leaves, rows), len(leaves))
        except Exception as error:  # a forward that cannot run without values
            program = Program(Tape(len(leaves)), why=_said(error))
        self._note(program)
        return program

    def _recorded(self, batch: Any, leaves: int) -> Recorder:
        recorder = Recorder(leaves)
        self._record(copied(batch), recorder)
        return recorder

    def _shapes(
        self, recorder: Recorder, batch: Any, leaves: list[Any], rows: int
    ) -> Callable[[Name], tuple[torch.Size, torch.Size]]:
        twofold = doubled(batch, rows)
        once, twice = (Replay(recorder.tape, x, recorder.tensors) for x in (leaves, tensors_in(twofold)))
        try:
            for name in recorder.used:
                twice.value(name)
        except Exception:  # a step that has the number of rows as a number: it is another with twice as many
            other = self._recorded(twofold, len(leaves))
            twice = Replay(other.tape, tensors_in(twofold), other.tensors)
        return lambda name: (_shape(once.value(name)), _shape(twice.value(name)))

    def _note(self, program: Program) -> None:
        if program.why:
            self.notes[
                f"what means divide by could not be followed without running the model ({program.why}): microbatches and "
                "data ranks are weighed by rows"
            ] = None
        for line in program.lines:
            self.notes[
                f"the labels of the mean at {line} do not follow from the batch alone: it is weighed by rows, and a label "
                "that is ignored is an error"
            ] = None


def _shape(x: Any) -> torch.Size:
    return x.shape if isinstance(x, Tensor) else torch.Size()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


# --- in a forward -----------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What a piece's means are to be, for the mean over all pieces.

    Attributes:
        totals: slot → its sum over all pieces; rows: of all pieces; weight: of this one in their mean.
        way: how losses of pieces make that of the batch.
        ignored: gets how many labels a mean that could not be counted ignores.
    """

    counted: Counted
    totals: Mapping[Slot, Tensor]
    rows: float
    weight: float
    way: str
    ignored: list[Tensor] = field(default_factory=list)

    @property
    def even(self) -> bool:
        """Whether the piece's means are right as they are."""
        program, total = self.counted.program, self.totals
        if program.divides or program.lines:
            return False
        return all(abs(self._ratio(self.counted.sums[s], total[s]) - 1) <= 1e-12 for s in program.slots.values())

    def of_mean(self, count: Name) -> float:
        """By how much a mean over ``count`` is to be scaled."""
        slot = self.counted.program.slots.get(count)
        return 1.0 if slot is None else self._ratio(self.counted.sums[slot], self.totals[slot])

    def _ratio(self, part: Tensor, total: Tensor) -> float:
        return float(part) / float(total) * self.of_part if float(total) and self.weight else 1.0

    @property
    def of_part(self) -> float:
        """By how much what is divided by what it is on one device is to be scaled."""
        return 1.0 if self.way == SUM or not self.weight else 1 / self.weight


class Shares(CountedUses):
    """While on, means over labels and elements are scaled, and what follows from sums over rows is that of all rows."""

    def __init__(self, share: Share | None) -> None:
        super().__init__(Tape(0) if share is None else share.counted.program.tape)
        self._share = share

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """For the time of a forward. What a checkpoint runs again has the shares that it had."""
        if self._share is None:
            yield
            return
        share, program = self._share, self._share.counted.program
        self._replay = share.counted.replay.again()
        for name, slot in program.slots.items():
            self._replay.put(name, share.counted.whole(name, share.totals[slot], share.rows))
        with super().on(model):
            yield

    def mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        loss = func(*args, **kwargs)
        if count is None or self._share is None:
            return loss
        share = self._share.of_mean(count)
        # A mean over no label is 0/0; its share is zero.
        return loss * share if share else torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0

    def part(self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        assert self._share is not None
        if self._share.way == SPLIT:
            return func(*args, **kwargs)
        program = self._share.counted.program
        scale = 1.0 if self._share.way == RATIO else self._share.of_part
        if name in program.from_sums:
            whole = self._replay.value(name).to(args[at].dtype)
            args = (whole, args[1]) if at == 0 else (args[0], whole)
        elif not (name in program.given and divides and at == 1):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if scale == 1.0:
            return result
        return result.mul_(scale) if result is args[0] else result * scale

    def uncounted(self, target: Tensor, ignored: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountedUses``."""
        if self._share is not None:
            self._share.ignored.append((target == ignored).sum().detach())
        return func(*args, **kwargs)


__all__ = ["MEAN", "RATIO", "SPLIT", "SUM", "Counted", "LabelCounter", "Recorder", "Share", "Shares", "Slot"]
