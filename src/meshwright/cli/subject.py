"""``Subject``: a target under a plan, with the global batch and the hardware profile to predict for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.cli import processes
from meshwright.cli.inputs import Inputs, Problems, divided, pieces_of
from meshwright.cli.request import Request
from meshwright.errors import Findings, PlanError
from meshwright.plan import Plan
from meshwright.target import HF, Target, with_rows

if TYPE_CHECKING:  # hardware is read by the commands that need it
    from meshwright.hardware.profile import Profile

# that --measure starts on any machine; they share the cores, so time is no longer like the profile's
_MOST_PROCESSES = 8
_PROCESSES_PER_CORE = 4  # that --measure starts at most, for the same reason
DISTINCT_ROWS = 8  # of a generated batch; a larger batch repeats them, as shapes alone count in a prediction
_DEFAULT_ROWS = 8  # least number of rows in a step if --global-batch is absent, as in ``train``
LENGTH = 128  # tokens of a row if --seq is absent, as in ``train``


def plans_in(files: Sequence[str], sets: Sequence[str] | None) -> list[Plan]:
    """The plans of several YAML files.

    Args:
        sets: ``--set`` settings, which override each plan.

    Raises:
        PlanError: with every problem of all files.
    """
    problems = Problems()
    for file in files:
        problems.collect(lambda file=file: _plan_in(file, sets))  # type: ignore[misc]
    problems.raise_if_any()
    return [_plan_in(file, sets) for file in files]


def _plan_in(file: str, sets: Sequence[str] | None) -> Plan:
    plan = Plan.from_command(file, None, divided(sets or ())[0])
    plan.check_mesh()
    return plan


@dataclass(frozen=True)
class Subject:
    """A target under a plan, and what a prediction needs besides.

    Attributes:
        inputs: the target, the plan, the loss and the device.
        batch: the global batch: the rows of all data ranks together.
        profile: the hardware to predict for.
    """

    inputs: Inputs
    batch: Any
    profile: Profile

    @staticmethod
    def read(request: Request, check: Callable[[Plan, Profile], None] = lambda plan, profile: None) -> Subject:
        """Reads the target, the plan and the profile that a command line names.

        Args:
            check: called with the plan and the profile. Raises PlanError if the command cannot work with them.

        Raises:
            PlanError: with every problem of the target, the plan, the profile and the batch.
        """
        global_batch = request.global_batch

        def profile() -> Profile:
            return named_profile(request.hardware, request.network)

        def check_plan(plan: Plan) -> None:
            _check_rows(plan, global_batch)
            try:
                named = profile()
            except PlanError:
                return  # check_others reports it
            _check_nodes(plan, named)
            check(plan, named)

        inputs = Inputs.read(
            replace(request, device=request.device or "cpu"),
            length=LENGTH,
            rows=lambda pieces: min(DISTINCT_ROWS, global_batch or _rows(pieces)),
            check=check_plan,
            check_others=profile,
            profile=profile,
            rows_to_search_for=partial(_rows_of_step, global_batch),
        )
        if inputs.searched:
            rows: int | None = inputs.searched.rows
        else:
            rows = _rows_of_step(global_batch, inputs.target, inputs.settings, inputs.pieces)
        return Subject(inputs, batch_of_rows(inputs.target.batch, rows, inputs.pieces), profile())

    def batch_of(self, plans: Sequence[Plan], global_batch: int | None) -> Any:
        """A global batch whose rows divide over the data ranks and microbatches of every plan.

        Raises:
            PlanError: with every problem: ``global_batch`` does not divide over a plan's pieces, or a plan needs several nodes
                and the profile has no network.
        """
        problems = Problems()
        for plan in plans:
            problems.collect(lambda plan=plan: _check_rows(plan, global_batch))  # type: ignore[misc]
            problems.collect(lambda plan=plan: _check_nodes(plan, self.profile))  # type: ignore[misc]
        problems.raise_if_any()
        pieces = math.lcm(*(pieces_of(plan) for plan in plans))
        rows = _rows_of_step(global_batch, self.inputs.target, self.inputs.settings, pieces)
        return batch_of_rows(self.inputs.target.batch, rows, pieces)


def _rows_of_step(global_batch: int | None, target: Target, settings: Mapping[str, Any], pieces: int) -> int | None:
    """The number of rows in a step: ``--global-batch``, or a default for a generated batch. None: as the target's batch has.

    Args:
        pieces: data ranks × microbatches.
    """
    has_generated_batch = target.spec.startswith(HF) and "batch_size" not in settings
    return global_batch or (_rows(pieces) if has_generated_batch else None)


def named_profile(hardware: str | None, network: str | None) -> Profile:
    """Reads a hardware profile.

    Args:
        hardware: a built-in name, a YAML file, or ``cpu-local``. Default: ``cpu-local``.
        network: the network of the profile that connects the nodes. Default: its first.

    Raises:
        PlanError: no profile has this name, or it has no such network; or this machine has not been measured.
    """
    from meshwright.hardware.profile_file import CPU_LOCAL, calibrated_file
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
def without_warnings() -> Iterator[None]:
    """Suppresses warnings in its block: a rehearsal repeats those that a run would show."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _rows(pieces: int) -> int:
    """The default global batch: the smallest multiple of ``pieces`` with at least ``_DEFAULT_ROWS`` rows."""
    return pieces * math.ceil(_DEFAULT_ROWS / pieces)


def _check_rows(plan: Plan, global_batch: int | None) -> None:
    """Raises PlanError if the rows do not divide over data ranks and microbatches."""
    if global_batch is not None:
        from meshwright.runtime.rows.batches import check_global_batch  # imports torch, which takes a second

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
    """Raises PlanError if ``--measure`` cannot run the plan here: the profile is of other devices, or the mesh is too large."""
    findings = Findings("this command")
    most = max(_MOST_PROCESSES, _PROCESSES_PER_CORE * processes.cores())
    if not profile.cores:
        findings.add(
            where="--measure",
            given=f"--hardware {profile.name}, but the run to compare with is on this machine's CPUs",
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
    """The batch with ``rows`` rows: its rows repeat, or the first ones are taken. ``rows=None`` keeps the number of rows, but
    at least one for each of ``pieces`` pieces."""
    from meshwright.runtime.rows.microbatches import rows_of, take_rows

    if rows is None:
        return with_rows(batch, pieces)
    more = with_rows(batch, rows)
    return more if rows_of(more) == rows else take_rows(more, 0, rows)
