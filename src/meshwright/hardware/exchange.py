"""``measured_link``: the ranks of a group measure the link between them. ``measured_skew``: how long they wait for each other.

Between processes of one machine, the cores move the bytes. So the time of a collective is the CPU time that each process
spends on it, including the threads of its backend. The clock is therefore CPU time of the process: it stops while the
process waits, and other programs on the machine do not count. If ranks share cores, each rank needs this time on a core
(``play``: T₁ / cores). How long ranks wait for each other is measured apart (``measured_skew``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from math import exp, log
from typing import TYPE_CHECKING

from meshwright.hardware.meter import LEAST, curve, deviation, four_digits, monotone_points, rate, timed
from meshwright.hardware.profile import Curve, Link

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

SEGMENTS = (4e-3, 16e-3, 64e-3)
"""CPU seconds that ranks compute between two collectives, when ``measured_skew`` times them."""

CALLS = 4  # number of collectives between two readings of the clock
MESSAGES = tuple(4**i * 2**12 for i in range(7))
"""Bytes of the timed all-reduces: 4 KiB to 16 MiB."""
_SEGMENT = 4  # bytes of an element of float32: gloo divides a tensor into segments of at least one element


def measured_link(
    group: dist.ProcessGroup | None = None, *, sizes: Sequence[int] = MESSAGES, rounds: int = 9, name: str = "gloo"
) -> Link:
    """Measures the link between the ranks of a group with all-reduces of growing size.

    Collective: every rank of the group calls this function, and all get equal links. The smallest all-reduce takes 2(n−1)
    times the latency; a larger one takes in addition the time of 2(n−1)/n · S bytes (a ring). The smallest has many times
    more elements than ranks, because gloo leaves out steps of tensors with fewer (`Link.segment`). All-gathers and
    reduce-scatters are timed too: `Link.kinds` is the ratio between their time and the time of a ring over this link.

    Args:
        group: default: all ranks.
        sizes: bytes of the all-reduces, from small to large. The first one measures the latency.
        rounds: how often each all-reduce is timed, after one warm-up round.
        name: name of the link.

    Raises:
        ValueError: the group has one rank.
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
    points = monotone_points([(b, max(t - seconds[0], t / 20)) for b, t in zip(sent, seconds[1:], strict=True)])
    bandwidth = rate(points, least=seconds[0])
    link = Link(
        latency=four_digits(seconds[0] / (2 * (ranks - 1))),
        bandwidth=bandwidth,
        efficiency=curve(points, bandwidth),
        scatter=round(min(1.0, max(LEAST, scatter)), 3),
        name=name,
        source=f"measured_link, {date.today().isoformat()}, {ranks} ranks",
        segment=_SEGMENT,
    )
    return replace(
        link, kinds={kind: _times(link, kind, sizes[2::2], group, rounds) for kind in ("all_gather", "reduce_scatter")}
    )


def measured_skew(
    group: dist.ProcessGroup | None = None,
    *,
    cores: int,
    segments: Sequence[float] = SEGMENTS,
    budget: float = 1.0,
) -> Curve:
    """Measures by which fraction ranks take longer from one collective to the next than they compute (`Profile.skew`).

    Collective: every rank of the group calls this function, and all get equal curves. Ranks compute, meet in an all-reduce of
    a few bytes, compute again. What they would take if all arrived together is the CPU time of all ranks over the cores that
    they can use. What they take more is the wait: a core that computes more slowly for a moment holds up all ranks, and so
    does a rank that is not scheduled on a core of which there are too few.

    Args:
        group: default: all ranks.
        cores: number of ranks that can compute at the same time.
        segments: CPU seconds between two collectives, from small to large.
        budget: CPU seconds of a rank for each of ``segments``.
    """
    import torch
    import torch.distributed as dist

    a, ranks = torch.rand(256, 256), dist.get_world_size(group)
    product = torch.tensor(timed(lambda: a @ a, 50), dtype=torch.float64)
    dist.all_reduce(product, group=group)
    fractions, points = [1.0], list[tuple[float, float]]()
    for segment in segments:
        products, meetings = max(1, round(segment * ranks / float(product))), max(8, round(budget / segment))
        wall, computed = _seconds_together(partial(_products, a, products), meetings, group)
        if points and four_digits(wall) <= points[-1][0]:
            continue  # other programs took the cores
        fractions.append(min(fractions[-1], max(LEAST / 10, 1 - computed / min(ranks, cores) / wall)))
        points.append((four_digits(wall), four_digits(fractions[-1])))
    return Curve(tuple(points))


def _products(matrix: Tensor, number: int) -> None:
    for _ in range(number):
        matrix @ matrix


def _seconds_together(
    compute: Callable[[], object], meetings: int, group: dist.ProcessGroup | None
) -> tuple[float, float]:
    """(wall seconds of the slowest rank, CPU seconds of all ranks) for ``compute`` and a small all-reduce after it."""
    import torch
    import torch.distributed as dist

    few = torch.ones(4)
    compute()
    dist.all_reduce(few, group=group)
    began, computed = time.perf_counter(), time.process_time()
    for _ in range(meetings):
        compute()
        dist.all_reduce(few, group=group)
    wall = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    total = torch.tensor(time.process_time() - computed, dtype=torch.float64)
    dist.all_reduce(wall, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    return float(wall) / meetings, float(total) / meetings


def _times(link: Link, kind: str, sizes: Sequence[int], group: dist.ProcessGroup | None, rounds: int) -> float:
    """Measured seconds of a collective / seconds of a ring over the link: the geometric mean over ``sizes`` and ranks."""
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
    """This process's CPU seconds for one collective over ``elements`` float32, for each of ``rounds`` rounds.

    A barrier before each round lets all ranks begin together. A warm-up round is left out.
    """
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
