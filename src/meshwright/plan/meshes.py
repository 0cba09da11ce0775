"""The meshes that a plan may be laid over: one; several, in order of preference; or ``auto``.

mesh: {pp: 2, dp_shard: 2}                          one: as many processes are needed
mesh: [{pp: 2, dp_shard: 2}, {dp_shard: 2}]         4 processes: the first; 2: the second
mesh: auto                                          the fastest that a search finds for the processes that there are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from meshwright.errors import PlanError
from meshwright.mesh import Mesh, MeshLike

AUTO = "auto"

MeshesLike: TypeAlias = MeshLike | Sequence[MeshLike]


def in_order(read: Mesh | tuple[Mesh, ...] | str) -> tuple[Mesh, ...]:
    """What a reader gives of ``mesh``, as meshes in order; empty for ``auto``."""
    if isinstance(read, Mesh):
        return (read,)
    return () if isinstance(read, str) else read


def chosen(meshes: tuple[Mesh, ...], processes: int) -> Mesh:
    """The mesh for so many processes. Raises PlanError, with all meshes, where none has as many ranks.

    ``meshes``: none for ``auto``, which for one process is one device.
    """
    if not meshes:
        return Mesh((("dp_shard", processes),))
    for mesh in meshes:
        if mesh.size == processes:
            return mesh
    sizes = ", ".join(f"{mesh} ({mesh.size})" for mesh in meshes)
    raise PlanError.of(
        "this run",
        where="mesh",
        given=f"{processes} process{'es' * (processes > 1)}",
        required=f"as many processes as one of the plan's meshes has ranks: {sizes}",
        fix=f"mesh: [{', '.join(_flow(mesh) for mesh in meshes)}, {{dp_shard: {processes}}}]",
    )


def _flow(mesh: Mesh) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in mesh.axes) + "}"
