"""``parallelize``: a model and a plan → a job. With ``mesh: auto``, a search finds the plan first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.auto import agreed_plan
from meshwright.deferred import Build
from meshwright.plan import Plan, PlanLike
from meshwright.planned import make_job
from meshwright.runtime.apply import Transform
from meshwright.runtime.groups import ensure_world
from meshwright.runtime.job import Job
from meshwright.runtime.rows.loss import Loss, output_loss


def parallelize(
    build: Build,
    plan: PlanLike,
    *,
    batch: Any,
    loss: Loss | None = None,
    device: str | None = None,
    timeout: float = 600.0,
    dtype: torch.dtype | None = None,
    transform: Transform | None = None,
) -> Job:
    """Lays a model out over a mesh, ready to train. Collective: every rank calls it alike.

    Args:
        build: makes the model; called on every rank, under the plan's seed. The weights are those of
            ``torch.manual_seed(seed); build()`` in one process, in every layout, and no rank ever holds them all.
        plan: a ``Plan``, a dict, a mesh such as ``"dp_shard=2,tp=2"``, or the path of a YAML file. If it has several meshes,
            the first is used that has as many ranks as there are processes. With ``auto``, a process that rank 0 starts
            searches for the fastest plan, which takes as long as ``meshwright plan``; ``job.notes`` say which plan was
            chosen, and why.
        batch: a sample whose shapes and dtypes count: a dict or another mapping of keyword arguments, or a tuple. With
            ``auto``, it has the rows of one step of all ranks.
        loss: the loss of the model's output; default ``output.loss``.
        device: ``cpu`` or ``cuda``; default ``cuda`` if there is one.
        timeout: seconds that a collective waits for other ranks.
        dtype: parameters and buffers are cast to it after they are initialised (``torch.float64`` for checks).
        transform: (name of a parameter, its whole initial value) → another initial value.

    Raises:
        PlanError: with every problem of the plan, before anything starts.
    """
    plan, notes = Plan.parse(plan), tuple[str, ...]()
    this_device = ensure_world(device, timeout)
    plan = plan.at(dist.get_world_size())
    if plan.auto:
        chosen, notes = agreed_plan(build, plan, batch, loss or output_loss, this_device, timeout)
        plan = chosen.replace(weights=plan.weights)
    return make_job(
        build,
        plan,
        batch=batch,
        loss=loss,
        device=device,
        timeout=timeout,
        dtype=dtype,
        transform=transform,
        notes=notes,
    )
