"""``LabelCounter``: counts in the pieces of a batch, by label programs (runtime/rows/label_program.py) that it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.evaluation import Evaluating, Modes
from meshwright.generators import random_numbers_kept
from meshwright.runtime.batch_caches import LengthCache, Points, sizes_of
from meshwright.runtime.rows.batch import copied, doubled, host_of, tensors_in
from meshwright.runtime.rows.label_program import CountRecorder, LabelProgram, Shapes, SumId, program_of
from meshwright.runtime.rows.name_tracker import tensors_of_model
from meshwright.runtime.rows.tape import Name, NamedValues, Tape
from meshwright.switches import Switch, Switches

Record = Callable[[Any, Any, Evaluating, Mapping[Switch, Any]], None]
"""(batch, mode, modules in evaluation mode, switches): runs the forward on meta, under the mode."""


@dataclass
class LabelCounts:
    """The counts of a program in one piece of a batch.

    Attributes:
        values: of the program's names, on the tensors of the piece.
        counted_values: of the program's names, on the host copies of these tensors if all have one; else ``values``.
        rows: the number of rows of the piece.
        sums: identity of a sum → the sum over the piece, in float64; for a mean over rows the mean times the number of rows.
        types: identity of a sum → the dtype of the sum in the forward.
    """

    program: LabelProgram
    values: NamedValues
    counted_values: NamedValues
    rows: int
    sums: dict[SumId, Tensor] = field(default_factory=dict)
    types: dict[SumId, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, sum_id in self.program.sums.items():
            operation = self.program.tape.maker(name)
            assert operation is not None
            (total,) = self.counted_values.results(operation)
            is_float = total.is_floating_point()
            (exact_total,) = self.counted_values.results(operation, wide=True) if is_float else (total,)
            self.types[sum_id] = total.dtype
            self.sums[sum_id] = exact_total.detach().double() * (self.rows if operation.function == "mean" else 1)

    def _device(self, sum_id: SumId) -> torch.device | None:
        """The device of a sum in the forward."""
        return self.sums[sum_id].device if self.counted_values is self.values else self.values.device

    def one_device_value(self, name: Name, total: Tensor, rows: float) -> Tensor:
        """The sum (or the mean) over all rows, as the forward has it on one device.

        Args:
            total: the sum over all pieces.
            rows: the number of all rows.
        """
        operation, sum_id = self.program.tape.maker(name), self.program.sums[name]
        assert operation is not None
        total = total / rows if operation.function == "mean" else total
        return total.view(self.sums[sum_id].shape).to(self._device(sum_id), self.types[sum_id], non_blocking=True)


class LabelCounter:
    """Counts in pieces of batches. Records a program for each set of shapes, or one for all.

    Args:
        record: runs the forward on meta.
        model: the model, whose buffers a program may use.
        modes: reads which modules are in evaluation mode.
        switches: what a person sets on modules between steps.

    Attributes:
        common_sums: the sums that all ranks know, in the same order on all.
        notes: the notes for a person, in order.
    """

    def __init__(self, record: Record, model: nn.Module, modes: Modes, switches: Switches) -> None:
        self._record, self._model, self._modes, self._switches = record, model, modes, switches
        self._programs = LengthCache(_between)
        self.common_sums: tuple[SumId, ...] = ()
        self.notes: dict[str, None] = {}

    def run_on_meta(self, batch: Any, mode: Any) -> None:
        """Runs the forward for the shapes of a batch, with the model in its current state, under a function mode."""
        with torch.no_grad(), random_numbers_kept():
            self._record(batch, mode, self._modes.now(), self._switches.now)

    def count(self, batch: Any, rows: int) -> LabelCounts:
        """Counts in a piece of a batch with so many rows."""
        leaves = tensors_in(batch)
        sizes = sizes_of(batch, rows, self._modes.now(), self._switches.told)
        program = self._programs.get_or_make(sizes, lambda: self._new_program(batch, leaves, rows))
        try:
            return self._count_by(program, leaves, rows)
        except Exception as error:
            program = LabelProgram(Tape(len(leaves)), error=_as_text(error))
            self._note(program)
            return self._count_by(program, leaves, rows)

    def _count_by(self, program: LabelProgram, leaves: list[Tensor], rows: int) -> LabelCounts:
        """Counts by a program; on the host, if all tensors have host copies and the program uses no buffer."""
        buffers = dict(tensors_of_model(self._model)) if program.tape.buffers else {}
        values = NamedValues(program.tape, leaves, buffers)
        hosts = [host for leaf in leaves if (host := host_of(leaf)) is not None]
        on_host = (
            len(hosts) == len(leaves) and not buffers and any(a is not b for a, b in zip(hosts, leaves, strict=True))
        )
        return LabelCounts(program, values, NamedValues(program.tape, hosts, {}) if on_host else values, rows)

    # --- programs ---------------------------------------------------------------------------------------------------

    def _new_program(self, batch: Any, leaves: list[Any], rows: int) -> LabelProgram:
        """Records the program for the shapes of a batch; an empty one, with the error, if the forward fails."""
        try:
            recorder = self._recording(batch, len(leaves))
            with torch.no_grad():
                program = program_of(recorder, self._shapes(recorder, batch, leaves, rows), len(leaves))
        except Exception as error:  # the forward cannot run without values
            program = LabelProgram(Tape(len(leaves)), error=_as_text(error))
        self._note(program)
        return program

    def _recording(self, batch: Any, leaves: int) -> CountRecorder:
        """Runs the forward under a recorder, and returns the recorder."""
        recorder = CountRecorder(leaves)
        self.run_on_meta(copied(batch), recorder)
        return recorder

    def _shapes(self, recorder: CountRecorder, batch: Any, leaves: list[Any], rows: int) -> Shapes:
        """A function for the shapes of names. If need be, records the forward again with twice as many rows."""
        twofold = doubled(batch, rows)
        once, twice = (NamedValues(recorder.tape, x, recorder.tensors) for x in (leaves, tensors_in(twofold)))
        try:
            for name in recorder.used:
                twice.value(name)
        except Exception:  # an operation has the number of rows as a constant
            second = self._recording(twofold, len(leaves))
            twice = NamedValues(second.tape, tensors_in(twofold), second.tensors)
        return lambda name: (_shape(once.value(name)), _shape(twice.value(name)))

    def _note(self, program: LabelProgram) -> None:
        """Notes for a person what a program could not count."""
        if program.error:
            self.notes[
                f"the divisors of means could not be found without running the model ({program.error}): microbatches and "
                "data ranks are weighted by rows"
            ] = None
        for line in program.uncounted_lines:
            self.notes[
                f"the labels of the mean at {line} do not follow from the batch alone: it is weighted by rows, and an ignored "
                "label is an error"
            ] = None


def _between(points: Points[LabelProgram]) -> Callable[[int], LabelProgram] | None:
    """For lengths between recorded ones: the program, if all recorded programs are equal; else None."""
    first, *others = (program for _, program in points)
    return (lambda length: first) if all(map(first.is_like, others)) else None


def _shape(x: Any) -> torch.Size:
    return x.shape if isinstance(x, Tensor) else torch.Size()


def _as_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]
