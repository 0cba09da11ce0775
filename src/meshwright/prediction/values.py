"""``KnownValues``: in a rehearsal, what follows from the batch alone has values; what follows from parameters has none.

a function of tensors that all have values     runs (masks, positions, shifted labels)
a small tensor that the model makes of none    has values (``arange``, ``zeros``); a large one has not
any other                                      has shapes alone (``FakeTensorMode``)
a read of a value that is not there            is assumed, as planning does (a mask is all true, a number is one)

What is written with something that has no values has none from then on.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshwright
from meshwright.blame import is_of_model, model_line
from meshwright.described import tensors_among
from meshwright.planning.assumed import ASSUMED, INDEXED, SIZED, is_mask
from meshwright.private import (
    DEVICE,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    pytree,
    storage_of,
    unset_fake_temporarily,
)
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import op_facts, written_by

SMALL = 1 << 20  # bytes: what a model makes of nothing, and is larger, has no values
_META, _CPU = torch.device("meta"), torch.device("cpu")
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
        self._lost: set[int] = set()  # where memory stands that had values, and was written with what has none
        self.assumed: dict[tuple[str, str], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # half of all that is asked
        if any(issubclass(t, (DTensor, GlobalTensor)) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = tensors_among((*args, *kwargs.values()))
        if not tensors:
            return self._made_of_nothing(func, args, kwargs)
        written = tensors_among(value for _, value in written_by(func, args, kwargs))
        known = all(map(self._has_values, tensors))
        if not known:
            self._lose(written)
        # Memory of this process is seen, and written, as what it is.
        if known or (all(map(_is_real, tensors)) and (written or op_facts(func).is_view)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._by_shapes(func, args, kwargs)

    def _made_of_nothing(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor that is made of no tensor: its shape says whether it is small."""
        out = func(*args, **kwargs)
        small = sum(t.nbytes for t in tensors_among((out,))) <= SMALL
        if not small or kwargs.get("device") not in (None, _CPU) or func.namespace != "aten" or not _by_model():
            return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _by_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of which some tensor has no values."""
        if func in ASSUMED or func in SIZED:
            return self._assume(func, args, kwargs)
        if func in INDEXED and any(map(is_mask, args[1])):
            positions = [self._positions(index) if is_mask(index) else [index] for index in args[1]]
            args = (args[0], [index for group in positions for index in group], *args[2:])
        if func.overloadpacket.__name__ == "_grouped_mm":
            return self._grouped(func, args, kwargs)
        return func(*args, **kwargs)

    def _grouped(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A grouped product in any type: torch's function on meta tensors takes bfloat16 alone, as GPUs do."""
        dtype = kwargs.get("out_dtype") or args[0].dtype
        with unset_fake_temporarily():
            half = pytree.tree_map_only(Tensor, _half, (args, {**kwargs, "out_dtype": None} if kwargs else kwargs))
            shaped = func(*half[0], **half[1])
        return self._without_values(torch.empty_strided(shaped.size(), shaped.stride(), dtype=dtype, device=_META))

    def _has_values(self, t: Tensor) -> bool:
        return _is_real(t) and storage_of(t) not in self._lost

    def _lose(self, written: Iterable[Tensor]) -> None:
        """Tensors are written with what has no values."""
        for t in filter(self._has_values, written):
            at = storage_of(t)
            self._lost.add(at)
            weakref.finalize(t.untyped_storage(), self._lost.discard, at).atexit = False

    def _assume(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.masked_select.default and self._has_values(args[1]):
            with unset_fake_temporarily():
                count = int(args[1].expand(torch.broadcast_shapes(*(t.shape for t in args))).count_nonzero())
                selected = torch.empty(count, dtype=args[0].dtype, device=_META)
            return self._without_values(selected)
        self.assumed.setdefault((str(func), model_line(_REHEARSAL)))
        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
            out = SIZED[func](Tensor.numel, *args, **kwargs) if func in SIZED else ASSUMED[func](*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._without_values, out)

    def _positions(self, mask: Tensor) -> list[Tensor]:
        """A mask as the positions that it holds; all, if it has no values."""
        if self._has_values(mask):
            with unset_fake_temporarily():
                return list(mask.nonzero().unbind(1))
        self.assumed.setdefault(("a mask as an index", model_line(_REHEARSAL)))
        indices = torch.empty(mask.numel(), dtype=torch.int64, device=_META)
        return [self._without_values(indices) for _ in range(mask.dim())]

    def _without_values(self, t: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")


def _is_real(t: Tensor) -> bool:
    """Whether a tensor has memory here."""
    return not (isinstance(t, FakeTensor) or t.is_meta)


def _by_model() -> bool:
    """Whether the model's own code asks, and not FSDP2 or our runtime on its way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_RUNTIME):
            return False
        frame = frame.f_back
    return frame is not None


def _half(t: Tensor) -> Tensor:
    dtype = torch.bfloat16 if t.is_floating_point() else t.dtype
    return torch.empty_strided(t.size(), t.stride(), dtype=dtype, device=_META)


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=_META)
