"""``CommunicationTimer``: the time that a rank waits for other ranks, as far as it can be measured.

A rank waits in collectives and receives. In large ones, waiting and transfer cannot be separated. In small ones, nearly all of
the time is waiting. These are measured:

    receives of a pipeline           values of the previous stage, gradients of the next one
    small all-reduces of a step      label counts (which show a late batch), loss, gradient norm, step agreement

The result is a lower bound: ranks may also wait for a late one in an all-gather of FSDP or a sum over tp.

On a GPU, the host queues a collective and continues; the stream waits. Two events measure the time once the stream has passed
them. The host does not wait for that: work that is still queued is counted later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CommunicationTimer:
    """Adds up the seconds that this rank waits: those of its stream, and those of its host."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds = device, 0.0
        self._pairs: deque[tuple[Any, Any]] = deque()  # events before and after each wait that may not have ended

    @contextmanager
    def on(self, *, between_hosts: bool = False) -> Iterator[None]:
        """Counts its block as waiting for other ranks.

        Args:
            between_hosts: the communication is on the CPU, so the host's clock is used also on a GPU.
        """
        if between_hosts or self._device.type == "cpu":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        event_class = torch.get_device_module(self._device).Event
        before, after = event_class(enable_timing=True), event_class(enable_timing=True)
        before.record()
        yield
        after.record()
        self._pairs.append((before, after))
        self._add_ended()  # here too, so that events do not pile up if nobody calls take()

    def take(self) -> float:
        """Returns the seconds of all waits that have ended since the last call."""
        self._add_ended()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_ended(self) -> None:
        """Adds the waits that the stream has passed. They end in the order in which they were queued."""
        while self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
