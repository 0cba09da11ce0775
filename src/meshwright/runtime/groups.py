"""Creates all process groups; no other module does.

Every rank creates the same meshes in the same order. There are at most two for each submesh, over all its ranks:

    sharded      (pp, dp_replicate, dp_shard, tp)         FSDP, HSDP
    replicated   (pp, dp_replicate·dp_shard, 1, tp)       modules that the plan replicates over the data axes

a group for each set of pipeline ranks whose stages share a parameter, along each line of the pp axis; and one for each set
of submeshes that share a parameter, of all their ranks in a stage.

A plan may give the axes of its mesh in any order; ranks have the coordinates that the plan says, dims have the order above.

Ranks also exchange numbers of the host (how many rows each has, whether their generators agree). These go over gloo: a
collective on the device would wait for all work that the device has queued.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import PlanError
from meshwright.layout import in_one_dim
from meshwright.mesh import Mesh
from meshwright.private import without_any_mode
from meshwright.recipe import Recipe
from meshwright.watch.rendezvous import launched_store

DIMS = ("pp", "dp_replicate", "dp_shard", "tp")
_TIMEOUT = 600.0  # seconds: torch's default for NCCL, here for every backend


@dataclass(frozen=True)
class Groups:
    """The meshes and process groups of a run.

    Attributes:
        mesh: the plan's mesh; ``rank``: this process's rank in it; ``device``: its device.
        meshes: submesh → the DeviceMesh of its ranks.
        replicated: submesh → the same with one data axis, if it has modules that the plan replicates.
        shared: pipeline ranks whose stages share a parameter → their group, along this rank's line of the pp axis.
        together: submeshes that share a parameter → the group of all their ranks in this rank's stage.
        joined_groups: the groups above that this rank is in.
        timeout: seconds that a collective waits for other ranks.
        hosts: axis → the group of its ranks for tensors of the host; "" → of all ranks.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    meshes: Mapping[int, DeviceMesh]
    replicated: Mapping[int, DeviceMesh]
    shared: Mapping[tuple[int, ...], dist.ProcessGroup]
    together: Mapping[tuple[int, ...], dist.ProcessGroup]
    joined_groups: tuple[dist.ProcessGroup, ...] = ()
    timeout: float = _TIMEOUT
    hosts: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def sharded(self) -> DeviceMesh:
        """The mesh of all ranks."""
        return self.meshes[0]

    def of(self, data: str, place: int = 0) -> DeviceMesh:
        """The mesh of an FSDP2 unit; ``data``: its kind of data parallelism; ``place``: its submesh."""
        return self.replicated[place] if data == "replicate" else self.meshes[place]

    @cached_property
    def files(self) -> dist.ProcessGroup:
        """The group of all ranks, over gloo, for checkpoints. It has no other use, as a checkpoint may be written in a
        thread while training goes on. Created at the first access, which every rank makes."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums tensors over all ranks, in place. Collective.

        Args:
            tensors: of one dtype. Those on the host go in one collective over gloo, those on the device in another there.
        """
        if dist.get_world_size() == 1:
            return
        for device in dict.fromkeys(t.device for t in tensors):
            on_device = [t for t in tensors if t.device == device]
            flat = torch.cat([t.reshape(-1) for t in on_device])
            dist.all_reduce(flat, group=self.hosts[""] if device.type == "cpu" else None)
            for t, total in zip(on_device, flat.split([t.numel() for t in on_device]), strict=True):
                t.copy_(total.view_as(t))

    def on_any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank. Collective over all ranks, on the host."""
        with without_any_mode():  # flags are not the model's, and have values in a rehearsal too
            maxima = torch.tensor(flags, dtype=torch.int32, device="cpu")
            if dist.get_world_size() > 1:
                dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.hosts[""])
            return [bool(flag) for flag in maxima.tolist()]

    def wait_longer(self, seconds: float) -> None:
        """Raises the timeout of all groups to at least ``seconds``. Collective."""
        if seconds > self.timeout and dist.get_world_size() > 1:
            for group in (dist.group.WORLD, self.files, *self.joined_groups):
                if group is not None:
                    _set_timeout(group, seconds)

    @cached_property
    def tp(self) -> dist.ProcessGroup:
        return self.sharded["tp"].get_group()

    @cached_property
    def pipeline(self) -> dist.ProcessGroup:
        return self.sharded["pp"].get_group()

    @property
    def pp_rank(self) -> int:
        return self.mesh.coordinate(self.rank).get("pp", 0)

    @property
    def tp_rank(self) -> int:
        return self.mesh.coordinate(self.rank).get("tp", 0)


def make_groups(recipe: Recipe, device: torch.device, timeout: float = _TIMEOUT) -> Groups:
    """Creates the process groups of a recipe. Collective; the world has as many ranks as the recipe's mesh.

    Args:
        timeout: seconds that a collective waits for other ranks.
    """
    places = recipe.places
    meshes, replicated = {}, {}
    for place in range(len(places)):
        placed = _ranks_by_coordinate(recipe, place)
        meshes[place] = DeviceMesh(device.type, placed, mesh_dim_names=DIMS)
        if any(u.data == "replicate" and u.place == place for u in recipe.units):
            pp, replicate, shard, tp = placed.shape
            flat = placed.reshape(pp, replicate * shard, 1, tp)
            replicated[place] = DeviceMesh(device.type, flat, mesh_dim_names=DIMS)
    shared, together = _stage_groups(recipe, _ranks_by_coordinate(recipe, 0)), _submesh_groups(recipe)
    of_meshes = [
        g for meshes_ in (meshes, replicated) for place, m in meshes_.items()
        if places.at(dist.get_rank(), place) is not None for g in m.get_all_groups()
    ]  # fmt: skip
    hosts = _hosts(meshes[0])
    own_hosts = [group for group in hosts.values() if group is not dist.group.WORLD]
    joined_groups = tuple(dict.fromkeys((*of_meshes, *shared.values(), *together.values(), *own_hosts)))
    for group in joined_groups:
        _set_timeout(group, timeout)
    return Groups(
        recipe.mesh, dist.get_rank(), device, meshes, replicated, shared, together, joined_groups, timeout, hosts
    )


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend of a group for tensors on a device (``gloo``, ``nccl``); empty if it has none. None: the group of all
    ranks."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backends = dict(entry.split(":") for entry in config.split(","))
    return str(backends.get(device.type, ""))


def _hosts(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """The groups for tensors of the host. If the default group has no backend for these (a person may have initialized it
    for the device alone), they are new ones, over gloo."""
    axes = [axis for axis in DIMS if mesh[axis].size() > 1]
    if backend_of(None, torch.device("cpu")):
        return {"": _world(), **{axis: mesh[axis].get_group() for axis in axes}}
    check_unbound(dist.get_backend_config(), getattr(_world(), "bound_device_id", None))
    hosts = {"": dist.new_group(backend="gloo")}
    for axis in axes:
        lines = mesh.mesh.movedim(DIMS.index(axis), -1).reshape(-1, mesh[axis].size()).tolist()
        hosts[axis], _ = dist.new_subgroups_by_enumeration(lines, backend="gloo")
    return hosts


def check_unbound(config: str, device: torch.device | None) -> None:
    """Checks that a default group without a backend for the host is not bound to a device: else, where only some ranks create a
    gloo group, torch makes the others wait in a split of the device's communicator.

    Raises:
        PlanError: it is bound.
    """
    if device is None:
        return
    raise PlanError.of(
        "this run",
        where="torch.distributed.init_process_group",
        given=f"{config}, with device_id",
        required="a backend for tensors of the host too",
        fix=f'init_process_group("cpu:gloo,{config}", device_id=...)',
    )


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _ranks_by_coordinate(recipe: Recipe, place: int) -> torch.Tensor:
    """The ranks of a submesh, in a tensor with the dims ``DIMS``."""
    places = recipe.places
    ranks = torch.zeros([places.axis_size(place, d) for d in DIMS], dtype=torch.int64)
    for rank in range(recipe.mesh.size):
        if (c := places.at(rank, place)) is not None:
            ranks[c.pp, c.dp_replicate, c.dp_shard, c.tp] = rank
    return ranks


def _submesh_groups(recipe: Recipe) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group for each set of submeshes that share a parameter. Every rank creates all groups."""
    groups, rank, places = {}, dist.get_rank(), recipe.places
    for chosen in sorted({p.places for p in recipe.parameters if len(p.places) > 1}):
        for stage in range(recipe.mesh.axis_size("pp")):
            coordinates = [[places.at(r, p) for p in chosen] for r in range(recipe.mesh.size)]
            ranks = [r for r, own in enumerate(coordinates) if any(c is not None and c.pp == stage for c in own)]
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[chosen] = group
    return groups


def _set_timeout(group: dist.ProcessGroup, timeout: float) -> None:
    """Sets the timeout of a group. A DeviceMesh creates its groups with torch's default (gloo: 30 minutes), and takes no
    other. A private function of torch, where this version has no public one."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=timeout), group)
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)


def _stage_groups(recipe: Recipe, placed: torch.Tensor) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group for each set of pipeline ranks that share a parameter. Every rank creates all groups."""
    groups, rank = {}, dist.get_rank()
    for owners in sorted({recipe.owners(line) for line in recipe.parameters} - {(r,) for r in range(placed.shape[0])}):
        for line in placed.reshape(placed.shape[0], -1).T.tolist():
            ranks = [line[r] for r in owners]
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[owners] = group
    return groups


def ensure_world(device: str | None, timeout: float) -> torch.device:
    """Initializes the default process group, if it is not yet: that of torchrun, or of one process without it.

    Tensors of the host go over gloo. The group is bound to the device, so that its communicator is created at once, and
    those of meshes are split from it.

    Args:
        device: ``cpu``, ``cuda`` or another accelerator; None: CUDA, if this machine has it.
        timeout: seconds that a collective waits for other ranks.

    Returns:
        The device of this process.

    Raises:
        PlanError: torchrun has started more processes on this machine than it has devices.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(kind)
    if kind != "cpu":
        devices = torch.get_device_module(kind).device_count()
        if not dist.is_initialized():
            check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), devices, kind)
        chosen = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) % max(1, devices))
        torch.get_device_module(kind).set_device(chosen)
    if not dist.is_initialized():
        _init_world(chosen, timedelta(seconds=timeout))
    return chosen


def _init_world(device: torch.device, timeout: timedelta) -> None:
    """Initializes the default group from torchrun's environment; without it, with one process."""
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    device_id = None if device.type == "cpu" else device
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    rank, ranks = 0, 1
    if "RANK" in os.environ:
        store = launched_store(timeout)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:  # torch finds its launcher's store itself
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks, device_id=device_id)


def check_devices(processes: int, devices: int, kind: str) -> None:
    """Checks that no two processes of this machine share a device, for which NCCL creates no communicator.

    Raises:
        PlanError: there are more processes than devices.
    """
    if processes <= devices:
        return
    raise PlanError.of(
        "this run",
        where="--nproc-per-node",
        given=f"{processes} processes on this machine, which has {devices} device{'s' * (devices != 1)} ({kind})",
        required="a device for each process",
        fix=f'--nproc-per-node {max(1, devices)}, and a mesh of as many ranks; or device="cpu"',
    )


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as bytes, which every backend can send (neither gloo nor NCCL sends 16-bit integers). Shares
    the memory of a contiguous tensor."""
    t = in_one_dim(t.detach().resolve_conj().resolve_neg())
    return t.view(torch.uint8) if t.numel() else t.new_empty(0, dtype=torch.uint8)
