"""A part of the model: its own forward, of which this rank runs a stage, and in it the trunk and its own branches.

Each call of a module is one of

    run      all of it is this rank's: it runs as it is, unseen
    stub     none of it is: what it returned when it was recorded stands in for its result
    open     its forward runs, and its own functions are looked at one by one: this rank's are run, values of
             others are ``RemoteTensor``, what follows from the batch alone is computed, here as on every rank

A value that another stage or branch gives is, here, the tensor that was received, if something here takes it, or else an
``RemoteTensor``: shape and type, and an error for whoever reads it. The forward stops as soon as everything that other
stages take of this one exists. Forks and joins (regions.py) come in their turn, on every rank of the place around them.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.calls.hook import Forward
from meshwright.calls.placeholder import PathError, Placeholder, RemoteTensor, RowShard, sized
from meshwright.calls.structure import lists_in, map_tensors, tensors_of
from meshwright.calls.tracer import Tracer
from meshwright.graph import ROOT, Call, Event, ModelGraph, Path, Segment, spelled
from meshwright.private import pytree
from meshwright.regions import Fork, Join, Placed, find_regions
from meshwright.spmd.torch_functions import draws, is_fact
from meshwright.submesh import Submeshes

RUN, STUB, OPEN = "run", "stub", "open"


def _at_once() -> None:
    """Nothing is on its way."""


@dataclass(frozen=True)
class Joined:
    """What a join gives.

    Attributes:
        values: value → what the place around computes with, where this rank takes it.
        tail: what ties the next region of that place to this one.
        arriving: the values whose memory is filled by others, and not before ``wait`` has returned.
    """

    values: Mapping[int, Tensor]
    tail: Tensor
    arriving: frozenset[int] = frozenset()
    wait: Callable[[], None] = _at_once


class Exchange(Protocol):
    """What forks and joins (runtime/branches/exchange.py)."""

    def fork(
        self, move: Fork, values: Mapping[int, Tensor], graph: ModelGraph, tail: Tensor | None
    ) -> tuple[dict[tuple[int, int], Tensor], Tensor]:
        """(value, branch) → what it computes with; and an anchor, for the join of the region."""

    def join(self, move: Join, own: Mapping[int, Tensor], graph: ModelGraph, anchors: Sequence[Tensor]) -> Joined:
        """Values of branches become those of the place around. ``own``: those of this rank's branch."""

    def lend(self, around: int, number: int, t: Tensor) -> None:
        """This rank's branch made a value that a fork to come gives to others."""

    def share(self, place: int, t: Tensor) -> Tensor:
        """The rows of a tensor that this rank runs in a place."""

    def portion(self, place: int) -> tuple[int, int]:
        """How many rows there are, and how many of them this rank runs in a place."""

    def inside(self, place: int) -> AbstractContextManager[None]:
        """For the time of a part of a branch."""

    def among_all(self, place: int, rows: Tensor, like: Tensor) -> Tensor:
        """This rank's rows in a place, at their place among all rows, which are zeros; strides are those of ``like``."""

    def stand_in(self, like: Tensor) -> Tensor:
        """Ones for a value that this rank has no need of."""


@dataclass(frozen=True)
class Started:
    """A block whose work has begun; ``finish`` waits for it and gives its result."""

    finish: Callable[[], Any]


class Streams(Protocol):
    """What runs blocks at the same time on one rank (runtime/branches/streams.py)."""

    def start(self, stream: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
        """Begins a block's forward."""


@dataclass(frozen=True)
class Crossing:
    """What crosses cuts: for each (stage, later stage), the numbers of the values, in a fixed order."""

    cuts: tuple[int, ...]
    values: Mapping[tuple[int, int], tuple[int, ...]]

    def into(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Source stage → values."""
        return {s: numbers for (s, t), numbers in self.values.items() if t == stage}

    def out_of(self, stage: int) -> dict[int, tuple[int, ...]]:
        """Later stage → values."""
        return {t: numbers for (s, t), numbers in self.values.items() if s == stage}


def crossings(graph: ModelGraph, cuts: Sequence[int], *, whole_output: bool = False) -> Crossing:
    """The values between stages. ``whole_output``: the last stage takes everything that the model returns."""
    found: dict[tuple[int, int], set[int]] = {}
    last = len(cuts)
    for number, value in enumerate(graph.values):
        home = bisect_right(cuts, value.position)
        takers = {bisect_right(cuts, p) for p in graph.consumers.get(number, ())}
        if whole_output and number in graph.calls[ROOT].outputs:
            takers.add(last)
        for taker in takers - {home}:
            found.setdefault((home, taker), set()).add(number)
    return Crossing(tuple(cuts), {edge: tuple(sorted(numbers)) for edge, numbers in sorted(found.items())})


class StageProgram:
    """What a rank does with each call and event of a recorded forward, in one stage.

    Args:
        placed: module → the places of its calls (regions.py).
        mine: the places that the rank is of.
        streams: module → the stream of this rank that it runs on, at the same time as others.
        whole_output: whether all that the model returns is wanted.
    """

    def __init__(
        self,
        graph: ModelGraph,
        crossing: Crossing,
        stage: int,
        placed: Placed | None = None,
        places: Submeshes | None = None,
        mine: frozenset[int] = frozenset({0}),
        *,
        streams: Mapping[str, int] | None = None,
        whole_output: bool = False,
    ) -> None:
        ends = [0, *crossing.cuts, len(graph.events)]
        self.graph, self.stage, self.cuts, self.branches, self.mine = graph, stage, crossing.cuts, places, mine
        self.start, self.stop = ends[stage], ends[stage + 1]
        self.last = stage == len(crossing.cuts)
        self.incoming, self.outgoing = crossing.into(stage), crossing.out_of(stage)
        self.out = tuple(sorted({n for numbers in self.outgoing.values() for n in numbers}))
        self._places: Sequence[int] = ()
        self.moves: tuple[Fork | Join, ...] = ()
        if placed and places is not None:
            found = find_regions(graph, placed, places, self.start, self.stop, whole_output=whole_output)
            self._places, self.moves = found.places, found.moves
        self.joined = frozenset(n for move in self.moves if isinstance(move, Join) for n, _ in move.values)
        self.lent = frozenset((move.around, n) for move in self.moves if isinstance(move, Fork) for n in move.homes)
        # Draws of a branch from random numbers that all ranks have: those of a generator of the model's own, or the trunk's,
        # if no placed module draws them.
        self.drawn = frozenset(
            p for p in range(self.start, self.stop)
            if (e := graph.events[p]).draws and self.place(p)
            and (any(g in graph.drawn_along for g in e.generators) or not any(m in (placed or {}) for m, _ in e.path))
        )  # fmt: skip
        # Draws of other stages from a generator of the model's own, from which several stages draw.
        self.along = frozenset(
            p for positions in graph.drawn_along.values() if len({bisect_right(crossing.cuts, p) for p in positions}) > 1
            for p in positions if not self.start <= p < self.stop
        )  # fmt: skip
        self.apart = frozenset(n for move in self.moves if isinstance(move, Join) for n in move.takers)
        # What modules keep for the next forward, and a parameter that is written, is changed by the stage whose event that is.
        lasting = (*graph.changes.values(), *graph.parameter_writes.values())
        changes = [p for p in lasting if self.start <= p < self.stop]
        end = [len(graph.events)] if graph.draws_held else []  # Python draws after the last event too, perhaps
        self.last_change = max([*changes, *self.along, *end], default=-1)
        self.treated = {path: self._treat(call) for path, call in graph.calls.items()}
        self.streamed = {
            path: ((streams or {})[call.module], self._taken(call))
            for path, call in graph.calls.items() if call.module in (streams or {}) and self._may_wait(call)
        }  # fmt: skip

    def of(self, graph: ModelGraph) -> StageProgram:
        """The same for a forward that differs in sizes alone."""
        found = copy.copy(self)
        found.graph = graph
        return found

    def place(self, position: int) -> int:
        """The place of an event."""
        return self._places[position] if self._places else 0

    def divides(self, place: int) -> bool:
        """Whether a rank may have some rows alone of what is made in a place."""
        return place > 0 and self.branches is not None and self.branches[place].splits

    def here(self, position: int) -> bool:
        return self.start <= position < self.stop and self.place(position) in self.mine

    def _treat(self, call: Call) -> str:
        graph, seen = self.graph, {*call.outputs, *(n for grown in call.grown for n in grown.values)}
        inside = range(call.start, call.stop)
        made = [n for p in inside for n in graph.made(p)]
        used_outside = [n for n in made if any(p not in inside for p in graph.consumers.get(n, ()))]
        ours = sum(map(self.here, inside))
        if not (self.drawn | self.along).isdisjoint(inside):  # every rank draws with it
            return OPEN
        if (
            call.start < call.stop
            and ours == len(inside)
            and len({self.place(p) for p in inside}) == 1
            and not call.visible
        ):
            kept = {*self.out, *self.joined} & set(made)
            return OPEN if any(n not in seen for n in {*used_outside, *kept}) else RUN
        if call.start == call.stop or ours or call.fresh:
            return OPEN
        if call.acts:  # what it reads is not here, so that it cannot be followed
            return STUB
        if call.visible:
            return OPEN
        if any(n not in seen or n in call.stashed for n in used_outside):
            return OPEN
        for p in inside:
            event = graph.events[p]
            if event.written is not None and event.inputs and graph.values[event.inputs[0]].position < call.start:
                return OPEN
        return STUB

    def _may_wait(self, call: Call) -> bool:
        """Whether a call can run beside what follows it: nothing but what it returned says that it has run."""
        events = self.graph.events[call.start : call.stop]
        plain = not any(e.mean_loss or draws(e.function) for e in events)
        return plain and self.treated[call.path] == RUN and not call.fresh and not call.stashed

    def _taken(self, call: Call) -> int:
        """The first position at which something takes what a call gave."""
        made = [n for p in range(call.start, call.stop) for n in self.graph.made(p)]
        later = [p for n in made for p in self.graph.consumers.get(n, ()) if p >= call.stop]
        return min(later, default=len(self.graph.events))


class _Done(BaseException):
    """Everything that others take of this stage exists. Not an Exception, so that a model lets it through."""


class StageInterpreter(Tracer):
    """One microbatch's forward through one stage.

    Its tables, each with what holds of it throughout:

        _values      number → the tensor that is this value here: received, or given by an event or call of this stage. It
                     holds what one device's holds at this point of the program: a write to its memory gives the value
                     another number, under which the same tensor is entered (``_rename``). Never an ``RemoteTensor``.
        _missing     numbers of ``program.out`` that are not there yet. Shrinks only; the forward may end when it is empty
                     and ``_passed_by`` has come to ``program.last_change``.
        _passed_by   the last position that the forward has come past, here or not. Grows only.
        _kept        (number, branch) → what a branch goes on with for a value that it made itself: the tensor itself before a
                     join, or its rows of it where its data ranks have some each.
        _forked      branch → number → what it computes with for a value of the place around it. Entered by forks only.
        _arriving    number → what waits for it: values that are in ``_values`` or ``_forked``, whose memory is not filled yet.
        _moves       forks and joins still to come, in the order of the program; all before the present position are done.
        _anchors     place → what the join of its open region is tied to; empty between regions.
        _tails       place → what the next region of it is tied to.
        _started     blocks that run beside: before which position each must have ended. None is past its position.
        _units       how many of FSDP's units are being looked into: the forward does not end within one.
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
        self._values: dict[int, Tensor] = {}
        self._streams = streams
        self._started: list[tuple[int, Call, Started]] = []  # blocks that are running, and before what they must end
        self._moves = [m for m in program.moves if m.around in program.mine]
        self._forked: dict[int, dict[int, Tensor]] = {}  # branch → value → what it computes with
        # (value, branch that made it) → what that goes on with after a join; or its rows of it, where it has some.
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._arriving: dict[int, Callable[[], None]] = {}  # value → until it is there
        self._anchors: dict[int, list[Tensor]] = {}  # place → what ties the join of its region to the forks
        self._tails: dict[int, Tensor] = {}  # place → what ties its next region to the last
        for number, value in received.items():
            self.keep(value, number)
        self._missing = set(program.out)
        self._passed_by = -1  # the last position that the forward has come past
        self._units = 0  # of FSDP's, whose forwards are being looked into
        self._hooking = False  # torch makes a node for a module's backward hook

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
        if self.program.divides(place):
            self._kept[number, place] = t
        else:
            self._values[number] = t
        if number not in self.program.joined:
            self._missing.discard(number)

    def _stop_if_done(self) -> None:
        """Between calls and events: hooks of the call that gave the last value have run then; within an FSDP unit its own
        have not."""
        done = not self._missing and self._passed_by >= self.program.last_change
        if done and not self.program.last and not self._units:
            raise _Done

    def _had(self, t: Tensor, place: int = 0) -> Tensor:
        """The tensor that stands for ``t`` here, in a place; itself where it is not a value or there is none."""
        number = self.number(t)
        if number is None:
            return t
        found = self._taken(number, place)
        return self._values.get(number, t) if found is None else found

    def _of_branch(self, number: int, place: int) -> tuple[Tensor | None, bool]:
        """What a branch, or one around it, computes with for a value, and whether it made that itself; None where that is
        what all have."""
        if place and self.program.branches is not None:
            for p in reversed(self.program.branches.chain(place)):
                if number in self._forked.get(p, ()):
                    return self._forked[p][number], False
                if (number, p) in self._kept:
                    return self._kept[number, p], True
        return None, False

    def _taken(self, number: int, place: int) -> Tensor | None:
        """The same, for something that takes it now: waits for it if it is on its way."""
        found, own = self._of_branch(number, place)
        if not own:
            self.arrived(number)
        return found

    def _await(self, call: Call, place: int) -> None:
        """Waits for all that a call takes, however it comes by it."""
        for n in list(self._arriving):
            if any(call.start <= p < call.stop for p in self.graph.consumers.get(n, ())):
                self._taken(n, place)

    def arrived(self, number: int) -> None:
        """Waits for a value that is on its way, and with it for those that come with it."""
        if (wait := self._arriving.get(number)) is not None:
            wait()
            self._arriving = {n: w for n, w in self._arriving.items() if w is not wait}

    def _reach(self, position: int) -> None:
        """Forks and joins up to a position of the program, whether or not what stands there runs here; and the ends of
        blocks that run beside."""
        for entry in [s for s in self._started if s[0] <= position]:
            self._started.remove(entry)
            self.closed += 1
            result = entry[2].finish()
            self.closed -= 1
            self._returned(entry[1], result)
        while self._moves and self._moves[0].position <= position:
            move = self._moves.pop(0)
            self.closed += 1
            if isinstance(move, Fork):
                self._fork(move)
            else:
                self._join(move)
            self.closed -= 1

    def _fork(self, move: Fork) -> None:
        assert self._exchange is not None
        apart = self.program.apart  # what only some branches take is on their ranks alone
        standing = {  # of what is on its way, the memory
            n: self._inside(n, self._of_branch(n, move.around)[0])
            for n in move.values if n in self._values or n not in apart
        }  # fmt: skip
        given, anchor = self._exchange.fork(move, standing, self.graph, self._tails.get(move.around))
        self._anchors.setdefault(move.around, []).append(anchor)
        for n, takers in move.takers.items():
            for branch in takers & self.program.mine:
                self._forked.setdefault(branch, {})[n] = given[n, branch]

    def _join(self, move: Join) -> None:
        assert self._exchange is not None
        own = {n: self._inside(n, self._taken(n, b)) for n, b in move.values if b in self.program.mine}
        tail = self._tails.get(move.around)
        anchors = self._anchors.pop(move.around, []) or ([] if tail is None else [tail])
        found = self._exchange.join(move, own, self.graph, anchors)
        self._tails[move.around] = found.tail
        self._kept |= {(n, b): own[n] for n, b in move.values if n in own and n in move.kept}
        for n, t in found.values.items():
            self.keep(t, n)
        for n in own:
            if (move.around, n) in self.program.lent:
                self._exchange.lend(move.around, n, found.values[n])
        self._arriving |= dict.fromkeys(found.arriving, found.wait)
        self._missing -= {n for n, _ in move.values}

    def _inside(self, number: int, found: Tensor | None) -> Tensor:
        """What stands for a value in a place that has it; ``found``: there alone."""
        if found is not None:
            return found
        if number not in self._values:
            event = self.graph.events[self.graph.values[number].position]
            raise PathError(
                f"there is no {event.function} of {spelled(event.path)} ({event.line}), "
                "which was there when the forward was recorded"
            )
        return self._values[number]

    def _standing(self, number: int, like: Tensor) -> Tensor:
        if number not in self._values:
            return RemoteTensor(self.graph.like(number, like), self, number, self.device)
        return self._values[number]

    def unavailable(self, number: int, function: str, line: str) -> RuntimeError:
        """The error for taking a value that is not here."""
        value = self.graph.values[number]
        maker = self.graph.events[value.position]
        stage = next(s for s, end in enumerate([*self.program.cuts, len(self.graph.events)]) if value.position < end)
        module = next((name for name, _ in reversed(maker.path) if name), "the model")
        if self.program.branches is not None and self.program.place(value.position) not in self.program.mine:
            place = self.program.branches[self.program.place(value.position)]
            return PathError(
                f"{function}{f' at {line}' if line else ''} takes a value of {module}, which lives on {place.on}, where it "
                "was not to take it when the forward was recorded: it took another path then. Give the sample batch the "
                "path that training takes"
            )
        return PathError(
            f"{function}{f' at {line}' if line else ''} takes a value of {module}, which lives on {self._name(stage)}, "
            f"on {self._name(self.program.stage)}, which was not to take it when the forward was recorded: it took "
            f"another path then. Place what takes it with {module}: modules: {{{module}: {{on: ...}}}}, or give the "
            "sample batch the path that training takes"
        )

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
        self._passed_by = max(self._passed_by, call.stop - 1)  # (nothing stops within it)
        if treated == STUB:
            return self._stand_in(call, args, kwargs)
        place = self.program.place(call.start)
        given = args, kwargs
        args, kwargs = map_tensors(lambda t: self._had(t, place), given)
        self._await(call, place)
        self.closed += 1
        if self._streams is not None and path in self.program.streamed:
            stream, taken = self.program.streamed[path]
            self._started.append((taken, call, self._streams.start(stream, forward.run, args, kwargs)))
            self.closed -= 1
            return self._stand_in(call, *given)
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
        if self._missing:
            event = self.graph.events[self.graph.values[min(self._missing)].position]
            raise PathError(
                f"the forward ended without {event.function} of {spelled(event.path)} ({event.line}), "
                "which was there when it was recorded"
            )
        self.closed += 1
        for number in self.program.out:
            self.arrived(number)
            self._values[number] = self._send(self._values[number])
        return self.outputs()

    def _stand_in(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A copy of what a call returned when it was recorded, with what stands here for its tensors and arguments."""
        memo: dict[int, Any] = {}
        before, now = call.taken, tensors_of((args, kwargs))
        if len(before) == len(now):
            memo |= {id(b): n for b, n in zip(before, now, strict=True)}
        given_args, given_kwargs = call.given
        for b, n in (*zip(given_args, args, strict=False), *((given_kwargs.get(k), v) for k, v in kwargs.items())):
            if not isinstance(b, (Tensor, str, int, float, bool, type(None))):
                memo[id(b)] = n
        parts = [(call.returned, call.outputs), *((grown.items, grown.values) for grown in call.grown)]
        for value, numbers in parts:
            for t, number in zip(tensors_of(value), numbers, strict=True):
                if number is not None:
                    memo[id(t)] = self._standing(number, t)
        lists = lists_in((args, kwargs)) if call.grown else []
        for grown in call.grown:
            lists[grown.which].extend(copy.deepcopy(grown.items, memo))
        return copy.deepcopy(call.returned, memo)

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
        name = getattr(func, "__name__", str(func))
        if position is None or self.graph.events[position].function != name:
            expected = "nothing more" if position is None else self.graph.events[position].function
            raise PathError(
                f"{spelled(path)} runs {name}, where it ran {expected} when it was recorded: a forward that depends on "
                "values outside its blocks cannot be cut there"
            )
        event = self.graph.events[position]
        self._reach(position)
        place = self.program.place(position)
        for i, number in event.named:
            self.name_value(tensors[i], number)
            if self.program.here(position):
                self._gave(tensors[i], number, position, place)
        result = self._answered(event, position, func, args, kwargs, tensors)
        self._rename(event, position, place)
        self._passed_by = max(self._passed_by, position)
        return result

    def _rename(self, event: Event, position: int, place: int) -> None:
        """Other names of the memory that an event wrote to have other numbers now."""
        for before, now in event.renamed:
            t = self._kept.get((before, place), self._values.get(before))
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
            return self._pass(event, args)  # a parameter of another stage, which goes nowhere here
        held = all(n in self._values for n in event.inputs)
        if self.program.here(position) or (held and (event.reads or event.hands_on)):
            return self._run(event, func, args, kwargs)  # (a parameter that is read is on every stage)
        if position in self.program.drawn or position in self.program.along:
            self._draw_too(func, args, kwargs)
        if event.reads:
            missing = next(n for n in event.inputs if n not in self._values)
            raise self.unavailable(missing, event.function, event.line)
        return self._pass(event, args)

    def _run(self, event: Event, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self.graph.positions[event.path, event.index]
        target, place = args[0] if event.written is not None and args else None, self.program.place(position)
        place = place if place in self.program.mine else 0  # (a parameter that is handed on)
        called_with = args, kwargs
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._had(t, place), (args, kwargs))
        if any(isinstance(t, Placeholder) for t in pytree.tree_leaves((args, kwargs))):
            found = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Placeholder))
            raise self.unavailable(found._mw_value[1], event.function, event.line)
        if self._exchange is not None and self.program.divides(place):
            args = sized(func, args, *self._exchange.portion(place))
        if position in self.program.drawn:
            result = self._drawn(place, func, called_with, (args, kwargs))
        else:
            result = func(*args, **kwargs) if not place else self._in_branch(place, func, args, kwargs)
        if event.reads and event.inputs:
            # What the model does next may follow from the value; to the end of this call all of it is this stage's.
            self._await(self.graph.calls[event.path], place)
            self.closed += 1
            return result
        if target is None:
            result = self._told_apart(result, (args, kwargs), event.outputs)
        elif event.written is not None:
            self._gave(args[0], event.written, position)
            if target is not args[0]:  # the model goes on with its own name for it
                self.name_value(target, event.written)
        given = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if len(given) != len(event.outputs):
            raise PathError(
                f"{event.function} at {event.line} gave {len(given)} tensors, {len(event.outputs)} recorded"
            )
        recorded = [t for t in pytree.tree_leaves(self.graph.outputs[event.path, event.index]) if isinstance(t, Tensor)]
        for t, number, before in zip(given, event.outputs, recorded, strict=True):
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

    def _pass(self, event: Event, args: tuple[Any, ...]) -> Any:
        """An event of another stage."""
        recorded = self.graph.outputs[event.path, event.index]
        if event.written is not None and args and isinstance(args[0], Tensor):
            if isinstance(args[0], RemoteTensor) and tuple(args[0].shape) != self.graph.values[event.written].shape:
                like = self.graph.like(
                    event.written, tensors_of(recorded)[0]
                )  # after ``unsqueeze_``, in the model's own hands
                torch.utils.swap_tensors(args[0], RemoteTensor(like, self, event.written, self.device))
            self.name_value(args[0], event.written)
        numbers = iter(event.outputs)

        def stand(t: Tensor) -> Any:
            number = next(numbers)
            if number is not None and number == event.written:
                return self._values.get(number, args[0])
            if (
                number is not None and self._hooking
            ):  # the value itself has another history: that of where it comes from
                return RemoteTensor(self.graph.like(number, t), self, number, self.device)
            return t if number is None else self._standing(number, t)

        return pytree.tree_map_only(Tensor, stand, recorded)

    def fact(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else None
        if self._arriving and func in _SHOWS and (number := self.number(args[0])) is not None:
            self.arrived(number)
        if func == _DEVICE and isinstance(x, nn.Parameter) and x.is_meta:
            return self.device  # a parameter of another stage, asked where to make something
        return func(*args, **kwargs)

    def within(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(issubclass(t, Placeholder) for t in types) and not is_fact(func):
            args, kwargs = pytree.tree_map_only(Tensor, self._had, (args, kwargs))
        return func(*args, **kwargs)


_DEVICE = Tensor.device.__get__
_SHOWS = frozenset(
    [Tensor.__repr__, Tensor.data_ptr, Tensor.untyped_storage]
)  # no functions of a value, but reach its memory
