"""Clipping by the global norm: over distinct values, each counted once, whatever mesh it lives on.

    norm² = Σ over ranks, Σ over what a rank holds:  |part|² / copies        copies: ranks that hold the same part

All parts of a type go into one call of torch's for their norms and one that scales them, as in torch's own clipping.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.private import norms_of, scale_all
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.parameters import Standing, local_tensor
from meshwright.runtime.weights.partial_gradients import refused
from meshwright.watch.timer import CommunicationTimer


class Clipping:
    """The gradients of what this rank holds, as one vector of which other ranks hold other parts.

    Args:
        waiting: how long this rank waits for others.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, waiting: CommunicationTimer) -> None:
        self._device, self._waiting = groups.device, waiting
        self._copies = {line.name: recipe.copies(line) for line in recipe.held_by(groups.rank)}
        self._standing = Standing(model, self._copies)
        self._weights: dict[tuple[int, ...], Tensor] = {}  # copies of some parts → the same on the device
        if recipe.in_parts:
            refused(self, Clipping.gradients)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of all gradients, of float64, without dims; the same on every rank. Collective over all ranks."""
        return self._norm(self._parts())

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns the norm before. Every rank has the same norm, so all scale alike, also where it is not finite.
        """
        parts = self._parts()
        norm = self._norm(parts)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype, those in parts.items():
            scale_all([part for part, _ in those], scale.to(dtype))
        return norm

    def gradients(self) -> list[Tensor]:
        """The gradients of what this rank holds, as they stand on its parameters."""
        grads = (self._standing[name].grad for name in self._copies)
        return [grad for grad in grads if grad is not None]

    def _parts(self) -> dict[torch.dtype, list[tuple[Tensor, int]]]:
        """What this rank holds of gradients, with the number of ranks that hold the same, by type; of complex numbers, both
        parts of each."""
        parts: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
        for name, copies in self._copies.items():
            grad = self._standing[name].grad
            part = None if grad is None else local_tensor(grad)
            if part is not None and part.numel():
                part = torch.view_as_real(part) if part.is_complex() else part
                parts.setdefault(part.dtype, []).append((part, copies))
        return parts

    def _norm(self, parts: dict[torch.dtype, list[tuple[Tensor, int]]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for dtype, those in parts.items():
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch.stack(norms_of([part for part, _ in those], wide)).double()
            total += norms.square().div_(self._on_device(tuple(copies for _, copies in those))).sum()
        if dist.get_world_size() > 1:
            with self._waiting.on():
                dist.all_reduce(total)
        return total.sqrt()

    def _on_device(self, copies: tuple[int, ...]) -> Tensor:
        """Numbers of copies as a tensor, made once: the parameters that have gradients are the same in most steps."""
        if copies not in self._weights:
            host = torch.tensor(copies, dtype=torch.float64, device="cpu")
            self._weights = {copies: host.to(self._device, non_blocking=True)}
        return self._weights[copies]
