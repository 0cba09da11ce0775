"""``main``: the main function of a worker, a process of a pool. It performs one task after another.

    main thread   hello ─ import torch ─ ready ─┬─ take a task ─ fresh state, environment, process group ─┐
                                                │     function(*args, **kwargs)                           │
                                                │     answer (done | failed) ─ wait for "finish"          │
                                                └──── group destroyed, environment restored ─ idle ───────┘
    listener      passes the pool's messages to the main thread; ends the process if the pool is gone

A worker that is done keeps its process group until the pool sends "finish". The pool sends it when all ranks have answered, so
a peer that is still in a collective does not lose its connection. A worker that failed leaves its group at once, so that its
peers fail soon, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import queue
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from meshwright.errors import CheckpointError, PlanError
from meshwright.workers.channel import Channel, Message
from meshwright.workers.pickling import pack, unpack
from meshwright.workers.settings import Settings

STACK_SIGNAL = signal.SIGUSR1  # the pool sends it to get the stacks of a worker
LISTENER = "meshwright-listener"
_INIT_TIMEOUT = 60.0  # most seconds until all ranks of a run have joined the process group
_GROUP_NAMES_A_RUN = 10_000  # most names of process groups in a run


@dataclass(frozen=True)
class Task:
    """A worker's part in a run. The function and its arguments are in the body of the same message."""

    run: int  # counts the runs of the pool, from 1
    rank: int
    ranks: int
    store: str  # file of the ``FileStore`` through which the ranks meet; a new one for each run
    port: int  # was free when the run began: MASTER_PORT, for functions that make a group by env://
    timeout: float
    device: str
    threads: int
    directory: str
    path: list[str]  # sys.path
    arguments: list[str]  # sys.argv


def report(value: object) -> None:
    """Sends a value to the pool's `on_report` while the function runs.

    Only rank 0 sends its reports. Outside of a worker, this does nothing.
    """
    if _worker is not None and _worker.rank == 0:
        _worker.channel.send(("report",), pack(value))


def main(descriptor: int, stacks: int) -> None:
    """Runs a worker process until its pool is closed.

    Args:
        descriptor: of the socket to the pool.
        stacks: descriptor of the file to which faulthandler writes stacks.
    """
    global _worker
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    os.set_inheritable(descriptor, False)
    os.set_inheritable(stacks, False)
    _worker = _Worker(Channel(socket.socket(fileno=descriptor)))
    threading.Thread(target=_worker.listen, name=LISTENER, daemon=True).start()
    _worker.channel.send(("hello",))
    import torch.distributed  # the slow part of a start: about two seconds

    _worker.settings = Settings()
    _worker.channel.send(("ready",))
    seed = torch.initial_seed()
    while (message := _worker.take()) is not None:
        torch.manual_seed(seed)
        _worker.perform(message[0][1], message[1])


class _Worker:
    """The state of a worker process."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank: int | None = None  # while it performs a task
        self.settings: Settings | None = None  # set once torch is imported
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._busy = False

    def listen(self) -> None:
        """Passes messages to the main thread. Runs in another thread.

        If the pool closes the connection, or its process ends, this process ends, too.
        """
        parent = os.getppid()
        while not self.channel.closed and os.getppid() == parent:
            # The socket alone does not suffice: a process that the parent has forked may have it open, too.
            select.select([self.channel], [], [], 1.0)
            for message in self.channel.receive():
                self._inbox.put(message)
        if self._busy:
            os.killpg(os.getpid(), signal.SIGKILL)  # and the processes that the function has started
        self._inbox.put(None)

    def take(self) -> Message | None:
        """Waits for the next message and returns it; None if the pool is closed."""
        return self._inbox.get()

    def perform(self, task: Task, payload: memoryview) -> None:
        """Performs one task. Sends exactly one answer, and then "idle" once the state of the process is restored."""
        self.rank, self._busy = task.rank, True
        assert self.settings is not None
        with _surroundings(task, self.settings), contextlib.suppress(_FailedError):
            self._answer(task, payload)
        self.rank, self._busy = None, False
        self.channel.send(("idle",))

    def _answer(self, task: Task, payload: memoryview) -> None:
        """Calls the function of a task, and sends its result or its error. Raises _FailedError after an error."""
        try:
            function, args, kwargs = unpack(payload)
            with _process_group(task):
                try:
                    result = pack(function(*args, **kwargs))
                except BaseException as error:
                    self._fail(error)  # before the group is destroyed: peers that fail because of that report later
                    raise _FailedError from None
                self.channel.send(("done",), result)
                self.take()  # "finish"
        except _FailedError:
            raise
        except BaseException as error:
            self._fail(error)
            raise _FailedError from None
        finally:
            del payload

    def _fail(self, error: BaseException) -> None:
        """Sends an error to the pool, and frees the objects that its frames hold."""
        when = time.monotonic()
        summary = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
        frames = error.__traceback__
        frames = (frames and frames.tb_next) or frames  # without the frame of this file
        details = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        # An error in the user's input is sent as an object. Others are sent as text only: not all of them can be unpickled.
        user_error = pack(error) if type(error) in (PlanError, CheckpointError) else b""
        self.channel.send(("failed", when, summary, details), user_error)
        # Frames refer to tensors and groups. A group keeps its connections while there is a reference, and peers would wait.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()


class _FailedError(Exception):
    """The function failed, and the error has been sent to the pool."""


_worker: _Worker | None = None


# ---- the environment of a task ----


@contextlib.contextmanager
def _surroundings(task: Task, settings: Settings) -> Iterator[None]:
    """Sets the environment as torchrun does, the directory, ``sys.path`` and ``sys.argv`` of the pool, and torch's settings.

    Restores the environment afterwards.
    """
    environment = dict(os.environ)
    os.environ.update(_environment(task))
    os.chdir(task.directory)
    sys.path[:] = task.path
    sys.argv[:] = task.arguments
    settings.restore()
    _fresh_torch(task)
    try:
        yield
    finally:
        # Only changed keys, one by one: other threads may read the environment at the same time.
        for key in os.environ.keys() | environment.keys():
            if key not in environment:
                del os.environ[key]
            elif os.environ.get(key) != environment[key]:
                os.environ[key] = environment[key]


def _environment(task: Task) -> dict[str, str]:
    return {
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(task.ranks),
        "LOCAL_WORLD_SIZE": str(task.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
    }


def _fresh_torch(task: Task) -> None:
    """Sets torch's number of threads, frees cached GPU memory, and seeds Python and NumPy, independently of earlier tasks."""
    import torch

    torch.set_num_threads(task.threads)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other ranks may share the device
    # Another seed on each rank, as in separately started processes: code that needs equal numbers must set a seed.
    random.seed(task.rank + 1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(task.rank + 1)


def _forget_meshes() -> None:
    """Clears DTensor's caches of the meshes of earlier runs.

    Meshes of different runs compare equal, but the groups of an earlier run are destroyed. And each group in a cache keeps its
    threads: thousands after some hundred runs. Private: torch has no public function that clears these caches.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some attributes of torch warn when they are read
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed"):
                for cache in _caches(module):
                    cache.cache_clear()
    gc.collect()
    gc.freeze()  # so that later collections skip the remaining objects, most of them modules


@functools.cache  # cached: a worker performs thousands of tasks, and torch has some hundred modules
def _caches(module: ModuleType) -> tuple[Any, ...]:
    """The ``functools`` caches of a module and of its classes."""
    values = list(getattr(module, "__dict__", {}).values())  # (torch puts an object without one among its modules)
    values += [v for owner in values if isinstance(owner, type) for v in vars(owner).values()]
    inner = (getattr(value, "__func__", value) if isinstance(value, staticmethod) else value for value in values)
    return tuple(value for value in inner if isinstance(value, functools._lru_cache_wrapper))


def _count_groups_from(number: int) -> None:
    """Makes torch number the names of process groups from ``number`` on.

    By default the numbers start again with each default group. Then a cache with a group's name from an earlier run would get a
    group of this run, with other ranks. Private: torch has no public function that names the groups of a mesh.
    """
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count += number


@contextlib.contextmanager
def _process_group(task: Task) -> Iterator[None]:
    """Makes the default process group of a run, and destroys it afterwards."""
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if task.device == "cuda":
        devices = torch.cuda.device_count()
        if devices == 0:
            raise RuntimeError("workers with device='cuda' see no CUDA device on this machine")
        torch.cuda.set_device(task.rank % devices)
        # NCCL needs one device for each rank. (If the backend were only "gloo", torch would use NCCL for a mesh of all ranks.)
        backend = "cpu:gloo,cuda:nccl" if devices >= task.ranks and dist.is_nccl_available() else "cpu:gloo,cuda:gloo"
    # A FileStore, as a TCPStore looks up the host name of each client, which takes seconds if name service is slow.
    store = dist.FileStore(task.store, task.ranks)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=min(_INIT_TIMEOUT, task.timeout)))
    # Longer than the timeout of the pool: its error says more.
    timeout = timedelta(seconds=min(task.timeout, 1e6) + 10)
    dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.ranks, timeout=timeout)
    _count_groups_from(task.run * _GROUP_NAMES_A_RUN)
    # A barrier: without it, a connected rank could leave while others still connect to it.
    dist.all_reduce(torch.zeros(()))
    try:
        yield
    finally:
        if dist.is_initialized():  # unless the function destroyed it
            dist.destroy_process_group()
        _forget_meshes()
