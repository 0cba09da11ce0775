"""The job's side of a check, on every rank.

    make_job(build, dropout off, perturb ...) ─► steps × (forward, backward, clip to 1, SGD) ─► Facts, on rank 0

The steps are those of one device (one_device.py). Other ranks return their buffers that differ from rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.code_state import code_state_kept
from meshwright.parity.case import Case
from meshwright.parity.facts import Facts, copies_of, copy_of
from meshwright.parity.optimizer import MAX_NORM, LocalSGD
from meshwright.parity.preparation import PreparedBuild, starting_value
from meshwright.parity.widening import widened
from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.recipe import Recipe
from meshwright.runtime.checksum import digest
from meshwright.runtime.job import Job
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.workers.worker import report


@dataclass(frozen=True)
class Outcome:
    """The result of the job's side.

    Attributes:
        facts: the computed values.
        recipe: of the job.
        fallbacks: (count, text) of functions that ran whole in the first step, on rank 0.
        collectives: kind → (calls, bytes) in the first step, on rank 0.
        notes: of the job.
        buffers: rank → its buffers that differ from ``facts``.
    """

    facts: Facts
    recipe: Recipe
    fallbacks: tuple[tuple[int, str], ...]
    collectives: dict[str, tuple[int, int]]
    notes: tuple[str, ...]
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def distributed(case: Case, plan: Plan) -> Outcome | dict[str, Tensor]:
    """Runs the job's side on every rank. Rank 0 returns the outcome; others, their buffers that differ from rank 0's."""
    with code_state_kept(case.build):
        return _distributed(case, plan)


def _distributed(case: Case, plan: Plan) -> Outcome | dict[str, Tensor]:
    # Without the guard, which would raise at the first difference between replicas: a check compares all values itself.
    plan = plan.replace(verify=0, weights="drawn")
    job = make_job(
        PreparedBuild(case.build, case.training, case.dropout, case.dtype), plan, batch=case.batch, loss=case.loss,
        device=case.device,
        dtype=case.dtype if plan.precision == str(case.dtype).removeprefix("torch.") else None,
        transform=partial(starting_value, case.start),
    )  # fmt: skip
    mesh = job.recipe.mesh
    outcome = _train(job, case, case.batches(mesh.data_index(dist.get_rank()), mesh.data_size))
    differing = _differing_buffers(outcome.facts.buffers[-1], job)
    return outcome if dist.get_rank() == 0 else differing


def _differing_buffers(of_rank_0: dict[str, Tensor], job: Job) -> dict[str, Tensor]:
    """This rank's buffers that differ in any bit from those of rank 0. Collective.

    In a pipeline, only the ranks of the stage that changes a buffer have its value.

    Args:
        of_rank_0: the buffers; used on rank 0 alone.
    """
    digests = [{name: digest(buffer) for name, buffer in of_rank_0.items()}]
    dist.broadcast_object_list(digests, src=0)
    buffers = {name: b for name, b in job.module.named_buffers() if job.recipe.owns_buffer(name, job.rank)}
    return {name: copy_of(b) for name, b in buffers.items() if digest(b) != digests[0].get(name)}


def _train(job: Job, case: Case, batches: Iterator[Any]) -> Outcome:
    """Runs the steps of a case. The facts are complete on rank 0 alone, which whole values are gathered to."""
    optimizer = LocalSGD(job) if case.optimizer is None else case.optimizer(job.parameters())
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
                gradients = {line.name: None if g is None else copy_of(g) for line, g in job.full_gradients()}
                fallbacks = [(count, str(fallback)) for fallback, count in job.ledger.fallbacks.most_common()]
                collectives = {kind: (calls, job.ledger.bytes[kind]) for kind, calls in job.ledger.calls.items()}
        job.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        buffers.append(copies_of((name, value) for name, value in job.full_buffers() if value is not None))
    parameters = copies_of((line.name, full) for line, full in job.full_parameters() if full is not None)
    facts = Facts(tuple(losses), gradients, parameters, tuple(buffers))
    return Outcome(facts, job.recipe, tuple(fallbacks), collectives, job.notes)


def gradients_as_planned(job: Job) -> None:
    """Raises RuntimeError if a gradient has another shape than this rank's shard: then it was never reduced.

    Gathering such gradients would send more bytes than the other rank expects, which aborts the process.
    """
    for name, p in job.named_parameters():
        planned = job.recipe.held_shape(job.recipe.by_name[name], job.rank)
        if p.grad is not None and (shape := tuple(local_tensor(p.grad).shape)) != planned:
            raise RuntimeError(
                f"the gradient of {name} is {shape} on rank {job.rank}, which holds {planned} of it: "
                "it was not reduced over data ranks (FSDP2 finds the end of backward from the tensors in the "
                "model's output; an output of a class that torch's pytree does not know hides them)"
            )
