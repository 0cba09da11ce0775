"""Random programs over the stages of a pipeline in one process, and those that once failed; see `stages.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from idioms import KINDS
from judge import ERROR, RIGHT, Tally
from layouts import OPTIONS
from program import Run, read
from shrink import shrink
from stages import judge_stages, staged_cases

KEPT = sorted((Path(__file__).parent / "kept" / "stages").glob("*.py"))


def fuzzed(mesh, count, seed):
    tally = Tally()
    for number, (case, cuts) in enumerate(
        staged_cases(mesh, count, seed, KINDS - {"dropout", "modes", "carried"}, OPTIONS)
    ):
        verdict = judge_stages(case.run, cuts)
        tally.add(verdict)
        if verdict.failed:
            small, verdict = shrink(case, verdict, lambda run, cuts=cuts: judge_stages(run, cuts), seconds=60)
            pytest.fail(
                f"{mesh}, seed {seed}, program {number}, cuts {cuts}: {verdict.text}\n\n{small.run.printed()}",
                pytrace=False,
            )
    assert tally.kinds[RIGHT] >= count * 0.6, f"{tally}: {tally.reasons}"


@pytest.mark.parametrize(("mesh", "count"), [("pp=2", 8), ("pp=3", 4)])
def test_random_programs(mesh, count):
    fuzzed(mesh, count, 0)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", ["pp=2", "pp=3"])
def test_many_random_programs(mesh):
    fuzzed(mesh, 1000, 1)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_programs_that_once_failed(path):
    """Wherever they are cut."""
    run = read(path.read_text())
    found = [judge_stages(run, cuts) for cuts in (None, *range(4))]
    assert {v.kind for v in found} == {RIGHT}, [v.text for v in found if v.kind != RIGHT]


EARLY = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.keys, self.values = (nn.Parameter(torch.randn(7, 8) * 0.5) for _ in range(2))

    def forward(self, x, ids, labels):
        x = self.linear(x)
        before, x = x, (x @ self.keys.T).softmax(-1) @ self.values
        if (x - before).norm(dim=-1).max() < 0.1:
            return {"loss": x.square().mean()}
        x = (x @ self.keys.T).softmax(-1) @ self.values
        return {"loss": x.square().mean()}"""


def test_a_parameter_of_another_stage_is_an_error_after_a_value_is_read():
    """The recorded forward returns early. Torch itself multiplies by a weight on meta, and gives any numbers."""
    found = [judge_stages(Run(EARLY, {"mesh": {"pp": 2}}, ((4,),)), cuts) for cuts in range(6)]
    assert {v.kind for v in found} <= {ERROR, RIGHT}
    wrong = [v.text for v in found if v.kind == ERROR]
    assert wrong and all("takes a parameter that is not on stage 1" in text for text in wrong), wrong
