"""``refused``: torch's functions that take one number of all gradients raise an error if a rank holds some of them alone.
``scaled_together``: a ``GradScaler``, which asks one question of all gradients, is answered for those of all ranks.

A model in parts has its parameters on several ranks: each stage of a pipeline and each branch holds its own.
``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` would take each rank's norm for that of the model, and
``torch.optim.LBFGS`` each rank's direction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import Finding, PlanError
from meshwright.spmd import patches


def refused(owner: object, gradients: Callable[[Any], Iterable[Tensor]]) -> None:
    """From here on, until ``owner`` has gone, those functions refuse its gradients.

    Args:
        owner: what knows the gradients of a job; it is not kept alive by this.
        gradients: those of an owner, as they are now.
    """
    alive = weakref.ref(owner)

    def check(what: str, tensors: Iterable[Tensor], fix: str) -> None:
        held = alive()
        own = set() if held is None else {id(gradient) for gradient in gradients(held)}
        if any(id(tensor) in own for tensor in tensors):
            raise PlanError([_finding(what, fix)], "these gradients")

    def norm(what: str, fix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def of(plain: Callable[..., Any]) -> Callable[..., Any]:
            def refusing(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                check(what, tensors, fix)
                return plain(tensors, *args, **kwargs)

            return refusing

        return of

    def flat(plain: Callable[..., Any]) -> Callable[..., Any]:
        def of(optimizer: Any) -> Any:
            own = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            check("torch.optim.LBFGS", own, "an optimizer that treats each parameter by itself, as torch.optim.AdamW")
            return plain(optimizer)

        return of

    stack = _entered(
        patches.CLIPPED_NORM.on(norm("torch.nn.utils.clip_grad_norm_", "job.clip_grad_norm_(max_norm)")),
        patches.TOTAL_NORM.on(norm("torch.nn.utils.get_total_norm", "job.grad_norm()")),
        patches.FLAT_GRADIENT.on(flat),
    )
    weakref.finalize(owner, stack.close).atexit = False


def scaled_together(owner: object, parameters: Callable[[Any], Iterable[Tensor]], device: torch.device) -> None:
    """From here on, until ``owner`` has gone, a ``GradScaler`` of a job's optimizer leaves out a step on all ranks alike: one
    of them alone may hold the gradient that is not finite. ``unscale_``, or ``step``, is collective then.

    Args:
        parameters: those of an owner, of which each rank has some.
    """
    alive = weakref.ref(owner)

    def asked(plain: Callable[..., Any]) -> Callable[..., Any]:
        def of(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            found, held = plain(scaler, optimizer, *args, **kwargs), alive()
            own = set() if held is None else set(map(id, parameters(held)))
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return found
            here = [flag.to(device) for flag in found.values()]
            not_finite = torch.stack([torch.zeros((), device=device), *(flag.reshape(()) for flag in here)]).max()
            dist.all_reduce(not_finite, dist.ReduceOp.MAX)
            return {device: not_finite.reshape(1)}

        return of

    weakref.finalize(owner, _entered(patches.UNSCALED.on(asked)).close).atexit = False


def _entered(*contexts: Any) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def _finding(what: str, fix: str) -> Finding:
    return Finding(
        where=what,
        given="gradients of a model that stands in parts (pipeline stages, or branches), of which this rank holds some",
        required="all gradients of the model: it takes one number of them together",
        fix=fix,
    )


__all__ = ["refused", "scaled_together"]
