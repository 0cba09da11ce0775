"""``StageInterpreter``: runs the model's own forward, of which this rank executes one stage: the trunk and its own branches.

Each call of a module runs, is a stub, or is open (calls/stage.py). A value of another stage or branch is the tensor that was
received, if something on this rank uses it; else a ``RemoteTensor`` with shape and dtype, which raises an error if it is read.
The forward stops as soon as everything exists that other stages take from this one. Forks and joins (regions.py) are performed
in the order of the program, on every rank of the place around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from meshwright.blame import model_line
from meshwright.calls import path_errors
from meshwright.calls.changes import map_changed
from meshwright.calls.crossings import Crossings
from meshwright.calls.exchange import Exchange, RunningBlock, Streams
from meshwright.calls.hook import Forward
from meshwright.calls.place_runner import PlaceRunner
from meshwright.calls.placeholder import PathError, Placeholder, RemoteTensor
from meshwright.calls.results import Results, as_new_tensors, batch_tensors_of
from meshwright.calls.stage import OPEN, STUB, StageProgram
from meshwright.calls.structure import map_tensors, put_tensors, tensors_of
from meshwright.calls.stub import stub
from meshwright.calls.tracer import Tracer, is_hook_node
from meshwright.calls.values import StageValues
from meshwright.described import map_within, tensors_within
from meshwright.graph import ROOT, Call, Change, Event, Path, Segment, spelled
from meshwright.private import function_mode_at, function_modes
from meshwright.spmd.torch_functions import SET_DATA, is_fact, label_of, target_of


class _Done(BaseException):
    """Stops the forward: every value that other stages take exists. Not an Exception, so that no model catches it."""


class StageInterpreter(Tracer):
    """One microbatch's forward through one stage.

    Attributes:
        left: on the last stage, at the end: the tensors that the model left in containers and objects among its arguments, for
            each change of the recorded forward.

    Its state besides the values (calls/values.py), with invariants:

        _crossings     forks and joins still to come (calls/crossings.py); all before the current position are done.
        _started       (position, call, handle) of blocks that run concurrently: each must end before its position.
        _grad          whether gradients were enabled before the forward. It never changes.
        _open_units    how many units of FSDP, or nodes for backward hooks, are open: the forward does not stop within one.
        _replacements  tensors that hooks passed to modules in place of values, by id: within the module, each is used as it is.
        _inner_place   the branch in which untraced code of the model runs that takes values beside its arguments (from a
                       closure, from before a read), or that may do so; 0 otherwise.
        _hidden        how many tensors of other places the running call, if it is untraced, has met there.
        _hooking       whether torch is making the autograd node for a module's backward hook.
        _stale         whether some plain tensor on this rank (a buffer, say) has since been changed by another stage. Once
                       true, it stays true.
        _unrecorded    whether what runs is the rest of a call in which Python read a value: it may use any parameter.
        closed         (of ``Tracer``) how many calls are running that are not traced: while it is not 0, there are no events.

    Args:
        program: what the stage does.
        received: the values from other stages, by number.
        device: the device of this rank.
        name: a stage → its name in errors.
        send: a value as the model sees it → the tensor to send (a sharded one is gathered).
        exchange: performs forks and joins, if there are branches.
        streams: runs blocks concurrently on this rank.
        carried: see ``Tracer``.
        failures: of a trial: the errors of this rank's branches are added to it, and ones stand for the values of a branch that
            has failed, as other ranks wait for them. None: errors are raised.
    """

    def __init__(
        self,
        program: StageProgram,
        received: Mapping[int, Tensor],
        *,
        device: torch.device,
        name: Callable[[int], str],
        send: Callable[[Tensor], Tensor],
        exchange: Exchange | None = None,
        streams: Streams | None = None,
        carried: Iterable[Tensor] = (),
        failures: list[Exception] | None = None,
    ) -> None:
        super().__init__(carried)
        self.program, self.graph, self.device = program, program.graph, device
        self._name, self._send, self._streams = name, send, streams
        self._values = StageValues(program)
        self._results = Results(program, self._values, device)
        self._runner = PlaceRunner(program, exchange, device, failures)
        self._crossings = Crossings(program, self._values, exchange)
        self._started: list[tuple[int, Call, RunningBlock]] = []
        self._grad, self._open_units = torch.is_grad_enabled(), 0
        self._inner_place = self._hidden = 0
        self._replacements: dict[int, Tensor] = {}
        self._hooking = self._stale = self._unrecorded = False
        self.left: list[list[Tensor]] = []
        for number, value in received.items():
            self.keep(value, number)

    def outputs(self) -> list[Tensor]:
        """The values that other stages take, in the order of the program."""
        return [self._values[n] for n in self.program.out]

    # --- values -----------------------------------------------------------------------------------------------------

    def replaced(self, number: int, now: Tensor) -> None:
        """See ``Tracer``."""
        # A fork gives the same value on all ranks, whether or not they have the hooked module.
        if self.program.forks_and_joins:
            self.name_value(now, number)
        else:
            self.keep(now, number)

    def replaced_within(self, number: int, now: Tensor) -> None:
        """See ``Tracer``."""
        self.name_value(now, number)
        if not self.program.forks_and_joins:  # (see ``replaced``)
            self._replacements[id(now)] = now

    def keep(self, t: Tensor, number: int) -> None:
        """From now on ``t`` stands for the value ``number``."""
        self.name_value(t, number)
        self._values[number] = t

    def _stop_if_done(self) -> None:
        """Called between calls and events, when the hooks of the last call have run. Within an FSDP unit they have not."""
        if self._values.complete and not self.program.last and not self._open_units:
            raise _Done

    def _tensor_of(self, t: Tensor, place: int = 0) -> Tensor:
        """This rank's tensor for the value ``t``, in a place; ``t`` itself if it is no value, or this rank has no tensor."""
        number = self.number(t)
        if number is None or id(t) in self._replacements:
            return t
        in_branch = self._values.awaited_branch_tensor(number, place)
        return self._values.get(number, t) if in_branch is None else in_branch

    def place_of(self, number: int) -> int:
        """See ``Tracer``."""
        return self.program.place(self.graph.values[number].position)

    def wait_for(self, number: int) -> None:
        """See ``Tracer``."""
        self._values.wait_for(number)

    def _advance_to(self, position: int) -> None:
        """Performs forks and joins up to a position of the program, whether or not this rank runs the event there; and waits
        for concurrent blocks that must end before it."""
        for started in [s for s in self._started if s[0] <= position]:
            self._started.remove(started)
            _, call, block = started
            self.closed += 1
            result = block.finish()
            self.closed -= 1
            self._results.of_call(self, call, result)
        while self._crossings.due(position):
            self.closed += 1
            # What takes the value first may be in a ``torch.no_grad()`` of the model; others need its gradient.
            with torch.inference_mode(False), torch.set_grad_enabled(self._grad):
                self._crossings.cross(self.keep)
            self.closed -= 1

    def _stand_in(self, number: int, like: Tensor) -> Tensor:
        """This rank's tensor for a value; a placeholder if this rank has none. ``like``: the recorded tensor."""
        return self._values[number] if number in self._values else self._placeholder(number, like)

    def _placeholder(self, number: int, like: Tensor) -> Tensor:
        """Stands for a value of another stage or branch."""
        if like.is_nested:  # no wrapper has its shape; all that takes it runs where it is made (planning/memory.py)
            self.name_value(like, number)
            return like
        return RemoteTensor(self.graph.like(number, like), self, number, self.device)

    def unavailable(self, number: int, function: str, line: str) -> RuntimeError:
        """See ``Tracer``."""
        return path_errors.unavailable(self.program, self._name, number, function, line)

    # --- calls ------------------------------------------------------------------------------------------------------

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``."""
        treatment = self.program.treatments.get(path, OPEN)
        if path == ROOT:
            return self._run_root(forward.run, args, kwargs)
        # FSDP2's hook before the forward of a unit has run. Its hook after the forward must run, too.
        if not isinstance(forward.module, FSDPModule):
            self._stop_if_done()
        if treatment == OPEN:
            return self._open_call(path, forward, args, kwargs)
        call = self.graph.calls[path]
        self._advance_to(call.stop - 1)
        self._values.note_passed(call.stop - 1)  # (the forward does not stop within the call)
        if treatment == STUB:
            return stub(call, args, kwargs, self._stand_in, self.name_value)
        return self._run_call(path, call, forward, args, kwargs)

    def _open_call(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call and traces its functions."""
        closed, unit = self.closed, isinstance(forward.module, FSDPModule)
        self._open_units += unit
        unrecorded = False
        try:
            result = self.follow(path, forward.open, args, kwargs)
        finally:  # the model may catch what the call raises
            self._open_units -= unit
            if self.closed > closed:  # within the call Python read a value, and the rest of the call was not traced
                self.closed, self._unrecorded, self._inner_place = closed, False, 0
                unrecorded = True
        if unrecorded:
            call = self.graph.calls[path]
            place = self.program.place(call.stop - 1)
            result = map_tensors(lambda t: self._tensor_of(t, place), result)
            result = as_new_tensors(self, result, (args, kwargs), call.outputs)
            result = self._results.of_call(self, call, result)
            self._results.add_changes(self, call, (args, kwargs), [])
        return result

    def _run_call(self, path: Path, call: Call, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call untraced; on a stream, it only begins."""
        place = self.program.place(call.start)
        model_args = args, kwargs
        # What the call changes must be the model's own containers and objects, not copies.
        put = put_tensors if call.changes else map_tensors
        args, kwargs = put(lambda t: self._tensor_of(t, place), model_args)
        batch_tensors = batch_tensors_of(self, (args, kwargs)) if call.changes else []
        self._values.wait_for_inputs(call, place)
        self.closed += 1
        if self._streams is not None and path in self.program.streamed:
            stream, first_use = self.program.streamed[path]
            self._started.append((first_use, call, self._streams.start(stream, forward.run, args, kwargs)))
            self.closed -= 1
            return stub(call, *model_args, self._stand_in, self.name_value)
        self._inner_place = place if self.program.hides.get(path, True) else 0
        self._hidden = 0
        try:
            with self._off() if self._only_calls() else nullcontext():
                result = self._runner.run(place, forward.run, args, kwargs)
        except Exception as error:
            if not self._runner.failed(place, error):
                raise
            result = stub(call, args, kwargs, partial(self._runner.ones, place), self.name_value)
        finally:
            self.closed -= 1
            if self._inner_place:
                self.program.hides[path] = self._hidden > 0
            self._inner_place = 0
        self._results.add_changes(self, call, (args, kwargs), batch_tensors)
        return self._results.of_call(self, call, as_new_tensors(self, result, (args, kwargs), call.outputs), place)

    def _only_calls(self) -> bool:
        """Whether this is the only function mode, and would only call the functions of the untraced call that begins: no
        placeholder of a value that this rank has stands in a variable of the model, as there are no branches and no streams."""
        alone = function_modes() == 1 and function_mode_at(0) is self
        return alone and self.may_be_passed() and self._streams is None and not self.program.forks_and_joins

    @contextmanager
    def _off(self) -> Iterator[None]:
        """A context in which this mode is off: in Python it takes some µs for each function."""
        # Not the exit of ``FunctionMode``, which would let compiled code run.
        TorchFunctionMode.__exit__(self, None, None, None)
        try:
            yield
        finally:
            TorchFunctionMode.__enter__(self)

    def _run_root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model's own forward. Returns the values that other stages take, or on the last stage the model's output."""
        try:
            result = self.follow(ROOT, forward, args, kwargs)
        except _Done:
            result = None
        self._advance_to(len(self.graph.events))
        if self.program.last:
            self.left = [self._left(change, (args, kwargs)) for change in self.graph.left_changes]
            has_placeholders = bool(self.program.forks_and_joins or self.program.streamed)
            return map_tensors(self._tensor_of, result) if has_placeholders else result
        if missing := self._values.missing:
            event = self.graph.events[self.graph.values[min(missing)].position]
            raise PathError(
                f"the forward ended without {event.function} of {spelled(event.path)} ({event.line}), "
                "which the recorded forward ran"
            )
        self.closed += 1
        for number in self.program.out:
            self.wait_for(number)
            self._values[number] = self._send(self._values[number])
        return self.outputs()

    def _left(self, change: Change, arguments: Any) -> list[Tensor]:
        """This rank's tensors for those that the model left in an argument, with all elements."""
        try:
            tensors = tensors_of(map_changed(lambda t: self._send(self._tensor_of(t)), change, arguments))
        except LookupError:
            tensors = []
        if len(tensors) != len(change.values):
            raise PathError(
                f"the forward left {len(tensors)} tensors in an argument, but {len(change.values)} in the recorded forward"
            )
        return tensors

    def segment_begins(self, segment: Segment, *, reentrant: bool) -> bool:
        """See ``Tracer``. A segment is recomputed untraced, so only if all its events are this rank's."""
        start, stop = self.graph.segments.get(segment, (0, 0))
        if not (start < stop and all(map(self.program.runs, range(start, stop)))):
            return False
        outside = self._from_other_places(start, stop)
        # A reentrant checkpoint gives gradients to the model's own tensors, not to those that forks made of them.
        if reentrant and any(self.graph.values[n].requires_grad for n in outside):
            return False
        return all(n in self._values and type(self._values[n]) is Tensor for n in outside)

    def _from_other_places(self, start: int, stop: int) -> list[int]:
        """The values from other places that branches take in these events. A recomputation takes the model's own tensors, so
        these must be those with which the branch computes: whole tensors of this rank."""
        place, values = self.program.place, self.graph.values
        inputs = {(place(p), n) for p in range(start, stop) if place(p) for n in self.graph.events[p].inputs}
        return [n for here, n in inputs if place(values[n].position) != here]

    def is_hiding(
        self, code_call: Segment, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """See ``Tracer``."""
        return code_call in self.graph.hiding

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``.

        For a module with backward hooks torch makes a node of autograd that returns its inputs, and makes the tensors that it
        returns by ``view_as``: an event for each. These run here first, and the node gets their results: a gradient that leaves
        it then goes to this rank's tensors, and not to what stands for them.
        """
        if not is_hook_node(function) or self.closed or self.thread != get_ident():
            return super().custom(apply, function, args, kwargs)
        before, self._hooking = self._hooking, True
        self._open_units += 1  # the values exist before the node does
        try:
            views = [t.view_as(t) for t in args]
            result = self.untraced(apply, function, *views)
        finally:
            self._hooking = before
            self._open_units -= 1
        for view, t in zip(views, tensors_of(result), strict=True):
            number = self.number(view)
            if number is not None and not isinstance(t, Placeholder):
                position = self.graph.values[number].position
                self._results.add(self, t, number, position, self.program.place(position))
        return result

    # --- events -----------------------------------------------------------------------------------------------------

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        """See ``Tracer``."""
        self._stop_if_done()
        position = self.graph.positions.get((path, index))
        name = label_of(func)
        if position is None or self.graph.events[position].function != name:
            expected = "nothing more" if position is None else self.graph.events[position].function
            raise PathError(
                f"{spelled(path)} runs {name}, but the recorded forward ran {expected} there: a forward that depends on "
                "values outside its blocks cannot be cut there. A forward hook that computes with tensors is to be put on "
                "before parallelize"
            )
        event = self.graph.events[position]
        self._advance_to(position)
        place = self.program.place(position)
        for i, number in event.named:
            self.share_memory(tensors[i])
            self.name_value(tensors[i], number)
            self._stale |= not self.program.runs(position)
            if self.program.runs(position):
                self._results.add(self, tensors[i], number, position, place)
        result = self._result_of(event, position, func, args, kwargs, tensors)
        self._results.renumber(self, event, position, place)
        self._values.note_passed(position)
        return result

    def _result_of(
        self,
        event: Event,
        position: int,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """The result of an event. If the event is another rank's, the tensors that stand for its result on this rank."""
        # A tensor on meta is a parameter of another stage, which this stage does not use.
        if event.hands_on and any(t.is_meta for t in tensors):
            return self._remote_result(event, target_of(func, args, kwargs), tensors)
        has_inputs = all(n in self._values for n in event.inputs)
        if self.program.runs(position) or (has_inputs and (event.reads or event.hands_on)):
            return self._run(event, func, args, kwargs)  # (a parameter that is read is on every stage)
        if position in self.program.shared_draws or position in self.program.other_stage_draws:
            self._runner.discard_draw(func, args, kwargs)
        if event.reads:
            missing = next(n for n in event.inputs if n not in self._values)
            raise self.unavailable(missing, event.function, event.line)
        return self._remote_result(event, target_of(func, args, kwargs), tensors)

    def _run(self, event: Event, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an event and adds its results."""
        position = self.graph.positions[event.path, event.index]
        target = target_of(func, args, kwargs) if event.written is not None else None
        # An event that returns a parameter runs on every rank, also outside its place.
        place = self.program.place(position)
        place = place if place in self.program.rank_places else 0
        model_args = args, kwargs
        args, kwargs = map_within(lambda t: self._tensor_of(t, place), (args, kwargs))
        placeholders = (t for t in tensors_within((args, kwargs)) if isinstance(t, Placeholder))
        if (missing := next(placeholders, None)) is not None:
            raise self.unavailable(missing._mw_value[1], event.function, event.line)
        args = self._runner.sized(place, func, args)
        if self.runs_code(func):
            self._inner_place = place
        try:
            if position in self.program.shared_draws:
                result = self._runner.shared_draw(place, func, model_args, (args, kwargs))
            else:
                result = self._runner.run(place, func, args, kwargs)
        except Exception as error:
            if event.reads or not self._runner.failed(place, error):
                raise
            result = self._runner.ones_of_event(event, place, target_of(func, args, kwargs))
        finally:
            self._inner_place = 0
        if event.reads and event.inputs:
            # Python read a value, and may take any path now. All the rest of this call is this stage's: it is not traced.
            self._values.wait_for_all(place)
            self.closed += 1
            self._unrecorded, self._inner_place = True, place
            return result
        ours = target_of(func, args, kwargs)
        if target is None or ours is None:
            result = as_new_tensors(self, result, (args, kwargs), event.outputs)
        else:
            self._results.add(self, ours, event.written, position)
            if target is not ours:  # the model continues with its own tensor
                self.name_value(target, event.written)
        return self._results.of_event(self, event, result, ours if target is not None else None, place)

    def _remote_result(self, event: Event, target: Tensor | None, tensors: list[Tensor]) -> Any:
        """The result of an event of another stage or branch, with the tensors that stand for its values on this rank.

        ``target``: the tensor to which the event writes.
        """
        recorded = self.graph.outputs[event.path, event.index]
        if event.written is not None and target is not None:
            if isinstance(target, RemoteTensor) and tuple(target.shape) != self.graph.values[event.written].shape:
                # A change of shape in place (``unsqueeze_``): the model's own tensor must change its shape.
                like = self.graph.like(event.written, tensors_of(recorded)[0])
                torch.utils.swap_tensors(target, RemoteTensor(like, self, event.written, self.device))
            self.name_value(target, event.written)
            self._stale |= not isinstance(target, Placeholder)
        numbers, arguments = iter(event.outputs), {self.number(t): t for t in tensors}
        # An argument that a Function of the model marks as dirty is returned, with its new number.
        arguments |= {now: arguments[before] for before, now in event.renamed if before in arguments}

        def stand_in(t: Tensor) -> Any:
            number = next(numbers)
            if number is not None and number in arguments and number != event.written:
                return arguments[number]  # the argument itself: a write to either is a write to both
            if number is not None and number == event.written and target is not None:
                return self._values.get(number, target)
            # Not this rank's tensor, whose autograd history is another.
            if number is not None and self._hooking:
                return self._placeholder(number, t)
            return t if number is None else self._stand_in(number, t)

        return map_within(stand_in, recorded)

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``."""
        x = args[0] if args else None
        if self._values.waits and func in _READS_MEMORY and (number := self.number(args[0])) is not None:
            self.wait_for(number)
        if func == _REQUIRES_GRAD and self._stale and (number := self.number(args[0])) is not None:
            return self.graph.values[number].requires_grad  # another stage may have written to it
        if func == _DEVICE and isinstance(x, nn.Parameter) and x.is_meta:
            return self.device  # a parameter of another stage: the model makes a tensor on its device
        if func == SET_DATA and isinstance(x, nn.Parameter):
            if x.is_meta or self._values.passed < self.program.start:
                return None  # another stage writes it, on this rank or on another
            if isinstance(args[1], Placeholder):
                raise self.unavailable(args[1]._mw_value[1], "p.data = ...", "")
        return func(*args, **kwargs)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``."""
        if self._hooking and func is Tensor.view_as and isinstance(args[0], Placeholder):
            return RemoteTensor(args[0], self, args[0]._mw_value[1], self.device)  # torch sets its history
        foreign = not _ORDINARY.issuperset(types) and any(issubclass(t, Placeholder) for t in types)
        # (After a read, tensors of this rank's branches stand in the model's variables where the trunk has joined values.)
        replaced = self._stale or foreign or (self._unrecorded and bool(self.program.forks_and_joins))
        if self._inner_place or (replaced and not is_fact(func)):
            args, kwargs = map_within(self._inner_tensor_of, (args, kwargs))
        if self._unrecorded and not is_fact(func):
            self._has_parameters((args, kwargs), label_of(func))
        return func(*args, **kwargs)

    def _inner_tensor_of(self, t: Tensor) -> Tensor:
        """``_tensor_of`` in untraced code. Counts tensors of other places."""
        inner = self._tensor_of(t, self._inner_place)
        self._hidden += inner is not t
        return inner

    def _has_parameters(self, arguments: Any, function: str) -> None:
        """Raises a PathError if one of the arguments is a parameter of another stage. (Torch computes with it, on the CPU,
        and gives any numbers.)"""
        if any(isinstance(t, nn.Parameter) and t.is_meta for t in tensors_within(arguments)):
            raise path_errors.parameter_elsewhere(self._name(self.program.stage), function, model_line())

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``."""
        return super().may_be_passed() and not (self._stale or self._unrecorded or self._inner_place)


_ORDINARY = frozenset([Tensor, nn.Parameter])
_DEVICE = Tensor.device.__get__
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
# Facts for which the memory of a value must be filled.
_READS_MEMORY = frozenset([Tensor.__repr__, Tensor.data_ptr, Tensor.untyped_storage])
