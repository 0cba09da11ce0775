"""What a run tells of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """One step, as it is told.

    Attributes:
        step: from 1 to ``steps``.
        loss: the mean over the global batch.
        grad_norm: of all gradients, before clipping.
        rate: ``unit`` (tokens or rows) of all ranks a second, of this step.
        memory: bytes this process holds after the backward; on a GPU, the most its tensors have held since that of the step
            before.
        waiting: the share of the step's time that ranks waited for each other, in the mean over ranks; at least (see
            ``waiting``).
        skipped: steps so far whose loss or gradient was not finite, and that left the parameters as they were.
        seconds: this step's, without saving.
        memories: the same of each rank, in the steps that tell it (every step of up to 256 ranks); else empty.
        compared: kind → how many of it were found equal on all ranks, in a step that compares them (``verify``).
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
