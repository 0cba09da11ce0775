"""Loading: verify the checkpoint, compare it with the model, and only then read. Each rank reads its own slices.

open ─► compare (every problem, on every rank, at once) ─► allocate the optimizer's state ─► read (DCP) ─► restore
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from meshwright.checkpoint.contents import Contents, LocalParameter
from meshwright.checkpoint.folder import Manifest, before, find, read_manifest
from meshwright.checkpoint.folder import verify as check
from meshwright.checkpoint.param_groups import same_settings, schedule_for, settings_of
from meshwright.checkpoint.pieces import LocalPiece, PieceLoader
from meshwright.checkpoint.rank_agreement import RankAgreement, without_warning
from meshwright.checkpoint.save import RUN, loaded
from meshwright.checkpoint.storage import Reader, read_metadata
from meshwright.described import dense, in_layout, is_sparse, layout_of
from meshwright.errors import CheckpointError, Finding, Findings, nearest

_SHOWN = 8  # most missing names, and most unexpected names, that an error lists one by one


@dataclass(frozen=True)
class LoadResult:
    """The result of a load, besides the restored model and optimizers.

    Attributes:
        step: number of optimizer steps before the save.
        path: the checkpoint.
        extra: the value that ``save`` got as ``extra``.
        notes: lines about state that could not be restored exactly.
        rows: how rows of a batch combine, if the saved run had tried it; else ``auto``.
    """

    step: int
    path: Path
    extra: Any = None
    notes: tuple[str, ...] = ()
    rows: str = "auto"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk, verified."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Any, agreement: RankAgreement, *, verify: bool = True) -> StoredCheckpoint:
        """Opens the checkpoint at a path, or the newest of a folder. Collective.

        Args:
            verify: whether to compare all files with their checksums. Each rank reads a share of the files.

        Raises:
            CheckpointError: on every rank, if there is no checkpoint, or if it is damaged.
        """
        failed = Finding(str(path), "it could not be read", "files that every rank can read")
        checkpoint = agreement.first(lambda: find(path), failed)
        failed = replace(failed, where=str(checkpoint))
        stored = cls(checkpoint, agreement.do(lambda: read_manifest(checkpoint), failed))

        def verify_share() -> None:
            check(
                checkpoint,
                stored.manifest,
                part=agreement.rank,
                parts=agreement.size,
                on_progress=agreement.on_progress,
            )

        if verify:
            agreement.do(verify_share, failed)
        agreement.do(lambda: (stored.metadata, stored.run), failed)
        return stored

    @classmethod
    def newest_undamaged(
        cls, folder: Any, agreement: RankAgreement, *, verify: bool = True
    ) -> tuple[StoredCheckpoint, tuple[str, ...]]:
        """Opens the newest checkpoint of a folder; if it is damaged, the one before, and so on. Collective.

        Returns:
            The checkpoint, and a note for each damaged one.

        Raises:
            CheckpointError: on every rank, if there is no checkpoint, or if all are damaged.
        """
        failed = Finding(str(folder), "it could not be read", "a folder that rank 0 can read")
        newest = agreement.first(lambda: find(folder), failed)
        damaged: list[CheckpointError] = []
        notes: list[str] = []
        for path in (newest, *agreement.first(lambda: before(newest), failed)):
            try:
                return cls.open(path, agreement, verify=verify), tuple(notes)
            except CheckpointError as error:
                damaged.append(error)
                problem = error.findings[0]
                notes.append(f"{path} is damaged; loading the checkpoint before it: {problem.where}: {problem.given}")
        raise CheckpointError([f for error in damaged for f in error.findings], "these checkpoints")

    @cached_property
    def metadata(self) -> Metadata:
        return read_metadata(self.path)

    @cached_property
    def run(self) -> Mapping[str, Any]:
        """The values of ``run.pt``, on the CPU: scheduler, data, settings of optimizers. Loading them runs no code."""
        return loaded(self.path / RUN)

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """DCP's metadata of a tensor: shape, dtype and chunks. None if the checkpoint has no tensor of this name."""
        metadata = self.metadata.state_dict_metadata.get(name)
        return metadata if isinstance(metadata, TensorStorageMetadata) else None

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, TensorStorageMetadata]]:
        """Name of a parameter → key of its optimizer state, such as ``exp_avg`` → DCP's metadata."""
        states: dict[str, dict[str, TensorStorageMetadata]] = {}
        prefix = "optimizer.state."
        for name, saved in self.metadata.state_dict_metadata.items():
            if name.startswith(prefix) and isinstance(saved, TensorStorageMetadata):
                parameter, _, key = name.removeprefix(prefix).rpartition(".")
                states.setdefault(parameter, {})[key] = saved
        return states

    def saved_name(self, names: Iterable[str]) -> str | None:
        """The first of a parameter's names under which the checkpoint has it; None if it has none of them."""
        return next((name for name in names if self.tensor(f"model.{name}") is not None), None)

    def read(self, pieces: Sequence[LocalPiece], names: Mapping[str, str], agreement: RankAgreement) -> None:
        """Reads values into the memory of this rank's pieces. Collective.

        Args:
            names: name of a piece → its name in the checkpoint. A piece that is absent has the same name there.
        """
        failed = Finding(str(self.path), "it could not be read", "files that every rank can read")

        def read() -> None:
            with without_warning():
                planner = PieceLoader(pieces, names, agreement.on_progress)
                dcp.load({}, storage_reader=Reader(self.path), planner=planner, no_dist=True)

        agreement.do(read, failed)


def compare(stored: StoredCheckpoint, contents: Contents, all_names: Iterable[str], findings: Findings) -> None:
    """Adds a finding for each difference between the names and shapes of a model and of a checkpoint.

    Args:
        contents: the model's contents on this rank.
        all_names: names of all parameters and persistent buffers of the model, on any rank.
    """
    saved = {n.removeprefix("model.") for n in stored.metadata.state_dict_metadata if n.startswith("model.")}
    unexpected = sorted(saved - set(all_names))
    missing = []
    for parameter in contents.parameters:
        name = stored.saved_name(parameter.names)
        if name is None:
            missing.append(parameter.name)
        elif (tensor := stored.tensor(f"model.{name}")) is not None and tuple(tensor.size) != parameter.shape:
            findings.add(
                where=parameter.name,
                given=f"{tuple(tensor.size)} in {stored.path}",
                required=f"{parameter.shape}, as the model has it",
            )
    missing += [name for name, *_ in contents.buffers if name not in saved]
    for name in missing[:_SHOWN]:
        similar = nearest(name, unexpected, 1)
        findings.add(
            where=name,
            given=f"not in {stored.path}" + (f", which has {similar[0]}" if similar else ""),
            required="every parameter and persistent buffer of the model",
        )
    _more(len(missing), "missing", findings)
    for name in unexpected[:_SHOWN]:
        findings.add(where=name, given=f"in {stored.path}", required="a parameter or persistent buffer of the model")
    _more(len(unexpected), "unexpected", findings)


def _more(count: int, kind: str, findings: Findings) -> None:
    """Adds a finding with the number of names that are not listed one by one."""
    if count > _SHOWN:
        findings.add(where="…", given=f"{count - _SHOWN} more that are {kind}", required="the same names on both sides")


def model_pieces(
    stored: StoredCheckpoint, contents: Contents
) -> tuple[list[LocalPiece], dict[str, str], list[Callable[[], None]]]:
    """The pieces to read the model's values into; name of a piece → its name in the checkpoint; and what to call when they
    have been read.

    A buffer with another shape than the saved one is replaced by an empty tensor of that shape; a sparse one, which is saved as
    a dense one, by a new one.
    """
    pieces, names, restores = [], {}, list[Callable[[], None]]()
    for parameter in contents.parameters:
        piece = parameter.piece()
        pieces.append(piece)
        names[piece.name] = f"model.{stored.saved_name(parameter.names)}"
    for name, module, key, _ in contents.buffers:
        saved = stored.tensor(f"model.{name}")
        assert saved is not None
        if getattr(module, key).shape != saved.size:  # a forward may assign a buffer of another shape
            setattr(module, key, getattr(module, key).new_empty(saved.size))
        buffer = getattr(module, key).detach()
        if not buffer.is_meta:
            value = torch.empty_like(dense(buffer)) if is_sparse(buffer) else buffer
            pieces.append(LocalPiece.of_full_tensor(f"model.{name}", value))
            if is_sparse(buffer):
                restores.append(partial(_give_sparse, module, key, value))
    return pieces, names, restores


def _give_sparse(module: nn.Module, key: str, value: Tensor) -> None:
    """Replaces a sparse buffer by one with these values."""
    setattr(module, key, in_layout(layout_of(getattr(module, key)), value))


@dataclass(frozen=True)
class OptimizerState:
    """The state that a load gives to an optimizer: allocated first, then read into, then handed to the optimizer.

    Attributes:
        pieces: the tensors to read into.
        names: name of a piece → its name in the checkpoint.
        state: index of a parameter in the optimizer → its state.
        groups: in the form that ``load_state_dict`` takes.
        saved: the number of groups in the checkpoint.
        sources: for each group, the index of that which it was there.
    """

    optimizer: Optimizer
    pieces: tuple[LocalPiece, ...]
    names: Mapping[str, str]
    state: Mapping[int, dict[str, Any]]
    groups: tuple[dict[str, Any], ...]
    saved: int
    sources: tuple[int, ...]

    def hand_over(self) -> None:
        """Calls the optimizer's own ``load_state_dict``, which moves tensors to their parameter's device."""
        self.optimizer.load_state_dict({"state": dict(self.state), "param_groups": list(self.groups)})

    def schedule(self, state: Any) -> Any:
        """The saved state of a scheduler of its learning rates, for its groups."""
        return schedule_for(state, self.saved, self.sources)


def optimizer_state(
    stored: StoredCheckpoint, number: int, optimizer: Optimizer, contents: Contents, findings: Findings
) -> OptimizerState:
    """Allocates the saved state of an optimizer, for the parameters of which this rank holds a part.

    Args:
        number: index of the optimizer among those that were saved.

    Adds a finding for state that does not fit the layout, and for a group whose parameters had different saved settings.
    """
    saved = stored.run["optimizers"][number]
    index = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    by_id = {id(local.parameter): local for local in contents.parameters}
    pieces: list[LocalPiece] = []
    names: dict[str, str] = {}
    state: dict[int, dict[str, Any]] = {}
    for parameter in (by_id[key] for key in index if key in by_id):
        name = stored.saved_name(parameter.names) or parameter.name
        values: dict[str, Any] = dict(saved["scalars"].get(name, {}))
        for key, tensor in stored.states.get(name, {}).items():
            value = _allocated(parameter, key, tensor)
            if value is None or (piece := parameter.state(key, value)) is None:
                findings.add(
                    where=f"optimizer.state[{parameter.name}][{key!r}]",
                    given=f"{tuple(tensor.size)} in {stored.path}",
                    required=f"the parameter's shape, {parameter.shape}, so that it can be sharded like the parameter",
                    fix="load without an optimizer",
                )
                continue
            values[key] = value
            pieces.append(piece)
            names[piece.name] = f"optimizer.state.{name}.{key}"
        if values:
            state[index[id(parameter.parameter)]] = values
    sources = _sources(stored, optimizer, saved["groups"], by_id, findings)
    groups = [
        {**_settings(group, saved["groups"], source), "params": [index[id(p)] for p in group["params"]]}
        for group, source in zip(optimizer.param_groups, sources, strict=True)
    ]
    return OptimizerState(optimizer, tuple(pieces), names, state, tuple(groups), len(saved["groups"]), sources)


def _sources(
    stored: StoredCheckpoint, optimizer: Optimizer, saved_groups: Sequence[dict[str, Any]], by_id: Mapping[int, LocalParameter],
    findings: Findings,
) -> tuple[int, ...]:  # fmt: skip
    """For each group of the optimizer, the index of the saved group that has its parameters; without parameters, its own.

    Args:
        by_id: id of a parameter → the parameter, if this rank holds a part of it.

    Adds a finding if the parameters of a group were in several, with different settings.
    """
    group_of = {name: i for i, saved in enumerate(saved_groups) for name in saved["names"]}
    settings, sources = [settings_of(saved) for saved in saved_groups], []
    for number, group in enumerate(optimizer.param_groups):
        parameters = [by_id[id(p)] for p in group["params"] if id(p) in by_id]
        names = {stored.saved_name(local.names) or local.name for local in parameters}
        having = sorted({group_of[name] for name in names if name in group_of})
        if not all(same_settings(settings[i], settings[having[0]]) for i in having):
            findings.add(
                where=f"optimizer.param_groups[{number}]",
                given=f"parameters that were in {len(having)} groups with different settings",
                required="parameters of one group",
                fix="make the groups as they were when it was saved",
            )
        sources.append(having[0] if having else number)
    return tuple(sources)


def _settings(group: Mapping[str, Any], saved_groups: Sequence[dict[str, Any]], source: int) -> dict[str, Any]:
    """The settings of a group, with those that were saved for it."""
    saved = settings_of(saved_groups[source]) if source < len(saved_groups) else {}
    own = {key: value for key, value in group.items() if key != "params"}
    return own | {key: _on_device_of(own.get(key), value) for key, value in saved.items()}


def _allocated(parameter: LocalParameter, key: str, saved: TensorStorageMetadata) -> Tensor | None:
    """An empty tensor for a saved tensor of optimizer state: sharded like the parameter, or whole. None for other shapes.

    ``step`` is a plain scalar, also if the parameter is one; torch's own ``load_state_dict`` makes the same exception by name.
    """
    dtype = saved.properties.dtype
    if tuple(saved.size) == parameter.shape and (parameter.shape or key != "step"):
        return torch.empty_like(parameter.parameter.detach(), dtype=dtype)
    if not saved.size:
        return torch.empty((), dtype=dtype)
    if parameter.is_full:
        return torch.empty(saved.size, dtype=dtype, device=parameter.parameter.device)
    return None


def _on_device_of(current: Any, saved: Any) -> Any:
    """The saved setting; if both are tensors (a learning rate), on the device of the current one."""
    return saved.to(current.device) if isinstance(saved, Tensor) and isinstance(current, Tensor) else saved


def restore(
    name: str, target: Any, stored: StoredCheckpoint, findings: Findings, change: Callable[[Any], Any] | None = None
) -> Callable[[], None]:
    """A function that restores a scheduler or data source (``target``) from the saved state ``name``; nothing if it is None.

    Args:
        change: the saved state → the state for this rank.

    Adds a finding if this state was not saved.
    """
    if target is None:
        return lambda: None
    state = stored.run.get(name)
    if state is None:
        findings.add(
            where=name,
            given=f"none in {stored.path}",
            required=f"what job.save(…, {name}=…) saved",
            fix=f"load without {name}=",
        )
    return lambda: target.load_state_dict(state if change is None else change(state))
