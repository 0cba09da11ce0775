"""Layouts: shares, cuts, what a reshape makes of a cut, and which slices of a parameter a rank holds."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.layout import Shard, even_shard, in_one_dim, regroup, reshape_group, shares
from meshwright.mesh import Mesh
from meshwright.recipe import ParameterRecipe, Recipe, place_slices, take_slices

few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cuts(draw: st.DrawFn, dim: int = 0, size: int | None = None, ranks: int | None = None) -> Shard:
    """Any cut: uneven, of fused blocks, with ranks that hold nothing."""
    ranks = ranks or draw(st.integers(1, 5))
    blocks = _blocks(draw, size) if size is not None else draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    pieces = []
    for block in blocks:
        borders = sorted(draw(st.lists(st.integers(0, block), min_size=ranks - 1, max_size=ranks - 1)))
        pieces.append(tuple(b - a for a, b in zip([0, *borders], [*borders, block], strict=True)))
    return Shard(dim, tuple(pieces))


def _blocks(draw: st.DrawFn, size: int) -> list[int]:
    parts = draw(st.integers(1, 3))
    borders = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [b - a for a, b in zip([0, *borders], [*borders, size], strict=True)]


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[list[int], Shard]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, draw(cuts(dim, shape[dim]))


def counted(shape: list[int]) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


# --- shares and cuts --------------------------------------------------------------------------------------------------


@few
@given(size=st.integers(1, 200), ranks=st.integers(1, 16))
def test_shares_sum_to_the_size_and_no_rank_goes_without_where_there_is_enough(size: int, ranks: int) -> None:
    found = shares(size, ranks)
    assert len(found) == ranks and sum(found) == size
    assert size < ranks or min(found) >= 1
    assert list(found) == sorted(found, reverse=True)


@few
@given(size=st.integers(1, 200), ranks=st.integers(1, 16))
def test_shares_are_those_of_chunk_where_chunk_leaves_nobody_out(size: int, ranks: int) -> None:
    chunks = [len(c) for c in torch.arange(size).chunk(ranks)]
    if len(chunks) == ranks or size < ranks:
        assert list(shares(size, ranks)) == chunks + [0] * (ranks - len(chunks))
    else:
        assert max(shares(size, ranks)) - min(shares(size, ranks)) == 1


@few
@given(units=st.integers(1, 30), width=st.integers(1, 9), ranks=st.integers(1, 8))
def test_shares_break_no_unit(units: int, width: int, ranks: int) -> None:
    assert shares(units * width, ranks, units) == tuple(n * width for n in shares(units, ranks))


@pytest.mark.parametrize("units", [0, -1, 3])
def test_sizes_that_are_not_so_many_units_are_refused(units: int) -> None:
    with pytest.raises(ValueError, match=r"not .* equal units"):
        shares(8, 2, units)


@few
@given(blocks=st.lists(st.integers(1, 20), min_size=1, max_size=4), ranks=st.integers(1, 6), dim=st.integers(0, 3))
def test_an_even_cut_shares_each_block(blocks: list[int], ranks: int, dim: int) -> None:
    made = even_shard(dim, blocks, ranks)
    assert made.pieces == tuple(shares(b, ranks) for b in blocks)
    assert (made.dim, made.parts, made.ranks, made.size, made.blocks) == (
        dim,
        len(blocks),
        ranks,
        sum(blocks),
        tuple(blocks),
    )


def test_one_block_may_be_given_as_a_number_and_heads_stay_whole() -> None:
    assert even_shard(1, 10, 3) == even_shard(1, [10], 3) == Shard(1, ((4, 4, 2),))
    assert even_shard(0, 12, 2, units=3).pieces == ((8, 4),)
    assert even_shard(0, [12, 4, 4], 2, units=3).pieces[0] == (8, 4)  # three heads of q


@few
@given(cuts())
def test_the_intervals_of_all_ranks_tile_the_dim(layout: Shard) -> None:
    held = [i for rank in range(layout.ranks) for start, stop in layout.intervals(rank) for i in range(start, stop)]
    assert sorted(held) == list(range(layout.size))
    for rank in range(layout.ranks):
        ranges = layout.intervals(rank)
        assert all(start < stop for start, stop in ranges)
        assert sum(stop - start for start, stop in ranges) == layout.local(rank)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


@few
@given(cut_shapes())
def test_merge_is_the_inverse_of_take(shaped: tuple[list[int], Shard]) -> None:
    shape, layout = shaped
    whole = counted(shape)
    pieces = [layout.take(whole, rank) for rank in range(layout.ranks)]
    assert [p.shape[layout.dim] for p in pieces] == [layout.local(r) for r in range(layout.ranks)]
    assert torch.equal(layout.merge(pieces), whole)


@few
@given(cut_shapes())
def test_take_takes_the_intervals_in_order(shaped: tuple[list[int], Shard]) -> None:
    shape, layout = shaped
    whole = counted(shape)
    for rank in range(layout.ranks):
        index = torch.tensor([i for a, b in layout.intervals(rank) for i in range(a, b)], dtype=torch.int64)
        assert torch.equal(layout.take(whole, rank), whole.index_select(layout.dim, index))


def test_the_same_cut_of_another_dim() -> None:
    layout = even_shard(0, 6, 2)
    assert layout.on(0) is layout and layout.on(2) == even_shard(2, 6, 2)


def test_layouts_read_as_words() -> None:
    assert str(even_shard(1, 6, 2)) == "Shard(1)" and str(even_shard(0, [3, 3, 3], 2)) == "Shard(0, parts=3)"


# --- reshapes ---------------------------------------------------------------------------------------------------------


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], Shard, list[int]]:
    """A shape, a cut of it, and another shape of as many elements: dims split, merged, of size 1 come and gone."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))
    before, after = _grouped(draw, factors), _grouped(draw, factors)
    dim = draw(st.integers(0, len(before) - 1))
    kind = draw(st.sampled_from(["even", "fused", "any"]))
    ranks = draw(st.integers(1, 4))
    if kind == "any":
        return before, draw(cuts(dim, before[dim], ranks)), after
    parts = draw(st.sampled_from([p for p in (1, 2, 3) if before[dim] % p == 0])) if kind == "fused" else 1
    return before, even_shard(dim, [before[dim] // parts] * parts, ranks), after


def _grouped(draw: st.DrawFn, factors: list[int]) -> list[int]:
    shape, product = [], 1
    for factor in factors:
        product *= factor
        if draw(st.booleans()):
            shape.append(product)
            product = 1
    shape = [*shape, product] if product > 1 or not shape else shape
    return shape if not draw(st.booleans()) else [*shape, 1]


@settings(max_examples=800, deadline=None)
@given(reshapes())
def test_a_cut_followed_through_a_reshape_is_the_reshape_of_each_slice(
    case: tuple[list[int], Shard, list[int]],
) -> None:
    before, layout, after = case
    found = regroup(layout, before, after)
    if found is None:
        return
    assert (found.ranks, found.size) == (layout.ranks, after[found.dim])
    whole = counted(before)
    pieces = []
    for rank in range(layout.ranks):
        shape = list(after)
        shape[found.dim] = found.local(rank)
        pieces.append(layout.take(whole, rank).reshape(shape))
    assert torch.equal(found.merge(pieces), whole.reshape(after))


@few
@given(shaped=cut_shapes(), at=st.integers(0, 4))
def test_a_cut_follows_through_dims_of_size_one(shaped: tuple[list[int], Shard], at: int) -> None:
    shape, layout = shaped
    after = [*shape[:at], 1, *shape[at:]]
    found = regroup(layout, shape, after)
    assert found is not None and found.size == after[found.dim]
    assert found.size == layout.size or after[found.dim] == 1  # the new dim can carry it only where one rank holds all


@pytest.mark.parametrize(
    ("layout", "before", "after", "expected"),
    [
        (even_shard(2, 12, 2), (2, 5, 12), (2, 5, 6, 2), even_shard(2, 6, 2)),  # to heads
        (even_shard(2, 6, 2), (2, 5, 6, 2), (2, 5, 12), even_shard(2, 12, 2)),  # and back
        # fused QKV: each block's heads
        (even_shard(2, [12, 12, 12], 2), (2, 5, 36), (2, 5, 3, 6, 2), even_shard(3, 6, 2)),
        (even_shard(0, 4, 2), (4, 5), (20,), even_shard(0, 20, 2)),  # rows, flattened
        (even_shard(1, 4, 2), (3, 4), (12,), Shard(0, ((2, 2),) * 3)),  # columns, flattened: a block a row
        (even_shard(2, 12, 2), (2, 5, 12), (2, 5, 3, 4), None),  # heads would be broken
    ],
)
def test_reshapes_as_models_write_them(
    layout: Shard, before: tuple[int, ...], after: tuple[int, ...], expected: Shard | None
) -> None:
    assert regroup(layout, before, after) == expected


@few
@given(reshapes())
def test_dims_that_map_onto_each_other_have_equal_products(case: tuple[list[int], Shard, list[int]]) -> None:
    before, layout, after = case
    found = reshape_group(layout.dim, before, after)
    assert found is not None
    (lo, hi), (to_lo, to_hi) = found
    assert lo <= layout.dim < hi
    assert prod(before[lo:hi]) == prod(after[to_lo:to_hi])
    assert prod(before[:lo]) == prod(after[:to_lo])


# --- what a rank holds of a parameter -----------------------------------------------------------------------------------


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    sizes = {axis: draw(st.integers(1, 3)) for axis in ("dp_replicate", "dp_shard", "tp")}
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    options = {"tp": draw(cuts(dim, shape[dim], sizes["tp"]))} if draw(st.booleans()) else {}
    data = draw(st.sampled_from(["shard", "replicate", "loose"]))
    return Recipe(Mesh.parse(sizes), (ParameterRecipe("p", shape, "float32", data=data, **options),))


@few
@given(recipes())
def test_the_slices_of_all_ranks_tile_a_parameter_as_often_as_there_are_copies(recipe: Recipe) -> None:
    (parameter,) = recipe.parameters
    counts = torch.zeros(parameter.shape, dtype=torch.int64)
    whole = counted(list(parameter.shape))
    for rank in range(recipe.mesh.size):
        slices = recipe.held(parameter, rank)
        local = take_slices(whole, slices)
        seen = torch.zeros_like(whole)
        place_slices(seen, slices, torch.ones_like(local))
        counts += seen
        again = torch.full_like(whole, -1)
        place_slices(again, slices, local)
        assert torch.equal(again[seen == 1], whole[seen == 1])
    assert torch.equal(counts, torch.full_like(counts, recipe.copies(parameter)))


@few
@given(recipes())
def test_a_rank_holds_the_chunk_that_torch_takes_of_its_tensor_parallel_slice(recipe: Recipe) -> None:
    (parameter,) = recipe.parameters
    whole = counted(list(parameter.shape))
    for rank in range(recipe.mesh.size):
        place = recipe.mesh.coordinate(rank)
        expected = parameter.tp.take(whole, place.get("tp", 0)) if isinstance(parameter.tp, Shard) else whole
        assert tuple(expected.shape) == parameter.local_shape(place.get("tp", 0))
        if parameter.data == "shard":
            chunks = expected.chunk(recipe.mesh.axis_size("dp_shard"))
            mine = place.get("dp_shard", 0)
            expected = chunks[mine] if mine < len(chunks) else expected[:0]
        assert torch.equal(take_slices(whole, recipe.held(parameter, rank)), expected)


def test_layouts_by_axis_name_only_what_is_cut() -> None:
    mesh = Mesh.parse({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    column = ParameterRecipe("w", (6, 4), "float32", tp=even_shard(0, 6, 2))
    loose = ParameterRecipe("s", (), "float32", data="loose")
    recipe = Recipe(mesh, (column, loose))
    assert {axis: str(layout) for axis, layout in recipe.layouts(column).items()} == {
        "dp_replicate": "Replicate", "dp_shard": "Shard(0)", "tp": "Shard(0)",
    }  # fmt: skip
    assert set(map(str, recipe.layouts(loose).values())) == {"Replicate"}
    assert recipe.held(loose, 5) == () and recipe.copies(loose) == 8 and recipe.copies(column) == 2


def test_one_element_of_any_stride_can_be_read_as_bytes() -> None:
    column = torch.arange(6.0).view(1, 6)[:, 2]
    assert column.is_contiguous() and column.stride() == (6,)
    assert in_one_dim(column).view(torch.uint8).numel() == 4
    rows = torch.arange(6.0).view(2, 3)
    assert in_one_dim(rows).data_ptr() == rows.data_ptr() and in_one_dim(rows.t()).tolist() == [0, 3, 1, 4, 2, 5]
    assert in_one_dim(rows[:, :0]).shape == (0,)
