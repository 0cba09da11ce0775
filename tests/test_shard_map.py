"""Which rank holds what: the cases of the fifth document, and every parameter tiled exactly, whatever the recipe."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import branching as models
from branching import on
from meshwright.amounts import count_text, size_text
from meshwright.draw.console import console
from meshwright.draw.facts import ShardMap, shard_map
from meshwright.draw.parameters import itemsize
from meshwright.draw.terminal import render
from meshwright.draw.text import ranges_text, ranks_text
from meshwright.layout import REPLICATE, even_shard
from meshwright.mesh import Mesh
from meshwright.planned import make_recipe
from meshwright.recipe import ParameterRecipe, Recipe, Slices, Unit, place_slices, take_slices
from meshwright.submesh import Submesh
from test_branches import SHARES, WAYS


def mapped(mesh: str, *parameters: ParameterRecipe, **rest: object) -> ShardMap:
    return shard_map(Recipe(Mesh.parse(mesh), parameters, **rest))  # type: ignore[arg-type]


def values(shard_map: ShardMap, name: str, rank: int) -> list[float]:
    """What a rank holds of a parameter whose values are 101, 102, …"""
    shape = shard_map.recipe.by_name[name].shape
    whole = torch.arange(101.0, 101 + shard_map.parameters[name].bytes // 4).view(shape)
    return take_slices(whole, shard_map.slices(name, rank)).flatten().tolist()


def counted(first: int, last: int) -> list[float]:
    return [float(i) for i in range(first, last + 1)]


def printed(renderable: object, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


# --- the fifth document -----------------------------------------------------------------------------------------------


def test_hybrid_sharding_of_a_hundred_values_over_2_by_4() -> None:
    held = mapped("dp_replicate=2,dp_shard=4", ParameterRecipe("net1.weight", (100,), "float32"))
    assert values(held, "net1.weight", 0) == counted(101, 125)
    assert values(held, "net1.weight", 2) == values(held, "net1.weight", 6) == counted(151, 175)
    assert values(held, "net1.weight", 3) == counted(176, 200)
    assert [ranks for ranks, _ in held.held_by("net1.weight")] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_fsdp_by_tensor_parallel_of_a_12_by_12_weight_over_2_by_4() -> None:
    line = ParameterRecipe("net1.weight", (12, 12), "float32", tp=even_shard(0, 12, 4))
    held = mapped("dp_shard=2,tp=4", line)
    assert values(held, "net1.weight", 0) == counted(101, 124)  # rows 0 and 1 of tensor-parallel rank 0's three
    assert values(held, "net1.weight", 4) == counted(125, 136)  # its third row, on the other data rank
    assert values(held, "net1.weight", 1) == counted(137, 160)
    whole = torch.zeros(12, 12)
    for rank in range(8):
        place_slices(
            whole, slices := held.slices("net1.weight", rank), _local(values(held, "net1.weight", rank), slices)
        )
    assert whole.flatten().tolist() == counted(101, 244)  # in the right order


def test_ten_rows_over_3_by_2() -> None:
    held = mapped("dp_shard=3,tp=2", ParameterRecipe("w", (10, 1), "float32", tp=even_shard(0, 10, 2)))
    rows = [held.slices("w", rank)[0] for rank in range(6)]
    assert rows == [((0, 2),), ((5, 7),), ((2, 4),), ((7, 9),), ((4, 5),), ((9, 10),)]


def _local(values: list[float], slices: Slices) -> torch.Tensor:
    return torch.tensor(values).view([sum(stop - start for start, stop in ranges) for ranges in slices])


# --- any recipe -------------------------------------------------------------------------------------------------------


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    axes = draw(st.permutations(["dp_replicate", "dp_shard", "tp"]))[: draw(st.integers(1, 3))]
    mesh = Mesh(tuple((axis, draw(st.integers(1, 4))) for axis in axes))
    lines = tuple(draw(parameter(f"p{i}", mesh.axis_size("tp"))) for i in range(draw(st.integers(1, 3))))
    return Recipe(mesh, lines)


@st.composite
def parameter(draw: st.DrawFn, name: str, ranks: int) -> ParameterRecipe:
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    if not shape:
        return ParameterRecipe(name, (), "float32", data="loose")
    tp, dim, blocks = REPLICATE, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        units = draw(st.integers(1, 3))
        shape[dim] = blocks * units * draw(st.integers(1, 3))
        tp = even_shard(dim, [shape[dim] // blocks] * blocks, ranks, units)
    data = draw(st.sampled_from(["shard", "replicate"]))
    return ParameterRecipe(name, tuple(shape), draw(st.sampled_from(["float32", "bfloat16"])), tp=tp, data=data)


def covered(slices: Slices) -> Counter[tuple[int, ...]]:
    """The places of a tensor that slices name."""
    dims = [[i for start, stop in ranges for i in range(start, stop)] for ranges in slices]
    return Counter(product(*dims))


@given(recipes())
def test_the_slices_of_all_ranks_tile_every_parameter_exactly(recipe: Recipe) -> None:
    held = shard_map(recipe)
    for line in recipe.parameters:
        groups = held.held_by(line.name)
        assert sorted(r for ranks, _ in groups for r in ranks) == list(range(recipe.mesh.size))
        tiles = sum((covered(slices) for _, slices in groups), Counter())
        assert tiles == Counter(product(*map(range, line.shape)))
        for ranks, slices in groups:
            assert all(covered(held.slices(line.name, rank)) == covered(slices) for rank in ranks)


@given(recipes())
def test_bytes_of_a_rank_are_those_of_its_slices(recipe: Recipe) -> None:
    held = shard_map(recipe)
    for rank in range(recipe.mesh.size):
        sizes = [covered(held.slices(p.name, rank)).total() * itemsize(p.dtype) for p in recipe.parameters]
        assert held.bytes_by_rank[rank] == held.bytes_at(rank) == sum(sizes)


@given(recipes())
def test_it_is_plain_data_and_can_be_drawn(recipe: Recipe) -> None:
    held = shard_map(recipe)
    assert json.loads(json.dumps(held.to_dict()))["mesh"] == dict(recipe.mesh.axes)
    text = printed(render(held, rank=recipe.mesh.size - 1))
    assert all(line.name in text for line in recipe.parameters)
    assert printed(render(held, parameter="p0"))


# --- branches ---------------------------------------------------------------------------------------------------------

NESTED, SIAMESE = WAYS["nested"], WAYS["siamese"]
WITHIN = on({"dp_shard": 2, "tp": 4}, inner="tp[0:3]", other="tp[3]", inner__left="tp[0]", inner__right="tp[1:3]")
WITHIN["modules"]["inner.right"]["mesh"] = {"dp_shard": 2}
IN_BRANCHES = {
    **{name: (models.Toy, models.rows(), plan) for name, plan in SHARES.items()},
    **{name: WAYS[name] for name in ("nested", "siamese", "siamese, unequal", "inception", "two tracks")},
    "nested, sharded within": (models.Nested, models.rows(), WITHIN),
}


@pytest.fixture(params=IN_BRANCHES)
def branched(request: pytest.FixtureRequest) -> ShardMap:
    build, batch, plan = IN_BRANCHES[request.param]
    return shard_map(make_recipe(build, plan, batch))


def test_the_slices_of_branches_tile_every_parameter_exactly(branched: ShardMap) -> None:
    for line in branched.recipe.parameters:
        groups = branched.held_by(line.name)
        holders = [rank for rank in range(branched.mesh.size) if branched.holds(line.name, rank)]
        assert sorted(rank for ranks, _ in groups for rank in ranks) == holders
        assert len(holders) == branched.recipe.holders(line)
        tiles = sum((covered(slices) for _, slices in groups), Counter())
        assert tiles == Counter(product(*map(range, line.shape))), line.name
        for ranks, slices in groups:
            assert all(covered(branched.slices(line.name, rank)) == covered(slices) for rank in ranks)


def test_bytes_of_a_rank_are_those_of_its_slices_in_branches(branched: ShardMap) -> None:
    for rank in range(branched.mesh.size):
        sizes = [covered(branched.slices(p.name, rank)).total() * itemsize(p.dtype) for p in branched.recipe.parameters]
        assert branched.bytes_by_rank[rank] == branched.bytes_at(rank) == sum(sizes)


def test_branches_are_plain_data_and_are_drawn(branched: ShardMap) -> None:
    data = json.loads(json.dumps(branched.to_dict()))
    assert len(data["branches"]) == len(branched.recipe.branches)
    for rank in range(branched.mesh.size):
        assert printed(render(branched, rank=rank), 200).count("─ fork ─") >= 1
    assert printed(render(branched, parameter="head.*"))


def test_what_a_branch_is_as_data() -> None:
    build, batch, plan = models.Toy, models.rows(), SHARES["tp2 | dp3 x tp2"]
    held = shard_map(make_recipe(build, plan, batch))
    a, b = held.to_dict()["branches"]
    work, load = [(x.pop("work"), x.pop("load")) for x in (a, b)], held.recipe.branches
    assert [w for w, _ in work] == pytest.approx([p.work / sum(q.work for q in load) for p in load], abs=1e-4)
    # Two ranks of the first, and two by three of the second: the busiest has all, the other a share of that.
    assert [x for _, x in work] == pytest.approx(
        [min(1, 3 * work[0][0] / work[1][0]), min(1, work[1][0] / work[0][0] / 3)], abs=1e-3
    )
    assert a == {
        "number": 1, "on": "tp[0:2]", "parent": 0, "ranks": [0, 1], "mesh": {"tp": 2},
        "modules": [{"name": "block_a", "calls": []}], "splits": False, "numel": 6296,
    }  # fmt: skip
    assert (b["ranks"], b["mesh"], b["splits"]) == ([2, 3, 4, 5, 6, 7], {"dp_replicate": 3, "tp": 2}, True)
    assert held.held_by("block_b.up.weight") == (
        ((2, 4, 6), (((0, 32),), ((0, 24),))), ((3, 5, 7), (((32, 64),), ((0, 24),))),
    )  # fmt: skip


def test_who_runs_what_between_fork_and_join_is_drawn() -> None:
    build, batch, plan = NESTED
    text = printed(render(shard_map(make_recipe(build, plan, batch))), 120)
    assert "ranks 0–3 ─ fork ─┬─ 0–2  inner ─┬─ join" in text
    assert "ranks 0–2 ─ fork ─┬─ 0     inner.left ──┬─ join" in text
    assert "1, 2 (tp[1:3] of tp[0:3])" in text
    build, batch, plan = SIAMESE
    text = printed(render(shard_map(make_recipe(build, plan, batch))), 120)
    assert "─┬─ 0  tower, call 1 ─┬─ join" in text


def test_blocks_on_streams_are_drawn() -> None:
    plan = {"mesh": "dp_shard=2", "modules": {"left.*": {"on": "stream[0]"}, "right.*": {"on": "stream[1]"}}}
    held = shard_map(make_recipe(models.Tracks, plan, models.rows()))
    assert "  stream 0  left.{0…1}\n  stream 1  right.{0…1}" in printed(render(held))
    assert held.to_dict()["streams"] == {"left.0": 0, "left.1": 0, "right.0": 1, "right.1": 1}


def test_repeated_blocks_of_branches_are_one_line_and_blocks_of_other_branches_are_not() -> None:
    build, batch, plan = WAYS["parallel attention and MLP"]
    held = shard_map(make_recipe(build, plan, batch))
    assert "─┬─ 0, 1  layers.{0…2}.attn ─┬─ join" in printed(render(held), 120)
    assert "layers.{0…2}.attn.out.weight ×3" in map(str, held.rows)
    apart = [
        ParameterRecipe(f"layers.{i}.weight", (8, 8), "float32", places=(1 + i,), data="replicate") for i in range(2)
    ]
    places = [Submesh(f"tp[{i}]", 0, i, i + 1, Mesh.parse("tp=1"), (f"layers.{i}",)) for i in range(2)]
    placed = {f"layers.{i}": (1 + i,) for i in range(2)}
    rows = mapped("tp=2", *apart, branches=tuple(places), placed=placed).rows
    assert list(map(str, rows)) == ["layers.0.weight", "layers.1.weight"]


# --- folding, and the rest of the data --------------------------------------------------------------------------------


def layers(*names: str, shape: tuple[int, ...] = (8, 8), **rest: object) -> list[ParameterRecipe]:
    return [ParameterRecipe(name, shape, "float32", **rest) for name in names]  # type: ignore[arg-type]


def test_names_that_differ_in_numbers_alone_are_one_row() -> None:
    held = mapped("dp_shard=2", *layers(*(f"model.layers.{i}.mlp.{j}.weight" for i in range(4) for j in (0, 2))))
    (row,) = held.rows
    assert str(row) == "model.layers.{0…3}.mlp.{0,2}.weight ×8"
    assert row.bytes == 8 * 8 * 8 * 4


def test_another_shape_or_reason_is_another_row() -> None:
    lines = [*layers("l.0.w", "l.1.w"), *layers("l.2.w", shape=(8, 4)), *layers("l.3.w", reason="as the plan says")]
    assert [str(row) for row in mapped("tp=2", *lines).rows] == ["l.{0…1}.w ×2", "l.2.w", "l.3.w"]


def test_a_label_names_exactly_what_is_there() -> None:
    held = mapped("tp=2", *layers("b.0.0.w", "b.1.0.w", "b.1.1.w", "b.2.1.w"))
    assert [str(row) for row in held.rows] == ["b.{0…1}.0.w ×2", "b.{1…2}.1.w ×2"]


def test_a_thousand_ranks_are_spelt_out_only_where_asked() -> None:
    line = ParameterRecipe("w", (4096, 4096), "bfloat16", tp=even_shard(0, 4096, 8))
    recipe = Recipe(Mesh.parse("dp_shard=128,tp=8"), (line,))
    assert shard_map(recipe).to_dict()["parameters"][0]["held"] == []
    held = shard_map(recipe, [1023]).to_dict()["parameters"][0]["held"]
    assert held == [{"ranks": [1023], "slices": [[[4092, 4096]], [[0, 4096]]]}]
    assert len(shard_map(recipe).held_by("w")) == 1024
    with pytest.raises(ValueError, match="no rank 1024"):
        shard_map(recipe, [1024])


def test_a_glob_that_fits_nothing_names_the_nearest() -> None:
    with pytest.raises(KeyError, match=r"head\.weight"):
        mapped("tp=2", *layers("head.weight")).matching("haed.weight")


# --- ink --------------------------------------------------------------------------------------------------------------


def test_the_tree_says_in_words_what_is_cut_and_what_a_rank_holds() -> None:
    lines = (
        ParameterRecipe("model.h.0.qkv.weight", (24, 8), "float32", tp=even_shard(0, (8, 8, 8), 2), unit="model.h.0"),
        ParameterRecipe("model.h.1.qkv.weight", (24, 8), "float32", tp=even_shard(0, (8, 8, 8), 2), unit="model.h.1"),
        ParameterRecipe("head.weight", (5, 8), "float32", reason="5 rows", aliases=("embed.weight",)),
    )
    held = mapped("dp_shard=2,tp=2", *lines, units=(Unit("model.h.0"), Unit("model.h.1"), Unit("")), notes=("a note",))
    text = printed(render(held, rank=3))
    assert "dp_shard=2 × tp=2: 4 ranks" in text
    assert "model.h.{0…1}.qkv.weight  24×8   rows        rows of 3 blocks  rows 14:16+20:24" in text
    assert "the same tensor: embed.weight" in text
    assert "replicated over tp: 5 rows" in text
    assert "– a note" in text


def test_what_does_not_fit_the_width_goes_below() -> None:
    line = ParameterRecipe("a_module.with_a_long_name.weight", (64, 64), "float32", tp=even_shard(1, 64, 2))
    held = mapped("dp_shard=2,tp=2", line)
    text = printed(render(held, rank=1), 60)
    assert "rank 1 holds rows 0:32, cols 32:64" in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_picture_shows_who_holds_which_box() -> None:
    held = mapped("dp_shard=2,tp=2", ParameterRecipe("w", (10, 12), "float32", tp=even_shard(1, 12, 2)))
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in printed(render(held, parameter="w")).splitlines()
    ]
    assert [line for line in lines if line] == [["rows \\ cols", "0:6", "6:12"], ["0:5", "0", "1"], ["5:10", "2", "3"]]


def test_as_many_pictures_as_are_asked_for() -> None:
    lines = [ParameterRecipe(name, (8, 4), "float32", tp=even_shard(0, 8, 2)) for name in "abcde"]
    held = mapped("tp=2", *lines)

    def drawn(**choice: object) -> int:
        return printed(render(held, **choice)).count("┌")  # type: ignore[arg-type]

    assert (drawn(), drawn(parameter="*"), drawn(parameter="b")) == (0, 3, 1)
    assert [drawn(parameter="*", pictures=count) for count in (0, 1, 5, 9)] == [0, 1, 5, 5]
    assert drawn(pictures=2) == 2
    assert "3 more without a picture" in printed(render(held, parameter="*", pictures=2))


def test_in_a_pipe_no_name_is_broken_whatever_the_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name, reason = "a_module.with_a_long_name.weight", "its input is cut, and so is it, over 2 ranks of tp"
    line = ParameterRecipe(name, (64, 64), "float32", tp=even_shard(1, 64, 2), reason=reason)
    held = mapped("dp_shard=2,tp=2", line, notes=(f"a note on {name}, which is long",))
    console().print(render(held, rank=1))
    console().print(render(held, parameter=name))
    lines = capsys.readouterr().out.splitlines()
    assert any(name in line and line.endswith("rows 0:32, cols 32:64") for line in lines)
    assert any(line.endswith(f"sharded over tp: {reason}") for line in lines)
    assert any(line.endswith(f"a note on {name}, which is long") for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_slices_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("rank 6 holds 75:100: 1 … 25")
    assert capsys.readouterr().out == "rank 6 holds 75:100: 1 … 25\n"


def test_words() -> None:
    assert (size_text(0), size_text(1536), count_text(6738415616)) == ("0 B", "1.5 KiB", "6.74 G")
    assert (ranks_text([0, 1, 2, 3]), ranks_text([0, 4])) == ("0–3", "0, 4")
    assert (ranges_text(((0, 4), (8, 12))), ranges_text(())) == ("0:4+8:12", "–")
    assert [itemsize(d) for d in ("float32", "bfloat16", "bool", "float8_e4m3fn", "complex64")] == [4, 2, 1, 1, 8]
