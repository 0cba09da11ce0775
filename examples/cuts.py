"""Column, row and pairwise cuts of an MLP; and one tensor moved from column to row to whole.

Answers the slides on two-dimensional parallelism with DistributedTensor ("Tensor Parallelism and user API", "DTensor
API"), where a style is named for each layer and a tensor is redistributed by hand. The slides count a weight's dims
as the layer's own sizes; here ``column`` cuts the output features and ``row`` the input features, whatever the layout
of the weight. Left out of the plan, the forward itself finds the pair.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshwright as mw
from meshwright.layout import even_shard
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis, Ledger

STYLES = {
    "column": {"up": {"tp": "column"}, "down": {"tp": "replicate"}},
    "row": {"up": {"tp": "replicate"}, "down": {"tp": "row"}},
    "pairwise": {"up": {"tp": "column"}, "down": {"tp": "row"}},
    "left to be found": {},
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def redistributed(rows: int, columns: int) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Runs on every rank: the local shapes along column → row → whole, and what moved; twice, to the same values."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole, rank = torch.arange(float(rows * columns)).view(rows, columns), mesh.get_local_rank()
    by_column, by_row = even_shard(1, columns, size), even_shard(0, rows, size)

    # PyTorch's DTensor, as on the slides: a layout is asked for, the collective follows
    mine, of_the_whole = by_column.take(whole, rank), {"shape": whole.shape, "stride": whole.stride()}
    theirs = DTensor.from_local(mine, mesh, [Shard(1)], **of_the_whole)  # shares may be uneven
    as_row = theirs.redistribute(mesh, [Shard(0)])
    dtensors = [theirs.to_local(), as_row.to_local(), as_row.redistribute(mesh, [Replicate()]).to_local()]

    # the moves of this library's view, each with its conjugate as backward
    axis = Axis("tp", size, rank, mesh.get_group(), ledger := Ledger())
    ours = [by_column.take(whole, rank)]
    ours.append(redistribute.all_to_all(ours[-1], axis, by_column, by_row))
    ours.append(redistribute.all_gather(ours[-1], axis, by_row))

    assert all(torch.equal(a, b) for a, b in zip(dtensors, ours, strict=True)) and torch.equal(ours[-1], whole)
    return [tuple(t.shape) for t in ours], dict(ledger.calls)


def main() -> None:
    batch = {"x": torch.randn(4, 8)}
    with mw.local_workers(2) as workers:
        for name, modules in STYLES.items():
            report = mw.check(MLP, batch, {"mesh": {"tp": 2}, "modules": modules}, workers=workers)
            assert report and report.recipe
            cuts = ", ".join(f"{p.name} {tuple(p.shape)} {p.tp}" for p in report.recipe if p.name.endswith("weight"))
            moved = ", ".join(f"{calls} {kind}" for kind, (calls, _) in report.collectives.items())
            print(f"{name}:\n  {cuts}\n  a step: {moved}; worst error against one device {report.worst[2]:.0e}")
        shapes, calls = workers.run(redistributed, 8, 18, ranks=2)[0]
    print(f"8 × 18, column → row → whole: {' → '.join(map(str, shapes))} by {' and '.join(calls)}, as DTensor has it")
    assert shapes == [(8, 9), (4, 18), (8, 18)]


if __name__ == "__main__":
    main()
