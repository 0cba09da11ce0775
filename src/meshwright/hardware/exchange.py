"""``measured_link``: the link between the ranks of a group, measured by them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

from meshwright.hardware.meter import LEAST, curve, deviation, rate, short, steady
from meshwright.hardware.profile import Link

if TYPE_CHECKING:
    import torch.distributed as dist

MESSAGES = (4, *(4**i * 2**12 for i in range(7)))
"""Bytes of the all-reduces: 4 B, and 4 KiB to 16 MiB."""


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
    table = torch.tensor([[statistics.median(t), deviation(t)] for t in times], dtype=torch.float64)
    dist.all_reduce(table, group=group)
    seconds, scatter = (table[:, 0] / ranks).tolist(), float((table[:, 1] / ranks).median())
    sent = [2 * (ranks - 1) / ranks * size for size in sizes[1:]]
    points = steady([(b, max(t - seconds[0], t / 20)) for b, t in zip(sent, seconds[1:], strict=True)])
    bandwidth = rate(points, least=seconds[0])
    return Link(
        latency=short(seconds[0] / (2 * (ranks - 1))),
        bandwidth=bandwidth,
        efficiency=curve(points, bandwidth),
        scatter=round(min(1.0, max(LEAST, scatter)), 3),
        name=name,
        source=f"measured_link, {date.today().isoformat()}, {ranks} ranks",
    )


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
