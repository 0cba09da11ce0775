"""A part of the model: its own forward, of which this rank runs a stage, and in it the trunk and its own branches.

Each call of a module runs, is a stub, or is looked into (calls/stage.py). A value that another stage or branch gives is,
here, the tensor that was received, if something here takes it, or else a ``RemoteTensor``: shape and type, and an error for
whoever reads it. The forward stops as soon as everything that other stages take of this one exists. Forks and joins
(regions.py) come in their turn, on every rank of the place around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.calls import path_errors
from meshwright.calls.crossings import Crossings
from meshwright.calls.exchange import Exchange, Started, Streams
from meshwright.calls.hook import Forward
from meshwright.calls.placeholder import PathError, Placeholder, RemoteTensor, RowShard, sized
from meshwright.calls.stage import OPEN, STUB, StageProgram
from meshwright.calls.structure import lists_in, map_tensors, tensors_of
from meshwright.calls.stub import stub
from meshwright.calls.tracer import Tracer
from meshwright.calls.values import StageValues
from meshwright.graph import ROOT, Call, Event, Path, Segment, spelled
from meshwright.private import pytree
from meshwright.spmd.torch_functions import SET_DATA, is_fact, label_of


class _Done(BaseException):
    """Everything that others take of this stage exists. Not an Exception, so that a model lets it through."""


class StageInterpreter(Tracer):
    """One microbatch's forward through one stage.

    What it keeps besides its values (calls/values.py), each with what holds of it throughout:

        _crossings   forks and joins still to come (calls/crossings.py); all before the present position are done.
        _started     blocks that run beside: before which position each must have ended. None is past its position.
        _units       how many of FSDP's units are being looked into: the forward does not end within one.
        _handed      tensors that hooks handed to modules in place of values, by id: within the module each is itself.
        _hooking     whether torch makes a node for a module's backward hook.
        _stale       whether some plain tensor here (a buffer, say) is what another stage has changed since. Grows only.
        closed       (of ``Tracer``) how many calls that are not looked into are running: while it is not 0, no event is met.

    Args:
        program: what the stage does.
        received: the values that other stages gave, by number.
        device: of this rank.
        name: a stage → how errors call it.
        send: what the model calls a value → the tensor that is sent (a cut one made whole).
        exchange: what forks and joins, where there are branches.
        streams: what runs blocks at the same time on this rank.
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
    ) -> None:
        super().__init__(carried)
        self.program, self.graph, self.device = program, program.graph, device
        self._name, self._send, self._exchange = name, send, exchange
        self._values, self._streams = StageValues(program), streams
        self._crossings = Crossings(program, self._values, exchange)
        self._started: list[tuple[int, Call, Started]] = []
        self._units = 0
        self._handed: dict[int, Tensor] = {}
        self._hooking = self._stale = False
        for number, value in received.items():
            self.keep(value, number)

    def outputs(self) -> list[Tensor]:
        """What other stages take, in the program's order."""
        return [self._values[n] for n in self.program.out]

    # --- values -----------------------------------------------------------------------------------------------------

    def replaced(self, number: int, now: Tensor) -> None:
        """See ``Tracer``."""
        if self.program.moves:  # what branches fork is the same on all ranks, whichever have the module that was hooked
            self.name_value(now, number)
        else:
            self.keep(now, number)

    def handed(self, number: int, now: Tensor) -> None:
        """See ``Tracer``."""
        self.name_value(now, number)
        if not self.program.moves:  # (see ``replaced``)
            self._handed[id(now)] = now

    def keep(self, t: Tensor, number: int) -> None:
        """``t`` is what stands for a value from now on."""
        self.name_value(t, number)
        self._values[number] = t

    def _gave(self, t: Tensor, number: int | None, since: int, place: int = 0) -> None:
        """A tensor that this stage gave, from a position on and in a place: its own, or one that it took."""
        if number is None or isinstance(t, (nn.Parameter, Placeholder)):
            return
        self.name_value(t, number)
        if self.graph.values[number].position < since:
            return
        self._values.enter(number, t, place)

    def _stop_if_done(self) -> None:
        """Between calls and events: hooks of the call that gave the last value have run then; within an FSDP unit its own
        have not."""
        if self._values.complete and not self.program.last and not self._units:
            raise _Done

    def _had(self, t: Tensor, place: int = 0) -> Tensor:
        """The tensor that stands for ``t`` here, in a place; itself where it is not a value or there is none."""
        number = self.number(t)
        if number is None or id(t) in self._handed:
            return t
        arrived_value = self._values.taken(number, place)
        return self._values.get(number, t) if arrived_value is None else arrived_value

    def arrived(self, number: int) -> None:
        """See ``Tracer``."""
        self._values.arrived(number)

    def _reach(self, position: int) -> None:
        """Forks and joins up to a position of the program, whether or not what stands there runs here; and the ends of
        blocks that run beside."""
        for entry in [s for s in self._started if s[0] <= position]:
            self._started.remove(entry)
            self.closed += 1
            result = entry[2].finish()
            self.closed -= 1
            self._returned(entry[1], result)
        while self._crossings.due(position):
            self.closed += 1
            self._crossings.cross(self.keep)
            self.closed -= 1

    def _standing(self, number: int, like: Tensor) -> Tensor:
        if number not in self._values:
            return RemoteTensor(self.graph.like(number, like), self, number, self.device)
        return self._values[number]

    def unavailable(self, number: int, function: str, line: str) -> RuntimeError:
        """See ``Tracer``."""
        return path_errors.unavailable(self.program, self._name, number, function, line)

    # --- calls ------------------------------------------------------------------------------------------------------

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        treated = self.program.treated.get(path, OPEN)
        if path == ROOT:
            return self._root(forward.run, args, kwargs)
        self._stop_if_done()
        if treated == OPEN:
            closed, unit = self.closed, isinstance(forward.module, FSDPModule)
            lists = lists_in((args, kwargs)) if path in self.graph.calls and self.graph.calls[path].grown else []
            lengths = [len(x) for x in lists]
            self._units += unit
            result = self.follow(path, forward.open, args, kwargs)
            self._units -= unit
            if self.closed > closed:  # from somewhere within on it ran unseen
                self.closed = closed
                call = self.graph.calls[path]
                result = self._returned(call, self._told_apart(result, (args, kwargs), call.outputs))
                self._appended(call, lists, lengths)
            return result
        call = self.graph.calls[path]
        self._reach(call.stop - 1)
        self._values.come_past(call.stop - 1)  # (nothing stops within it)
        if treated == STUB:
            return stub(call, args, kwargs, self._standing, self.name_value)
        place = self.program.place(call.start)
        given = args, kwargs
        args, kwargs = map_tensors(lambda t: self._had(t, place), given)
        self._values.taken_by(call, place)
        self.closed += 1
        if self._streams is not None and path in self.program.streamed:
            stream, taken = self.program.streamed[path]
            self._started.append((taken, call, self._streams.start(stream, forward.run, args, kwargs)))
            self.closed -= 1
            return stub(call, *given, self._standing, self.name_value)
        try:
            run = forward.run
            result = run(*args, **kwargs) if not place else self._in_branch(place, run, args, kwargs)
        finally:
            self.closed -= 1
        return self._returned(call, self._told_apart(result, (args, kwargs), call.outputs), place)

    def _appended(self, call: Call, lists: list[list[Any]], lengths: list[int]) -> None:
        """What a call that ran here unseen appended to lists: its tensors are the values that they were when recorded."""
        for grown in call.grown:
            new = tensors_of(lists[grown.which][lengths[grown.which] :])
            if len(new) != len(grown.values):
                raise PathError(
                    f"{spelled(call.path)} appended {len(new)} tensors to a list, {len(grown.values)} when it was recorded"
                )
            for t, number in zip(new, grown.values, strict=True):
                self._gave(t, number, call.start)

    def _in_branch(self, place: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call or event of a branch: on its share of the rows, with its own random numbers."""
        assert self._exchange is not None
        exchange = self._exchange
        with exchange.inside(place):
            args, kwargs = map_tensors(lambda t: exchange.share(place, t), (args, kwargs))
            return forward(*args, **kwargs)

    def _returned(self, call: Call, result: Any, place: int = 0) -> Any:
        """A call that ran here, unseen, gave ``result``; what the model is to see."""
        tensors = tensors_of(result)
        if len(tensors) != len(call.outputs):
            raise PathError(
                f"{spelled(call.path)} returned {len(tensors)} tensors, and {len(call.outputs)} when it was recorded"
            )
        for t, number, before in zip(tensors, call.outputs, tensors_of(call.returned), strict=True):
            self._gave(t, number, call.start, place)
            self._passed(t, before)
        return self._all_rows(result, place, call.outputs, call.returned)

    def _told_apart(self, result: Any, given: Any, numbers: Sequence[int | None]) -> Any:
        """``result``; where that was a value when recorded, and is now a tensor of the batch as it was given
        (``mask.type_as(x)``, of the type that it has), another name for it: what else is made of that tensor is no value."""
        strangers = [t for t in tensors_of(given) if not self.known(t) and not isinstance(t, nn.Parameter)]
        number = iter(numbers)

        def own(t: Tensor) -> Tensor:
            return t.view_as(t) if next(number, None) is not None and any(t is x for x in strangers) else t

        return map_tensors(own, result) if strangers else result

    def _all_rows(self, result: Any, place: int, numbers: Sequence[int | None], recorded: Any) -> Any:
        """What was made in a place as the model sees it: all rows, also where this rank has some of them."""
        if not self.program.divides(place):
            return result
        likes = zip(numbers, tensors_of(recorded), strict=True)

        def stand(t: Tensor) -> Tensor:
            number, like = next(likes)
            return t if number is None else RowShard(like, self, number, self.device, t)

        return map_tensors(stand, result)

    def _passed(self, t: Tensor, before: Tensor) -> None:
        """Where a parameter was handed on when the forward was recorded, its local part is what stands for it."""
        if isinstance(before, nn.Parameter) and not isinstance(t, nn.Parameter):
            self.name_value(t, None)

    def _root(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own forward. What it gives here are the values that others take, or on the last stage its output."""
        try:
            result = self.follow(ROOT, forward, args, kwargs)
        except _Done:
            result = None
        self._reach(len(self.graph.events))
        if self.program.last:
            return map_tensors(self._had, result) if self.program.moves or self.program.streamed else result
        if missing := self._values.missing:
            event = self.graph.events[self.graph.values[min(missing)].position]
            raise PathError(
                f"the forward ended without {event.function} of {spelled(event.path)} ({event.line}), "
                "which was there when it was recorded"
            )
        self.closed += 1
        for number in self.program.out:
            self.arrived(number)
            self._values[number] = self._send(self._values[number])
        return self.outputs()

    def segment_begins(self, segment: Segment) -> bool:
        """What is computed again in a backward is not looked into then: so all of it must be this rank's."""
        start, stop = self.graph.segments.get(segment, (0, 0))
        return start < stop and all(map(self.program.here, range(start, stop)))

    def custom(self, apply: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``Tracer``. Where a module has a backward hook, torch makes a node of the graph that gives what it takes,
        and sets that as the history of the tensors that it gives."""
        before, self._hooking = self._hooking, function.__name__ == "BackwardHookFunction"
        try:
            return super().custom(apply, function, args, kwargs)
        finally:
            self._hooking = before

    # --- events -----------------------------------------------------------------------------------------------------

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        self._stop_if_done()
        position = self.graph.positions.get((path, index))
        name = label_of(func)
        if position is None or self.graph.events[position].function != name:
            expected = "nothing more" if position is None else self.graph.events[position].function
            raise PathError(
                f"{spelled(path)} runs {name}, where it ran {expected} when it was recorded: a forward that depends on "
                "values outside its blocks cannot be cut there. A forward hook that computes with tensors is to be put on "
                "before parallelize"
            )
        event = self.graph.events[position]
        self._reach(position)
        place = self.program.place(position)
        for i, number in event.named:
            self.share(tensors[i])
            self.name_value(tensors[i], number)
            self._stale |= not self.program.here(position)
            if self.program.here(position):
                self._gave(tensors[i], number, position, place)
        result = self._answered(event, position, func, args, kwargs, tensors)
        self._rename(event, position, place)
        self._values.come_past(position)
        return result

    def _rename(self, event: Event, position: int, place: int) -> None:
        """Other names of the memory that an event wrote to have other numbers now."""
        for before, now in event.renamed:
            t = self._values.made_in(before, place)
            self.renamed[before] = now
            if self.program.here(position) and t is not None:
                self._gave(t, now, position, place)

    def _answered(
        self,
        event: Event,
        position: int,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """What an event gives here."""
        if event.hands_on and any(t.is_meta for t in tensors):
            return self._pass(event, args, tensors)  # a parameter of another stage, which goes nowhere here
        held = all(n in self._values for n in event.inputs)
        if self.program.here(position) or (held and (event.reads or event.hands_on)):
            return self._run(event, func, args, kwargs)  # (a parameter that is read is on every stage)
        if position in self.program.drawn or position in self.program.along:
            self._draw_too(func, args, kwargs)
        if event.reads:
            missing = next(n for n in event.inputs if n not in self._values)
            raise self.unavailable(missing, event.function, event.line)
        return self._pass(event, args, tensors)

    def _run(self, event: Event, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self.graph.positions[event.path, event.index]
        target, place = args[0] if event.written is not None and args else None, self.program.place(position)
        place = place if place in self.program.mine else 0  # (a parameter that is handed on)
        called_with = args, kwargs
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._had(t, place), (args, kwargs))
        if any(isinstance(t, Placeholder) for t in pytree.tree_leaves((args, kwargs))):
            placeholder = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Placeholder))
            raise self.unavailable(placeholder._mw_value[1], event.function, event.line)
        if self._exchange is not None and self.program.divides(place):
            args = sized(func, args, *self._exchange.portion(place))
        if position in self.program.drawn:
            result = self._drawn(place, func, called_with, (args, kwargs))
        else:
            result = func(*args, **kwargs) if not place else self._in_branch(place, func, args, kwargs)
        if event.reads and event.inputs:
            # What the model does next may follow from the value; to the end of this call all of it is this stage's.
            self._values.taken_by(self.graph.calls[event.path], place)
            self.closed += 1
            return result
        if target is None:
            result = self._told_apart(result, (args, kwargs), event.outputs)
        elif event.written is not None:
            self._gave(args[0], event.written, position)
            if target is not args[0]:  # the model goes on with its own name for it
                self.name_value(target, event.written)
        results = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if len(results) != len(event.outputs):
            raise PathError(
                f"{event.function} at {event.line} gave {len(results)} tensors, {len(event.outputs)} recorded"
            )
        recorded = [t for t in pytree.tree_leaves(self.graph.outputs[event.path, event.index]) if isinstance(t, Tensor)]
        for t, number, before in zip(results, event.outputs, recorded, strict=True):
            if target is None or t is not args[0]:
                self._gave(t, number, position, place)
            self._passed(t, before)
        return self._all_rows(result, place, event.outputs, self.graph.outputs[event.path, event.index])

    def _drawn(self, place: int, func: Any, given: Any, had: Any) -> Any:
        """A draw in a branch from the trunk's random numbers. A rank that has some of the rows draws for all rows.

        Args:
            given: what the model calls the function with; ``had``: what stands for that here.
        """
        args, kwargs = had
        if not self.program.divides(place):
            return func(*args, **kwargs)
        assert self._exchange is not None
        exchange, asked = self._exchange, iter(tensors_of(given))

        def of_all(t: Tensor) -> Tensor:
            like = next(asked)
            return exchange.among_all(place, t, like) if t.shape != like.shape else t

        args, kwargs = map_tensors(of_all, had)
        return map_tensors(lambda t: exchange.share(place, t), func(*args, **kwargs))

    def _draw_too(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Another branch or stage draws from random numbers that are drawn from here, too: as many are drawn, for nothing."""
        stand_in = self._ones if self._exchange is None else self._exchange.stand_in
        args, kwargs = map_tensors(stand_in, (args, kwargs))
        with torch.no_grad():
            func(*args, **kwargs)

    def _ones(self, like: Tensor) -> Tensor:
        device = self.device if like.is_meta else like.device
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).fill_(1)

    def _pass(self, event: Event, args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        """An event of another stage."""
        recorded = self.graph.outputs[event.path, event.index]
        if event.written is not None and args and isinstance(args[0], Tensor):
            if isinstance(args[0], RemoteTensor) and tuple(args[0].shape) != self.graph.values[event.written].shape:
                # After ``unsqueeze_``, in the model's own hands.
                like = self.graph.like(event.written, tensors_of(recorded)[0])
                torch.utils.swap_tensors(args[0], RemoteTensor(like, self, event.written, self.device))
            self.name_value(args[0], event.written)
            self._stale |= not isinstance(args[0], Placeholder)
        numbers, given = iter(event.outputs), {self.number(t): t for t in tensors}
        # What a Function of the model's marks as dirty it gives as it took it, written to.
        given |= {now: given[before] for before, now in event.renamed if before in given}

        def stand(t: Tensor) -> Any:
            number = next(numbers)
            if number is not None and number in given and number != event.written:
                return given[number]  # the very thing: a write to either is one to both
            if number is not None and number == event.written:
                return self._values.get(number, args[0])
            # The value itself has another history: that of where it comes from.
            if number is not None and self._hooking:
                return RemoteTensor(self.graph.like(number, t), self, number, self.device)
            return t if number is None else self._standing(number, t)

        return pytree.tree_map_only(Tensor, stand, recorded)

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        if self._values.waits and func in _SHOWS and (number := self.number(args[0])) is not None:
            self.arrived(number)
        if func == _DEVICE and isinstance(x, nn.Parameter) and x.is_meta:
            return self.device  # a parameter of another stage, asked where to make something
        if func == SET_DATA and isinstance(x, nn.Parameter):
            if x.is_meta:
                return None  # a parameter of another stage: written there
            if isinstance(args[1], Placeholder):
                raise self.unavailable(args[1]._mw_value[1], "p.data = ...", "")
        return func(*args, **kwargs)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (self._stale or any(issubclass(t, Placeholder) for t in types)) and not is_fact(func):
            args, kwargs = pytree.tree_map_only(Tensor, self._had, (args, kwargs))
        return func(*args, **kwargs)

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``."""
        return super().may_be_passed() and not self._stale


_DEVICE = Tensor.device.__get__
# No functions of a value, but reach its memory.
_SHOWS = frozenset([Tensor.__repr__, Tensor.data_ptr, Tensor.untyped_storage])
