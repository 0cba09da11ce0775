"""``Job.save`` and ``Job.load``; ``save_checkpoint`` and ``load_checkpoint`` for plain modules.

One implementation serves both: all ranks save a job, and one process, which holds everything, saves a plain module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.checkpoint.contents import (
    Contents,
    Optimizers,
    as_optimizers,
    of_job,
    of_module,
    of_optimizer,
    scheduled_optimizer,
)
from meshwright.checkpoint.load import LoadResult, StoredCheckpoint, compare, model_pieces, optimizer_state, restore
from meshwright.checkpoint.pieces import LocalPiece
from meshwright.checkpoint.rank_agreement import RankAgreement
from meshwright.checkpoint.save import Saving, Snapshot, as_json, as_loaded, time_and_versions, write
from meshwright.checkpoint.staging import Staging
from meshwright.errors import CheckpointError, Finding, Findings
from meshwright.generators import Generators
from meshwright.mesh import Mesh
from meshwright.recipe import Recipe

if TYPE_CHECKING:
    from meshwright.runtime.sharded_model import ShardedModel


_SEED_STRIDE = 1_000_003  # a prime that is larger than most runs' number of steps: two seeds rarely give the same sum


@dataclass(frozen=True)
class Owner:
    """The side of a save or load that has the model: one rank of a job, or a plain process.

    Attributes:
        module: the model.
        contents: the parts of the model that this rank holds.
        names: of every parameter and persistent buffer, on any rank.
        rank: as the plan's mesh counts; 0 for a plain process.
        device: of this rank.
        random: the random generators of this process.
        recipe: of the job; None for a plain module.
        rows: how rows of a batch combine, if the job has tried it; else ``auto``.
    """

    module: nn.Module
    contents: Contents
    names: tuple[str, ...]
    rank: int
    device: torch.device
    random: Generators
    recipe: Recipe | None = None
    rows: str = "auto"

    @classmethod
    def of_job(cls, model: ShardedModel, random: Generators, rows: str) -> Owner:
        """The owner for a rank of a job. Parameters must be at rest: sharded, not gathered by FSDP2."""
        contents = of_job(model)
        names = (*model.recipe.by_name, *(name for name, *_ in contents.buffers))
        return cls(model.module, contents, names, model.rank, model.groups.device, random, model.recipe, rows)

    @classmethod
    def of_module(cls, module: nn.Module) -> Owner:
        """The owner for a plain process."""
        contents = of_module(module)
        names = [name for parameter in contents.parameters for name in parameter.names]
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        names += [name for name, *_ in contents.buffers]
        return cls(module, contents, tuple(names), 0, device, Generators(device, module))

    @property
    def mesh(self) -> Mesh:
        return Mesh.parse("tp=1") if self.recipe is None else self.recipe.mesh

    @property
    def branches(self) -> list[str]:
        """The submeshes of the branches, as text."""
        submeshes = None if self.recipe is None else self.recipe.places
        return [] if submeshes is None else [submeshes.spelled(branch) for branch in submeshes.branches]

    def layout(self) -> dict[str, Any]:
        """The layout as plain values, for the manifest."""
        aliases = {alias: parameter.name for parameter in self.contents.parameters for alias in parameter.aliases}
        if self.recipe is not None:
            aliases = {alias: line.name for line in self.recipe for alias in line.aliases}
        stages = [] if self.recipe is None else [s.where for s in self.recipe.stages]
        return {"mesh": dict(self.mesh.axes), "branches": self.branches, "stages": stages, "aliases": aliases}


def save(
    find_owner: Callable[[], Owner], agreement: RankAgreement, folder: str | os.PathLike[str], optimizers: Optimizers, *,
    step: int, scheduler: Any, data: Any, extra: Any, keep: int | None, staging: Staging | None = None,
) -> Saving:  # fmt: skip
    """Saves a checkpoint. See ``Job.save``. Collective.

    Args:
        find_owner: returns this rank's owner. Called within the agreement of ranks, since it may run code of the model.
        staging: copies the tensors first, and the rest of the save runs in a thread. None: the save is synchronous.
    """

    def collect() -> Snapshot:
        owner = find_owner()
        run = {
            name: source.state_dict()
            for name, source in (("scheduler", scheduler), ("data", data))
            if source is not None
        }
        findings = Findings("this checkpoint")
        _check_numbers(step, keep, findings)
        scheduled = scheduled_optimizer(scheduler, optimizers)
        snapshot = _snapshot(owner, optimizers, {**run, "extra": extra}, scheduled, findings)
        return snapshot if staging is None else snapshot.staged(staging)

    failed = Finding(str(folder), "it was not saved", "state_dict() and get_extra_state() without an error, and memory")
    snapshot = agreement.do(collect, failed)
    return Saving(lambda: write(snapshot, Path(folder), index(step), keep, agreement), wait=staging is None)


def _check_numbers(step: Any, keep: int | None, findings: Findings) -> None:
    """Adds a finding for a ``step`` or ``keep`` that is not a number in its range."""
    if not hasattr(step, "__index__") or index(step) < 0:
        findings.add(
            where="step",
            given=str(step),
            required="the number of optimizer steps that were done: 0 or more",
            fix="step=1",
        )
    if keep is not None and keep < 1:
        findings.add(
            where="keep", given=str(keep), required="the number of checkpoints to keep: at least 1", fix="keep=2"
        )


def _snapshot(
    owner: Owner, optimizers: Optimizers, run: Mapping[str, Any], scheduled: int | None, findings: Findings
) -> Snapshot:
    """Everything that this rank saves.

    Args:
        run: name → other values to save: scheduler, data, extra.
        scheduled: the number of the scheduler's optimizer.
        findings: the problems that are known already.

    Raises:
        CheckpointError: with ``findings``, and one for each value that cannot be saved.
    """
    contents = owner.contents
    originals = [of_optimizer(optimizer, contents, findings) for optimizer in as_optimizers(optimizers)]
    values = {"rows": owner.rows, "extra_state": contents.extra, **run}
    copies = as_loaded({**values, "optimizer": [(o.groups, o.scalars) for o in originals]}, findings)
    if findings:
        raise CheckpointError(findings, findings.subject)
    optimizer_contents = [
        replace(original, groups=groups, scalars=scalars)
        for original, (groups, scalars) in zip(originals, copies.pop("optimizer"), strict=True)
    ]
    states = [piece for optimizer in optimizer_contents for piece in optimizer.pieces]
    random = [
        LocalPiece.of_full_tensor(f"rng.{owner.rank}.{kind}", state) for kind, state in owner.random.tensors().items()
    ]
    pieces = [*contents.pieces(), *states, *random]
    texts = files(owner.module, owner.recipe)
    return Snapshot(pieces, optimizer_contents, copies, scheduled, texts, {**time_and_versions(), **owner.layout()})


def load(
    find_owner: Callable[[], Owner], agreement: RankAgreement, path: str | os.PathLike[str], optimizers: Optimizers, *,
    scheduler: Any, data: Any, verify: bool, or_before: bool = False,
) -> LoadResult:  # fmt: skip
    """Loads a checkpoint. See ``Job.load``. Collective.

    Args:
        find_owner: returns this rank's owner. Called within the agreement of ranks, since it may run code of the model.
    """
    if or_before:
        stored, damage_notes = StoredCheckpoint.newest_undamaged(path, agreement, verify=verify)
    else:
        stored, damage_notes = StoredCheckpoint.open(path, agreement, verify=verify), ()
    failed = Finding(str(stored.path), "it was not loaded", "get_extra_state() without an error, and memory")
    owner, load_plan = agreement.do(lambda: _load_plan(find_owner(), stored, optimizers, scheduler, data), failed)
    stored.read(load_plan.pieces, load_plan.names, agreement)
    failed = replace(failed, required="load_state_dict() and set_extra_state() that take what was saved")
    notes = agreement.do(lambda: _restore(owner, stored, load_plan), failed)
    return LoadResult(
        stored.manifest.step, stored.path, stored.run["extra"], (*damage_notes, *notes), stored.run["rows"]
    )


@dataclass(frozen=True)
class _LoadPlan:
    """The steps of loading a checkpoint that fits the model.

    Attributes:
        pieces: the tensors to read into. Those of optimizers and generators are allocated for this.
        names: name of a piece → its name in the checkpoint. A piece that is absent has the same name there.
        rng: kind of a generator → the piece of its state; empty if the layouts draw random numbers differently.
        restores: functions to call when all pieces have been read.
    """

    pieces: list[LocalPiece]
    names: dict[str, str]
    rng: dict[str, LocalPiece]
    restores: tuple[Callable[[], None], ...]


def _load_plan(
    owner: Owner, stored: StoredCheckpoint, optimizers: Optimizers, scheduler: Any, data: Any
) -> tuple[Owner, _LoadPlan]:
    """Compares a checkpoint with the model and its optimizers, and allocates the tensors to read into.

    Raises:
        CheckpointError: with everything that does not fit. Nothing has been changed.
    """
    contents, findings, current = owner.contents, Findings("this checkpoint"), as_optimizers(optimizers)
    compare(stored, contents, owner.names, findings)
    if len(current) > (saved := len(stored.run["optimizers"])):
        given = f"{saved} in {stored.path}, {len(current)} here"
        findings.add(where="optimizer", given=given, required="as many as were saved", fix="load without an optimizer")
    if findings:
        raise CheckpointError(findings, findings.subject)
    states = [optimizer_state(stored, i, optimizer, contents, findings) for i, optimizer in enumerate(current)]
    scheduled = scheduled_optimizer(scheduler, current)
    of_groups = None if scheduled is None else states[scheduled].schedule
    restores = [restore("scheduler", scheduler, stored, findings, of_groups), restore("data", data, stored, findings)]
    if findings:
        raise CheckpointError(findings, findings.subject)
    pieces, names, of_model = model_pieces(stored, contents)
    source = rng_source(stored.manifest.about, owner)
    rng = {} if source is None else dict(_rng(stored, source))
    pieces += [piece for state in states for piece in state.pieces] + list(rng.values())
    names |= {piece: saved_name for state in states for piece, saved_name in state.names.items()}
    return owner, _LoadPlan(pieces, names, rng, (*of_model, *(state.hand_over for state in states), *restores))


def _restore(owner: Owner, stored: StoredCheckpoint, load_plan: _LoadPlan) -> tuple[str, ...]:
    """Restores everything but the model's tensors, which have been read. Returns notes for a person."""
    for restore_one in load_plan.restores:
        restore_one()
    modules = dict(owner.module.named_modules())
    for name, value in stored.run["extra_state"].items():
        modules[name].set_extra_state(value)
    return _restore_generators(owner, stored, {kind: piece.local for kind, piece in load_plan.rng.items()})


def save_checkpoint(
    folder: str | os.PathLike[str], module: nn.Module, optimizer: Optimizers = None, *,
    step: int, scheduler: Any = None, data: Any = None, extra: Any = None, keep: int | None = None,
) -> Path:  # fmt: skip
    """Saves a plain module, like ``Job.save`` without a job. A job of any layout can load the checkpoint.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: it could not be written; or a value could not be loaded again.
    """
    saving = save(
        lambda: Owner.of_module(module), RankAgreement(None), folder, optimizer,
        step=step, scheduler=scheduler, data=data, extra=extra, keep=keep,
    )  # fmt: skip
    return saving.wait()


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizers = None, *,
    scheduler: Any = None, data: Any = None, verify: bool = True,
) -> LoadResult:  # fmt: skip
    """Loads a checkpoint of any layout into a plain module, like ``Job.load`` without a job.

    Raises:
        CheckpointError: it is damaged, or does not fit the model. Nothing has been changed.
    """
    return load(
        lambda: Owner.of_module(module),
        RankAgreement(None),
        path,
        optimizer,
        scheduler=scheduler,
        data=data,
        verify=verify,
    )


# --- files beside the tensors -----------------------------------------------------------------------------------------


def files(module: nn.Module, recipe: Recipe | None) -> dict[str, str]:
    """File name → text: the plan, the recipe, and the model's configuration if it has a ``to_json_string`` method."""
    texts = {} if recipe is None else {"plan.yaml": recipe.plan, "recipe.json": as_json(recipe)}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        write_json = getattr(getattr(module, attribute, None), "to_json_string", None)
        if write_json is None:
            continue
        text = write_json()
        if attribute == "config":
            kind = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))
            text = json.dumps({**json.loads(text), "architectures": [kind.__name__]}, indent=2)
        texts[name] = text
    return texts


# --- generators -------------------------------------------------------------------------------------------------------


def rng_source(about: Mapping[str, Any], owner: Owner) -> int | None:
    """The rank of the saved layout whose random state this rank continues with; None if the layouts draw differently.

    Random numbers depend on the data rank and the stage. All ranks of one tp group draw the same.
    """
    saved_mesh, mesh, rank = Mesh(tuple(about["mesh"].items())), owner.mesh, owner.rank
    if (saved_mesh, about["branches"]) == (mesh, owner.branches):
        return rank
    if owner.branches or about["branches"]:
        return None
    if (saved_mesh.data_size, saved_mesh.axis_size("pp")) != (mesh.data_size, mesh.axis_size("pp")):
        return None

    def data_rank_and_stage(mesh: Mesh, rank: int) -> tuple[int, int]:
        return mesh.data_index(rank), mesh.coordinate(rank).get("pp", 0)

    ours = data_rank_and_stage(mesh, rank)
    saved_ranks = range(saved_mesh.size)
    return next(saved for saved in saved_ranks if data_rank_and_stage(saved_mesh, saved) == ours)


def _rng(stored: StoredCheckpoint, source: int) -> Iterator[tuple[str, LocalPiece]]:
    """(kind of a generator, piece for its state), for the states that rank ``source`` saved."""
    prefix = f"rng.{source}."
    for name in stored.metadata.state_dict_metadata:
        if name.startswith(prefix) and (saved := stored.tensor(name)) is not None:
            yield (
                name.removeprefix(prefix),
                LocalPiece.of_full_tensor(name, torch.empty(saved.size, dtype=saved.properties.dtype)),
            )


def _restore_generators(owner: Owner, stored: StoredCheckpoint, rng: dict[str, Tensor]) -> tuple[str, ...]:
    """Restores the random state, or seeds anew from seed, step, data rank and stage if ``rng`` is empty. Returns notes."""
    if rng:
        owner.random.set_tensors(rng)
        return ()
    seed, rank = 0 if owner.recipe is None else owner.recipe.seed, owner.rank
    stage = owner.mesh.coordinate(rank).get("pp", 0)
    owner.random.start(seed * _SEED_STRIDE + stored.manifest.step, owner.mesh.data_index(rank), stage)
    return ("random numbers (dropout) are not those of the run that was saved: its layout draws them otherwise",)
