"""What a long run must not pile up: tensors and graphs from step to step, threads from check to check."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.spmd.tensor import GlobalTensor
from meshwright.workers.pool import LocalWorkers
from zoo import ZOO


def alive() -> tuple[int, int]:
    """How many Views there are that are no parameter's, and how many other tensors that hold a graph."""
    kinds = [(type(o), o) for o in gc.get_objects() if issubclass(type(o), Tensor)]
    views = sum(kind is GlobalTensor and x._mw_parameter is None for kind, x in kinds)
    return views, sum(kind is not GlobalTensor and x.grad_fn is not None and not x.is_meta for kind, x in kinds)


def alive_soon(most: tuple[int, int]) -> tuple[int, int]:
    """The same, once it is no more than `most`, or after two seconds: gloo's threads let go of what they sent late."""
    end = time.monotonic() + 2.0
    while grew(most, counts := alive()) and time.monotonic() < end:
        time.sleep(0.01)
    return counts


def grew(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return any(now > then for then, now in zip(before, after, strict=True))


def alive_after_each_step(name: str, plan: str, steps: int) -> list[tuple[int, int]]:
    job = mw.parallelize(ZOO[name].build, plan, batch=ZOO[name].batch())
    optimizer = torch.optim.SGD(job.parameters(), lr=0.01)
    found = []
    gc.disable()  # so that a cycle counts too: memory that waits for the collector is missing elsewhere
    try:
        for _ in range(steps):
            job.step(ZOO[name].batch())
            job.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(alive_soon(found[1]) if len(found) > 1 else alive())
    finally:
        gc.enable()
    return found


# Tensors used again: by q, k and v; by every layer (a block called thrice, an encoder's states); after the forward
# (stashed); by a later write (slices that a fallback made); by a recomputation.
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(n, p, marks=() if p == "tp=2" or n in ("nanogpt", "stash") else pytest.mark.proof)
        for n in ("nanogpt", "albert", "encoder_decoder", "stash", "in_place", "checkpointed")
        for p in ("tp=2", "pp=2")
    ],
)
def test_no_tensor_of_a_step_outlives_the_next(name: str, plan: str, workers: LocalWorkers) -> None:
    for counts in workers.run(alive_after_each_step, name, plan, 12, ranks=2):
        assert not any(grew(counts[1], later) for later in counts[2:]), counts
        # The recorded forwards hold tensors that this model makes and writes to.
        recorded = plan == "pp=2" and name == "in_place"
        assert name == "stash" or recorded or counts[-1] == (0, 0), "only what a model keeps itself"


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.proof
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_workers_have_no_more_threads_after_twenty_checks(workers: LocalWorkers) -> None:
    entry, counts = ZOO["mlp"], []
    for number in range(20):
        report = mw.check(
            entry.build,
            entry.batch(),
            ["dp_shard=2,tp=2", "pp=2,dp_shard=2"][number % 2],
            workers=workers,
            dtype=torch.float64,
            steps=1,
        )
        assert report, report
        counts.append(workers.run(threads, ranks=4))
    assert counts[-1] == counts[3], counts
