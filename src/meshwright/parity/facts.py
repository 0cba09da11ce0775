"""``Facts``: what a side of a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Facts:
    """What a side found: whole tensors on CPU, by the model's own names, tied ones by their first."""

    losses: tuple[float, ...]  # of every forward
    gradients: dict[str, Tensor | None]  # of the first backward, before clipping
    parameters: dict[str, Tensor]  # after the last step
    buffers: tuple[dict[str, Tensor], ...]  # after each step


def copies_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: copy_of(value) for name, value in named}


def copy_of(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.to_dense() if value.is_sparse else value).cpu().clone()
