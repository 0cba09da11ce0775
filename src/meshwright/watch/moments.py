"""``Moments``: when things began and ended on this rank, on one clock for all ranks of a node.

    CPU           a moment is a number: seconds of the host's monotonic clock
    accelerator   a moment is an event of the current stream: nothing waits for it until it is read

The host's clock is the same in all processes of a node. Ranks of other nodes have their own: see ``runtime/observed.py``.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Moment = float | torch.Event


class Moments:
    """The clock of one rank.

    Args:
        device: whose stream is followed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: Any = None
        self._first_seconds = 0.0
        if device.type != "cpu":  # where the device's clock stands on the host's
            self._first = self._event()
            self._first.synchronize()
            self._first_seconds = time.perf_counter()

    def now(self) -> Moment:
        """This moment: on an accelerator, when its current stream comes to it."""
        return time.perf_counter() if self._first is None else self._event()

    def seconds(self, moment: Moment) -> float:
        """A moment in seconds of the host's clock. Waits until the device has come to it."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        elapsed: float = self._first.elapsed_time(moment)
        return self._first_seconds + elapsed / 1e3

    def _event(self) -> Any:
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event
