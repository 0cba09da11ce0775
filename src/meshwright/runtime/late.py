"""``Late``: a few numbers that a device has yet to compute; the host reads them once they have arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Late:
    """Numbers that are copied to the host asynchronously. Nothing waits for them until ``read``.

    Args:
        numbers: a tensor of one dim.
    """

    _sent: Any
    """The event of the device after which the host has the numbers; None if they were on the host already."""

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
        """The numbers. The host waits until the device has computed and sent them, and for no later work of the device."""
        if self._sent is not None:
            self._sent.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
