"""The meshes of a plan: one; several, in order of preference; or ``auto``.

mesh: {pp: 2, dp_shard: 2}                          one mesh: a run needs 4 processes
mesh: [{pp: 2, dp_shard: 2}, {dp_shard: 2}]         with 4 processes the first, with 2 the second
mesh: auto                                          the fastest that a search finds for the number of processes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from meshwright.errors import PlanError
from meshwright.mesh import Mesh, MeshLike

AUTO = "auto"

MeshesLike: TypeAlias = MeshLike | Sequence[MeshLike]


def in_order(value: Mesh | tuple[Mesh, ...] | str) -> tuple[Mesh, ...]:
    """The value of ``mesh``, as a reader returns it, as a tuple of meshes; empty for ``auto``."""
    if isinstance(value, Mesh):
        return (value,)
    return () if isinstance(value, str) else value


def chosen(meshes: tuple[Mesh, ...], processes: int) -> Mesh:
    """The first mesh that has as many ranks as there are processes.

    ``meshes``: empty for ``auto``; then the result is a ``dp_shard`` mesh of that size.

    Raises:
        PlanError: no mesh has that many ranks; the error lists all meshes.
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
