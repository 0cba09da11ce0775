"""``record``: records what a training script computes, by hooks on its optimizers.

    with mw.record(model, "runs/eight", optimizer=optimizer) as rec:
        for batch in batches:
            loss = loss_of(model(batch))
            loss.backward()
            rec.loss(loss, rows=len(batch))
            optimizer.step()           before: gradients are copied; after: parameters are
            optimizer.zero_grad()

The hooks only copy this rank's tensors to the host. Ranks communicate once, at the end: when the given optimizers have made
``steps`` steps, or at the end of the ``with`` block.
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
from meshwright.recording.copies import CopiedStep, TensorCopy, copied, digests_of_rows, loss_value, settings_of
from meshwright.recording.folder import is_recording
from meshwright.recording.layout import Layout, OfJob, axis_names
from meshwright.recording.manifest import facts_of_rank, manifest_of
from meshwright.recording.parameter_names import NamedParameter, Rename, named_parameters
from meshwright.recording.views import Views
from meshwright.recording.writing import Ranks, begin, publish, temporary_of, write_tensors
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
    """Records the next steps of a training script: whole gradients, updated parameters, losses. Every rank calls it.

    Call it after the model is wrapped and the optimizer is made. It does not change the run. It works with any script: one
    process, DDP, FSDP, DTensors, Accelerate, torchtitan, a trainer. ``meshwright compare`` compares two recordings.

    Args:
        model: the model, wrapped as for training; or the parts of it that this rank holds; or a job.
        path: the folder to write. A recording that exists there is replaced when the new one is complete.
        optimizer: one or several, plain or wrapped. When each has made ``steps`` steps, the folder is written and the hooks
            are removed. Without it, all optimizers that hold parameters of the model count, and the folder is written at the
            end of the ``with`` block.
        steps: number of optimizer steps to record.
        mesh: axes and sizes for the report, such as ``{"dp": 4, "tp": 2}``, in addition to those of DTensors.
        names: function from a local name to the name on one device.

    Raises:
        PlanError: with every reason why the model or the optimizers cannot be recorded.

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
    """A recording in progress. ``record`` makes it.

    Attributes:
        path: the folder to write.
        done: whether the recording has ended.
    """

    def __init__(
        self, model: Recordable, path: Path, optimizers: list[Optimizer] | None, steps: int, axes: dict[str, int],
        names: Rename | None,
    ) -> None:  # fmt: skip
        self.path, self.done = path, False
        self._parameters = _parameters(model, names)
        self._layouts = _layouts(model)
        self._by_id = {id(parameter.tensor): parameter for parameter in self._parameters}
        self._optimizers, self._max_steps, self._axes = optimizers, steps, axes
        self._start: dict[str, TensorCopy] = {}
        self._steps: list[CopiedStep] = []
        self._count: dict[int, int] = {}  # id of an optimizer → number of its steps
        self._depth = 0  # of nested steps: a wrapper's step calls that of its optimizer
        self._pending = CopiedStep()  # losses and rows since the last step of an optimizer
        self._handles: list[Any] = []
        self._check()

    # --- what a script calls --------------------------------------------------------------------------------------------

    def loss(self, loss: Tensor | float, *, rows: int | None = None, batch: Any = None) -> None:
        """Records the loss of one forward. Call it before ``optimizer.step()``, and for each forward of a step.

        Args:
            loss: not scaled or divided.
            rows: number of rows (or labels, or tokens) that the loss is the mean of. Ranks with more rows weigh more.
            batch: the rows: tensors whose dim 0 are rows, or dicts and lists of tensors. They are counted, and a digest of
                each row is recorded, so that a comparison can find that a rank has seen other rows.
        """
        if self.done:
            if not any(step.losses for step in self._steps):
                warnings.warn("rec.loss came after the recording: call it before optimizer.step()", stacklevel=2)
            return
        digests = digests_of_rows(batch) if batch is not None else []
        self._pending.losses.append(loss_value(loss, len(digests) if rows is None and batch is not None else rows))
        self._pending.rows += digests

    def close(self) -> None:
        """Writes the folder, and removes all hooks. Collective. Does nothing if the recording has ended.

        Raises:
            PlanError: on every rank, if no rank recorded a step, or if ranks have different tensors under the same name.
        """
        if self.done:
            return
        self._end()
        ranks = Ranks.here()
        count = max(ranks.agreement.gather(lambda: len(self._steps), _FAILED))
        if not count:
            raise PlanError([_no_step(self._optimizers)], "this recording")
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
        """Registers hooks on the optimizers; without optimizers, on all of this process."""
        if self._optimizers is None:
            self._handles = [
                register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
            ]  # fmt: skip
        else:
            for one in self._optimizers:
                self._handles += [one.register_step_pre_hook(self._before), one.register_step_post_hook(self._after)]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook before an optimizer's step: copies gradients; before the first step, also parameters."""
        if not self._is_recorded(optimizer):
            return
        self._depth += 1
        if self._depth > 1:
            return
        number = self._count[id(optimizer)] = self._count.get(id(optimizer), 0) + 1
        if number > self._max_steps:
            return
        if not self._start:
            self._start = {
                parameter.name: self._copy(parameter.tensor.detach(), parameter) for parameter in self._parameters
            }
        is_first_optimizer = number > len(self._steps)
        if is_first_optimizer:
            self._steps.append(CopiedStep())
        step = self._steps[number - 1]
        # The first optimizer of a step also copies the gradients of parameters that no optimizer holds.
        self._copy_gradients(
            step, self._parameters if is_first_optimizer else self._parameters_of(optimizer), optimizer
        )
        step.losses += self._pending.losses
        step.rows += self._pending.rows
        step.settings.append(settings_of(optimizer))
        self._pending = CopiedStep()

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook after an optimizer's step: copies parameters. After the last step, writes the folder."""
        if not self._depth or not self._is_recorded(optimizer):
            return
        self._depth -= 1
        number = self._count.get(id(optimizer), 0)
        if self._depth or not 0 < number <= self._max_steps:
            return
        step, stepped = self._steps[number - 1], self._parameters_of(optimizer)
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            step.notes["the optimizer computed gradients itself, by a closure: these are the last ones"] = None
            self._copy_gradients(step, stepped, optimizer)
        step.stepped |= {parameter.name for parameter in stepped}
        for parameter in (
            self._parameters if self._layouts else stepped
        ):  # all ranks of a job take part in gathering a parameter
            step.parameters[parameter.name] = self._copy(parameter.tensor.detach(), parameter)
        if self._optimizers and all(self._count.get(id(one), 0) >= self._max_steps for one in self._optimizers):
            self.close()

    def _is_recorded(self, optimizer: Optimizer) -> bool:
        """Whether to record steps of this optimizer: it was passed to ``record``, or it holds parameters of the model."""
        return not self.done and (self._optimizers is not None or bool(self._parameters_of(optimizer)))

    def _parameters_of(self, optimizer: Optimizer) -> list[NamedParameter]:
        """The model's parameters that an optimizer holds."""
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [self._by_id[key] for key in ids if key in self._by_id]

    def _copy_gradients(self, step: CopiedStep, parameters: list[NamedParameter], optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, if the optimizer's kernel unscales
        if scale is not None:
            step.notes["gradients were scaled by a GradScaler, and are recorded without its scale"] = None
        for parameter in parameters:
            if not parameter.tensor.requires_grad and not self._layouts:
                continue
            step.gradients[parameter.name] = self._copy(parameter.tensor.grad, parameter, scale)

    def _copy(self, t: Tensor | None, parameter: NamedParameter, scale: Tensor | None = None) -> TensorCopy:
        return copied(t, parameter.tensor, self._layouts.get(parameter.name), scale)

    def _end(self) -> None:
        """Removes the hooks."""
        self.done = True
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- the folder -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises PlanError with every reason why this cannot be recorded."""
        findings = Findings("this recording")
        if self.path.exists() and not is_recording(self.path) and (not self.path.is_dir() or any(self.path.iterdir())):
            findings.add(
                where=str(self.path), given="a folder or file that is not a recording",
                required="a new folder, or a recording to replace", fix='mw.record(model, "runs/eight", ...)',
            )  # fmt: skip
        if self._max_steps < 1:
            findings.add(where="steps", given=str(self._max_steps), required="1 or more", fix="steps=1")
        if not self._parameters:
            findings.add(where="model", given="no parameters", required="a model with parameters")
        if any(parameter.tensor.is_meta for parameter in self._parameters if parameter.name not in self._layouts):
            findings.add(
                where="model", given="parameters on meta, without values", required="the model as it is trained",
                fix="call mw.record after the weights are made, or loaded",
            )  # fmt: skip
        for optimizer in self._optimizers or ():
            if not self._parameters_of(optimizer) and not self._layouts:
                findings.add(
                    where=type(optimizer).__name__, given="none of its parameters are the model's",
                    required="an optimizer of the parameters that the model has now",
                    fix="make it after fully_shard, parallelize_module or prepare, which replace the model's parameters",
                )  # fmt: skip
        findings.raise_if_any()

    def _write(self, ranks: Ranks, count: int) -> None:
        """Writes the folder. Collective. ``count``: number of steps of the rank that has the most."""
        ranks.agreement.first(lambda: begin(self.path), _FAILED)
        temporary = temporary_of(self.path)
        copies_by_file: dict[str, Mapping[str, TensorCopy]] = {"start": self._start}
        for i in range(count):
            step = self._steps[i] if i < len(self._steps) else CopiedStep()
            copies_by_file[f"gradients-{i + 1}"] = step.gradients
            copies_by_file[f"parameters-{i + 1}"] = step.parameters
        tensors: dict[str, Views] = {}
        for file, copies in copies_by_file.items():
            tensors[file] = write_tensors(temporary / f"{file}.safetensors", copies, ranks)
        local_facts = facts_of_rank(self._parameters, self._start, self._steps, count, self._axes)
        facts = ranks.agreement.gather(lambda: local_facts, _FAILED)
        ranks.agreement.first(lambda: publish(self.path, manifest_of(facts, tensors)), _FAILED)


_FAILED = Finding("this recording", "it could not be written", "a folder that rank 0 can write")


def _parameters(model: Recordable, names: Rename | None) -> list[NamedParameter]:
    """The parameters of a model, or of a job, by their names on one device."""
    if not isinstance(model, Job):
        return named_parameters([model] if isinstance(model, nn.Module) else model, names)
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    return [NamedParameter(line.name, parameters[line.name], line.aliases) for line in model.recipe.parameters]


def _layouts(model: Recordable) -> dict[str, Layout]:
    """Name → layout of a job's parameters. Empty for other models, whose tensors tell their layout."""
    if not isinstance(model, Job):
        return {}
    return {line.name: OfJob(line, model.recipe, model.groups) for line in model.recipe.parameters}


def _optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer] | None:
    """The optimizers without wrappers (Accelerate, Lightning), whose steps run the hooks."""
    if optimizer is None:
        return None
    several = cast(Iterable[Optimizer], [optimizer] if hasattr(optimizer, "param_groups") else optimizer)
    return [_unwrapped(one) for one in several]


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The innermost optimizer. A wrapper holds the next one as ``optimizer``."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def _axes(mesh: DeviceMesh | Mapping[str, int] | None) -> dict[str, int]:
    """Name → size of each axis."""
    if isinstance(mesh, DeviceMesh):
        return dict(zip(axis_names(mesh), mesh.shape, strict=True))
    return {str(name): int(size) for name, size in (mesh or {}).items()}


def _no_step(optimizers: list[Optimizer] | None) -> Finding:
    """The finding for a recording in which no optimizer stepped."""
    return Finding(
        "this recording", "no step of an optimizer that holds parameters of this model",
        "at least one optimizer.step() within the recording",
        "" if optimizers else "an optimizer that was made before the model was wrapped holds parameters that it no longer has",
    )  # fmt: skip


__all__ = ["Recording", "record"]
