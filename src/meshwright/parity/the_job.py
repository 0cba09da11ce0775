"""The job's side of a check, on every rank.

    make_job(build, dropout off, perturb ...) ─► steps × (forward, backward, clip to 1, SGD) ─► Facts, on rank 0

The same steps as on one device (one_device.py); of the other ranks those buffers are told that differ from rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.parity.case import Case
from meshwright.parity.facts import Facts, copies_of, copy_of
from meshwright.parity.optimizer import MAX_NORM, LocalSGD
from meshwright.parity.quiet import Quiet, perturbed
from meshwright.parity.widened import widened
from meshwright.plan import Plan
from meshwright.planned import make_job
from meshwright.recipe import Recipe
from meshwright.runtime.checksum import digest
from meshwright.runtime.job import Job
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.workers.worker import report


@dataclass(frozen=True)
class Outcome:
    """The job's facts; its counts are rank 0's, of the first step."""

    facts: Facts
    recipe: Recipe
    fallbacks: tuple[tuple[int, str], ...]
    collectives: dict[str, tuple[int, int]]  # kind → calls, bytes
    notes: tuple[str, ...]
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # of other ranks, where they are not the facts'


def distributed(case: Case, plan: Plan) -> Outcome | dict[str, Tensor]:
    """The job's side, on every rank: rank 0 has the outcome, the others those of their buffers that differ from it."""
    # Every value of every rank is compared here, and told better than by the first error.
    plan = plan.replace(verify=0, weights="drawn")
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
    return {name: copy_of(b) for name, b in buffers.items() if digest(b) != digests[0].get(name)}


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
                gradients = {line.name: None if g is None else copy_of(g) for line, g in job.whole_gradients()}
                fallbacks = [(count, str(place)) for place, count in job.ledger.fallbacks.most_common()]
                collectives = {kind: (calls, job.ledger.bytes[kind]) for kind, calls in job.ledger.calls.items()}
        job.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        buffers.append(copies_of((name, value) for name, value in job.whole_buffers() if value is not None))
    parameters = copies_of((line.name, whole) for line, whole in job.whole_parameters() if whole is not None)
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
