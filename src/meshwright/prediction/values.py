"""``KnownValues``: in a rehearsal, what follows from the batch alone has values; what follows from parameters has none.

a function of tensors that all have values     runs (masks, positions, shifted labels)
any other                                      has shapes alone (``FakeTensorMode``)
a read of a value that is not there            is assumed, as planning does (a mask is all true, a number is one)
"""

from __future__ import annotations

import os
import sys
from math import prod
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.blame import is_of_model, model_line
from meshwright.described import tensors_among
from meshwright.planning.shadow import ASSUMED, INDEXED, SIZED, is_mask
from meshwright.private import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree, unset_fake_temporarily
from meshwright.spmd.tensor import GlobalTensor

SMALL = 1 << 20  # bytes: what a model makes of nothing, and is larger, has no values
_META = torch.device("meta")
_REHEARSAL = os.path.join(os.path.dirname(__file__), "rehearsal.py")
_RUNTIME = (
    os.path.dirname(torch.distributed.__file__) + os.sep,
    os.path.join(os.path.dirname(meshwright.__file__ or ""), "runtime") + os.sep,
)


class KnownValues(TorchDispatchMode):
    """On within a ``FakeTensorMode``.

    Args:
        fake: the mode.

    Attributes:
        assumed: (function, the model's line) of each read of a value that is not there.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self.assumed: dict[tuple[str, str], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, GlobalTensor)) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = tensors_among((*args, *kwargs.values()))
        if tensors and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if not tensors and func.namespace == "aten" and _asked_by_model(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in ASSUMED or func in SIZED:
            return self._assume(func, args, kwargs)
        if func in INDEXED and any(map(is_mask, args[1])):
            positions = [self._positions(index) if is_mask(index) else [index] for index in args[1]]
            args = (args[0], [index for group in positions for index in group], *args[2:])
        return func(*args, **kwargs)

    def _assume(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.assumed.setdefault((str(func), model_line(_REHEARSAL)))
        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
            out = SIZED[func](Tensor.numel, *args, **kwargs) if func in SIZED else ASSUMED[func](*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._without_values, out)

    def _positions(self, mask: Tensor) -> list[Tensor]:
        """A mask as the positions that it holds: all."""
        self.assumed.setdefault(("a mask as an index", model_line(_REHEARSAL)))
        held = torch.empty(mask.numel(), dtype=torch.int64, device=_META)
        return [self._without_values(held) for _ in range(mask.dim())]

    def _without_values(self, t: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")


def _asked_by_model(args: Any, kwargs: Any) -> bool:
    """Whether a small tensor is made of nothing by the model's own code: a position, a mask."""
    shape = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return 8 * prod(shape) <= SMALL and kwargs.get("device") in (None, torch.device("cpu")) and _by_model()


def _by_model() -> bool:
    """Whether the model's own code asks, and not FSDP2 or our runtime on its way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_RUNTIME):
            return False
        frame = frame.f_back
    return frame is not None


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=_META)
