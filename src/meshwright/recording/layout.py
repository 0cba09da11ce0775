"""``Layout``: the part of a parameter that this rank holds; and how to gather the whole.

DTensor            from its mesh and placements; the whole is ``full_tensor()``
of a Job           from its recipe, also for fused blocks and uneven shards
any other tensor   nothing is known but that this rank holds it: a replica (DDP), or a shard that a script cut itself
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.gather import gather_whole


class Layout(Protocol):
    """The layout of one parameter, seen from this rank.

    Attributes:
        shape: of the whole parameter, as far as this rank knows.
        slot: identifies this rank's part among the parts of one copy of the whole.
        copy: identifies that copy. All copies should have equal values.
        text: the layout, for a person.
        holds: whether this rank holds a part.
        gathers: whether ``whole`` is collective.
        axes: axis → (this rank's coordinate, size).
        writer: the one rank on which ``whole`` returns the tensor; None if it does on every rank that holds a part.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def slot(self) -> Hashable: ...
    @property
    def copy(self) -> Hashable: ...
    @property
    def text(self) -> str: ...
    @property
    def holds(self) -> bool: ...
    @property
    def gathers(self) -> bool: ...
    @property
    def axes(self) -> dict[str, tuple[int, int]]: ...
    @property
    def writer(self) -> int | None: ...

    def full_tensor(self, local: Tensor) -> Tensor | None:
        """The full tensor, from this rank's part. Collective over the ranks that hold parts, if ``gathers``."""


@dataclass(frozen=True)
class Plain:
    """The layout of a plain tensor: nothing is known about other ranks."""

    shape: tuple[int, ...]
    rank: int
    text: str = ""
    holds: bool = True
    gathers: bool = False
    writer: int | None = None
    slot: Hashable = ()

    @property
    def copy(self) -> Hashable:
        return self.rank

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        return {}

    def full_tensor(self, local: Tensor) -> Tensor:
        return local


@dataclass(frozen=True)
class OfDTensor:
    """The layout of a DTensor: a mesh, with a placement for each of its axes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    gathers: bool = True
    writer: int | None = None

    @property
    def holds(self) -> bool:
        return self.mesh.get_coordinate() is not None

    @property
    def slot(self) -> Hashable:
        return tuple(c for c, p in zip(self._coordinate, self.placements, strict=True) if not p.is_replicate())

    @property
    def copy(self) -> Hashable:
        ranks = tuple(self.mesh.mesh.flatten().tolist())
        return ranks, tuple(c for c, p in zip(self._coordinate, self.placements, strict=True) if p.is_replicate())

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        return dict(zip(axis_names(self.mesh), zip(self._coordinate, self.mesh.shape, strict=False), strict=False))

    @property
    def text(self) -> str:
        return ", ".join(f"{axis}: {_text(p)}" for axis, p in zip(axis_names(self.mesh), self.placements, strict=True))

    def full_tensor(self, local: Tensor) -> Tensor:
        on_device = local.to(self.mesh.device_type)
        dtensor = DTensor.from_local(
            on_device, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )
        return dtensor.full_tensor()

    @property
    def _coordinate(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ())


@dataclass(frozen=True)
class OfJob:
    """The layout of a job's parameter, from the recipe."""

    line: ParameterRecipe
    recipe: Recipe
    groups: Groups
    gathers: bool = True
    writer: int | None = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.line.shape

    @property
    def holds(self) -> bool:
        return self.recipe.holds(self.line, self.groups.rank)

    @property
    def slot(self) -> Hashable:
        return self.recipe.held(self.line, self.groups.rank)

    @property
    def copy(self) -> Hashable:
        return 0  # one copy: parts of different ranks may overlap, so they cannot be divided into copies

    @property
    def axes(self) -> dict[str, tuple[int, int]]:
        coordinate = self.recipe.mesh.coordinate(self.groups.rank)
        return {axis: (coordinate[axis], size) for axis, size in self.recipe.mesh.axes}

    @property
    def text(self) -> str:
        return ", ".join(f"{axis}: {layout}" for axis, layout in self.recipe.layouts(self.line).items())

    def full_tensor(self, local: Tensor) -> Tensor | None:
        return gather_whole(self.line, local.to(self.groups.device), self.recipe, self.groups)


def layout_of(t: Tensor) -> Layout:
    """The layout of a parameter or gradient."""
    if isinstance(t, DTensor):
        return OfDTensor(t.device_mesh, tuple(t.placements), tuple(t.shape), tuple(t.stride()))
    return Plain(tuple(t.shape), dist.get_rank() if dist.is_initialized() else 0)


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; if it has none, ``axis 0`` and so on."""
    return tuple(mesh.mesh_dim_names or (f"axis {i}" for i in range(mesh.ndim)))


def _text(placement: Placement) -> str:
    """A placement as the rest of this package writes it: ``Shard(0)``, ``Replicate``."""
    return repr(placement).replace("dim=", "").removesuffix("()")
