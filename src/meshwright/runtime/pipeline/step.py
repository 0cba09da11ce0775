"""``PipelineStep``: one pass over a schedule. Each rank runs its actions in order, each as soon as its receives have ended.

    action   RECV_F          fills a buffer for each value while other actions run (transfers.py)
             F               the model's own forward, of which a stage runs its interval (calls/interpreter.py)
             SEND_F          sends values to other stages; no action waits for it
             RECV_B B SEND_B the same for gradients: one backward from all values that were sent
             I W             the two halves of a backward (deferred_weight_grads.py)

A model without a pipeline is one stage, for which nothing is recorded: F is the model's plain forward.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.changes import make_changes
from meshwright.calls.interpreter import StageInterpreter
from meshwright.calls.structure import map_tensors, snapshot, tensors_of
from meshwright.calls.tracer import slot_tensors
from meshwright.chance import host_seeded
from meshwright.errors import ReplicaError, StageError
from meshwright.private import without_modes
from meshwright.runtime.coupling.paths import ForwardContext, no_context
from meshwright.runtime.module_state import AttributeValues, ModuleState
from meshwright.runtime.pipeline.deferred_weight_grads import DeferredWeightGrads
from meshwright.runtime.pipeline.flight import Flight
from meshwright.runtime.pipeline.homes import Home, Homes
from meshwright.runtime.pipeline.program import Call, Program
from meshwright.runtime.pipeline.stage_constants import StageConstants, other_ranks_state_kept
from meshwright.runtime.pipeline.stage_generators import StageGenerators
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.pipeline.transfers import Transfers
from meshwright.runtime.pipeline.unfinished import unfinished_undone
from meshwright.runtime.rows.batch import copied, tensors_in, with_tensors
from meshwright.runtime.rows.loss import Loss, one_number
from meshwright.runtime.rows.loss_weights import MeanScaler, scaled_loss
from meshwright.runtime.rows.microbatches import BACKWARD, Microbatches, arguments_of
from meshwright.schedule import TRANSFERS, Action, Schedule
from meshwright.spmd.alias import laid_out
from meshwright.spmd.autograd_functions import checkpoints_noted
from meshwright.spmd.dispatcher import full_tensor

_SEED_BITS = 48  # so many that no two forwards of a run have the same seed


def _own_copy(piece: Any) -> Any:
    """A copy of a microbatch, but for tensors that require gradients: those of a copy would be lost, and no forward may write
    to a leaf."""
    tensors = zip(tensors_in(piece), tensors_in(copied(piece)), strict=True)
    return with_tensors(piece, [t if t.requires_grad else copy for t, copy in tensors])


class PipelineStep:
    """Forward, and backward, of all microbatches.

    Args:
        stages: of this rank.
        sharing: sends writes to the batch from the ranks that made them.
        programs: of the microbatches; empty if the model runs as one part.
        schedule: actions of each rank of the pipeline axis.
        microbatches: the microbatches, with their weights.
        call: runs the model on a microbatch.
        loss: of the model's output; None: the output itself is the result.
        begin: the state of the modules with which each microbatch begins; afterwards they have the state that the first one
            left. None: each microbatch begins with the state that the previous one left.
        forward_context: a context for the forward of each stage and microbatch.
        backward: whether to run the backward.
        grad: whether gradients are enabled in forwards in parts.
        trying: whether this is a trial. A stage or branch that fails sends ones in place of its values, so that others do not
            wait, and ranks can agree on what follows.
        wide: whether forwards compute in float64, and not in the recorded dtypes.

    Attributes:
        programs, schedule: as given.
        losses: scaled, of the microbatches, on the ranks of the last stage.
        failures: the errors of this rank's stages and branches in a trial.
        result: the model's output if there is no loss, on the ranks of the last stage.
    """

    def __init__(
        self,
        stages: Stages,
        sharing: Homes,
        programs: Sequence[Program],
        schedule: Schedule,
        microbatches: Microbatches,
        call: Call,
        loss: Loss | None,
        begin: ModuleState | None = None,
        forward_context: ForwardContext = no_context,
        *,
        backward: bool,
        grad: bool,
        trying: bool = False,
        wide: bool = False,
    ) -> None:
        self._stages, self._sharing, self.programs, self.schedule = stages, sharing, programs, schedule
        self._microbatches, self._call, self._loss = microbatches, call, loss
        self._backward_too, self._state, self._forward_context = backward, begin, forward_context
        self._grad = grad
        # A stage may stop before the end of a forward, so host generators have different states on different stages afterwards.
        # Each forward is therefore seeded anew.
        draws = any(program.graph.draws for program in self.programs)
        self._seeds = [random.getrandbits(_SEED_BITS) for _ in microbatches.batches] if draws else []
        self._generators = StageGenerators(stages.generators, stages.numbers)
        repeated = [slot for program in programs for slot in program.graph.repeated]
        self._constants = StageConstants(stages.model, list(dict.fromkeys(repeated)), stages.numbers)
        self._split = any(a.kind == "I" for a in schedule.ranks[stages.rank])
        self._flights = {(s, m): Flight() for s in stages.numbers for m in range(len(microbatches.batches))}
        self._transfers = Transfers(
            stages.groups,
            stages.recipe.stage_rank,
            programs,
            self._flights,
            stages.traffic,
            casts=trying,
            wide=wide,
        )
        # (stage, microbatch) → the tensors of its copy, to which the stage has written.
        self._written: dict[tuple[int, int], list[Tensor]] = {}
        self._left: dict[int, list[list[Tensor]]] = {}  # microbatch → ``StageInterpreter.left``
        self._state_after_first: dict[int, ModuleState] = {}  # stage → state after its first forward, for recompute
        self.losses: list[Tensor] = []
        self.failures: list[Exception] = []
        self._trying, self._stage_failed = trying and bool(programs), False
        self.result: Any = None

    # --- actions ----------------------------------------------------------------------------------------------------

    def perform(self) -> None:
        """Runs every action of this rank, in order."""
        self.begin()
        for action in self.schedule.ranks[self._stages.rank]:
            self.act(action)
        self.end()

    def begin(self) -> None:
        """Call before the first action."""
        self._stages.spans = []
        self._stages.sync.begin()

    def act(self, action: Action) -> None:
        """Runs one action, after it has waited for its receives.

        Raises:
            StageError: with rank, stage and action, for any exception in a part of a model.
        """
        stages = self._stages
        stages.action = action
        try:
            for arrived in self._transfers.wait_for(action):
                if stages.observer is not None:
                    stages.observer.arrived(arrived)
            with stages.doing(action):
                self._try(action) if self._trying else self._perform(action)
        except (StageError, ReplicaError, KeyboardInterrupt):
            raise
        except Exception as error:
            if not self.programs:
                raise
            others = ", ".join(map(stages.describe, self._transfers.others(action)))
            raise StageError(
                f"rank {stages.groups.rank}, {stages.describe(action.stage)}, action {action} of the schedule"
                f"{f' (with {others})' if others else ''}: {type(error).__name__}: {error}"
            ) from error

    def end(self) -> None:
        """Call after the last action: waits for all sends, and shares what forwards changed in the batch."""
        self._transfers.end()
        self._generators.end()
        for m, program in enumerate(self.programs):
            if program.writes:
                self._share_writes(program, m)
            if program.graph.left_changes:
                self._share_changes(program, m)
        self._written.clear()
        if self._stages.branching is not None:
            self._stages.branching.finish()
        self._stages.action = None

    def _share_changes(self, program: Program, m: int) -> None:
        """Changes containers and objects of a microbatch as the forward changed copies of them, on all ranks."""
        graph, changes, home = program.graph, program.graph.left_changes, Home(len(program.crossing.cuts), 0)
        recorded = [tensors_of(change.items) for change in changes]
        like = [
            [t if n is None else graph.like(n, t) for n, t in zip(change.values, tensors, strict=True)]
            for change, tensors in zip(changes, recorded, strict=True)
        ]
        if self._trying:  # only the ranks that made the changes are asked
            left = self._left.get(m)
            if left is None:
                return
        else:
            received = self._sharing.share({m: home}, lambda m: self._left[m], like=lambda m: like)
            left = received[m] if m in received else self._left[m]
        memo = {id(t): ours for tensors, own in zip(recorded, left, strict=True)
                for t, ours in zip(tensors, own, strict=True)}  # fmt: skip
        batch = self._microbatches.batches[m]
        make_changes(changes, batch if self._loss is None else arguments_of(batch), memo)

    def _share_writes(self, program: Program, m: int) -> None:
        """Writes to a microbatch what the forward wrote to copies of it, on all ranks."""
        tensors = tensors_in(self._microbatches.batches[m])

        def written(i: int) -> Tensor:
            t = self._written.get((program.writes[i].stage, m), tensors)[i].detach()
            if t.shape != tensors[i].shape:  # reshaped in place, by unsqueeze_ for example: take its memory
                t = t.as_strided(tensors[i].shape, torch.empty_like(tensors[i]).stride(), 0)
            return t

        # In a trial only the ranks that wrote are asked, and their copies may be in a wider type.
        received = {} if self._trying else self._sharing.share(program.writes, written, like=lambda i: tensors[i])
        with torch.no_grad():
            for i in program.writes:
                tensors[i].copy_(received[i] if i in received else written(i))

    def _try(self, action: Action) -> None:
        """Runs one action of a trial, until a stage of this rank fails; from then on sends ones."""
        if action.kind in ("F", "SEND_F"):
            try:
                if not self._stage_failed:
                    self._perform(action)
                    return
            except (StageError, ReplicaError):
                raise
            except Exception as error:
                self.failures.append(error)
                self._stage_failed = True
            self._written.clear()
            self._flights[action.stage, action.microbatch].outputs = self._ones(action)
        if action.kind != "F":
            self._perform(action)

    def _ones(self, action: Action) -> dict[int, Tensor]:
        """Ones for each value that a stage sends, as its forward of this microbatch has failed."""
        program = self.programs[action.microbatch]
        edges = ((source, numbers) for (source, _), numbers in program.crossing.values.items())
        return {
            n: self._transfers.empty(program.graph.values[n]).fill_(1)
            for source, numbers in edges
            if source == action.stage
            for n in numbers
        }

    def _perform(self, action: Action) -> None:
        """Runs one action whose receives have ended."""
        flight = self._flights[action.stage, action.microbatch]
        if action.kind in TRANSFERS:
            with without_modes():  # function modes of a trial must not change the type of what is sent
                self._transfers.begin(action)
        elif action.kind == "F":
            self._begin_microbatch(action, flight)
        elif action.kind == "W":
            assert flight.deferred is not None
            flight.deferred.finish()
            self._stages.sync.weights_done()
        else:
            self._backward(action, flight)

    # --- forward ----------------------------------------------------------------------------------------------------

    def _begin_microbatch(self, action: Action, flight: Flight) -> None:
        """Runs a forward with the random state and the module state of its microbatch."""
        m = action.microbatch
        self._stages.sync.begin_microbatch(last=m == len(self._microbatches.batches) - 1)
        seeded = host_seeded(self._seeds[m]) if self._seeds else nullcontext()
        with self._beginning(action), seeded, self._generators.of(action.stage):
            self._forward(action, flight)

    @contextmanager
    def _beginning(self, action: Action) -> Iterator[None]:
        """A context for a forward, at whose begin modules have the state of ``begin``.

        The state that the first microbatch leaves stays in the modules. It is also stored if the model uses checkpoints
        (recompute), since a backward of a later microbatch must begin with it.
        """
        if self._state is None:
            with self._constants.of(action.stage):
                yield
        elif action.microbatch:
            with self._state.restored():
                yield
        else:
            checkpoints: list[Any] = []
            with checkpoints_noted(checkpoints), self._constants.of(action.stage):
                yield
            if checkpoints:
                self._state_after_first[action.stage] = self._state.now()

    def _forward(self, action: Action, flight: Flight) -> None:
        """Runs the forward of a stage and a microbatch, under all modes."""
        m, model, part = action.microbatch, self._stages.model, None
        # Autocast keeps its casts of parameters until it ends. If it is around the step, a forward would take the casts of the
        # one before, through whose graph gradients come after FSDP2 has reduced those of the unit.
        torch.clear_autocast_cache()
        with ExitStack() as stack:
            if self.programs:
                # This decides whether received values get a gradient.
                stack.enter_context(torch.set_grad_enabled(self._grad))
                part = self._part(action, flight)
                stack.enter_context(flight.deferred or nullcontext())
            stack.enter_context(self._stages.spmd_mode())
            stack.enter_context(MeanScaler(self._microbatches.factors[m]).on(model))
            stack.enter_context(self._forward_context(model, (action.stage, m)))
            flight.ends = stack.enter_context(self._stages.sync.forward())
            output = self._output(part, flight, m)
            if part is not None and not part.program.last:
                # From the output, and not from the interpreter: FSDP2's hooks may have replaced the tensors.
                flight.outputs = dict(zip(part.program.out, output, strict=True))
            elif self._loss is None:
                self.result = map_tensors(full_tensor, output)
            else:
                flight.loss = scaled_loss(one_number(full_tensor(self._loss(output))), self._microbatches.weights[m])
                self.losses.append(flight.loss.detach())
        if not self._backward_too:
            flight.received, flight.loss, flight.ends = {}, None, []

    def _output(self, part: StageInterpreter | None, flight: Flight, m: int) -> Any:
        """The model's output for a microbatch; of a stage before the last, the values that it sends."""
        model, piece = self._stages.model, self._microbatches.batches[m]
        if part is None:
            with self._attributes_kept(flight):
                return self._call(model, piece)
        if self.programs[m].graph.left_changes:
            piece = snapshot(piece, lambda t: t)
        if self.programs[m].writes:
            # A copy: each stage must get the batch as it was, and autograd cannot distinguish writes to rows of one tensor.
            piece = _own_copy(piece)
            self._written[part.program.stage, m] = tensors_in(piece)
        kept = other_ranks_state_kept(model, part.program, self.programs[m].changed)
        undone = unfinished_undone(model, part.program)
        with self._stages.calls.following(part), kept, undone, self._attributes_kept(flight):
            output = self._call(model, piece)
        if part.left:
            self._left[m] = part.left
        return output

    @contextmanager
    def _attributes_kept(self, flight: Flight) -> Iterator[None]:
        """A context for a forward. Its backward has the attributes that it leaves, if it has checkpoints."""
        # The backward of a single forward that is not in parts finds them where they are.
        if not self._backward_too or not (self.programs or len(self._microbatches.batches) > 1):
            yield
            return
        checkpoints: list[Any] = []
        with checkpoints_noted(checkpoints):
            yield
        if checkpoints:
            flight.attributes = AttributeValues(self._stages.model)

    def _part(self, action: Action, flight: Flight) -> StageInterpreter:
        """The interpreter for a stage's part of the forward."""
        stages, program = self._stages, self.programs[action.microbatch]
        graph, received = program.graph, {}
        for n, value in self._inputs(action, flight):
            flight.received[n] = leaf = value.requires_grad_(self._grad and graph.values[n].requires_grad)
            arrived: Any = _Arrive.apply(leaf) if leaf.requires_grad else leaf
            arrived._mw_received = True
            received[n] = arrived
        if stages.branching is not None:
            stages.branching.begin(graph.rows)
        if self._split:
            flight.deferred = DeferredWeightGrads()
        return StageInterpreter(
            program.stages[action.stage],
            received,
            device=stages.groups.device,
            name=stages.describe,
            send=full_tensor,
            exchange=stages.branching,
            streams=None if self._split else stages.streams,
            carried=slot_tensors(stages.model, graph.carried),
            failures=self.failures if self._trying else None,
        )

    def _inputs(self, action: Action, flight: Flight) -> Iterator[tuple[int, Tensor]]:
        """(number, tensor) of each value that a stage receives from others."""
        program, stage, m = self.programs[action.microbatch], action.stage, action.microbatch
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
        """Runs the backward of a stage and a microbatch, and collects the gradients of received values."""
        program = self.programs[action.microbatch] if self.programs else None
        for n, buffer in flight.arrived:
            flight.grads.setdefault(n, []).append(buffer)
        if program is not None:
            self._take_gradients(program, action, flight)
        roots, grads = flight.roots()
        # Recompute in a checkpoint of the model may write to attributes of modules. As on one device, that counts once a step.
        state = self._state_after_first.get(action.stage) if action.microbatch else None
        if roots:
            stages, restored = self._stages, state.restored() if state else nullcontext()
            attributes = nullcontext() if flight.attributes is None else flight.attributes.restored()
            with restored, attributes, flight.deferred or nullcontext(), stages.spmd_mode(), stages.around_backward():
                BACKWARD(roots, grads)
        may_lack = program is not None and program.graph.may_lack_gradients
        flight.input_grads = {
            n: _copied(leaf.grad) if leaf.grad is not None or may_lack else torch.zeros_like(leaf)
            for n, leaf in flight.received.items() if leaf.requires_grad
        }  # fmt: skip
        flight.end()

    def _take_gradients(self, program: Program, action: Action, flight: Flight) -> None:
        """Takes the gradients of this stage's outputs from other stages of this rank."""
        for later_stage in program.stages[action.stage].outgoing:
            if (later_stage, action.microbatch) in self._flights:
                for n in program.differentiable((action.stage, later_stage)):
                    if (g := self._flights[later_stage, action.microbatch].input_grads.pop(n)) is not None:
                        flight.grads.setdefault(n, []).append(g)


def _copied(g: Tensor | None) -> Tensor | None:
    """A copy of a gradient.

    If a model adds a received value to a parameter, autograd gives both the same gradient tensor. The next microbatch's is
    added to the parameter's in place, while this one may still be being sent.
    """
    return None if g is None else g.clone()


class _Arrive(torch.autograd.Function):
    """Makes a received value a non-leaf, since a model may write to it in place, which autograd forbids for leaves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # an absent gradient stays None
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Tensor | None:
        return g
