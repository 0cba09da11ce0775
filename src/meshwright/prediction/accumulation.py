"""Whether autograd adds two gradients of one value in place.

If a value is used twice, autograd adds the gradient of one use to that of the other. If nothing else holds the first gradient,
autograd adds to it in place. Under a dispatch mode autograd always makes a third tensor (``accumulate`` in
``torch/csrc/autograd/input_buffer.cpp``), so a mode that counts memory must know which sums are in place without it.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from meshwright.private import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor
# Around each call of a dispatch mode torch turns Dynamo off, in these files.
_AROUND_A_MODE = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")


def in_place_without_mode(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a function that a dispatch mode sees is a sum of two gradients that autograd makes in place without a mode.

    Call it from ``__torch_dispatch__``, or from a function of that mode's file. A sum in the C++ formula of one function's
    gradient counts too, if nothing else holds its first summand.
    """
    return (
        func is _ADD
        and len(args) == 2
        and isinstance(args[1], Tensor)
        and args[0] is not args[1]
        and _called_by_autograd(sys._getframe(1))
        and _holders(args[0]) == holders_of_a_lone_tensor()
    )


def _called_by_autograd(frame: types.FrameType | None) -> bool:
    """Whether C++ called the mode of this frame, in a backward. Private: no function tells who called a mode."""
    mode_file = frame.f_code.co_filename if frame is not None else ""
    while frame is not None and (
        frame.f_code.co_filename == mode_file or frame.f_code.co_filename.endswith(_AROUND_A_MODE)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_run_backward.__code__


def _holders(t: Tensor) -> tuple[int, int]:
    """How many hold a tensor, and its storage, in C++ too: a view holds its base. Private: Python counts only what it holds."""
    return t._use_count(), torch._C._storage_Use_Count(t.untyped_storage()._cdata)  # type: ignore[attr-defined]


@functools.cache
def holders_of_a_lone_tensor() -> tuple[int, int]:
    """``_holders`` of the first summand of such a sum if only autograd holds it: the call itself holds it a few times.

    First called outside of dispatch modes, which have no autograd.
    """
    counts: list[tuple[int, int]] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                counts.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        used_twice = leaf.exp()
        loss = used_twice.sin() * used_twice.cos()
    with Counting():
        torch.autograd.grad(loss, leaf)
    return counts[-1]
