"""What a command line names: the target, the plan, the loss, the device; or every problem of all of them at once."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import yaml

from meshwright.cli.request import Request
from meshwright.errors import Findings, PlanError
from meshwright.mesh import Mesh
from meshwright.plan import KEYS, Plan
from meshwright.target import HF, Target, TargetLoss, check_target, load_target

if TYPE_CHECKING:
    from meshwright.hardware.profile import Profile

_T = TypeVar("_T")


@dataclass(frozen=True)
class Given:
    """What a command line names: the target, the plan, the loss of the output (None: its own), the device.

    Attributes:
        searched: of a plan whose mesh was found, the rows of the step that it was found for, and what was chosen and why.
    """

    target: Target
    plan: Plan
    loss: TargetLoss | None
    device: str | None
    settings: Mapping[str, Any]
    rows: int
    length: int
    searched: Searched | None = None

    @staticmethod
    def read(
        request: Request,
        *,
        length: int,
        rows: Callable[[int], int] = lambda pieces: min(pieces, 8),
        check: Callable[[Plan], None] = lambda plan: None,
        beside: Callable[[], object] = lambda: None,
        profile: Callable[[], Profile] | None = None,
        whole: Whole = lambda target, settings, pieces: None,
    ) -> Given:
        """Raises PlanError with every problem of all of them; but if any can be told before the target is imported, which
        takes seconds for a model of transformers, these alone.

        Args:
            length: tokens of a row that an ``hf:`` target makes up, if the request does not say.
            rows: data ranks × microbatches → rows of the batch that an ``hf:`` target makes up.
            check: raises PlanError if the command does not fit the plan.
            beside: raises PlanError with what is wrong with what else the command line names.
            profile: of the devices for which ``mesh: auto`` is found; it has been tried by ``beside``. Default: those of this
                machine.
            whole: (target, its settings, data ranks at most) → rows of a step for which it is found. None: the batch's.
        """
        plan_settings, target_settings = _settings_of(request)
        problems = Problems()
        plan = problems.of(lambda: _at(Plan.from_command(request.plan, request.mesh, plan_settings), request.ranks))
        searches = plan is not None and plan.auto and "RANK" not in os.environ
        ranks = (
            (request.ranks or _gpus()) if searches else 0
        )  # (to count GPUs takes torch, whose import takes a second)
        made_rows = 1
        if plan is not None:
            made_rows = rows(pieces_of(plan.replace(mesh={"dp_shard": ranks}) if searches else plan))
            if not searches:
                problems.of(partial(check, plan))
        problems.of(beside)
        hardware = problems.of(lambda: _profile_of(request.device)) if searches and profile is None else None
        target, loss = _loaded(request, target_settings, made_rows, length, problems)
        assert plan is not None
        searched = None
        if searches:
            hardware = profile() if profile is not None else hardware
            assert hardware is not None
            plan, searched = _searched(target, plan, loss, ranks, whole(target, target_settings, ranks), hardware)
            check(plan)
        return Given(target, plan, loss, request.device, target_settings, made_rows, length, searched)

    @staticmethod
    def from_names(
        spec: str, settings: Mapping[str, Any], rows: int, length: int, plan: Plan, loss: TargetLoss | None,
        device: str | None,
    ) -> Given:  # fmt: skip
        """The inverse of `named`, in another process."""
        target = load_target(spec, settings, rows=rows, length=length)
        return Given(target, plan, loss, device, settings, rows, length)

    def named(self) -> tuple[Any, ...]:
        """What another process needs to find the same."""
        return self.target.spec, self.settings, self.rows, self.length, self.plan, self.loss, self.device

    @property
    def pieces(self) -> int:
        """Into how many pieces a batch is divided: data ranks, those within a branch too, × microbatches."""
        return pieces_of(self.plan)


@dataclass(frozen=True)
class Searched:
    """What ``mesh: auto`` was found for: rows of a step; and what was chosen, and why."""

    rows: int
    notes: tuple[str, ...]


Whole: TypeAlias = Callable[[Target, Mapping[str, Any], int], int | None]


def _settings_of(request: Request) -> tuple[list[str], dict[str, Any]]:
    """Settings of the plan, as text; settings of the target, as values."""
    plan_settings, others = divided(request.sets or ())
    values = {key: _value(text) for key, text in others.items()}
    return plan_settings, values | ({"seq_len": request.seq} if request.seq else {})


def _loaded(
    request: Request, settings: Mapping[str, Any], rows: int, length: int, problems: Problems
) -> tuple[Target, TargetLoss | None]:
    """The target and the loss. Raises PlanError with every problem, those that are known already among them."""
    problems.of(lambda: check_target(request.target, settings))
    if request.target.startswith(HF):
        problems.raise_if_any()
    target = problems.of(lambda: load_target(request.target, settings, rows=rows, length=length))
    loss = problems.of(partial(TargetLoss, request.loss)) if request.loss else None
    problems.of(lambda: _check_device(request.device))
    problems.raise_if_any()
    assert target is not None
    return target, loss


def _searched(
    target: Target, plan: Plan, loss: TargetLoss | None, ranks: int, rows: int | None, hardware: Profile
) -> tuple[Plan, Searched]:
    """The plan that ``mesh: auto`` stands for. Raises PlanError if none fits."""
    from meshwright.runtime.rows.microbatches import rows_of
    from meshwright.search.choice import chosen_plan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run would tell
        chosen, notes = chosen_plan(
            target.build, target.batch, plan, devices=ranks, hardware=hardware, global_batch=rows, loss=loss
        )
    return chosen, Searched(rows or rows_of(target.batch), notes)


class Problems:
    """The problems of several things that are read one after the other, to be told as one."""

    def __init__(self) -> None:
        self.errors: list[PlanError] = []

    def of(self, read: Callable[[], _T]) -> _T | None:
        """What is read; None where that has problems."""
        try:
            return read()
        except PlanError as error:
            self.errors.append(error)
            return None

    def raise_if_any(self) -> None:
        if self.errors:
            subject = self.errors[0].subject if len(self.errors) == 1 else "this command"
            findings = dict.fromkeys(finding for error in self.errors for finding in error.findings)  # each once
            raise PlanError(findings, subject)


def _at(plan: Plan, ranks: int | None) -> Plan:
    """The plan with its mesh chosen: for as many processes as a launcher has started, or ``ranks``; where neither is said,
    for auto as many as there are GPUs, and of several meshes the first. Auto stays auto for several processes."""
    if "RANK" in os.environ:
        return plan.at(int(os.environ.get("WORLD_SIZE", 1)))
    if ranks is None:
        return plan.at(plan.mesh.size if plan.meshes else _gpus())
    plan = plan.at(ranks)
    if not plan.auto and plan.mesh.size != ranks:
        required = f"the ranks of the mesh {plan.mesh}: {plan.mesh.size}"
        raise PlanError.of(
            "this command", where="--ranks", given=str(ranks), required=required, fix=f"--ranks {plan.mesh.size}"
        )
    return plan


def check_rank(mesh: Mesh, rank: int | None) -> None:
    """Raises PlanError if the mesh lacks the rank."""
    findings = Findings("this command")
    if rank is not None and not 0 <= rank < mesh.size:
        required = f"a rank of {mesh}: 0 to {mesh.size - 1}"
        findings.add(where="--rank", given=str(rank), required=required, fix=f"--rank {mesh.size - 1}")
    findings.raise_if_any()


def _profile_of(device: str | None) -> Profile:
    """The profile of this machine's devices. Raises PlanError if there is none."""
    import torch

    from meshwright.hardware.here import profile_here

    return profile_here(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def pieces_of(plan: Plan) -> int:
    within = [Mesh(entry.mesh).data_size for entry in plan.modules.values() if entry.mesh is not None]
    return plan.mesh.data_size * plan.pieces * max(within, default=1)


def _check_device(device: str | None) -> None:
    """Raises PlanError if there is no such device."""
    findings = Findings("this command")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            required = "cpu: torch finds no GPU here"
            findings.add(where="--device", given=device, required=required, fix="--device cpu")
    elif device not in (None, "cpu"):
        findings.add(where="--device", given=str(device), required="cpu or cuda", fix="--device cpu")
    findings.raise_if_any()


def divided(sets: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Settings of the plan, and those of the target. ``a=1,b=2`` are two; ``mesh=dp_shard=2,tp=2`` is one.

    >>> divided(["recompute=all,modules.*.up.tp=column,n_layer=2"])
    (['recompute=all', 'modules.*.up.tp=column'], {'n_layer': '2'})
    """
    ours: list[str] = []
    others: dict[str, str] = {}
    for text in sets:
        for setting in [text] if text.startswith("mesh=") else re.split(r",(?=[\w.*?\[\]!-]+=)", text):
            key, sign, value = setting.partition("=")
            if not sign or key.split(".")[0].strip() in KEYS:
                ours.append(setting)  # also what is no setting at all: the plan says what one looks like
            else:
                others[key.strip()] = value
    return ours, others


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
