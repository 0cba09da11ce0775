"""``Prediction``: what a step takes, in bytes and seconds, as data and as text; of a plan before it runs, or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.amounts import duration_text, size_text
from meshwright.hardware.profile import Estimate
from meshwright.prediction.exchanges import Exchanges
from meshwright.prediction.memory import Memory
from meshwright.prediction.play import Played
from meshwright.prediction.roles import Role
from meshwright.recipe import Recipe


@dataclass(frozen=True)
class StepSeconds(Estimate):
    """Seconds of a step, with their interval.

    Attributes:
        waterfall: the terms that make them up, of the rank that ends last: ``compute``, ``host``, the exposed communication
            of each axis, ``waiting for other stages``, ``clip``, ``optimizer``. Empty if they were measured.
    """

    waterfall: Mapping[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Prediction:
    """What a training step takes under a plan.

    Attributes:
        roles: ranks that do the same; ``memories``: of each, by its first rank.
        seconds: of a step.
        hardware: name of the profile; ``capacity``: bytes of a device, and ``taken``: of those, what a process takes besides
            its tensors.
        mesh: the plan's.
        source: ``predicted`` or ``measured``.
        notes: what a reader should know.
        recipe: of the plan; ``played``: the step in time.
        exchanges: the collectives of a step of each role, by its first rank; what no module asks for has the direction or
            phase in its place.
        ran_whole: (function, module, the model's line) of each function without a rule for its shards.
        per_node: devices of a node. These five are of a prediction alone.
    """

    roles: tuple[Role, ...]
    memories: Mapping[int, Memory]
    seconds: StepSeconds
    hardware: str
    mesh: str
    capacity: int = 0
    taken: int = 0
    source: str = "predicted"
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    played: Played | None = None
    exchanges: Mapping[int, tuple[Exchanges, ...]] = field(default_factory=dict)
    ran_whole: tuple[tuple[str, str, str], ...] = ()
    per_node: int = 0

    def memory(self, rank: int = 0) -> Memory:
        """What a rank needs. ``rank``: any of the mesh.

        Raises:
            KeyError: the mesh has no such rank.
        """
        return self.memories[next((role.rank for role in self.roles if rank in role.ranks), rank)]

    @property
    def peak(self) -> int:
        """Bytes that live at most on the rank that needs most."""
        return max(memory.peak for memory in self.memories.values())

    def device_bytes(self, rank: int = 0) -> tuple[int, int]:
        """Bytes that a device has to have for a rank: without what an allocator may hold besides, and with it."""
        memory = self.memory(rank)
        return memory.low + self.taken, memory.high + self.taken

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device, with what an allocator may hold besides."""
        return all(self.device_bytes(role.rank)[1] <= self.capacity for role in self.roles)

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
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
        """Signed errors of this one against another, relative to the other: of ``seconds``, and of the memory of each rank
        that is among the other's."""
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
    """What a rank needs at most, as plain values."""
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
    return sorted(memory.sites.items(), key=lambda item: -item[1])[:most]
