"""``LabelCounter``: records the label program of a forward, and counts by it in a piece of a batch.

The label program is the part of a forward that depends on the batch alone (runtime/rows/label_program.py) and on which the
divisor of a mean depends.
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
from meshwright.runtime.batch_caches import LengthCache, Points, sizes_of
from meshwright.runtime.rows.batch import copied, doubled, host_of, tensors_in
from meshwright.runtime.rows.counted_uses import CountedUses, elements_counted, is_quotient, labels_counted
from meshwright.runtime.rows.label_program import Name, Replay, Step, Tape, tensors_of_model
from meshwright.switches import Switch, Switches

Record = Callable[[Any, Any, Evaluating, Mapping[Switch, Any]], None]
Slot = tuple[str, int, int]
"""Identifies a sum over rows: (the model's line, how many sums precede it on that line, how many numbers it has)."""


class Recorder(CountedUses):
    """Records the uses of counts in a forward that runs on meta.

    Attributes:
        used: the names of all counts that are used.
        parts: those by which something is divided or multiplied.
        terms: those that are numbers, used together with tensors without names.
        lines: the lines of means whose count is not known.
    """

    def __init__(self, leaves: int) -> None:
        super().__init__(Tape(leaves))
        self.used: list[Name] = []
        self.parts: set[Name] = set()
        self.terms: set[Name] = set()
        self.lines: list[str] = []

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
        # Ranks identify sums by their lines, without the folder, which may differ between machines.
        line = os.path.basename(model_line()) if may_sum else ""
        return self.tape.add(signature, func, flat, spec, outputs, writes=is_write, line=line)

    def by_another(self, func: Any, args: tuple[Any, ...], by: Any, fact: Callable[[Tensor], Any]) -> Any:
        """See ``Follower``. The other tensor is on meta; the result must have the values of the first."""
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
    """The counts of its batch that a forward uses.

    Attributes:
        slots: name of a sum over rows → its slot, by which all ranks know it.
        from_sums: names that depend on a sum over rows, by which something is divided or multiplied.
        terms: names of means of the batch alone (a sum over rows divided by another) that are used together with tensors that
            do not depend on the batch alone.
        given: names of numbers in the batch itself, shared by all rows, by which something is divided.
        lines: the lines of means over labels whose count is not known.
        why: the error that ended the recording; empty if there was none.
    """

    tape: Tape
    slots: Mapping[Name, Slot] = field(default_factory=dict)
    from_sums: frozenset[Name] = frozenset()
    terms: frozenset[Name] = frozenset()
    given: frozenset[Name] = frozenset()
    lines: tuple[str, ...] = ()
    why: str = ""

    def like(self, other: Program) -> bool:
        """Whether both have the same counts and uses. (Sizes of their batches do not count.)"""
        return self.tape.like(other.tape) and all(
            getattr(self, name) == getattr(other, name)
            for name in ("slots", "from_sums", "terms", "given", "lines", "why")
        )

    @property
    def divides(self) -> bool:
        """Whether there are uses of counts other than means over labels."""
        return bool(self.from_sums or self.terms or self.given)

    @property
    def matters(self) -> bool:
        """Whether the forward uses counts at all."""
        return bool(self.slots or self.divides or self.lines)


def _program(recorder: Recorder, shapes: Callable[[Name], tuple[torch.Size, torch.Size]], leaves: int) -> Program:
    """The program of a recording: finds the sums over rows.

    Args:
        shapes: a name → (its shape for the batch, its shape for a batch with twice as many rows).
        leaves: the number of tensors in the batch.
    """
    tape = recorder.tape
    tape.keep(set(recorder.used))
    rows: dict[Name, bool] = {}  # whether a dim grows with the number of rows
    slots: dict[Name, Slot] = {}
    from_sums = set[Name]()  # sums over rows, and names that depend on them
    unknown = set[Name]()  # names whose values for all rows do not follow from the sums of pieces
    means = set[Name]()  # sums divided by sums, and names that depend on these alone: they do not grow with rows
    sums_on_line = Counter[str]()

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
            slots[name] = step.line, sums_on_line[step.line], shapes(name)[0].numel()
            sums_on_line[step.line] += 1
            from_sums |= names
        elif over_rows or from_unknown:
            # A maximum over rows, or a sum of terms that were divided by a sum: not known from the values of pieces.
            unknown |= names
        elif from_sums.intersection(step.inputs):
            from_sums |= names
            of_two = is_quotient(step.function) and len(step.inputs) == 2 and from_sums.issuperset(step.inputs)
            if of_two or means.issuperset(step.inputs):
                means |= names
    scalars = frozenset(n for n in recorder.used if n.number < leaves and not shapes(n)[0])
    complete = from_sums - unknown
    terms = frozenset(complete & means & recorder.terms)
    parts = frozenset(complete & recorder.parts)
    tape.keep(((complete - recorder.terms) | parts | terms | scalars).intersection(recorder.used))
    slots = {n: slot for n, slot in slots.items() if tape.maker(n) is not None}
    return Program(tape, slots, parts, terms, scalars & recorder.parts, tuple(dict.fromkeys(recorder.lines)))


def _between(points: Points[Program]) -> Callable[[int], Program] | None:
    """For lengths between recorded ones: the program, if all recorded programs are equal; else None."""
    first, *others = (program for _, program in points)
    return (lambda length: first) if all(map(first.like, others)) else None


@dataclass
class Counted:
    """The counts of a program in one piece of a batch.

    Attributes:
        replay: on the tensors of the piece.
        counting: on the host copies of the tensors if all have one, else ``replay``.
        rows: the number of rows of the piece.
        sums: slot → the sum over the piece, in float64; for a mean over rows the mean times the number of rows.
        types: slot → the dtype of the sum in the forward.
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
        """The device of a sum in the forward."""
        return self.sums[slot].device if self.counting is self.replay else self.replay.device

    def whole(self, name: Name, total: Tensor, rows: float) -> Tensor:
        """The sum (or the mean) over all rows, as the forward has it on one device.

        ``total``: the sum over all pieces; ``rows``: the number of all rows.
        """
        step, slot = self.program.tape.maker(name), self.program.slots[name]
        assert step is not None
        total = total / rows if step.function == "mean" else total
        return total.view(self.sums[slot].shape).to(self._device(slot), self.types[slot], non_blocking=True)


class LabelCounter:
    """Counts in pieces of batches. Records a program for each set of shapes, or one for all.

    Args:
        record: (batch, mode, modules in evaluation mode, switches): runs the forward on meta, under the mode.
        model: the model, whose buffers a program may use.
        modes: reads which modules are in evaluation mode.
        switches: what a person sets on modules between steps.

    Attributes:
        slots: the slots that all ranks know, in the same order on all.
        notes: the notes for a person, in order.
    """

    def __init__(self, record: Record, model: nn.Module, modes: Modes, switches: Switches) -> None:
        self._record, self._model, self._modes, self._switches = record, model, modes, switches
        self._programs = LengthCache(_between)
        self.slots: tuple[Slot, ...] = ()
        self.notes: dict[str, None] = {}

    def follow(self, batch: Any, mode: Any) -> None:
        """Runs the forward for the shapes of a batch, as the model stands now, under a mode."""
        with torch.no_grad(), random_numbers_kept():
            self._record(batch, mode, self._modes.now(), self._switches.now)

    def counted(self, batch: Any, rows: int) -> Counted:
        """Counts in a piece of a batch with so many rows."""
        leaves = tensors_in(batch)
        sizes = sizes_of(batch, rows, self._modes.now(), self._switches.told)
        program = self._programs.get_or_make(sizes, lambda: self._new_program(batch, leaves, rows))
        try:
            return self._counted(program, leaves, rows)
        except Exception as error:
            program = Program(Tape(len(leaves)), why=_as_text(error))
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
        """Records the program for the shapes of a batch; an empty one, with the reason, if the forward fails."""
        try:
            recorder = self._recorded(batch, len(leaves))
            with torch.no_grad():
                program = _program(recorder, self._shapes(recorder, batch, leaves, rows), len(leaves))
        except Exception as error:  # the forward cannot run without values
            program = Program(Tape(len(leaves)), why=_as_text(error))
        self._note(program)
        return program

    def _recorded(self, batch: Any, leaves: int) -> Recorder:
        recorder = Recorder(leaves)
        self.follow(copied(batch), recorder)
        return recorder

    def _shapes(
        self, recorder: Recorder, batch: Any, leaves: list[Any], rows: int
    ) -> Callable[[Name], tuple[torch.Size, torch.Size]]:
        """A function: name → (its shape for the batch, its shape for twice as many rows)."""
        twofold = doubled(batch, rows)
        once, twice = (Replay(recorder.tape, x, recorder.tensors) for x in (leaves, tensors_in(twofold)))
        try:
            for name in recorder.used:
                twice.value(name)
        except Exception:  # a step contains the number of rows as a constant: record again with twice as many rows
            other = self._recorded(twofold, len(leaves))
            twice = Replay(other.tape, tensors_in(twofold), other.tensors)
        return lambda name: (_shape(once.value(name)), _shape(twice.value(name)))

    def _note(self, program: Program) -> None:
        """Notes for a person what a program could not count."""
        if program.why:
            self.notes[
                f"the divisors of means could not be found without running the model ({program.why}): microbatches and "
                "data ranks are weighted by rows"
            ] = None
        for line in program.lines:
            self.notes[
                f"the labels of the mean at {line} do not follow from the batch alone: it is weighted by rows, and an ignored "
                "label is an error"
            ] = None


def _shape(x: Any) -> torch.Size:
    return x.shape if isinstance(x, Tensor) else torch.Size()


def _as_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
