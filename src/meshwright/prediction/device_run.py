"""``run_on_device``: steps of one rank on a real device, without the other ranks: the memory and the time that they take there.

The run's own code, as in a rehearsal (rehearsal.py), but on real tensors. Parameters are random. A collective returns at once,
as if each rank had sent what this one sends; what other stages send is zeros. So a step takes the time of this rank's own work,
and not that of communication, nor of waiting for others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.code_state import code_state_kept
from meshwright.prediction.measure import UNSTEADY, cpu_peaks, tensors_of_job
from meshwright.prediction.rehearsal import RankRows, Rehearsal, job_alone, run_microbatches
from meshwright.prediction.world import rehearsed_world
from meshwright.runtime.job import Job
from meshwright.runtime.rows.batch import copied, mapped
from meshwright.runtime.rows.microbatches import Microbatches
from meshwright.runtime.weights.parameters import local_tensor, on_device

_SCALE = 0.02  # standard deviation of parameters: with it activations of usual models stay numbers


@dataclass(frozen=True)
class DeviceRun:
    """What a rank's step takes on a device.

    Attributes:
        device: its name.
        peaks: most bytes of tensors that live in each step, including the first ``UNSTEADY`` ones.
        reserved: most bytes that torch's allocator took from the device; 0 for the CPU.
        seconds: of each later step.
    """

    device: str
    peaks: tuple[int, ...]
    reserved: int
    seconds: tuple[float, ...]

    @property
    def peak(self) -> int:
        """The smallest peak of a step after the unsteady ones, as ``RankMeasurement.peak``."""
        return min(self.peaks[UNSTEADY:])

    @property
    def step_seconds(self) -> float:
        """The median of ``seconds``."""
        return statistics.median(self.seconds)

    def json(self) -> dict[str, Any]:
        """The run as plain values, for a JSON file."""
        return {
            "device": self.device,
            "peak": self.peak,
            "reserved": self.reserved,
            "seconds": self.step_seconds,
            "steps": list(self.seconds),
        }


def run_on_device(rehearsal: Rehearsal, rank: int, device: torch.device, steps: int = 3) -> DeviceRun:
    """Runs steps of a rank on a device.

    Args:
        rehearsal: the step.
        device: the CPU, or an accelerator of this machine.
        steps: number of steps whose memory counts, at least 1. They run after ``UNSTEADY`` others; as many more are timed.

    Raises:
        PlanError: this process is a rank of a run.
    """
    kept = code_state_kept(rehearsal.planned.model)
    with rehearsed_world(rank, rehearsal.recipe.mesh.size), kept, _zeros_received():
        job = job_alone(rehearsal, device, _allocated_with_numbers)
        rows = RankRows(rehearsal, rank).microbatches()
        rows = replace(rows, batches=[mapped(partial(_with_values, device), batch) for batch in rows.batches])
        step = partial(_step, rehearsal, job, rehearsal.optimizer(job.parameters()), rows)
        if device.type == "cpu":
            peaks, _ = cpu_peaks(step, tensors_of_job(job, rows.batches), UNSTEADY + steps)
            reserved = 0
        else:
            peaks = tuple(_accelerator_peak(step) for _ in range(UNSTEADY + steps))
            reserved = torch.accelerator.max_memory_reserved(device)
        return DeviceRun(_name(device), peaks, reserved, tuple(_seconds(step, device) for _ in range(steps)))


def _step(rehearsal: Rehearsal, job: Job, optimizer: torch.optim.Optimizer, rows: Microbatches) -> None:
    """A training step: forward, backward, clip, optimizer. Forwards get copies of the rows, as they may write to them."""
    run_microbatches(rehearsal, job, replace(rows, batches=copied(rows.batches)))
    if rehearsal.max_norm is not None:
        job.clip_grad_norm_(rehearsal.max_norm)
    optimizer.step()
    optimizer.zero_grad()


def _accelerator_peak(step: Callable[[], None]) -> int:
    torch.accelerator.reset_peak_memory_stats()
    step()
    return torch.accelerator.max_memory_allocated()


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    """The seconds of a step, until the device has ended its work."""
    begin = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _allocated_with_numbers(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; for a tensor on meta, random numbers of its shape (of an integer type, zeros)."""
    allocated = on_device(t, device)
    if t.is_meta:
        local = local_tensor(allocated).detach()
        with torch.no_grad():
            local.normal_(std=_SCALE) if local.is_floating_point() or local.is_complex() else local.zero_()
    return allocated


def _with_values(device: torch.device, t: Tensor) -> Tensor:
    """A tensor of the batch on a device; zeros in place of one on meta."""
    return torch.zeros_like(t, device=device) if t.is_meta else t.to(device)


@contextmanager
def _zeros_received() -> Iterator[None]:
    """A context in which what other stages send is zeros. The backend of a rehearsal leaves memory as it is, and numbers that
    happen to be there may be indices outside of a table."""
    receive = dist.irecv

    def zeros(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        t.zero_()
        return receive(t, *args, **kwargs)

    with patch.object(dist, "irecv", zeros):
        yield
