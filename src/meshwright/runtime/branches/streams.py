"""``Streams``: runs blocks at the same time on one rank: on CUDA streams, or in threads on a CPU.

    start    when the model calls the block             its forward begins; the model continues
    finish   before anything takes the block's result   waits for the forward

On a GPU one thread queues everything, and autograd runs each backward on the stream of its forward. On a CPU autograd uses one
thread for each call of backward. So the block's graph is separated from the model's, and its backward is called in a thread of
its own. Two nodes of the model's graph stand for it:

    input ─► _Start ─► anchor ─► _Finish ─► output
    backward:  _Finish begins the block's backward, _Start waits for it; those of all blocks begin before the first wait
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.calls.exchange import RunningBlock
from meshwright.calls.structure import map_tensors, tensors_of
from meshwright.recipe import Recipe
from meshwright.runtime.weights.fsdp import needs_fsdp
from meshwright.spmd.one_process import one_process


def collectives_within(recipe: Recipe) -> bool:
    """Whether blocks may contain collectives."""
    return recipe.mesh.axis_size("tp") > 1 or needs_fsdp(recipe)


def note(recipe: Recipe, device: torch.device) -> str:
    """The note for a person whose plan uses streams; empty without streams."""
    if not recipe.streams:
        return ""
    if collectives_within(recipe):
        return (
            "blocks on streams run one after the other: blocks with collectives (tp, FSDP) cannot run concurrently, because "
            "all ranks must enter collectives in the same order"
        )
    if device.type != "cpu":
        return "blocks on streams run at the same time if one leaves part of the GPU free; large blocks gain nothing"
    return (
        f"blocks on streams run in threads: that pays if a block is large and leaves cores free; torch itself uses "
        f"{torch.get_num_threads()} of {os.cpu_count()} for each"
    )


class Streams:
    """The streams of one rank.

    Args:
        count: the number of streams.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self.cuda = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []
        self.threads = None if self.cuda else [ThreadPoolExecutor(1, f"stream-{i}") for i in range(count)]

    def start(
        self, stream: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RunningBlock:
        """Begins a block's forward."""
        if self.threads is None:
            return self._queued(self.cuda[stream], forward, args, kwargs)
        return _threaded(self.threads[stream], forward, args, kwargs)

    def _queued(
        self, stream: torch.cuda.Stream, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RunningBlock:
        """Queues a block's forward on a CUDA stream."""
        model_stream = torch.cuda.current_stream(self.device)
        stream.wait_stream(model_stream)
        for t in tensors_of((args, kwargs)):
            if t.is_cuda:
                t.record_stream(stream)  # its memory is not reused before the block has read it
        with torch.cuda.stream(stream):
            result = forward(*args, **kwargs)

        def finish() -> Any:
            using_stream = torch.cuda.current_stream(self.device)
            using_stream.wait_stream(stream)
            for t in tensors_of(result):
                if t.is_cuda:
                    t.record_stream(using_stream)
            return result

        return RunningBlock(finish)


@dataclass
class ThreadedBlock:
    """A block in a thread: the inputs (leaves) and outputs of its own graph, and its running backward."""

    thread: ThreadPoolExecutor
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    backward: Future[None] | None = None

    def begin(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Begins the backward of the block, for the gradients of its outputs."""
        pairs = [(t, g) for t, g in zip(self.outputs, gradients, strict=True) if g is not None and t.requires_grad]
        self.backward = self.thread.submit(_backward, [t for t, _ in pairs], [g for _, g in pairs])
        self.outputs = []

    def wait(self) -> list[Tensor | None]:
        """Waits for the backward. Returns the gradients of the block's inputs."""
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
) -> RunningBlock:
    """Begins a block's forward in a thread, with a graph of its own (see the top of this file)."""
    grad, block = torch.is_grad_enabled(), ThreadedBlock(thread)
    inputs = [t for t in tensors_of((args, kwargs)) if grad and t.requires_grad]
    anchor = _Start.apply(block, torch.zeros((), requires_grad=grad), *inputs)

    def as_leaf(t: Tensor) -> Tensor:
        if not (grad and t.requires_grad):
            return t
        leaf = t.detach().requires_grad_()
        block.leaves.append(leaf)
        return leaf

    args, kwargs = map_tensors(as_leaf, (args, kwargs))
    running = thread.submit(_run, grad, forward, args, kwargs)

    def finish() -> Any:
        result = running.result()
        tensors = tensors_of(result)
        if not grad or not any(t.requires_grad for t in tensors):
            return result
        block.outputs = tensors
        out = iter(_Finish.apply(block, anchor, *(t.detach() for t in tensors)))
        return map_tensors(lambda t: next(out), result)

    return RunningBlock(finish)


@one_process()
def _run(grad: bool, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.set_grad_enabled(grad):  # each thread has its own grad mode
        return forward(*args, **kwargs)


class _Start(torch.autograd.Function):
    """The node between a block's inputs and the anchor. Its backward waits for the block's backward."""

    @staticmethod
    def forward(ctx: Any, block: ThreadedBlock, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.block = block
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *ctx.block.wait()


class _Finish(torch.autograd.Function):
    """The node between the anchor and a block's outputs. Its backward begins the block's backward."""

    @staticmethod
    def forward(ctx: Any, block: ThreadedBlock, anchor: Tensor, *outputs: Tensor) -> Any:
        ctx.block = block
        ctx.set_materialize_grads(False)
        out = tuple(t.detach() for t in outputs)
        ctx.mark_non_differentiable(
            *(t for t, original in zip(out, block.outputs, strict=True) if not original.requires_grad)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.block.begin(gradients)
        return None, torch.zeros(()), *(None for _ in gradients)
