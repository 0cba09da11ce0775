"""What all ranks agree on at the end of a step, by one all-reduce of a few numbers, between hosts.

each rank   is my loss finite? my gradient norm? was I told to stop? how many tokens, how long, waited how long?
            how many bytes do I hold? each rank at a place of its own
all         the sums: whoever says no says it for all

Loss and norm are read at once, before the optimizer steps: the one time in a step that the host waits for its device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.job import Job
from meshwright.runtime.late import Late
from meshwright.runtime.weights.parameters import local_tensor


@dataclass(frozen=True)
class Verdict:
    """On a step, the same on every rank but for ``value`` and ``norm``.

    Attributes:
        value: the loss; ``norm``: of the gradient; as this rank has them.
        loss, gradient: whether it is not finite, on any rank.
        stop: whether any rank was told to stop.
        amount: tokens or rows of all ranks.
        waited: the share of the time that ranks waited for each other, in the mean over ranks (see ``waiting``).
        memories: bytes that each rank holds, in the steps that tell it; else empty.
    """

    value: float
    norm: float
    loss: bool
    gradient: bool
    stop: bool
    amount: float
    waited: float
    memories: tuple[int, ...] = ()


_MOST_MEMORIES = 256  # numbers that the all-reduce of a step carries for them in the mean over steps


def tells_memory(step: int, ranks: int) -> bool:
    """Whether a step tells the memory of all ranks: each step of up to 256 ranks, fewer the more ranks there are.

    >>> tells_memory(3, 8), tells_memory(3, 1024), tells_memory(4, 1024)
    (True, False, True)
    """
    return step % -(-ranks // _MOST_MEMORIES) == 0


def agree(
    job: Job, loss: Tensor, norm: Tensor, *, stop: bool, amount: float, seconds: float, memory: int | None = None
) -> Verdict:
    """Collective over all ranks.

    Args:
        amount: tokens or rows of this rank, of which its copies have the same.
        seconds: since this rank began the step.
        memory: bytes that this rank holds. None, on all ranks: this step does not tell it.
    """
    own_loss, own_norm = Late(torch.stack([loss.detach().double(), norm.detach().double()])).read()
    copies = job.recipe.mesh.size / job.recipe.mesh.data_size
    said = [not isfinite(own_loss), not isfinite(own_norm), stop, amount / copies, job.waiting.take(), seconds]
    held = [] if memory is None else [memory if rank == job.rank else 0 for rank in range(job.recipe.mesh.size)]
    sums = torch.tensor([float(x) for x in (*said, *held)], dtype=torch.float64, device="cpu")
    with job.waiting.on(between_hosts=True):  # counts in the next step
        job.groups.sum([sums])
    bad_loss, bad_gradient, stopping, amount, waited, elapsed, *memories = sums.tolist()
    return Verdict(
        own_loss, own_norm, bad_loss > 0, bad_gradient > 0, stopping > 0, amount, min(1.0, waited / elapsed),
        tuple(map(int, memories)),
    )  # fmt: skip


def culprit(job: Job, verdict: Verdict) -> str:
    """What is not finite, and where the first such gradient is, for a person. Collective."""
    if verdict.loss:
        return "the loss is not finite"
    mine = next(
        (
            name
            for name, p in job.named_parameters()
            if p.grad is not None and not local_tensor(p.grad).isfinite().all()
        ),
        None,
    )
    said: list[str | None] = [mine]
    if dist.get_world_size() > 1:
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine)
    ranks = [rank for rank, name in enumerate(said) if name is not None]
    where = f", first that of {said[ranks[0]]} on rank {ranks[0]}" if ranks else ", though each of its parts is"
    return f"the gradient is not finite{where}"
