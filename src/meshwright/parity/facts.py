"""``Facts``: the values that one side of a check computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from meshwright.described import dense


@dataclass(frozen=True)
class Facts:
    """The values that one side computed.

    Tensors are whole and on the CPU, by the model's own names; a tied parameter has its first name.

    Attributes:
        losses: of every forward.
        gradients: of the first backward, before clipping. None: the parameter has no gradient.
        parameters: after the last step.
        buffers: after each step.
    """

    losses: tuple[float, ...]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: tuple[dict[str, Tensor], ...]


def copies_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Name → dense copy on the CPU."""
    return {name: copy_of(value) for name, value in named}


def copy_of(value: Tensor) -> Tensor:
    """A dense copy on the CPU."""
    return dense(value.detach()).cpu().clone()
