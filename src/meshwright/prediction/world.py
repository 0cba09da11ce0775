"""A world without other ranks: this process is any rank of a mesh of any size, and collectives move nothing."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch.distributed as dist

from meshwright.errors import Findings


@contextlib.contextmanager
def rehearsed_world(rank: int, size: int) -> Iterator[None]:
    """For its time this process is one rank of ``size``, without the others.

    Private: torch's backend ``fake``, whose collectives return at once, is for tests and dry runs; its store is not public.

    Raises:
        PlanError: this process is a rank of a run already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    findings = Findings("this rehearsal")
    if dist.is_initialized():
        findings.add(
            where="torch.distributed",
            given="this process is a rank of a run",
            required="a plain process: it stands for a rank of another world",
            fix="call it before torch.distributed.init_process_group, or in a process of its own",
        )
    findings.raise_if_any()
    # Torch puts the rank before each line of an error, once more with each group that it makes.
    previous_hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            # nothing waits for another rank here
            warnings.filterwarnings("ignore", "Set timeout is now only supported for")
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = previous_hook
