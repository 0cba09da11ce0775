"""``measured_link``: the link between the ranks of a group, measured by them.

Between processes of one machine bytes are moved by its cores: what a collective takes is what each process computes for it,
its backend's threads among them. So the clock is that of the process, which stands while the process waits: what else runs on
the machine is not the link's. Ranks that share cores take so much each (``play``: T₁ / cores).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from math import exp, log
from typing import TYPE_CHECKING

from meshwright.hardware.meter import LEAST, curve, deviation, rate, short, steady
from meshwright.hardware.profile import Link

if TYPE_CHECKING:
    import torch.distributed as dist

CALLS = 4  # collectives that are timed at once
MESSAGES = (4, *(4**i * 2**12 for i in range(7)))
"""Bytes of the all-reduces: 4 B, and 4 KiB to 16 MiB."""


def measured_link(
    group: dist.ProcessGroup | None = None, *, sizes: Sequence[int] = MESSAGES, rounds: int = 9, name: str = "gloo"
) -> Link:
    """The link between the ranks of a group, from all-reduces of growing size. Every rank of it calls this, and has the same.

    The smallest all-reduce is 2(n−1) steps of the latency and nothing else; what a larger one takes longer is its
    2(n−1)/n · S bytes (a ring). So it holds for groups of about this size, on this many processes. What all-gathers and
    reduce-scatters take is compared with what the link says of a ring (`Link.kinds`).

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
    times = [_seconds("all_reduce", max(1, size // 4), group, rounds) for size in sizes]
    table = torch.tensor([[statistics.median(t), deviation(t)] for t in times], dtype=torch.float64)
    dist.all_reduce(table, group=group)
    seconds, scatter = (table[:, 0] / ranks).tolist(), float((table[:, 1] / ranks).median())
    sent = [2 * (ranks - 1) / ranks * size for size in sizes[1:]]
    points = steady([(b, max(t - seconds[0], t / 20)) for b, t in zip(sent, seconds[1:], strict=True)])
    bandwidth = rate(points, least=seconds[0])
    link = Link(
        latency=short(seconds[0] / (2 * (ranks - 1))),
        bandwidth=bandwidth,
        efficiency=curve(points, bandwidth),
        scatter=round(min(1.0, max(LEAST, scatter)), 3),
        name=name,
        source=f"measured_link, {date.today().isoformat()}, {ranks} ranks",
    )
    return replace(
        link, kinds={kind: _times(link, kind, sizes[3::2], group, rounds) for kind in ("all_gather", "reduce_scatter")}
    )


def _times(link: Link, kind: str, sizes: Sequence[int], group: dist.ProcessGroup | None, rounds: int) -> float:
    """How many times as long a collective takes as a ring over the link would: over sizes, the geometric mean."""
    import torch
    import torch.distributed as dist

    ranks, ratios = dist.get_world_size(group), []
    for size in sizes:
        ring = (ranks - 1) * link.latency + link.seconds((ranks - 1) / ranks * size)
        ratios.append(statistics.median(_seconds(kind, max(1, size // 4), group, rounds)) / ring)
    mean = torch.tensor(log(statistics.geometric_mean(ratios)), dtype=torch.float64)
    dist.all_reduce(mean, group=group)
    return round(exp(float(mean) / ranks), 2)


def _seconds(kind: str, elements: int, group: dist.ProcessGroup | None, rounds: int) -> list[float]:
    """Seconds of this process for each of some collectives of so many float32, which all ranks begin together."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    part = torch.zeros(-(-elements // ranks))
    full = torch.zeros(part.numel() * ranks if kind != "all_reduce" else elements)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
    }
    times = []
    for _ in range(rounds + 1):
        dist.barrier(group)
        began = time.process_time()
        for _ in range(CALLS):
            calls[kind]()
        times.append(max(time.process_time() - began, 1e-7) / CALLS)
    return times[1:]
