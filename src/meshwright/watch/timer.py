"""How long a rank waits for others, as far as that can be told from work.

A rank waits in collectives and receives. In those that move much, waiting and moving cannot be told apart; in those that
move a few bytes, nearly all of the time is waiting. So what is measured is:

    receives of a pipeline                       for values of the stage before, gradients of the stage after
    small all-reduces of a step                  label counts (where a late batch shows), loss, gradient norm, verdict

It is a lower bound: who is late may be waited for in an all-gather of FSDP's, or in a sum over tp, which are not measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CommunicationTimer:
    """Adds up the seconds that this rank waits. On a GPU, those that its stream waits: the host goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """What runs within is waiting for other ranks."""
        if self._device.type == "cuda":
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._pairs.append(pair)
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """The seconds since it was last asked. On a GPU, waits for what the stream has yet to do."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._pairs) / 1e3
            self._pairs = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds
