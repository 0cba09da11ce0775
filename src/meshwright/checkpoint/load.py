"""Loading: verify what is there, compare it with what is here, and only then read; each rank its own slices.

open ─► fits? (every problem, on every rank, at once) ─► allocate the optimizer's state ─► read (DCP) ─► restore
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from meshwright.checkpoint.contents import Contents, Held
from meshwright.checkpoint.folder import Manifest, before, find, read_manifest
from meshwright.checkpoint.folder import verify as check
from meshwright.checkpoint.pieces import Piece, PieceLoader
from meshwright.checkpoint.save import RUN, loaded
from meshwright.checkpoint.storage import Reader, read_metadata
from meshwright.checkpoint.talk import RankAgreement, without_warning
from meshwright.errors import CheckpointError, Finding, Findings, nearest

_SHOWN = 8  # problems of a kind that are told one by one


@dataclass(frozen=True)
class Loaded:
    """What a load brought besides what it put in place.

    Attributes:
        step: optimizer steps that were done when it was saved.
        path: the checkpoint.
        extra: as given to save.
        notes: what a person should know: what could not be as it was.
        rows: how rows of a batch combine, where the run that was saved had found out.
    """

    step: int
    path: Path
    extra: Any = None
    notes: tuple[str, ...] = ()
    rows: str = "auto"


@dataclass(frozen=True)
class Stored:
    """A checkpoint on disk, verified."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Any, talk: RankAgreement, *, verify: bool = True) -> Stored:
        """The checkpoint at a path, or the newest in it; the ranks share the reading of it. Collective.

        Raises:
            CheckpointError: on every rank: there is none, or it is damaged.
        """
        failed = Finding(str(path), "it could not be read", "files that every rank can read")
        at = talk.first(lambda: find(path), failed)
        failed = replace(failed, where=str(at))
        stored = cls(at, talk.do(lambda: read_manifest(at), failed))
        if verify:
            talk.do(lambda: check(at, stored.manifest, part=talk.rank, parts=talk.size, moved=talk.moved), failed)
        talk.do(lambda: (stored.metadata, stored.run), failed)
        return stored

    @classmethod
    def newest_whole(cls, folder: Any, talk: RankAgreement, *, verify: bool = True) -> tuple[Stored, tuple[str, ...]]:
        """The newest checkpoint of a folder; if it is damaged, the one before, and so on. Collective.

        Returns:
            It, and a note for each that is damaged.

        Raises:
            CheckpointError: on every rank: there is none, or all are damaged.
        """
        failed = Finding(str(folder), "it could not be read", "a folder that rank 0 can read")
        newest = talk.first(lambda: find(folder), failed)
        damaged: list[CheckpointError] = []
        notes: list[str] = []
        for path in (newest, *talk.first(lambda: before(newest), failed)):
            try:
                return cls.open(path, talk, verify=verify), tuple(notes)
            except CheckpointError as error:
                damaged.append(error)
                first = error.findings[0]
                notes.append(
                    f"{path} cannot be gone on from, and the one before is taken: {first.where}: {first.given}"
                )
        raise CheckpointError([f for error in damaged for f in error.findings], "these checkpoints")

    @cached_property
    def metadata(self) -> Metadata:
        return read_metadata(self.path)

    @cached_property
    def run(self) -> Mapping[str, Any]:
        """What is no tensor of the model's, on the CPU. Nothing in it is code."""
        return loaded(self.path / RUN)

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        metadata = self.metadata.state_dict_metadata.get(name)
        return metadata if isinstance(metadata, TensorStorageMetadata) else None

    @cached_property
    def states(self) -> Mapping[str, Mapping[str, TensorStorageMetadata]]:
        """Name of a parameter → what its optimizer had for it."""
        states: dict[str, dict[str, TensorStorageMetadata]] = {}
        prefix = "optimizer.state."
        for name, known in self.metadata.state_dict_metadata.items():
            if name.startswith(prefix) and isinstance(known, TensorStorageMetadata):
                parameter, _, key = name.removeprefix(prefix).rpartition(".")
                states.setdefault(parameter, {})[key] = known
        return states

    def known_as(self, names: Iterable[str]) -> str | None:
        """Under which of a parameter's names it was saved."""
        return next((n for n in names if self.tensor(f"model.{n}") is not None), None)

    def read(self, pieces: Sequence[Piece], names: Mapping[str, str], talk: RankAgreement) -> None:
        """Into the pieces' own memory, each rank by itself. Collective."""
        failed = Finding(str(self.path), "it could not be read", "files that every rank can read")

        def read() -> None:
            with without_warning():
                planner = PieceLoader(pieces, names, talk.moved)
                dcp.load({}, storage_reader=Reader(self.path), planner=planner, no_dist=True)

        talk.do(read, failed)


def compare(stored: Stored, contents: Contents, every: Iterable[str], findings: Findings) -> None:
    """Adds to ``findings`` where the names and shapes of a model and a checkpoint differ.

    Args:
        every: all names of parameters and persistent buffers of the model, on any rank.
    """
    saved = {n.removeprefix("model.") for n in stored.metadata.state_dict_metadata if n.startswith("model.")}
    here = set(every)
    unexpected = sorted(saved - here)
    missing = []
    for held in contents.parameters:
        name = stored.known_as((held.name, *held.aliases))
        if name is None:
            missing.append(held.name)
        elif (known := stored.tensor(f"model.{name}")) is not None and tuple(known.size) != held.shape:
            findings.add(
                where=held.name,
                given=f"{tuple(known.size)} in {stored.path}",
                required=f"{held.shape}, as the model has it",
            )
    missing += [name for name, *_ in contents.buffers if name not in saved]
    for name in missing[:_SHOWN]:
        near = nearest(name, unexpected, 1)
        findings.add(
            where=name,
            given=f"not in {stored.path}" + (f", which has {near[0]}" if near else ""),
            required="every parameter and persistent buffer of the model",
        )
    _more(len(missing), "missing", findings)
    for name in unexpected[:_SHOWN]:
        findings.add(where=name, given=f"in {stored.path}", required="a parameter or persistent buffer of the model")
    _more(len(unexpected), "unexpected", findings)


def _more(count: int, kind: str, findings: Findings) -> None:
    if count > _SHOWN:
        findings.add(where="…", given=f"{count - _SHOWN} more that are {kind}", required="the same names on both sides")


def model_pieces(stored: Stored, contents: Contents) -> tuple[list[Piece], dict[str, str]]:
    """Where to read the model's values to, and under which names they were saved where those are others."""
    pieces, names = [], {}
    for held in contents.parameters:
        piece = held.piece()
        pieces.append(piece)
        names[piece.name] = f"model.{stored.known_as((held.name, *held.aliases))}"
    for name, module, key, _ in contents.buffers:
        known = stored.tensor(f"model.{name}")
        assert known is not None
        if getattr(module, key).shape != known.size:  # some forwards put another in its place
            setattr(module, key, getattr(module, key).new_empty(known.size))
        if not getattr(module, key).is_meta:
            pieces.append(Piece.whole(f"model.{name}", getattr(module, key).detach()))
    return pieces, names


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state as it will be: allocated, to be read into, then handed to it.

    Attributes:
        pieces, names: where to read to, and the names it was saved under.
        state: index of a parameter in the optimizer → its state.
        groups: as ``load_state_dict`` takes them.
    """

    optimizer: Optimizer
    pieces: tuple[Piece, ...]
    names: Mapping[str, str]
    state: Mapping[int, dict[str, Any]]
    groups: tuple[dict[str, Any], ...]

    def hand_over(self) -> None:
        """By the optimizer's own ``load_state_dict``, which moves what belongs on another device."""
        self.optimizer.load_state_dict({"state": dict(self.state), "param_groups": list(self.groups)})


def optimizer_state(
    stored: Stored, number: int, optimizer: Optimizer, contents: Contents, findings: Findings
) -> OptimizerState:
    """Allocates what an optimizer had for the parameters that are here."""
    saved = stored.run["optimizers"][number]
    held = {id(h.p): h for h in contents.parameters}
    index = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    pieces: list[Piece] = []
    names: dict[str, str] = {}
    state: dict[int, dict[str, Any]] = {}
    for line in (held[key] for key in index if key in held):
        name = stored.known_as((line.name, *line.aliases)) or line.name
        values: dict[str, Any] = dict(saved["scalars"].get(name, {}))
        for key, known in stored.states.get(name, {}).items():
            value = _allocated(line, key, known)
            if value is None or (piece := line.state(key, value)) is None:
                findings.add(
                    where=f"optimizer.state[{line.name}][{key!r}]",
                    given=f"{tuple(known.size)} in {stored.path}",
                    required=f"the parameter's shape, {line.shape}, as it is cut here",
                    fix="load without an optimizer",
                )
                continue
            values[key] = value
            pieces.append(piece)
            names[piece.name] = f"optimizer.state.{name}.{key}"
        if values:
            state[index[id(line.p)]] = values
    groups = []
    for number_, group in enumerate(optimizer.param_groups):
        lines = [held[id(p)] for p in group["params"] if id(p) in held]
        known_as = {stored.known_as((h.name, *h.aliases)) or h.name for h in lines}
        settings = _settings(number_, known_as, saved["groups"], findings)
        kept = {k: v for k, v in group.items() if k != "params"}
        settings = {k: _placed(v, kept.get(k)) for k, v in settings.items()}
        groups.append({**kept, **settings, "params": [index[id(p)] for p in group["params"]]})
    return OptimizerState(optimizer, tuple(pieces), names, state, tuple(groups))


def _allocated(line: Held, key: str, known: TensorStorageMetadata) -> Tensor | None:
    """A tensor such as the optimizer makes. Its count of steps is a plain number, whatever the parameter is; torch's own
    ``load_state_dict`` tells it by the same name."""
    dtype = known.properties.dtype
    if tuple(known.size) == line.shape and (line.shape or key != "step"):
        return torch.empty_like(line.p.detach(), dtype=dtype)
    if not known.size:
        return torch.empty((), dtype=dtype)
    return torch.empty(known.size, dtype=dtype, device=line.p.device) if line.is_whole else None


def _placed(value: Any, here: Any) -> Any:
    """A setting that is a tensor (a learning rate), on the device of the one that it takes the place of."""
    return value.to(here.device) if isinstance(value, Tensor) and isinstance(here, Tensor) else value


def _settings(number: int, names: set[str], groups: Sequence[dict[str, Any]], findings: Findings) -> dict[str, Any]:
    """The settings of the saved group that has these parameters; where it has none here, of that of the same number."""
    of = [g for g in groups if names & set(g["names"])] if names else list(groups[number : number + 1])
    settings = [{k: v for k, v in g.items() if k != "names"} for g in of]
    if any(str(s) != str(settings[0]) for s in settings):
        findings.add(
            where=f"optimizer.param_groups[{number}]",
            given=f"parameters that were in {len(of)} groups of other settings",
            required="parameters of one group",
            fix="make the groups as they were when it was saved",
        )
    return settings[0] if settings else {}


def restore(what: str, of: Any, stored: Stored, findings: Findings) -> Callable[[], None]:
    """What puts back the state of a scheduler or of data, later; adds to ``findings`` where it was not saved."""
    if of is None:
        return lambda: None
    state = stored.run.get(what)
    if state is None:
        findings.add(
            where=what,
            given=f"none in {stored.path}",
            required=f"what job.save(…, {what}=…) saved",
            fix=f"load without {what}=",
        )
    return lambda: of.load_state_dict(state)
