"""Is my own script right? An FSDP script records a step on one process and on two; the two recordings are compared.

    python examples/record.py runs/one
    torchrun --standalone --nproc-per-node 2 examples/record.py runs/two
    meshwright compare runs/one runs/two

There is no plan and no job here: three lines are ours, and marked. With ``--wrong`` the script divides its loss by the number
of ranks, as if FSDP did not take the mean of gradients on its own:

    torchrun --standalone --nproc-per-node 2 examples/record.py runs/wrong --wrong
    meshwright compare runs/one runs/wrong
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshwright as mw  # ours: 1


class Decoder(nn.Module):
    """Two blocks between an embedding and a head; it returns its loss."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def train(path: str | os.PathLike[str], wrong: bool = False) -> None:
    """A step on this rank's rows of a batch of 8; on all of them, if there is one process."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    torch.manual_seed(0)  # the same weights on every rank
    model = Decoder()
    if size > 1:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(1)).chunk(size)[rank]

    with mw.record(model, path, optimizer=optimizer) as rec:  # ours: 2
        for _ in range(3):  # the first step is recorded
            loss = model(rows)
            (loss / size if wrong else loss).backward()
            rec.loss(loss, batch=rows)  # ours: 3
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """As a person starts it: alone, or under torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--wrong", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(given.path, given.wrong)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
