"""Pipeline stages at work: each rank performs its actions of the schedule, in order.

    schedule ─► action ─► RECV_F   a buffer for each value, filled while other actions run
                          F        the model's own forward, of which this stage runs its interval (calls/interpreter.py)
                          SEND_F   what other stages take; nothing waits for it
                          RECV_B, B, SEND_B  the same for gradients: one backward over everything that was sent
                          I, W     its two halves

What crosses a cut is sent whole, from each rank to the rank of the other stage with the same place on all other axes. Stages
need not be neighbours: a skip goes straight to where it is used.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.interpreter import Crossing, StageInterpreter, StageProgram, crossings
from meshwright.calls.placeholder import PathError
from meshwright.calls.structure import attributes_in, map_tensors, owner_of
from meshwright.calls.tracer import Forwards, held_in, kept_in
from meshwright.chance import generators_in, host_seeded, set_state_of, state_of
from meshwright.errors import ReplicaError
from meshwright.generators import random_numbers_kept, state_digest
from meshwright.graph import ModelGraph, Value, spelled
from meshwright.private import storage_of, without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.branches.exchange import Branching, as_recorded
from meshwright.runtime.branches.streams import Streams
from meshwright.runtime.coupling.paths import Watched, unwatched
from meshwright.runtime.groups import Groups
from meshwright.runtime.module_state import ModuleState, content_of, fill
from meshwright.runtime.pipeline.deferred_weight_grads import DeferredWeightGrads
from meshwright.runtime.pipeline.resized import graphs_between
from meshwright.runtime.recent import ByValues, Lengths, Points, Recent, sizes_of
from meshwright.runtime.rows.batch import copied, differs, tensors_in, versions
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.rows.loss_weights import Share, Shares
from meshwright.runtime.rows.microbatches import BACKWARD, called, weighed
from meshwright.schedule import TRANSFERS, Action, Schedule, make_schedule, with_transfers
from meshwright.spmd import patches
from meshwright.spmd.alias import laid
from meshwright.spmd.dispatcher import whole
from meshwright.spmd.mode import SpmdMode
from meshwright.watch.timer import CommunicationTimer

Edge = tuple[int, int]
_WHICH = -1  # stands for the number of a value, of a message that says which gradients there are
Call = Callable[[nn.Module, Any], Any]


class StageError(RuntimeError):
    """What went wrong, with the rank, stage and action in which it did."""


@dataclass(frozen=True)
class Program:
    """A forward recorded for some shapes, and what crosses its cuts."""

    graph: ModelGraph
    crossing: Crossing
    stages: dict[int, StageProgram]  # those of this rank
    writes: frozenset[int]  # the tensors of the batch that the forward writes to, by their places in it

    def differentiable(self, edge: Edge) -> tuple[int, ...]:
        """The values over an edge whose gradients come back: those that a backward from the loss comes to, as what is before
        a ``detach`` has no gradient, and no zeros either."""
        return tuple(n for n in self.crossing.values[edge] if n in self.graph.live)


@dataclass
class Flight:
    """A microbatch in one stage, from its forward to the end of its backward."""

    received: dict[int, Tensor] = field(default_factory=dict)  # value → the leaf that collects its gradient
    arrived: list[tuple[int, Tensor]] = field(default_factory=list)  # values, then gradients, from other ranks
    back: dict[int, Tensor | None] = field(default_factory=dict)  # value → that gradient, if any, until it is sent
    outputs: dict[int, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    grads: dict[int, list[Tensor]] = field(default_factory=dict)  # value → its gradients, from each stage that takes it
    later: DeferredWeightGrads | None = None  # what is left to do of a backward in halves
    result: Any = None


class _Arrive(torch.autograd.Function):
    """A received value, as the model may write to it: not a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Pipeline:
    """The stages of one rank.

    Args:
        forwards: the model, whose modules ask for the walk that is on.
        graph: what runs a forward, given a model → the forward, recorded.
        view: the view over tp, if there is one.
        loss: the loss of the model's output.
        branching: what forks and joins, where there are branches.
        streams: what runs blocks at the same time on this rank.
    """

    def __init__(
        self,
        forwards: Forwards,
        recipe: Recipe,
        groups: Groups,
        *,
        graph: Callable[..., ModelGraph],
        view: SpmdMode | None,
        loss: Callable[[Any], Tensor],
        branching: Branching | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.branching, self.streams = branching, streams
        self.forwards, self.recipe, self.groups = forwards, recipe, groups
        self._graph, self._view, self._loss = graph, view, loss
        self.rank = groups.pp_rank
        self.stages = [s for s, rank in enumerate(recipe.stage_rank) if rank == self.rank]
        self.has_loss = recipe.stage_rank[-1] == self.rank
        self._programs = Lengths(self._programs_between)
        self._paths = Recent[Program]()
        self._by_values = ByValues[Program]()
        self._schedules = Recent[Schedule]()
        self.generators = generators_in(forwards.model)
        self.bytes_sent = self.sends = 0
        self.waiting = CommunicationTimer(groups.device)
        self.spans: list[tuple[Action, float, float]] = []  # of the last step: when each action ran, in seconds
        self.action: Action | None = None  # begun last; a watch reads it from another thread
        self.awaited: tuple[int, ...] = ()  # the stages whose sends it waits for
        self.is_trying = False

    # --- a step -----------------------------------------------------------------------------------------------------

    def run(
        self,
        pieces: list[Any],
        scale: list[float],
        shares: list[Share | None],
        begin: ModuleState | None = None,
        watched: Watched = unwatched,
        *,
        backward: bool,
    ) -> list[Tensor]:
        """Forward (and backward) of all microbatches; their losses, scaled, where the last stage is here.

        Args:
            scale: for each microbatch, what its loss is multiplied by.
            shares: for each microbatch, what its means are to be.
            begin: the state that each microbatch begins with; what the first one leaves stays. None: with what the one before
                has left.
            watched: what is on during the forward of a stage and microbatch.
        """
        step = _Step(self, pieces, called, self._loss, scale, shares, begin, watched, backward=backward)
        step.perform()
        return step.losses

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Forwards may compute in a wider type than was recorded (runtime/coupling/float64.py): what crosses is cast to
        the recorded one."""
        self.is_trying = True
        if self.branching is not None:
            self.branching.trying = True
        try:
            yield
        finally:
            self.is_trying = False
            if self.branching is not None:
                self.branching.trying = False

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, on the ranks of the last stage; None on others."""
        step = _Step(self, [(args, kwargs)], _call, None, [1.0], [None], backward=False)
        step.perform()
        return step.result

    def view(self) -> Any:
        """The view over tp, for a forward or a backward; what a forward ran uncompiled, a recomputing backward does too."""
        return patches.UNCOMPILED.on() if self._view is None else self._view.on()

    def program(self, batch: Any, call: Call, loss: Loss | None, *, grad: bool = True) -> Program:
        """The forward for a microbatch of these shapes.

        Args:
            loss: None where the output itself is wanted.
            grad: whether it is recorded with gradients on: a model may ask.
        """
        sizes = sizes_of(batch, loss is None, grad)
        recorded: list[Program] = []

        def record() -> Program:
            runs: list[tuple[Any, list[int | None]]] = []

            def run(model: nn.Module) -> Any:
                own = copied(batch)
                runs.append((own, versions(own)))
                output = call(model, own)
                return loss(output) if loss else output

            with random_numbers_kept():
                graph = self._graph(run, grad=grad)
            # Not within: a look at values would seem to be the forward's own.
            writes = {i for own, before in runs for i in differs(own, batch, before)}
            path = (sizes, graph.signature) if sizes is not None else object()
            recorded.append(self._paths.made(path, lambda: self._program(graph, frozenset(writes), loss is None)))
            deciding = self._deciding(graph, batch)
            if sizes is not None and deciding is not None:
                self._by_values.put(sizes, batch, deciding, recorded[-1])
            return recorded[-1]

        known = self._programs.made(sizes, record)
        if not known.graph.of_this_batch or recorded:
            return known
        # Another batch of these sizes may take another path, unless the values that were read are the same.
        return (self._by_values.get(sizes, batch) if sizes is not None else None) or record()

    def _deciding(self, graph: ModelGraph, batch: Any) -> frozenset[int] | None:
        """The tensors of a batch, by their places, whose values decided what was recorded; None if not they alone did."""
        tensors = [(i, t) for i, t in enumerate(tensors_in(batch)) if t.layout is torch.strided]
        if graph.read is None or not graph.read.issubset(storage_of(t) for _, t in tensors):
            return None
        if self.recipe.branches:  # which rows can be run apart is asked of more than was read
            return frozenset(i for i, _ in tensors)
        return frozenset(i for i, t in tensors if storage_of(t) in graph.read)

    def _programs_between(self, points: Points[Program]) -> Callable[[int], Program] | None:
        """A program for lengths between those that were recorded, if nothing but sizes differs."""
        lengths, programs = zip(*points, strict=True)
        first = programs[0]
        same = all((p.crossing.values, p.writes) == (first.crossing.values, first.writes) for p in programs)
        graph = graphs_between(lengths, [p.graph for p in programs]) if same and not self.recipe.branches else None
        if graph is None:
            return None

        def between(length: int) -> Program:
            found = graph(length)
            stages = {s: stage.of(found) for s, stage in first.stages.items()}
            return Program(found, first.crossing, stages, first.writes)

        return between

    def _program(self, graph: ModelGraph, writes: frozenset[int], whole_output: bool) -> Program:
        cuts = graph.cuts
        if cuts is None:
            raise StageError(
                "with this batch the forward takes another path than with the sample, which cannot be cut so that each stage "
                "has the parameters and buffers that it uses. Give parallelize a sample that takes this path"
            )
        crossing = crossings(graph, cuts, whole_output=whole_output)
        mine = None if self.branching is None else (self.recipe.placed, self.recipe.places, self.branching.mine)
        streams = dict(self.recipe.streams) if self.streams is not None else None
        stages = {
            s: StageProgram(graph, crossing, s, *(mine or ()), streams=streams, whole_output=whole_output)
            for s in self.stages
        }
        return Program(graph, crossing, stages, writes)

    def schedule(
        self, microbatches: int, edges: tuple[Edge, ...], back: tuple[Edge, ...], *, backward: bool
    ) -> Schedule:
        key = (microbatches, edges, back, backward)

        def make() -> Schedule:
            ranks, stages = self.recipe.mesh.axis_size("pp"), len(self.recipe.stage_rank)
            plain = make_schedule(self.recipe.schedule, ranks, stages, microbatches, backward=backward)
            return with_transfers(plain, edges, back)

        return self._schedules.made(key, make)

    def describe(self, stage: int) -> str:
        """A stage and its ranks, for errors."""
        rank, mesh = self.recipe.stage_rank[stage], self.recipe.mesh
        ranks = [r for r in range(mesh.size) if mesh.coordinate(r).get("pp", 0) == rank]
        shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
        return f"stage {stage} ({shown})"


class OwnNumbers:
    """The generators that modules hold, where a rank has several stages: each draws from them in all of its forwards, as a rank
    does that has this stage alone (``StageProgram.along``)."""

    def __init__(self, generators: Sequence[Any], stages: Sequence[int]) -> None:
        self._generators = generators if len(stages) > 1 else []
        self._begin = [state_of(g) for g in self._generators]
        self._states = dict.fromkeys(stages, self._begin)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """For the time of a forward of a stage."""
        for generator, state in zip(self._generators, self._states[stage], strict=True):
            set_state_of(generator, state)
        yield
        self._states[stage] = [state_of(g) for g in self._generators]

    def end(self) -> None:
        """After the last forward: what one stage alone has drawn has been drawn."""
        for i, (generator, begin) in enumerate(zip(self._generators, self._begin, strict=True)):
            before = state_digest({"": begin})
            after = (states[i] for states in self._states.values())
            drawn = (state for state in after if state_digest({"": state}) != before)
            set_state_of(generator, next(drawn, begin))


class _Step:
    """One pass over the schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        pieces: list[Any],
        call: Call,
        loss: Loss | None,
        scale: list[float],
        shares: list[Share | None],
        begin: ModuleState | None = None,
        watched: Watched = unwatched,
        *,
        backward: bool,
    ) -> None:
        self.p, self.pieces, self.call, self.loss, self.scale, self.shares = pipeline, pieces, call, loss, scale, shares
        self.backward, self.state, self.watched = backward, begin, watched
        self.grad = backward or pipeline.is_trying  # what is tried is a forward of a step
        self.programs = [pipeline.program(piece, call, loss, grad=self.grad) for piece in pieces]
        # Not every stage follows a forward to its end. So its numbers do not follow from where the one before has left off.
        draws = any(program.graph.draws for program in self.programs)
        self.seeds = [random.getrandbits(48) for _ in pieces] if draws else []
        self.own_numbers = OwnNumbers(pipeline.generators, pipeline.stages)
        edges = tuple(sorted({e for p in self.programs for e in p.crossing.values}))
        back = tuple(e for e in edges if any(e in p.crossing.values and p.differentiable(e) for p in self.programs))
        self.schedule = pipeline.schedule(len(pieces), edges, back if backward else (), backward=backward)
        self.split = any(a.kind == "I" for a in self.schedule.ranks[pipeline.rank])
        self.flights = {(s, m): Flight() for s in pipeline.stages for m in range(len(pieces))}
        self.arriving: dict[Action, list[tuple[int, Tensor, Any]]] = {}
        self.sent: list[tuple[Any, Tensor]] = []
        self.losses: list[Tensor] = []
        self.result: Any = None
        self.written: dict[int, Any] = {}  # microbatch → what the last stage, which has all of the forward, made of it
        self.group = pipeline.groups.pipeline

    def perform(self) -> None:
        """Every action of this rank, in order."""
        self.begin()
        for action in self.schedule.ranks[self.p.rank]:
            self.act(action)
        self.end()

    def begin(self) -> None:
        """Before the first action."""
        self.p.spans = []

    def act(self, action: Action) -> None:
        """One action, as soon as everything that it needs of other ranks is there.

        Raises:
            StageError: with rank, stage and action, whatever went wrong.
        """
        self.p.action = action
        try:
            self._wait(action)
            start = time.perf_counter()
            self._perform(action)
            self.p.spans.append((action, start, time.perf_counter()))
        except (StageError, ReplicaError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise StageError(
                f"rank {self.p.groups.rank}, {self.p.describe(action.stage)}, action {action} of the schedule"
                f"{self._peer(action)}: {type(error).__name__}: {error}"
            ) from error

    def end(self) -> None:
        """After the last action: until what was sent has been received."""
        for work, _ in self.sent:
            work.wait()
        self.own_numbers.end()
        self._share_writes()
        if self.p.branching is not None:
            self.p.branching.finish()
        self.p.action, self.p.awaited = None, ()

    def _share_writes(self) -> None:
        """What the forward wrote to the batch, on all ranks: the last stage's, which has followed the forward to its end."""
        last = self.p.recipe.stage_rank[-1]
        for m, program in enumerate(self.programs):
            tensors = tensors_in(self.pieces[m])
            values = tensors_in(self.written.pop(m)) if m in self.written else tensors
            for i in sorted(program.writes):
                value = values[i].detach()
                if value.shape != tensors[i].shape:  # unsqueezed, say: what it was made of
                    value = value.as_strided(tensors[i].shape, torch.empty_like(tensors[i]).stride(), 0)
                value = value.contiguous()
                dist.broadcast(value, group=self.group, group_src=last)
                with torch.no_grad():
                    tensors[i].copy_(value)

    def _peer(self, action: Action) -> str:
        waiting = [a for a in self.arriving if a.stage == action.stage and a.microbatch == action.microbatch]
        others = sorted({a.other for a in (*waiting, action) if a.other is not None})
        return f" (with {', '.join(map(self.p.describe, others))})" if others else ""

    def _perform(self, action: Action) -> None:
        flight = self.flights[action.stage, action.microbatch]
        if action.kind in TRANSFERS:
            with without_modes():  # what crosses is of the type that was recorded
                getattr(self, "_" + action.kind.lower())(action, flight)
        elif action.kind == "F":
            state = self.state.restored() if self.state is not None and action.microbatch else nullcontext()
            seeded = host_seeded(self.seeds[action.microbatch]) if self.seeds else nullcontext()
            with state, seeded, self.own_numbers.of(action.stage):
                self._forward(action, flight)
        elif action.kind == "W":
            assert flight.later is not None
            flight.later.finish()
        else:
            self._backward(action, flight)

    # --- transfers --------------------------------------------------------------------------------------------------

    def _numbers(self, action: Action) -> tuple[int, ...]:
        """The values that a transfer moves."""
        program, other = self.programs[action.microbatch], action.other
        assert other is not None
        edge = (action.stage, other) if action.kind in ("SEND_F", "RECV_B") else (other, action.stage)
        if edge not in program.crossing.values:
            return ()
        return program.crossing.values[edge] if action.kind.endswith("F") else program.differentiable(edge)

    def _send(self, action: Action, tensors: list[Tensor]) -> None:
        home = self.p.recipe.stage_rank[action.other or 0]
        for t in tensors:
            t = t.detach().contiguous()
            self.sent.append((dist.isend(t, group=self.group, group_dst=home), t))
            self.p.sends, self.p.bytes_sent = self.p.sends + 1, self.p.bytes_sent + t.numel() * t.element_size()
        self.sent = [(w, t) for w, t in self.sent if not w.is_completed()]

    def _send_f(self, action: Action, flight: Flight) -> None:
        program, found = self.programs[action.microbatch], []
        for n in self._numbers(action):
            value, t = program.graph.values[n], flight.outputs[n]
            t = as_recorded(t, value) if self.p.is_trying else t
            if (tuple(t.shape), str(t.dtype)) != (value.shape, f"torch.{value.dtype}"):
                event = program.graph.events[value.position]
                raise PathError(
                    f"{event.function} of {spelled(event.path)} gave {tuple(t.shape)} {t.dtype}, where {value.shape} "
                    f"torch.{value.dtype} was recorded ({event.line}): the other stage waits for that"
                )
            # What is written to later, in the next microbatch perhaps, must not change on its way.
            found.append(t.clone() if value.storage in program.graph.written else t)
        self._send(action, found)

    def _send_b(self, action: Action, flight: Flight) -> None:
        numbers = self._numbers(action)
        grads, values = [flight.back.pop(n) for n in numbers], self.programs[action.microbatch].graph.values
        if numbers and self._may_lack(action):
            there = [g is not None for g in grads]
            self._send(action, [torch.tensor(there, dtype=torch.uint8, device=self.p.groups.device)])
        self._send(
            action, [self._empty(values[n]).zero_() if g is None else g for n, g in zip(numbers, grads, strict=True)]
        )

    def _may_lack(self, action: Action) -> bool:
        """Whether a value may get a gradient or none (not zeros), as values decide: then it is told which do."""
        return bool(self.programs[action.microbatch].graph.ways)

    def _empty(self, value: Value) -> Tensor:
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=self.p.groups.device)

    def _recv(self, action: Action) -> None:
        home, values = self.p.recipe.stage_rank[action.other or 0], self.programs[action.microbatch].graph.values
        numbers = self._numbers(action)
        buffers = [(n, self._empty(values[n])) for n in numbers]
        if action.kind == "RECV_B" and numbers and self._may_lack(action):
            there = torch.empty(len(numbers), dtype=torch.uint8, device=self.p.groups.device)
            buffers.insert(0, (_WHICH, there))
        self.arriving[action] = [(n, b, dist.irecv(b, group=self.group, group_src=home)) for n, b in buffers]

    def _recv_f(self, action: Action, flight: Flight) -> None:
        self._recv(action)

    def _recv_b(self, action: Action, flight: Flight) -> None:
        self._recv(action)

    def _wait(self, action: Action) -> None:
        """Until everything is there that an action needs of other ranks."""
        if action.kind in TRANSFERS or action.kind == "W":
            return
        flight, kind = self.flights[action.stage, action.microbatch], "RECV_F" if action.kind == "F" else "RECV_B"
        ours = [a for a in self.arriving if (a.stage, a.kind, a.microbatch) == (action.stage, kind, action.microbatch)]
        for waiting in ours:
            self.p.awaited = (waiting.other or 0,)
            found = []
            for n, buffer, work in self.arriving[waiting]:
                with self.p.waiting.on():
                    work.wait()
                found.append((n, buffer))
            if found and found[0][0] == _WHICH:
                there = found.pop(0)[1].tolist()
                found = [entry for entry, is_there in zip(found, there, strict=True) if is_there]
            flight.arrived += found
            del self.arriving[waiting]

    # --- computing --------------------------------------------------------------------------------------------------

    def _inputs(self, action: Action, flight: Flight) -> Iterator[tuple[int, Tensor]]:
        program, stage, m = self.programs[action.microbatch], action.stage, action.microbatch
        for n, t in flight.arrived:
            yield n, laid_out(t, program.graph.values[n].stride)
        flight.arrived = []
        for source, numbers in program.stages[stage].incoming.items():
            if (source, m) in self.flights:  # another stage of this rank
                for n in numbers:
                    t = self.flights[source, m].outputs[n].detach()
                    yield n, t.clone() if program.graph.values[n].storage in program.graph.written else t

    def _forward(self, action: Action, flight: Flight) -> None:
        program, m = self.programs[action.microbatch], action.microbatch
        stage, received = program.stages[action.stage], {}
        for n, value in self._inputs(action, flight):
            flight.received[n] = leaf = value.requires_grad_(self.grad and program.graph.values[n].requires_grad)
            received[n] = _Arrive.apply(leaf) if leaf.requires_grad else leaf
        shares = Shares(self.shares[m])
        walk = StageInterpreter(
            stage,
            received,
            device=self.p.groups.device,
            name=self.p.describe,
            send=whole,
            exchange=self.p.branching,
            streams=None if self.split else self.p.streams,
            carried=kept_in(self.p.forwards.model, program.graph.carried),
        )
        if self.p.branching is not None:
            self.p.branching.begin(program.graph.rows)
        if self.split:
            flight.later = DeferredWeightGrads()
        piece = self.pieces[m]
        if program.writes:  # each stage finds it as it was; and rows of one memory are not told apart by autograd
            piece = copied(piece)
            if stage.last:
                self.written[m] = piece
        with (
            torch.set_grad_enabled(self.grad),
            flight.later or nullcontext(),
            self.p.view(),
            shares.on(self.p.forwards.model),
            self.watched(self.p.forwards.model, (action.stage, m)),
        ):
            with self.p.forwards.followed(walk), _kept_elsewhere(self.p.forwards.model, stage):
                output = self.call(self.p.forwards.model, piece)
            if not stage.last:  # FSDP2's hooks may have put other tensors in place of the values
                flight.outputs = dict(zip(stage.out, output, strict=True))
            elif self.loss is None:
                self.result = map_tensors(whole, output)
            else:
                flight.loss = weighed(whole(self.loss(output)), self.scale[m])
                self.losses.append(flight.loss.detach())
        if not self.backward:
            flight.received.clear()

    def _backward(self, action: Action, flight: Flight) -> None:
        program, m = self.programs[action.microbatch], action.microbatch
        for n, buffer in flight.arrived:
            flight.grads.setdefault(n, []).append(buffer)
        for taker in program.stages[action.stage].outgoing:
            if (taker, m) in self.flights:  # another stage of this rank
                for n in program.differentiable((action.stage, taker)):
                    if (g := self.flights[taker, m].back.pop(n)) is not None:
                        flight.grads.setdefault(n, []).append(g)
        roots, grads = _roots(flight)
        if roots:
            with flight.later or nullcontext(), self.p.view():
                BACKWARD(roots, grads)
        may_lack = bool(program.graph.ways)
        flight.back = {
            n: leaf.grad if leaf.grad is not None or may_lack else torch.zeros_like(leaf)
            for n, leaf in flight.received.items() if leaf.requires_grad
        }  # fmt: skip
        flight.received, flight.outputs, flight.loss, flight.grads, flight.arrived = {}, {}, None, {}, []


def laid_out(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A contiguous tensor with the strides that it has on one device: they decide what is a view, and what a copy.

    Strides by which elements overlap in memory, otherwise than by an ``expand``, cannot be had by a copy: then the tensor
    stays as it is.
    """
    if not stride or t.stride() == stride:
        return t
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, t.shape, strict=True) if size > 1 and step):
        if step <= reach:
            return t
        reach += step * (size - 1)
    return laid(t, stride)


def _call(model: nn.Module, given: Any) -> Any:
    args, kwargs = given
    return model(*args, **kwargs)


@contextmanager
def _kept_elsewhere(model: nn.Module, program: StageProgram) -> Iterator[None]:
    """What other stages change of what modules keep is, here, after a forward what it was before."""
    slots = [slot for slot, p in program.graph.changes.items() if not program.start <= p < program.stop]
    held = ((slot, held_in(model, slot)) for slot in slots)
    before = [
        (slot, value, content_of(value) if type(value) in (list, dict, set) else None)
        for slot, value in held if value is not None
    ]  # fmt: skip
    try:
        yield
    finally:
        for slot, value, content in before:
            if held_in(model, slot) is not value:
                owner = owner_of(model.get_submodule(slot[0]), slot[1])
                if owner is not None and isinstance(owner[0], nn.Module):
                    setattr(*owner, value)
                elif owner is not None:
                    attributes_in(owner[0])[owner[1]] = value
            if content is not None:
                fill(value, content)


def _roots(flight: Flight) -> tuple[list[Tensor], list[Tensor | None]]:
    """What a backward starts from, with the gradients that other stages gave, summed."""
    if flight.loss is not None:
        return ([flight.loss], [None]) if flight.loss.requires_grad else ([], [])
    found = [
        (t, sum(flight.grads[n][1:], flight.grads[n][0])) for n, t in flight.outputs.items()
        if n in flight.grads and t.requires_grad
    ]  # fmt: skip
    return [t for t, _ in found], [g for _, g in found]
