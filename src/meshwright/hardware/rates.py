"""``Hardware``: the few rates that a prediction of time needs, of one device and of the links between devices.

A prediction from them is of first order: it tells ten times from one, and not 1.1 from one. What an operation takes is

    operation + max(flops / rate, bytes / memory)

and what a collective takes is ``latency`` and what crosses a rank's link, at the rate of ``link``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MATMUL, COPY, REDUCED = 512, 1 << 27, 1 << 20  # what is measured: a side of matrices; bytes; elements of float32
ROUNDS = 9
VIEW, STEP = 6.0, 1300.0  # what a job adds to an operation, and to a step, in operations: docs/bench.md#branches


@dataclass(frozen=True)
class Hardware:
    """Rates of a device, as programs attain them, and of what lies between devices.

    Attributes:
        name: for a person.
        flops: floating-point operations of a product, a second.
        memory: bytes read and written, a second.
        link: bytes that a rank sends (and at the same time receives), a second.
        latency: seconds of a collective of hardly any bytes.
        operation: seconds that an operation takes, however small: Python, dispatch, launch.
        view: seconds that a job adds on the host to each operation of its forward, over any mesh; and ``step``: to a step,
            however small. 0 for what a layout is worth by itself, or where a GPU's queue hides the host.
    """

    name: str
    flops: float
    memory: float
    link: float
    latency: float
    operation: float
    view: float = 0.0
    step: float = 0.0

    @classmethod
    def measured(
        cls, device: str = "cpu", *, latency: float | None = None, link: float | None = None, dtype: str = "float32"
    ) -> Hardware:
        """This machine's rates, measured in about a second, as they are while nothing else runs.

        Where ``torch.distributed`` runs with several ranks, every rank calls it, and collectives are measured too, while
        the ranks compute side by side. Elsewhere what is not given is of gloo between processes of one machine. On a CPU,
        what a job adds is taken to be as many of this machine's operations as where it was measured (docs/bench.md).
        """
        import torch
        import torch.distributed as dist

        kind = getattr(torch, dtype)
        a, b = (torch.randn(MATMUL, MATMUL, device=device).to(kind) for _ in range(2))
        source, target = (torch.empty(COPY // 4, device=device) for _ in range(2))
        flops = 2 * MATMUL**3 / _seconds(lambda: a @ b, device)
        memory = 2 * COPY / _seconds(lambda: target.copy_(source), device)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            one, many = (torch.zeros(n, device=device) for n in (1, REDUCED))
            seconds = _seconds(lambda: dist.all_reduce(one), device, time.perf_counter)
            latency = latency or seconds
            ranks = dist.get_world_size()
            wire = 2 * (ranks - 1) / ranks * 4 * REDUCED
            link = link or wire / max(
                _seconds(lambda: dist.all_reduce(many), device, time.perf_counter) - seconds, 1e-9
            )
        operation = _operation(device)
        added = (VIEW * operation, STEP * operation) if device == "cpu" else (0.0, 0.0)
        return cls(
            f"this machine ({device})", flops, memory, link or LOCAL.link, latency or LOCAL.latency, operation, *added
        )


def _operation(device: str) -> float:
    """Seconds of a small operation that autograd records: a small chain's, forward and backward, over their number."""
    import torch

    x, count = torch.zeros(4, 4, device=device, requires_grad=True), 20

    def chain() -> None:
        y = x
        for _ in range(count):
            y = y * 2.0
        y.sum().backward()

    return _seconds(chain, device) / (2 * count + 2)


def _seconds(run: Callable[[], object], device: str, clock: Callable[[], float] | None = None) -> float:
    """The least of a few rounds, after one that warms up: what else runs on the machine is not its rate.

    ``clock``: default that of this thread on a CPU, so that it does not run while the thread waits for a core.
    """
    import torch

    clock = clock or (time.thread_time if device == "cpu" else time.perf_counter)
    times = []
    for _ in range(ROUNDS + 1):
        started = clock()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(clock() - started)
    return min(times[1:])


GPU_NODE = Hardware(
    "a node of H100 SXM",
    flops=0.6 * 989e12,
    memory=0.8 * 3.35e12,
    link=0.8 * 450e9,
    latency=30e-6,
    operation=5e-6,
)
"""Eight GPUs, bfloat16, eager PyTorch. NVIDIA's H100 data sheet (SXM): 989 Tflop/s dense in bfloat16, 3.35 TB/s of memory,
NVLink 900 GB/s in both directions together; of which programs attain 60 to 80 %. Latency and operation are what the host
takes: about 5 µs to dispatch an operation with its part of autograd, about 30 µs for a collective through
``torch.distributed``, with NCCL's own 10 to 20 µs. Orders of magnitude, not measured by this project."""

LOCAL = Hardware("2 processes on 2 cores, gloo", flops=9e10, memory=4e10, link=1e9, latency=150e-6, operation=3e-6)
"""In order of magnitude what ``measured`` gives for one core each of a server of 2026 (docs/bench.md)."""
