"""The reference of a check: plain PyTorch on one device.

    build ─ dropout off ─ cast ─ perturb ─► steps × (forward, backward, clip to 1, SGD) ─► Facts
                                            one step has two forwards and backwards

No code of this package runs in its forward or backward, except the function mode of ``widened``, which both sides run under.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.code_state import code_state_kept
from meshwright.generators import Generators, seed_all
from meshwright.parity.case import Case, cast
from meshwright.parity.facts import Facts, copies_of, copy_of
from meshwright.parity.optimizer import MAX_NORM, sgd
from meshwright.parity.preparation import disable_dropout, starting_value
from meshwright.parity.widening import widened
from meshwright.planning.passes.checks import refuse_lazy
from meshwright.private import TorchDispatchMode, replace_tensors
from meshwright.runtime.rows.microbatches import call_model
from meshwright.spmd.one_process import one_process
from meshwright.workers.worker import report

_BUILDS = 3  # of a model whose constructor may not repeat itself


@dataclass(frozen=True)
class Reference:
    """The result of the reference.

    Attributes:
        case: the case that ran: its type, mode or rows may differ from what was asked for.
        facts: the computed values.
        start: parameters before the first step.
        notes: differences from the case that was asked for, for a reader.
        draws: random functions of the forward, if their numbers change the loss although dropout is off.
    """

    case: Case
    facts: Facts
    start: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


@one_process()
def reference(case: Case, *, narrow: bool) -> Reference:
    """Runs the reference, in the first of several variants of the case that does not raise.

    The variants: the case; in float32, if ``narrow``; with dropout. Each of them is tried with permuted rows, then with the
    same rows in every forward. If all raise, the first exception is raised.
    """
    variants = [case]
    if narrow and case.dtype is not torch.float32:
        variants.append(replace(case, dtype=torch.float32))
    variants.append(replace(case, dropout=True))
    errors: list[Exception] = []
    for variant in variants:
        for tried in (variant, replace(variant, same=True)):
            try:
                one = _without_draws(tried)
            except Exception as error:
                errors.append(error)
            else:
                return replace(one, notes=(*_variant_notes(case, tried, errors), *one.notes))
    raise errors[0]


def _variant_notes(case: Case, tried: Case, errors: Sequence[Exception]) -> list[str]:
    """Notes on how ``tried`` differs from ``case``, with the first of the errors that were the reason."""
    why = f"({type(errors[0]).__name__}: {errors[0]})".split("\n", 1)[0] if errors else ""
    notes = []
    if tried.dtype is not case.dtype:
        notes.append(f"compared in float32: on one device the model raises in float64 {why}")
    if tried.dropout:
        notes.append(f"compared with dropout: on one device the model raises without {why}")
    if tried.same and not case.same:
        notes.append(f"compared on the same rows in every step: on one device the model raises on others {why}")
    return notes


def _without_draws(case: Case) -> Reference:
    """The reference; in eval mode, if random numbers change the loss in training mode.

    Dropout is off already. If random numbers change the loss in eval mode, too, or the model raises in it, the reference has
    a note, and the random functions in ``draws``.
    """
    one, draws = _one_device(case)
    if not draws or _loss_with_seed(case, 1) == _loss_with_seed(case, 2):
        return one
    notes = list(one.notes)
    if case.training:
        try:
            one, draws = _one_device(replace(case, training=False))
        except Exception as error:  # eval mode changes more than dropout: a router may have no clusters yet
            text = f"not compared in eval mode, in which the model raises on one device ({error})"
            notes.append(text.split("\n", 1)[0])
        else:
            notes = [*one.notes, "the model draws random numbers in its forward: compared in eval mode"]
    if draws and _loss_with_seed(one.case, 1) != _loss_with_seed(one.case, 2):
        notes.append(
            f"the model draws random numbers in its forward, in {'train' if one.case.training else 'eval'} mode too: both "
            "sides start from the same state of the generators, and data ranks that draw for their own rows differ all the same"
        )
        return replace(one, notes=tuple(notes), draws=_random_functions(one.case))
    return replace(one, notes=tuple(notes))


def repeated(case: Case) -> Reference:
    """The steps of a case that a reference has run, once more."""
    return _one_device(case)[0]


def _one_device(case: Case) -> tuple[Reference, bool]:
    """Runs the steps of a case. Returns the reference, and whether the forward used a random generator."""
    with code_state_kept(case.build):
        return _trained(case)


def _trained(case: Case) -> tuple[Reference, bool]:
    model, disabled = _model(case)
    batches = case.batches()
    start = copies_of(model.named_parameters())
    draws = False

    def step() -> Tensor:
        nonlocal draws
        before = random.digest()
        with widened(case.dtype):
            loss = case.loss(call_model(model, next(batches)))
            draws |= random.digest() != before
            if loss.requires_grad:
                loss.backward()
        return loss.detach()

    random = prepare_generators(case, model)
    facts = train(model, model, case, step)
    notes = (f"dropout is off on both sides: {disabled} places",) if disabled else ()
    return Reference(case, facts, start, notes), draws


def train(model: nn.Module, run: nn.Module, case: Case, step: Callable[[], Tensor]) -> Facts:
    """Trains for the steps of a case, and returns the computed values.

    Args:
        model: has the parameters to train.
        run: has the forward that ``step`` runs, and the buffers. It may be ``model``.
        step: runs one forward and backward, and returns the loss.
    """
    optimizer = (case.optimizer or sgd)(model.parameters())
    losses: list[float] = []
    gradients: dict[str, Tensor | None] = {}
    buffers = []
    for i in range(case.steps):
        for _ in range(case.forwards(i)):
            losses.append(step().item())
            report(i)  # shows the pool that this worker makes progress
            if len(losses) == 1:
                gradients = {n: None if p.grad is None else copy_of(p.grad) for n, p in model.named_parameters()}
        _make_dense(model)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        buffers.append(copies_of(run.named_buffers()))
    return Facts(tuple(losses), gradients, copies_of(model.named_parameters()), tuple(buffers))


def _make_dense(model: nn.Module) -> None:
    """Makes sparse gradients dense: torch cannot compute the norm of sparse ones."""
    for p in model.parameters():
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()


def prepare_generators(case: Case, model: nn.Module) -> Generators:
    """The generators of a model, where the first data rank of a job starts to draw. Nothing is seeded after that, as in
    training."""
    random = Generators(torch.device(case.device), model)
    random.start(case.seed, 0, 0)
    return random


def model_of(case: Case) -> nn.Module:
    """Builds the model of a case, ready to run on one device."""
    return _model(case)[0]


def _model(case: Case) -> tuple[nn.Module, int]:
    """Builds the model of a case. Returns it, and the number of dropout probabilities that were set to zero."""
    seed_all(case.seed)
    model = case.build()
    refuse_lazy(model)
    disabled = 0 if case.dropout else disable_dropout(model)
    replace_tensors(model, lambda t: cast(t, case.dtype, case.device))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(starting_value(case.start, name, p.cpu()))
    return model if case.training else model.eval(), disabled


@one_process()
def unrepeated(case: Case, start: Mapping[str, Tensor]) -> dict[str, float]:
    """Parameter → how far its starting value is from ``start`` when the model is built again. Only those that differ: a
    constructor may not repeat itself, as LAPACK rounds by where its tensors lie in memory."""
    found: dict[str, float] = {}
    for _ in range(_BUILDS):
        with code_state_kept(case.build):
            built = copies_of(model_of(case).named_parameters())
        for name, before in start.items():
            if name in built and not torch.equal(built[name], before):
                found[name] = max(found.get(name, 0.0), _distance(built[name], before))
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of any type; inf if their shapes differ."""
    return (a.to(torch.complex128) - b).abs().max().item() if a.shape == b.shape else inf


@torch.no_grad()
def _loss_with_seed(case: Case, seed: int) -> float:
    """The loss of a new model, with generators that start from ``seed``."""
    with code_state_kept(case.build):
        model, _ = _model(case)
        seed_all(seed)
        with widened(case.dtype):
            return float(case.loss(call_model(model, next(case.batches()))))


@torch.no_grad()
def _random_functions(case: Case) -> tuple[str, ...]:
    """Function and line of each use of a torch generator in a forward; if there is none, Python or NumPy draw."""
    with code_state_kept(case.build):
        model, _ = _model(case)
        with widened(case.dtype), _RandomFunctions() as random_functions:
            case.loss(call_model(model, next(case.batches())))
    return tuple(random_functions.lines) or ("random numbers of the host",)


class _RandomFunctions(TorchDispatchMode):
    """Collects the model's lines that draw from torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.lines[f"{func.overloadpacket.__name__}, {os.path.basename(model_line())}"] = None
        return func(*args, **(kwargs or {}))
