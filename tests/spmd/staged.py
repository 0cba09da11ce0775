"""All stages of a pipeline in one process, without process groups: a rank's sends are handed to the other's receives.

Each rank has a model of its own, in which the parameters of other ranks are on meta, as in a job. What runs is the pipeline
of a job (``runtime/pipeline``). The ranks take turns: one performs its next action as soon as everything that
the action waits for has been sent. So thousands of programs can be tried without a pool of processes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.calls.hook import ModuleCalls
from meshwright.evaluation import Modes
from meshwright.generators import Generators
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.planning.passes import stages as planned
from meshwright.private import pytree
from meshwright.runtime.pipeline import transfers
from meshwright.runtime.pipeline.executor import Executor
from meshwright.runtime.pipeline.homes import Home
from meshwright.runtime.pipeline.program import Programs
from meshwright.runtime.pipeline.stages import Stages
from meshwright.runtime.pipeline.step import PipelineStep
from meshwright.runtime.rows.label_counter import LabelCounter
from meshwright.runtime.rows.loss import output_loss
from meshwright.runtime.rows.microbatches import Microbatches, call_model, split_batch, weigh_microbatches
from meshwright.runtime.weights.parameters import parameter_slots
from meshwright.runtime.weights.recompute import recomputed
from meshwright.switches import Switches

Build = Callable[[], nn.Module]


@dataclass
class Mail:
    """From one rank to another: what was sent, in order, and how many receives have begun."""

    sent: list[Tensor] = field(default_factory=list)
    begun: int = 0


class Line:
    """What a rank sends to others and receives from them; stands for the group of the pipeline's axis."""

    def __init__(self, rank: int, mail: dict[tuple[int, int], Mail]) -> None:
        self.rank, self.mail = rank, mail

    def _get_backend(self, device: torch.device) -> None:
        """It has none, and so no time after which a receive gives up."""

    def isend(self, t: Tensor, to: int) -> Any:
        self.mail[self.rank, to].sent.append(t)  # no copy: it is taken as late as it can be, as a slow link would
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def irecv(self, buffer: Tensor, source: int) -> Arriving:
        """The n-th receive that begins gets the n-th message, whichever is waited for first."""
        mail = self.mail[source, self.rank]
        mail.begun += 1
        return Arriving(buffer, mail, mail.begun - 1)


@dataclass
class Arriving:
    buffer: Tensor
    mail: Mail
    number: int

    @property
    def is_there(self) -> bool:
        return len(self.mail.sent) > self.number

    def wait(self) -> None:
        sent = self.mail.sent[self.number]
        assert sent.shape == self.buffer.shape and sent.dtype == self.buffer.dtype, "sends and receives differ"
        self.buffer.copy_(sent)


@dataclass
class Sharing:
    """Stands for ``Homes``: each rank is a thread, and takes the values of the others from them.

    Attributes:
        values: rank → a key → the rank's value, of the ranks that share now.
    """

    rank: int
    stage_rank: Sequence[int]
    values: dict[int, Callable[[Any], Any]]
    together: Barrier

    def share(self, homes: Mapping[Any, Home], value: Callable[[Any], Any], like: Any = None) -> dict[Any, Any]:
        if not homes:
            return {}
        self.values[self.rank] = value
        self.together.wait()
        sources = {key: self.stage_rank[home.stage] for key, home in homes.items()}
        received = {key: self.values[r](key).clone() for key, r in sources.items() if r != self.rank}
        self.together.wait()
        return received


@contextmanager
def in_one_process() -> Iterator[None]:
    """For the time of a ``with``, a pipeline's sends and receives go through ``Line``."""
    before = dist
    transfers.dist = SimpleNamespace(  # type: ignore[assignment]
        isend=lambda t, group, group_dst: group.isend(t, group_dst),
        irecv=lambda t, group, group_src: group.irecv(t, group_src),
    )
    try:
        yield
    finally:
        transfers.dist = before


@contextmanager
def cut_at(choose: Callable[[Sequence[int]], list[int]]) -> Iterator[None]:
    """For the time of a ``with``, stages begin where ``choose`` says, of the positions where they may begin."""
    before = planned.choose_cuts
    planned.choose_cuts = lambda graph, places, memory, pinned: choose(places) or None  # type: ignore[assignment]
    try:
        yield
    finally:
        planned.choose_cuts = before


@dataclass
class Trained:
    """What steps of training came to."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # of each step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Staged:
    """A model over the ranks of a pipeline.

    Args:
        build: the model; called once for each rank, under the same seed.
        plan: a mesh of ``pp`` alone, or a plan with one.
        batch: of all rows.
        microbatches: of a plan that does not say how many.
    """

    def __init__(self, build: Build, plan: Any, batch: Any, *, microbatches: int = 1) -> None:
        plan = Plan.parse({"microbatches": microbatches, **(plan if isinstance(plan, dict) else {"mesh": plan})})
        self.planned = Planned(build, plan, batch, output_loss)
        self.recipe, self.microbatches = self.planned.recipe, self.planned.recipe.microbatches
        mail: dict[tuple[int, int], Mail] = defaultdict(Mail)
        values: dict[int, Callable[[Any], Any]] = {}
        together = Barrier(self.recipe.mesh.size, timeout=60)
        self.models, self.ranks = [], []
        for rank in range(self.recipe.mesh.size):
            torch.manual_seed(plan.seed)
            self.models.append(_held_alone(build(), self.recipe, rank))
            groups = SimpleNamespace(
                rank=rank,
                pp_rank=rank,
                device=torch.device("cpu"),
                pipeline=(line := Line(rank, mail)),
                hosts={"pp": line},
                mesh=self.recipe.mesh,
                meshes={0: None},
                tp_rank=0,
            )
            random = Generators(torch.device("cpu"), self.models[-1])
            again = recomputed(self.models[-1], self.recipe.recompute, random)
            calls = ModuleCalls(self.models[-1], followed=True, recomputed=again)
            stages = Stages(self.models[-1], self.recipe, groups, spmd=None, calls=calls)  # type: ignore[arg-type]
            programs = Programs(self.recipe, self.planned, stages.numbers, [], stages.modes, stages.switches)
            self.ranks.append(Executor(stages, programs, output_loss))
            self.ranks[-1]._sharing = Sharing(rank, self.recipe.stage_rank, values, together)  # type: ignore[assignment]
        self.counter = (
            LabelCounter(self.planned.record, self.models[0], Modes(self.models[0]), Switches(self.models[0]))
            if self.microbatches > 1
            else None
        )

    def step(self, batch: Any, *, backward: bool = True) -> float:
        """Forward and backward of all microbatches on all ranks; the mean loss."""
        pieces = list(split_batch(batch, self.microbatches))
        weights, factors = weigh_microbatches(pieces, self.counter, 1, groups=None)
        with in_one_process():
            # Copies, since models write to their inputs.
            own = [pytree.tree_map_only(Tensor, torch.clone, pieces) for _ in self.ranks]
            steps = [
                r.step(Microbatches(own[i], weights, factors), call_model, output_loss, backward=backward)
                for i, r in enumerate(self.ranks)
            ]
            waiting = [deque(s.schedule.ranks[rank]) for rank, s in enumerate(steps)]
            for s in steps:
                s.begin()
            while any(waiting):
                ready = [r for r, actions in enumerate(waiting) if actions and _ready(steps[r], actions[0])]
                assert ready, f"every rank waits: {[str(a[0]) for a in waiting if a]}"
                for r in ready:
                    steps[r].act(waiting[r].popleft())
            with ThreadPoolExecutor(len(steps)) as threads:  # they give each other what the forward wrote to the batch
                list(threads.map(PipelineStep.end, steps))
        return sum(float(loss) for s in steps for loss in s.losses)

    def gradients(self) -> dict[str, Tensor | None]:
        """Of every parameter, the sum over the stages that hold it, given to each of them, as a job does."""
        found: dict[str, Tensor | None] = {}
        named = [dict(m.named_parameters()) for m in self.models]
        for line in self.recipe.parameters:
            own = [named[rank][line.name] for rank in self.recipe.owners(line)]
            grads = [p.grad for p in own if p.grad is not None]
            found[line.name] = total = sum(grads[1:], grads[0].clone()) if grads else None
            for p in own:
                p.grad = None if total is None else total.clone()
        return found

    def held(self) -> list[nn.Parameter]:
        return [p for m in self.models for p in m.parameters() if not p.is_meta]

    def train(self, batches: Sequence[Any]) -> Trained:
        found = Trained()
        for batch in batches:
            found.losses.append(self.step(batch))
            found.grads.append(self.gradients())
            descend(self.held())
        named = [dict(m.named_parameters()) for m in self.models]
        found.parameters = {
            line.name: named[self.recipe.owners(line)[0]][line.name].detach() for line in self.recipe.parameters
        }
        for name, _ in self.models[0].named_buffers():
            owner = self.models[self.recipe.buffer_owner(name)]
            found.buffers[name] = dict(owner.named_buffers())[name].detach()
        return found


def _ready(step: PipelineStep, action: Any) -> bool:
    """Whether everything that an action waits for has been sent."""
    if action.kind not in ("F", "B", "I"):
        return True
    kind = "RECV_F" if action.kind == "F" else "RECV_B"
    return all(
        arriving.work.is_there
        for a, entries in step._transfers._arriving.items() if (a.stage, a.kind, a.microbatch) == (action.stage, kind, action.microbatch)
        for arriving in entries
    )  # fmt: skip


def _held_alone(model: nn.Module, recipe: Any, rank: int) -> nn.Module:
    """The model with the parameters of other ranks on meta; ties are kept."""
    made: dict[int, nn.Parameter] = {}
    for name, module, key, p in list(parameter_slots(model)):
        if not recipe.holds(recipe.by_name[name], rank):
            made.setdefault(id(p), nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad))
            setattr(module, key, made[id(p)])
    return model


@torch.no_grad()
def descend(parameters: Iterable[nn.Parameter]) -> None:
    """A step of gradient descent with weight decay, which a parameter without a gradient is spared."""
    for p in parameters:
        if p.grad is not None:
            p.sub_(0.05 * p.grad + 0.01 * p)
            p.grad = None


def alone(build: Build, batches: Sequence[Any], *, seed: int = 0) -> Trained:
    """The same training on one device."""
    torch.manual_seed(seed)
    model, found = build(), Trained()
    for batch in batches:
        loss = output_loss(call_model(model, batch))
        if loss.requires_grad:
            loss.backward()
        found.losses.append(loss.item())
        found.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        descend(model.parameters())
    found.parameters = {n: p.detach() for n, p in model.named_parameters()}
    found.buffers = {n: b.detach() for n, b in model.named_buffers()}
    return found


def differences(one: Trained, staged: Trained) -> list[str]:
    """In what a run over stages differs from one device, in words; empty if in nothing."""
    found = []
    for i, (a, b) in enumerate(zip(one.losses, staged.losses, strict=True)):
        if not torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-9, atol=1e-12, equal_nan=True):
            found.append(f"step {i}: loss {b}, not {a}")
    for i, (one_grads, grads) in enumerate(zip(one.grads, staged.grads, strict=True)):
        for name, g in one_grads.items():
            h = grads[name]
            if (g is None) != (h is None):
                found.append(f"step {i}: the gradient of {name} is {_kind(h)}, not {_kind(g)}")
            elif g is not None and h is not None and not _same(g, h):
                found.append(f"step {i}: the gradient of {name} is off by {(g - h).abs().max():.1e}")
    found += [f"{n} is another parameter" for n, p in one.parameters.items() if not _same(p, staged.parameters[n])]
    found += [f"{n} is another buffer" for n, b in one.buffers.items() if not _same(b, staged.buffers[n])]
    return found


def _kind(g: Tensor | None) -> str:
    return "None" if g is None else "zero" if not g.any() else "a tensor"


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-7, atol=1e-9, equal_nan=True)
