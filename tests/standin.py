"""A device that this machine does not have, for tests of what the host does while one computes.

Tensors on it have shapes and no values (``FakeTensorMode``); tensors of the host are real. ``Waits`` writes down each place at
which the host would wait until the device has done all before:

    a value is read                     .item(), bool(x), .tolist(), x.cpu()
    host memory is copied, blocking     torch.tensor(..., device=d), x.to(d)       (CUDA waits for the stream, even for one number)
    an event, a stream                  .synchronize()

A size that follows from values (``x[mask]``) is an error. The device is called ``lazy``, which torch knows by name: autograd asks it for no stream, as it would ask CUDA, which this build
of torch may not have.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.described import tensors_among
from meshwright.plan import Plan
from meshwright.planned import Planned
from meshwright.planning.assumed import ASSUMED, SIZED
from meshwright.private import FakeTensor, FakeTensorMode, TorchDispatchMode, pytree, storage_of, unset_fake_temporarily
from meshwright.runtime.apply import apply
from meshwright.runtime.groups import make_groups
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import mapped
from meshwright.runtime.rows.loss import output_loss
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.spmd.tensor import GlobalTensor

DEVICE = torch.device("lazy", 0)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Waits(TorchDispatchMode):
    """On within a ``FakeTensorMode``.

    Attributes:
        seen: what the host waited for, by the place in the library: ``read in runtime/division.py: loss``.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self.seen: Counter[str] = Counter()
        self._last: tuple[Any, str] | None = None  # the memory of which a number was read last, and where

    def waited(self, what: str) -> None:
        self.seen[f"{what} in {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, GlobalTensor)) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = tensors_among((*args, *kwargs.values()))
        device = kwargs.get("device")
        if not any(isinstance(t, FakeTensor) for t in tensors) and (device is None or device.type != DEVICE.type):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in ASSUMED or func in SIZED:
            return self._read(func, args, kwargs)
        self._copied(func, args, kwargs)
        if func is _COPIES[1] and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                return args[0].fill_(1)  # what the host will read of the device
        return func(*args, **kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What is read is assumed: a whole number is zero, any other is one, a mask is all true."""
        if func is torch.ops.aten._local_scalar_dense.default:
            self._number(args[0])
            return args[0].dtype.is_floating_point or args[0].dtype == torch.bool
        self.waited("read")
        with unset_fake_temporarily():
            args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
            out = SIZED[func](Tensor.numel, *args, **kwargs) if func in SIZED else ASSUMED[func](*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: without_values(self._fake, t, DEVICE), out)

    def _number(self, t: Tensor) -> None:
        """A number is read; of those of one tensor, all at once."""
        read = storage_of(t), _place()
        if read != self._last:
            self.waited("read")
        self._last = read

    def _copied(self, func: Any, args: Any, kwargs: Any) -> None:
        if func not in _COPIES:
            return
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        there = kwargs.get("device") if func is _COPIES[0] else args[0].device
        source = args[0] if func is _COPIES[0] else args[1]
        if blocking and there is not None and source.device.type != there.type:
            self.waited("copy to the host" if there.type == "cpu" else "copy to the device")


class _Stream:
    """A stream, and an event, of a device that does all at once."""

    waits: Waits | None = None  # of the running test: torch remembers the device's module
    stream_id = device_index = device_type = 0  # FSDP2 of torch 2.15 asks for them

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None:
        if _Stream.waits is not None:
            _Stream.waits.waited("synchronize")

    def record(self, *_: Any) -> _Stream:
        return self

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    wait_stream = wait_event = wait
    record_event = record


_STREAM = _Stream()
_MODULE = SimpleNamespace(
    Stream=_Stream, Event=_Stream, current_device=lambda: 0, current_stream=lambda *_: _STREAM, device_count=lambda: 1,
    stream=lambda *_: contextlib.nullcontext(), set_device=lambda *_: None, is_available=lambda: True,
    is_initialized=lambda: False, synchronize=lambda *_: _STREAM.synchronize(), manual_seed=lambda *_: None,
    get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8), set_rng_state=lambda *_: None,
)  # fmt: skip
"""What torch has of a device, as ``torch.cuda``."""


@contextlib.contextmanager
def world(rank: int, size: int, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a rank of a world without other ranks, whose device is ``DEVICE``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(_Stream, "waits", waits)
    monkeypatch.setattr(torch, DEVICE.type, _MODULE, raising=False)
    monkeypatch.setitem(dist.Backend.backend_capability, "fake", ["cpu", "cuda", DEVICE.type])
    monkeypatch.setattr(dist, "all_gather_object", _said_by_all)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    dist.init_process_group(f"cpu:fake,{DEVICE.type}:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def without_values(fake: FakeTensorMode, t: Tensor, device: torch.device) -> Tensor:
    with fake:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)


def job_on_device(
    build: Callable[[], nn.Module],
    plan: Any,
    batch: Any,
    rank: int,
    fake: FakeTensorMode,
    waits: Waits,
    loss: Any = None,
) -> tuple[Job, Any]:
    """The job of a rank on ``DEVICE``, and the rank's rows there."""
    loss = loss or output_loss
    planned = Planned(build, Plan.parse(plan), batch, loss, whole_batch=True)

    def allocated(t: Tensor, device: torch.device) -> Tensor:
        if isinstance(t, (FakeTensor, DTensor)) and not t.is_meta:
            return t
        with fake:
            return torch.empty_like(t, device=device)

    groups = make_groups(planned.recipe, DEVICE)
    with fake, waits:
        job = apply(build, planned.recipe, groups, loss=loss, replanner=planned, rehearsed=allocated)
    rows = mapped(lambda t: without_values(fake, t, DEVICE), rows_of_rank(batch, planned.recipe, rank))
    return job, rows


def _said_by_all(everywhere: list[Any], said: Any, **_: Any) -> None:
    """All other ranks say what this one says."""
    everywhere[:] = [said] * len(everywhere)


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")


def _place() -> str:
    """The function of the library that asks, by its file; a test's own, where none does."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        _, found, place = frame.f_code.co_filename.rpartition("/meshwright/")
        if found:
            return f"{place}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "the caller"
