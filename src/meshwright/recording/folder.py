"""``RecordingFolder``: a recording on disk.

runs/eight/
  manifest.json               the ranks and axes; loss and rows of each rank; the views of each tensor
  start.safetensors           parameters before the first step
  gradients-1.safetensors     gradients of step 1, as the optimizer got them
  parameters-1.safetensors    parameters after step 1
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

from meshwright.checkpoint.lazy_tensor import LazyTensor
from meshwright.checkpoint.tensorfiles import open_folder
from meshwright.errors import CheckpointError, Finding

MANIFEST = "manifest.json"
FORMAT = "meshwright recording 1"


@dataclass(frozen=True)
class RankValue:
    """The value of a tensor on some ranks; None if these ranks have no such tensor."""

    ranks: tuple[int, ...]
    value: Tensor | None


@dataclass(frozen=True)
class RecordingFolder:
    """A recording. Its manifest is read when it is opened, each tensor when it is asked for."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> RecordingFolder:
        """Opens a recording. Raises CheckpointError if the folder has no complete recording."""
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise _no_recording(path, f"{manifest['format']!r}")
        except FileNotFoundError:
            raise _no_recording(path, _state_of(path)) from None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise _no_recording(path, f"a damaged {MANIFEST}: {error}") from None
        return cls(path, manifest)

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])

    @property
    def axes(self) -> dict[str, int]:
        """Name → size, of the axes of DTensors and of those that a person named."""
        return dict(self.manifest["axes"])

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        steps: Sequence[Mapping[str, Any]] = self.manifest["steps"]
        return steps

    @property
    def parameters(self) -> Mapping[str, Mapping[str, Any]]:
        """Name of a parameter → shape, dtype, layout, aliases, whether it is trained."""
        parameters: Mapping[str, Mapping[str, Any]] = self.manifest["parameters"]
        return parameters

    def names(self, file: str) -> list[str]:
        return list(self._views(file))

    def views(self, file: str, name: str) -> list[RankValue]:
        """The values of a tensor: one; several, if ranks differ; none, if no rank has recorded it.

        Args:
            file: such as ``start``, ``gradients-1`` or ``parameters-1``.
            name: of the parameter.
        """
        return [RankValue(tuple(view["ranks"]), self._read(file, view)) for view in self._views(file).get(name, ())]

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
    """Whether the folder has a complete recording."""
    return (path / MANIFEST).is_file()


def _no_recording(path: Path, given: str) -> CheckpointError:
    fix = f'with mw.record(model, "{path.name}", optimizer=optimizer) as rec: ...'
    return CheckpointError([Finding(str(path), given, "a recording", fix)], "this comparison")


def _state_of(path: Path) -> str:
    """What the folder has in place of a recording, for an error."""
    if path.with_name(f".{path.name}.recording").exists():
        return "one was begun and never completed"
    return "no manifest.json in it" if path.exists() else "no such folder"
