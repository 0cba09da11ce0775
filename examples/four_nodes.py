"""Data and pipeline parallel over 4 nodes of 2 devices: which process groups, what is sent, how gradients come back.

Answers the question of the third document. The axes, outermost first, are ``pp=4`` and ``dp_shard=2``: node n has ranks
2n and 2n + 1, both of stage n, which share its parameters (FSDP) and divide the rows. Activations go to the rank of the next
node with the same rows; gradients come back the same way; parameter gradients are summed within a node alone.

    python examples/four_nodes.py             4 network namespaces × 2 processes, where this machine allows them; else here
    torchrun --nnodes 4 --nproc-per-node 2 --node-rank 0 --master-addr HOST examples/four_nodes.py     on 4 machines
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import hosts
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw

PLAN = {"mesh": {"pp": 4, "dp_shard": 2}, "microbatches": 4}


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Residual(nn.LayerNorm(64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(8)
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True).sin()


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss


def descend(parameters: Any, step: Callable[[], torch.Tensor], steps: int) -> list[float]:
    """The loss of each step of plain gradient descent."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(steps):
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(steps: int = 3) -> str:
    """Runs on every rank; on rank 0, what everyone has to tell."""
    batch = data()
    job = mw.parallelize(Network, PLAN, batch=batch)
    rows = slice(8 * (job.rank % 2), 8 * (job.rank % 2) + 8)
    losses = descend(job.parameters(), lambda: job.step((batch[0][rows], batch[1][rows])), steps)
    assert job.pipeline is not None
    mesh, rank = job.recipe.mesh, job.rank
    told = (
        f"rank {rank} on {os.uname().nodename}  stage {job.pipeline.stages[0]}  shares parameters with "
        f"{mesh.group_of(rank, 'dp_shard')}  pipeline {mesh.group_of(rank, 'pp')}\n"
        f"        {' '.join(str(a) for a, _, _ in job.pipeline.spans)}"
    )
    everyone: list[str] = [""] * mesh.size
    dist.all_gather_object(everyone, told)
    if rank != 0:
        return ""
    torch.manual_seed(0)
    model = Network()
    expected = descend(model.parameters(), lambda: backward(model(*batch)), steps)
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True))
    compared = [f"{name:14}" + "  ".join(f"{x:.6f}" for x in xs) for name, xs in
                (("losses", losses), ("on one device", expected))]  # fmt: skip
    return "\n".join([mesh.picture(), *everyone, *compared])


def main() -> int:
    if "RANK" in os.environ:  # under torchrun
        if told := train():
            print(told)
        dist.destroy_process_group()
        return 0
    if hosts.allowed() and "--here" not in sys.argv:
        return hosts.launch(4, 2, [__file__])
    with mw.local_workers(8) as workers:
        print(workers.run(train)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
