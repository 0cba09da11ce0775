"""``Step``: one pass over a schedule. Each rank performs its actions in order, each as soon as what it needs has come.

    action   RECV_F          a buffer for each value, filled while other actions run (transfers.py)
             F               the model's own forward, of which a stage runs its interval (calls/interpreter.py)
             SEND_F          what other stages take; nothing waits for it
             RECV_B B SEND_B the same for gradients: one backward over everything that was sent
             I W             its two halves (deferred_weight_grads.py)

A model that is not in parts is a pipeline of one stage, of which nothing is recorded: F is its forward, as it stands.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.calls.interpreter import StageInterpreter
from meshwright.calls.structure import map_tensors
from meshwright.calls.tracer import slot_tensors
from meshwright.chance import host_seeded
from meshwright.errors import ReplicaError, StageError
from meshwright.private import without_modes
from meshwright.runtime.coupling.paths import Watched, unwatched
from meshwright.runtime.groups import as_bytes
from meshwright.runtime.module_state import ModuleState
from meshwright.runtime.pipeline.deferred_weight_grads import DeferredWeightGrads
from meshwright.runtime.pipeline.flight import Flight
from meshwright.runtime.pipeline.own_constants import OwnConstants, kept_elsewhere
from meshwright.runtime.pipeline.own_numbers import OwnNumbers
from meshwright.runtime.pipeline.program import Call, Program
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.pipeline.transfers import Transfers
from meshwright.runtime.rows.batch import copied, tensors_in
from meshwright.runtime.rows.loss import Loss, one_number
from meshwright.runtime.rows.loss_weights import Shares, weighed
from meshwright.runtime.rows.microbatches import BACKWARD, Pieces
from meshwright.schedule import TRANSFERS, Action, Schedule
from meshwright.spmd.alias import with_strides
from meshwright.spmd.autograd_functions import checkpoints_noted
from meshwright.spmd.dispatcher import whole


class Step:
    """Forward, and backward, of all microbatches.

    Args:
        programs: of the microbatches; none if the model is not in parts.
        call: calls the model.
        loss: None if the output itself is wanted.
        begin: the state that each microbatch begins with; what the first one leaves stays. None: with what the one before has
            left.
        watched: what is on during the forward of a stage and microbatch.
        trying: whether forwards compute in a wider type than was recorded.

    Attributes:
        losses: of the microbatches, scaled, on the ranks that have them.
        result: what the model gave, if there is no loss, on the ranks of the last stage.
    """

    def __init__(
        self,
        stages: Stages,
        programs: Sequence[Program],
        schedule: Schedule,
        pieces: Pieces,
        call: Call,
        loss: Loss | None,
        begin: ModuleState | None = None,
        watched: Watched = unwatched,
        *,
        backward: bool,
        trying: bool = False,
    ) -> None:
        self._stages, self._programs, self.schedule = stages, programs, schedule
        self._pieces, self._call, self._loss = pieces, call, loss
        self._backward_too, self._state, self._watched = backward, begin, watched
        self._grad = backward or trying  # what is tried is a forward of a step
        # Not every stage follows a forward to its end. So its numbers do not follow from where the one before has left off.
        draws = any(program.graph.draws for program in self._programs)
        self._seeds = [random.getrandbits(48) for _ in pieces.batches] if draws else []
        self._own_numbers = OwnNumbers(stages.generators, stages.numbers)
        repeated = [slot for program in programs for slot in program.graph.repeated]
        self._own_constants = OwnConstants(stages.model, list(dict.fromkeys(repeated)), stages.numbers)
        self._split = any(a.kind == "I" for a in schedule.ranks[stages.rank])
        self._flights = {(s, m): Flight() for s in stages.numbers for m in range(len(pieces.batches))}
        self._transfers = Transfers(
            stages.groups, stages.recipe.stage_rank, programs, self._flights, stages.traffic, casts=trying
        )
        self._written: dict[int, Any] = {}  # microbatch → what the last stage, which has all of the forward, made of it
        self._left: dict[int, ModuleState] = {}  # stage → what its first forward left, if it is to be computed again
        self.losses: list[Tensor] = []
        self.result: Any = None

    # --- actions ----------------------------------------------------------------------------------------------------

    def perform(self) -> None:
        """Every action of this rank, in order."""
        self.begin()
        for action in self.schedule.ranks[self._stages.rank]:
            self.act(action)
        self.end()

    def begin(self) -> None:
        """Before the first action."""
        self._stages.spans = []
        self._stages.sync.begin()

    def act(self, action: Action) -> None:
        """One action, as soon as everything that it needs of other ranks is there.

        Raises:
            StageError: with rank, stage and action, whatever went wrong in a part of a model.
        """
        stages = self._stages
        stages.action = action
        try:
            for arrived in self._transfers.wait_for(action):
                if stages.observer is not None:
                    stages.observer.arrived(arrived)
            with stages.doing(action):
                self._perform(action)
        except (StageError, ReplicaError, KeyboardInterrupt):
            raise
        except Exception as error:
            if not self._programs:
                raise
            others = ", ".join(map(stages.describe, self._transfers.others(action)))
            raise StageError(
                f"rank {stages.groups.rank}, {stages.describe(action.stage)}, action {action} of the schedule"
                f"{f' (with {others})' if others else ''}: {type(error).__name__}: {error}"
            ) from error

    def end(self) -> None:
        """After the last action: until what was sent has been received."""
        self._transfers.end()
        self._own_numbers.end()
        self._share_writes()
        if self._stages.branching is not None:
            self._stages.branching.finish()
        self._stages.action = None

    def _share_writes(self) -> None:
        """What the forward wrote to the batch, on all ranks: the last stage's, which has followed the forward to its end."""
        last, group = self._stages.recipe.stage_rank[-1], self._stages.groups.pipeline
        for m, program in enumerate(self._programs):
            tensors = tensors_in(self._pieces.batches[m])
            values = tensors_in(self._written.pop(m)) if m in self._written else tensors
            for i in sorted(program.writes):
                value = values[i].detach()
                if value.shape != tensors[i].shape:  # unsqueezed, say: what it was made of
                    value = value.as_strided(tensors[i].shape, torch.empty_like(tensors[i]).stride(), 0)
                value = value.resolve_conj().resolve_neg().contiguous()
                dist.broadcast(as_bytes(value), group=group, group_src=last)
                with torch.no_grad():
                    tensors[i].copy_(value)

    def _perform(self, action: Action) -> None:
        flight = self._flights[action.stage, action.microbatch]
        if action.kind in TRANSFERS:
            with without_modes():  # what crosses is of the type that was recorded
                self._transfers.begin(action)
        elif action.kind == "F":
            self._begin_microbatch(action, flight)
        elif action.kind == "W":
            assert flight.later is not None
            flight.later.finish()
            self._stages.sync.weights_done()
        else:
            self._backward(action, flight)

    # --- forward ----------------------------------------------------------------------------------------------------

    def _begin_microbatch(self, action: Action, flight: Flight) -> None:
        m = action.microbatch
        self._stages.sync.begin_microbatch(last=m == len(self._pieces.batches) - 1)
        seeded = host_seeded(self._seeds[m]) if self._seeds else nullcontext()
        with self._beginning(action), seeded, self._own_numbers.of(action.stage):
            self._forward(action, flight)

    @contextmanager
    def _beginning(self, action: Action) -> Iterator[None]:
        """For the time of a forward, the state that each microbatch begins with. What the first leaves stays, and is kept if a
        checkpoint of the model's is to begin with it in a backward."""
        if self._state is None:
            with self._own_constants.of(action.stage):
                yield
        elif action.microbatch:
            with self._state.restored():
                yield
        else:
            checkpoints: list[Any] = []
            with checkpoints_noted(checkpoints), self._own_constants.of(action.stage):
                yield
            if checkpoints:
                self._left[action.stage] = self._state.now()

    def _forward(self, action: Action, flight: Flight) -> None:
        m, model, part = action.microbatch, self._stages.model, None
        with ExitStack() as stack:
            if self._programs:
                stack.enter_context(torch.set_grad_enabled(self._grad))  # what arrives has a gradient, or none, by that
                part = self._part(action, flight)
                stack.enter_context(flight.later or nullcontext())
            stack.enter_context(self._stages.view())
            stack.enter_context(Shares(self._pieces.shares[m]).on(model))
            stack.enter_context(self._watched(model, (action.stage, m)))
            flight.ends = stack.enter_context(self._stages.sync.forward())
            output = self._output(part, m)
            if (
                part is not None and not part.program.last
            ):  # FSDP2's hooks may have put other tensors in place of the values
                flight.outputs = dict(zip(part.program.out, output, strict=True))
            elif self._loss is None:
                self.result = map_tensors(whole, output)
            else:
                flight.loss = weighed(one_number(whole(self._loss(output))), self._pieces.scale[m])
                self.losses.append(flight.loss.detach())
        if not self._backward_too:
            flight.received, flight.loss, flight.ends = {}, None, []

    def _output(self, part: StageInterpreter | None, m: int) -> Any:
        """What the model returns for a microbatch, or a part of it gives."""
        model, piece = self._stages.model, self._pieces.batches[m]
        if part is None:
            return self._call(model, piece)
        if self._programs[
            m
        ].writes:  # each stage finds it as it was; and rows of one memory are not told apart by autograd
            piece = copied(piece)
            if part.program.last:
                self._written[m] = piece
        with self._stages.calls.following(part), kept_elsewhere(model, part.program):
            return self._call(model, piece)

    def _part(self, action: Action, flight: Flight) -> StageInterpreter:
        """What runs a stage's part of the forward."""
        stages, program = self._stages, self._programs[action.microbatch]
        graph, received = program.graph, {}
        for n, value in self._inputs(action, flight):
            flight.received[n] = leaf = value.requires_grad_(self._grad and graph.values[n].requires_grad)
            arrived: Any = _Arrive.apply(leaf) if leaf.requires_grad else leaf
            arrived._mw_received = True
            received[n] = arrived
        if stages.branching is not None:
            stages.branching.begin(graph.rows)
        if self._split:
            flight.later = DeferredWeightGrads()
        return StageInterpreter(
            program.stages[action.stage],
            received,
            device=stages.groups.device,
            name=stages.describe,
            send=whole,
            exchange=stages.branching,
            streams=None if self._split else stages.streams,
            carried=slot_tensors(stages.model, graph.carried),
        )

    def _inputs(self, action: Action, flight: Flight) -> Iterator[tuple[int, Tensor]]:
        """The values that a stage takes of others, by their numbers."""
        program, stage, m = self._programs[action.microbatch], action.stage, action.microbatch
        for n, t in flight.arrived:
            yield n, laid_out(t, program.graph.values[n].stride)
        flight.arrived = []
        for source, numbers in program.stages[stage].incoming.items():
            if (source, m) in self._flights:  # another stage of this rank
                for n in numbers:
                    t = self._flights[source, m].outputs[n].detach()
                    yield n, t.clone() if program.graph.values[n].storage in program.graph.written else t

    # --- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, action: Action, flight: Flight) -> None:
        program = self._programs[action.microbatch] if self._programs else None
        for n, buffer in flight.arrived:
            flight.grads.setdefault(n, []).append(buffer)
        if program is not None:
            self._take_gradients(program, action, flight)
        roots, grads = flight.roots()
        # What a checkpoint of the model's computes again may write to what modules keep: once a step, as on one device.
        left = self._left.get(action.stage) if action.microbatch else None
        if roots:
            stages, restored = self._stages, left.restored() if left else nullcontext()
            with restored, flight.later or nullcontext(), stages.view(), stages.backward():
                BACKWARD(roots, grads)
        may_lack = program is not None and program.graph.may_lack_gradients
        flight.back = {
            n: _own(leaf.grad) if leaf.grad is not None or may_lack else torch.zeros_like(leaf)
            for n, leaf in flight.received.items() if leaf.requires_grad
        }  # fmt: skip
        flight.end()

    def _take_gradients(self, program: Program, action: Action, flight: Flight) -> None:
        """From other stages of this rank."""
        for taker in program.stages[action.stage].outgoing:
            if (taker, action.microbatch) in self._flights:
                for n in program.differentiable((action.stage, taker)):
                    if (g := self._flights[taker, action.microbatch].back.pop(n)) is not None:
                        flight.grads.setdefault(n, []).append(g)


def _own(g: Tensor | None) -> Tensor | None:
    """A gradient in memory of its own. Autograd gives a value and a parameter that are added one gradient, and the next
    microbatch's is added to the parameter's in place, while this one is still on its way to another stage."""
    return None if g is None else g.clone()


class _Arrive(torch.autograd.Function):
    """A received value, as the model may write to it: not a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # none stays none
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Tensor | None:
        return g


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
    return with_strides(t, stride)
