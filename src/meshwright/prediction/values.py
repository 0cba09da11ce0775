"""``KnownValues``: in a rehearsal, tensors that follow from the batch alone have values. All others have only shapes.

a function whose tensors all have values       computes values (masks, positions, shifted labels)
a function without tensors (``arange``)        computes values if the model calls it and the result is small
any other function                             infers shapes only (``FakeTensorMode``)
a read of a value that does not exist          the value is assumed, as in planning (a mask is all true, a number is one;
                                               another now and then in a loop, so that it ends)

If a function writes something without values into a tensor, the tensor has no values from then on.
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
from meshwright.planning.assumed import ASSUMED, INDEXED, NO_META, SIZED, assumed_answer, is_mask, is_without_values
from meshwright.planning.loops import LoopsEnd
from meshwright.prediction.shapes import Shapes
from meshwright.private import (
    DEVICE,
    FakeTensor,
    FakeTensorMode,
    new_fake_tensor,
    pytree,
    storage_of,
    unset_fake_temporarily,
)
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import op_facts, written_by

SMALL = 1 << 20  # bytes: the result of a function without tensors has values up to this size
_META, _CPU = torch.device("meta"), torch.device("cpu")
_REHEARSAL = os.path.join(os.path.dirname(__file__), "rehearsal.py")
_RUNTIME = (
    os.path.dirname(torch.distributed.__file__) + os.sep,
    os.path.join(os.path.dirname(meshwright.__file__ or ""), "runtime") + os.sep,
)


class KnownValues(LoopsEnd):
    """A dispatch mode that lets tensors have values within a ``FakeTensorMode``.

    Args:
        fake: the enclosing mode.
        shapes: what is known of functions' results.

    Attributes:
        assumed: (function, line of the model) of each read of a value that does not exist, in order.
    """

    def __init__(self, fake: FakeTensorMode, shapes: Shapes) -> None:
        super().__init__()
        self._fake, self._shapes = fake, shapes
        self._lost_memory: set[int] = set()  # addresses of memory into which something without values was written
        self.assumed: dict[tuple[str, str], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # a fast path: half of all calls ask for the device
        if any(issubclass(t, (DTensor, GlobalTensor)) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = tensors_among((*args, *kwargs.values()))
        if not tensors:
            return self._run_without_tensors(func, args, kwargs)
        written = tensors_among(value for _, value in written_by(func, args, kwargs))
        known = all(map(self._has_values, tensors))
        if not known:
            self._lose_values(written)
        # Views of real memory, and writes between real tensors, run on the real memory.
        if known or (all(map(_is_real, tensors)) and (written or op_facts(func).is_view)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._run_on_shapes(func, args, kwargs)

    def _run_without_tensors(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function without tensors. Its result has values if it is small and the model called the function."""
        out = func(*args, **kwargs)
        small = sum(t.nbytes for t in tensors_among((out,))) <= SMALL
        if not small or kwargs.get("device") not in (None, _CPU) or func.namespace != "aten" or not _by_model():
            return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _run_on_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on shapes, because some of its tensors have no values."""
        if func in ASSUMED or func in SIZED:
            return self._assume(func, args, kwargs)
        if func in NO_META:
            with unset_fake_temporarily():
                out = NO_META[func](*args, **kwargs)
            return pytree.tree_map_only(Tensor, self._without_values, out)
        if func in INDEXED and any(map(is_mask, args[1])):
            positions = [self._positions(index) if is_mask(index) else [index] for index in args[1]]
            args = (args[0], [index for group in positions for index in group], *args[2:])
        if func.overloadpacket.__name__ == "_grouped_mm":
            return self._grouped_product(func, args, kwargs)
        return self._shapes.run(self._fake, func, args, kwargs)

    def _grouped_product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The shape of a grouped matrix product, in any dtype. On meta tensors, torch's function accepts only bfloat16."""
        dtype = kwargs.get("out_dtype") or args[0].dtype
        with unset_fake_temporarily():
            in_bfloat16 = pytree.tree_map_only(
                Tensor, _half, (args, {**kwargs, "out_dtype": None} if kwargs else kwargs)
            )
            meta = func(*in_bfloat16[0], **in_bfloat16[1])
        return self._without_values(torch.empty_strided(meta.size(), meta.stride(), dtype=dtype, device=_META))

    def _has_values(self, t: Tensor) -> bool:
        return _is_real(t) and storage_of(t) not in self._lost_memory

    def _lose_values(self, written: Iterable[Tensor]) -> None:
        """Marks tensors as tensors without values, because something without values is written into them."""
        for t in filter(self._has_values, written):
            address = storage_of(t)
            self._lost_memory.add(address)
            weakref.finalize(t.untyped_storage(), self._lost_memory.discard, address).atexit = False

    def _assume(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that reads values, or whose result has a size that follows from values: assumed."""
        if func is torch.ops.aten.masked_select.default and self._has_values(args[1]):
            with unset_fake_temporarily():
                count = int(args[1].expand(torch.broadcast_shapes(*(t.shape for t in args))).count_nonzero())
                selected = torch.empty(count, dtype=args[0].dtype, device=_META)
            return self._without_values(selected)
        self.assumed.setdefault((str(func), model_line(_REHEARSAL)))
        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
            another = self.loops.another()
            if func in SIZED:
                out = SIZED[func](_none if another else Tensor.numel, *args, **kwargs)
            else:
                out = assumed_answer(func, args, kwargs, another)
        return pytree.tree_map_only(Tensor, self._without_values, out)

    def _positions(self, mask: Tensor) -> list[Tensor]:
        """The indices at which a mask is true. Without values it is assumed to be true everywhere; in a loop, now and then
        nowhere."""
        if self._has_values(mask):
            with unset_fake_temporarily():
                return list(mask.nonzero().unbind(1))
        self.assumed.setdefault(("a mask as an index", model_line(_REHEARSAL)))
        indices = torch.empty(0 if self.loops.another() else mask.numel(), dtype=torch.int64, device=_META)
        return [self._without_values(indices) for _ in range(mask.dim())]

    def _without_values(self, t: Tensor) -> Tensor:
        return new_fake_tensor(self._fake, t.size(), t.stride(), t.dtype)


def _is_real(t: Tensor) -> bool:
    """Whether a tensor has memory in this process."""
    return not is_without_values(t)


def _by_model() -> bool:
    """Whether the model's code called this function, not FSDP2 or our runtime in between."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_RUNTIME):
            return False
        frame = frame.f_back
    return frame is not None


def _none(mask: Tensor) -> int:
    return 0


def _half(t: Tensor) -> Tensor:
    dtype = torch.bfloat16 if t.is_floating_point() else t.dtype
    return torch.empty_strided(t.size(), t.stride(), dtype=dtype, device=_META)


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=_META)
