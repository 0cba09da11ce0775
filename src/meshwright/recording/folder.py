"""A recording as it stands on a disk.

runs/eight/
  manifest.json               who recorded what, loss and rows of each rank, and which views each tensor has
  start.safetensors           parameters before the first step
  gradients-1.safetensors     as the optimizer got them, in step 1
  parameters-1.safetensors    after it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.tensorfiles import open_folder
from meshwright.checkpoint.unread import LazyTensor
from meshwright.errors import CheckpointError, Finding

MANIFEST = "manifest.json"
FORMAT = "meshwright recording 1"


@dataclass(frozen=True)
class Seen:
    """A tensor as some ranks had it; ``value`` is None where they had none."""

    ranks: tuple[int, ...]
    value: Tensor | None


@dataclass(frozen=True)
class Recorded:
    """A recording, of which nothing but the manifest is read before it is asked for."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Recorded:
        """Raises CheckpointError where there is no whole recording."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise _none(path, f"{manifest['format']!r}")
        except FileNotFoundError:
            raise _none(path, _instead(path)) from None
        except (ValueError, KeyError, TypeError) as damaged:
            if isinstance(damaged, CheckpointError):
                raise
            raise _none(path, f"a damaged {MANIFEST}: {damaged}") from None
        return cls(path, manifest)

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])

    @property
    def axes(self) -> dict[str, int]:
        """Name → size of each axis that was met or given."""
        return dict(self.manifest["axes"])

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        steps: Sequence[Mapping[str, Any]] = self.manifest["steps"]
        return steps

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Name → shape, dtype, layout, aliases, whether it is trained."""
        parameters: Mapping[str, Mapping[str, Any]] = self.manifest["parameters"]
        return parameters

    def names(self, file: str) -> list[str]:
        return list(self._views(file))

    def views(self, file: str, name: str) -> list[Seen]:
        """The values of a tensor: one, or several where ranks differ; none where no rank knows it.

        Args:
            file: ``start``, ``gradients-1``, ``parameters-1``.
        """
        return [Seen(tuple(v["ranks"]), self._read(file, v)) for v in self._views(file).get(name, ())]

    def _views(self, file: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        views: Mapping[str, Sequence[Mapping[str, Any]]] = self.manifest["tensors"].get(file, {})
        return views

    def _read(self, file: str, view: Mapping[str, Any]) -> Tensor | None:
        if view["key"] is None:
            return None
        value = self._files(file)[view["key"]].read()
        return torch.view_as_complex(value) if getattr(torch, view["dtype"]).is_complex else value

    def _files(self, file: str) -> Mapping[str, LazyTensor]:
        if file not in self._opened:
            self._opened[file] = open_folder(self.path / f"{file}.safetensors")
        return self._opened[file]

    @cached_property
    def _opened(self) -> dict[str, Mapping[str, LazyTensor]]:
        return {}


def is_recording(path: Path) -> bool:
    """Whether a whole recording is there."""
    return (path / MANIFEST).is_file()


def _none(path: Path, given: str) -> CheckpointError:
    fix = f'with mw.record(model, "{path.name}", optimizer=optimizer) as rec: ...'
    return CheckpointError([Finding(str(path), given, "a recording", fix)], "this comparison")


def _instead(path: Path) -> str:
    if path.with_name(f".{path.name}.recording").exists():
        return "one was begun and never completed"
    return "no manifest.json in it" if path.exists() else "no such folder"
