"""``PendingNumbers``: a few numbers that a device has yet to compute, and that the host reads later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PendingNumbers:
    """Numbers that a device copies to the host asynchronously. The host waits for them only in ``read``.

    Args:
        numbers: a tensor of one dim.
    """

    _sent: Any
    """The device event after which the host has the numbers; None if they were on the host from the start."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.detach()
        self._sent = None
        if numbers.device.type != "cpu":
            host = torch.empty(
                numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=torch.accelerator.is_available()
            )
            self._numbers = host.copy_(self._numbers, non_blocking=True)
            self._sent = torch.get_device_module(numbers.device).Event()
            self._sent.record()

    def read(self) -> list[float]:
        """The numbers. The host waits until the device has computed and copied them, but for no later work of the device."""
        if self._sent is not None:
            self._sent.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
