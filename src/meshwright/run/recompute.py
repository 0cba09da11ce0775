"""Recompute: a module's activations are dropped after its forward and made again in its backward."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(model: nn.Module, names: Iterable[str]) -> None:
    """Makes each named module run under ``torch.utils.checkpoint``. Names of modules and parameters stay as they are."""
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name]
        # On the instance: hooks (FSDP's gathering) stay outside the part that is run again.
        module.forward = functools.partial(_again, module.forward)


def _again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
