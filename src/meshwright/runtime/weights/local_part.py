"""What a rank holds of a parameter, to be computed with, and how its gradient becomes the parameter's.

parameter at rest (a DTensor)  ──local_part──►  a leaf of autograd that shares its memory
          .grad, a DTensor     ◄──HandOver────  .grad of the leaf, once a backward has added to it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.private import held_of, hooked, without_modes, wrapping
from meshwright.runtime.weights.parameters import like, local_tensor
from meshwright.spmd.comm import locally

Take = Callable[[Tensor], None]


class HandOver:
    """Gives parameters the gradients that have come to their local parts.

    at once       as each comes: a hook of FSDP2's, or of a person's, that waits for a gradient finds the parameters'
    together      at the end of a backward: one loop, where each hook would find the caches full of the backward's own. Not
                  where the first parameter has a gradient already: that of each is added at once, so that no second set
                  of gradients takes memory
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Take, Tensor]] | None = None

    def hook(self, p: DTensor) -> Take:
        """What the local part of a parameter is to call when a backward has added to its gradient."""
        take = _taking(p)

        def arrived(local: Tensor) -> None:
            waiting = self._waiting
            if waiting:
                waiting.append((take, local))
                return
            with without_modes():  # in a backward the SPMD mode is on, and would look at every function
                if waiting is not None and p.grad is None:
                    waiting.append((take, local))
                else:
                    self._waiting = None
                    take(local)

        return arrived

    @contextmanager
    def together(self) -> Iterator[None]:
        """For the time of a backward that makes no graph of its own, nobody looks at the gradients of parameters."""
        self._waiting = waiting = list[tuple[Take, Tensor]]()
        try:
            yield
        finally:
            self._waiting = None
            with without_modes(), torch.no_grad():
                for take, local in waiting:
                    take(local)


def _taking(p: DTensor) -> Take:
    """What makes the gradient of a local part the parameter's, or adds it. Every gradient of every step passes here."""
    wrapped, dtype = wrapping(p), p.dtype

    def take(local: Tensor) -> None:
        g = local.grad
        if g is None:
            return  # a function took the parameter, and gave no gradient by it
        local.grad = None
        kind: Any = getattr(p, "grad_dtype", None)
        if kind is not None and kind != g.dtype:
            g = g.to(kind)  # as autograd does, where FSDP2 has a parameter add up in another type
        before: Any = p.grad
        if before is None:
            p.grad = like(p, g) if g.requires_grad or g.dtype != dtype else wrapped(g.contiguous())
        elif torch.is_grad_enabled():
            p.grad = like(p, local_tensor(before) + g)
        else:
            held_of(before).add_(g)

    return take


@locally
def local_part(p: DTensor, gradients: HandOver) -> Tensor:
    """What this rank holds of a parameter on the tp mesh, to be computed with: a leaf of autograd that shares its memory.

    Gradients add up there as for any parameter (one that others have too, of ``a + b`` both, is copied), and ``gradients``
    hands them to ``p`` as DTensors of its own shape and strides. Made once; a parameter with hooks of its own, which a leaf
    would go round, is part of the graph itself.
    """
    with torch.no_grad():
        local = p.to_local().detach()  # detached: the model may write to it and go on with it
    if not p.requires_grad:
        return local
    if hooked(p):
        return _LocalPart.apply(p)
    local.requires_grad_()
    local.register_post_accumulate_grad_hook(gradients.hook(p))
    return local


class _LocalPart(torch.autograd.Function):
    """A parameter's local tensor, as a function of the parameter."""

    @staticmethod
    def forward(ctx: Any, p: DTensor) -> Tensor:
        ctx.parameter = p
        ctx.set_materialize_grads(False)  # none stays none
        return p.to_local().detach()

    @staticmethod
    @locally
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None
        # Its own: autograd copies a gradient that others have too, but does not see through a DTensor that it is one.
        return like(ctx.parameter, g.clone(memory_format=torch.contiguous_format))


__all__ = ["HandOver", "local_part"]
