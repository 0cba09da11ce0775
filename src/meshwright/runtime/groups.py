"""Process groups: the only place where they are born.

Every rank makes the same meshes in the same order. There are at most two for each place, over all its ranks:

    sharded      (pp, dp_replicate, dp_shard, tp)         FSDP, HSDP
    replicated   (pp, dp_replicate·dp_shard, 1, tp)       modules that the plan replicates over the data axes

a group for each set of pipeline ranks whose stages share a parameter, along each line of the pp axis; and one for each set
of places that share a parameter, of all ranks of them in a stage.

A mesh of the plan may give its axes in any order; the ranks stand as the plan says, the dims as above.

What ranks tell each other of themselves (how many rows each has, whether their generators agree) are numbers of the host. They
go between hosts, over gloo: a collective on the device would wait for all that the device has yet to do.
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


@dataclass(frozen=True)
class Groups:
    """The meshes of a run and this rank's place in them."""

    mesh: Mesh
    rank: int
    device: torch.device
    meshes: Mapping[int, DeviceMesh]  # place → its ranks
    replicated: Mapping[int, DeviceMesh]
    shared: Mapping[tuple[int, ...], dist.ProcessGroup]  # ranks of the pp axis → those of this line of it
    together: Mapping[tuple[int, ...], dist.ProcessGroup]  # places → all ranks of them in this stage
    made: tuple[dist.ProcessGroup, ...] = ()  # all of these that this rank is of
    timeout: float = 600.0  # seconds that a collective of any of them waits for other ranks
    # axis → its ranks, between hosts; "" → all ranks
    hosts: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def sharded(self) -> DeviceMesh:
        """All ranks."""
        return self.meshes[0]

    def of(self, data: str, place: int = 0) -> DeviceMesh:
        """The mesh that a unit of this kind of data parallelism lives on."""
        return self.replicated[place] if data == "replicate" else self.meshes[place]

    @cached_property
    def files(self) -> dist.ProcessGroup:
        """All ranks, over gloo: what is agreed on while checkpoints are written, also beside training, in a thread. Made when
        it is first asked for, which all ranks do alike."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums tensors over all ranks, in place: those of the host between hosts, those of the device there. Collective.

        They are all of one type; one collective moves all of the host, and one all of the device.
        """
        if dist.get_world_size() == 1:
            return
        for device in dict.fromkeys(t.device for t in tensors):
            those = [t for t in tensors if t.device == device]
            flat = torch.cat([t.reshape(-1) for t in those])
            dist.all_reduce(flat, group=self.hosts[""] if device.type == "cpu" else None)
            for t, total in zip(those, flat.split([t.numel() for t in those]), strict=True):
                t.copy_(total.view_as(t))

    def on_any(self, flags: Sequence[bool]) -> list[bool]:
        """Of each flag, whether it is set on any rank. Collective over all ranks, between hosts."""
        with without_any_mode():  # flags are no part of the model, and have values in a rehearsal too
            told = torch.tensor(flags, dtype=torch.int32, device="cpu")
            if dist.get_world_size() > 1:
                dist.all_reduce(told, dist.ReduceOp.MAX, group=self.hosts[""])
            return [bool(flag) for flag in told.tolist()]

    def wait_longer(self, seconds: float) -> None:
        """Collectives of all groups wait at least so long for other ranks. Collective."""
        if seconds > self.timeout and dist.get_world_size() > 1:
            for group in (dist.group.WORLD, self.files, *self.made):
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


def make_groups(recipe: Recipe, device: torch.device, timeout: float = 600.0) -> Groups:
    """The process groups of a recipe; collective over all ranks, of which there must be as many as the mesh has.

    ``timeout``: seconds that a collective of any of them waits for other ranks.
    """
    places = recipe.places
    meshes, replicated = {}, {}
    for place in range(len(places)):
        placed = _placed(recipe, place)
        meshes[place] = DeviceMesh(device.type, placed, mesh_dim_names=DIMS)
        if any(u.data == "replicate" and u.place == place for u in recipe.units):
            pp, replicate, shard, tp = placed.shape
            flat = placed.reshape(pp, replicate * shard, 1, tp)
            replicated[place] = DeviceMesh(device.type, flat, mesh_dim_names=DIMS)
    shared, together = _shared(recipe, _placed(recipe, 0)), _together(recipe)
    of_meshes = [
        g for meshes_ in (meshes, replicated) for place, m in meshes_.items()
        if places.at(dist.get_rank(), place) is not None for g in m.get_all_groups()
    ]  # fmt: skip
    hosts = _hosts(meshes[0])
    own_hosts = [group for group in hosts.values() if group is not dist.group.WORLD]
    made = tuple(dict.fromkeys((*of_meshes, *shared.values(), *together.values(), *own_hosts)))
    for group in made:
        _set_timeout(group, timeout)
    return Groups(recipe.mesh, dist.get_rank(), device, meshes, replicated, shared, together, made, timeout, hosts)


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that carries a group's tensors on a device: ``gloo``, ``nccl``; empty if none does. None: of all ranks."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backends = dict(entry.split(":") for entry in config.split(","))
    return str(backends.get(device.type, ""))


def _hosts(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Groups for what hosts tell each other. A person's own world may carry tensors of the device alone: then there are further
    ones, over gloo."""
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
    """Raises PlanError if a world that carries no tensors of the host is bound to a device: where groups of some ranks are made
    over another backend, torch has the other ranks wait in a split of the device's communicator."""
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


def _placed(recipe: Recipe, place: int) -> torch.Tensor:
    """The ranks of a place by their coordinates on ``DIMS``."""
    places = recipe.places
    ranks = torch.zeros([places.axis_size(place, d) for d in DIMS], dtype=torch.int64)
    for rank in range(recipe.mesh.size):
        if (at := places.at(rank, place)) is not None:
            ranks[at.pp, at.dp_replicate, at.dp_shard, at.tp] = rank
    return ranks


def _together(recipe: Recipe) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group for each set of places that hold the same parameter. Every rank makes all groups."""
    groups, rank, places = {}, dist.get_rank(), recipe.places
    for chosen in sorted({p.places for p in recipe.parameters if len(p.places) > 1}):
        for stage in range(recipe.mesh.axis_size("pp")):
            at = [[places.at(r, p) for p in chosen] for r in range(recipe.mesh.size)]
            ranks = [r for r, seen in enumerate(at) if any(c is not None and c.pp == stage for c in seen)]
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[chosen] = group
    return groups


def _set_timeout(group: dist.ProcessGroup, timeout: float) -> None:
    """A mesh makes its groups with torch's own timeout, 30 minutes for gloo, and takes no other. Private, where torch has no
    public function yet."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=timeout), group)
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)


def _shared(recipe: Recipe, placed: torch.Tensor) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group for each set of pipeline ranks that hold the same parameter. Every rank makes all groups."""
    groups, rank = {}, dist.get_rank()
    for owners in sorted({recipe.owners(line) for line in recipe.parameters} - {(r,) for r in range(placed.shape[0])}):
        for line in placed.reshape(placed.shape[0], -1).T.tolist():
            ranks = [line[r] for r in owners]
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[owners] = group
    return groups


def ensure_world(device: str | None, timeout: float) -> torch.device:
    """This process's device, with the default group up: torchrun's, or a world of one in a plain process.

    Tensors of the host go over gloo. The device is bound to the group: its communicator is made at once, and those of meshes
    are split off it.

    Args:
        device: ``cpu``, ``cuda`` or another accelerator; None: CUDA, if there is some.

    Raises:
        PlanError: torchrun has started more processes here than there are devices.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(kind)
    if kind != "cpu":
        devices = torch.get_device_module(kind).device_count()
        if not dist.is_initialized():
            check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), devices, kind)
        place = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)) % max(1, devices))
        torch.get_device_module(kind).set_device(place)
    if not dist.is_initialized():
        _init_world(place, timedelta(seconds=timeout))
    return place


def _init_world(place: torch.device, wait: timedelta) -> None:
    """The default group, as torchrun's environment says; of one process without it."""
    backend = "gloo"
    if place.type != "cpu":
        backend = f"cpu:gloo,{place.type}:{dist.get_default_backend_for_device(place)}"
    bound = None if place.type == "cpu" else place
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    rank, ranks = 0, 1
    if "RANK" in os.environ:
        store = launched_store(wait)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:  # torch finds the one of its launcher
        dist.init_process_group(backend, timeout=wait, device_id=bound)
    else:
        dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=ranks, device_id=bound)


def check_devices(processes: int, devices: int, kind: str) -> None:
    """Raises PlanError if several processes of this machine would share a device, of which NCCL makes no communicator."""
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
    """A tensor's elements as bytes, which every backend carries, whatever their type (16-bit integers: neither gloo nor NCCL
    does); a contiguous one's own memory."""
    t = in_one_dim(t.detach().resolve_conj().resolve_neg())
    return t.view(torch.uint8) if t.numel() else t.new_empty(0, dtype=torch.uint8)
