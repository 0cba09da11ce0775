"""Who is with whom? A mesh of 2 × 3 and one of 3 × 2, and the groups of ranks on each axis.

Answers "Understanding Device Mesh" of the document on composing FSDP, TP and PP: six ranks, first as two rows of three,
then as three rows of two. A mesh is a value: its picture needs no process. Then six local processes make the same
meshes with PyTorch's ``init_device_mesh``, and every rank finds itself in the group that the picture has.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshwright as mw

MESHES = ("dp_shard=2,tp=3", "dp_shard=3,tp=2")

Submeshes = dict[str, tuple[int, list[int]]]


def place(spec: str) -> Submeshes:
    """Runs on every rank: axis → (my place on it, the ranks that I share it with), as PyTorch has it."""
    mesh = mw.Mesh.parse(spec)
    devices = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    return {
        axis: (devices.get_local_rank(axis), dist.get_process_group_ranks(devices[axis].get_group()))
        for axis in mesh.names
    }


def main() -> None:
    with mw.local_workers(6) as workers:
        for spec in MESHES:
            mesh = mw.Mesh.parse(spec)
            print(mesh.picture(), end="\n\n")
            for rank, found in enumerate(workers.run(place, spec, ranks=mesh.size)):
                expected = {a: (mesh.coordinate(rank)[a], mesh.group_of(rank, a)) for a in mesh.names}
                assert found == expected, (rank, found, expected)
                told = "   ".join(f"{axis} {index} of {group}" for axis, (index, group) in found.items())
                print(f"rank {rank}:  {told}")
            print()


if __name__ == "__main__":
    main()
