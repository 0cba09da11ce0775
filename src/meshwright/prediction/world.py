"""``rehearsed_world``: a process group of any size in one process, whose collectives do nothing."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch.distributed as dist

from meshwright.errors import Findings


@contextlib.contextmanager
def rehearsed_world(rank: int, size: int) -> Iterator[None]:
    """A context in which this process is rank ``rank`` of ``size`` ranks. The other ranks do not exist.

    Private: torch has the backend ``fake`` for tests and dry runs. Its collectives return at once. Its store is not public.

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
    # For each group that it makes, torch wraps sys.excepthook: one more rank is printed before each line of an error.
    previous_hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            # The timeout of a group does not matter here, since nothing waits for another rank.
            warnings.filterwarnings("ignore", "Set timeout is now only supported for")
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = previous_hook
