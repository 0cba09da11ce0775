"""``dry_run``: what one rank of a world of any size does in a step, by the run's own code, beside what ``predict`` says.

``predict`` rehearses the first rank of each role for all of them. A dry run rehearses any rank: that ranks of one role take the
same is what the comparison shows. Where the rank is the first of its role, both are one rehearsal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from meshwright.deferred import Build
from meshwright.hardware.profile import Profile
from meshwright.hardware.reader import read_profile
from meshwright.plan import Plan, PlanLike
from meshwright.prediction.allocations import CPU, GPU
from meshwright.prediction.clock import last_step
from meshwright.prediction.exchanges import Exchanges, exchanges_in, without_modules
from meshwright.prediction.memory import Memory, memory_of
from meshwright.prediction.predict import adamw_on
from meshwright.prediction.rehearsal import MakeOptimizer, rehearsal_of, rehearse
from meshwright.prediction.result import memory_json
from meshwright.prediction.roles import Role, roles_of
from meshwright.prediction.trace import Op, Trace
from meshwright.recipe import Recipe
from meshwright.runtime.rows.loss import Loss


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step.

    Attributes:
        rank: the rank; ``role``: the ranks that do as it does.
        memory: the most bytes that live at once, of this rank.
        predicted: the same, as ``predict`` says of the role.
        functions: functions of ATen that a step runs; ``flops``: their floating-point operations.
        exchanges: its collectives, by kind and axis.
        host_reads: (function, the model's line) of each value that it reads on the host, and that was assumed: see
            ``check_host_reads``.
        hardware, capacity, taken, mesh, notes: as of a ``Prediction``.
    """

    rank: int
    role: Role
    memory: Memory
    predicted: Memory
    functions: int
    flops: int
    exchanges: tuple[Exchanges, ...]
    host_reads: tuple[tuple[str, str], ...]
    hardware: str
    mesh: str
    capacity: int = 0
    taken: int = 0
    notes: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "source": "dry run",
            "mesh": self.mesh,
            "hardware": self.hardware,
            "rank": self.rank,
            "role": {"name": self.role.name, "first_rank": self.role.rank, "count": self.role.count},
            "memory": memory_json(self.memory),
            "predicted": memory_json(self.predicted),
            "functions": self.functions,
            "flops": self.flops,
            "collectives": [
                {"kind": e.kind, "axis": e.axis, "calls": round(e.calls), "bytes": round(e.nbytes)}
                for e in self.exchanges
            ],
            "host_reads": [{"function": function, "line": line} for function, line in self.host_reads],
            "capacity": self.capacity,
            "taken": self.taken,
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
) -> DryRun:
    """Rehearses a training step of one rank: its real code, without values and without other ranks. From a plain process.

    Args:
        rank: any of the plan's mesh.

    The other arguments are those of ``predict``. The hardware says what its backend and its optimizer allocate, and how much
    memory a device has.

    Raises:
        PlanError: every problem of the plan or the profile.
        ValueError: the mesh has no such rank.
    """
    profile = hardware if isinstance(hardware, Profile) else read_profile(hardware)
    plan = Plan.parse(plan)
    plan.mesh.coordinate(rank)  # raises for one that is not there
    rehearsal = rehearsal_of(build, batch, plan, loss, optimizer or adamw_on(profile), max_norm)
    recipe = rehearsal.recipe
    role = next(role for role in roles_of(recipe) if rank in role.ranks)
    trace = rehearse(rehearsal, rank)
    memory = _memory(trace, profile)
    predicted = memory if role.rank == rank else _memory(rehearse(rehearsal, role.rank), profile)
    ops = [event for _, events in last_step(trace) for event in events if isinstance(event, Op)]
    return DryRun(
        rank, role, memory, predicted, len(ops), sum(op.flops for op in ops), _exchanges(trace, recipe), trace.assumed,
        profile.name, str(recipe.mesh), capacity=profile.memory, taken=profile.context, notes=recipe.notes,
    )  # fmt: skip


def _memory(trace: Trace, profile: Profile) -> Memory:
    return memory_of(trace, CPU if profile.cores else GPU, profile.reserve)


def _exchanges(trace: Trace, recipe: Recipe) -> tuple[Exchanges, ...]:
    """The collectives of the last step, by kind and axis."""
    axis_of = cache(recipe.mesh.along)
    of_phases = (exchanges_in(events, axis_of) for _, events in last_step(trace))
    return tuple(sorted(without_modules(chain.from_iterable(of_phases)), key=lambda e: (e.kind, e.axis)))
