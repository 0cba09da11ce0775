"""Saving and loading whole: ``Job.save`` and ``Job.load``; ``save_checkpoint`` and ``load_checkpoint`` for plain modules.

Both are one: a job is saved by all its ranks, a plain module by the one process that holds all of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.checkpoint.contents import (
    Contents,
    Optimizers,
    as_optimizers,
    generators,
    of_job,
    of_module,
    of_optimizer,
    set_generators,
)
from meshwright.checkpoint.load import Loaded, Stored, compare, model_pieces, optimizer_state, restore
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.save import Saving, Snapshot, Talk, about, as_json, check_loadable, write
from meshwright.errors import Findings
from meshwright.mesh import Mesh
from meshwright.recipe import Recipe

if TYPE_CHECKING:
    from meshwright.run.job import Job


@dataclass(frozen=True)
class Owner:
    """Who saves or loads: one rank of a job, or a plain process.

    Attributes:
        contents: what of the module is here.
        names: of every parameter and persistent buffer, on any rank.
        recipe: None for a plain module.
        rows: how rows combine, where that is known.
    """

    module: nn.Module
    contents: Contents
    names: tuple[str, ...]
    talk: Talk
    device: torch.device
    recipe: Recipe | None = None
    rows: str = "auto"

    @classmethod
    def of_job(cls, job: Job) -> Owner:
        """A rank of a job, whose parameters are at rest."""
        contents = of_job(job)
        names = (*job.recipe.by_name, *(name for name, *_ in contents.buffers))
        return cls(job.module, contents, names, Talk(job.groups.files), job.groups.device, job.recipe, job.rows)

    @classmethod
    def of_module(cls, module: nn.Module) -> Owner:
        """A plain process."""
        contents = of_module(module)
        names = [n for held in contents.parameters for n in (held.name, *held.aliases)]
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        return cls(module, contents, (*names, *(name for name, *_ in contents.buffers)), Talk(None), device)

    @property
    def mesh(self) -> Mesh:
        return Mesh.parse("tp=1") if self.recipe is None else self.recipe.mesh

    @property
    def branches(self) -> list[str]:
        places = None if self.recipe is None else self.recipe.places
        return [] if places is None else [places.spelled(p) for p in places.branches]

    def layout(self) -> dict[str, Any]:
        """The layout, as the manifest tells it."""
        aliases = {alias: held.name for held in self.contents.parameters for alias in held.aliases}
        if self.recipe is not None:
            aliases = {alias: line.name for line in self.recipe for alias in line.aliases}
        stages = [] if self.recipe is None else [s.where for s in self.recipe.stages]
        return {"mesh": dict(self.mesh.axes), "branches": self.branches, "stages": stages, "aliases": aliases}


def save(
    owner: Owner, folder: str | os.PathLike[str], optimizers: Optimizers, *,
    step: int, scheduler: Any, data: Any, extra: Any, keep: int | None, wait: bool,
) -> Saving:  # fmt: skip
    """See ``Job.save``. Collective over the owner's processes."""
    contents, talk, findings = owner.contents, owner.talk, Findings("this checkpoint")
    found = [of_optimizer(o, contents, findings) for o in as_optimizers(optimizers)]
    run = {"rows": owner.rows, "extra_state": contents.extra, "extra": extra}
    run |= {k: v.state_dict() for k, v in (("scheduler", scheduler), ("data", data)) if v is not None}
    check_loadable({**run, "optimizer": [(o.groups, o.scalars) for o in found]}, findings)
    if keep is not None and keep < 1:
        findings.add(where="keep", given=str(keep), required="how many checkpoints to keep: at least 1", fix="keep=2")
    talk.agree(findings)
    states = [piece for o in found for piece in o.pieces]
    pieces = [*contents.pieces(), *states, *generators(talk.rank, owner.device)]
    snapshot = Snapshot(pieces, found, run, files(owner.module, owner.recipe), {**about(), **owner.layout()})
    if not wait:
        snapshot = snapshot.staged()
    return Saving(lambda: write(snapshot, Path(folder), step, keep, talk), wait=wait)


def load(
    owner: Owner, path: str | os.PathLike[str], optimizers: Optimizers, *, scheduler: Any, data: Any, verify: bool
) -> Loaded:
    """See ``Job.load``. Collective over the owner's processes."""
    contents, talk, findings = owner.contents, owner.talk, Findings("this checkpoint")
    stored, wanted = Stored.open(path, talk, verify=verify), as_optimizers(optimizers)
    compare(stored, contents, owner.names, findings)
    if len(wanted) > (known := len(stored.run["optimizers"])):
        given = f"{known} in {stored.path}, {len(wanted)} here"
        findings.add(where="optimizer", given=given, required="as many as were saved", fix="load without an optimizer")
    talk.agree(findings)
    states = [optimizer_state(stored, i, o, contents, findings) for i, o in enumerate(wanted)]
    puts = [restore("scheduler", scheduler, stored, findings), restore("data", data, stored, findings)]
    talk.agree(findings)
    pieces, names = model_pieces(stored, contents)
    source = rng_source(stored.manifest.about, owner)
    rng = {} if source is None else dict(_rng(stored, source))
    pieces += [p for s in states for p in s.pieces] + list(rng.values())
    stored.read(pieces, {**names, **{k: v for s in states for k, v in s.names.items()}}, talk)
    for put in [*(s.hand_over for s in states), *puts]:
        put()
    modules = dict(owner.module.named_modules())
    for name, value in stored.run["extra_state"].items():
        modules[name].set_extra_state(value)
    notes = _draw_on(owner, stored, {kind: piece.local for kind, piece in rng.items()})
    return Loaded(stored.manifest.step, stored.path, stored.run["extra"], notes, stored.run["rows"])


def save_checkpoint(
    folder: str | os.PathLike[str], module: nn.Module, optimizer: Optimizers = None, *,
    step: int, scheduler: Any = None, data: Any = None, extra: Any = None, keep: int | None = None,
) -> Path:  # fmt: skip
    """Saves a plain module, of which this process holds all: ``Job.save`` without a job. A job of any layout loads it.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: it could not be written, or would not load.
    """
    owner = Owner.of_module(module)
    saving = save(
        owner, folder, optimizer, step=step, scheduler=scheduler, data=data, extra=extra, keep=keep, wait=True
    )
    return saving.wait()


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizers = None, *,
    scheduler: Any = None, data: Any = None, verify: bool = True,
) -> Loaded:  # fmt: skip
    """Loads a checkpoint, of whatever layout, into a plain module: ``Job.load`` without a job.

    Raises:
        CheckpointError: it is damaged, or is not this model's; nothing has been changed then.
    """
    return load(Owner.of_module(module), path, optimizer, scheduler=scheduler, data=data, verify=verify)


# --- what stands beside the tensors -----------------------------------------------------------------------------------


def files(module: nn.Module, recipe: Recipe | None) -> dict[str, str]:
    """Plan, recipe, and the model's configuration where it has one that writes itself as JSON."""
    found = {} if recipe is None else {"plan.yaml": recipe.plan, "recipe.json": as_json(recipe)}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        write_json = getattr(getattr(module, attribute, None), "to_json_string", None)
        if write_json is None:
            continue
        text = write_json()
        if attribute == "config":
            kind = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))
            text = json.dumps({**json.loads(text), "architectures": [kind.__name__]}, indent=2)
        found[name] = text
    return found


# --- generators -------------------------------------------------------------------------------------------------------


def rng_source(about: Mapping[str, Any], owner: Owner) -> int | None:
    """The rank of the saved layout whose random numbers a rank goes on with; None where the layouts draw otherwise.

    What is drawn depends on the data rank and the stage; ranks of one tp group draw the same.
    """
    saved, here, rank = Mesh(tuple(about["mesh"].items())), owner.mesh, owner.talk.rank
    if (saved, about["branches"]) == (here, owner.branches):
        return rank
    drawn = [(mesh.data_size, mesh.axis_size("pp")) for mesh in (saved, here)]
    if owner.branches or about["branches"] or drawn[0] != drawn[1]:
        return None

    def place(mesh: Mesh, rank: int) -> tuple[int, int]:
        return mesh.data_index(rank), mesh.coordinate(rank).get("pp", 0)

    return next(r for r in range(saved.size) if place(saved, r) == place(here, rank))


def _rng(stored: Stored, source: int) -> Iterator[tuple[str, Piece]]:
    prefix = f"rng.{source}."
    for name in stored.metadata.state_dict_metadata:
        if name.startswith(prefix) and (known := stored.tensor(name)) is not None:
            yield name.removeprefix(prefix), Piece.whole(name, torch.empty(known.size, dtype=known.properties.dtype))


def _draw_on(owner: Owner, stored: Stored, rng: dict[str, Tensor]) -> tuple[str, ...]:
    """Generators as they were; where they cannot be, others than at the start; the same whenever it is loaded."""
    if rng:
        set_generators(rng, owner.device)
        return ()
    seed, index = 0 if owner.recipe is None else owner.recipe.seed, owner.mesh.data_index(owner.talk.rank)
    torch.manual_seed(((seed * 1_000_003 + stored.manifest.step) * 1_000_003 + index + 1) % 2**63)
    return ("random numbers (dropout) are not those of the run that was saved: its layout draws them otherwise",)
