"""How long a rank waits for others, as far as that can be told from work.

A rank waits in collectives and receives. In those that move much, waiting and moving cannot be told apart; in those that
move a few bytes, nearly all of the time is waiting. So what is measured is:

    receives of a pipeline                       for values of the stage before, gradients of the stage after
    small all-reduces of a step                  label counts (where a late batch shows), loss, gradient norm, verdict

It is a lower bound: who is late may be waited for in an all-gather of FSDP's, or in a sum over tp, which are not measured.

On a GPU the host queues a collective and goes on; its stream waits. Two events tell for how long, once the stream has come past
them. No host waits for that: what the stream has yet to do counts later.
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
        self._pairs: deque[tuple[Any, Any]] = deque()  # events before and after, of which the stream may not be past

    @contextmanager
    def on(self, *, between_hosts: bool = False) -> Iterator[None]:
        """What runs within is waiting for other ranks; ``between_hosts``: the device takes no part in it."""
        if between_hosts or self._device.type == "cpu":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        make = torch.get_device_module(self._device).Event
        before, after = make(enable_timing=True), make(enable_timing=True)
        before.record()
        yield
        after.record()
        self._pairs.append((before, after))
        self._add_ended()  # whoever asks for the time, or never does: events do not pile up

    def take(self) -> float:
        """The seconds since it was last asked, of the waits that have ended."""
        self._add_ended()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_ended(self) -> None:
        """Adds the waits that the stream is past, which come in its order."""
        while self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
