"""``mesh: auto`` in a run: a process that rank 0 starts searches for a plan, and all ranks use it.

    rank 0   a new process ── search ──► plan, notes ──┐
    rank 1   ········································· ├─ broadcast ─► all ranks
    ...                                                ┘

A search simulates ranks of other worlds, which a process that is itself a rank of a run cannot do.
"""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from meshwright.deferred import Build
from meshwright.errors import PlanError
from meshwright.hardware.devices import profile_here
from meshwright.hardware.profile import Profile
from meshwright.plan import Plan
from meshwright.runtime.rows.batch import mapped, plain
from meshwright.runtime.rows.loss import Loss
from meshwright.workers.pool import WorkerError, local_workers, report

Chosen: TypeAlias = tuple[Plan, tuple[str, ...]]
"""(a plan, notes on how it was found)"""


def agreed_plan(build: Build, plan: Plan, batch: Any, loss: Loss, device: torch.device, timeout: float) -> Chosen:
    """Searches for the plan of this run. Collective: every rank calls it alike.

    Args:
        plan: a plan with ``mesh: auto``.
        batch: the rows of one step of all ranks.
        timeout: seconds that the search may take without reporting progress.

    Raises:
        PlanError: on every rank: there is no profile of these devices, no plan fits, or settings are wrong.
        WorkerError: on every rank: the search failed.
    """
    answer: list[Chosen | Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = _searched_beside(build, plan, batch, loss, device, timeout)
        except PlanError as problem:
            answer[0] = problem
        except WorkerError as failure:
            answer[0] = failure.plan_error or failure
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    assert answer[0] is not None
    return answer[0]


def _searched_beside(build: Build, plan: Plan, batch: Any, loss: Loss, device: torch.device, timeout: float) -> Chosen:
    """Searches in a new process. Raises PlanError, or WorkerError if that process fails."""
    profile, ranks = profile_here(device.type), dist.get_world_size()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    nodes = ranks // local_ranks if device.type == "cuda" and ranks % local_ranks == 0 else None
    rows = mapped(lambda t: t.detach().cpu(), plain(batch))
    with local_workers(1, start_method="spawn") as workers:
        try:
            chosen: Chosen = workers.run(_search, build, plan, rows, loss, profile, ranks, nodes, timeout=timeout)[0]
        except TypeError as error:  # an argument cannot be pickled
            raise _not_sent(error) from None
    return chosen


def _search(
    build: Build, plan: Plan, batch: Any, loss: Loss, profile: Profile, ranks: int, nodes: int | None
) -> Chosen:
    """Runs in a process that is no rank of a run."""
    dist.destroy_process_group()
    from meshwright.search.choice import chosen_plan  # a run whose plan has a mesh needs no search

    return chosen_plan(build, batch, plan, devices=ranks, nodes=nodes, hardware=profile, loss=loss, tell=report)


def _not_sent(error: TypeError) -> PlanError:
    return PlanError.of(
        "this run",
        where="mesh",
        given=f"auto, and a model, loss or batch that {error}",
        required="a model, loss and batch that can be pickled, for the process that searches; or a mesh",
        fix="mw.parallelize(build, mw.find_plans(build, batch, devices=8).plans[0].plan, batch=batch)",
    )
