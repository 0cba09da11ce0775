"""``LabelCounter``: the label program of a forward: the part of it that follows from the batch alone
(runtime/rows/label_program.py), as far as a mean is divided by it; and what it counts in a piece of a batch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.evaluation import Evaluating, Modes
from meshwright.generators import random_numbers_kept
from meshwright.runtime.recent import Lengths, Points, sizes_of
from meshwright.runtime.rows.batch import copied, doubled, host_of, tensors_in
from meshwright.runtime.rows.counted_uses import CountedUses, elements_counted, is_quotient, labels_counted
from meshwright.runtime.rows.label_program import Name, Replay, Step, Tape, tensors_of_model

Slot = tuple[str, int, int]
"""Which sum over rows: the model's line, how many there were before on that line, and how many numbers it has."""


class Recorder(CountedUses):
    """Records while a forward runs for its shapes."""

    def __init__(self, leaves: int) -> None:
        super().__init__(Tape(leaves))
        self.used: list[Name] = []
        self.parts: set[Name] = set()  # of these, what something is divided by or multiplied with
        self.terms: set[Name] = set()  # of these, numbers beside what has no name
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
        self.parts.add(name)
        return func(*args, **kwargs)

    def term(self, name: Name, number: Tensor) -> Tensor:
        """See ``CountedUses``."""
        self.used.append(name)
        self.terms.add(name)
        return number

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
        from_sums: what something is divided by, or multiplied with, that follows from a sum over rows.
        terms: means of the batch alone, a sum over rows divided by another, beside what does not follow from it.
        given: numbers of the batch itself, the same for all its rows, by which something is divided.
        lines: of means over labels whose count is not known.
        why: what ended the recording; empty if nothing did.
    """

    tape: Tape
    slots: Mapping[Name, Slot] = field(default_factory=dict)
    from_sums: frozenset[Name] = frozenset()
    terms: frozenset[Name] = frozenset()
    given: frozenset[Name] = frozenset()
    lines: tuple[str, ...] = ()
    why: str = ""

    def like(self, other: Program) -> bool:
        """Whether both count the same, whatever the sizes of their batches."""
        return self.tape.like(other.tape) and all(
            getattr(self, name) == getattr(other, name)
            for name in ("slots", "from_sums", "terms", "given", "lines", "why")
        )

    @property
    def divides(self) -> bool:
        """Whether more than means over labels is counted."""
        return bool(self.from_sums or self.terms or self.given)

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
    means: set[Name] = set()  # a sum divided by a sum, and what follows from such alone: no more with more rows

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
            of_two = is_quotient(step.function) and len(step.inputs) == 2 and from_sums.issuperset(step.inputs)
            if of_two or means.issuperset(step.inputs):
                means |= names
    scalars = frozenset(n for n in recorder.used if n.number < leaves and not shapes(n)[0])
    known = from_sums - unknown
    terms = frozenset(known & means & recorder.terms)
    parts = frozenset(known & recorder.parts)
    tape.keep(((known - recorder.terms) | parts | terms | scalars).intersection(recorder.used))
    slots = {n: slot for n, slot in slots.items() if tape.maker(n) is not None}
    return Program(tape, slots, parts, terms, scalars & recorder.parts, tuple(dict.fromkeys(recorder.lines)))


def _between(points: Points[Program]) -> Callable[[int], Program] | None:
    """The program for lengths between those that were recorded, if it is the same."""
    first, *others = (program for _, program in points)
    return (lambda length: first) if all(map(first.like, others)) else None


@dataclass
class Counted:
    """What a program counts in one piece of a batch.

    Attributes:
        replay: on the piece, as the forward gets it.
        counting: on the piece, where its values are on the host, if they are.
        sums: slot → the piece's own sum, of float64, where it was counted; of a mean over rows, that times the rows.
        types: slot → the type that it has in the forward.
    """

    program: Program
    replay: Replay
    counting: Replay
    rows: int
    sums: dict[Slot, Tensor] = field(default_factory=dict)
    types: dict[Slot, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, slot in self.program.slots.items():
            step = self.program.tape.maker(name)
            assert step is not None
            (plain,) = self.counting.results(step)
            (wide,) = self.counting.results(step, wide=True) if plain.is_floating_point() else (plain,)
            self.types[slot] = plain.dtype
            self.sums[slot] = wide.detach().double() * (self.rows if step.function == "mean" else 1)

    def _device(self, slot: Slot) -> torch.device | None:
        """Where a sum is in the forward: with the batch, if it is counted from that."""
        return self.sums[slot].device if self.counting is self.replay else self.replay.device

    def whole(self, name: Name, total: Tensor, rows: float) -> Tensor:
        """A sum over all rows, as the model has it on one device."""
        step, slot = self.program.tape.maker(name), self.program.slots[name]
        assert step is not None
        total = total / rows if step.function == "mean" else total
        return total.view(self.sums[slot].shape).to(self._device(slot), self.types[slot], non_blocking=True)


class LabelCounter:
    """Counts in pieces of batches; records one program for each set of shapes, or for all of them.

    Args:
        record: runs the forward for its shapes on a batch, under the mode that it is given, with these modules in
            evaluation mode.
        model: whose buffers are used; ``modes``: of its modules.

    Attributes:
        slots: those that all ranks know of, in one order.
    """

    def __init__(self, record: Callable[[Any, Recorder, Evaluating], None], model: nn.Module, modes: Modes) -> None:
        self._record, self._model, self._modes = record, model, modes
        self._programs = Lengths(_between)
        self.slots: tuple[Slot, ...] = ()
        self.notes: dict[str, None] = {}

    def counted(self, batch: Any, rows: int) -> Counted:
        """What is counted in a piece of a batch of so many rows."""
        leaves = tensors_in(batch)
        sizes = sizes_of(batch, rows, self._modes.now())
        program = self._programs.made(sizes, lambda: self._new_program(batch, leaves, rows))
        try:
            return self._counted(program, leaves, rows)
        except Exception as error:
            program = Program(Tape(len(leaves)), why=_said(error))
            self._note(program)
            return self._counted(program, leaves, rows)

    def _counted(self, program: Program, leaves: list[Tensor], rows: int) -> Counted:
        buffers = dict(tensors_of_model(self._model)) if program.tape.buffers else {}
        replay = Replay(program.tape, leaves, buffers)
        hosts = [host for leaf in leaves if (host := host_of(leaf)) is not None]
        on_host = (
            len(hosts) == len(leaves) and not buffers and any(a is not b for a, b in zip(hosts, leaves, strict=True))
        )
        return Counted(program, replay, Replay(program.tape, hosts, {}) if on_host else replay, rows)

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
        self._record(copied(batch), recorder, self._modes.now())
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
