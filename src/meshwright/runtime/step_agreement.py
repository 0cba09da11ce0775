"""``StepAgreement``: what ranks agree on before a step, in collectives that it has anyhow.

random numbers   ranks that run the same forward draw the same from here on
switches         whether a person has set the same on their modules (switches.py)
what is run      whether ranks of a copy of the model run the same (a step, an evaluation) on rows of one form; in steps that
                 compare ranks (guard.py), on the same rows
a notice         whether some rank has something to tell: only then all ranks tell each other what it is
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from meshwright.errors import Finding, PlanError
from meshwright.generators import Generators
from meshwright.names import few
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups
from meshwright.switches import Switches


class Notice(NamedTuple):
    """What a rank has to tell before a step.

    Attributes:
        error: what is wrong on this rank; None if nothing is.
        parameters: those that have got hooks; modules: those of which hooks were changed since the job was made.
        form: what is run, on which batch, in words; empty if the batch is wrong.
    """

    error: Exception | None
    parameters: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    form: str = ""


class StepAgreement:
    """What the ranks of a job agree on before a step.

    Args:
        random: the generators of this rank; ``switches``: of its modules.
    """

    def __init__(self, recipe: Recipe, groups: Groups, random: Generators, switches: Switches) -> None:
        self._recipe, self._groups, self._random, self._switches = recipe, groups, random, switches
        self._different = False  # whether ranks of this copy run different things
        self._differed = 0  # the first step before which ranks had drawn different numbers

    def agree(self, step: int, *, form: str, notice: bool) -> bool:
        """Ranks that run the same forward draw the same numbers from here on. Collective over the ranks of a copy of the model.

        Args:
            form: what is run, on which batch, in words: the same on all ranks of a copy.
            notice: whether this rank has something to tell.

        Returns:
            Whether some rank of this copy has; or they run different things; or hooks were changed on some of them alone, and
            they run one forward in parts.
        """
        number, self._different = zlib.crc32(form.encode()), False
        mesh, hosts, digests = self._recipe.mesh, self._groups.hosts, self._switches.digests()
        told, changed, same, in_step = int(notice), int(self._switches.changed), True, True
        for axis in ("tp", "pp"):
            if mesh.axis_size(axis) == 1:
                continue
            numbers = [told, changed, number, -number, *digests, *(-digest for digest in digests)]
            agreed, largest = self._random.agree(hosts[axis], torch_too=axis == "tp", told=numbers)
            told, changed, run, least_run, hooks, path, *least = largest
            self._different |= run != -least_run
            told = max(told, int(self._different))
            in_step &= agreed
            same &= path == -least[1]
            told = max(told, int(self._recipe.in_parts and hooks != -least[0]))
        if not in_step and not self._differed:
            self._differed = max(1, step)
        self._switches.agree(same=same, changed=bool(changed))
        return bool(told)

    def refuse_different(self, form: str) -> None:
        """Raises PlanError if ranks of this copy run different things, as they have just told each other. On all of them."""
        if self._different:
            raise PlanError([_of_different(f"here {form}")], "this call")

    def tell(self, notice: Notice) -> tuple[str, ...]:
        """All ranks tell each other what they have to tell. Collective over all ranks.

        Returns:
            The parameters that have got hooks, on whichever ranks, in one order.

        Raises:
            PlanError: something is wrong on some rank; on every rank.
        """
        told: list[Any] = [None] * dist.get_world_size()
        error = notice.error
        mine = None if error is None else _findings(error), notice.parameters, notice.modules, notice.form
        dist.all_gather_object(told, mine, group=self._groups.hosts[""])
        if error is not None:
            raise error
        findings = [
            Finding(f"rank {rank}, {f.where}", f.given, f.required, f.fix)
            for rank, there in enumerate(told)
            for f in there[0] or ()
        ]
        findings += self._of_forms([there[3] for there in told])
        hooked = {name for there in told for name in there[1]}
        if self._recipe.in_parts:
            modules = {name for there in told for name in there[2]}
            findings += _differing("hooks of modules", [there[2] for there in told], [modules] * len(told))
        held = [{line.name for line in self._recipe.held_by(rank)} & hooked for rank in range(len(told))]
        findings += _differing("hooks of parameters", [there[1] for there in told], held)
        if findings:
            raise PlanError(findings, "this step")
        return tuple(line.name for line in self._recipe.parameters if line.name in hooked)

    def _of_forms(self, forms: Sequence[str]) -> list[Finding]:
        """Ranks of a copy of the model that run different things."""
        mesh, copies = self._recipe.mesh, dict[int, dict[str, int]]()
        for rank, form in enumerate(forms):
            if form:
                copies.setdefault(mesh.data_index(rank), {}).setdefault(form, rank)
        told = (
            "; ".join(f"rank {rank}: {form}" for form, rank in there.items())
            for there in copies.values()
            if len(there) > 1
        )
        return [_of_different(forms) for forms in told][:1]

    @property
    def note(self) -> str:
        """That some ranks had drawn numbers that others had not; empty if that was never so."""
        if not self._differed:
            return ""
        return (
            "something draws random numbers on some ranks only (if rank == 0: torch.rand(1), say), seen before step "
            f"{self._differed}: ranks that run the same forward then took the random state of the first of them"
        )


def _findings(error: Exception) -> Any:
    """What is wrong, as other ranks are told."""
    if isinstance(error, PlanError):
        return error.findings
    return (Finding("this batch", f"{type(error).__name__}: {error}", "rows that can be run"),)


def _of_different(forms: str) -> Finding:
    return Finding(
        where="what is run",
        given=forms,
        required="the same on all ranks of tp and pp, which run one forward together: the data axes alone divide rows",
        fix="job.batches(...); or a sampler of job.recipe.mesh.data_size shares, of which a rank takes number "
        "job.recipe.mesh.data_index(job.rank)",
    )


def _differing(where: str, hooked: Sequence[Collection[str]], held: Sequence[Collection[str]]) -> list[Finding]:
    """What has hooks on some ranks alone.

    Args:
        hooked: of each rank, what has got hooks; ``held``: what should have, if it has on any rank.
    """
    every = {name for names in hooked for name in names}
    lacking = [sorted(every.intersection(held[rank]).difference(names)) for rank, names in enumerate(hooked)]
    if not any(lacking):
        return []
    each = "; ".join(f"not on rank {rank}: {few(names)}" for rank, names in enumerate(lacking) if names)
    return [
        Finding(
            where=where,
            given=f"put on, or taken off, since the job was made, and not on every rank ({each})",
            required="the same on all ranks that have it: they take part in one forward, or in one gradient",
            fix="register the hook on every rank",
        )
    ]


__all__ = ["Notice", "StepAgreement"]
