"""Two blocks at once on one rank: on CUDA streams of their own, or in threads on a CPU.

    start    when the model calls the block           its work begins; the model goes on
    finish   before anything takes what it gave       waits for it

On a GPU all is queued by one thread, and autograd runs each backward on the stream of its forward. A CPU's autograd has one
thread for each backward that is asked for: so the block's own graph is cut off, and its backward is asked for in a thread
of its own. The two ends of the cut are nodes of the model's graph:

    input ─► _Start ─► anchor ─► _Finish ─► output
    backward:  _Finish begins it, _Start waits for it; those of all blocks begin before the first is waited for
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.exchange import Started
from meshwright.calls.structure import map_tensors, tensors_of
from meshwright.recipe import Recipe
from meshwright.runtime.weights.fsdp import needs_fsdp
from meshwright.spmd.one_process import one_process


def collectives_within(recipe: Recipe) -> bool:
    """Whether a block may have collectives."""
    return recipe.mesh.axis_size("tp") > 1 or needs_fsdp(recipe)


def note(recipe: Recipe, device: torch.device) -> str:
    """What a person should know who asked for streams."""
    if not recipe.streams:
        return ""
    if collectives_within(recipe):
        return (
            "blocks on streams run one after the other: a block with collectives (tp, FSDP) cannot run in a thread or a stream "
            "beside others, as all ranks must meet in the same order"
        )
    if device.type != "cpu":
        return "blocks on streams run at the same time where one leaves part of the GPU free; large ones gain nothing"
    return (
        f"blocks on streams run in threads: that pays where a block is large and leaves cores free; torch itself uses "
        f"{torch.get_num_threads()} of {os.cpu_count()} for each"
    )


class Streams:
    """The streams of one rank.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self.cuda = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []
        self.threads = None if self.cuda else [ThreadPoolExecutor(1, f"stream-{i}") for i in range(count)]

    def start(self, stream: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Started:
        """Begins a block's forward."""
        if self.threads is None:
            return self._queued(self.cuda[stream], forward, args, kwargs)
        return _threaded(self.threads[stream], forward, args, kwargs)

    def _queued(
        self, stream: torch.cuda.Stream, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Started:
        now = torch.cuda.current_stream(self.device)
        stream.wait_stream(now)
        for t in tensors_of((args, kwargs)):
            if t.is_cuda:
                t.record_stream(stream)  # its memory is not given away before the block has read it
        with torch.cuda.stream(stream):
            result = forward(*args, **kwargs)

        def finish() -> Any:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(stream)
            for t in tensors_of(result):
                if t.is_cuda:
                    t.record_stream(here)
            return result

        return Started(finish)


@dataclass
class Block:
    """A block in a thread: the ends of its own graph."""

    thread: ThreadPoolExecutor
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    backward: Future[None] | None = None

    def begin(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Begins its backward."""
        ends = [(t, g) for t, g in zip(self.outputs, gradients, strict=True) if g is not None and t.requires_grad]
        self.backward = self.thread.submit(_backward, [t for t, _ in ends], [g for _, g in ends])
        self.outputs = []

    def wait(self) -> list[Tensor | None]:
        """The gradients of what it was given."""
        if self.backward is not None:
            self.backward.result()
        gradients, self.leaves = [leaf.grad for leaf in self.leaves], []
        return gradients


@one_process()
def _backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _threaded(
    thread: ThreadPoolExecutor, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Started:
    grad, block = torch.is_grad_enabled(), Block(thread)
    inputs = [t for t in tensors_of((args, kwargs)) if grad and t.requires_grad]
    anchor = _Start.apply(block, torch.zeros((), requires_grad=grad), *inputs)

    def leaf(t: Tensor) -> Tensor:
        if not (grad and t.requires_grad):
            return t
        made = t.detach().requires_grad_()
        block.leaves.append(made)
        return made

    args, kwargs = map_tensors(leaf, (args, kwargs))
    running = thread.submit(_run, grad, forward, args, kwargs)

    def finish() -> Any:
        result = running.result()
        tensors = tensors_of(result)
        if not grad or not any(t.requires_grad for t in tensors):
            return result
        block.outputs = tensors
        out = iter(_Finish.apply(block, anchor, *(t.detach() for t in tensors)))
        return map_tensors(lambda t: next(out), result)

    return Started(finish)


@one_process()
def _run(grad: bool, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.set_grad_enabled(grad):  # a thread has a grad mode of its own
        return forward(*args, **kwargs)


class _Start(torch.autograd.Function):
    """Where a block's graph is cut off from what it was given. Its backward waits for the block's."""

    @staticmethod
    def forward(ctx: Any, block: Block, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.block = block
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *ctx.block.wait()


class _Finish(torch.autograd.Function):
    """Where what a block gave goes on. Its backward begins the block's."""

    @staticmethod
    def forward(ctx: Any, block: Block, anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.block = block
        ctx.set_materialize_grads(False)
        out = tuple(t.detach() for t in outputs)
        ctx.mark_non_differentiable(
            *(t for t, whole in zip(out, block.outputs, strict=True) if not whole.requires_grad)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.block.begin(gradients)
        return None, torch.zeros(()), *(None for _ in gradients)
