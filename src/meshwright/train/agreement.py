"""``agree``: at the end of a training step, all ranks learn the same facts, by one all-reduce of a few numbers on the CPU.

each rank   is its loss finite? its gradient norm? did it get SIGTERM? tokens, seconds, seconds of waiting; its memory, in an
            element of its own
all ranks   the sums: a flag of one rank is a flag on all

Loss and norm are read together, before the optimizer's step. Only here does the host wait for its device in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.job import Job
from meshwright.runtime.pending_numbers import PendingNumbers
from meshwright.runtime.weights.parameters import local_tensor


@dataclass(frozen=True)
class StepAgreement:
    """The facts of a step, equal on all ranks except for ``loss`` and ``norm``, which may differ by rounding.

    Attributes:
        loss: on this rank.
        norm: of the gradient, on this rank.
        bad_loss: whether the loss of any rank is not finite.
        bad_gradient: whether the gradient norm of any rank is not finite.
        stop: whether any rank got SIGTERM.
        amount: tokens or rows of all ranks.
        waited: share of the time in which ranks waited for each other, as a mean over ranks (see ``watch.timer``).
        memories: bytes that each rank holds, in steps that report them; else empty.
    """

    loss: float
    norm: float
    bad_loss: bool
    bad_gradient: bool
    stop: bool
    amount: float
    waited: float
    memories: tuple[int, ...] = ()


_MEMORIES_PER_STEP = 256  # as a mean over steps: these numbers, 2 KiB, hardly change the duration of the all-reduce


def reports_memory(step: int, ranks: int) -> bool:
    """Whether a step reports the memory of all ranks: every step for up to 256 ranks, every second for 512, and so on.

    >>> reports_memory(3, 8), reports_memory(3, 1024), reports_memory(4, 1024)
    (True, False, True)
    """
    return step % -(-ranks // _MEMORIES_PER_STEP) == 0


def agree(
    job: Job, loss: Tensor, norm: Tensor, *, stop: bool, amount: float, seconds: float, memory: int | None = None
) -> StepAgreement:
    """Collects the facts of a step from all ranks. Collective.

    Args:
        loss, norm: of this rank; scalars, on any device.
        stop: whether this rank got SIGTERM.
        amount: tokens or rows of this rank. Ranks of one data rank have the same rows, and each passes their number.
        seconds: since this rank began the step.
        memory: bytes that this rank holds. None, on all ranks: this step does not report memory.
    """
    local_loss, local_norm = PendingNumbers(torch.stack([loss.detach().double(), norm.detach().double()])).read()
    copies = job.recipe.mesh.size / job.recipe.mesh.data_size  # ranks with the same rows
    numbers = [not isfinite(local_loss), not isfinite(local_norm), stop, amount / copies, job.waiting.take(), seconds]
    if memory is not None:
        numbers += [memory if rank == job.rank else 0 for rank in range(job.recipe.mesh.size)]
    sums = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device="cpu")
    with job.waiting.on(between_hosts=True):  # this wait counts in the next step
        job.groups.sum([sums])
    bad_loss, bad_gradient, stopping, amount, waited, elapsed, *memories = sums.tolist()
    return StepAgreement(
        local_loss, local_norm, bad_loss > 0, bad_gradient > 0, stopping > 0, amount, min(1.0, waited / elapsed),
        tuple(map(int, memories)),
    )  # fmt: skip


def not_finite_text(job: Job, agreement: StepAgreement) -> str:
    """A sentence about the loss or gradient that is not finite, with the name of the first such gradient. Collective."""
    if agreement.bad_loss:
        return "the loss is not finite"
    first_name = None
    for name, p in job.named_parameters():
        if p.grad is not None and not local_tensor(p.grad).isfinite().all():
            first_name = name
            break
    names: list[str | None] = [first_name]
    if dist.get_world_size() > 1:
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, first_name)
    ranks = [rank for rank, name in enumerate(names) if name is not None]
    detail = f", first that of {names[ranks[0]]} on rank {ranks[0]}" if ranks else ", though each of its parts is"
    return f"the gradient is not finite{detail}"
