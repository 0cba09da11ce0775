"""``LabelProgram``: the part of a forward that depends on the batch alone and on which the divisor of a mean depends.

``CountRecorder`` finds the uses of counts while a forward runs on meta; ``program_of`` makes the program from them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.blame import model_line
from meshwright.runtime.rows.count_tracker import CountTracker, element_count, is_quotient, label_count
from meshwright.runtime.rows.tape import Name, Operation, Tape

SumId = tuple[str, int, int]
"""Identifies a sum over rows on all ranks: (the model's line, how many sums precede it there, how many numbers it has)."""

Shapes = Callable[[Name], tuple[torch.Size, torch.Size]]
"""A name → (its shape for the batch, its shape for a batch with twice as many rows)."""


class CountRecorder(CountTracker):
    """Records the uses of counts in a forward that runs on meta.

    Args:
        leaves: the number of tensors in the batch.

    Attributes:
        used: the names of all counts that are used.
        in_products: the names of those by which something is divided or multiplied.
        as_numbers: the names of those that are numbers, used together with tensors without names.
        uncounted_lines: the lines of means whose count is not known.
    """

    def __init__(self, leaves: int) -> None:
        super().__init__(Tape(leaves))
        self.used: list[Name] = []
        self.in_products: set[Name] = set()
        self.as_numbers: set[Name] = set()
        self.uncounted_lines: list[str] = []

    @property
    def names_model_tensors(self) -> bool:
        """See ``NameTracker``."""
        return True

    def leaf_name(self, i: int, t: Tensor) -> Name | None:
        """See ``NameTracker``. Also notes the dtype in which the model sees the tensor."""
        if t.is_floating_point():
            self.tape.types[i] = t.dtype
        return None if t.is_meta else Name(i)

    def buffer_name(self, path: str) -> Name | None:
        """See ``NameTracker``."""
        return self.tape.buffer_name(path)

    def operation_for(
        self, signature: Any, func: Any, flat: Any, spec: Any, outputs: int, is_write: bool
    ) -> Operation | None:
        """See ``NameTracker``. A new operation becomes a part of the tape."""
        may_sum = getattr(func, "__name__", "") in _SUMS
        # Ranks identify sums by their lines, without the folder, which may differ between machines.
        line = os.path.basename(model_line()) if may_sum else ""
        return self.tape.add(signature, func, flat, spec, outputs, writes=is_write, line=line)

    def on_call_like_another(
        self, func: Any, args: tuple[Any, ...], simpler: Any, fact: Callable[[Tensor], Any]
    ) -> Any:
        """See ``NameTracker``. The other tensor is on meta; the result must have the values of the first."""
        return simpler(args[0], fact(args[1]))

    def on_mean(self, count: Name | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``CountTracker``."""
        assert count is not None
        self.used.append(count)
        return func(*args, **kwargs)

    def on_product(
        self, name: Name, at: int, divides: bool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See ``CountTracker``."""
        self.used.append(name)
        self.in_products.add(name)
        return func(*args, **kwargs)

    def number_for(self, name: Name, number: Tensor) -> Tensor:
        """See ``CountTracker``."""
        self.used.append(name)
        self.as_numbers.add(name)
        return number

    def on_uncounted_mean(
        self, target: Tensor, ignore_index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See ``CountTracker``."""
        self.uncounted_lines.append(model_line() or "an unknown line")
        return func(*args, **kwargs)


_SUMS = frozenset(["sum", "count_nonzero", "mean", label_count.__name__, element_count.__name__])


@dataclass(frozen=True)
class LabelProgram:
    """The counts of its batch that a forward uses.

    Attributes:
        sums: name of a sum over rows → its identity, by which all ranks know it.
        from_sums: names that depend on a sum over rows, by which something is divided or multiplied.
        batch_means: names of means of the batch alone (a sum over rows divided by another) that are used together with tensors
            that do not depend on the batch alone.
        batch_numbers: names of numbers in the batch itself, shared by all rows, by which something is divided.
        uncounted_lines: the lines of means over labels whose count is not known.
        error: the error that ended the recording; empty if there was none.
    """

    tape: Tape
    sums: Mapping[Name, SumId] = field(default_factory=dict)
    from_sums: frozenset[Name] = frozenset()
    batch_means: frozenset[Name] = frozenset()
    batch_numbers: frozenset[Name] = frozenset()
    uncounted_lines: tuple[str, ...] = ()
    error: str = ""

    def is_like(self, other: LabelProgram) -> bool:
        """Whether both have the same counts and uses. (Sizes of their batches do not count.)"""
        return self.tape.is_like(other.tape) and all(
            getattr(self, attribute) == getattr(other, attribute)
            for attribute in ("sums", "from_sums", "batch_means", "batch_numbers", "uncounted_lines", "error")
        )

    @property
    def has_other_uses(self) -> bool:
        """Whether the forward uses counts other than in means over labels and elements."""
        return bool(self.from_sums or self.batch_means or self.batch_numbers)

    @property
    def uses_counts(self) -> bool:
        """Whether the forward uses counts at all."""
        return bool(self.sums or self.has_other_uses or self.uncounted_lines)


class _SumFinder:
    """Finds the sums over rows among the operations of a tape.

    Args:
        shapes: of each tensor, for the batch and for one with twice as many rows.

    Attributes:
        sums: name of a sum over rows → its identity.
        from_sums: the names of these sums, and of what depends on them.
        unknown: the names whose values for all rows do not follow from the sums of pieces.
        means: the names of sums divided by sums, and of what depends on these alone: they do not grow with rows.
    """

    def __init__(self, tape: Tape, shapes: Shapes) -> None:
        self._tape, self._shapes = tape, shapes
        self.sums: dict[Name, SumId] = {}
        self.from_sums = set[Name]()
        self.unknown = set[Name]()
        self.means = set[Name]()
        self._names_with_rows: dict[Name, bool] = {}
        self._sums_on_line = Counter[str]()
        for operation in tape.operations:
            self._add(operation)

    def _has_rows(self, name: Name) -> bool:
        """Whether a dim of a tensor grows with the number of rows."""
        if name not in self._names_with_rows:
            once, twice = self._shapes(name)
            maker = self._tape.maker(name)
            is_empty = not once.numel() and maker is not None and any(map(self._has_rows, maker.inputs))
            self._names_with_rows[name] = once != twice or is_empty
        return self._names_with_rows[name]

    def _add(self, operation: Operation) -> None:
        inputs, outputs, line = operation.inputs, set(operation.outputs), operation.line
        from_unknown = bool(self.unknown.intersection(inputs))
        from_sums = bool(self.from_sums.intersection(inputs))
        over_rows = any(map(self._has_rows, inputs)) and not any(map(self._has_rows, operation.outputs))
        if over_rows and line and not from_unknown and not from_sums:
            (name,) = outputs
            self.sums[name] = line, self._sums_on_line[line], self._shapes(name)[0].numel()
            self._sums_on_line[line] += 1
            self.from_sums |= outputs
        elif over_rows or from_unknown:
            # A maximum over rows, or a sum of terms that were divided by a sum: not known from the values of pieces.
            self.unknown |= outputs
        elif from_sums:
            self.from_sums |= outputs
            divides_sums = is_quotient(operation.function) and len(inputs) == 2 and self.from_sums.issuperset(inputs)
            if divides_sums or self.means.issuperset(inputs):
                self.means |= outputs


def program_of(recorder: CountRecorder, shapes: Shapes, leaves: int) -> LabelProgram:
    """The program of a recording: finds the sums over rows. Drops the operations that it does not need from the tape.

    Args:
        leaves: the number of tensors in the batch.
    """
    tape = recorder.tape
    tape.drop_all_but(set(recorder.used))
    finder = _SumFinder(tape, shapes)
    scalars = frozenset(n for n in recorder.used if n.number < leaves and not shapes(n)[0])
    complete = finder.from_sums - finder.unknown
    batch_means = frozenset(complete & finder.means & recorder.as_numbers)
    in_products = frozenset(complete & recorder.in_products)
    needed = (complete - recorder.as_numbers) | in_products | batch_means | scalars
    tape.drop_all_but(needed.intersection(recorder.used))
    return LabelProgram(
        tape,
        sums={name: sum_id for name, sum_id in finder.sums.items() if tape.maker(name) is not None},
        from_sums=in_products,
        batch_means=batch_means,
        batch_numbers=scalars & recorder.in_products,
        uncounted_lines=tuple(dict.fromkeys(recorder.uncounted_lines)),
    )
