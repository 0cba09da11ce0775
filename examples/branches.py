"""Two blocks at the same time, each tensor parallel on ranks of its own: ``block_a`` on ranks 0–1, ``block_b`` on 2–7.

Answers question 1 of the thread on two concurrent blocks, about its model ``Foo``, which is not edited. The tp axis is
divided: each block is cut over its own slice of it. What both take is forked to them and their results are joined, once
each; backward the other way round. The second plan divides the six ranks of ``block_b`` anew: 3 × data, 2 × tensors.
That both run at once is shown where a block ends: each rank waits there, in its own block, until all have come.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.draw.branches import branches
from meshwright.draw.console import console

A, B = "foo.block_a", "foo.block_b"
PLANS: dict[str, dict[str, Any]] = {
    "2 ranks | 6 ranks, tensor parallel each": {
        "mesh": {"tp": 8},
        "modules": {A: {"on": "tp[0:2]"}, B: {"on": "tp[2:8]"}},
    },
    "block_b 3 × data, 2 × tensor parallel": {
        "mesh": {"tp": 8},
        "modules": {A: {"on": "tp[0:2]"}, B: {"on": "tp[2:8]", "mesh": {"dp": 3, "tp": 2}}},
    },
}


class Foo(nn.Module):  # as asked
    def __init__(self) -> None:
        super().__init__()
        self.block_a = nn.Linear(256, 32)
        self.block_b = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x_a = self.block_a(x)
        x_b = self.block_b(x)
        return x_a + x_b


class Network(nn.Module):
    """Foo between others, so that a gradient comes back through its fork."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.foo, self.head = nn.Linear(16, 256), Foo(), nn.Linear(32, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(torch.tanh(self.foo(torch.tanh(self.stem(x))))), y)


def data() -> dict[str, Tensor]:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def descend(step: Callable[[], Tensor], parameters: Iterable[Tensor], steps: int = 4) -> list[float]:
    """The loss of each step of plain gradient descent."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.05), []
    for _ in range(steps):
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def train(plan: dict[str, Any], folder: str) -> tuple[list[float], list[str], dict[str, tuple[int, int]]]:
    """Runs on every rank: its losses, the blocks it ran in turn, and of each kind of collective its calls and bytes."""
    job = mw.parallelize(Network, plan, batch=data())
    ran: list[str] = []
    everyone = job.recipe.mesh.size
    store = dist.FileStore(f"{folder}/met", everyone)  # a model's own code may not call collectives

    def meet(name: str, output: Tensor) -> None:
        if not isinstance(output, mw.RemoteTensor):  # this rank ran it
            ran.append(name)
            if store.add(f"came {len(ran)}", 1) == everyone:
                store.set(f"all {len(ran)}", "")
            store.wait([f"all {len(ran)}"], timedelta(seconds=60))  # for the ranks that run the other block

    for name in (A, B):
        job.module.get_submodule(name).register_forward_hook(lambda m, i, output, name=name: meet(name, output))
    losses = descend(lambda: job.step(data()), job.parameters())
    return losses, ran, {kind: (n, job.ledger.bytes[kind]) for kind, n in job.ledger.calls.items()}


def main() -> None:
    torch.manual_seed(0)
    model = Network()
    expected = descend(lambda: backward(model(**data())), model.parameters())
    with mw.local_workers(8) as workers:
        for title, plan in PLANS.items():
            shards = mw.shard_map(mw.make_recipe(Network, plan, data()))
            console().print(f"\n[bold]{title}[/]", *branches(shards), sep="\n")
            print(f"bytes of parameters on rank 0, 1 …: {', '.join(map(str, shards.bytes_by_rank))}\n")
            with tempfile.TemporaryDirectory() as folder:
                found = workers.run(train, plan, folder)
            for rank, (losses, ran, moved) in enumerate(found):
                (block,) = set(ran)
                join, fork = (moved[kind][1] // len(losses) for kind in ("join", "fork"))
                print(f"rank {rank} runs {block}; a step: {join} bytes to the join, {fork} of gradients to the fork")
                assert all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True))
            print("losses", *(f"{x:.6f}" for x in found[0][0]), "  on one device", *(f"{x:.6f}" for x in expected))


if __name__ == "__main__":
    main()
