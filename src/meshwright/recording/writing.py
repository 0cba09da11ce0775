"""Writes a recording: ranks send their copies to rank 0, one full tensor at a time.

    facts of every rank ──► rank 0: views ──► every rank: which rank sends which view, in which order
    for each view: the ranks that hold its parts gather it; its writer sends it; rank 0 writes it

Rank 0 writes into a temporary folder, ``.NAME.recording``, and renames it at the end. So a recording is complete or absent.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.rank_agreement import RankAgreement
from meshwright.checkpoint.tensorfiles import TensorSpec, in_order, write_file
from meshwright.errors import Finding
from meshwright.layout import in_one_dim
from meshwright.recording.copies import TensorCopy
from meshwright.recording.folder import MANIFEST, is_recording
from meshwright.recording.views import View, Views, facts_of, views_of


@dataclass(frozen=True)
class Ranks:
    """The ranks that record together, or one plain process.

    Attributes:
        rank: this process.
        size: number of ranks.
        device: of the tensors that they send each other.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def here(cls) -> Ranks:
        """The ranks of the default process group; without one, this process alone."""
        if not dist.is_initialized():
            return cls(0, 1, torch.device("cpu"))
        backends = str(dist.get_backend_config())  # such as cpu:gloo,cuda:nccl
        on_host = "cpu" in backends or torch.accelerator.current_accelerator() is None
        device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
        assert device is not None
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def agreement(self) -> RankAgreement:
        return RankAgreement(dist.group.WORLD if self.size > 1 else None, "this recording")

    def gathered(self, value: Any) -> list[Any]:
        """On rank 0, the values of all ranks; on other ranks, an empty list. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values)
        return values or []

    def sent_to_rank_0(self, whole: Tensor | None, view: View) -> Tensor | None:
        """Sends a view from its writer to rank 0. Returns it on rank 0, None on other ranks.

        Args:
            whole: the tensor, on the writer.
        """
        if view.writer == 0:
            return whole if self.rank == 0 else None
        if self.rank == view.writer:
            assert whole is not None
            _send(_bytes(whole).to(self.device))
        if self.rank != 0:
            return None
        tensor = torch.empty(view.shape, dtype=getattr(torch, view.dtype))
        if tensor.numel():
            received = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=self.device)
            dist.recv(received, src=view.writer)
            _bytes(tensor).copy_(received)
        return tensor


def write_tensors(file: Path, copies: Mapping[str, TensorCopy], ranks: Ranks) -> Views:
    """Writes the copies of all ranks into one file. Collective.

    Args:
        copies: name → this rank's copy.

    Returns:
        The views in the file.

    Raises:
        CheckpointError: on every rank, if ranks have different tensors under the same name.
    """
    facts_by_rank = ranks.gathered(facts_of(copies))
    failed = Finding("this recording", "ranks could not agree on what they hold", "tensors that fit each other")
    views: Views = ranks.agreement.first(lambda: views_of(facts_by_rank), failed)
    by_key = {view.key: (name, view) for name, some in views.views.items() for view in some if view.key is not None}
    specs = [TensorSpec(str(key), *_stored(view)) for key, (_, view) in by_key.items()]

    def value(spec: TensorSpec) -> Tensor:
        name, view = by_key[spec.name]
        copy = copies.get(name)
        takes_part = copy is not None and (copy.layout.gathers or ranks.rank == view.writer)
        full = copy.full_tensor() if copy is not None and takes_part else None
        received = ranks.sent_to_rank_0(full, view)
        if received is None:
            return torch.empty(0)
        return torch.view_as_real(received.cpu().contiguous()) if received.is_complex() else received

    if ranks.rank == 0:
        write_file(file, specs, value)
    else:
        for spec in in_order(specs):
            value(spec)
    return views


def temporary_of(path: Path) -> Path:
    """The temporary folder of a recording that is not complete yet."""
    return path.with_name(f".{path.name}.recording")


def begin(path: Path) -> Path:
    """Creates an empty temporary folder for a recording."""
    temporary = temporary_of(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def publish(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest and renames the temporary folder to ``path``. A recording that exists there is removed."""
    temporary = temporary_of(path)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    if is_recording(path):
        earlier = path.with_name(f".{path.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        path.rename(earlier)
        temporary.rename(path)
        shutil.rmtree(earlier)
    else:
        temporary.rename(path)


def _stored(view: View) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of a view in the file. Complex numbers, which the format lacks, are stored as pairs of real ones."""
    dtype: torch.dtype = getattr(torch, view.dtype)
    return ((*view.shape, 2), dtype.to_real()) if dtype.is_complex else (view.shape, dtype)


def _bytes(t: Tensor) -> Tensor:
    """The tensor's memory as bytes."""
    return in_one_dim(t.detach()).view(torch.uint8)


def _send(data: Tensor) -> None:
    if data.numel():
        dist.send(data, dst=0)
