"""Which rank holds what? Weights of 101, 102, … and what each of eight ranks has of them.

Answers the document on composing FSDP, TP and PP, whose author set weights to contiguous numbers to see how they are
sharded, and found the full tensor of FSDP × TP put together in the wrong order. Here:

    HSDP         2 × 4, 100 weights 101 … 200: replicated over 2, sharded over 4
    FSDP × tp    2 × 4, a matrix 12 × 12 of 101 … 244: cut by column (rows of the weight), then sharded
    uneven       3 × 2, 10 rows, which divide by neither

Every rank's numbers are the ones that the shard map says, and the whole comes back in the right order.
"""

from __future__ import annotations

from typing import Any

import torch
from rich import print as show
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.draw.terminal import render
from meshwright.draw.text import slices_text
from meshwright.recipe import take_slices

BATCH_ROWS = 8


class Toy(nn.Module):
    """The document's toy model: one layer without bias, of the numbers from 101 on."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.net1 = nn.Linear(columns, rows, bias=False)
        with torch.no_grad():
            self.net1.weight.copy_(torch.arange(101.0, 101 + rows * columns).view(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.net1(x)).square().mean()


class Vector(nn.Module):
    """The document's first try, whose weight has one dim."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(101.0, 101 + count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight).mean()


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "HSDP on 2 × 4": (Vector, (100,), {"mesh": {"dp_replicate": 2, "dp_shard": 4}}),
    "FSDP × tp on 2 × 4": (Toy, (12, 12), {"mesh": {"dp_shard": 2, "tp": 4}, "modules": {"net1": {"tp": "column"}}}),
    "10 rows over 3 × 2": (Toy, (10, 4), {"mesh": {"dp_shard": 3, "tp": 2}, "modules": {"net1": {"tp": "column"}}}),
}


def build(case: str) -> nn.Module:
    kind, sizes, _ = CASES[case]
    return kind(*sizes)


def held(case: str) -> tuple[mw.Recipe, str, Tensor, Tensor, dict[str, Tensor]]:
    """Runs on every rank: the recipe, the parameter, what this rank holds, and the whole in two ways."""
    _, sizes, plan = CASES[case]
    job = mw.parallelize(lambda: build(case), plan, batch={"x": torch.zeros(BATCH_ROWS, sizes[-1])})
    ((name, weight),) = job.named_parameters()
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        return job.recipe, name, weight.to_local().clone(), weight.full_tensor(), job.full_state_dict()


def main() -> None:
    with mw.local_workers(8) as workers:
        for case, (_, sizes, plan) in CASES.items():
            whole = torch.arange(101.0, 101 + torch.Size(sizes).numel()).view(sizes)
            found = workers.run(held, case, ranks=mw.Plan.parse(plan).mesh.size)
            recipe, name = found[0][:2]
            shards = mw.shard_map(recipe)
            show(f"\n[bold]{case}[/]", render(shards, parameter=name), sep="\n")
            for rank, (_, _, local, full, state) in enumerate(found):
                said = take_slices(whole, shards.slices(name, rank))
                assert torch.equal(local, said), (rank, local, said)
                assert torch.equal(full, whole), "full_tensor() in the wrong order"
                assert rank or torch.equal(state[name], whole), "full_state_dict() in the wrong order"
                span = f"{int(local.min())} … {int(local.max())}" if local.numel() else "no number"
                print(f"rank {rank} holds {slices_text(shards.slices(name, rank), sizes)}: {span}")
            print("every rank holds what the map says; the whole comes back in order")


if __name__ == "__main__":
    main()
