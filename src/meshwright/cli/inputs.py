"""``Inputs``: the target, the plan, the loss and the device that a command line names, read and checked together."""

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
_MOST_ROWS = 8  # of a generated batch by default: planning needs shapes alone, and a small batch is made at once


@dataclass(frozen=True)
class Inputs:
    """What a command works on.

    Attributes:
        target: the model and its batch.
        plan: with one mesh. It stays ``auto`` only on a rank of torchrun: ranks search together.
        loss: a function of the model's output. None: the output's own loss.
        device: ``cpu`` or ``cuda``. None: ``cuda`` if there is a GPU.
        settings: of the target.
        rows: number of rows of the batch that an ``hf:`` target generates.
        length: number of tokens in each of these rows.
        searched: the result of the search, if the plan's mesh was ``auto``.
    """

    target: Target
    plan: Plan
    loss: TargetLoss | None
    device: str | None
    settings: Mapping[str, Any]
    rows: int
    length: int
    searched: SearchOutcome | None = None

    @staticmethod
    def read(
        request: Request,
        *,
        length: int,
        rows: Callable[[int], int] = lambda pieces: min(pieces, _MOST_ROWS),
        check: Callable[[Plan], None] = lambda plan: None,
        check_others: Callable[[], object] = lambda: None,
        profile: Callable[[], Profile] | None = None,
        rows_to_search_for: RowsToSearchFor = lambda target, settings, pieces: None,
    ) -> Inputs:
        """Reads the inputs that a request names; with ``mesh: auto``, also searches the plan.

        Args:
            length: number of tokens in a row that an ``hf:`` target generates, if the request has no ``--seq``.
            rows: data ranks × microbatches → number of rows that an ``hf:`` target generates.
            check: raises PlanError if the command cannot work with the plan.
            check_others: raises PlanError with the problems of the command's other options.
            profile: reads the hardware profile to search a plan for; ``check_others`` has reported its errors before. Default:
                the profile of this machine.
            rows_to_search_for: (target, its settings, number of devices) → rows of the step to search a plan for. None: as
                many as the target's batch has.

        Raises:
            PlanError: with every problem. Problems that are known before an ``hf:`` target is imported, which takes seconds,
                are raised alone.
        """
        plan_settings, target_settings = _settings_of(request)
        read_hardware = profile if profile is not None else partial(_profile_of, request.device)
        problems = Problems()
        plan = problems.collect(partial(_plan_of, request, plan_settings))
        devices = _devices_to_search_for(plan, request)
        generated_rows = rows(_pieces_on(plan, devices)) if plan is not None else 1
        if plan is not None and not devices:
            problems.collect(partial(check, plan))
        problems.collect(check_others)
        hardware = problems.collect(read_hardware) if devices and profile is None else None
        target, loss = _loaded(request, target_settings, generated_rows, length, problems)
        assert plan is not None
        searched = None
        if devices:
            step_rows, hardware = rows_to_search_for(target, target_settings, devices), hardware or read_hardware()
            plan, searched = _searched(target, plan, loss, devices, request.nodes, step_rows, hardware)
            check(plan)
        return Inputs(target, plan, loss, request.device, target_settings, generated_rows, length, searched)

    @staticmethod
    def from_names(
        spec: str, settings: Mapping[str, Any], rows: int, length: int, plan: Plan, loss: TargetLoss | None,
        device: str | None,
    ) -> Inputs:  # fmt: skip
        """Loads the target again in another process, from the arguments that `names` returned."""
        target = load_target(spec, settings, rows=rows, length=length)
        return Inputs(target, plan, loss, device, settings, rows, length)

    def names(self) -> tuple[Any, ...]:
        """Arguments of `from_names`, which travel to a worker in place of the model and the dataset."""
        return self.target.spec, self.settings, self.rows, self.length, self.plan, self.loss, self.device

    @property
    def pieces(self) -> int:
        """The number of pieces that a batch is divided into. See `pieces_of`."""
        return pieces_of(self.plan)


@dataclass(frozen=True)
class SearchOutcome:
    """The result of a search for ``mesh: auto``.

    Attributes:
        rows: number of rows in the step that the plan was searched for.
        notes: the chosen plan and the reasons, as lines of text.
    """

    rows: int
    notes: tuple[str, ...]


RowsToSearchFor: TypeAlias = Callable[[Target, Mapping[str, Any], int], int | None]


def _settings_of(request: Request) -> tuple[list[str], dict[str, Any]]:
    """Divides ``--set`` into settings of the plan, as text, and settings of the target, as values. ``--seq`` is one of the
    target."""
    plan_settings, target_texts = divided(request.sets or ())
    target_settings = {key: _value(text) for key, text in target_texts.items()}
    if request.seq:
        target_settings["seq_len"] = request.seq
    return plan_settings, target_settings


def _loaded(
    request: Request, settings: Mapping[str, Any], rows: int, length: int, problems: Problems
) -> tuple[Target, TargetLoss | None]:
    """Loads the target and the loss.

    Args:
        rows: number of rows that an ``hf:`` target generates.
        length: number of tokens in each of these rows.
        problems: the problems that are known already.

    Raises:
        PlanError: with every problem, those in ``problems`` among them.
    """
    problems.collect(lambda: check_target(request.target, settings))
    if request.target.startswith(HF):
        problems.raise_if_any()  # before transformers is imported, which takes seconds
    target = problems.collect(lambda: load_target(request.target, settings, rows=rows, length=length))
    loss = problems.collect(partial(TargetLoss, request.loss)) if request.loss else None
    problems.collect(lambda: _check_device(request.device))
    problems.raise_if_any()
    assert target is not None
    return target, loss


def _searched(
    target: Target, plan: Plan, loss: TargetLoss | None, devices: int, nodes: int | None, rows: int | None,
    hardware: Profile,
) -> tuple[Plan, SearchOutcome]:  # fmt: skip
    """Searches the plan that ``mesh: auto`` stands for. Raises PlanError if none fits.

    Args:
        devices: number of ranks of the mesh.
        nodes: number of nodes of these ranks. None: as few as the profile allows.
        rows: number of rows in a step. None: as many as the target's batch has.
    """
    from meshwright.runtime.rows.microbatches import rows_of
    from meshwright.search.choice import chosen_plan

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run shows the warnings of the chosen plan
        chosen, notes = chosen_plan(
            target.build,
            target.batch,
            plan,
            devices=devices,
            nodes=nodes,
            hardware=hardware,
            global_batch=rows,
            loss=loss,
        )
    return chosen, SearchOutcome(rows or rows_of(target.batch), notes)


class Problems:
    """Collects the problems of several readers, to raise them as one error.

    >>> problems = Problems()
    >>> problems.collect(lambda: 3)
    3
    >>> problems.raise_if_any()
    """

    def __init__(self) -> None:
        self.errors: list[PlanError] = []

    def collect(self, read: Callable[[], _T]) -> _T | None:
        """Calls a reader and returns its result. If it raises PlanError, keeps the error and returns None."""
        try:
            return read()
        except PlanError as error:
            self.errors.append(error)
            return None

    def raise_if_any(self) -> None:
        """Raises one PlanError with the findings of all kept errors, each once."""
        if self.errors:
            subject = self.errors[0].subject if len(self.errors) == 1 else "this command"
            findings = dict.fromkeys(finding for error in self.errors for finding in error.findings)
            raise PlanError(findings, subject)


def _plan_of(request: Request, settings: Sequence[str]) -> Plan:
    """The plan that a request names, with one mesh or with ``auto``. Raises PlanError if something of it is wrong."""
    return _with_mesh(Plan.from_command(request.plan, request.mesh, settings), request.ranks)


def _devices_to_search_for(plan: Plan | None, request: Request) -> int:
    """The number of devices for which this process searches the plan; 0 if it does not search.

    Ranks of torchrun search together, later.
    """
    if plan is None or not plan.auto or "RANK" in os.environ:
        return 0
    return request.ranks or _gpus()  # (only here: it imports torch, which takes a second)


def _pieces_on(plan: Plan, devices: int) -> int:
    """The number of pieces of a batch: with ``devices``, as if each of them were a data rank of its own."""
    return pieces_of(plan.replace(mesh={"dp_shard": devices}) if devices else plan)


def _with_mesh(plan: Plan, ranks: int | None) -> Plan:
    """The plan with one of its meshes: for the number of processes of a launcher, or for ``ranks``.

    Without both, the first of several meshes, and for auto the number of GPUs. Auto stays auto if there are several processes.

    Raises:
        PlanError: ``ranks`` is not the size of the mesh.
    """
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
    """Raises PlanError if the mesh lacks the rank of ``--rank``."""
    findings = Findings("this command")
    if rank is not None and not 0 <= rank < mesh.size:
        required = f"a rank of {mesh}: 0 to {mesh.size - 1}"
        findings.add(where="--rank", given=str(rank), required=required, fix=f"--rank {mesh.size - 1}")
    findings.raise_if_any()


def check_nodes(mesh: Mesh, nodes: int | None) -> None:
    """Raises PlanError if the ranks of the mesh do not divide over the nodes of ``--nodes``."""
    findings = Findings("this command")
    if nodes is not None and mesh.size % nodes:
        fitting = max(n for n in range(1, nodes) if mesh.size % n == 0)
        required = f"a divisor of the {mesh.size} ranks of {mesh}: nodes have equal numbers of ranks"
        findings.add(where="--nodes", given=str(nodes), required=required, fix=f"--nodes {fitting}")
    findings.raise_if_any()


def _profile_of(device: str | None) -> Profile:
    """The profile of this machine's devices. Raises PlanError if there is none."""
    import torch

    from meshwright.hardware.devices import profile_here

    return profile_here(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def pieces_of(plan: Plan) -> int:
    """The number of pieces that a batch is divided into: data ranks × microbatches × the data ranks within a branch."""
    branch_meshes = [Mesh(entry.mesh) for entry in plan.modules.values() if entry.mesh is not None]
    return plan.mesh.data_size * plan.pieces * max((mesh.data_size for mesh in branch_meshes), default=1)


def _check_device(device: str | None) -> None:
    """Raises PlanError if the device of ``--device`` does not exist."""
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
    """Divides ``--set`` texts into settings of the plan and settings of the target.

    ``a=1,b=2`` are two settings; ``mesh=dp_shard=2,tp=2`` is one.

    >>> divided(["recompute=all,modules.*.up.tp=column,n_layer=2"])
    (['recompute=all', 'modules.*.up.tp=column'], {'n_layer': '2'})
    """
    plan_settings: list[str] = []
    target_settings: dict[str, str] = {}
    for text in sets:
        for setting in [text] if text.startswith("mesh=") else re.split(r",(?=[\w.*?\[\]!-]+=)", text):
            key, sign, value = setting.partition("=")
            if not sign or key.split(".")[0].strip() in KEYS:
                plan_settings.append(setting)  # also a text without "=": the plan's reader raises a good error for it
            else:
                target_settings[key.strip()] = value
    return plan_settings, target_settings


def _value(text: str) -> Any:
    """The text of a setting as YAML reads it: a number, a bool, a list; or the text itself, if YAML cannot read it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
