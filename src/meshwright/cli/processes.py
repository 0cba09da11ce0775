"""Where a command works: local workers; and how it ends."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
        _leave_for_torchrun(error)
        raise typer.Exit(2 if isinstance(error, PlanError) else 1) from None


_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun gives one to each rank, and sums up what ranks leave there


def recorded(command: Callable[[], None]) -> Callable[[], None]:
    """The command; if this process is a rank of torchrun, an exception that it raises is in torchrun's summary too."""
    if _ERROR_FILE not in os.environ:
        return command
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(command)


def _leave_for_torchrun(error: Exception) -> None:
    """A person's mistake in torchrun's summary, which shows a message if there is no traceback; of every
    rank, as torchrun ends the others once the first has failed."""
    if _ERROR_FILE not in os.environ:
        return
    data = {"message": {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}}
    with open(os.environ[_ERROR_FILE], "w", encoding="utf-8") as file:
        json.dump(data, file)


def end_at_once(code: object) -> None:
    """Ends the process without freeing one by one the objects of torch and transformers, which takes a second.

    Returns if that would leave something undone: other threads or processes run, a rank's peers wait for it, or output
    cannot be written.
    """
    if not isinstance(code, int | None) or "RANK" in os.environ:
        return
    if threading.active_count() > 1 or multiprocessing.active_children():
        return
    try:
        atexit._run_exitfuncs()  # private: there is no public way to run what is to run at the end, and go on
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return
    os._exit(code or 0)


@contextmanager
def workers(given: Given, *, threads: int | None = None) -> Iterator[LocalWorkers]:
    """As many local workers as the mesh has ranks; they share the cores. ``threads``: of each; default its share of them."""
    import torch

    from meshwright.workers.pool import local_workers

    size = given.plan.mesh.size
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with local_workers(size, device=device, threads=threads or max(1, (os.cpu_count() or 1) // size)) as pool:
        yield pool


def tell_found(given: Given) -> None:
    """What was found for ``mesh: auto``, and why, beside the command's own output."""
    for note in given.searched.notes if given.searched is not None else ():
        console(stderr=True).print(Text(note, style="dim"), soft_wrap=True)


def cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
