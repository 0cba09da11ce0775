"""Who stands where on a mesh, and with whom."""

import pickle
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.mesh import AXES, Mesh

meshes = st.lists(st.sampled_from(AXES), min_size=1, unique=True).flatmap(
    lambda names: st.tuples(*[st.tuples(st.just(name), st.integers(1, 4)) for name in names]).map(Mesh)
)
some_axes = st.sets(st.sampled_from(AXES))


@given(meshes)
def test_rank_and_coordinate_are_a_bijection(mesh: Mesh) -> None:
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(coordinate) for coordinate in coordinates] == list(range(mesh.size))
    assert len({tuple(c.items()) for c in coordinates}) == mesh.size == prod(mesh.shape)
    assert coordinates == sorted(coordinates, key=lambda c: tuple(c.values()))  # the last axis is the fastest


@given(meshes, some_axes)
def test_groups_partition_the_ranks(mesh: Mesh, names: set[str]) -> None:
    groups = mesh.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert groups == sorted(sorted(group) for group in groups)
    assert {len(group) for group in groups} == {prod(mesh.axis_size(name) for name in names)}
    for group in groups:
        others = {tuple((n, i) for n, i in mesh.coordinate(r).items() if n not in names) for r in group}
        assert len(others) == 1
        assert all(mesh.group_of(rank, *names) == group for rank in group)


@given(meshes)
def test_data_pieces_are_shared_by_tensor_parallel_groups_alone(mesh: Mesh) -> None:
    pieces = [mesh.data_index(rank) for rank in range(mesh.size)]
    assert set(pieces) == set(range(mesh.data_size))
    for group in mesh.groups("tp"):
        assert len({pieces[rank] for rank in group}) == 1
    assert mesh.data_size * mesh.axis_size("tp") * mesh.axis_size("pp") == mesh.size


@given(meshes)
def test_a_mesh_comes_back_from_its_text(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh == Mesh.parse(dict(mesh.axes)) == pickle.loads(pickle.dumps(mesh))
    assert len({mesh, Mesh.parse(str(mesh))}) == 1


def test_two_by_three() -> None:
    mesh = Mesh.parse("dp_shard=2,tp=3")
    assert mesh.groups("tp") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups("dp_shard") == [[0, 3], [1, 4], [2, 5]]
    expected = """\
dp_shard=2 × tp=3: 6 ranks

            tp 0  tp 1  tp 2
dp_shard 0     0     1     2
dp_shard 1     3     4     5

dp_shard  {0, 3}  {1, 4}  {2, 5}
tp        {0, 1, 2}  {3, 4, 5}"""
    assert mesh.picture() == expected


def test_three_by_two() -> None:
    mesh = Mesh.parse("dp_shard=3,tp=2")
    assert mesh.groups("tp") == [[0, 1], [2, 3], [4, 5]]
    assert mesh.groups("dp_shard") == [[0, 2, 4], [1, 3, 5]]
    expected = """\
dp_shard=3 × tp=2: 6 ranks

            tp 0  tp 1
dp_shard 0     0     1
dp_shard 1     2     3
dp_shard 2     4     5

dp_shard  {0, 2, 4}  {1, 3, 5}
tp        {0, 1}  {2, 3}  {4, 5}"""
    assert mesh.picture() == expected


def test_hybrid_sharding_of_two_by_four() -> None:
    mesh = Mesh.parse({"ddp": 2, "fsdp": 4})
    assert mesh.names == ("dp_replicate", "dp_shard")
    assert mesh.groups("fsdp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.groups("ddp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("ddp", "fsdp") == [list(range(8))]
    assert mesh.groups() == [[rank] for rank in range(8)]


def test_order_is_the_one_given() -> None:
    mesh = Mesh.parse("tp=2, dp_shard=3")
    assert mesh.groups("dp_shard") == [[0, 1, 2], [3, 4, 5]]
    assert [mesh.data_index(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert mesh != Mesh.parse("dp_shard=3,tp=2")


def test_an_axis_that_the_mesh_lacks_has_size_one() -> None:
    mesh = Mesh.parse("tp=4")
    assert (mesh.axis_size("dp_shard"), mesh.data_axes, mesh.data_size) == (1, (), 1)
    assert mesh.groups("dp_shard") == [[0], [1], [2], [3]]
    assert [mesh.data_index(rank) for rank in range(4)] == [0, 0, 0, 0]


def test_pictures_of_large_meshes_are_abridged() -> None:
    picture = Mesh.parse("dp_replicate=2,dp_shard=512,tp=16").picture()
    assert "dp_replicate 1 · dp_shard 511" in picture and "…" in picture
    assert len(picture.splitlines()) < 20 and max(map(len, picture.splitlines())) < 500
    assert Mesh.parse("tp=1").picture().startswith("tp=1: 1 rank\n")


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_the_mesh(rank: int) -> None:
    with pytest.raises(ValueError, match="its ranks are 0 to 5"):
        Mesh.parse("dp_shard=2,tp=3").coordinate(rank)


def test_a_coordinate_outside_the_mesh() -> None:
    mesh = Mesh.parse("dp_shard=2,tp=3")
    assert mesh.rank({"fsdp": 1}) == 3
    with pytest.raises(ValueError, match="no tp 3"):
        mesh.rank({"tp": 3})
    with pytest.raises(ValueError, match="did you mean dp_shard"):
        mesh.axis_size("dp_shrad")


@pytest.mark.parametrize(
    ("spec", "where", "required", "fix"),
    [
        ("dp_shrd=2", "mesh.dp_shrd", "did you mean dp_shard?", "dp_shard=2"),
        ({"dp_shrd": 4}, "mesh.dp_shrd", "did you mean dp_shard?", "dp_shard: 4"),
        ("expert=2", "mesh.expert", "an axis: pp, dp_replicate, dp_shard or tp", "dp_shard=2"),
        ("ppp=2,tp=2", "mesh.ppp", "did you mean pp?", "pp=2"),
        ("tp=0", "mesh.tp", "at least 1", "tp=2"),
        ("tp=-2", "mesh.tp", "at least 1", "tp=2"),
        ("tp=two", "mesh.tp", "at least 1", "tp=2"),
        ({"tp": 2.0}, "mesh.tp", "at least 1", "tp: 2"),
        ({"tp": True}, "mesh.tp", "at least 1", "tp: 2"),
        ("", "mesh", "at least one axis", "dp_shard=1"),
        ({}, "mesh", "at least one axis", "dp_shard: 1"),
        ("tp", "mesh", "axis=size", "tp=2"),
        ("tp=2,", "mesh", "axis=size", "tp=2"),
        ("tp=2,tp=4", "mesh.tp", "each axis once", "tp=2"),
        ({"fsdp": 2, "dp_shard": 4}, "mesh.dp_shard", "each axis once", "dp_shard: 2"),
        (8, "mesh", "axes with their sizes", "mesh: {dp_shard: 2, tp: 2}"),
    ],
)
def test_a_bad_mesh_says_where_what_and_how_to_mend_it(spec: Any, where: str, required: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        Mesh.parse(spec)
    (finding,) = caught.value.findings
    assert finding.where == where
    assert required in finding.required
    assert finding.fix == fix


def test_every_problem_of_a_mesh_is_told_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        Mesh.parse("dp_shrd=0,tp=2,tp=x,ep=2,8")
    told = [(finding.where, finding.required.split(":")[0].split(";")[0]) for finding in caught.value.findings]
    assert told == [
        ("mesh", "axis=size"),
        ("mesh.dp_shrd", "an axis"),
        ("mesh.dp_shrd", "a whole number of at least 1"),
        ("mesh.tp", "each axis once"),
        ("mesh.tp", "a whole number of at least 1"),
        ("mesh.ep", "an axis"),
    ]


def test_the_constructor_checks_too() -> None:
    assert Mesh((("fsdp", 2),)) == Mesh.parse("dp_shard=2")
    with pytest.raises(PlanError, match="each axis once"):
        Mesh((("fsdp", 2), ("dp_shard", 2)))
