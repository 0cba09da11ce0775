"""Local workers of a command, its error messages, and its exit."""

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

from meshwright.cli.inputs import Inputs
from meshwright.draw.console import console
from meshwright.errors import NonFiniteError, PlanError, ReplicaError, RowsError

if TYPE_CHECKING:  # torch and the workers are imported by the commands that need them
    from meshwright.workers.pool import LocalWorkers


@contextmanager
def reported_errors(*, quiet: bool = False) -> Iterator[None]:
    """Prints an expected error of the block without a traceback, and exits.

    Exit code 2 for a ``PlanError``, a person's mistake. Exit code 1 for a worker that failed, a loss that is not finite, and
    ranks that disagree.

    Args:
        quiet: print nothing. Under torchrun rank 0 alone prints.
    """
    from meshwright.workers.pool import WorkerError

    try:
        yield
    except (PlanError, WorkerError, NonFiniteError, ReplicaError, RowsError) as raised:
        error = getattr(raised, "plan_error", None) or raised
        if not quiet:
            console(stderr=True).print(Text(str(error)), soft_wrap=True)
        _write_error_file(error)
        raise typer.Exit(2 if isinstance(error, PlanError) else 1) from None


# torchrun names a file for each rank in this variable, and prints a summary of the errors that ranks write there
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def recorded(command: Callable[[], None]) -> Callable[[], None]:
    """Wraps a command such that torchrun's summary contains its exception. Without torchrun, returns the command itself."""
    if _ERROR_FILE not in os.environ:
        return command
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(command)


def _write_error_file(error: Exception) -> None:
    """Writes the message of an error to torchrun's error file, without a traceback: then torchrun's summary shows the message.

    Every rank writes its file, as torchrun ends the other ranks once the first one has failed.
    """
    if _ERROR_FILE not in os.environ:
        return
    data = {"message": {"message": str(error), "extraInfo": {"timestamp": str(int(time.time()))}}}
    with open(os.environ[_ERROR_FILE], "w", encoding="utf-8") as file:
        json.dump(data, file)


def end_at_once(code: object) -> None:
    """Exits the process without freeing the objects of torch and transformers one by one, which takes a second.

    Returns instead, and Python exits as usual, if other threads or processes run, if this process is a rank (its peers may
    wait), or if output cannot be flushed.
    """
    if not isinstance(code, int | None) or "RANK" in os.environ:
        return
    if threading.active_count() > 1 or multiprocessing.active_children():
        return
    try:
        atexit._run_exitfuncs()  # private: there is no public way to run the exit functions and continue
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return
    os._exit(code or 0)


@contextmanager
def workers(inputs: Inputs, *, threads: int | None = None) -> Iterator[LocalWorkers]:
    """A pool of local workers, one for each rank of the mesh.

    Args:
        inputs: the plan, whose mesh says how many, and the device.
        threads: number of torch threads of each worker. Default: an equal share of the cores.
    """
    import torch

    from meshwright.workers.pool import local_workers

    size = inputs.plan.mesh.size
    device = inputs.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with local_workers(size, device=device, threads=threads or max(1, (os.cpu_count() or 1) // size)) as pool:
        yield pool


def print_search_notes(inputs: Inputs) -> None:
    """Prints the plan that a search chose for ``mesh: auto``, and why, to stderr. Nothing if there was no search."""
    if inputs.searched is None:
        return
    for note in inputs.searched.notes:
        console(stderr=True).print(Text(note, style="dim"), soft_wrap=True)


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
