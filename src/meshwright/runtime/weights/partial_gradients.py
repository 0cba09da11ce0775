"""``refused``: torch's functions that take one number of all gradients raise an error if a rank holds some of them alone.

A model in parts has its parameters on several ranks: each stage of a pipeline and each branch holds its own.
``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` would take each rank's norm for that of the model, and
``torch.optim.LBFGS`` each rank's direction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

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

    def norm(plain: Callable[..., Any]) -> Callable[..., Any]:
        def of(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            check("torch.nn.utils.clip_grad_norm_", tensors, "job.clip_grad_norm_(max_norm)")
            return plain(tensors, *args, **kwargs)

        return of

    def flat(plain: Callable[..., Any]) -> Callable[..., Any]:
        def of(optimizer: Any) -> Any:
            own = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            check("torch.optim.LBFGS", own, "an optimizer that treats each parameter by itself, as torch.optim.AdamW")
            return plain(optimizer)

        return of

    stack = ExitStack()
    stack.enter_context(patches.CLIPPED_NORM.on(norm))
    stack.enter_context(patches.FLAT_GRADIENT.on(flat))
    weakref.finalize(owner, stack.close).atexit = False


def _finding(what: str, fix: str) -> Finding:
    return Finding(
        where=what,
        given="gradients of a model that stands in parts (pipeline stages, or branches), of which this rank holds some",
        required="all gradients of the model: it takes one number of them together",
        fix=fix,
    )


__all__ = ["refused"]
