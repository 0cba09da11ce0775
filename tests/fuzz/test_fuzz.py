"""Random small programs over random layouts, each against one device in float64. See `program.py` for the words.

`python bench/fuzz.py --layout tp=2 --programs 2000 --seed 7` hunts; what it finds becomes a file of `kept` once it is mended.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from grammar import Builder, value_hook
from hypothesis import given, settings
from hypothesis import strategies as st
from idioms import KINDS
from judge import ERROR, REFUSED, RIGHT, SKIPPED, WRONG, Tally, Verdict, judge, sample
from layouts import LAYOUTS, OPTIONS, case, kinds_for, random_cases
from program import Run, read
from shrink import shrink

KEPT = sorted((Path(__file__).parent / "kept").glob("*.py"))
# Kept programs of which data ranks go different ways, or a batch a way that no stages can run: a step ends in an error,
# before anything of it is done, and no rank dies.
REFUSED_LATER = {
    "another_path_that_no_stages_can_run": "UncutPathError",
}
OFTEN = {"tp=2": 3, "tp=3": 1, "dp_shard=2": 2, "dp_replicate=2": 1, "pp=2": 2, "sequence": 2, "branches": 2,
         "dp_shard=2,tp=2": 2, "pp=2,tp=2": 1, "pp=2,dp_shard=2": 1}  # fmt: skip


def fuzzed(layout, count, seed, workers):
    tally = Tally()
    for number, drawn in enumerate(random_cases(layout, count, seed)):
        verdict = judge(drawn.run, workers)
        tally.add(verdict)
        if verdict.failed:
            small, verdict = shrink(drawn, verdict, lambda run: judge(run, workers), seconds=60)
            pytest.fail(
                f"{layout}, seed {seed}, program {number}: {verdict.text}\n\n{small.run.printed()}", pytrace=False
            )
    assert tally.kinds[RIGHT] >= count / 2, f"{tally}: {tally.reasons}"


@pytest.mark.parametrize("layout", OFTEN)
def test_random_programs(layout, workers):
    fuzzed(layout, OFTEN[layout], 0, workers)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_random_programs(layout, workers):  # more than a thousand in all; `make fuzz` goes on with other seeds
    fuzzed(layout, 100, 1, workers)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_programs_that_once_failed(path, workers):
    verdict = judge(read(path.read_text()), workers)
    expected = (REFUSED, REFUSED_LATER[path.stem]) if path.stem in REFUSED_LATER else (RIGHT, "")
    assert (verdict.kind, verdict.sort) == expected, verdict.text


# --- the fuzzer itself --------------------------------------------------------------------------------------------------

LINEAR = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, ids, labels):
        {line}
        return {{"loss": self.linear(x).square().mean()}}"""


def test_the_judge_sees_what_differs(workers):
    """A model that behaves differently under the job: in its loss, in a gradient, in a buffer, with an error."""
    different = {
        "pass": (RIGHT, ""),
        "raise ValueError('here')": (SKIPPED, "one device"),
        "x = x + 0.1 * (type(self.linear.weight) is not nn.Parameter)": (WRONG, "losses"),
        "x = x + (self.unused.sum() * 0 if type(self.linear.weight) is not nn.Parameter else 0)": (WRONG, "gradients: None"),
        "if type(self.linear.weight) is not nn.Parameter and not x.is_meta and self.linear.weight.grad is None and torch.is_grad_enabled() and not isinstance(x, nn.Parameter): raise KeyError(3)": (ERROR, "KeyError"),
    }  # fmt: skip
    for line, (kind, sort) in different.items():
        verdict = judge(Run(LINEAR.format(line=line), {"mesh": {"tp": 2}}), workers)
        assert (verdict.kind, verdict.sort[: len(sort)]) == (kind, sort), (line, verdict)


@pytest.mark.proof
def test_a_failure_is_made_small():
    """A judge that dislikes one function: what is left is that function and what it takes."""
    dislikes = lambda run: Verdict(WRONG, "losses") if ".tanh_()" in run.source else Verdict(RIGHT)  # noqa: E731
    found = [c for c in random_cases("tp=2", 30, 3) if dislikes(c.run).failed]
    small = [shrink(c, dislikes(c.run), dislikes, seconds=30)[0] for c in found[:2]]
    assert all(len(c.program) <= 6 for c in small), [c.run.printed() for c in small]
    assert all(c.plan == {"mesh": {"tp": 2}} and c.rows == ((4,),) for c in small)


@settings(max_examples=10)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2**32))
def test_a_case_is_what_its_seed_says_and_reads_back(layout, seed):
    first, again = (case(random.Random(seed), layout, kinds_for(layout), OPTIONS) for _ in range(2))
    assert first == again
    ast.parse(first.run.printed())
    assert read(first.run.printed()) == first.run


def test_no_hook_is_put_on_a_view_of_what_is_written():
    """Torch ends the process where one is put on such a view after the write."""
    for seed in range(20):
        b = Builder(random.Random(seed), KINDS, sample(Run("", {}), 4, 1), [])
        whole = b.new(f"x * {b.parameter()}")
        view = b.new("{0}[:, :2]", whole)
        if seed % 2:
            b.do("{0}.mul_(2)", whole)
        value_hook(b)
        hooked = [s.of[0] for s in b.body if "register_hook" in s.text]
        assert hooked == [whole] or not seed % 2
        assert b.safe_to_write(b.get(whole)) == (view not in hooked)


def test_every_kind_is_drawn():
    drawn = {k for c in random_cases("tp=2", 160, 5) for k in c.program.kinds}
    assert drawn >= kinds_for("tp=2") - {"loose ends"}
