"""The two sides of a check, each run in worker processes: one device, and the job.

    one device   build ─ dropout off ─ cast ─ perturb ─┐
                                                       ├─ steps × (forward, backward, clip to 1, SGD) ─► Facts
                                                       │  one step has two forwards and backwards
    the job      make_job(build, dropout off, ...) ────┘

The reference is plain PyTorch. Nothing of the package runs in its forward or backward, but for a mode that makes casts
to float32 casts to float64, which both sides run under and which computes nothing.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.calls.hook import ModuleCalls
from meshwright.deferred import Build
from meshwright.generators import Generators, seed_all
from meshwright.parity.case import Case, cast
from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.private import TorchDispatchMode, replace_tensors
from meshwright.recipe import Recipe
from meshwright.runtime.checksum import digest
from meshwright.runtime.job import Job
from meshwright.runtime.rows.microbatches import called
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.one_process import one_process
from meshwright.workers.worker import report

MAX_NORM = 1.0  # what gradients are clipped to: below the norm of most, so that clipping has something to do
NOISE = 0.02
_CONFIGS = ("config", "cfg", "args", "hparams")


@dataclass(frozen=True)
class Facts:
    """What a side found: whole tensors on CPU, by the model's own names, tied ones by their first."""

    losses: tuple[float, ...]  # of every forward
    gradients: dict[str, Tensor | None]  # of the first backward, before clipping
    parameters: dict[str, Tensor]  # after the last step
    buffers: tuple[dict[str, Tensor], ...]  # after each step


@dataclass(frozen=True)
class Reference:
    """One device's facts, the case as it could be run (its type and mode), and what a reader should know of it."""

    case: Case
    facts: Facts
    start: dict[str, Tensor]  # parameters before the first step
    notes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()  # draws of its forward, if they matter though dropout is off and the mode is eval


@dataclass(frozen=True)
class Outcome:
    """The job's facts; its counts are rank 0's, of the first step."""

    facts: Facts
    recipe: Recipe
    fallbacks: tuple[tuple[int, str], ...]
    collectives: dict[str, tuple[int, int]]  # kind → calls, bytes
    notes: tuple[str, ...]
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # of other ranks, where they are not the facts'


# --- one device -----------------------------------------------------------------------------------------------------


@one_process()
def reference(case: Case, *, narrow: bool) -> Reference:
    """One device's side, as near to the case as it can be run there: in float32 where it raises in float64 and ``narrow``
    allows that, with its dropout where it raises without, on the same rows in every forward where it raises on others."""
    in_float32 = [replace(case, dtype=torch.float32)] if narrow and case.dtype is not torch.float32 else []
    errors: list[Exception] = []
    for tried in (
        c for near in (case, *in_float32, replace(case, dropout=True)) for c in (near, replace(near, same=True))
    ):
        try:
            one = _steady(tried)
        except Exception as error:
            errors.append(error)
            continue
        return replace(one, notes=(*_as_tried(case, tried, errors), *one.notes))
    raise errors[0]


def _as_tried(case: Case, tried: Case, errors: Sequence[Exception]) -> list[str]:
    why, *_ = (f"({type(e).__name__}: {e})".split("\n", 1)[0] for e in [*errors, ""])
    notes = []
    if tried.dtype is not case.dtype:
        notes.append(f"compared in float32: on one device the model raises in float64 {why}")
    if tried.dropout:
        notes.append(f"compared with dropout: on one device the model raises without {why}")
    if tried.same and not case.same:
        notes.append(f"compared on the same rows in every step: on one device the model raises on others {why}")
    return notes


def _steady(case: Case) -> Reference:
    """The reference; in eval mode where the model draws random numbers that matter, dropout being off, if it runs so."""
    one, draws = _one_device(case)
    if not draws or _probe(case, 1) == _probe(case, 2):
        return one
    notes = list(one.notes)
    try:
        in_eval, draws = _one_device(replace(case, training=False)) if case.training else (one, draws)
    except Exception as error:  # eval mode changes more than dropout: a router that has no clusters yet
        notes.append(f"not compared in eval mode, in which the model raises on one device ({error})".split("\n", 1)[0])
    else:
        if case.training:
            one, notes = (
                in_eval,
                [*in_eval.notes, "the model draws random numbers in its forward: compared in eval mode"],
            )
    if draws and _probe(one.case, 1) != _probe(one.case, 2):
        notes.append(
            f"the model draws random numbers in its forward, in {'train' if one.case.training else 'eval'} mode too: both "
            "sides start from the same state of the generators, and data ranks that draw for their own rows differ all the same"
        )
        return replace(one, notes=tuple(notes), draws=_drawn(one.case))
    return replace(one, notes=tuple(notes))


def _one_device(case: Case) -> tuple[Reference, bool]:
    """The reference, and whether its forward moved a generator of random numbers."""
    model, silenced = _model(case)
    batches = case.batches()
    start = _copies(model.named_parameters())
    draws = False

    def step() -> Tensor:
        nonlocal draws
        before = random.digest()
        with widened(case.dtype):
            loss = case.loss(called(model, next(batches)))
            draws |= random.digest() != before
            if loss.requires_grad:
                loss.backward()
        return loss.detach()

    random = starting(case, model)
    facts = trained(model, model, case, step)
    notes = (f"dropout is off on both sides: {silenced} places",) if silenced else ()
    return Reference(case, facts, start, notes), draws


def trained(model: nn.Module, run: nn.Module, case: Case, step: Callable[[], Tensor]) -> Facts:
    """What one device finds in the steps of a case.

    Args:
        model: whose parameters are trained; ``run``: whose forward is run, with the buffers.
        step: one forward and backward; gives the loss.
    """
    optimizer = sgd(model.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor | None] = {}
    buffers = []
    for i in range(case.steps):
        for _ in range(case.forwards(i)):
            losses.append(step().item())
            report(i)  # a sign of life
            if len(losses) == 1:
                gradients = {n: None if p.grad is None else _copy(p.grad) for n, p in model.named_parameters()}
        _make_dense(model)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        buffers.append(_copies(run.named_buffers()))
    return Facts(tuple(losses), gradients, _copies(model.named_parameters()), tuple(buffers))


def _make_dense(model: nn.Module) -> None:
    """Torch has no norm of sparse gradients."""
    for p in model.parameters():
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()


def starting(case: Case, model: nn.Module) -> Generators:
    """The generators of a model, where the first data rank of a job starts to draw. Nothing is seeded after that, as in
    training."""
    random = Generators(torch.device(case.device), model)
    random.start(case.seed, 0, 0)
    return random


def made(case: Case) -> nn.Module:
    """The model of a case, on one device."""
    return _model(case)[0]


def _model(case: Case) -> tuple[nn.Module, int]:
    seed_all(case.seed)
    model = case.build()
    silenced = 0 if case.dropout else silence(model)
    replace_tensors(model, lambda t: cast(t, case.dtype, case.device))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(perturbed(name, p.cpu()))
    return model if case.training else model.eval(), silenced


@torch.no_grad()
def _probe(case: Case, seed: int) -> float:
    """The loss of a fresh model under a state of the generators."""
    model, _ = _model(case)
    seed_all(seed)
    with widened(case.dtype):
        return float(case.loss(called(model, next(case.batches()))))


@torch.no_grad()
def _drawn(case: Case) -> tuple[str, ...]:
    """Each draw of a forward: function and line; or that Python or NumPy draw."""
    model, _ = _model(case)
    with widened(case.dtype), _Drawing() as drawing:
        case.loss(called(model, next(case.batches())))
    return tuple(drawing.found) or ("random numbers of the host",)


class _Drawing(TorchDispatchMode):
    """Notes the model's lines that draw from torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.found[f"{func.overloadpacket.__name__}, {os.path.basename(model_line())}"] = None
        return func(*args, **(kwargs or {}))


# --- the job --------------------------------------------------------------------------------------------------------


def distributed(case: Case, plan: Plan) -> Outcome | dict[str, Tensor]:
    """The job's side, on every rank: rank 0 has the outcome, the others those of their buffers that differ from it."""
    plan = plan.replace(
        verify=0, weights="drawn"
    )  # every value of every rank is compared here, and told better than by the first error
    job = make_job(
        Quiet(case.build, case.training, case.dropout, case.dtype), plan, batch=case.batch, loss=case.loss, device=case.device,
        dtype=case.dtype if plan.precision == str(case.dtype).removeprefix("torch.") else None, transform=perturbed,
    )  # fmt: skip
    mesh = job.recipe.mesh
    outcome = _trained(job, case, case.batches(mesh.data_index(dist.get_rank()), mesh.data_size))
    others = _unlike(outcome.facts.buffers[-1], job)
    return outcome if dist.get_rank() == 0 else others


def _unlike(told: dict[str, Tensor], job: Job) -> dict[str, Tensor]:
    """This rank's buffers that differ in any bit from those that rank 0 tells of. Collective.

    Of a pipeline's ranks, those that run the stage which changes a buffer.
    """
    digests = [{name: digest(b) for name, b in told.items()}]
    dist.broadcast_object_list(digests, src=0)
    buffers = {name: b for name, b in job.module.named_buffers() if job.recipe.owns_buffer(name, job.rank)}
    return {name: _copy(b) for name, b in buffers.items() if digest(b) != digests[0].get(name)}


def _trained(job: Job, case: Case, batches: Iterator[Any]) -> Outcome:
    optimizer = LocalSGD(job)
    losses: list[float] = []
    gradients: dict[str, Tensor | None] = {}
    fallbacks: list[tuple[int, str]] = []
    collectives: dict[str, tuple[int, int]] = {}
    buffers = []
    for step in range(case.steps):
        for _ in range(case.forwards(step)):
            with widened(case.dtype):
                losses.append(job.step(next(batches)).item())
            report(step)
            if len(losses) == 1:
                gradients_as_planned(job)
                gradients = {line.name: None if g is None else _copy(g) for line, g in job.whole_gradients()}
                fallbacks = [(count, str(place)) for place, count in job.ledger.fallbacks.most_common()]
                collectives = {kind: (calls, job.ledger.bytes[kind]) for kind, calls in job.ledger.calls.items()}
        job.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        buffers.append(_copies((name, value) for name, value in job.whole_buffers() if value is not None))
    parameters = _copies((line.name, whole) for line, whole in job.whole_parameters() if whole is not None)
    facts = Facts(tuple(losses), gradients, parameters, tuple(buffers))
    return Outcome(facts, job.recipe, tuple(fallbacks), collectives, job.notes)


def gradients_as_planned(job: Job) -> None:
    """Raises RuntimeError for a gradient that is not of the shape that this rank holds: it was never reduced.

    Putting whole gradients together would send more than the peer expects, which ends the process.
    """
    for name, p in job.named_parameters():
        planned = job.recipe.held_shape(job.recipe.by_name[name], job.rank)
        if p.grad is not None and (shape := tuple(local_tensor(p.grad).shape)) != planned:
            raise RuntimeError(
                f"the gradient of {name} is {shape} on rank {job.rank}, which holds {planned} of it: "
                "it was not reduced over data ranks (FSDP2 finds the end of backward from the tensors in the "
                "model's output; an output of a class that torch's pytree does not know hides them)"
            )


# --- both -----------------------------------------------------------------------------------------------------------


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Not Adam, which divides a gradient by its own size: where it is zero but for rounding, the update is noise."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


class LocalSGD:
    """The same over what this rank holds: the update of a slice is the slice of the update.

    Over three axes DTensor takes ten times as long as the update to find out, once for each function and shape, how it may
    be divided.
    """

    def __init__(self, job: Job) -> None:
        self._parameters = list(job.parameters())
        self._held = [local_tensor(p).detach() for p in self._parameters]
        self._optimizer = sgd(self._held)

    def step(self) -> None:
        """With the gradients that the job's parameters have."""
        for held, p in zip(self._held, self._parameters, strict=True):
            held.data = local_tensor(p).data  # a forward may have assigned another
            held.grad = None if p.grad is None else local_tensor(p.grad)
        self._optimizer.step()

    def zero_grad(self) -> None:
        """No parameter has a gradient."""
        for p in (*self._held, *self._parameters):
            p.grad = None


def perturbed(name: str, whole: Tensor) -> Tensor:
    """A parameter's value plus noise that follows from its name: fresh zeros and ones hide mistakes."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return whole
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if whole.is_complex() else torch.float64
    return whole + NOISE * torch.randn(whole.shape, generator=generator, dtype=wide).to(whole.dtype)


class Widening(FunctionMode):
    """Makes casts to float32 casts to float64. It computes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(_widened(a) for a in args)
        return func(*args, **{name: _widened(value) for name, value in kwargs.items()})


def _widened(x: Any) -> Any:
    if x is torch.float32:
        return torch.float64
    return "torch.DoubleTensor" if isinstance(x, str) and x == "torch.FloatTensor" else x


@contextmanager
def widened(dtype: torch.dtype) -> Iterator[None]:
    """In a check in float64: what a model casts to float32, or makes without saying a type, is float64.

    Such a cast rounds to 1e-7, at places that differ between one device and a cut, and would drown the comparison.
    Entered before the job's view, so that it sees the local work of the view's rules.
    """
    if dtype is not torch.float64:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Widening():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Quiet:
    """A build of the model as it is compared.

    Attributes:
        training: False: the model is in eval mode.
        dropout: whether it keeps its dropout.
        dtype: of the check. The forward is ``widened`` wherever it runs, in planning too: what does not fit into float32 there
            (``finfo(x.dtype).min``) would else keep it from being followed.
    """

    build: Build
    training: bool = True
    dropout: bool = False
    dtype: torch.dtype = torch.float32

    def __call__(self) -> nn.Module:
        model = self.build()
        if not self.dropout:
            silence(model)
        if self.dtype is torch.float64:
            ModuleCalls(model, within={"": partial(widened, self.dtype)})
        return model if self.training else model.eval()


def silence(model: nn.Module) -> int:
    """Sets every probability of dropout to zero: ``p`` of dropout modules, and numbers that are called some kind of
    drop on modules and on their configurations. Returns how many."""
    count = 0
    copies: dict[int, Any] = {}  # several modules share one configuration, and go on sharing it
    for module in model.modules():
        names = _drops(module) + ["p"] * ("Dropout" in type(module).__name__ and _is_on(getattr(module, "p", None)))
        for name in names:
            setattr(module, name, 0.0)
        count += len(names)
        for place in _CONFIGS:
            config = vars(module).get(place)
            if config is None or isinstance(config, (dict, list, tuple)) or not hasattr(config, "__dict__"):
                continue
            if id(config) not in copies and (names := _drops(config)):
                # A copy: the configuration may be a global of the model's file, which later runs read.
                copies[id(config)] = quiet = copy.copy(config)
                for name in names:
                    object.__setattr__(quiet, name, 0.0)  # frozen ones too
                count += len(names)
            if id(config) in copies:
                setattr(module, place, copies[id(config)])
    return count


def _drops(x: Any) -> list[str]:
    return [name for name, value in vars(x).items() if "drop" in name.lower() and _is_on(value)]


def _is_on(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _copy(value) for name, value in named}


def _copy(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.to_dense() if value.is_sparse else value).cpu().clone()
