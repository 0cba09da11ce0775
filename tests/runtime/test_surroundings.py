"""What a script has on around a job, such as a profiler or a mode of torch, changes nothing; what forbids a step is told."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.workers.pool import LocalWorkers
from zoo import ZOO

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "microbatches": 2},
    "dp_shard": {"mesh": {"dp_shard": 2}, "recompute": "blocks"},
}


class Functions(TorchFunctionMode):
    """Goes on with each function through a function of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.pass_on(func, args, kwargs or {})

    def pass_on(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def traced() -> Iterator[None]:
    def trace(frame: Any, event: str, arg: Any) -> Any:
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


CPU = [ProfilerActivity.CPU]
AROUND: dict[str, Callable[[], Any]] = {
    "a profiler of shapes": lambda: profile(activities=CPU, record_shapes=True, profile_memory=True),
    "a profiler of stacks": lambda: profile(activities=CPU, record_shapes=True, with_stack=True),
    "a function mode": Functions,
    "a dispatch mode": Operations,
    "a debugger": traced,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


def build() -> nn.Module:
    return ZOO["nanogpt"].build()


def batch() -> Any:
    return ZOO["nanogpt"].batch()


def losses(plan: dict[str, Any], around: str, everything: bool) -> list[float]:
    """Runs on every rank: the losses of three steps. ``everything``: whether the job is made under ``around`` too."""
    context = AROUND[around] if around else contextlib.nullcontext
    with context() if everything else contextlib.nullcontext():
        job = mw.parallelize(build, plan, batch=batch(), dtype=torch.float64)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
        lost = []
        with contextlib.nullcontext() if everything else context():
            for _ in range(3):
                lost.append(float(job.step(batch())))
                optimizer.step()
                optimizer.zero_grad()
    return lost


@pytest.fixture(scope="module")
def plain(workers: LocalWorkers) -> dict[str, list[float]]:
    return {name: workers.run(losses, plan, "", False, ranks=2)[0] for name, plan in LAYOUTS.items()}


OFTEN = {
    ("a profiler of shapes", "dp_shard"),
    ("a function mode", "tp"),
    ("anomaly detection", "pp"),
}  # with everything


@pytest.mark.parametrize(
    ("around", "layout", "everything"),
    [
        pytest.param(a, k, e, marks=() if e and (a, k) in OFTEN else pytest.mark.proof, id=f"{a}-{k}-{e}")
        for a in AROUND
        for k in LAYOUTS
        for e in (False, True)
    ],
)
def test_what_is_on_around_a_job_changes_nothing(
    around: str, layout: str, everything: bool, plain: dict[str, list[float]], workers: LocalWorkers
) -> None:
    for found in workers.run(losses, LAYOUTS[layout], around, everything, ranks=2):
        assert found == pytest.approx(plain[layout], rel=1e-12)


OFF: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def without_gradients(plan: dict[str, Any], off: str) -> tuple[str, float, float, list[Tensor | None]]:
    """Runs on every rank, all under a mode without gradients. Returns (a step's error, the loss of an evaluation, the loss of a
    step with gradients, its gradients)."""
    with OFF[off]():
        given = batch()
        job = mw.parallelize(build, plan, batch=given, dtype=torch.float64)
        with pytest.raises(PlanError) as error:
            job.step(given)
        evaluated = float(job.evaluate(given))
        with torch.inference_mode(False), torch.enable_grad():
            loss = float(job.step(batch()))
    return str(error.value), evaluated, loss, [g for _, g in job.full_gradients()]


@pytest.mark.parametrize(
    ("off", "layout"),
    [
        pytest.param(o, k, marks=() if (o, k) in {("no_grad", "tp"), ("inference_mode", "pp")} else pytest.mark.proof)
        for o in OFF
        for k in LAYOUTS
    ],
)
def test_a_step_without_gradients_is_refused(
    off: str, layout: str, plain: dict[str, list[float]], workers: LocalWorkers
) -> None:
    results = workers.run(without_gradients, LAYOUTS[layout], off, ranks=2)
    for error, evaluated, loss, _ in results:
        assert "torch.no_grad() or torch.inference_mode()" in error and "job.evaluate(batch)" in error
        assert [evaluated, loss] == pytest.approx(plain[layout][:1] * 2, rel=1e-12)
    assert all(g is not None and g.abs().sum() > 0 for g in results[0][3])


def test_a_script_that_ends_with_an_error_prints_this_error_last() -> None:
    """Python frees the job when its modules are gone already."""
    script = """
import torch, meshwright as mw
batch = (torch.randn(4, 4),)
job = mw.parallelize(lambda: torch.nn.Linear(4, 2), "dp_shard=1", batch=batch, loss=lambda output: output.sum())
job.step(batch)
raise ValueError("the script's own")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith("ValueError: the script's own") and "ignored" not in run.stderr, (
        run.stderr
    )
