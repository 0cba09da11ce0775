"""``Progress``: the numbers that training reports after each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """The numbers of one step.

    Attributes:
        step: number of the step, from 1 to ``steps``.
        steps: total number of steps, including those before a resume.
        loss: mean over the global batch.
        grad_norm: global L2 norm of all gradients, before clipping.
        rate: tokens or rows per second, of all ranks together.
        unit: of ``rate``: ``tokens`` or ``rows``.
        memory: bytes that this process holds after the backward; on a GPU, the largest number of bytes in tensors since the
            previous step.
        waiting: share of the step's time in which ranks waited for each other, as a mean over ranks. A lower bound (see
            ``watch.timer``).
        skipped: number of steps so far whose loss or gradient was not finite, and which did not update the parameters.
        seconds: duration of the step, without saving a checkpoint.
        memories: ``memory`` of each rank, in steps that report it (every step if there are at most 256 ranks); else empty.
        compared: kind → number of values that were equal on all ranks, in a step that compares ranks (``verify``).
    """

    step: int
    steps: int
    loss: float
    grad_norm: float
    rate: float
    unit: str
    memory: int
    waiting: float
    skipped: int
    seconds: float
    memories: tuple[int, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)
