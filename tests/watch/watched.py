"""A rank of a small job under a watch, which does as it is told: ``python watched.py TROUBLE MESH TIMEOUT FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.runtime.groups import _set_timeout

TROUBLE, MESH, TIMEOUT, FOLDER = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
STEPS, BAD_STEP, BAD_RANK = 5, 3, 1
RANK = int(os.environ["RANK"])  # (a forward sees one process)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if TROUBLE == "sleep" and self.number == 3 and bad(step):
            time.sleep(600)
        return x + self.linear(x).tanh()


def network() -> nn.Module:
    return nn.Sequential(*(Block(i) for i in range(4)))


def bad(step: int) -> bool:
    return step == BAD_STEP and RANK == BAD_RANK


def meet_trouble(step: int) -> None:
    if not bad(step):
        return
    if TROUBLE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if TROUBLE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if TROUBLE == "other":
        dist.all_gather_object([None] * dist.get_world_size(), "lost")


step = 0
torch.manual_seed(0)  # the same rows on every rank
x = torch.randn(8, 8)
plan = {"mesh": MESH, "microbatches": 2 if "pp" in MESH else 1}
job = mw.parallelize(network, plan, batch=(x,), loss=lambda y: y.square().mean(), device="cpu")
optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
rows = 8 // job.recipe.mesh.data_size
job.groups = replace(job.groups, timeout=TIMEOUT / 2)  # as if given to ``parallelize``: less than the watch's
for group in (dist.group.WORLD, *job.groups.joined_groups):
    _set_timeout(group, TIMEOUT / 2)
with mw.Watch(job, TIMEOUT, folder=FOLDER):
    for step in range(1, STEPS + 1):
        loss = job.step((x[:rows],))
        meet_trouble(step)
        job.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.4)  # longer than it takes until a step is known to the other ranks
print(f"rank {job.rank} is done, loss {loss:.4f}")
dist.destroy_process_group()
