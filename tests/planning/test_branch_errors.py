"""What is wrong with the branches of a plan: told at once, each with its place, what is given and required, and a fix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import branching as models
import meshwright as mw
from branching import beside, on
from meshwright.errors import Finding, PlanError


def problems(build: Any, plan: Any) -> tuple[Finding, ...]:
    """The findings of one error, raised without a process."""
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(build, plan, models.rows())
    assert all(f.where and f.given and f.required and f.fix for f in caught.value.findings)
    return caught.value.findings


ALONE: dict[str, tuple[Any, str, str, str]] = {
    "a slice beyond the axis": (on({"tp": 4}, block_a="tp[0:2]", block_b="tp[2:6]"), "block_b.on", "tp[2:6]", "tp=4"),
    "an empty slice": (on({"tp": 4}, block_a="tp[2:2]", block_b="tp[2:4]"), "block_a.on", "tp[2:2]", "tp=4"),
    "a slice that goes backwards": (on({"tp": 4}, block_a="tp[3:1]", block_b="tp[3]"), "block_a.on", "tp[3:1]", "tp=4"),
    "an inner mesh of another size": (beside(2, 2, b={"dp": 3}), "block_b.mesh", "3 ranks", "tp[2:4]"),
    "an inner mesh with a pipeline": (beside(2, 2, b={"pp": 2}), "block_b.mesh", "pp", "within a branch"),
    "a mesh without ranks": (
        {"mesh": {"tp": 4}, "modules": {"block_a": {"mesh": {"tp": 2}}}}, "block_a.mesh", "a mesh of its own", "without"
    ),
    "a sequence that is cut": (
        {**beside(2, 2), "sequence_parallel": True}, "sequence_parallel", "true", "slice of tp"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_one_problem_is_told_with_its_place(case: str) -> None:
    plan, where, *given = ALONE[case]
    (finding,) = problems(models.Toy, plan)
    assert finding.where.endswith(where)
    assert all(text in finding.given for text in given)


def test_all_problems_of_the_places_are_told_at_once() -> None:
    plan = {
        "mesh": {"tp": 8},
        "sequence_parallel": True,
        "modules": {
            "block_a": {"on": "tp[0:9]"}, "block_b": {"on": "tp[2:8]", "mesh": {"dp": 4}},
            "head": {"mesh": {"tp": 2}}, "stem": {"on": "tp[4:4]"},
        },
    }  # fmt: skip
    found = {f.where for f in problems(models.Toy, plan)}
    modules = {f"modules.{name}" for name in ("block_a.on", "block_b.mesh", "head.mesh", "stem.on")}
    assert found == {"sequence_parallel", *modules}


def test_a_nested_slice_is_one_of_the_branch_around_it() -> None:
    plan = on({"tp": 4}, inner="tp[0:2]", other="tp[2:4]", inner__left="tp[0]", inner__right="tp[2]")
    (finding,) = problems(models.Nested, plan)
    assert finding.where == "modules.inner.right.on"
    assert "tp=2 of tp[0:2]" in finding.given


def test_one_of_several_places_of_a_module_that_is_called_again() -> None:
    (finding,) = problems(models.Siamese, on({"tp": 2}, tower=["tp[0]", "tp[2]"]))
    assert finding.where == "modules.tower.on" and "tp[2]" in finding.given


def test_modules_that_are_not_called_are_named_each() -> None:
    found = problems(models.Tracks, on({"tp": 2}, left="tp[0]", right="tp[1]"))
    assert [f.where for f in found] == ["modules.left.on", "modules.right.on"]
    assert "does not call" in found[0].given and found[0].fix == "'left.*': {on: 'tp[0]'}"


def test_branches_of_which_one_needs_the_other_name_what_ties_them() -> None:
    found = problems(models.Chain, on({"tp": 2}, a="tp[0]", b="tp[1]"))
    assert [f.where for f in found] == ["modules.a.on"]  # one tie is told once
    assert all(text in found[0].given for text in ("b.up", "a.down", "branching.py:", "(12, 24)"))
    assert found[0].fix == "leave out on: for a"


def test_problems_are_told_before_anything_starts_and_a_right_plan_has_none() -> None:
    recipe = mw.make_recipe(models.Toy, beside(2, 6, b={"dp": 3, "tp": 2}), models.rows())
    assert [str(place.mesh) for place in recipe.branches] == ["tp=2", "dp_replicate=3 × tp=2"]
    assert recipe.placed == {"block_a": (1,), "block_b": (2,)}


def test_a_slice_that_goes_beyond_is_shortened_in_the_fix() -> None:
    (finding,) = problems(models.Toy, on({"tp": 4}, block_a="tp[0:2]", block_b="tp[2:6]"))
    assert finding.fix == "on: 'tp[2:4]'" and "0 to 3" in finding.required


def test_a_mesh_without_tp_says_so() -> None:
    found = problems(models.Toy, on({"dp_shard": 2}, block_a="tp[0]", block_b="tp[1]"))
    assert {f.fix for f in found} == {"mesh: {tp: 2}"}


def test_a_place_for_a_parameter_names_its_module() -> None:
    found = problems(models.Toy, on({"tp": 2}, block_a="tp[0]", block_b__up__weight="tp[1]"))
    assert found[0].where == "modules.block_b.up.weight.on" and found[0].fix == "block_b.up: {on: 'tp[1]'}"


def test_more_places_than_calls() -> None:
    plan = {"mesh": {"tp": 3}, "modules": {"tower": {"on": ["tp[0]", "tp[1]", "tp[2]"]}}}
    (finding,) = problems(models.Siamese, plan)
    assert "called 2 times" in finding.given and finding.fix == "on: ['tp[0]', 'tp[1]']"


def test_the_whole_model_on_a_slice() -> None:
    found = problems(models.Toy, {"mesh": {"tp": 2}, "modules": {"*": {"on": "tp[0]"}}})
    assert any(f.where == "modules, of the whole model" for f in found)


def test_a_module_that_one_branch_alone_feeds_goes_with_that_branch() -> None:
    recipe = mw.make_recipe(models.ProjectedTowers, on({"tp": 3}, tower_a="tp[0:2]", tower_b="tp[2]"), models.rows())
    assert recipe.placed == {"tower_a": (1,), "tower_b": (2,), "project_a": (1,)}
    assert any(note.startswith("project_a runs on tp[0:2]") for note in recipe.notes)
    assert recipe.by_name["project_a.1.weight"].places == (1,)


class Shared(models.Averages):
    """The model around two branches uses a buffer that the first of them changes; ``where``: before it, after both, or not."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("outer", torch.zeros(models.DIM))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        if self.where == "before":
            x = x * (1 + self.block_a.mean.mean())
        h = self.block_a(x) + self.block_b(x)
        if self.where == "after":
            h = h - self.block_b.mean
        h, self.outer = h - self.outer, 0.9 * self.outer + h.detach().mean(0)
        return {"loss": torch.nn.functional.mse_loss(self.head(h.tanh()), y)}


class Leaving(models.MLP):
    """Leaves what it gave for the next forward, in an attribute that its first forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.given = h.detach().mean(0)
        return h


class Reading(models.Toy):
    """The model around takes what its first branch has left: of the forward before, or of this one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.block_a, self.where = Leaving(), where

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.stem(x)
        if self.where == "before":
            h = h + getattr(self.block_a, "given", torch.zeros(models.DIM))
        h = self.block_a(h) + self.block_b(h)
        if self.where == "after":
            h = h + self.block_a.given
        if self.where == "its own":
            h, self.seen = h + getattr(self, "seen", 0), h.detach().mean(0)
        return {"loss": torch.nn.functional.mse_loss(self.head(h), y)}


def test_an_attribute_that_a_branch_makes_is_used_by_that_branch_alone_in_the_next_forward() -> None:
    plan = models.beside(1, 1)
    with pytest.raises(mw.PlanError, match=r"block_a\.given"):
        mw.make_recipe(functools.partial(Reading, "before"), plan, models.rows())
    for where in ("after", "its own"):
        assert mw.make_recipe(functools.partial(Reading, where), plan, models.rows()).branches


def test_a_traced_module_is_told_also_if_branches_are_to_be_found() -> None:
    def build() -> torch.nn.Module:
        model = models.Toy()
        model.block_a = torch.jit.trace(models.MLP(128), torch.randn(2, models.DIM))
        return model

    with pytest.raises(PlanError, match=r"torch\.jit\.script or trace"):
        mw.make_recipe(build, {"mesh": {"tp": 2}, "branches": "auto"}, models.rows())


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_a_buffer_that_a_branch_changes_is_used_by_that_branch_alone(mesh: dict[str, int]) -> None:
    plan = {**models.beside(1, 1), "mesh": mesh}
    for where, name in (("before", "block_a.mean"), ("after", "block_b.mean")):
        with pytest.raises(mw.PlanError, match=r"and that is used elsewhere too .*test_branch_errors.py") as raised:
            mw.make_recipe(functools.partial(Shared, where), plan, models.rows())
        assert [f.where for f in raised.value.findings] == [name]
    assert mw.make_recipe(functools.partial(Shared, "not"), plan, models.rows()).branches
    found = mw.make_recipe(functools.partial(Shared, "before"), {"mesh": mesh, "branches": "auto"}, models.rows())
    assert not found.branches, "what would be refused is not found"


class Counting(models.MLP):
    def __init__(self) -> None:
        super().__init__(128)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) / self.calls


class Checkpointed(models.Toy):
    """``around``: the checkpoint is around the branch, else within it."""

    def __init__(self, around: bool, counting: bool = True) -> None:
        super().__init__()
        self.around = around
        if counting:
            self.block_a = Counting()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        if self.around:
            x_a = checkpoint(self.block_a, x, use_reentrant=False)
        else:
            x_a = self.block_a(x)
        out = self.head(x_a + self.block_b(x))
        return {"loss": (out - y).square().mean()}


def test_a_checkpoint_around_a_branch_changes_nothing() -> None:
    """One device counts twice, and divides by another number in the backward."""
    plan = models.beside(1, 1)
    (finding,) = problems(functools.partial(Checkpointed, True), plan)
    assert finding.where == "block_a.calls" and "checkpoint around what runs on tp[0:1]" in finding.given
    assert mw.make_recipe(functools.partial(Checkpointed, False), plan, models.rows()).branches
    assert mw.make_recipe(functools.partial(Checkpointed, True, counting=False), plan, models.rows()).branches
    auto = mw.make_recipe(functools.partial(Checkpointed, True), {"mesh": {"tp": 2}, "branches": "auto"}, models.rows())
    assert not auto.branches, "what would be refused is not found"
