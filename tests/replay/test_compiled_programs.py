"""``compile: true``: what the compiler makes of a block's program gives what the program gives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_replayed import LAYOUTS, Model, has_program, trained

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

CASES: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (plan, "") for name, plan in LAYOUTS.items()},
    "dropout": ({"mesh": {"tp": 2}}, "drops"),
    "a slice written to": ({"mesh": {"tp": 2}}, "writes a slice"),
    "an input written to": ({"mesh": {"tp": 2}}, "writes to its input"),
    "a buffer": ({"mesh": {"tp": 2}}, "counts in a buffer"),
}


def judged(case: str, workers: LocalWorkers, run: Any) -> None:
    """Losses and values are those of the eager forward, and as many collectives of as many bytes are made."""
    plan, does = CASES[case]
    ranks = mw.Plan(plan["mesh"]).mesh.size
    eager = workers.run(trained, lambda: Model(does), plan, True, 5, None, ranks=ranks)
    compiled = workers.run(run, lambda: Model(does), plan | {"compile": True}, False, 5, None, ranks=ranks)
    for (losses, values, moved, _), (others, found, told, has) in zip(eager, compiled, strict=True):
        assert others == pytest.approx(losses, rel=1e-12)
        for name, value in values.items():
            if value is not None:
                torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)
        assert moved == told
        assert any(has.values())


def as_it_stands(*args: Any) -> Any:
    """With the operators that the compiler would get, and without the compiler."""
    with mock.patch.object(torch, "compile", lambda f, **_: f):
        return trained(*args)


@pytest.mark.parametrize("case", ["tp", "sequence", "pipeline", "dropout"])
def test_collectives_as_operators_of_torch_are_those_of_the_program(case: str, workers: LocalWorkers) -> None:
    judged(case, workers, as_it_stands)


@pytest.mark.proof  # the compiler takes half a minute
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_program_is_the_eager_forward(case: str, workers: LocalWorkers) -> None:
    judged(case, workers, trained)


def told(does: str, mesh: dict[str, int]) -> tuple[list[str], bool]:
    rows = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    job = mw.parallelize(lambda: Model(does).double(), {"mesh": mesh, "compile": True}, batch=rows)
    for _ in range(3):
        job.step(rows)
    return [note for note in job.notes if "not compiled" in note], has_program(job, "blocks.0")


@pytest.mark.parametrize(
    ("does", "tp", "why"), [("leaves gradients out", 2, "without gradients"), ("", 5, "uneven shares")]
)
def test_a_program_that_the_compiler_would_not_keep_runs_as_it_is(
    does: str, tp: int, why: str, workers: LocalWorkers
) -> None:
    for notes, has in workers.run(told, does, {"tp": tp}, ranks=tp):
        assert has and len(notes) == 1 and why in notes[0], notes
