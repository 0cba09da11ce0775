"""What a model's output has to do with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.names import few

Loss = Callable[[Any], Tensor]


def output_loss(output: Any) -> Tensor:
    """The default loss: ``output.loss``, or ``output["loss"]``; a tensor without dims is a loss itself."""
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
    """Raises a PlanError if a loss has parameters: they would be trained on each rank by itself."""
    named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    trained = [name for name, p in named if p.requires_grad]
    if trained:
        raise PlanError.of(
            "this plan",
            where="loss",
            given=f"a module with parameters: {few(trained)}",
            required="a function of the model's output: what is trained is in the model",
            fix="a model that has the loss as a module of its own, and returns it",
        )


__all__ = ["Loss", "check_loss", "output_loss"]
