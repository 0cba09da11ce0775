"""Clipping by the global norm: over distinct values, each counted once, whatever mesh it lives on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.recipe import Recipe
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.watch.timer import CommunicationTimer


def grad_norm(model: nn.Module, recipe: Recipe, device: torch.device, waiting: CommunicationTimer) -> Tensor:
    """The 2-norm of all gradients. Each rank's squares, over the number of ranks that hold the same, in one sum."""
    named = dict(model.named_parameters(remove_duplicate=False))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for line in recipe.parameters:
        grad = named[line.name].grad
        if grad is not None:
            total += _square(local_tensor(grad).detach()) / recipe.copies(line)
    if dist.get_world_size() > 1:
        with waiting.on():
            dist.all_reduce(total)
    return total.sqrt()


def clip_grad_norm(
    model: nn.Module, recipe: Recipe, device: torch.device, max_norm: float, waiting: CommunicationTimer
) -> Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does.

    Returns the norm before. Every rank has the same norm, so all scale alike, also where it is not finite.
    """
    norm = grad_norm(model, recipe, device, waiting)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.grad is not None:
            local_tensor(p.grad).mul_(scale.to(p.grad.dtype))
    return norm


def _square(grad: Tensor) -> Tensor:
    """The sum of squares of what this rank holds; of complex numbers, of both parts."""
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(grad, dtype=wide).double() ** 2
