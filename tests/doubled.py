"""``Doubled``: a custom ``autograd.Function``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2
