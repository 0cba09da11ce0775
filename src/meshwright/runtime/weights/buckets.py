"""``Buckets``: sums of gradients over data ranks that begin while a backward still runs, as in torch's DDP.

    backward   … block 3 ── block 2 ── block 1 ── block 0
    bucket 0       full ─ all-reduce ───────►
    bucket 1                     full ─ all-reduce ───────►
    finish                                               rest, wait, write back

Buckets hold the parameters in reverse order, since a backward computes the gradients of the last ones first. The all-reduce of
a bucket begins when each of its parameters has a gradient from every microbatch of the step, and the all-reduce of the bucket
before it has begun. So all ranks enter the same collectives in the same order. If a backward does not use some parameters,
their buckets do not fill: ``finish`` sums these. Parameters that no rank has used in a step are in the last buckets of the next
step.

A custom backward may add to a gradient after its bucket was sent (a checkpoint with reentry runs a backward of its own). Then
all ranks sum this bucket again.

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
    """Parameters whose gradients are summed by one all-reduce.

    Attributes:
        names: of the parameters; all have gradients of one dtype on one device.
        missing: the parameters that have no gradient yet from some microbatch of this step.
        total: the gradients, one after another, which the all-reduce sums in place; None before it has begun.
        work: the all-reduce; None before it has begun, or if the bucket has no elements.
        again: whether a gradient has changed since the all-reduce began.
    """

    names: list[str]
    missing: set[str] = field(default_factory=set)
    total: Tensor | None = None
    work: Any = None
    again: bool = False

    def wait(self) -> None:
        """Waits for the all-reduce."""
        if self.work is not None:
            self.work.wait()


class Buckets:
    """The buckets of one process group.

    Args:
        parameters: name → parameter, in the order of the model; equal names on all ranks. Frozen parameters are left out.
        group: the ranks to sum over.
        size: largest size of a bucket in bytes. A larger parameter has a bucket of its own.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, *, size: int = BYTES) -> None:
        self._parameters, self._group, self._size = _trained(parameters), group, size
        self._unused: frozenset[str] = frozenset()
        self._arrange(self._unused)
        self._counts: dict[str, int] = {}
        self._microbatches, self._next, self._open = 0, 0, False
        # The nodes are kept: otherwise torch makes a new node of a parameter for each forward, without the hook.
        self._nodes = {name: get_gradient_edge(p).node for name, p in self._parameters.items()}
        self._hooks = [node.register_hook(partial(self._on_gradient, name)) for name, node in self._nodes.items()]

    def _arrange(self, unused: frozenset[str]) -> None:
        """Makes the buckets. ``unused``: parameters that no rank used in the last step; equal on all ranks."""
        self._unused = unused
        # Unused ones come first, and so are in the last buckets.
        order = sorted(self._parameters, key=lambda name: name not in unused)
        self._buckets = _divided({name: self._parameters[name] for name in order}, self._size)
        self._bucket_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket.names}

    def holds(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether the buckets hold exactly those of these parameters that are trained now."""
        trained = _trained(parameters)
        return trained.keys() == self._parameters.keys() and all(p is self._parameters[n] for n, p in trained.items())

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, microbatches: int) -> None:
        """Call on all ranks before the forwards of a step. The backwards of the step then fill the buckets.

        Args:
            microbatches: number of backwards of the step. In each, a parameter that is used gets one gradient.
        """
        self._microbatches, self._next, self._open = microbatches, 0, True
        self._counts = {}
        for bucket in self._buckets:
            bucket.total = bucket.work = None
            bucket.again, bucket.missing = False, set(bucket.names)

    def leave(self) -> None:
        """Call after a step, also after one that raised. Buckets ignore later gradients, and nobody waits for begun sums."""
        self._open = False

    def finish(self, on_any: Callable[[Sequence[bool]], list[bool]]) -> None:
        """Call on all ranks after the backwards of a step. Afterwards each gradient is the sum over all ranks.

        Args:
            on_any: flags of this rank → for each flag, whether it is set on any rank. Collective.
        """
        self._open = False
        names = [*self._parameters]
        used = [self._parameters[name].grad is not None for name in names]
        # All sums begin before ``on_any``: both may use one process group, and some ranks have begun all sums already.
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

    def _on_gradient(self, name: str, *_: Any) -> None:
        """Hook: a backward has added to the gradient of a parameter."""
        if not self._open:
            return
        bucket = self._buckets[self._bucket_of[name]]
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
        """Copies the sums to the gradients of the parameters that some rank has used. Other parameters keep no gradient, as on
        one device."""
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
    """Buckets of at most ``size`` bytes. The first bucket has the last parameters; gradients in a bucket have one dtype."""
    buckets: list[_Bucket] = []
    filled = 0
    for name, p in reversed([*parameters.items()]):
        last = buckets[-1].names[-1] if buckets else ""
        same_type = bool(last) and _type(parameters[last]) == _type(p)
        if not same_type or filled + p.nbytes > size:
            buckets.append(_Bucket([]))
            filled = 0
        buckets[-1].names.append(name)
        filled += p.nbytes
    return buckets


def _type(p: Tensor) -> tuple[torch.dtype, torch.device]:
    """The dtype of a parameter's gradient, and its device."""
    return getattr(p, "grad_dtype", None) or p.dtype, p.device


__all__ = ["Buckets", "flattened", "unflattened"]
