"""``Prediction``: bytes and seconds of a training step under a plan, predicted or measured, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.amounts import duration_text, size_text
from meshwright.hardware.profile import Estimate
from meshwright.prediction.exchanges import Exchanges
from meshwright.prediction.memory import Memory
from meshwright.prediction.play import PlayedStep
from meshwright.prediction.roles import Role
from meshwright.recipe import Recipe


@dataclass(frozen=True)
class StepSeconds(Estimate):
    """Seconds of a step, with their interval. ``float(seconds)`` is the mean.

    Attributes:
        waterfall: term → its seconds, on the rank that ends last. The terms are ``compute``, ``host``, the exposed
            communication over each axis, ``waiting for other stages``, ``clip``, ``optimizer``, ``shared cores`` and
            ``waiting for other ranks``; they add up to the seconds. Empty if the seconds were measured.
    """

    waterfall: Mapping[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Prediction:
    """The memory and seconds of a training step under a plan, predicted or measured.

    Attributes:
        roles: the roles of the ranks: ranks of one role do the same.
        memories: first rank of each role → its peak memory.
        seconds: seconds of a step.
        hardware: name of the profile.
        mesh: the plan's mesh.
        capacity: bytes of a device.
        context: of these, bytes that a process takes besides its tensors (of CUDA: its context).
        source: ``predicted`` or ``measured``.
        notes: remarks for the reader.
        recipe: the recipe of the plan.
        played: the step in time.
        exchanges: first rank of each role → the collectives of a step. If no module calls one, ``module`` is "forward",
            "backward" or the name of its phase.
        ran_whole: (function, module, line of the model) of each function without a rule for shards: its inputs are gathered.
        per_node: number of devices of a node.

    A measurement has no ``recipe``, nor any field after it.
    """

    roles: tuple[Role, ...]
    memories: Mapping[int, Memory]
    seconds: StepSeconds
    hardware: str
    mesh: str
    capacity: int = 0
    context: int = 0
    source: str = "predicted"
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    played: PlayedStep | None = None
    exchanges: Mapping[int, tuple[Exchanges, ...]] = field(default_factory=dict)
    ran_whole: tuple[tuple[str, str, str], ...] = ()
    per_node: int = 0

    def memory(self, rank: int = 0) -> Memory:
        """The peak memory of a rank. ``rank``: any rank of the mesh.

        Raises:
            KeyError: the mesh has no such rank.
        """
        return self.memories[next((role.rank for role in self.roles if rank in role.ranks), rank)]

    @property
    def peak(self) -> int:
        """Peak bytes of the rank with the highest peak."""
        return max(memory.peak for memory in self.memories.values())

    def device_bytes(self, rank: int = 0) -> tuple[int, int]:
        """(least, most) bytes of a device that a rank needs: without and with those that an allocator may hold in addition."""
        memory = self.memory(rank)
        return memory.low + self.context, memory.high + self.context

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device, including the bytes that an allocator may hold in addition."""
        return all(self.device_bytes(role.rank)[1] <= self.capacity for role in self.roles)

    def json(self) -> dict[str, Any]:
        """The prediction as plain values, for a JSON file."""
        return {
            "source": self.source,
            "mesh": self.mesh,
            "hardware": self.hardware,
            "seconds": {"mean": self.seconds.seconds, "low": self.seconds.low, "high": self.seconds.high},
            "waterfall": dict(self.seconds.waterfall),
            "memory": [
                {
                    "role": role.name,
                    "first_rank": role.rank,
                    "count": role.count,
                    "device_bytes": list(self.device_bytes(role.rank)),
                    **memory_json(self.memories[role.rank]),
                }
                for role in self.roles
            ],
            "capacity": self.capacity,
            "fits": self.fits,
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        from meshwright.draw.notebook import as_html  # drawing is loaded when something is drawn
        from meshwright.draw.prediction import drawn

        return as_html(drawn(self))

    def __sub__(self, other: Prediction) -> dict[str, float]:
        """Signed relative errors against another prediction or measurement: of its ``seconds``, and of the memory of its ranks.

        0.05 means that this prediction is 5 % larger than ``other``.
        """
        errors = {"seconds": self.seconds.seconds / other.seconds.seconds - 1}
        for rank in sorted(other.memories):
            errors[f"memory of rank {rank}"] = self.memory(rank).peak / other.memory(rank).peak - 1
        return errors

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.mesh} on {self.hardware}"]
        for role in self.roles:
            memory = self.memories[role.rank]
            lines.append(
                f"  {role.name} ({role.count} rank{'s' * (role.count > 1)}): {size_text(memory.peak)} at {memory.when}"
            )
            largest = sorted(memory.items.items(), key=lambda item: -item[1])
            lines += [f"      {size_text(nbytes):>10}  {kind}" for kind, nbytes in largest]
        low, high = self.seconds.low, self.seconds.high
        lines.append(f"  a step: {duration_text(self.seconds.seconds)} ({duration_text(low)} to {duration_text(high)})")
        lines += [f"      {duration_text(seconds):>10}  {term}" for term, seconds in self.seconds.waterfall.items()]
        return "\n".join(lines)


def memory_json(memory: Memory) -> dict[str, Any]:
    """The peak memory of a rank as plain values."""
    return {
        "peak": memory.peak,
        "when": memory.when,
        "items": dict(memory.items),
        "alive": [
            {"module": module, "line": line, "function": function, "bytes": nbytes}
            for (module, line, function), nbytes in _largest(memory)
        ],
    }


def _largest(memory: Memory, most: int = 10) -> list[tuple[tuple[str, str, str], int]]:
    """(site, bytes) of the sites with the most bytes."""
    return sorted(memory.sites.items(), key=lambda item: -item[1])[:most]
