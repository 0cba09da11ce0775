"""One device's side of a check: plain PyTorch.

    build ─ dropout off ─ cast ─ perturb ─► steps × (forward, backward, clip to 1, SGD) ─► Facts
                                            one step has two forwards and backwards

Nothing of the package runs in its forward or backward, but for a mode that makes casts to float32 casts to float64, which
both sides run under and which computes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.generators import Generators, seed_all
from meshwright.parity.case import Case, cast
from meshwright.parity.facts import Facts, copies_of, copy_of
from meshwright.parity.optimizer import MAX_NORM, sgd
from meshwright.parity.quiet import perturbed, silence
from meshwright.parity.widened import widened
from meshwright.private import TorchDispatchMode, replace_tensors
from meshwright.runtime.rows.microbatches import called
from meshwright.spmd.one_process import one_process
from meshwright.workers.worker import report


@dataclass(frozen=True)
class Reference:
    """One device's facts, the case as it could be run (its type and mode), and what a reader should know of it."""

    case: Case
    facts: Facts
    start: dict[str, Tensor]  # parameters before the first step
    notes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()  # draws of its forward, if they matter though dropout is off and the mode is eval


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
    start = copies_of(model.named_parameters())
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
                gradients = {n: None if p.grad is None else copy_of(p.grad) for n, p in model.named_parameters()}
        _make_dense(model)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        buffers.append(copies_of(run.named_buffers()))
    return Facts(tuple(losses), gradients, copies_of(model.named_parameters()), tuple(buffers))


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
