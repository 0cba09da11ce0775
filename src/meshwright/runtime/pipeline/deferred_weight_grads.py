"""``DeferredWeightGrads``: splits a backward in two halves, as zero-bubble schedules need: first activations, then weights.

While it is on, a product with a parameter becomes an autograd Function. Its backward returns the gradient of the input, and
keeps the tensors from which the gradient of the weight is computed later. All other gradients are computed in the first half.
So for any model, the sum of both halves is the gradient. (Qi et al., arXiv 2401.10241, section 2.)

Torch's own split walks the autograd graph instead. If parts of the graph serve several weights, as encoder states do, its
gradients differed from run to run. It also orders parts by memory address, so that tensor-parallel ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.private import FakeTensor
from meshwright.spmd.autograd_functions import FunctionMode, transforming
from meshwright.spmd.torch_functions import ADDMMS, MATMULS


class DeferredWeightGrads(FunctionMode):
    """The function mode for the forward and the first half of the backward of one microbatch in one stage.

    Entered outside the SPMD mode, so that it sees the local functions that the dispatcher calls.
    """

    def __init__(self) -> None:
        super().__init__()
        # (weight, the function that computes its gradient)
        self.waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (torch.func transforms do not support autograd Functions of this kind.)
        if not kwargs and torch.is_grad_enabled() and not transforming():
            if func is functional.linear and _is_weight(args[1]):
                return self._product(args[0], args[1], args[2] if len(args) > 2 else None, turned=True)
            if func in MATMULS and len(args) == 2 and _is_weight(args[1]):
                return self._product(args[0], args[1], None, turned=False)
            if func in ADDMMS and len(args) == 3 and _is_weight(args[2]) and args[0].shape == args[2].shape[1:]:
                return self._product(args[1], args[2], args[0], turned=False)
        return func(*args, **(kwargs or {}))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool) -> Any:
        """See ``_Product``."""
        x, w = _under_autocast(x), _under_autocast(weight.detach())
        bias = None if bias is None else _under_autocast(bias)
        deferred = _DeferredGradient(weight, self.waiting)
        return _Product.apply(x, deferred.anchor(), w, bias, deferred, turned)

    def finish(self) -> None:
        """The second half: computes the weight gradients and adds them to the parameters."""
        for weight, gradient in self.waiting:
            torch.autograd.backward(weight, gradient().to(weight.dtype))
        self.waiting.clear()


def _is_weight(w: Any) -> bool:
    """Whether a tensor is a trained matrix of real numbers: a parameter, or this rank's part of one.

    (The gradient of a complex matrix takes conjugates.)
    """
    if not isinstance(w, Tensor) or not w.requires_grad or w.dim() != 2 or not w.is_floating_point():
        return False
    is_plain = isinstance(w, nn.Parameter) and type(w) in (nn.Parameter, FakeTensor)  # (in a rehearsal they are fake)
    return is_plain or getattr(w, "_mw_is_parameter", False)


def _under_autocast(t: Tensor) -> Tensor:
    """An operand of a product, cast as autocast casts it: our backward runs outside of autocast and needs the same type."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(kind))


class _DeferredGradient:
    """The deferred gradient of the weight of one product.

    Args:
        waiting: gets the weight and the function that computes its gradient, in a backward that accumulates gradients. A
            backward that asks for other gradients (``torch.autograd.grad`` in a hook of the model, say) also goes through the
            product, but reaches no leaf.
    """

    def __init__(self, weight: Tensor, waiting: list[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        self._weight, self._waiting = weight, waiting
        self.gradient: Callable[[], Tensor] | None = None  # of the last backward that went through the product

    def anchor(self) -> Tensor:
        """A scalar leaf that requires a gradient, so that the result of the product does, also if its input does not."""
        anchor = torch.zeros((), dtype=self._weight.dtype, device=self._weight.device, requires_grad=True)
        anchor.register_post_accumulate_grad_hook(self._add_to_waiting)
        return anchor

    def _add_to_waiting(self, anchor: Tensor) -> None:
        """Hook: a backward has accumulated a gradient of the anchor."""
        gradient, self.gradient = self.gradient, None
        if gradient is not None:
            self._waiting.append((self._weight, gradient))


class _Product(torch.autograd.Function):
    """``x @ w.T + bias`` (if ``turned``) or ``x @ w + bias``. The gradient of the weight is deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        w: Tensor,
        bias: Tensor | None,
        deferred: _DeferredGradient,
        turned: bool,
    ) -> Tensor:
        # As torch's own products do: a model may write to ``x`` afterwards, if its rows had to be copied.
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, w)
        ctx.deferred, ctx.turned, ctx.bias = deferred, turned, bias is not None
        out = functional.linear(x, w if turned else w.T, bias)
        return out.detach()  # not a view, which a model could not write to

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        rows, w = ctx.saved_tensors
        turned = ctx.turned
        # A copy: autograd may use g's memory for a parameter's gradient, and add later microbatches there.
        output_grad = g.clone()

        def gradient() -> Tensor:
            grads = output_grad.reshape(-1, g.shape[-1])
            return grads.T @ rows if turned else rows.T @ grads

        ctx.deferred.gradient = gradient
        gx = (g @ w if turned else g @ w.T) if ctx.needs_input_grad[0] else None
        gb = g.reshape(-1, g.shape[-1]).sum(0) if ctx.bias and ctx.needs_input_grad[3] else None
        return gx, g.new_zeros(()), None, gb, None, None
