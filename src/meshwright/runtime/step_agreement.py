"""``StepAgreement``: what ranks agree on before a step, in one small collective for each axis.

random numbers   ranks that run the same forward draw the same numbers from here on
switches         whether the modules of all ranks have the same settings (switches.py)
what is run      whether ranks of a copy of the model run the same method (a step, an evaluation) on rows of the same form; in
                 steps that compare ranks (guard.py), on the same rows
notices          whether some rank has a problem, or new hooks; only then all ranks exchange what these are
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
    """What a rank reports to the others before a step.

    Attributes:
        error: what is wrong on this rank; None if nothing is.
        parameters: names of parameters with new hooks.
        modules: names of modules whose hooks were changed since the job was made.
        form: what is run, on which batch, in words; empty if the batch is wrong.
    """

    error: Exception | None
    parameters: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    form: str = ""


class StepAgreement:
    """Makes the ranks of a job agree before each step.

    Args:
        random: the generators of this rank.
        switches: the settings of its modules.
    """

    def __init__(self, recipe: Recipe, groups: Groups, random: Generators, switches: Switches) -> None:
        self._recipe, self._groups, self._random, self._switches = recipe, groups, random, switches
        self._different = False  # whether ranks of this copy run different things
        self._differed = 0  # the first step at which generators differed; 0: they never did

    def agree(self, step: int, *, form: str, notice: bool) -> bool:
        """Synchronizes the generators of ranks that run the same forward, and compares what they run, and the settings of
        their modules. Collective over the ranks of a copy of the model.

        Args:
            step: the running one.
            form: what is run, on which batch, in words: the same on all ranks of a copy.
            notice: whether this rank has something to report.

        Returns:
            Whether a rank of this copy has something to report; or whether ranks run different things; or whether hooks differ
            between ranks that run parts of one forward.
        """
        number, self._different = zlib.crc32(form.encode()), False
        mesh, hosts, digests = self._recipe.mesh, self._groups.hosts, self._switches.digests()
        noticed, changed, same, in_step = int(notice), int(self._switches.changed), True, True
        for axis in ("tp", "pp"):
            if mesh.axis_size(axis) == 1:
                continue
            # The group takes the maximum of each number; the maximum of a negated number is the negated minimum.
            numbers = [noticed, changed, number, -number, *digests, *(-digest for digest in digests)]
            agreed, largest = self._random.agree(hosts[axis], torch_too=axis == "tp", told=numbers)
            noticed, changed, run, negated_run, hooks, path, *negated = largest
            self._different |= run != -negated_run
            noticed = max(noticed, int(self._different))
            in_step &= agreed
            same &= path == -negated[1]
            noticed = max(noticed, int(self._recipe.in_parts and hooks != -negated[0]))
        if not in_step and not self._differed:
            self._differed = max(1, step)
        self._switches.agree(same=same, changed=bool(changed))
        return bool(noticed)

    def refuse_different(self, form: str) -> None:
        """Raises PlanError on all ranks of this copy if the last ``agree`` has shown that they run different things."""
        if self._different:
            raise PlanError([_of_different(f"here {form}")], "this call")

    def tell(self, notice: Notice) -> tuple[str, ...]:
        """Exchanges the notices of all ranks. Collective over all ranks.

        Returns:
            The parameters that have new hooks on any rank, in the order of the recipe.

        Raises:
            PlanError: something is wrong on some rank; on every rank.
        """
        notices: list[Any] = [None] * dist.get_world_size()  # (findings, parameters, modules, form) of each rank
        error = notice.error
        local_notice = None if error is None else _findings(error), notice.parameters, notice.modules, notice.form
        dist.all_gather_object(notices, local_notice, group=self._groups.hosts[""])
        if error is not None:
            raise error
        findings = [
            Finding(f"rank {rank}, {f.where}", f.given, f.required, f.fix)
            for rank, (rank_findings, *_) in enumerate(notices)
            for f in rank_findings or ()
        ]
        findings += self._of_forms([form for *_, form in notices])
        hooked = {name for _, names, *_ in notices for name in names}
        if self._recipe.in_parts:
            all_modules = {name for _, _, names, _ in notices for name in names}
            findings += _differing(
                "hooks of modules", [names for _, _, names, _ in notices], [all_modules] * len(notices)
            )
        expected = [{line.name for line in self._recipe.held_by(rank)} & hooked for rank in range(len(notices))]
        findings += _differing("hooks of parameters", [names for _, names, *_ in notices], expected)
        if findings:
            raise PlanError(findings, "this step")
        return tuple(line.name for line in self._recipe.parameters if line.name in hooked)

    def _of_forms(self, forms: Sequence[str]) -> list[Finding]:
        """A finding for the first copy of the model whose ranks run different things, if there is one."""
        mesh, copies = self._recipe.mesh, dict[int, dict[str, int]]()
        for rank, form in enumerate(forms):
            if form:
                copies.setdefault(mesh.data_index(rank), {}).setdefault(form, rank)
        texts = (
            "; ".join(f"rank {rank}: {form}" for form, rank in first_ranks.items())
            for first_ranks in copies.values()
            if len(first_ranks) > 1
        )
        return [_of_different(text) for text in texts][:1]

    @property
    def note(self) -> str:
        """A note that generators differed between ranks; empty if they never did."""
        if not self._differed:
            return ""
        return (
            "something draws random numbers on some ranks only (if rank == 0: torch.rand(1), say), seen before step "
            f"{self._differed}: ranks that run the same forward then took the random state of the first of them"
        )


def _findings(error: Exception) -> Any:
    """An error, as findings that can be sent to other ranks."""
    if isinstance(error, PlanError):
        return error.findings
    return (Finding("this batch", f"{type(error).__name__}: {error}", "rows that can be run"),)


def _of_different(forms: str) -> Finding:
    """The finding that ranks run different things; ``forms``: what they run, in words."""
    return Finding(
        where="what is run",
        given=forms,
        required="the same on all ranks of tp and pp, which run one forward together: the data axes alone divide rows",
        fix="job.batches(...); or a sampler of job.recipe.mesh.data_size shares, of which a rank takes number "
        "job.recipe.mesh.data_index(job.rank)",
    )


def _differing(where: str, hooked: Sequence[Collection[str]], expected: Sequence[Collection[str]]) -> list[Finding]:
    """A finding for names that have hooks on some ranks only; empty if there are none.

    Args:
        where: what the finding is about.
        hooked: for each rank the names with hooks; ``expected``: those that must have hooks on it, if they have on any rank.
    """
    all_hooked = {name for names in hooked for name in names}
    lacking = [sorted(all_hooked.intersection(expected[rank]).difference(names)) for rank, names in enumerate(hooked)]
    if not any(lacking):
        return []
    by_rank = "; ".join(f"not on rank {rank}: {few(names)}" for rank, names in enumerate(lacking) if names)
    return [
        Finding(
            where=where,
            given=f"put on, or taken off, since the job was made, and not on every rank ({by_rank})",
            required="the same on all ranks that have it: they take part in one forward, or in one gradient",
            fix="register the hook on every rank",
        )
    ]


__all__ = ["Notice", "StepAgreement"]
