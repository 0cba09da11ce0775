"""``local_part``: a parameter's local tensor for a forward. ``HandOver``: makes its gradient the gradient of the parameter.

parameter (a DTensor)     ──local_part──►  an autograd leaf that shares its memory
     .grad, a DTensor     ◄──HandOver────  .grad of the leaf, after a backward has added to it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.private import hooked, raw_local, without_modes, wrapping
from meshwright.runtime.weights.parameters import dtensor_like, local_tensor
from meshwright.spmd.comm import without_function_modes

Take = Callable[[Tensor], None]
"""Moves the gradient of a local part to its parameter."""


class HandOver:
    """Moves gradients from local parts to their parameters, in one of two ways:

    at once     when each gradient is ready, so that hooks of FSDP2 or of a person that wait for it find it on the parameter
    together    in one loop at the end of a backward. It is faster: within a backward, each hook would run with cold caches.
                If the first parameter already has a gradient, all are added at once instead, so that no second set of
                gradients takes memory.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Take, Tensor]] | None = None

    def hook(self, p: DTensor) -> Take:
        """The hook for a parameter's local part, to be called after a backward has added to the part's gradient."""
        take = _taking(p)

        def arrived(local: Tensor) -> None:
            waiting = self._waiting
            if waiting:
                waiting.append((take, local))
                return
            with without_modes():  # the SPMD mode is on in a backward; it would handle every function here
                if waiting is not None and p.grad is None:
                    waiting.append((take, local))
                else:
                    self._waiting = None
                    take(local)

        return arrived

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for a backward without ``create_graph`` during which nobody reads gradients of parameters. Its end moves
        them."""
        self._waiting = waiting = list[tuple[Take, Tensor]]()
        try:
            yield
        finally:
            self._waiting = None
            with without_modes(), torch.no_grad():
                for take, local in waiting:
                    take(local)


def _taking(p: DTensor) -> Take:
    """A function that moves a local part's gradient to the parameter, or adds it. It runs for every gradient of every step."""
    wrapped, dtype = wrapping(p), p.dtype

    def take(local: Tensor) -> None:
        g = local.grad
        if g is None:
            return  # the backward of a function that used the parameter returned None for it
        local.grad = None
        kind: Any = getattr(p, "grad_dtype", None)
        if kind is not None and kind != g.dtype:
            g = g.to(kind)  # as autograd does, if FSDP2 accumulates a parameter's gradients in another dtype
        before: Any = p.grad
        if before is None:
            p.grad = dtensor_like(p, g) if g.requires_grad or g.dtype != dtype else wrapped(g.contiguous())
        elif torch.is_grad_enabled():
            p.grad = dtensor_like(p, local_tensor(before) + g)
        else:
            raw_local(before).add_(g)

    return take


@without_function_modes
def local_part(p: DTensor, gradients: HandOver) -> Tensor:
    """The local tensor of a parameter on the tp mesh, as an autograd leaf that shares its memory. Called once for a parameter.

    Gradients accumulate on the leaf as on any parameter, and ``gradients`` moves them to ``p`` as DTensors with the shape and
    strides of ``p``. If ``p`` has hooks, which a leaf would bypass, the result is a function of ``p`` in the autograd graph
    instead.
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


class LocalParts(Protocol):
    """Keeps the local parts of parameters."""

    def set_memory(self, p: DTensor, memory: Tensor) -> None:
        """Gives a parameter other memory, and all local parts that share it. ``memory``: a tensor like its local tensor."""


def note_parts(p: DTensor, parts: LocalParts) -> None:
    """Notes who keeps the local parts of a parameter, for ``set_memory``."""
    local: Any = raw_local(p)
    local._mw_parts = weakref.ref(parts)


def set_memory(p: Tensor, memory: Tensor) -> None:
    """Gives a parameter other memory, with the local parts that share it.

    Args:
        memory: a tensor like the local tensor of ``p``.
    """
    if not isinstance(p, DTensor):
        p.data = memory
    elif (noted := getattr(raw_local(p), "_mw_parts", None)) is not None and (parts := noted()) is not None:
        parts.set_memory(p, memory)
    else:
        raw_local(p).data = memory


class _LocalPart(torch.autograd.Function):
    """A parameter's local tensor, as a function of the parameter."""

    @staticmethod
    def forward(ctx: Any, p: DTensor) -> Tensor:
        ctx.parameter = p
        ctx.set_materialize_grads(False)  # a missing gradient stays None
        return p.to_local().detach()

    @staticmethod
    @without_function_modes
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None
        # A copy: autograd copies a gradient tensor that has other users, but cannot see such users of the tensor in a DTensor.
        return dtensor_like(ctx.parameter, g.clone(memory_format=torch.contiguous_format))


__all__ = ["HandOver", "LocalParts", "local_part", "note_parts", "set_memory"]
