"""Sequence parallelism: inputs of blocks are sharded over dim 1, and so are activations between tensor-parallel regions.

Nothing else is needed. A sharded residual stream stays sharded through norms and additions; a partial sum that is added to it
is reduce-scattered; a column-sharded linear gathers it (Korthikanti et al., arXiv 2205.05198, section 4.2).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.calls.placeholder import Placeholder, note_replaced_within, wait_for
from meshwright.layout import Shard, even_shard
from meshwright.private import without_modes
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.tensor import GlobalTensor

DIM = 1  # of (batch, sequence, features). In (sequence, batch, features) it is the batch, which is right as well


class InputSharder:
    """Shards the first activation among the arguments of a block over dim 1 (calls/hook.py).

    Args:
        watched: whether to keep the sharded tensors, for ``written``.
    """

    def __init__(self, dispatcher: Dispatcher, *, watched: bool = False) -> None:
        self._dispatcher = dispatcher
        self._sharded_inputs: list[tuple[str, GlobalTensor, Any]] | None = [] if watched else None

    def __call__(
        self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for i, x in enumerate(args):
            if _is_activation(x):
                return (*args[:i], self._sharded(block, x), *args[i + 1 :]), kwargs
        for key, x in kwargs.items():
            if _is_activation(x):
                return args, {**kwargs, key: self._sharded(block, x)}
        return args, kwargs

    def _sharded(self, block: str, x: Tensor) -> Tensor:
        sharded = shard_input(self._dispatcher, x)
        if self._sharded_inputs is not None and sharded is not x and isinstance(sharded, GlobalTensor):
            self._sharded_inputs.append((block, sharded, self._dispatcher.state_of(sharded)))
        return sharded

    def written(self) -> set[str]:
        """The blocks that wrote to their sharded input. It is a copy, so the model would miss the write."""
        return {block for block, t, before in self._sharded_inputs or () if self._dispatcher.state_of(t) != before}


def _is_activation(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() >= 3 and x.is_floating_point()


def shard_input(dispatcher: Dispatcher, x: Tensor) -> Tensor:
    """``x``, sharded over dim 1; unchanged if it is sharded already, is on other ranks, or has fewer positions than ranks."""
    if isinstance(x, Placeholder) or isinstance(dispatcher.layout(x), Shard) or x.shape[DIM] < dispatcher.axis.size:
        return x
    wait_for(x)
    layout = even_shard(DIM, x.shape[DIM], dispatcher.axis.size)
    with without_modes():  # no call of the model's
        local = dispatcher.shard(x, layout)
        # The input must share no memory with x, or with its sum. (With a gradient, it is a copy already.)
        is_copy = isinstance(x, GlobalTensor) and local.requires_grad
        sharded = GlobalTensor(local if is_copy else local.clone(), layout, dispatcher)
        dispatcher.set_strides(sharded, x.stride())
    note_replaced_within(x, sharded)
    return sharded
