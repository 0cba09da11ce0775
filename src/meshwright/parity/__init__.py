"""``check``: the same loss, gradients, update and buffers as one device?

    case        what is compared, and the rows that each forward is given
    one_device  what runs in a worker: the model in plain PyTorch
    the_job     what runs in all workers: the model under the plan
    compare     errors of all values, against the scale of the whole; likely causes
    report      ``Report``: the verdict, as data and as text

From a plain process:

    report = check(build, batch, "dp_shard=2,tp=2")
    print(report)

Start with ``check``, below; errors are defined in ``compare``.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshwright.deferred import Build
from meshwright.errors import Findings as Problems
from meshwright.parity.case import Case
from meshwright.parity.compare import KINDS, Findings, compare
from meshwright.parity.one_device import Reference, reference
from meshwright.parity.own_types import MARGIN, own_findings, own_reference
from meshwright.parity.report import Report
from meshwright.parity.the_job import Outcome, distributed
from meshwright.plan import Plan, PlanLike
from meshwright.runtime.checksum import digest
from meshwright.runtime.rows.batch import plain
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.workers.pickling import Packer, pack
from meshwright.workers.pool import LocalWorkers, WorkerError, local_workers

__all__ = ["Report", "check"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_KEPT = 8  # references that a pool keeps


def check(
    build: Build,
    batch: Any,
    plan: PlanLike,
    *,
    loss: Loss | None = None,
    workers: LocalWorkers | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    steps: int = 3,
    timeout: float = 120.0,
) -> Report:
    """Compares a model under a plan with the same model on one device. From a plain process.

    One worker runs ``build()`` in plain PyTorch; then the workers run the job, each data rank on its rows of ``batch``.
    Parameters are perturbed first, alike on both sides, and dropout is off. Each step clips gradients to a global norm
    of 1 and takes a step of SGD with momentum; one step has two forwards and backwards, whose gradients add up. From the third
    forward on the batch's rows stand in other places, and one of them may stand for another. Random
    numbers are seeded once, at the start, as in training. In float64, both sides run under a mode that makes casts to float32
    casts to float64; it computes nothing.

    Args:
        build: makes the model; a function or class of a module, or a ``functools.partial`` of one.
        batch: the global batch: a dict of keyword arguments, or a tuple. Floats are cast to the type of the check.
        plan: as for ``parallelize``. Its precision is replaced by the type of the check. A job that is right is then run in the
            precision of the plan too, against one device in the same types (``meshwright.parity.own_types``).
        loss: the loss of the model's output; default ``output.loss``. Like ``build``, of a module.
        workers: a pool of at least as many workers as the mesh has ranks; it keeps the references of the last checks.
            Default: workers are started for this check.
        dtype: ``torch.float64`` or ``torch.float32``: compare in this type alone. Default: float64, or float32 where one device
            raises in float64; then the plan's own types.
        tolerance: relative; default 1e-9 in float64, 1e-4 in float32.
        steps: optimizer steps.
        timeout: seconds that either side may go without finishing a step.

    Returns:
        A report, which is true where all errors are within the tolerance. Where a side fails or hangs, a report that
        says so.

    Raises:
        PlanError: every problem of the plan, or of what cannot be sent to a worker.
    """
    started, plan, batch = time.monotonic(), Plan.parse(plan), plain(batch)
    plan.check_mesh()
    case = Case(build, batch, loss or output_loss, dtype or torch.float64, steps, plan.seed)
    _refuse(case, plan, workers)
    with ExitStack() as stack:
        pool = workers or stack.enter_context(local_workers(plan.mesh.size))
        case = replace(case, device=pool.device)
        pool.start(plan.mesh.size)
        side, notes = "one device", _notes(plan, case)
        try:
            one = _reference(pool, case, narrow=dtype is None, timeout=timeout)
            case, notes, side = one.case, (*one.notes, *_notes(plan, one.case)), "the job"
            outcome = _outcome(pool, case, plan.replace(precision=_name(case.dtype)), timeout)
            judged = _judge(one, outcome, plan, notes, _tolerance(tolerance, case), started)
            if dtype is not None or plan.precision == _name(case.dtype) or not judged:
                return judged
            side = f"the job in {plan.precision}"
            return _in_own_types(pool, case, plan, judged, timeout, started)
        except WorkerError as error:
            if error.plan_error is not None:
                raise error.plan_error from None
            return Report(
                passed=False, plan=plan, tolerance=_tolerance(tolerance, case), dtype=_name(case.dtype),
                steps=steps, seconds=time.monotonic() - started, notes=notes, failure=f"{side}: {error}",
            )  # fmt: skip


def _in_own_types(pool: LocalWorkers, case: Case, plan: Plan, judged: Report, timeout: float, started: float) -> Report:
    """The verdict in the plan's own types, for a job that is right in the type of the check."""
    try:
        one, noise = pool.run(own_reference, case, plan.precision, ranks=1, timeout=timeout)[0]
    except WorkerError as error:
        said = f"not compared in {plan.precision}, in which the model raises on one device ({error})".split("\n", 1)[0]
        return replace(judged, notes=(*judged.notes, said))
    if not isfinite(noise["loss"]):
        said = f"not compared in {plan.precision}, in which the loss of one device is not finite"
        return replace(judged, notes=(*judged.notes, said))
    outcome = _outcome(pool, replace(case, dtype=torch.float32), plan, timeout)
    findings = own_findings(one, noise, outcome, plan.precision)
    report = _report(one, outcome, findings, plan, judged.notes, MARGIN, started)
    if not report:
        said = (
            f"compared in {plan.precision}: errors are in units of what rounding in another order changes in a tensor"
        )
        return replace(report, dtype=plan.precision, notes=(*report.notes, said))
    said = f"compared in {plan.precision} too: off by {report.worst[2]:.1f} × what rounding in another order changes"
    return replace(judged, notes=(*judged.notes, said))


def _judge(
    one: Reference, outcome: Outcome, plan: Plan, notes: tuple[str, ...], tolerance: float, started: float
) -> Report:
    return _report(one, outcome, compare(one, outcome, tolerance), plan, notes, tolerance, started)


def _report(
    one: Reference, outcome: Outcome, findings: Findings, plan: Plan, notes: tuple[str, ...], tolerance: float,
    started: float,
) -> Report:  # fmt: skip
    every = [findings.errors["loss"], *(error for kind in KINDS for error in findings.errors[kind].values())]
    passed = all(error <= tolerance for error in every)
    return Report(
        passed=passed,
        plan=plan,
        tolerance=tolerance,
        dtype=_name(one.case.dtype),
        steps=one.case.steps,
        seconds=time.monotonic() - started,
        errors=findings.errors,
        recipe=outcome.recipe,
        fallbacks=outcome.fallbacks,
        collectives=outcome.collectives,
        words=findings.words,
        hints=findings.hints if not passed else (),
        notes=(*notes, *outcome.notes),
    )


def _notes(plan: Plan, case: Case) -> tuple[str, ...]:
    notes = []
    if case.dtype is torch.float64:
        notes.append("casts to float32 inside the model were casts to float64, on both sides")
    return tuple(notes)


def _tolerance(tolerance: float | None, case: Case) -> float:
    return TOLERANCES[case.dtype] if tolerance is None else tolerance


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the two runs ---------------------------------------------------------------------------------------------------


class References:
    """What one device found, by case: the last few, for as long as a pool lives."""

    def __init__(self) -> None:
        self._found: dict[bytes, Reference] = {}

    def get(self, case: Case, *, narrow: bool, run: Callable[[], Reference]) -> Reference:
        """The reference of a case; ``run`` makes it where it is not known."""
        key = _key((case, narrow))
        if key not in self._found:
            self._found[key] = run()
            for old in list(self._found)[:-_KEPT]:
                del self._found[old]
        return self._found[key]


def _reference(pool: LocalWorkers, case: Case, *, narrow: bool, timeout: float) -> Reference:
    """One device's side; of the pool's own, where it has run this case before."""

    def run() -> Reference:
        one: Reference = pool.run(reference, case, narrow=narrow, ranks=1, timeout=timeout)[0]
        return one

    return pool.kept(References).get(case, narrow=narrow, run=run)


def _outcome(pool: LocalWorkers, case: Case, plan: Plan, timeout: float) -> Outcome:
    outcome, *others = pool.run(distributed, case, plan, ranks=plan.mesh.size, timeout=timeout)
    return replace(outcome, buffers={rank: buffers for rank, buffers in enumerate(others, 1) if buffers})


def _refuse(case: Case, plan: Plan, workers: LocalWorkers | None) -> None:
    """Raises PlanError for arguments that no run could be made of."""
    findings = Problems("this check")
    for name in ("build", "batch", "loss"):
        _must_pickle(name, getattr(case, name), findings)
    if case.dtype not in TOLERANCES:
        findings.add(
            where="dtype", given=str(case.dtype), required="a type with a tolerance to judge by: float64 or float32",
            fix="dtype=torch.float64",
        )  # fmt: skip
    if case.steps < 1:
        findings.add(where="steps", given=str(case.steps), required="at least one step", fix="steps=3")
    if workers is not None and workers.ranks < plan.mesh.size:
        findings.add(
            where="workers", given=f"a pool of {workers.ranks}", required=f"a worker for each rank of {plan.mesh}",
            fix=f"local_workers({plan.mesh.size})",
        )  # fmt: skip
    findings.raise_if_any()


def _must_pickle(name: str, value: Any, findings: Problems) -> None:
    try:
        pack(value)
    except Exception as error:
        data = name == "batch"
        findings.add(
            where=name,
            given=f"{getattr(value, '__qualname__', type(value).__name__)}: {error}",
            required="tensors and plain values"
            if data
            else "a function or class that names no locks, files or handles",
            fix=f"{name} = ..., without functions, open files or handles"
            if data
            else f"def {name}_of_check(...):  # which makes what it needs itself",
        )


class _Digest(Packer):
    """Writes tensors as digests of their values, and functions as they are sent."""

    def persistent_id(self, x: Any) -> Any:
        return digest(x) if isinstance(x, Tensor) else None


def _key(value: Any) -> bytes:
    buffer = io.BytesIO()
    with closing(_Digest(buffer)) as packer:
        packer.dump(value)
    return hashlib.sha256(buffer.getvalue()).digest()
