"""Saving and loading whole: ``Job.save`` and ``Job.load``; ``save_checkpoint`` and ``load_checkpoint`` for plain modules.

Both are one: a job is saved by all its ranks, a plain module by the one process that holds all of it.
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
)
from meshwright.checkpoint.load import Loaded, Stored, compare, model_pieces, optimizer_state, restore
from meshwright.checkpoint.pieces import Piece
from meshwright.checkpoint.save import Saving, Snapshot, about, as_json, as_loaded, write
from meshwright.checkpoint.staging import Staging
from meshwright.checkpoint.talk import RankAgreement
from meshwright.errors import CheckpointError, Finding, Findings
from meshwright.generators import Generators
from meshwright.mesh import Mesh
from meshwright.recipe import Recipe

if TYPE_CHECKING:
    from meshwright.runtime.held import HeldModel


@dataclass(frozen=True)
class Owner:
    """Who saves or loads: one rank of a job, or a plain process.

    Attributes:
        contents: what of the module is here.
        names: of every parameter and persistent buffer, on any rank.
        recipe: None for a plain module.
        random: the generators of this process.
        rows: how rows combine, where that is known.
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
    def of_job(cls, held: HeldModel, random: Generators, rows: str) -> Owner:
        """A rank of a job, whose parameters are at rest."""
        contents = of_job(held)
        names = (*held.recipe.by_name, *(name for name, *_ in contents.buffers))
        return cls(held.module, contents, names, held.rank, held.groups.device, random, held.recipe, rows)

    @classmethod
    def of_module(cls, module: nn.Module) -> Owner:
        """A plain process."""
        contents = of_module(module)
        names = [n for held in contents.parameters for n in (held.name, *held.aliases)]
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        names += [name for name, *_ in contents.buffers]
        return cls(module, contents, tuple(names), 0, device, Generators(device, module))

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
    find_owner: Callable[[], Owner], talk: RankAgreement, folder: str | os.PathLike[str], optimizers: Optimizers, *,
    step: int, scheduler: Any, data: Any, extra: Any, keep: int | None, staging: Staging | None = None,
) -> Saving:  # fmt: skip
    """See ``Job.save``. Collective.

    Args:
        find_owner: gives this rank's; it may run code of the model's.
        staging: copies the tensors first, and the rest runs in a thread; None: all is written before this returns.
    """

    def collect() -> Snapshot:
        owner, states = find_owner(), {"scheduler": scheduler, "data": data}
        run = {name: of.state_dict() for name, of in states.items() if of is not None}
        findings = Findings("this checkpoint")
        _check_numbers(step, keep, findings)
        snapshot = _snapshot(owner, optimizers, {**run, "extra": extra}, findings)
        return snapshot if staging is None else snapshot.staged(staging)

    failed = Finding(str(folder), "it was not saved", "state_dict() and get_extra_state() without an error, and memory")
    snapshot = talk.do(collect, failed)
    return Saving(lambda: write(snapshot, Path(folder), index(step), keep, talk), wait=staging is None)


def _check_numbers(step: Any, keep: int | None, findings: Findings) -> None:
    if not hasattr(step, "__index__") or index(step) < 0:
        findings.add(
            where="step", given=str(step), required="optimizer steps that were done: a number from 0", fix="step=1"
        )
    if keep is not None and keep < 1:
        findings.add(where="keep", given=str(keep), required="how many checkpoints to keep: at least 1", fix="keep=2")


def _snapshot(owner: Owner, optimizers: Optimizers, run: Mapping[str, Any], findings: Findings) -> Snapshot:
    """What this rank has to save. Raises CheckpointError with ``findings``, and with what cannot be saved."""
    contents = owner.contents
    of_optimizers = [of_optimizer(o, contents, findings) for o in as_optimizers(optimizers)]
    states = [piece for o in of_optimizers for piece in o.pieces]
    plain = {"rows": owner.rows, "extra_state": contents.extra, **run}
    copies = as_loaded({**plain, "optimizer": [(o.groups, o.scalars) for o in of_optimizers]}, findings)
    if findings:
        raise CheckpointError(findings, findings.subject)
    of_optimizers = [
        replace(o, groups=groups, scalars=scalars)
        for o, (groups, scalars) in zip(of_optimizers, copies.pop("optimizer"), strict=True)
    ]
    numbers = [Piece.whole(f"rng.{owner.rank}.{kind}", t) for kind, t in owner.random.tensors().items()]
    pieces = [*contents.pieces(), *states, *numbers]
    return Snapshot(pieces, of_optimizers, copies, files(owner.module, owner.recipe), {**about(), **owner.layout()})


def load(
    find_owner: Callable[[], Owner], talk: RankAgreement, path: str | os.PathLike[str], optimizers: Optimizers, *,
    scheduler: Any, data: Any, verify: bool, or_before: bool = False,
) -> Loaded:  # fmt: skip
    """See ``Job.load``. Collective. ``find_owner``: gives this rank's."""
    if or_before:
        stored, said = Stored.newest_whole(path, talk, verify=verify)
    else:
        stored, said = Stored.open(path, talk, verify=verify), ()
    failed = Finding(str(stored.path), "it was not loaded", "get_extra_state() without an error, and memory")
    owner, fitting = talk.do(lambda: _fitting(find_owner(), stored, optimizers, scheduler, data), failed)
    stored.read(fitting.pieces, fitting.names, talk)
    failed = replace(failed, required="load_state_dict() and set_extra_state() that take what was saved")
    notes = talk.do(lambda: _put_back(owner, stored, fitting), failed)
    return Loaded(stored.manifest.step, stored.path, stored.run["extra"], (*said, *notes), stored.run["rows"])


@dataclass(frozen=True)
class _Fitting:
    """A checkpoint that fits what is here.

    Attributes:
        pieces: what to read into, with memory of their own for what is not there yet.
        names: name of a piece → its name in the checkpoint, where that is another.
        rng: the generators' states, as they will be read; empty where they cannot go on.
        puts: what to do when all is read.
    """

    pieces: list[Piece]
    names: dict[str, str]
    rng: dict[str, Piece]
    puts: tuple[Callable[[], None], ...]


def _fitting(owner: Owner, stored: Stored, optimizers: Optimizers, scheduler: Any, data: Any) -> tuple[Owner, _Fitting]:
    """Raises CheckpointError with everything that does not fit; nothing has been changed then."""
    contents, findings, wanted = owner.contents, Findings("this checkpoint"), as_optimizers(optimizers)
    compare(stored, contents, owner.names, findings)
    if len(wanted) > (known := len(stored.run["optimizers"])):
        given = f"{known} in {stored.path}, {len(wanted)} here"
        findings.add(where="optimizer", given=given, required="as many as were saved", fix="load without an optimizer")
    if findings:
        raise CheckpointError(findings, findings.subject)
    states = [optimizer_state(stored, i, o, contents, findings) for i, o in enumerate(wanted)]
    puts = [restore("scheduler", scheduler, stored, findings), restore("data", data, stored, findings)]
    if findings:
        raise CheckpointError(findings, findings.subject)
    pieces, names = model_pieces(stored, contents)
    source = rng_source(stored.manifest.about, owner)
    rng = {} if source is None else dict(_rng(stored, source))
    pieces += [p for s in states for p in s.pieces] + list(rng.values())
    names |= {k: v for s in states for k, v in s.names.items()}
    return owner, _Fitting(pieces, names, rng, (*(s.hand_over for s in states), *puts))


def _put_back(owner: Owner, stored: Stored, fitting: _Fitting) -> tuple[str, ...]:
    """What is no tensor of the model's; notes for a person."""
    for put in fitting.puts:
        put()
    modules = dict(owner.module.named_modules())
    for name, value in stored.run["extra_state"].items():
        modules[name].set_extra_state(value)
    return _draw_on(owner, stored, {kind: piece.local for kind, piece in fitting.rng.items()})


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
    saving = save(
        lambda: Owner.of_module(module), RankAgreement(None), folder, optimizer,
        step=step, scheduler=scheduler, data=data, extra=extra, keep=keep,
    )  # fmt: skip
    return saving.wait()


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizers = None, *,
    scheduler: Any = None, data: Any = None, verify: bool = True,
) -> Loaded:  # fmt: skip
    """Loads a checkpoint, of whatever layout, into a plain module: ``Job.load`` without a job.

    Raises:
        CheckpointError: it is damaged, or is not this model's; nothing has been changed then.
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


# --- what stands beside the tensors -----------------------------------------------------------------------------------


def files(module: nn.Module, recipe: Recipe | None) -> dict[str, str]:
    """Plan, recipe, and the model's configuration where it has one that writes itself as JSON."""
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
    """The rank of the saved layout whose random numbers a rank goes on with; None where the layouts draw otherwise.

    What is drawn depends on the data rank and the stage; ranks of one tp group draw the same.
    """
    saved, here, rank = Mesh(tuple(about["mesh"].items())), owner.mesh, owner.rank
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
    """Restores the random state. If the layout draws otherwise, seeds anew from seed, step, data rank and stage."""
    if rng:
        owner.random.set_tensors(rng)
        return ()
    seed, rank = 0 if owner.recipe is None else owner.recipe.seed, owner.rank
    stage = owner.mesh.coordinate(rank).get("pp", 0)
    owner.random.start(seed * 1_000_003 + stored.manifest.step, owner.mesh.data_index(rank), stage)
    return ("random numbers (dropout) are not those of the run that was saved: its layout draws them otherwise",)
