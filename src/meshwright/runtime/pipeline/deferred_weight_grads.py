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
            if func in _ADDMMS and len(args) == 3 and _is_weight(args[2]) and args[0].shape == args[2].shape[1:]:
                return self._product(args[1], args[2], args[0], turned=False)
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool) -> Any:
        x, w, bias = (
            _under_autocast(x),
            _under_autocast(weight.detach()),
            None if bias is None else _under_autocast(bias),
        )
        half = _Half(weight, self.waiting)
        return _Product.apply(x, half.anchor(), w, bias, half, turned)

    def finish(self) -> None:
        """The second half."""
        for weight, gradient in self.waiting:
            torch.autograd.backward(weight, gradient().to(weight.dtype))
        self.waiting.clear()


def _is_weight(w: Any) -> bool:
    """Whether a tensor is a parameter, or this rank's part of one. (A gradient of complex numbers takes conjugates.)"""
    if not isinstance(w, Tensor) or not w.requires_grad or w.dim() != 2 or not w.is_floating_point():
        return False
    return (isinstance(w, nn.Parameter) and type(w) is nn.Parameter) or getattr(w, "_mw_is_parameter", False)


def _under_autocast(t: Tensor) -> Tensor:
    """An operand of a product in the type that it has there: the backward is of that type, and runs outside."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(kind))


class _Half:
    """What the gradient of a weight is made from, in one product.

    Args:
        waiting: gets it, in a backward that accumulates gradients. One that is asked for others (``torch.autograd.grad``, in a
            hook of the model's, say) goes through the product, too, and comes to no leaf.
    """

    def __init__(self, weight: Tensor, waiting: list[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        self._weight, self._waiting = weight, waiting
        self.gradient: Callable[[], Tensor] | None = None  # of the last backward that went through the product

    def anchor(self) -> Tensor:
        """A leaf of the product, which makes its result require a gradient where the input needs none."""
        anchor = torch.zeros((), dtype=self._weight.dtype, device=self._weight.device, requires_grad=True)
        anchor.register_post_accumulate_grad_hook(self._wait)
        return anchor

    def _wait(self, anchor: Tensor) -> None:
        gradient, self.gradient = self.gradient, None
        if gradient is not None:
            self._waiting.append((self._weight, gradient))


class _Product(torch.autograd.Function):
    """``x @ w.T + bias`` (``turned``) or ``x @ w + bias``; the gradient of the weight waits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        w: Tensor,
        bias: Tensor | None,
        half: _Half,
        turned: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.half, ctx.turned, ctx.bias = half, turned, bias is not None
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

        ctx.half.gradient = gradient
        gx = (g @ w if turned else g @ w.T) if ctx.needs_input_grad[0] else None
        gb = g.reshape(-1, g.shape[-1]).sum(0) if ctx.bias and ctx.needs_input_grad[3] else None
        return gx, g.new_zeros(()), None, gb, None, None
