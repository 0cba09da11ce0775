"""A recording on its way to a folder: what ranks copied, one whole tensor at a time, to rank 0.

    facts of every rank ──► rank 0: views ──► every rank: who hands over which, in which order
    for each view: the ranks that hold its parts make it whole; its writer sends it; rank 0 writes it

All is written into a folder aside, ``.NAME.recording``; the last thing is one rename. So a recording is whole or not there.
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

from meshwright.checkpoint.talk import RankAgreement
from meshwright.checkpoint.tensorfiles import Entry, in_order, write_file
from meshwright.errors import Finding
from meshwright.layout import in_one_dim
from meshwright.recording.folder import MANIFEST, is_recording
from meshwright.recording.taken import Copied
from meshwright.recording.views import View, Views, facts_of, views_of


@dataclass(frozen=True)
class Ranks:
    """The processes that record together; a plain process is alone."""

    rank: int
    size: int
    device: torch.device  # of what they send each other

    @classmethod
    def here(cls) -> Ranks:
        if not dist.is_initialized():
            return cls(0, 1, torch.device("cpu"))
        carried = str(dist.get_backend_config())  # such as cpu:gloo,cuda:nccl
        on_host = "cpu" in carried or torch.accelerator.current_accelerator() is None
        device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
        assert device is not None
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def agreement(self) -> RankAgreement:
        return RankAgreement(dist.group.WORLD if self.size > 1 else None, "this recording")

    def gathered(self, value: Any) -> list[Any]:
        """On rank 0 every rank's value; elsewhere nothing. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values)
        return values or []

    def handed(self, whole: Tensor | None, view: View) -> Tensor | None:
        """The view on rank 0, from its writer."""
        if view.writer == 0:
            return whole if self.rank == 0 else None
        if self.rank == view.writer:
            assert whole is not None
            _send(_bytes(whole).to(self.device))
        if self.rank != 0:
            return None
        made = torch.empty(view.shape, dtype=getattr(torch, view.dtype))
        if made.numel():
            arrived = torch.empty(made.numel() * made.element_size(), dtype=torch.uint8, device=self.device)
            dist.recv(arrived, src=view.writer)
            _bytes(made).copy_(arrived)
        return made


def write_tensors(file: Path, copies: Mapping[str, Copied], ranks: Ranks) -> Views:
    """Writes what all ranks copied under these names; returns what is in the file. Collective.

    Raises CheckpointError on every rank: ranks have different tensors under the same name.
    """
    told = ranks.gathered(facts_of(copies))
    failed = Finding("this recording", "ranks could not agree on what they hold", "tensors that fit each other")
    views: Views = ranks.agreement.first(lambda: views_of(told), failed)
    written = {view.key: (name, view) for name, of in views.views.items() for view in of if view.key is not None}
    entries = [Entry(str(key), *_stored(view)) for key, (_, view) in written.items()]

    def value(entry: Entry) -> Tensor:
        name, view = written[entry.name]
        mine = copies.get(name)
        whole = mine.whole() if mine is not None and (mine.layout.gathers or ranks.rank == view.writer) else None
        arrived = ranks.handed(whole, view)
        if arrived is None:
            return torch.empty(0)
        return torch.view_as_real(arrived.cpu().contiguous()) if arrived.is_complex() else arrived

    if ranks.rank == 0:
        write_file(file, entries, value)
    else:
        for entry in in_order(entries):
            value(entry)
    return views


def aside_of(path: Path) -> Path:
    """Where a recording is written before it is whole."""
    return path.with_name(f".{path.name}.recording")


def begin(path: Path) -> Path:
    """An empty folder aside."""
    aside = aside_of(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish(path: Path, manifest: Mapping[str, Any]) -> None:
    """Puts the manifest into the folder aside, and the folder in its place; an earlier recording there goes."""
    aside = aside_of(path)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    if is_recording(path):
        earlier = path.with_name(f".{path.name}.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        path.rename(earlier)
        aside.rename(path)
        shutil.rmtree(earlier)
    else:
        aside.rename(path)


def _stored(view: View) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type in the file, which has no complex numbers."""
    dtype: torch.dtype = getattr(torch, view.dtype)
    return ((*view.shape, 2), dtype.to_real()) if dtype.is_complex else (view.shape, dtype)


def _bytes(t: Tensor) -> Tensor:
    return in_one_dim(t.detach()).view(torch.uint8)


def _send(data: Tensor) -> None:
    if data.numel():
        dist.send(data, dst=0)
