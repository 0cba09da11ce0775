"""``Moments``: points in time on this rank, by one clock for all ranks of a node.

    CPU           a moment is a number: seconds of the host's monotonic clock
    accelerator   a moment is an event of the current stream; the host waits for it only when it is read

All processes of a node have the same host clock. For ranks of other nodes, see ``runtime/observed.py``.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Moment = float | torch.Event


class Moments:
    """The clock of one rank.

    Args:
        device: of this rank. On an accelerator, moments are those of its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: Any = None
        self._first_seconds = 0.0
        if device.type != "cpu":  # one moment on both clocks, to convert the device's into the host's
            self._first = self._event()
            self._first.synchronize()
            self._first_seconds = time.perf_counter()

    def now(self) -> Moment:
        """The current moment. On an accelerator, the moment when the current stream has done all that is queued now."""
        return time.perf_counter() if self._first is None else self._event()

    def seconds(self, moment: Moment) -> float:
        """A moment in seconds of the host's clock. Waits until the device has reached it."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        elapsed: float = self._first.elapsed_time(moment)
        return self._first_seconds + elapsed / 1e3

    def _event(self) -> Any:
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event
