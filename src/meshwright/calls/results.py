"""``Results``: makes values of what calls and events leave behind, on the rank that ran them.

returned tensors ──► values of the stage (calls/values.py), and marked as such
                 └─► what the model sees: of a branch whose data ranks have some rows each, a ``RowShard`` with all rows
tensors left in containers and objects among the arguments ──► values of the stage
other values in memory that an event wrote to ──► the same tensors, under new numbers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.changes import map_changed
from meshwright.calls.placeholder import PathError, Placeholder, RowShard
from meshwright.calls.stage import StageProgram
from meshwright.calls.structure import map_tensors, tensors_of
from meshwright.calls.tracer import Tracer
from meshwright.calls.values import StageValues
from meshwright.described import tensors_within
from meshwright.graph import Call, Event, spelled


class Results:
    """The results of one microbatch's forward through one stage.

    It has no tables: values are in ``values``, and a tensor is marked with its number by the tracer. Each method gets the
    tracer as an argument: if this object held the tracer, which holds this object, only the garbage collector would free both.

    Invariants: a tensor that is added is marked with the number under which ``values`` has it. A call or event leaves as many
    tensors as in the recorded forward; else there is a ``PathError``, and none of them is added.

    Args:
        program: what the stage does.
        values: this rank's tensors, to which results are added.
        device: the device of this rank.
    """

    def __init__(self, program: StageProgram, values: StageValues, device: torch.device) -> None:
        self._program, self._graph, self._values, self._device = program, program.graph, values, device

    def add(self, tracer: Tracer, t: Tensor, number: int | None, since: int, place: int = 0) -> None:
        """Adds a result of this stage, in a place. A value from before position ``since`` is only marked: it is an input."""
        if number is None or isinstance(t, (nn.Parameter, Placeholder)):
            return
        tracer.name_value(t, number)
        if self._graph.values[number].position < since:
            return
        self._values.add(number, t, place)

    def add_changes(self, tracer: Tracer, call: Call, arguments: Any, batch_tensors: Sequence[Tensor]) -> None:
        """Adds the values that an untraced call left in containers and objects among its arguments.

        Args:
            batch_tensors: the tensors of the batch among its arguments, before the call.
        """
        for change in call.changes:
            try:
                tensors = tensors_of(map_changed(_as_new(batch_tensors, change.values), change, arguments))
            except LookupError:
                tensors = []
            if len(tensors) != len(change.values):
                raise PathError(
                    f"{spelled(call.path)} left {len(tensors)} tensors in an argument, "
                    f"but {len(change.values)} in the recorded forward"
                )
            for t, number in zip(tensors, change.values, strict=True):
                self.add(tracer, t, number, call.start)

    def of_call(self, tracer: Tracer, call: Call, result: Any, place: int = 0) -> Any:
        """Adds the result of an untraced call that this rank ran. Returns the result that the model sees."""
        tensors = tensors_of(result)
        if len(tensors) != len(call.outputs):
            raise PathError(
                f"{spelled(call.path)} returned {len(tensors)} tensors, but {len(call.outputs)} in the recorded forward"
            )
        if self._graph.ways:
            result = self._as_decided(tracer, result, call.outputs)
        for t, number, recorded in zip(tensors_of(result), call.outputs, tensors_of(call.returned), strict=True):
            self.add(tracer, t, number, call.start, place)
            _unmark_parameter(tracer, t, recorded)
        return self._all_rows(tracer, result, place, call.outputs, call.returned)

    def _as_decided(self, tracer: Tracer, result: Any, numbers: Sequence[int | None]) -> Any:
        """``result``, with a view in place of an older value that a call returned because of a value that Python read: with
        another value the call returns another tensor, so what it returns has a number of its own."""
        remaining_numbers = iter(numbers)

        def decided(t: Tensor) -> Tensor:
            number = next(remaining_numbers)
            if number not in self._graph.decided or tracer.number(t) in (None, number):
                return t
            with torch.enable_grad():  # (the tensor keeps its gradient, whatever the mode of the call)
                return tracer.untraced(t.view_as, t)

        return map_tensors(decided, result)

    def of_event(self, tracer: Tracer, event: Event, result: Any, written: Tensor | None, place: int) -> Any:
        """Adds the results of an event that this rank ran. Returns the result that the model sees.

        Args:
            written: this rank's tensor to which the event wrote, which has been added already.
        """
        position = self._graph.positions[event.path, event.index]
        recorded_result = self._graph.outputs[event.path, event.index]
        results, recorded_tensors = tensors_within(result), tensors_within(recorded_result)
        if len(results) != len(event.outputs):
            raise PathError(
                f"{event.function} at {event.line} gave {len(results)} tensors, but {len(event.outputs)} were recorded"
            )
        for t, number, recorded in zip(results, event.outputs, recorded_tensors, strict=True):
            if t is not written:
                self.add(tracer, t, number, position, place)
            _unmark_parameter(tracer, t, recorded)
        return self._all_rows(tracer, result, place, event.outputs, recorded_result)

    def renumber(self, tracer: Tracer, event: Event, position: int, place: int) -> None:
        """Gives new numbers to the other values in the memory to which an event wrote."""
        for before, now in event.renamed:
            in_branch, _ = self._values.branch_tensor(before, place)  # the write was to memory of this tensor
            t = self._values.get(before) if in_branch is None else in_branch
            tracer.renamed[before] = now
            if self._program.runs(position) and t is not None:
                self.add(tracer, t, now, position, place)

    def _all_rows(self, tracer: Tracer, result: Any, place: int, numbers: Sequence[int | None], recorded: Any) -> Any:
        """A result of a place as the model sees it: with all rows, also if this rank has only some of them."""
        if not self._program.divides(place):
            return result
        recorded_tensors = zip(numbers, tensors_of(recorded), strict=True)

        def with_all_rows(t: Tensor) -> Tensor:
            number, like = next(recorded_tensors)
            return t if number is None else RowShard(like, tracer, number, self._device, t)

        return map_tensors(with_all_rows, result)


def _unmark_parameter(tracer: Tracer, t: Tensor, recorded: Tensor) -> None:
    """If a recorded result was a parameter, its local part is the result now, and is no value."""
    if isinstance(recorded, nn.Parameter) and not isinstance(t, nn.Parameter):
        tracer.name_value(t, None)


# --- tensors of the batch ---------------------------------------------------------------------------------------------


def batch_tensors_of(tracer: Tracer, arguments: Any) -> list[Tensor]:
    """The tensors among arguments that are no values: those of the batch, and what follows from it alone."""
    return [t for t in tensors_of(arguments) if not tracer.is_value(t) and not isinstance(t, nn.Parameter)]


def as_new_tensors(tracer: Tracer, result: Any, arguments: Any, numbers: Sequence[int | None]) -> Any:
    """``result``, with a view in place of a value that is, in this run, a tensor of the batch itself.

    ``mask.type_as(x)`` is a value; if the mask has that dtype already, the result is the mask. The mask itself must not be
    marked as a value, as functions of it alone are no events.
    """
    batch_tensors = batch_tensors_of(tracer, arguments)
    return map_tensors(_as_new(batch_tensors, numbers), result) if batch_tensors else result


def _as_new(batch_tensors: Sequence[Tensor], numbers: Iterable[int | None]) -> Callable[[Tensor], Tensor]:
    """A function for the results of a call, one after the other: a view of each value that is a tensor of the batch itself.

    Args:
        numbers: of the results: the number of the value; None for a result that is no value.
    """
    remaining_numbers = iter(numbers)

    def as_new(t: Tensor) -> Tensor:
        is_value = next(remaining_numbers, None) is not None
        return t.view_as(t) if is_value and any(t is x for x in batch_tensors) else t

    return as_new
