"""``Late``: a few numbers that a device has yet to compute, and the host reads when they are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Late:
    """Numbers on their way to the host. The device sends them when it comes to that; nothing waits until they are read.

    Args:
        numbers: of one dim.
    """

    _sent: Any
    """The event after which the host has them; None: it has."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._sent = numbers.detach(), None
        if numbers.device.type != "cpu":
            host = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=torch.accelerator.is_available()
            )
            self._numbers = host.copy_(self._numbers, non_blocking=True)
            self._sent = torch.get_device_module(numbers.device).Event()
            self._sent.record()

    def read(self) -> list[float]:
        """The numbers. The host waits until the device has come to them, and for nothing that the device does after."""
        if self._sent is not None:
            self._sent.synchronize()
        read: list[float] = self._numbers.tolist()
        return read
