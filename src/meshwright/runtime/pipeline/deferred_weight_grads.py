"""A backward in two halves: gradients of activations now, those of weights later, as zero-bubble schedules want it.

While ``DeferredWeightGrads`` is on, a product with a parameter is a function whose backward gives the gradient of its input and
keeps, for later, what that of the weight is made from. Everything else goes through one plain backward; so whatever the
model does, the sum of both halves is the gradient. (Qi et al., arXiv 2401.10241, section 2. Torch's own split walks the
autograd graph instead, and where parts of it serve several weights, as encoder states do, it gave other gradients from run to
run; and it orders its parts by address, so that tensor-parallel ranks wait for each other.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.private import FakeTensor
from meshwright.spmd.autograd_functions import FunctionMode, transforming

_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_ADDMMS = (torch.addmm, Tensor.addmm)


class DeferredWeightGrads(FunctionMode):
    """For the forward and the first half of the backward of one microbatch in one stage.

    Entered outside the view, so that it meets what the view's rules do with local tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (A transform takes no custom Function of this kind.)
        if not kwargs and torch.is_grad_enabled() and not transforming():
            if func is functional.linear and _is_weight(args[1]):
                return self._product(args[0], args[1], args[2] if len(args) > 2 else None, turned=True)
            if func in _MATMULS and len(args) == 2 and _is_weight(args[1]):
                return self._product(args[0], args[1], None, turned=False)
            if func in _ADDMMS and len(args) == 3 and _is_weight(args[2]) and args[0].dim() == 1:
                return self._product(args[1], args[2], args[0], turned=False)
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool) -> Any:
        x, w, bias = (
            _under_autocast(x),
            _under_autocast(weight.detach()),
            None if bias is None else _under_autocast(bias),
        )
        return _Product.apply(x, _anchor(w), w, bias, weight, self, turned)

    def finish(self) -> None:
        """The second half."""
        waiting, self.waiting = self.waiting, []
        for weight, gradient in waiting:
            torch.autograd.backward(weight, gradient().to(weight.dtype))


def _is_weight(w: Any) -> bool:
    """Whether a tensor is a parameter, or this rank's part of one."""
    if not isinstance(w, Tensor) or not w.requires_grad or w.dim() != 2:
        return False
    plain = isinstance(w, nn.Parameter) and type(w) in (nn.Parameter, FakeTensor)  # a rehearsal's have no values
    return plain or getattr(w, "_mw_is_parameter", False)


def _under_autocast(t: Tensor) -> Tensor:
    """An operand of a product in the type that it has there: the backward is of that type, and runs outside."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(kind))


def _anchor(w: Tensor) -> Tensor:
    """Makes the result require a gradient where the input needs none."""
    return torch.zeros((), dtype=w.dtype, device=w.device, requires_grad=True)


class _Product(torch.autograd.Function):
    """``x @ w.T + bias`` (``turned``) or ``x @ w + bias``; the gradient of ``weight`` waits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        w: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        later: DeferredWeightGrads,
        turned: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.weight, ctx.later, ctx.turned, ctx.bias = weight, later, turned, bias is not None
        out = functional.linear(x, w if turned else w.T, bias)
        return out.detach()  # not a view, which a model could not write to

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        turned = ctx.turned
        kept = g.clone()  # autograd may give a parameter the same memory, and add later microbatches' gradients there

        def gradient() -> Tensor:
            rows, out = x.reshape(-1, x.shape[-1]), kept.reshape(-1, g.shape[-1])
            return out.T @ rows if turned else rows.T @ out

        ctx.later.waiting.append((ctx.weight, gradient))
        gx = (g @ w if turned else g @ w.T) if ctx.needs_input_grad[0] else None
        gb = g.reshape(-1, g.shape[-1]).sum(0) if ctx.bias and ctx.needs_input_grad[3] else None
        return gx, None, None, gb, None, None, None
