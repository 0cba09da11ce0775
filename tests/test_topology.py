"""The nodes of a mesh: which ranks each has, which links an axis communicates over, and how both are drawn."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshwright.draw.nodes import Nodes, links
from meshwright.draw.topology import Topology, topology
from meshwright.mesh import AXES, Mesh


def printed(placed: Topology, width: int = 100) -> str:
    told = io.StringIO()
    Console(file=told, width=width).print(Nodes(placed), links(placed), sep="\n")
    return "\n".join(line.rstrip() for line in told.getvalue().splitlines()) + "\n"


@st.composite
def placed(draw: st.DrawFn) -> Topology:
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 4))]
    mesh = Mesh(tuple((name, draw(st.integers(1, 6))) for name in names))
    return topology(mesh, draw(st.integers(1, 12)))


@given(placed())
def test_every_rank_is_on_one_node_and_the_facts_come_back_from_json(placed: Topology) -> None:
    ranks = [rank for node in range(placed.nodes) for rank in placed.ranks_of(node)]
    assert ranks == list(range(placed.mesh.size))
    assert all(rank in placed.ranks_of(placed.node_of(rank)) for rank in ranks)
    assert Topology.from_json(placed.to_json()) == placed


@given(placed())
def test_the_links_of_an_axis_are_those_of_its_groups(placed: Topology) -> None:
    assert [axis.axis for axis in placed.axes] == [name for name, size in placed.mesh.axes if size > 1]
    for axis in placed.axes:
        groups = placed.mesh.groups(axis.axis)
        nodes = [{placed.node_of(rank) for rank in group} for group in groups]
        assert (axis.groups, axis.crossing) == (len(groups), sum(len(one) > 1 for one in nodes))
        assert list(axis.example) in groups and len(axis.on_nodes) == max(map(len, nodes))
        assert sum(axis.on_nodes) == len(axis.example)


@given(placed(), st.integers(70, 160))
def test_no_line_is_broken_and_small_nodes_are_drawn_whole(placed: Topology, width: int) -> None:
    told = printed(placed, width)
    assert told.count("┌") == told.count("┐") == told.count("└") == told.count("┘") >= min(placed.nodes, 3)
    assert max(map(len, told.splitlines())) <= width


def test_nodes_are_boxes_and_links_are_drawn() -> None:
    assert (
        printed(topology(Mesh.parse("dp_shard=4,tp=2"), 4))
        == """\
┌ node 0 ────────────────┐  ┌ node 1 ────────────────┐
│             tp 0  tp 1 │  │             tp 0  tp 1 │
│ dp_shard 0     0     1 │  │ dp_shard 2     4     5 │
│ dp_shard 1     2     3 │  │ dp_shard 3     6     7 │
└────────────────────────┘  └────────────────────────┘
dp_shard  0 ─ 2 ═ 4 ─ 6  between 2 nodes, 2 ranks on each
tp        0 ─ 1          within a node
─ within a node   ═ between nodes
"""
    )


def test_a_node_that_ends_within_a_group_is_drawn_truly() -> None:
    assert (
        printed(topology(Mesh.parse("dp_shard=4,tp=3"), 8))
        == """\
┌ node 0 ──────────────────────┐  ┌ node 1 ──────────────────────┐
│             tp 0  tp 1  tp 2 │  │             tp 0  tp 1  tp 2 │
│ dp_shard 0     0     1     2 │  │ dp_shard 2                 8 │
│ dp_shard 1     3     4     5 │  │ dp_shard 3     9    10    11 │
│ dp_shard 2     6     7       │  └──────────────────────────────┘
└──────────────────────────────┘
dp_shard  0 ─ 3 ─ 6 ═ 9  between 2 nodes, 1 to 3 ranks on each
tp        6 ─ 7 ═ 8      between 2 nodes, 1 to 2 ranks on each (1 of 4 groups)
─ within a node   ═ between nodes
"""
    )


def test_ten_thousand_ranks_fit_a_screen() -> None:
    told = printed(topology(Mesh.parse("pp=10,dp_shard=125,tp=8"), 8))
    assert len(told.splitlines()) < 24 and "node 1249" in told
    assert "pp        0 ═ 1000 ═ 2000 ═ 3000 … 9000  between 10 nodes" in told


def test_a_node_has_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        topology(Mesh.parse("tp=2"), 0)
