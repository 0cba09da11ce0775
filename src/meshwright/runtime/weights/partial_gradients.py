"""``refused``: torch functions that compute one number from all gradients raise an error if a rank holds only some gradients.
``scaled_together``: a ``GradScaler`` skips a step if a gradient on any rank is not finite.

A model in parts has its parameters on several ranks: each stage of a pipeline and each branch has its own.
``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` would clip by each rank's own norm, and ``torch.optim.LBFGS`` would
use each rank's own direction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import Finding, PlanError
from meshwright.spmd import patches


def refused(owner: object, gradients: Callable[[Any], Iterable[Tensor]]) -> None:
    """Makes these functions refuse the gradients of ``owner``, as long as ``owner`` lives.

    Args:
        owner: an object of the job; this does not keep it alive.
        gradients: owner → its current gradients.
    """
    alive = weakref.ref(owner)

    def check(function: str, tensors: Iterable[Tensor], fix: str) -> None:
        job = alive()
        of_job = set() if job is None else {id(gradient) for gradient in gradients(job)}
        if any(id(tensor) in of_job for tensor in tensors):
            raise PlanError([_finding(function, fix)], "these gradients")

    def norm(function: str, fix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
            def refusing(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                check(function, tensors, fix)
                return plain(tensors, *args, **kwargs)

            return refusing

        return wrap

    def flat(plain: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(optimizer: Any) -> Any:
            grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            check("torch.optim.LBFGS", grads, "an optimizer that treats each parameter by itself, as torch.optim.AdamW")
            return plain(optimizer)

        return refusing

    contexts = (
        patches.CLIPPED_NORM.on(norm("torch.nn.utils.clip_grad_norm_", "job.clip_grad_norm_(max_norm)")),
        patches.TOTAL_NORM.on(norm("torch.nn.utils.get_total_norm", "job.grad_norm()")),
        patches.FLAT_GRADIENT.on(flat),
    )
    patches.lasting(owner, contexts)


def scaled_together(owner: object, parameters: Callable[[Any], Iterable[Tensor]], device: torch.device) -> None:
    """Makes a ``GradScaler`` skip a step of the job's optimizer on all ranks if a gradient on one rank is not finite, as
    long as ``owner`` lives. ``unscale_``, or ``step``, is then collective.

    Args:
        owner: an object of the job; this does not keep it alive.
        parameters: owner → its parameters on this rank.
        device: where the ranks exchange whether a gradient is not finite.
    """
    alive = weakref.ref(owner)

    def over_all_ranks(plain: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            flags, job = plain(scaler, optimizer, *args, **kwargs), alive()
            of_job = set() if job is None else set(map(id, parameters(job)))
            if not any(id(p) in of_job for group in optimizer.param_groups for p in group["params"]):
                return flags
            local_flags = [flag.to(device).reshape(()) for flag in flags.values()]
            not_finite = torch.stack([torch.zeros((), device=device), *local_flags]).max()
            dist.all_reduce(not_finite, dist.ReduceOp.MAX)
            return {device: not_finite.reshape(1)}

        return unscale

    patches.lasting(owner, [patches.UNSCALED.on(over_all_ranks)])


def _finding(function: str, fix: str) -> Finding:
    return Finding(
        where=function,
        given="gradients of a model in parts (pipeline stages, or branches), of which this rank holds some",
        required="all gradients of the model: it takes one number of them together",
        fix=fix,
    )


__all__ = ["refused", "scaled_together"]
