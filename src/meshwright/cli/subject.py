"""What ``predict`` and ``dryrun`` are asked about: a target under a plan, a batch of so many rows, and a profile."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.cli import processes
from meshwright.cli.given import Given, Problems, divided, pieces_of
from meshwright.cli.request import Request
from meshwright.errors import Findings, PlanError
from meshwright.plan import Plan
from meshwright.target import HF, Target, with_rows

if TYPE_CHECKING:  # hardware is read by the commands that need it
    from meshwright.hardware.profile import Profile

_FEW = 8  # rows that a made-up batch is made of; where it has more, they repeat
LENGTH = 128  # tokens of a row where none are said, as ``train`` has them


def plans_in(files: Sequence[str], sets: Sequence[str] | None) -> list[Plan]:
    """The plans of several files, with settings over each. Raises PlanError with every problem of all of them."""
    problems = Problems()
    for file in files:
        problems.of(lambda file=file: _whole_plan(file, sets))  # type: ignore[misc]
    problems.raise_if_any()
    return [_whole_plan(file, sets) for file in files]


def _whole_plan(file: str, sets: Sequence[str] | None) -> Plan:
    plan = Plan.from_command(file, None, divided(sets or ())[0])
    plan.check_mesh()
    return plan


@dataclass(frozen=True)
class Subject:
    """What is asked about.

    Attributes:
        given: what the command line names.
        batch: of all data ranks together.
        profile: of the hardware.
    """

    given: Given
    batch: Any
    profile: Profile

    @staticmethod
    def read(request: Request, check: Callable[[Plan, Profile], None] = lambda plan, profile: None) -> Subject:
        """Raises PlanError with every problem of all of it.

        Args:
            check: raises PlanError if the command does not fit the plan or the profile.
        """
        global_batch = request.global_batch

        def profile() -> Profile:
            return named_profile(request.hardware, request.network)

        def fits(plan: Plan) -> None:
            _check_rows(plan, global_batch)
            try:
                named = profile()
            except PlanError:
                return  # told by itself
            _check_nodes(plan, named)
            check(plan, named)

        def whole(target: Target, settings: Mapping[str, Any], pieces: int) -> int | None:
            made_up = target.spec.startswith(HF) and "batch_size" not in settings
            return global_batch or (_rows(pieces) if made_up else None)

        given = Given.read(
            replace(request, device="cpu"), length=LENGTH, rows=lambda pieces: min(_FEW, global_batch or _rows(pieces)),
            check=fits, beside=profile, profile=profile, whole=whole,
        )  # fmt: skip
        rows = given.searched.rows if given.searched else whole(given.target, given.settings, given.pieces)
        return Subject(given, batch_of_rows(given.target.batch, rows, given.pieces), profile())

    def batch_of(self, plans: Sequence[Plan], global_batch: int | None) -> Any:
        """A batch that divides over the data ranks and microbatches of all plans.

        Raises PlanError with every problem: ``global_batch`` does not divide so, or the profile has no network for so many
        ranks.
        """
        problems = Problems()
        for plan in plans:
            problems.of(lambda plan=plan: _check_rows(plan, global_batch))  # type: ignore[misc]
            problems.of(lambda plan=plan: _check_nodes(plan, self.profile))  # type: ignore[misc]
        problems.raise_if_any()
        pieces = math.lcm(*(pieces_of(plan) for plan in plans))
        made_up = self.given.target.spec.startswith(HF) and "batch_size" not in self.given.settings
        rows = global_batch or (_rows(pieces) if made_up else None)
        return batch_of_rows(self.given.target.batch, rows, pieces)


def named_profile(hardware: str | None, network: str | None) -> Profile:
    """The profile that a command line names; without a name, that of this machine.

    Raises:
        PlanError: there is none of this name, or no such network in it; or this machine has not been measured.
    """
    from meshwright.hardware.local import CPU_LOCAL, calibrated_file
    from meshwright.hardware.reader import ALIASES, profiles, read_profile

    if hardware is None and not calibrated_file().is_file():
        raise PlanError.of(
            "this command",
            where="--hardware",
            given=f"nothing, and no profile of this machine ({calibrated_file()})",
            required=f"one of {', '.join([*profiles(), *ALIASES])}; a YAML file; or this machine: meshwright calibrate",
            fix="--hardware h100",
        )
    return read_profile(hardware or CPU_LOCAL, network=network)


@contextmanager
def quiet() -> Iterator[None]:
    """For its time nothing is told of what torch warns of: a run would tell it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _rows(pieces: int) -> int:
    """A small global batch that divides, as ``train`` has it."""
    return pieces * math.ceil(8 / pieces)


def _check_rows(plan: Plan, global_batch: int | None) -> None:
    """Raises PlanError if the rows do not divide over data ranks and microbatches."""
    if global_batch is not None:
        from meshwright.runtime.rows.batches import check_global_batch  # with it torch, which takes a second

        check_global_batch(global_batch, plan.mesh, plan.pieces)


def _check_nodes(plan: Plan, profile: Profile) -> None:
    """Raises PlanError if the mesh is larger than a node, and the profile has no network."""
    findings = Findings("this command")
    if plan.mesh.size > profile.devices_per_node and profile.network is None:
        findings.add(
            where="--hardware",
            given=f"{profile.name}: {profile.devices_per_node} devices in a node, and no network",
            required=f"a profile with networks, for the {plan.mesh.size} ranks of {plan.mesh}",
            fix="--hardware h100",
        )
    findings.raise_if_any()


def check_measurable(plan: Plan, profile: Profile) -> None:
    """Raises PlanError if what is predicted is not of this machine's processes, or if they would be too many."""
    findings, most = Findings("this command"), max(8, 4 * processes.cores())
    if not profile.cores:
        findings.add(
            where="--measure",
            given=f"--hardware {profile.name}, and a run on this machine's CPUs to compare with",
            required="the profile of this machine, which meshwright calibrate measures",
            fix="--hardware cpu-local",
        )
    if plan.mesh.size > most:
        findings.add(
            where="--measure",
            given=f"{plan.mesh}: {plan.mesh.size} local processes",
            required=f"at most {most} on {processes.cores()} cores",
            fix="leave out --measure",
        )
    findings.raise_if_any()


def batch_of_rows(batch: Any, rows: int | None, pieces: int) -> Any:
    """A batch with so many rows; without a number, with those that it has, and at least one for each piece."""
    from meshwright.runtime.rows.microbatches import rows_of, take_rows

    if rows is None:
        return with_rows(batch, pieces)
    more = with_rows(batch, rows)
    return more if rows_of(more) == rows else take_rows(more, 0, rows)
