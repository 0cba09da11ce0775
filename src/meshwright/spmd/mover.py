"""``Mover``: redistributes tensors from layout to layout over one axis.

    full_tensor   every rank computes the same with it     plain   the full tensor, with the strides of one device
    varying       each rank computes its part with it      shard   this rank's slice

The result of a collective is reused until something writes to the tensor. A global tensor that a fallback made may be a slice
of a gathered one, its base: it is selected anew if the base has been written, and a write to it goes to the base as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import REPLICATE, Layout, Partial, Shard
from meshwright.private import version
from meshwright.spmd import redistribute
from meshwright.spmd.alias import overwrite, same_strides, with_strides
from meshwright.spmd.comm import Axis
from meshwright.spmd.tensor import GlobalTensor


class Mover:
    """Redistributes tensors from layout to layout.

    Args:
        axis: the axis over which tensors are sharded.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    # --- layouts ---------------------------------------------------------------------------------------------------

    def layout(self, x: Any) -> Layout:
        return x._mw_layout if isinstance(x, GlobalTensor) else REPLICATE

    def full_tensor(self, x: Any) -> Any:
        """The full tensor; every rank computes the same with it. Anything else as it is."""
        if not isinstance(x, GlobalTensor):
            return x
        if x._mw_origin is not None:
            self.refresh(x)
        layout = x._mw_layout
        if isinstance(layout, Shard):
            return self._once(x, "full", lambda t: redistribute.all_gather(t, self.axis, layout))
        if isinstance(layout, Partial):
            return self._once(x, "full", lambda t: redistribute.all_reduce(t, self.axis))
        return x._mw_local

    def plain(self, x: Any) -> Any:
        """``full_tensor``, with the strides of one device: for functions that can alias, or whose result has the strides of an
        operand."""
        value = self.full_tensor(x)
        if not isinstance(x, GlobalTensor) or x._mw_origin is not None or x._mw_layout == REPLICATE:
            return value
        strides = x.stride()
        if same_strides(value.shape, value.stride(), strides):
            return value
        return self._once(x, "laid", lambda _: with_strides(value, strides))

    def varying(self, x: Any) -> Any:
        """The full tensor; each rank computes its part with it, so gradients are summed over the axis."""
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, GlobalTensor) and isinstance(layout := x._mw_layout, Shard):
            return self._once(x, "varying", lambda t: redistribute.all_gather_in(t, self.axis, layout))
        base = self.full_tensor(x)
        if not base.requires_grad:
            return base
        wide = getattr(base, "_mw_is_parameter", False)
        return self._once(base, f"_mw_entered_{id(self)}", lambda t: redistribute.copy_in(t, self.axis, wide=wide))

    def shard(self, x: Tensor, layout: Shard) -> Tensor:
        """This rank's slice of ``x`` in ``layout``, as a local tensor."""
        if not isinstance(x, GlobalTensor):
            return redistribute.keep_slice(x, self.axis, layout)
        source, local = x._mw_layout, x._mw_local
        if source == layout:
            return local
        if isinstance(source, Partial):
            memo = x._mw_memo.get("full")
            if memo is None or memo[0] != version(local):
                return redistribute.reduce_scatter(local, self.axis, layout)
        if isinstance(source, Shard) and source.dim != layout.dim:
            return redistribute.all_to_all(local, self.axis, source, layout)
        return redistribute.keep_slice(self.full_tensor(x), self.axis, layout)

    def _once(self, x: Tensor, kind: str, move: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of ``move``, reused as long as ``x`` is not written: q, k and v share one gradient all-reduce."""
        memos = x._mw_memo if isinstance(x, GlobalTensor) else x.__dict__
        local = x._mw_local if isinstance(x, GlobalTensor) else x
        if (writes := version(local)) is None or torch.is_inference_mode_enabled():
            return move(local)  # (no backward may save what is made in inference mode)
        if isinstance(x, GlobalTensor) and x._mw_memory is not None:
            writes += x._mw_memory.written  # both only grow
        key = (writes, torch.is_grad_enabled() and local.requires_grad)
        memo = memos.get(kind)
        if memo is None or memo[:2] != key:
            memo = memos[kind] = (*key, move(local))
        return memo[2]

    # --- writes of whole values, and slices of what was gathered ------------------------------------------------------

    def write(self, target: GlobalTensor, value: Tensor, *, silent: bool = False) -> None:
        """Writes ``value``, a full tensor, to ``target`` in place, so that aliases of the local tensor see it.

        ``silent``: see ``assign``. The version counter of the local tensor does not change then: else autograd would refuse
        views of it that ``chunk`` made.
        """
        layout, local = target._mw_layout, target._mw_local
        if silent:
            local, value = local.data, value.detach()
        if isinstance(layout, Shard):
            value = redistribute.keep_slice(value, self.axis, layout)
        elif isinstance(layout, Partial):
            value = redistribute.keep_first(value, self.axis)
        overwrite(local, value)

    def assign(self, target: GlobalTensor, value: Tensor, *, silent: bool = False) -> None:
        """Writes ``value``, a full tensor, to ``target`` in place, and to the base if ``target`` is a slice of one.

        ``silent``: without autograd's knowledge, as a write to ``.data``.
        """
        if target._mw_origin is not None:
            silent = silent or target._mw_silent
            self.refresh(target)
            base, select = target._mw_origin
            with torch.set_grad_enabled(torch.is_grad_enabled() and not silent):
                changed = duplicate(self.plain(base))
                overwrite(select(changed), value)
            self.assign(base, changed, silent=silent)
        else:
            self.write(target, value, silent=silent)
        if target._mw_memory is not None:
            target._mw_memory.written += 1

    def state_of(self, x: GlobalTensor) -> Any:
        """A value that changes with every write to a global tensor; None if torch counts no writes to it."""
        while x._mw_origin is not None:
            x = x._mw_origin[0]
        written = version(x._mw_local)
        return None if written is None else (written, x._mw_memory.written if x._mw_memory is not None else 0)

    def refresh(self, alias: GlobalTensor) -> None:
        """Selects a slice that a fallback made anew, if its base has been written since."""
        assert alias._mw_origin is not None
        base, select = alias._mw_origin
        if base._mw_origin is not None:
            self.refresh(base)
        state = self.state_of(base)
        if state is None or alias._mw_memo.get("origin") != state:
            alias._mw_local, alias._mw_memo = select(self.plain(base)), {"origin": state}


def duplicate(value: Tensor) -> Tensor:
    """A copy with the same strides."""
    copy = value.clone()
    return copy if copy.stride() == value.stride() else with_strides(copy, value.stride())
