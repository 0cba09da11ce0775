"""A worker: one process of a pool, which does one task after another for it.

    main thread   hello ─ import torch ─ ready ─┬─ take a task ─ fresh state, environment, process group ─┐
                                                │     function(*args, **kwargs)                           │
                                                │     answer (done | failed) ─ wait for "finish"          │
                                                └──── group destroyed, environment restored ─ idle ───────┘
    listener      hands the pool's messages to the main thread; ends the process when the pool is gone

A worker that is done keeps its process group until the pool says "finish", which it says when everyone has
answered: a peer that is still in a collective does not lose its connection. A worker that failed leaves its
group at once, so that its peers fail soon too.
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

STACK_SIGNAL = signal.SIGUSR1  # the pool asks with it for the stack a worker is in
LISTENER = "meshwright-listener"
_INIT_TIMEOUT = 60.0  # seconds in which all ranks of a run must have met
_GROUP_NAMES_A_RUN = 10_000


@dataclass(frozen=True)
class Task:
    """What a worker is told about a run; the function and its arguments follow as a payload."""

    run: int  # counts the runs of the pool, from 1
    rank: int
    ranks: int
    store: str  # the file through which the ranks meet; the run's own
    port: int  # free when the run began: for a function that makes its group by env://
    timeout: float
    device: str
    threads: int
    directory: str
    path: list[str]  # sys.path
    arguments: list[str]  # sys.argv


def report(value: object) -> None:
    """Tell the pool's `on_report` something while the function runs.

    Only rank 0's reports are sent; outside a worker nothing happens.
    """
    if _worker is not None and _worker.rank == 0:
        _worker.channel.send(("report",), pack(value))


def main(descriptor: int, stacks: int) -> None:
    """Be a worker process, given descriptors: of its socket, of the file for the stacks it is asked for."""
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
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank: int | None = None  # while it runs a function
        self.settings: Settings | None = None  # once torch is there
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._busy = False

    def listen(self) -> None:
        """Pass messages on, in a thread; leave no orphan when the pool closes its end or its process ends."""
        parent = os.getppid()
        while not self.channel.closed and os.getppid() == parent:
            # The parent's id tells more than the socket, which a process forked by the parent may hold open.
            select.select([self.channel], [], [], 1.0)
            for message in self.channel.receive():
                self._inbox.put(message)
        if self._busy:
            os.killpg(os.getpid(), signal.SIGKILL)  # with the processes that the function may have started
        self._inbox.put(None)

    def take(self) -> Message | None:
        """The next message; None when the pool has closed."""
        return self._inbox.get()

    def perform(self, task: Task, payload: memoryview) -> None:
        """One task: exactly one answer, then "idle" when the process is as it was before."""
        self.rank, self._busy = task.rank, True
        assert self.settings is not None
        with _surroundings(task, self.settings), contextlib.suppress(_FailedError):
            self._answer(task, payload)
        self.rank, self._busy = None, False
        self.channel.send(("idle",))

    def _answer(self, task: Task, payload: memoryview) -> None:
        try:
            function, args, kwargs = unpack(payload)
            with _process_group(task):
                try:
                    result = pack(function(*args, **kwargs))
                except BaseException as error:
                    self._fail(error)  # before the group goes: peers that fail for it come later
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
        when = time.monotonic()
        summary = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
        frames = error.__traceback__
        frames = (frames and frames.tb_next) or frames  # without the frame of this file
        details = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        # A person's mistake is told as it is. Other errors go as text alone: not all can be made anew elsewhere.
        mistake = pack(error) if type(error) in (PlanError, CheckpointError) else b""
        self.channel.send(("failed", when, summary, details), mistake)
        # Frames hold tensors and groups; a group that is still held keeps its connections, and peers wait.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        gc.collect()


class _FailedError(Exception):
    """The function failed, and the pool has been told."""


_worker: _Worker | None = None


# ---- what a function finds, and what it leaves behind ----


@contextlib.contextmanager
def _surroundings(task: Task, settings: Settings) -> Iterator[None]:
    """A rank's environment as torchrun sets it, the pool's directory and sys.path, torch as when started."""
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
        # Key by key: other threads may be reading the environment.
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
    """Threads, memory and random numbers as a task finds them, whatever ran earlier."""
    import torch

    torch.set_num_threads(task.threads)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other ranks may share the device
    # Other numbers on each rank, as in processes that were started apart: what needs them alike has to see to it.
    random.seed(task.rank + 1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(task.rank + 1)


def _forget_meshes() -> None:
    """Drop what DTensor remembers of the meshes of earlier runs.

    They compare equal from run to run while their groups do not live on; and every group that is kept alive keeps its
    threads, thousands after some hundred runs. Private: there is no public way to forget them.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names of torch warn where they are looked at
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed"):
                for cache in _caches(module):
                    cache.cache_clear()
    gc.collect()
    gc.freeze()  # what is left (modules, mostly) need not be looked through again after every run


@functools.cache  # a worker does thousands of tasks, and torch has some hundred modules
def _caches(module: ModuleType) -> tuple[Any, ...]:
    """The ``functools`` caches of a module and of its classes."""
    values = list(getattr(module, "__dict__", {}).values())  # (torch puts an object without one among its modules)
    values += [v for owner in values if isinstance(owner, type) for v in vars(owner).values()]
    inner = (getattr(value, "__func__", value) if isinstance(value, staticmethod) else value for value in values)
    return tuple(value for value in inner if isinstance(value, functools._lru_cache_wrapper))


def _count_groups_from(number: int) -> None:
    """Names of groups start again with each default group. A name that some cache kept from an earlier run must not find
    a group of this one, with other ranks: so names count on. Private: there is no public way to name a mesh's groups."""
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count += number


@contextlib.contextmanager
def _process_group(task: Task) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if task.device == "cuda":
        devices = torch.cuda.device_count()
        if devices == 0:
            raise RuntimeError("workers with device='cuda' see no CUDA device on this machine")
        torch.cuda.set_device(task.rank % devices)
        # NCCL wants a device a rank. (To a mesh over the whole world, of "gloo" alone, torch would give NCCL on a GPU.)
        backend = "cpu:gloo,cuda:nccl" if devices >= task.ranks and dist.is_nccl_available() else "cpu:gloo,cuda:gloo"
    # A file, since a TCPStore looks up the name of whoever connects: seconds, where name service is slow.
    store = dist.FileStore(task.store, task.ranks)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=min(_INIT_TIMEOUT, task.timeout)))
    # The pool watches the time and knows more: let it speak first.
    timeout = timedelta(seconds=min(task.timeout, 1e6) + 10)
    dist.init_process_group(backend, store=store, rank=task.rank, world_size=task.ranks, timeout=timeout)
    _count_groups_from(task.run * _GROUP_NAMES_A_RUN)
    # A rank that is connected may leave at once, while others still connect to each other and would lose it.
    dist.all_reduce(torch.zeros(()))
    try:
        yield
    finally:
        if dist.is_initialized():  # unless the function destroyed it
            dist.destroy_process_group()
        _forget_meshes()
