"""The loss of a model's output: the default, and checks of a loss that a person passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.names import few

Loss = Callable[[Any], Tensor]


def output_loss(output: Any) -> Tensor:
    """The default loss: ``output.loss``, or ``output["loss"]``; an output without dims is the loss itself.

    Raises:
        TypeError: the output has no loss.
    """
    if isinstance(output, Tensor) and not output.dim():
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TypeError(
            f"the model's output ({type(output).__name__}) has no loss; pass loss=, a function of the output "
            "(on the command line: --loss file.py:function)"
        )
    return loss


def check_loss(loss: Loss) -> None:
    """Raises a PlanError if a loss has trained parameters: each rank would train its own copy."""
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trained = [name for name, p in named if p.requires_grad]
    if trained:
        raise PlanError.of(
            "this plan",
            where="loss",
            given=f"a module with parameters: {few(trained)}",
            required="a function of the model's output without trained parameters, which must be in the model",
            fix="a model that contains the loss as a submodule, and returns the loss",
        )


def one_number(loss: Tensor) -> Tensor:
    """A loss as a tensor without dims. A loss of a single element may have dims, as torch computes gradients of it, too.

    Raises:
        PlanError: the loss has several elements or none: torch computes no gradients of it.
    """
    if not isinstance(loss, Tensor) or not loss.dim():
        return loss
    if loss.numel() != 1:
        raise PlanError.of(
            "this model",
            where="loss",
            given=f"a tensor of shape {tuple(loss.shape)}",
            required="one number: torch takes gradients of no other",
            fix="loss.mean(), in the model or in loss=",
        )
    return loss.reshape(())


__all__ = ["Loss", "check_loss", "one_number", "output_loss"]
