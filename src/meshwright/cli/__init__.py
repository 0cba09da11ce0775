"""The command line: ``meshwright show | check | train | env``.

    TARGET, --set ──► load_target ─┬─► show    recipe ─ shard map ─ drawn, or JSON; starts no process
    --plan, --mesh, --set ──► Plan ┼─► check   local workers ─ the same as one device?
                                   └─► train   local workers, or this process under torchrun

What is wrong with any of them is told at once, without a traceback, and ends with exit code 2.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from meshwright import __version__
from meshwright.draw.terminal import console, count_text, render, size_text
from meshwright.errors import Findings, PlanError
from meshwright.plan import KEYS, Plan
from meshwright.target import Target, TargetLoss, load_target, with_rows

if TYPE_CHECKING:  # torch and the workers are imported by the commands that need them
    from meshwright.run import loop
    from meshwright.run.workers import LocalWorkers

_T = TypeVar("_T")

app = typer.Typer(
    name="meshwright",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The ``meshwright`` command."""
    app()


def _examples(*lines: str) -> str:
    """An epilog: a line each, which rich's markup is to leave alone."""
    return "\n\n".join(["[bold]Examples[/bold]", *(line.replace("[", r"\[") for line in lines)])


_TARGET = "file.py:function, package.module:function (returns model, batch), or hf:<model type or config.json>"
_SET = "key=value: of the plan (recompute=blocks), else of the target (hidden_size=64). Several with commas, or again"
_LOSS = "file.py:function or package.module:function, of the model's output; default output.loss"

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET, show_default=False)]
MeshOption = Annotated[str | None, typer.Option("--mesh", help="The axes and their sizes: dp_shard=2,tp=2")]
PlanOption = Annotated[str | None, typer.Option("--plan", help="A plan, as a YAML file")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help=_SET)]
LossOption = Annotated[str | None, typer.Option("--loss", help=_LOSS)]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default cuda where there is one")]
SeqOption = Annotated[int | None, typer.Option("--seq", help="Tokens a row of the batch that hf: makes up", min=1)]


@app.callback(epilog=_examples(
    "meshwright show hf:llama --mesh dp_shard=128,tp=8",
    "meshwright check model.py:small --mesh dp_shard=2,tp=2",
    "meshwright train model.py:small --plan plan.yaml --steps 100",
))  # fmt: skip
def _about() -> None:
    """Any PyTorch model, one plan, every parallelism: [bold]show[/bold] who holds what, [bold]check[/bold] that it
    is the same as one device, [bold]train[/bold] it."""


# --- show -------------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples(
    "meshwright show hf:llama --mesh dp_shard=128,tp=8             # 1024 ranks, on a laptop",
    "meshwright show hf:gpt2 --mesh fsdp=2,tp=2 --rank 3           # the exact slices of rank 3",
    "meshwright show hf:gpt2 --mesh tp=4 --parameter '*.c_attn.*'  # a picture of who holds which part",
    "meshwright show model.py:small --plan plan.yaml --json        # the same as data",
))  # fmt: skip
def show(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    rank: Annotated[int | None, typer.Option(help="Whose slices are shown; default 0")] = None,
    parameter: Annotated[str | None, typer.Option(help="Only parameters that fit this glob, with pictures")] = None,
    pictures: Annotated[
        int | None, typer.Option(help="How many pictures of who holds which part; default 3 with --parameter", min=0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead")] = False,
    loss: LossOption = None,
    seq: SeqOption = None,
) -> None:
    """Show which rank holds what of every parameter. Starts no process, allocates no parameter."""
    with _told():
        given = _Given.read(target, mesh, plan, set_, loss, seq=seq, length=8)
        from meshwright.api import make_recipe
        from meshwright.draw.facts import shard_map

        batch = with_rows(given.target.batch, given.pieces)
        recipe = make_recipe(given.target.build, given.plan, batch, given.loss)
        everything = shard_map(recipe)
        _check_choice(everything, rank, parameter)
        if as_json:
            print(json.dumps(_data(shard_map(recipe, None if rank is None else [rank]), parameter)))
        else:
            console().print(render(everything, rank=rank, parameter=parameter, pictures=pictures))


def _data(shard_map: Any, parameter: str | None) -> dict[str, Any]:
    """The map as plain values; with a glob, of the parameters that fit."""
    found: dict[str, Any] = shard_map.to_dict()
    if parameter is not None:
        names = {name for row in shard_map.matching(parameter) for name in row.names}
        found["parameters"] = [line for line in found["parameters"] if line["name"] in names]
    return found


def _check_choice(shard_map: Any, rank: int | None, parameter: str | None) -> None:
    """Raises PlanError where the mesh lacks the rank, or the model the parameter."""
    findings = Findings("this command")
    size = shard_map.mesh.size
    if rank is not None and not 0 <= rank < size:
        required = f"a rank of {shard_map.mesh}: 0 to {size - 1}"
        findings.add(where="--rank", given=str(rank), required=required, fix=f"--rank {size - 1}")
    try:
        if parameter is not None:
            shard_map.matching(parameter)
    except KeyError:
        near = shard_map.near(parameter)
        given = f"{parameter}, which fits no parameter"
        findings.add(
            where="--parameter", given=given, required=f"such as {', '.join(near)}", fix=f"--parameter {near[0]}"
        )
    findings.raise_if_any()


# --- check ------------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples(
    "meshwright check model.py:small --mesh dp_shard=2,tp=2",
    "meshwright check hf:llama --mesh tp=2 --set hidden_size=64,intermediate_size=128,num_hidden_layers=2",
    "meshwright check hf:bert --plan plan.yaml --set num_hidden_layers=2",
))  # fmt: skip
def check(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    loss: LossOption = None,
    device: DeviceOption = None,
    seq: SeqOption = None,
) -> None:
    """Check that a plan computes the same as one device: loss, every gradient, every parameter after three steps.

    Starts local workers, on GPUs where there are some. Exit code 0 where it passes, 1 where it does not."""
    with _told():
        given = _Given.read(
            target, mesh, plan, set_, loss, device, seq=seq, length=16, rows=lambda pieces: max(2 * pieces, 4)
        )
        from meshwright.parity import check as compare

        with _workers(given) as workers:
            report = compare(given.target.build, given.target.batch, given.plan, loss=given.loss, workers=workers)
        console().print(Text(str(report)), soft_wrap=True)
    raise typer.Exit(0 if report.passed else 1)


# --- train ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Course:
    """How to train."""

    steps: int
    global_batch: int
    lr: float


@app.command(epilog=_examples(
    "meshwright train model.py:small --mesh dp_shard=2,tp=2 --steps 100 --lr 1e-3  # starts 4 local workers",
    "torchrun --nproc-per-node 8 -m meshwright train model.py:small --mesh fsdp=8",
    "meshwright train hf:gpt2 --mesh tp=2 --set n_layer=2,n_embd=64,recompute=blocks --seq 64",
))  # fmt: skip
def train(
    target: TargetArgument,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    set_: SetOption = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps", min=1)] = 20,
    global_batch: Annotated[int | None, typer.Option(help="Rows a step, over all ranks", min=1)] = None,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate")] = 3e-4,
    loss: LossOption = None,
    device: DeviceOption = None,
    seq: SeqOption = None,
) -> None:
    """Train with AdamW on the target's dataset, the third thing it returns; else on its batch, again and again.

    Alone it starts local workers, on GPUs where there are some; under torchrun each process is one rank."""
    rank = int(os.environ.get("RANK", -1))
    with _told(quiet=rank > 0):
        given = _Given.read(
            target,
            mesh,
            plan,
            set_,
            loss,
            device,
            seq=seq,
            length=128,
            rows=lambda pieces: global_batch or _rows(pieces),
        )
        course = _Course(steps, global_batch or _rows(given.pieces), lr)
        _check_course(given, course, global_batch)
        with _Bar(steps, shown=rank <= 0) as bar:
            started = time.monotonic()
            losses = _train_alone(given, course, bar) if rank < 0 else _train_here(given, course, bar.tell)
            seconds = time.monotonic() - started
        if rank <= 0:
            console().print(
                f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {steps} steps, {seconds:.1f} s", highlight=False
            )


def _rows(pieces: int) -> int:
    """A small global batch that divides."""
    return pieces * math.ceil(8 / pieces)


def _check_course(given: _Given, course: _Course, global_batch: int | None) -> None:
    """Raises PlanError, before anything starts, where the plan or the batch does not fit."""
    from meshwright.api import make_recipe
    from meshwright.run.batches import check_global_batch

    check_global_batch(course.global_batch, given.plan.mesh, given.plan.microbatches)
    if global_batch is not None and given.target.dataset is None and not given.target.spec.startswith("hf:"):
        findings = Findings("this command")
        required = "a dataset to take rows from: the third thing that the target returns"
        where, fix = "--global-batch", "return model, batch, dataset"
        findings.add(where=where, given=f"{global_batch}, and a target without a dataset", required=required, fix=fix)
        findings.raise_if_any()
    make_recipe(given.target.build, given.plan, given.target.batch, given.loss)


def _train_alone(given: _Given, course: _Course, bar: _Bar) -> list[float]:
    """In local workers, which find the target anew: neither model nor dataset travels."""
    with _workers(given) as workers:
        found: list[list[float]] = workers.run(
            _train_in_worker, given.named(), course,
            ranks=given.plan.mesh.size, timeout=_PATIENCE, on_report=bar.tell,
        )  # fmt: skip
    return found[0]


def _train_in_worker(named: tuple[Any, ...], course: _Course) -> list[float]:
    from meshwright.run.workers import report

    return _train_here(_Given.from_names(*named), course, report)


def _train_here(given: _Given, course: _Course, tell: Callable[[loop.Progress], None]) -> list[float]:
    """On this rank, together with the others."""
    import torch.distributed as dist

    from meshwright.api import parallelize
    from meshwright.run import loop

    target = given.target
    started = not dist.is_initialized()
    job = parallelize(target.build, given.plan, batch=target.batch, loss=given.loss, device=given.device)
    rows, data = (None, target.batch) if target.dataset is None else (course.global_batch, target.dataset)
    try:
        return loop.train(
            job, data, steps=course.steps, global_batch=rows, lr=course.lr, seed=given.plan.seed, on_step=tell
        )
    finally:
        if started:
            dist.destroy_process_group()


_PATIENCE = 900.0  # seconds that a step, or the start of a large model, may take


class _Bar:
    """Progress: a bar on a terminal, else a line now and then."""

    def __init__(self, steps: int, *, shown: bool) -> None:
        self.steps, self.shown, self.console = steps, shown, console()
        told = TextColumn("{task.fields[told]}")
        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), told, TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, disable=not (shown and self.console.is_terminal))

    def __enter__(self) -> _Bar:
        self.progress.start()
        self.task = self.progress.add_task("", total=self.steps, told="starting")
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def tell(self, step: loop.Progress) -> None:
        """Show a step."""
        told = f"loss {step.loss:.4f}  {count_text(step.rate)} {step.unit}/s  {size_text(step.memory)}"
        self.progress.update(self.task, completed=step.step, told=told)
        every = max(1, self.steps // 10)
        if self.shown and not self.console.is_terminal and (step.step in (1, self.steps) or step.step % every == 0):
            self.console.print(f"step {step.step}/{self.steps}  {told}", highlight=False)


# --- env --------------------------------------------------------------------------------------------------------------


@app.command(epilog=_examples("meshwright env", "torchrun --nproc-per-node 2 -m meshwright env"))
def env() -> None:
    """Show what Meshwright finds here: versions, backends, cores, memory, the launcher's variables, extras."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _environment().items():
        table.add_row(Text(name, style="bold"), Text(value))
    console().print(table)


def _environment() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch
    import torch.distributed as dist

    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} –"

    cuda, gpus = torch.version.cuda, torch.cuda.device_count()
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {
        "meshwright": __version__,
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {cuda or 'not built in'}",
        "GPUs": ", ".join(torch.cuda.get_device_name(i) for i in range(gpus)) or "none",
        "backends": ", ".join(name for name, there in backends.items() if there) or "none",
        "cores": f"{here} of {os.cpu_count()}",
        "memory": size_text(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "launcher": ", ".join(f"{key}={os.environ[key]}" for key in launched if key in os.environ)
        or "none: a plain process",
        "extras": ", ".join(map(installed, ("transformers", "scikit-learn", "tensorboard"))),
    }


# --- what is given ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Given:
    """What a command line names: the target, the plan, the loss of the output (None: its own), the device."""

    target: Target
    plan: Plan
    loss: TargetLoss | None
    device: str | None
    settings: Mapping[str, Any]
    rows: int
    length: int

    @staticmethod
    def read(
        target: str,
        mesh: str | None,
        plan: str | None,
        sets: Sequence[str] | None,
        loss: str | None,
        device: str | None = None,
        *,
        seq: int | None,
        length: int,
        rows: Callable[[int], int] = lambda pieces: min(pieces, 8),
    ) -> _Given:
        """Raises PlanError with every problem of all of them."""
        ours, others = _divided(sets or ())
        settings = {key: _value(text) for key, text in others.items()} | ({"seq_len": seq} if seq else {})
        problems = _Problems()
        found, count = problems.of(lambda: Plan.from_command(plan, mesh, ours)), 1
        if found is not None:
            count = rows(found.mesh.data_size * found.microbatches)
        loaded = problems.of(lambda: load_target(target, settings, rows=count, length=length))
        loss_of = problems.of(lambda: TargetLoss(loss)) if loss else None
        problems.of(lambda: _check_device(device))
        problems.raise_if_any()
        assert found is not None and loaded is not None
        return _Given(loaded, found, loss_of, device, settings, count, length)

    @staticmethod
    def from_names(
        spec: str, settings: Mapping[str, Any], rows: int, length: int, plan: Plan, loss: TargetLoss | None,
        device: str | None,
    ) -> _Given:  # fmt: skip
        """The inverse of `named`, in another process."""
        target = load_target(spec, settings, rows=rows, length=length)
        return _Given(target, plan, loss, device, settings, rows, length)

    def named(self) -> tuple[Any, ...]:
        """What another process needs to find the same."""
        return self.target.spec, self.settings, self.rows, self.length, self.plan, self.loss, self.device

    @property
    def pieces(self) -> int:
        """Into how many pieces a batch is divided: data ranks × microbatches."""
        return self.plan.mesh.data_size * self.plan.microbatches


class _Problems:
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
            raise PlanError([finding for error in self.errors for finding in error.findings], subject)


def _check_device(device: str | None) -> None:
    """Raises PlanError where there is no such device."""
    findings = Findings("this command")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            required = "cpu: torch finds no GPU here"
            findings.add(where="--device", given=device, required=required, fix="--device cpu")
    elif device not in (None, "cpu"):
        findings.add(where="--device", given=str(device), required="cpu or cuda", fix="--device cpu")
    findings.raise_if_any()


def _divided(sets: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Settings of the plan, and those of the target. ``a=1,b=2`` are two; ``mesh=dp_shard=2,tp=2`` is one."""
    ours: list[str] = []
    others: dict[str, str] = {}
    for given in sets:
        for setting in [given] if given.startswith("mesh=") else re.split(r",(?=[\w.]+=)", given):
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


# --- telling ----------------------------------------------------------------------------------------------------------


@contextmanager
def _told(*, quiet: bool = False) -> Iterator[None]:
    """A person's mistake is told once, without a traceback: exit code 2; a worker's failure once: 1."""
    from meshwright.run.workers import WorkerError

    try:
        yield
    except (PlanError, WorkerError) as error:
        if not quiet:
            console(stderr=True).print(Text(str(error)), soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, PlanError) else 1) from None


@contextmanager
def _workers(given: _Given) -> Iterator[LocalWorkers]:
    """As many local workers as the mesh has ranks; they share the cores."""
    import torch

    from meshwright.run.workers import local_workers

    size = given.plan.mesh.size
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with local_workers(size, device=device, threads=max(1, (os.cpu_count() or 1) // size)) as workers:
        yield workers


if __name__ == "__main__":
    sys.exit("run it as: python -m meshwright")
