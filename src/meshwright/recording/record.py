"""``record``: what a training script computes, written down while it runs, by hooks on its optimizers.

    with mw.record(model, "runs/eight", optimizer=optimizer) as rec:
        for batch in batches:
            loss = loss_of(model(batch))
            loss.backward()
            rec.loss(loss, rows=len(batch))
            optimizer.step()           before: gradients are copied; after: parameters are
            optimizer.zero_grad()

Hooks only copy what this rank holds to the host. Ranks talk to each other once, at the end: when the given optimizers have made
``steps`` steps, or where the ``with`` ends.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.errors import Finding, Findings, PlanError
from meshwright.recording.folder import is_recording
from meshwright.recording.layout import Layout, OfJob, axis_names
from meshwright.recording.manifest import manifest_of, told_of
from meshwright.recording.named import Named, Rename, named_parameters
from meshwright.recording.taken import Copied, Step, copied, digests_of_rows, loss_value, settings_of
from meshwright.recording.views import Views
from meshwright.recording.writing import Ranks, aside_of, begin, publish, write_tensors
from meshwright.runtime.job import Job

if TYPE_CHECKING:
    from typing_extensions import Self

Recordable = nn.Module | Job | Iterable[nn.Module]


def record(
    model: Recordable,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    steps: int = 1,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    names: Rename | None = None,
) -> Recording:
    """Records the next steps of a training script: whole gradients, updated parameters, losses. Every rank calls it, alike.

    Call it when the model is wrapped and the optimizer made. It changes nothing of the run, which may be any: one process, DDP,
    FSDP, DTensors, Accelerate, torchtitan, a trainer. Two recordings are compared by ``meshwright compare``.

    Args:
        model: the model, wrapped as it is trained; the parts that this rank holds of it; or a job.
        path: the folder to write. A recording that is there is replaced, once the new one is whole.
        optimizer: one or several, as they are or wrapped. When each has made ``steps`` steps, the folder is written at once,
            and hooks are removed. Without, all optimizers that hold parameters of the model count, and the folder is written
            where the ``with`` ends.
        steps: optimizer steps to record.
        mesh: axes and sizes for the report, in addition to those of the DTensors that are met, such as ``{"dp": 4, "tp": 2}``.
        names: gives the name on one device of a name here.

    Raises:
        PlanError: everything that keeps these from being recorded.

    Example:
        >>> import tempfile, torch, meshwright as mw
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with mw.record(model, folder, optimizer=optimizer) as rec:
        ...     loss = model(torch.ones(4, 2)).mean()
        ...     loss.backward()
        ...     rec.loss(loss, rows=4)
        ...     optimizer.step()
        >>> sorted(file.name for file in rec.path.iterdir())
        ['gradients-1.safetensors', 'manifest.json', 'parameters-1.safetensors', 'start.safetensors']
    """
    recording = Recording(model, Path(path), _optimizers(optimizer), steps, _axes(mesh), names)
    recording.attach()
    return recording


class Recording:
    """What is being recorded. Made by ``record``.

    Attributes:
        path: the folder that is written.
        done: whether it records no more.
    """

    def __init__(
        self, model: Recordable, path: Path, optimizers: list[Optimizer] | None, steps: int, axes: dict[str, int],
        names: Rename | None,
    ) -> None:  # fmt: skip
        self.path, self.done = path, False
        self._named = _named(model, names)
        self._layouts = _layouts(model)
        self._by_id = {id(named.parameter): named for named in self._named}
        self._optimizers, self._wanted, self._axes = optimizers, steps, axes
        self._start: dict[str, Copied] = {}
        self._steps: list[Step] = []
        self._count: dict[int, int] = {}  # steps of each optimizer
        self._depth = 0  # of optimizers that step within another's step
        self._pending = Step()  # losses and rows that were told since the last step of an optimizer
        self._handles: list[Any] = []
        self._check()

    # --- what a script calls --------------------------------------------------------------------------------------------

    def loss(self, loss: Tensor | float, *, rows: int | None = None, batch: Any = None) -> None:
        """The loss of one forward, as it is, before the optimizer steps. Several forwards of a step: call it for each.

        Args:
            rows: how many rows (or labels, or tokens) it is the mean of, so that ranks with more of them weigh more.
            batch: the rows themselves: tensors whose dim 0 are rows, or dicts and lists of such. They are counted, and a digest
                of each is recorded: then a comparison can tell that a rank has seen other rows.
        """
        if self.done:
            if not any(step.losses for step in self._steps):
                warnings.warn("rec.loss came after the recording: call it before optimizer.step()", stacklevel=2)
            return
        digests = digests_of_rows(batch) if batch is not None else []
        self._pending.losses.append(loss_value(loss, len(digests) if rows is None and batch is not None else rows))
        self._pending.rows += digests

    def close(self) -> None:
        """Writes the folder, and removes all hooks. Collective; does nothing where that is done.

        Raises PlanError on every rank: no step was seen, or ranks have different tensors under the same name.
        """
        if self.done:
            return
        self._end()
        ranks = Ranks.here()
        count = max(ranks.agreement.gather(lambda: len(self._steps), _FAILED))
        if not count:
            raise PlanError([_nothing_seen(self._optimizers)], "this recording")
        self._write(ranks, count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    # --- hooks ------------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Hooks the optimizers."""
        if self._optimizers is None:
            self._handles = [
                register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
            ]  # fmt: skip
        else:
            for one in self._optimizers:
                self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._counts_here(optimizer):
            return
        self._depth += 1
        if self._depth > 1:
            return
        number = self._count[id(optimizer)] = self._count.get(id(optimizer), 0) + 1
        if number > self._wanted:
            return
        if not self._start:
            self._start = {n.name: self._copy(n.parameter.detach(), n) for n in self._named}
        first = number > len(self._steps)  # then those that no optimizer holds are taken too
        if first:
            self._steps.append(Step())
        step = self._steps[number - 1]
        self._take_gradients(step, self._named if first else self._held_by(optimizer), optimizer)
        step.losses += self._pending.losses
        step.rows += self._pending.rows
        step.settings.append(settings_of(optimizer))
        self._pending = Step()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._depth or not self._counts_here(optimizer):
            return
        self._depth -= 1
        number = self._count.get(id(optimizer), 0)
        if self._depth or not 0 < number <= self._wanted:
            return
        step, held = self._steps[number - 1], self._held_by(optimizer)
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            step.notes["the optimizer computed gradients itself, by a closure: these are the last ones"] = None
            self._take_gradients(step, held, optimizer)
        step.stepped |= {named.name for named in held}
        for named in self._named if self._layouts else held:  # what a job holds is gathered by all of its ranks
            step.parameters[named.name] = self._copy(named.parameter.detach(), named)
        if self._optimizers and all(self._count.get(id(one), 0) >= self._wanted for one in self._optimizers):
            self.close()

    def _counts_here(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's step is the model's. One that was given counts where it holds nothing too."""
        return not self.done and (self._optimizers is not None or bool(self._held_by(optimizer)))

    def _held_by(self, optimizer: Optimizer) -> list[Named]:
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [self._by_id[key] for key in held if key in self._by_id]

    def _take_gradients(self, step: Step, which: list[Named], optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, if the optimizer's kernel unscales
        if scale is not None:
            step.notes["gradients were scaled by a GradScaler, and are recorded without its scale"] = None
        for named in which:
            if not named.parameter.requires_grad and not self._layouts:
                continue
            step.gradients[named.name] = self._copy(named.parameter.grad, named, scale)

    def _copy(self, t: Tensor | None, named: Named, scale: Tensor | None = None) -> Copied:
        return copied(t, named.parameter, self._layouts.get(named.name), scale)

    def _end(self) -> None:
        self.done = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- the folder -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        findings = Findings("this recording")
        if self.path.exists() and not is_recording(self.path) and (not self.path.is_dir() or any(self.path.iterdir())):
            findings.add(
                where=str(self.path), given="something that is no recording",
                required="a new folder, or a recording to replace", fix='mw.record(model, "runs/eight", ...)',
            )  # fmt: skip
        if self._wanted < 1:
            findings.add(where="steps", given=str(self._wanted), required="1 or more", fix="steps=1")
        if not self._named:
            findings.add(where="model", given="no parameters", required="a model with parameters")
        if any(n.parameter.is_meta for n in self._named if n.name not in self._layouts):
            findings.add(
                where="model", given="parameters on meta, without values", required="the model as it is trained",
                fix="call mw.record after the weights are made, or loaded",
            )  # fmt: skip
        for one in self._optimizers or ():
            if not self._held_by(one) and not self._layouts:
                findings.add(
                    where=type(one).__name__, given="none of its parameters are the model's",
                    required="an optimizer of the parameters that the model has now",
                    fix="make it after fully_shard, parallelize_module or prepare: they put others in the model's place",
                )  # fmt: skip
        findings.raise_if_any()

    def _write(self, ranks: Ranks, count: int) -> None:
        ranks.agreement.first(lambda: begin(self.path), _FAILED)
        aside = aside_of(self.path)
        tensors: dict[str, Views] = {}
        kinds: list[tuple[str, Mapping[str, Copied]]] = [("start", self._start)]
        for at in range(count):
            step = self._steps[at] if at < len(self._steps) else Step()
            kinds += [(f"gradients-{at + 1}", step.gradients), (f"parameters-{at + 1}", step.parameters)]
        for file, copies in kinds:
            tensors[file] = write_tensors(aside / f"{file}.safetensors", copies, ranks)
        own = told_of(self._named, self._start, self._steps, count, self._axes)
        told = ranks.agreement.gather(lambda: own, _FAILED)
        ranks.agreement.first(lambda: publish(self.path, manifest_of(told, tensors)), _FAILED)


_FAILED = Finding("this recording", "it could not be written", "a folder that rank 0 can write")


def _named(model: Recordable, names: Rename | None) -> list[Named]:
    if not isinstance(model, Job):
        return named_parameters([model] if isinstance(model, nn.Module) else model, names)
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    return [Named(line.name, parameters[line.name], line.aliases) for line in model.recipe.parameters]


def _layouts(model: Recordable) -> dict[str, Layout]:
    """How a job's parameters lie; other layouts are read off the tensors."""
    if not isinstance(model, Job):
        return {}
    return {line.name: OfJob(line, model.recipe, model.groups) for line in model.recipe.parameters}


def _optimizers(given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer] | None:
    """The optimizers that step: a wrapper's own (Accelerate, Lightning), which it holds as ``optimizer``."""
    if given is None:
        return None
    several = cast(Iterable[Optimizer], [given] if hasattr(given, "param_groups") else given)
    return [_stepping(one) for one in several]


def _stepping(optimizer: Optimizer) -> Optimizer:
    within = getattr(optimizer, "optimizer", None)
    return _stepping(within) if isinstance(within, Optimizer) else optimizer


def _axes(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, int]:
    if isinstance(mesh, DeviceMesh):
        return dict(zip(axis_names(mesh), mesh.shape, strict=True))
    return {str(name): int(size) for name, size in (mesh or {}).items()}


def _nothing_seen(optimizers: list[Optimizer] | None) -> Finding:
    return Finding(
        "this recording", "no step of an optimizer that holds parameters of this model",
        "at least one optimizer.step() within the recording",
        "" if optimizers else "an optimizer that was made before the model was wrapped holds parameters that it no longer has",
    )  # fmt: skip


__all__ = ["Recording", "record"]
