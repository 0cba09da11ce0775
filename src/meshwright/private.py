"""Torch's private parts that more than one file uses: each here once, with what rests on it.

What a single file uses stands there, in one function. ``tests/test_private_torch.py`` has a test for every one, here and
there, which fails where a new torch means something else by it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # batches and arguments nest; torch.utils has no public name for it
from torch.utils._python_dispatch import TorchDispatchMode  # forwards without values, and builds without memory

T = TypeVar("T", bound=Tensor)

# Torch functions run plainly: neither subclasses nor modes are asked. FSDP2's hooks and the recorder run so.
without_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction

# Subclasses are not asked, modes still are: facts of a View are those of its wrapper.
without_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def wrapper(cls: type[T], like: Any, shape: Any, **options: Any) -> T:
    """A tensor subclass's instance with a shape and no data, of the type and device of ``like``."""
    options = {"dtype": like.dtype, "device": like.device, "requires_grad": False, **options}
    made: T = torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    return made


def version(local: Tensor) -> int | None:
    """How often a tensor, or one that shares its memory, has been written; None in inference mode, which does not count.

    There is no public way to ask whether what was computed from a value still holds.
    """
    return None if local.is_inference() else local._version


def replace_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Gives every parameter and buffer of a module, and its gradient, the value ``fn`` makes of it.

    Parameters stay the same objects unless they change device; ``Module.to`` takes no function, and makes complex real.
    """
    module._apply(fn)


__all__ = [
    "TorchDispatchMode",
    "pytree",
    "replace_tensors",
    "version",
    "without_modes",
    "without_subclasses",
    "wrapper",
]
