"""Which parameters are sharded: the plan's word is obeyed, whatever a model's forward does with a weight before it is used."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.planning.passes import shards, units
from meshwright.workers.pool import LocalWorkers


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}


DERIVED = {
    "scaled gradient": lambda w: w.detach() + 0.5 * (w - w.detach()),
    "row norms": lambda w: w / w.norm(dim=1, keepdim=True),
    "spectral norm": lambda w: w / torch.linalg.matrix_norm(w, 2),
    "sorted": lambda w: w.sort(0).values,
    "two halves": lambda w: torch.cat([w[:8], w[8:]]),
    "not used": torch.ones_like,
}


class Derived(nn.Module):
    """A linear whose weight is made from its parameter; ``transposed``: the parameter is (input, output)."""

    def __init__(self, how: str, transposed: bool = False) -> None:
        super().__init__()
        self.how, self.transposed = how, transposed
        self.up = nn.Module()
        self.up.weight = nn.Parameter(torch.randn((8, 16) if transposed else (16, 8)) * 0.3)
        self.up.bias = nn.Parameter(torch.zeros(16))
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        if self.transposed:
            h = x @ (self.up.weight * 0.5) + self.up.bias
        else:
            h = F.linear(x, DERIVED[self.how](self.up.weight), self.up.bias)
        return SimpleNamespace(loss=self.down(torch.tanh(h)).square().mean())


def plan(tp: int, **modules: Any) -> dict[str, Any]:
    return {"mesh": {"tp": tp}, "modules": {name.replace("__", "."): entry for name, entry in modules.items()}}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("style,dim", [("column", 0), ("row", 1)])
@pytest.mark.parametrize("how", DERIVED)
def test_a_weight_is_cut_as_the_plan_says_also_where_no_linear_takes_it_as_it_is(
    how: str, style: str, dim: int, tp: int, workers: LocalWorkers
) -> None:
    report = mw.check(
        partial(Derived, how), batch(), plan(tp, up={"tp": style}), workers=workers, dtype=torch.float64, steps=1
    )
    assert report, report
    line = report.recipe.by_name["up.weight"]
    assert isinstance(line.tp, mw.Shard) and line.tp.dim == dim and line.reason == "as the plan says"


@pytest.mark.parametrize("style,dim", [("column", 1), ("row", 0)])
def test_the_dim_that_a_style_means_is_found_from_what_the_weight_becomes(style: str, dim: int) -> None:
    recipe = mw.make_recipe(partial(Derived, "", transposed=True), plan(2, up={"tp": style}), batch())
    assert recipe.by_name["up.weight"].tp.dim == dim


def test_a_bias_follows_the_weight_that_the_plan_names() -> None:
    for style, tp in (("column", "Shard(0)"), ("row", "Replicate")):
        line = mw.make_recipe(partial(Derived, "scaled gradient"), plan(2, up={"tp": style}), batch()).by_name[
            "up.bias"
        ]
        assert str(line.tp) == tp
        assert line.reason == "as the plan says" or "a vector follows its weight" in line.reason


class Table(nn.Module):
    def __init__(self, tied: bool = False, words: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, 8), nn.Linear(8, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, i: Tensor) -> Any:
        h = self.embed(i)
        return SimpleNamespace(loss=F.cross_entropy(self.head(h).flatten(0, 1), i.flatten()))


WORDS = {"i": torch.arange(12).view(4, 3)}


@pytest.mark.parametrize("words", [12, 200])  # a small table, and one that is large beside the rest
@pytest.mark.parametrize("style,dim", [("column", 1), ("row", 0)])
def test_a_table_is_cut_as_the_plan_says(style: str, dim: int, words: int, workers: LocalWorkers) -> None:
    said = plan(2, embed={"tp": style}, head={"tp": "replicate"})
    report = mw.check(partial(Table, words=words), WORDS, said, workers=workers, dtype=torch.float64, steps=1)
    assert report, report
    assert report.recipe.by_name["embed.weight"].tp.dim == dim


def test_of_a_tied_table_a_style_may_be_the_heads() -> None:
    recipe = mw.make_recipe(partial(Table, tied=True), plan(2, head={"tp": "column"}), WORDS)
    assert recipe.by_name["embed.weight"].tp.dim == 0, "the output of the head"


class Grouped(nn.Module):
    """Two groups, which the forward does not want broken."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=self.out(F.group_norm(self.q(x), 2)).square().mean())


def test_what_the_forward_wants_unbroken_is_broken_where_the_plan_says_so(workers: LocalWorkers) -> None:
    found = mw.make_recipe(Grouped, plan(3), batch())
    assert "2 pieces that may not be broken" in found.by_name["q.weight"].reason
    report = mw.check(Grouped, batch(), plan(3, q={"tp": "column"}), workers=workers, dtype=torch.float64, steps=1)
    assert report, report
    assert report.recipe.by_name["q.weight"].tp.pieces == ((3, 3, 2),)


class Reads(nn.Module):
    """A forward that cannot be followed without values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.down(torch.tanh(self.up(x)))
        if not 0 <= h.sigmoid().mean().item() < 1:
            raise ValueError("not a share")
        return SimpleNamespace(loss=h.square().mean())


def test_the_plan_is_obeyed_where_the_forward_cannot_be_followed(workers: LocalWorkers) -> None:
    said = plan(2, up={"tp": "column"}, down__weight={"tp": "row"})
    report = mw.check(Reads, batch(), said, workers=workers, dtype=torch.float64, steps=1)
    assert report, report
    assert any("could not be followed" in note for note in report.notes)
    cuts = {name: str(line.tp) for name, line in report.recipe.by_name.items()}
    assert cuts == {
        "up.weight": "Shard(0)",
        "up.bias": "Replicate",
        "down.weight": "Shard(1)",
        "down.bias": "Replicate",
    }


class Dropped(nn.Module):
    """Random numbers of a shape that no machine has the memory for: 2 TiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 2**37), nn.Linear(2**37, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.up(x).relu_(), 0.3)
        return self.down(h * torch.rand_like(h)).square().mean()


class DroppedAttention(nn.Module):
    """Weights of attention that no machine has the memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x[:, None].expand(-1, 2**20, -1)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.down(h.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("build", [Dropped, DroppedAttention])
def test_planning_takes_no_memory_for_random_numbers(build: Any) -> None:
    recipe = mw.make_recipe(build, "tp=2", batch())
    cut = {line.name for line in recipe if isinstance(line.tp, mw.Shard)}
    assert recipe.notes == () and cut == {"up.weight", "up.bias", "down.weight"}


def test_planning_a_pipeline_makes_no_mask_for_causal_attention() -> None:
    recipe = mw.make_recipe(DroppedAttention, "pp=2", batch())  # a mask would take 2⁴⁰ bytes
    assert len(recipe.stages) == 2


def test_what_cannot_be_cut_as_the_plan_says_is_an_error() -> None:
    with pytest.raises(mw.PlanError) as raised:
        mw.make_recipe(partial(Derived, "sorted"), plan(10, up={"tp": "row"}, down={"tp": "row"}), batch())
    (finding,) = raised.value.findings  # down has 16 inputs
    assert finding.where == "modules, what is said of up.weight" and "8 pieces" in finding.given
    assert "up.weight: {tp: replicate}" in finding.fix


def test_parts_that_are_not_equal_are_an_error() -> None:
    with pytest.raises(mw.PlanError, match=r"dim 0 \(16\) is not 3 equal parts"):
        mw.make_recipe(partial(Derived, "sorted"), plan(2, up={"tp": "column", "parts": 3}), batch())


class OfAnObject(nn.Sequential):
    """With a style of a ``tp_plan`` that is an object, as diffusers has them."""

    _tp_plan = {"0": object()}  # noqa: RUF012  (as models have it)


def test_a_style_that_is_an_object_is_named_by_its_class() -> None:
    build = lambda: OfAnObject(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))  # noqa: E731
    recipe = mw.make_recipe(build, {"mesh": {"tp": 2}}, (torch.randn(4, 8),), lambda y: y.square().mean())
    assert not [note for note in recipe.notes if " at 0x" in note] and "'object', not known here" in str(recipe.notes)


class Decides(nn.Module):
    """A routed model: one of its blocks runs if a value says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if bool(x.sum() < 1e9):
                x = block(x)
        return x.square().mean()


OURS = "def asked(*args, **named): return {}['no such key']"


@pytest.mark.parametrize(
    ("mesh", "part", "name"), [("tp=2", shards, "_trunk_shards"), ("dp_shard=2", units, "undisturbed")]
)
def test_a_bug_of_ours_in_planning_is_raised_and_is_no_note(mesh: str, part: Any, name: str) -> None:
    """Where a forward is followed, to shard over tp or to find which units it may skip, stands a function of a file of the
    library that has a bug."""
    assert mw.make_recipe(Decides, mesh, batch())
    names: dict[str, Any] = {}
    exec(compile(OURS, str(Path(mw.__file__).with_name("made_up.py")), "exec"), names)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyError, match="no such key"):
        patched.setattr(part, name, names["asked"])
        mw.make_recipe(Decides, mesh, batch())


class Parts(nn.Module):
    """A linear whose output is a stack of parts, of which the forward takes each by its number."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.up, self.down = parts, nn.Linear(8, parts * 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        stack = self.up(x).unflatten(-1, (self.parts, 16))
        return self.down(sum(torch.tanh(stack[..., i, :]) for i in range(self.parts))).square().mean()


@pytest.mark.parametrize(("parts", "layout"), [(3, "Shard(0, parts=3)"), (8, "Shard(0, parts=8)"), (9, "Replicate")])
def test_each_of_a_few_parts_is_sharded_by_itself_and_of_many_positions_none(parts: int, layout: str) -> None:
    recipe = mw.make_recipe(partial(Parts, parts), {"mesh": {"tp": 2}}, (torch.randn(4, 8),), lambda y: y)
    assert str(recipe.by_name["up.weight"].tp) == layout
