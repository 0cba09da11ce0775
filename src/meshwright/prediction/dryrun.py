"""``dry_run``: rehearses a step of any rank with the run's own code, and compares its memory with the prediction.

``predict`` rehearses only the first rank of each role, and assumes that all ranks of a role need as much. A dry run rehearses
the rank that it is asked about, and so checks this. If this is the first rank of its role, both are the same rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch

from meshwright.deferred import Build
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan, PlanLike
from meshwright.prediction.allocations import CPU, GPU
from meshwright.prediction.clock import Clock, forward_flops, last_step
from meshwright.prediction.coupling import coupling_of
from meshwright.prediction.device_run import DeviceRun, run_on_device
from meshwright.prediction.exchanges import Exchanges, exchanges_in, without_modules
from meshwright.prediction.memory import Memory, memory_of
from meshwright.prediction.predict import adamw_on
from meshwright.prediction.rehearsal import MakeOptimizer, Rehearsal, rehearsal_of, rehearse
from meshwright.prediction.result import memory_json
from meshwright.prediction.roles import Role, roles_of
from meshwright.prediction.trace import Op, Trace
from meshwright.recipe import Recipe
from meshwright.runtime.rows.loss import Loss
from meshwright.runtime.weights.fsdp import holds_dtensors


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step, by its rehearsal.

    Attributes:
        rank: the rehearsed rank.
        role: its role: the ranks that do the same.
        memory: peak memory of this rank.
        predicted: peak memory that ``predict`` gives for the role.
        functions: number of ATen functions in a step.
        flops: their floating-point operations.
        exchanges: the collectives of a step, by kind and axis.
        seconds: of the step on the hardware, as predicted, without communication and waiting for other ranks.
        host_reads: (function, line of the model) of each read of a value on the host, which the rehearsal assumed. See
            ``check_host_reads``.
        on_device: what the step takes on a real device, if it was run on one.
        hardware, capacity, context, mesh, notes: see ``Prediction``.
    """

    rank: int
    role: Role
    memory: Memory
    predicted: Memory
    functions: int
    flops: int
    exchanges: tuple[Exchanges, ...]
    seconds: float
    host_reads: tuple[tuple[str, str], ...]
    hardware: str
    mesh: str
    on_device: DeviceRun | None = None
    capacity: int = 0
    context: int = 0
    notes: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """The dry run as plain values, for a JSON file."""
        return {
            "source": "dry run",
            "mesh": self.mesh,
            "hardware": self.hardware,
            "rank": self.rank,
            "role": {"name": self.role.name, "first_rank": self.role.rank, "count": self.role.count},
            "memory": memory_json(self.memory),
            "predicted": memory_json(self.predicted),
            "seconds": self.seconds,
            "functions": self.functions,
            "flops": self.flops,
            "collectives": [
                {"kind": e.kind, "axis": e.axis, "calls": round(e.calls), "bytes": round(e.nbytes)}
                for e in self.exchanges
            ],
            "host_reads": [{"function": function, "line": line} for function, line in self.host_reads],
            "on_device": None if self.on_device is None else self.on_device.json(),
            "capacity": self.capacity,
            "context": self.context,
            "notes": list(self.notes),
        }


def dry_run(
    build: Build,
    batch: Any,
    plan: PlanLike,
    rank: int,
    *,
    hardware: str | Profile = "h100",
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    max_norm: float | None = 1.0,
    device: str | torch.device | None = None,
) -> DryRun:
    """Rehearses a training step of one rank: the run's own code, without values and without other ranks.

    Call it in a plain process, not on a rank of a run.

    Args:
        rank: any rank of the plan's mesh.
        hardware: its profile says what the backend and the optimizer allocate, and how much memory a device has.
        device: runs the step on this device, too (``run_on_device``), unless it reads values on the host: without other ranks
            these are not the model's. None: on none.

    The other arguments are those of ``predict``.

    Raises:
        PlanError: every problem of the plan or the profile.
        ValueError: the mesh has no such rank.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    plan = Plan.parse(plan)
    plan.mesh.coordinate(rank)  # raises ValueError if the mesh has no such rank
    make_optimizer, accelerator = optimizer or adamw_on(profile), not profile.cores
    rehearsal = rehearsal_of(build, batch, plan, loss, make_optimizer, max_norm, accelerator=accelerator)
    rehearsal, trace = _rehearsed(build, rehearsal, rank)
    recipe = rehearsal.recipe
    role = next(role for role in roles_of(recipe) if rank in role.ranks)
    memory = _memory(trace, profile)
    predicted = memory if role.rank == rank else _memory(rehearse(rehearsal, role.rank), profile)
    on_device = None
    if device is not None and not trace.assumed:
        on_device = run_on_device(rehearsal, rank, torch.device(device))
    functions = [event for _, events in last_step(trace) for event in events if isinstance(event, Op)]
    return DryRun(
        rank=rank,
        role=role,
        memory=memory,
        predicted=predicted,
        functions=len(functions),
        flops=sum(op.flops for op in functions),
        exchanges=_exchanges(trace, recipe),
        seconds=_own_seconds(trace, recipe, profile),
        host_reads=trace.assumed,
        hardware=profile.name,
        mesh=str(recipe.mesh),
        on_device=on_device,
        capacity=profile.memory,
        context=profile.context,
        notes=recipe.notes,
    )


def _rehearsed(build: Build, rehearsal: Rehearsal, rank: int) -> tuple[Rehearsal, Trace]:
    """(the rehearsal, with all rows on every data rank if they are coupled; its trace)."""
    trace = rehearse(rehearsal, rank)
    ranks = rehearsal.recipe.mesh.size
    note = coupling_of(
        build,
        rehearsal,
        batch_statistics=trace.batch_statistics,
        flops=lambda: forward_flops(trace) * ranks / rehearsal.rows,
    )
    if note is None:
        return rehearsal, trace
    of_all_rows = rehearsal.with_all_rows(note)
    return of_all_rows, rehearse(of_all_rows, rank)


def _memory(trace: Trace, profile: Profile) -> Memory:
    """The peak memory of a trace on the hardware of a profile."""
    return memory_of(trace, CPU if profile.cores else GPU, profile.reserve)


def _own_seconds(trace: Trace, recipe: Recipe, profile: Profile) -> float:
    """The seconds of a step on the hardware of a profile, without communication and waiting for other ranks."""
    phases = Clock(profile, recipe.mesh, dtensors=holds_dtensors(recipe)).phases(trace)
    return sum(phase.spent.device.seconds + phase.spent.host.seconds for phase in phases)


def _exchanges(trace: Trace, recipe: Recipe) -> tuple[Exchanges, ...]:
    """The collectives of the last step, by kind and axis."""
    axis_of = cache(recipe.mesh.along)
    by_phase = (exchanges_in(events, axis_of) for _, events in last_step(trace))
    return tuple(sorted(without_modules(chain.from_iterable(by_phase)), key=lambda e: (e.kind, e.axis)))
