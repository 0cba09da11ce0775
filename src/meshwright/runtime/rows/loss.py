"""What a model's output has to do with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

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


__all__ = ["Loss", "output_loss"]
