"""Where a command works: local workers; and how it ends where it fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from meshwright.cli.given import Given
from meshwright.draw.console import console
from meshwright.errors import NonFiniteError, PlanError, ReplicaError, RowsError

if TYPE_CHECKING:  # torch and the workers are imported by the commands that need them
    from meshwright.workers.pool import LocalWorkers


@contextmanager
def told(*, quiet: bool = False) -> Iterator[None]:
    """A person's mistake is told once, without a traceback: exit code 2; a worker's failure, a loss that is not finite,
    or ranks that came to differ, once: 1."""
    from meshwright.workers.pool import WorkerError

    try:
        yield
    except (PlanError, WorkerError, NonFiniteError, ReplicaError, RowsError) as raised:
        error = getattr(raised, "plan_error", None) or raised
        if not quiet:
            console(stderr=True).print(Text(str(error)), soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, PlanError) else 1) from None


@contextmanager
def workers(given: Given) -> Iterator[LocalWorkers]:
    """As many local workers as the mesh has ranks; they share the cores."""
    import torch

    from meshwright.workers.pool import local_workers

    size = given.plan.mesh.size
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with local_workers(size, device=device, threads=max(1, (os.cpu_count() or 1) // size)) as pool:
        yield pool
