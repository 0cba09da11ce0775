"""``check``: compares loss, gradients, updated parameters and buffers under a plan with those of one device.

    case        the model, the batch and the steps to compare; the rows of each forward
    one_device  the reference: the model in plain PyTorch, in one worker
    job         the model under the plan, in all workers
    compare     errors of all values, relative to the scale of all tensors; likely causes
    precision   the same comparison in the precision of the plan
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
from meshwright.names import few
from meshwright.parity.case import Case, MakeOptimizer
from meshwright.parity.compare import KINDS, Findings, compare
from meshwright.parity.job import Outcome, distributed
from meshwright.parity.one_device import Reference, reference, unrepeated
from meshwright.parity.precision import MARGIN, findings_in_precision, other_values, reference_in_precision, smaller
from meshwright.parity.report import Report
from meshwright.parity.rounding import MARGIN as ROUNDING_MARGIN
from meshwright.parity.rounding import beyond_rounding, largest_noise, rounding_noise
from meshwright.plan import Plan, PlanLike
from meshwright.runtime.checksum import digest
from meshwright.runtime.rows.batch import plain
from meshwright.runtime.rows.loss import Loss, output_loss
from meshwright.workers.pickling import Packer, pack
from meshwright.workers.pool import LocalWorkers, WorkerError, local_workers

__all__ = ["Report", "check"]

# Sums in another order differ by a few units of the type's rounding (1e-16, 1e-7), which a deep model and three steps multiply.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_UNREPEATED = (
    "the constructor does not repeat itself: built again on one device, {} differ by up to {:.0e}. Both sides start from the "
    "values of one device"
)
_ONCE = (
    "compared in {} too, from two sets of starting values: {} was off by {:.1f} × the change by rounding in another order from "
    "one of them alone, as happens where a value lies so near a kink (of relu, say) that rounding decides its side"
)
_MULTIPLIED = (
    "the model multiplies rounding: from starting values that are moved in their last bits, one device's own {} differs by "
    "{:.0e}; errors up to {} times such differences are not counted"
)
_CACHED_REFERENCES = 8  # that a pool keeps: enough for one model under several plans, and small in memory


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
    optimizer: MakeOptimizer | None = None,
    timeout: float = 120.0,
) -> Report:
    """Compares a model under a plan with the same model on one device. Call it from a plain process.

    One worker runs ``build()`` in plain PyTorch. Then the workers run the job, each data rank on its rows of ``batch``. Before
    that, parameters are perturbed, equally on both sides, and dropout is set to 0. Each step clips gradients to a global norm
    of 1 and takes a step of SGD with momentum. One of the steps accumulates the gradients of two forwards and backwards. From
    the third forward on, the batch's rows are permuted, and one of them may appear twice (see ``parity.case``). Random numbers
    are seeded once, at the start, as in training. In float64, both sides run under a function mode that turns casts to float32
    into casts to float64.

    Args:
        build: returns the model: a module-level function or class, or a ``functools.partial`` of one.
        batch: the global batch: a dict of keyword arguments, or a tuple. Floats are cast to the type of the check.
        plan: as for ``parallelize``. Its precision is replaced by the type of the check. If the job is right, it is also run
            in the precision of the plan, and compared with one device in the same types (``meshwright.parity.precision``).
        loss: a module-level function of the model's output. Default: ``output.loss``.
        workers: a pool of at least as many workers as the mesh has ranks. It caches the references of the last checks.
            Default: workers are started for this check.
        dtype: ``torch.float64`` or ``torch.float32``: compare in this type alone. Default: float64, or float32 if one device
            raises in float64; then the plan's own types.
        tolerance: largest relative error. Default: 1e-9 in float64, 1e-4 in float32; larger for a model that multiplies
            rounding, with a note (``meshwright.parity.rounding``).
        steps: number of optimizer steps.
        optimizer: makes the optimizer of a list of parameters, as ``functools.partial(Mine, lr=0.1)``: of a model's parameters
            on one device, of the job's under the plan. Default: SGD with momentum, which shows a wrong gradient best; Adam
            divides a gradient by its own size, so that one of pure rounding errors gives a large update.
        timeout: seconds that each side may take for a step.

    Returns:
        A report, which is true if all errors are within the tolerance. If a side fails or hangs, the report is false and has
        the reason.

    Raises:
        PlanError: with every problem of the plan, and of arguments that cannot be sent to a worker.
    """
    started, plan, batch = time.monotonic(), Plan.parse(plan), plain(batch)
    plan.check_mesh()
    case = Case(build, batch, loss or output_loss, dtype or torch.float64, steps, plan.seed, optimizer=optimizer)
    _refuse(case, plan, workers)
    with ExitStack() as stack:
        pool = workers or stack.enter_context(local_workers(plan.mesh.size))
        case = replace(case, device=pool.device)
        pool.start(plan.mesh.size)
        side, notes = "one device", _notes(case)
        try:
            one = _reference(pool, case, narrow=dtype is None, timeout=timeout)
            case, notes, side = one.case, (*one.notes, *_notes(one.case)), "the job"
            report = _compared(pool, case, one, plan, notes, tolerance, timeout, started)
            if not report and (moved := pool.run(unrepeated, case, one.start, ranks=1, timeout=timeout)[0]):
                notes = (*notes, _UNREPEATED.format(few(moved), max(moved.values())))
                case = replace(case, start=one.start)
                report = _compared(pool, case, one, plan, notes, tolerance, timeout, started)
            if dtype is not None or plan.precision == _name(case.dtype) or not report:
                return report
            side = f"the job in {plan.precision}"
            return _in_precision(pool, case, plan, report, timeout, started)
        except WorkerError as error:
            if error.plan_error is not None:
                raise error.plan_error from None
            return Report(
                passed=False, plan=plan, tolerance=_tolerance(tolerance, case), dtype=_name(case.dtype),
                steps=steps, seconds=time.monotonic() - started, notes=notes, failure=f"{side}: {error}",
            )  # fmt: skip


def _compared(
    pool: LocalWorkers, case: Case, one: Reference, plan: Plan, notes: tuple[str, ...], said: float | None, timeout: float,
    started: float,
) -> Report:  # fmt: skip
    """Runs the job in the type of the case, and compares it with the reference.

    Args:
        said: the tolerance that the caller has given. None: that of the type, and what rounding does to the reference.
    """
    tolerance = _tolerance(said, case)
    outcome = _outcome(pool, case, plan.replace(precision=_name(case.dtype)), timeout)
    findings = compare(one, outcome, tolerance)
    report = _report(one, outcome, findings, plan, notes, tolerance, started)
    if report or said is not None or not isfinite(report.worst[2]):
        return report
    try:
        noise = pool.run(rounding_noise, one, ranks=1, timeout=timeout)[0]
    except WorkerError:  # from other starting values the model raises
        return report
    name, largest = largest_noise(noise)
    if largest * ROUNDING_MARGIN <= tolerance:  # the model does not multiply rounding
        return report
    beyond = beyond_rounding(findings, noise)
    notes = (*notes, _MULTIPLIED.format(name, largest, round(ROUNDING_MARGIN)))
    return _report(one, outcome, beyond, plan, notes, tolerance, started)


def _in_precision(pool: LocalWorkers, case: Case, plan: Plan, passed: Report, timeout: float, started: float) -> Report:
    """Compares again, in the plan's own types.

    Args:
        passed: the report of the comparison in float64 or float32, which has passed.

    Returns:
        A new report if the comparison in the plan's types fails; else ``passed`` with one more note.
    """

    def passed_with(note: str) -> Report:
        return replace(passed, notes=(*passed.notes, note))

    precision = plan.precision
    try:
        one, noise = pool.run(reference_in_precision, case, precision, ranks=1, timeout=timeout)[0]
    except WorkerError as error:
        first_line = f"not compared in {precision}, in which the model raises on one device ({error})".split("\n", 1)[0]
        return passed_with(first_line)
    if not isfinite(noise["loss"]):
        return passed_with(f"not compared in {precision}, in which the loss of one device is not finite")
    outcome = _outcome(pool, replace(case, dtype=torch.float32), plan, timeout)
    findings = findings_in_precision(one, noise, outcome, precision)
    report = _report(one, outcome, findings, plan, passed.notes, MARGIN, started)
    if not report:
        found_twice = _smaller(findings, pool, replace(case, start=other_values(one)), plan, timeout)
        twice = _report(one, outcome, found_twice, plan, passed.notes, MARGIN, started)
        if twice:
            kind, name, largest = report.worst
            return passed_with(_ONCE.format(precision, f"{kind} {name}".strip(), largest))
        note = f"compared in {precision}: the unit of errors is the change of a tensor by rounding in another order"
        return replace(twice, dtype=precision, notes=(*twice.notes, note))
    return passed_with(
        f"compared in {precision} too: errors are {report.worst[2]:.1f} × the changes by rounding in another order"
    )


def _smaller(findings: Findings, pool: LocalWorkers, case: Case, plan: Plan, timeout: float) -> Findings:
    """For each tensor, the smaller of its error in ``findings`` and in the same comparison from ``case.start``."""
    one, noise = pool.run(reference_in_precision, case, plan.precision, ranks=1, timeout=timeout)[0]
    if not isfinite(noise["loss"]):
        return findings
    outcome = _outcome(pool, replace(case, dtype=torch.float32), plan, timeout)
    return smaller(findings, findings_in_precision(one, noise, outcome, plan.precision))


def _report(
    one: Reference, outcome: Outcome, findings: Findings, plan: Plan, notes: tuple[str, ...], tolerance: float,
    started: float,
) -> Report:  # fmt: skip
    """The report of a comparison. ``started``: the time of ``time.monotonic`` at the start of the check."""
    errors = [findings.errors["loss"], *(error for kind in KINDS for error in findings.errors[kind].values())]
    passed = all(error <= tolerance for error in errors)
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


def _notes(case: Case) -> tuple[str, ...]:
    """Notes on how a case is run."""
    if case.dtype is torch.float64:
        return ("casts to float32 inside the model were casts to float64, on both sides",)
    return ()


def _tolerance(tolerance: float | None, case: Case) -> float:
    return TOLERANCES[case.dtype] if tolerance is None else tolerance


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the two runs ---------------------------------------------------------------------------------------------------


class References:
    """A cache of the last references, by case. It lives as long as its pool."""

    def __init__(self) -> None:
        self._references: dict[bytes, Reference] = {}

    def get(self, case: Case, *, narrow: bool, run: Callable[[], Reference]) -> Reference:
        """The cached reference of a case, or the result of ``run``."""
        key = _key((case, narrow))
        if key not in self._references:
            self._references[key] = run()
            for oldest in list(self._references)[:-_CACHED_REFERENCES]:
                del self._references[oldest]
        return self._references[key]


def _reference(pool: LocalWorkers, case: Case, *, narrow: bool, timeout: float) -> Reference:
    """The reference of a case: run by one worker, or from the pool's cache. ``narrow``: whether float32 may replace float64."""

    def run() -> Reference:
        one: Reference = pool.run(reference, case, narrow=narrow, ranks=1, timeout=timeout)[0]
        return one

    return pool.kept(References).get(case, narrow=narrow, run=run)


def _outcome(pool: LocalWorkers, case: Case, plan: Plan, timeout: float) -> Outcome:
    """Runs the job in all workers. The outcome of rank 0, with the buffers of other ranks that differ from it."""
    outcome, *others = pool.run(distributed, case, plan, ranks=plan.mesh.size, timeout=timeout)
    return replace(outcome, buffers={rank: buffers for rank, buffers in enumerate(others, 1) if buffers})


def _refuse(case: Case, plan: Plan, workers: LocalWorkers | None) -> None:
    """Raises PlanError for arguments that cannot be run."""
    findings = Problems("this check")
    for name in ("build", "batch", "loss", "optimizer"):
        _must_pickle(name, getattr(case, name), findings)
    if case.dtype not in TOLERANCES:
        findings.add(
            where="dtype", given=str(case.dtype), required="a type that has a tolerance: float64 or float32",
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
    """Adds a finding if an argument cannot be sent to a worker."""
    try:
        pack(value)
    except Exception as error:
        if name == "batch":
            required = "tensors and plain values"
            fix = f"{name} = ..., without functions, open files or handles"
        else:
            required = "a function or class that names no locks, files or handles"
            fix = f"def {name}_of_check(...):  # which creates these itself"
        given = f"{getattr(value, '__qualname__', type(value).__name__)}: {error}"
        findings.add(where=name, given=given, required=required, fix=fix)


class _Digest(Packer):
    """Pickles functions as they are sent to workers, and digests in place of tensors."""

    def persistent_id(self, x: Any) -> Any:
        return digest(x) if isinstance(x, Tensor) else None


def _key(value: Any) -> bytes:
    """A hash of a case, its functions and the values of its tensors."""
    buffer = io.BytesIO()
    with closing(_Digest(buffer)) as packer:
        packer.dump(value)
    return hashlib.sha256(buffer.getvalue()).digest()
