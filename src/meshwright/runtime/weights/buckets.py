"""``Buckets``: sums of gradients over data ranks that begin while a backward still runs, as in torch's DDP.

    backward   … block 3 ── block 2 ── block 1 ── block 0
    bucket 0       full ─ all-reduce ───────►
    bucket 1                     full ─ all-reduce ───────►
    finish                                               rest, wait, write back

Parameters are put into buckets in the reverse of their order in the model, in which a backward comes to them. A bucket's
all-reduce begins when each of its parameters has got a gradient from every microbatch of the step, and never before that of
the bucket before it, so that all ranks enter the same collectives in the same order. What a backward does not fill
(parameters that it does not use) ``finish`` completes; parameters that no rank has used in a step are in the last buckets of
the next one.

A custom backward may add to a gradient once more (a checkpoint with reentry runs a backward of its own). A bucket that holds
such a gradient is summed again, on all ranks.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv 2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshwright.private import copy_all, without_modes
from meshwright.runtime.weights.parameters import zero_gradient

BYTES = 25 * 2**20  # of a bucket, as in torch's DDP


@dataclass
class _Bucket:
    """Attributes:
    names: of its parameters, of one type.
    missing: those that await a gradient.
    total: the gradients, one after another, which the all-reduce changes in place; None before it began.
    work: the all-reduce; None if there is nothing to sum.
    again: whether a gradient has changed since the all-reduce began.
    """

    names: list[str]
    missing: set[str] = field(default_factory=set)
    total: Tensor | None = None
    work: Any = None
    again: bool = False

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class Buckets:
    """The sums of one group of ranks.

    Args:
        parameters: name → parameter, in the order of the model; the same names on all ranks. Frozen ones have no part.
        group: the ranks to sum over.
        size: bytes of a bucket.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, *, size: int = BYTES) -> None:
        self._parameters, self._group, self._size = _trained(parameters), group, size
        self._unused: frozenset[str] = frozenset()
        self._arrange(self._unused)
        self._counts: dict[str, int] = {}
        self._microbatches, self._next, self._open = 0, 0, False
        # The node is kept: torch makes another one for each forward otherwise.
        self._nodes = {name: get_gradient_edge(p).node for name, p in self._parameters.items()}
        self._hooks = [node.register_hook(partial(self._arrived, name)) for name, node in self._nodes.items()]

    def _arrange(self, unused: frozenset[str]) -> None:
        """Makes the buckets. ``unused``: parameters that are expected to get no gradient; the same on all ranks."""
        self._unused = unused
        order = sorted(self._parameters, key=lambda name: name not in unused)  # buckets begin with the last ones
        self._buckets = _divided({name: self._parameters[name] for name in order}, self._size)
        self._of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket.names}

    def stands_for(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether the buckets are those of these parameters, as they are now."""
        trained = _trained(parameters)
        return trained.keys() == self._parameters.keys() and all(p is self._parameters[n] for n, p in trained.items())

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, microbatches: int) -> None:
        """Before the forwards of a step, on all ranks: their backwards fill the buckets.

        Args:
            microbatches: the number of backwards, in each of which a parameter that is used gets one gradient.
        """
        self._microbatches, self._next, self._open = microbatches, 0, True
        self._counts = {}
        for bucket in self._buckets:
            bucket.total = bucket.work = None
            bucket.again, bucket.missing = False, set(bucket.names)

    def leave(self) -> None:
        """After a step that raised: what began is waited for by nobody."""
        self._open = False

    def finish(self, on_any: Callable[[Sequence[bool]], list[bool]]) -> None:
        """After the backwards, on all ranks: gradients are those of all ranks.

        Args:
            on_any: for each flag, whether it is set on any rank; collective.
        """
        self._open = False
        names = [*self._parameters]
        used = [self._parameters[name].grad is not None for name in names]
        # Before any other collective: these ranks may have one group for both, and some have begun all buckets by now.
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        flags = on_any([*used, *(bucket.again for bucket in self._buckets)])
        is_used = dict(zip(names, flags, strict=False))
        for bucket, again in zip(self._buckets, flags[len(names) :], strict=True):
            bucket.wait()
            if again:
                self._launch(bucket)
                bucket.wait()
            self._write_back(bucket, is_used)
        if (unused := frozenset(name for name in names if not is_used[name])) != self._unused:
            self._arrange(unused)

    # --- while a backward runs ----------------------------------------------------------------------------------------

    def _arrived(self, name: str, *_: Any) -> None:
        """After a gradient has been added to that of a parameter."""
        if not self._open:
            return
        bucket = self._buckets[self._of[name]]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if bucket.total is not None:
            bucket.again = True
        elif count == self._microbatches:
            bucket.missing.discard(name)
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._launch(self._buckets[self._next])
                self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        """Begins the all-reduce of a bucket."""
        with without_modes():
            parameters = [self._parameters[name] for name in bucket.names]
            bucket.total = flattened([zero_gradient(p) if p.grad is None else p.grad for p in parameters])
            if bucket.total.numel():
                bucket.work = dist.all_reduce(bucket.total, group=self._group, async_op=True)

    @torch.no_grad()
    def _write_back(self, bucket: _Bucket, is_used: Mapping[str, bool]) -> None:
        """Makes the sums the gradients of the parameters that some rank has used. The others have none, as on one device."""
        assert bucket.total is not None
        parameters = [self._parameters[name] for name in bucket.names]
        for name, p in zip(bucket.names, parameters, strict=True):
            if is_used[name] and p.grad is None:
                p.grad = zero_gradient(p)
        sums = unflattened(bucket.total, parameters)
        pairs = [(p.grad, total) for p, total in zip(parameters, sums, strict=True) if p.grad is not None]
        if pairs:
            copy_all([gradient for gradient, _ in pairs], [total for _, total in pairs])
        bucket.total = bucket.work = None


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors of one type, one tensor after another, in one dim."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflattened(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``flattened``: views of ``flat`` in the shapes of ``like``."""
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in parameters.items() if p.requires_grad}


def _divided(parameters: Mapping[str, nn.Parameter], size: int) -> list[_Bucket]:
    """Buckets of the last parameters first, each of one type of gradients."""
    buckets: list[_Bucket] = []
    filled = 0
    for name, p in reversed([*parameters.items()]):
        last = buckets[-1].names[-1] if buckets else ""
        same = bool(last) and _type(parameters[last]) == _type(p)
        if not same or filled + p.nbytes > size:
            buckets.append(_Bucket([]))
            filled = 0
        buckets[-1].names.append(name)
        filled += p.nbytes
    return buckets


def _type(p: Tensor) -> tuple[torch.dtype, torch.device]:
    return getattr(p, "grad_dtype", None) or p.dtype, p.device


__all__ = ["Buckets", "flattened", "unflattened"]
