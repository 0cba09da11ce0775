"""Clipping by the global norm of the gradients: local squares divided by the number of replicas, summed by one all-reduce.

    norm² = Σ over ranks, Σ over the rank's gradients:  |local gradient|² / copies        copies: ranks with the same part

As in torch's own clipping, one call computes the norms of all gradients of a dtype, and one call scales them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.private import norms_of, scale_all
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.parameters import CurrentParameters, local_tensor, own_gradient
from meshwright.runtime.weights.partial_gradients import refused
from meshwright.watch.timer import CommunicationTimer


class Clipping:
    """Computes the norm of a job's gradients over all ranks, and clips them.

    Args:
        waiting: measures how long this rank waits for others.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, waiting: CommunicationTimer) -> None:
        self._device, self._waiting = groups.device, waiting
        self._copies = {line.name: recipe.copies(line) for line in recipe.held_by(groups.rank)}
        self._current = CurrentParameters(model, self._copies)
        self._weights: dict[tuple[int, ...], Tensor] = {}  # numbers of copies → a tensor of them on the device
        if recipe.in_parts:
            refused(self, Clipping.gradients)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The 2-norm of all gradients, a float64 tensor without dims, equal on every rank. Collective over all ranks."""
        return self._norm(self._parts())

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

        Returns the norm before clipping. Every rank has the same norm and scales by the same factor, also if it is not finite.
        """
        parts = self._parts()
        norm = self._norm(parts)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype, members in parts.items():
            scale_all([part for part, _ in members], scale.to(dtype))
        return norm

    def gradients(self) -> list[Tensor]:
        """The gradients of the parameters that this rank holds."""
        grads = (self._current[name].grad for name in self._copies)
        return [grad for grad in grads if grad is not None]

    def _parts(self) -> dict[torch.dtype, list[tuple[Tensor, int]]]:
        """dtype → [(local gradient, number of ranks with the same part)]. Complex gradients are viewed as pairs of reals."""
        parts: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
        for name, copies in self._copies.items():
            grad = own_gradient(self._current[name])
            part = None if grad is None else local_tensor(grad)
            if part is not None and part.numel():
                part = torch.view_as_real(part) if part.is_complex() else part
                parts.setdefault(part.dtype, []).append((part, copies))
        return parts

    def _norm(self, parts: dict[torch.dtype, list[tuple[Tensor, int]]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for dtype, members in parts.items():
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch.stack(norms_of([part for part, _ in members], wide)).double()
            total += norms.square().div_(self._on_device(tuple(copies for _, copies in members))).sum()
        if dist.get_world_size() > 1:
            with self._waiting.on():
                dist.all_reduce(total)
        return total.sqrt()

    def _on_device(self, copies: tuple[int, ...]) -> Tensor:
        """Numbers of copies as a tensor on the device. Cached, as in most steps the same parameters have gradients."""
        if copies not in self._weights:
            host = torch.tensor(copies, dtype=torch.float64, device="cpu")
            self._weights = {copies: host.to(self._device, non_blocking=True)}
        return self._weights[copies]
