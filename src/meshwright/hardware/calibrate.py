"""Measuring this machine: ``calibrate`` what one process does by itself, ``measured_link`` what a group of them exchanges.

    profile = replace(calibrate(), node=link)     # link: what measured_link gave on the ranks of a group
    Path("cpu-local.yaml").write_text(profile.text())

A curve is made of calls of growing size. The highest rate of them is the peak, and each call's rate over it the efficiency of
its size. The clock is that of the measuring thread, which stands while the thread waits for a core: what else runs on the
machine is not its rate. Memory bandwidth and caches are shared with it all the same.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import accumulate
from math import hypot, log
from typing import TYPE_CHECKING

from meshwright.hardware.profile import Curve, Link, Profile
from meshwright.hardware.rates import LOCAL

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

SIDES = tuple(2**i for i in range(6, 12))
"""Sides of the matrices that are multiplied."""
LENGTHS = (64, 128, 256, 512, 1024)
"""Lengths of the sequences of the attentions."""
SIZES = tuple(4**i * 2**12 for i in range(9))
"""Bytes of the tensors that are copied and added: 4 KiB to 256 MiB."""
MESSAGES = (4, *(4**i * 2**12 for i in range(7)))
"""Bytes of the all-reduces: 4 B, and 4 KiB to 16 MiB."""

DTYPES = ("float32", "float64", "bfloat16")
HEADS, WIDTH = 4, 64  # of the attentions
CHAIN = 100  # functions of the chain from which the host's time is taken
ROUND = 2e-4  # seconds that a round takes at least: short calls are repeated
LEAST = 0.02  # scatter that is assumed in any case


@dataclass
class _Meter:
    """Times calls, and keeps how much they scatter.

    Attributes:
        rounds: how often each call is timed.
        budget: seconds for one curve; sizes that would exceed it are left out.
        host: seconds of a call that are not the device's, since a profile counts them by themselves.
    """

    rounds: int
    budget: float
    host: float = 0.0
    repeats: list[float] = field(default_factory=list)  # relative deviations of one call
    shapes: list[float] = field(default_factory=list)  # and of calls of the same size in another shape

    def seconds(self, run: Callable[[], object]) -> float:
        """The median of some rounds, after a call that warms up."""
        run()
        calls = max(1, int(ROUND / max(_timed(run, 1), 1e-7)))
        times = [_timed(run, calls) for _ in range(self.rounds)]
        self.repeats.append(_deviation(times))
        return statistics.median(times)

    def curve(
        self, sizes: Iterable[tuple[float, list[Callable[[], Callable[[], object]]]]]
    ) -> list[tuple[float, float]]:
        """(size, seconds) of growing sizes, each the mean of its calls.

        Args:
            sizes: a size with what makes a call of this size, for each shape that has it. They are made when it is their
                turn, since the largest take memory.
        """
        points: list[tuple[float, float]] = []
        until = time.perf_counter() + self.budget
        for size, shapes in sizes:
            began = time.perf_counter()
            seconds = [self.seconds(make()) for make in shapes]
            if len(seconds) > 1:
                self.shapes.append(log(max(seconds) / min(seconds)) / 2)
            mean = statistics.mean(seconds)
            points.append((size, max(mean - self.host, mean / 2)))
            # The next size takes up to eight times as long.
            if time.perf_counter() + 8 * (time.perf_counter() - began) > until:
                break
        return points

    @property
    def scatter(self) -> float:
        """Of repeated calls, and of calls of the same size in another shape, which a curve cannot tell apart."""
        shape = statistics.mean(d**2 for d in self.shapes) ** 0.5 if self.shapes else 0.0
        return round(min(1.0, max(LEAST, hypot(statistics.median(self.repeats), shape))), 3)


def calibrate(
    device: str = "cpu",
    *,
    sides: Sequence[int] = SIDES,
    lengths: Sequence[int] = LENGTHS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    budget: float = 5.0,
    devices_per_node: int = 8,
) -> Profile:
    """A profile of this machine, in which each device is a process with as many threads as torch has here. About 20 seconds.

    What calls take includes the memory that their results are put in, as in a model's forward. The link within the node is not
    measured, but that of ``LOCAL``, with half of it as scatter: ``measured_link`` measures it.

    Args:
        device: "cpu". GPUs are not measured here; their profiles ship.
        sides, lengths, sizes: see SIDES, LENGTHS and SIZES.
        rounds: how often each call is timed.
        budget: seconds for each of six curves; sizes that would exceed it are left out.
        devices_per_node: how many processes the profile's node has.
    """
    if device != "cpu":
        raise ValueError(f'calibrate measures "cpu"; given {device!r}. read_profile has the profiles of GPUs')
    import torch

    meter = _Meter(rounds, budget)
    meter.host, backward = _host(meter)
    products = {dtype: meter.curve(_products(dtype, sides)) for dtype in DTYPES}
    attentions = {dtype: meter.curve(_attentions(dtype, lengths)) for dtype in DTYPES[::2]}
    streams = _steady(meter.curve(_streams(sizes)))
    peak = {dtype: _rate(points, 4 * meter.host) for dtype, points in products.items()}
    bandwidth = _rate(streams, 4 * meter.host)
    threads = torch.get_num_threads()
    return Profile(
        name="cpu-local",
        source=f"calibrate, {platform.node()}, {platform.machine()}, torch {torch.__version__}",
        date=date.today().isoformat(),
        notes=f"{threads} thread{'' if threads == 1 else 's'} a process; the link is not measured",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        context=0,
        per_group=0,
        reserve=0.0,
        peak=peak,
        matmul={dtype: _curve(points, peak[dtype]) for dtype, points in products.items()},
        attention={dtype: _curve(points, peak[dtype]) for dtype, points in attentions.items()},
        bandwidth=bandwidth,
        streaming=_curve(streams, bandwidth),
        launch=0.0,  # on a CPU a call begins when the host is there
        host=meter.host,
        host_backward=backward,
        devices_per_node=devices_per_node,
        node=Link(LOCAL.latency / 2, LOCAL.link, Curve(((1.0, 1.0),)), 0.5, "gloo", "not measured: LOCAL"),
        network=None,
        scatter=meter.scatter,
        cores=max(1, _usable_cores() // threads),
    )


def _host(meter: _Meter) -> tuple[float, float]:
    """Seconds of one small function under autograd: in the forward, and of its backward."""
    import torch

    start = torch.ones(8, 8, requires_grad=True)

    def chain() -> Tensor:
        x = start
        for _ in range(CHAIN // 4):
            x = torch.relu((x * 1.5 + 1.0).t())
        return x

    whole = meter.seconds(lambda: chain().backward(torch.ones(8, 8)))
    forward = meter.seconds(chain)
    return _short(forward / CHAIN), _short(max(whole - forward, forward / 10) / CHAIN)


_Calls = Iterable[tuple[float, list[Callable[[], Callable[[], object]]]]]


def _products(dtype: str, sides: Sequence[int]) -> _Calls:
    """2·m·k·n flops: cubes, and products of four times as many rows and half the width."""
    import torch

    def product(m: int, k: int, n: int) -> Callable[[], object]:
        a, b = torch.randn(m, k).to(getattr(torch, dtype)), torch.randn(k, n).to(getattr(torch, dtype))
        return lambda: a @ b

    for s in sides:
        shapes = ((s, s, s), (4 * s, s // 2, s // 2))
        yield 2.0 * s**3, [lambda shape=shape: product(*shape) for shape in shapes]  # type: ignore[misc]


def _attentions(dtype: str, lengths: Sequence[int]) -> _Calls:
    """4·heads·length²·width flops."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attention(length: int) -> Callable[[], object]:
        q, k, v = (torch.randn(1, HEADS, length, WIDTH).to(getattr(torch, dtype)) for _ in range(3))
        return lambda: scaled_dot_product_attention(q, k, v)

    for length in lengths:
        yield 4.0 * HEADS * length**2 * WIDTH, [lambda length=length: attention(length)]  # type: ignore[misc]


def _streams(sizes: Sequence[int]) -> _Calls:
    """A copy reads and writes its size, an addition three times its size."""
    import torch

    def copy(size: int) -> Callable[[], object]:
        x = torch.ones(size // 4)
        return x.clone

    def addition(size: int) -> Callable[[], object]:
        x, y = torch.ones(size // 4), torch.ones(size // 4)
        return lambda: x + y

    for size in sizes:
        yield 2.0 * size, [lambda size=size: copy(size)]  # type: ignore[misc]
        yield 3.0 * size, [lambda size=size: addition(size)]  # type: ignore[misc]


def measured_link(
    group: dist.ProcessGroup | None = None, *, sizes: Sequence[int] = MESSAGES, rounds: int = 9, name: str = "gloo"
) -> Link:
    """The link between the ranks of a group, from all-reduces of growing size. Every rank of it calls this, and has the same.

    The smallest all-reduce is 2(n−1) steps of the latency and nothing else; what a larger one takes longer is its
    2(n−1)/n · S bytes (a ring). So it holds for groups of about this size, on this many processes.

    Args:
        group: default all ranks.
        sizes: bytes, from small to large; the first is for the latency.
        rounds: how often each is timed, after one that warms up.

    Raises ValueError where the group is one rank.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError("a link is measured between ranks, and the group has one")
    times = [_reduced(max(1, size // 4), group, rounds) for size in sizes]
    table = torch.tensor([[statistics.median(t), _deviation(t)] for t in times], dtype=torch.float64)
    dist.all_reduce(table, group=group)
    seconds, scatter = (table[:, 0] / ranks).tolist(), float((table[:, 1] / ranks).median())
    sent = [2 * (ranks - 1) / ranks * size for size in sizes[1:]]
    points = _steady([(b, max(t - seconds[0], t / 20)) for b, t in zip(sent, seconds[1:], strict=True)])
    source = f"measured_link, {date.today().isoformat()}, {ranks} ranks"
    latency, scatter = _short(seconds[0] / (2 * (ranks - 1))), round(min(1.0, max(LEAST, scatter)), 3)
    return Link(latency, _rate(points), _curve(points, _rate(points)), scatter, name, source)


def _reduced(elements: int, group: dist.ProcessGroup | None, rounds: int) -> list[float]:
    """Seconds of all-reduces of so many float32, which all ranks begin together."""
    import torch
    import torch.distributed as dist

    x, times = torch.zeros(elements), []
    for _ in range(rounds + 1):
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(x, group=group)
        times.append(time.perf_counter() - began)
    return times[1:]


def _timed(run: Callable[[], object], calls: int) -> float:
    """Seconds of this thread for one call, of some."""
    began = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - began) / calls


def _deviation(times: Sequence[float]) -> float:
    """The relative standard deviation, from the median of the deviations, which one outlier does not move."""
    middle = statistics.median(times)
    return 1.4826 * statistics.median(abs(t - middle) for t in times) / middle if middle else 0.0


def _steady(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points in the order of their sizes; none takes longer than a larger one, since disturbances only add time."""
    ordered = sorted(points)
    least = list(accumulate((seconds for _, seconds in reversed(ordered)), min))[::-1]
    return [(size, seconds) for (size, _), seconds in zip(ordered, least, strict=True)]


def _rate(points: Sequence[tuple[float, float]], least: float = 0.0) -> float:
    """The highest rate, of those that take some seconds at least: of shorter ones too much is the host's."""
    steady = _steady(points)
    return _short(max(size / seconds for size, seconds in steady if seconds >= least or seconds == steady[-1][1]))


def _curve(points: Sequence[tuple[float, float]], peak: float) -> Curve:
    return Curve(tuple((size, _short(min(1.0, size / seconds / peak))) for size, seconds in _steady(points)))


def _short(value: float) -> float:
    """With the digits that a measurement has."""
    return float(f"{value:.4g}")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
