"""Programs over the stages of a pipeline, in one process, against one device: losses, gradients (None is not zero),
parameters and buffers after two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import ROWS, STEPS, WIDTH, Model, Step, program, programs
from staged import Staged, alone, cut_at, differences
from torch import nn

import meshwright as mw
from meshwright.blame import is_ours
from meshwright.errors import PlanError

LINEAR = ("linear", 0, 0, 1)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator),) for _ in range(2)]


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def outcome(steps: list[Step], cut: int, *, microbatches: int = 1, mesh: str = "pp=2") -> str:
    """``invalid`` on one device, ``refused``, ``equal``, or what differs.

    Args:
        cut: which of the positions where the program may be cut.
    """
    with one_thread():
        try:
            one = alone(lambda: Model(steps), batches())
        except Exception:  # a program that is an error on one device
            return "invalid"
        if not all(abs(loss) < 1e9 for loss in one.losses):
            return "invalid"

        def choose(places: Any) -> list[int]:
            return [places[cut % len(places)]] if places else []

        try:
            with cut_at(choose):
                staged = Staged(lambda: Model(steps), mesh, batches()[0], microbatches=microbatches)
        except PlanError:
            return "refused"
        return "; ".join(differences(one, staged.train(batches()))) or "equal"


# What was wrong, or an error, once: the smallest program of each kind that was found.
KINDS: dict[str, list[Step]] = {
    "a slice, and a write to it": [LINEAR, LINEAR, ("first", 0, 0, 0), ("copy_", 0, 1, 0), ("add", 1, 2, 0), LINEAR],
    "a slice of a slice": [
        LINEAR, ("alias", 0, 0, 1), ("first", 1, 0, 0), ("add", 0, 1, 0), ("add_", 1, 0, 0), ("add", 2, 3, 0), LINEAR
    ],
    "a write to what follows from the batch": [
        LINEAR, ("fresh", 0, 0, 0), ("alias", 0, 0, 1), ("write_first", 0, 2, 0), ("add", 1, 2, 0), LINEAR
    ],
    "a buffer that follows from itself alone": [LINEAR, ("count", 0, 0, 0), LINEAR, ("buffer", 0, 0, 0), LINEAR],
    "a buffer that the last event changes": [("average", 1, 0, 3), LINEAR],
    "a buffer that is assigned": [("buffer", 0, 0, 0), LINEAR, ("assign", 0, 0, 0), LINEAR],
    "a codebook": [LINEAR, ("codebook", 0, 0, 0), LINEAR, ("learn_codes", 0, 0, 0), LINEAR],
    "a number that is counted": [LINEAR, ("number", 0, 0, 1), LINEAR, ("number", 0, 0, 0), LINEAR],
    "the batch times a number that is counted": [("number", 3, 0, 3), LINEAR, LINEAR],
    "a tensor that is kept": [("recall", 0, 0, 0), LINEAR, LINEAR, ("keep", 0, 0, 0), LINEAR],
    "a tensor that is kept, in another shape": [LINEAR, ("recall", 1, 0, 3), ("half", 0, 0, 1), ("keep", 1, 1, 3), LINEAR],
    "no gradient before a detach": [LINEAR, ("codebook", 0, 0, 0), ("fresh", 0, 1, 2), ("sin", 0, 1, 2), ("tanh", 0, 2, 0)],
    "attention of a value and the batch": [LINEAR, ("attention", 1, 0, 0), LINEAR],
    "a list that blocks append to": [("block", 0, 0, 0, [LINEAR, ("append", 0, 0, 0)]), LINEAR, ("gather", 0, 0, 0), LINEAR],
    "appended after a value was read": [
        ("block", 0, 0, 0, [LINEAR, ("read", 0, 0, 0), ("append", 0, 0, 0)]), LINEAR, ("gather", 0, 0, 0), LINEAR
    ],
    "chosen by a value that was read": [("block", 0, 1, 0, [LINEAR, ("read", 1, 0, 3)]), LINEAR, LINEAR],
    "a buffer that is assigned, then written": [LINEAR, ("assign", 0, 0, 0), ("average", 0, 0, 0), LINEAR, LINEAR],
    "an argument that a block hands on, and that is written then": [
        LINEAR, LINEAR, ("block", 1, 0, 0, [("tanh", 1, 0, 0)]), ("copy_", 0, 0, 1), ("without_grad", 2, 0, 2), LINEAR
    ],
    "an argument that a block writes before it reads": [
        LINEAR, ("scale", 2, 1, 0), ("block", 0, 0, 0, [("mul_", 0, 0, 0), ("read", 0, 2, 1)]), LINEAR
    ],
    "an argument that a block writes, reads and hands on": [
        LINEAR, ("block", 0, 0, 0, [("add_", 0, 0, 3), ("read", 2, 2, 3)]), ("tanh", 1, 0, 0)
    ],
    "a buffer that is kept, and read after a value was read": [
        LINEAR, ("learn_codes", 0, 0, 0), ("read", 0, 0, 3), ("codebook", 0, 0, 1)
    ],
    "what follows from the batch, written in a block": [
        ("assign", 0, 0, 2),
        ("block", 1, 2, 0, [
            ("buffer", 0, 2, 3), ("fresh", 2, 0, 1), ("linear", 1, 3, 0), ("write_first", 1, 0, 0), ("quietly_", 0, 2, 2)
        ]),
    ],
    "a list that grows after a call that hands its arguments on": [
        ("block", 2, 1, 0, [("assign", 1, 0, 1)]), ("block", 1, 0, 0, [("quietly_", 1, 1, 1), ("append", 0, 0, 1)]),
        ("gather", 0, 3, 2), LINEAR, ("linear", 2, 1, 2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_wherever_a_program_of_this_kind_is_cut_it_is_that_of_one_device(kind: str) -> None:
    found = [outcome(KINDS[kind], cut) for cut in range(7)]
    assert set(found) <= {"equal", "refused"}, found


CUTTABLE = [kind for kind in KINDS if "tensor that is kept" not in kind]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.proof) for k in CUTTABLE])
def test_these_kinds_are_not_only_refused(kind: str) -> None:
    assert outcome(KINDS[kind], 0) == "equal"


SEEDS = [4, 5, 16, 19, 26, 42, 47, 186, 269]


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s in (26, 186) else pytest.mark.proof) for s in SEEDS])
def test_programs_that_were_wrong_once(seed: int) -> None:
    assert outcome(program(seed), seed * 7 + seed // 3) in ("equal", "refused")


@given(programs(8), st.integers(0, 20))
@settings(max_examples=20)
def test_programs_over_two_stages_are_those_of_one_device(steps: list[Step], cut: int) -> None:
    found = outcome(steps, cut)
    assume(found != "invalid")
    assert found in ("equal", "refused")


@pytest.mark.proof
@pytest.mark.timeout(3600)
@given(programs(), st.integers(0, 20))
@settings(max_examples=1500)
def test_a_thousand_programs(steps: list[Step], cut: int) -> None:
    found = outcome(steps, cut)
    assume(found != "invalid")
    assert found in ("equal", "refused")


def test_every_function_of_the_programs_is_known_by_its_name() -> None:
    assert all(name == fn.__name__ for name, fn in STEPS.items())


# --- shapes that follow from values -----------------------------------------------------------------------------------


class Routed(nn.Module):
    """Rows in groups, whose sizes follow from a value of ``by``: the batch, or a linear's output."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.of_batch = of_batch
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        positive = (x if self.of_batch else h)[:, 0] > 0
        counts = torch.stack([positive.sum(), (~positive).sum()])
        parts = h.split(counts.tolist())
        h = torch.cat([part * (i + 1) for i, part in enumerate(parts)])
        h = h + torch.arange(2, dtype=x.dtype).repeat_interleave(counts)[:, None]
        return self.last(h).square().mean()


def test_shapes_that_follow_from_the_batch_are_computed() -> None:
    one = alone(lambda: Routed(True), batches())
    staged = Staged(lambda: Routed(True), "pp=2", batches()[0])
    assert differences(one, staged.train(batches())) == []


def test_shapes_that_follow_from_parameters_are_one_error_that_names_the_line() -> None:
    with pytest.raises(PlanError) as caught:
        Staged(lambda: Routed(False), "pp=2", batches()[0])
    (finding,) = caught.value.findings
    assert "test_staged_programs.py:" in finding.where
    assert "cannot be followed without values" in finding.given


class Counted(nn.Module):
    """A linear that counts its forwards whose sum is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        if float(h.sum()) > -1e9:
            self.count += 1
        return h * self.count


class Counts(nn.Module):
    """``outside``: whether the count is used outside the module that counts."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.outside, self.counted = outside, Counted()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.counted.count if self.outside else x
        h = self.last(self.counted(self.first(x)))
        return (h + y).square().mean()


def test_a_count_that_follows_from_values_stays_in_its_stage() -> None:
    one = alone(lambda: Counts(False), batches())
    assert differences(one, Staged(lambda: Counts(False), "pp=2", batches()[0]).train(batches())) == []
    with pytest.raises(PlanError, match=r"a value decides how counted\.count is changed"):
        Staged(lambda: Counts(True), "pp=2", batches()[0])


# --- whose an error is ------------------------------------------------------------------------------------------------


OURS = """
def of_ours(): return {}["no such key"]
def of_torch(): return torch.ones(2).view(3)
def asserted(): assert False
def told(): raise ValueError("what a person gave does not fit")
"""


@pytest.mark.parametrize(
    ("name", "ours"), [("of_ours", True), ("asserted", True), ("of_torch", False), ("told", False)]
)
def test_a_bug_of_ours_is_told_from_an_error_of_the_model(name: str, ours: bool) -> None:
    """The functions are compiled as though they stood in a file of the library."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(OURS, str(Path(mw.__file__).with_name("made_up.py")), "exec"), names)
    with pytest.raises(Exception) as caught:
        names[name]()
    assert is_ours(caught.value) is ours
