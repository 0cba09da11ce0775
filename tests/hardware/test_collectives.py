"""What collectives take tends to what their bytes take, and more nodes are never faster."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from meshwright.hardware import Curve, Estimate, Group, Link, Profile, collective, profiles, read_profile
from meshwright.hardware.collectives import CollectiveKind

KINDS = get_args(CollectiveKind)
FLAT = Curve(((1.0, 1.0),))
BANDWIDTH, ACROSS, STEP, HOP = 1e11, 1e10, 1e-6, 1e-5
BIG = 1e12  # bytes of which the latency is nothing


def toy(**changes) -> Profile:
    """A profile with flat efficiencies, of which the numbers follow."""
    node = Link(STEP, BANDWIDTH, FLAT, 0.1, "wire", **changes)
    return replace(read_profile("h100"), devices_per_node=8, node=node, network=Link(HOP, ACROSS, FLAT, 0.2, "network"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_to_all", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
    ],
)
def test_many_bytes_take_the_factors_of_nccl_tests(kind, factor, ranks) -> None:
    found = collective(toy(), kind, BIG, Group(ranks, 8))
    assert found.seconds == pytest.approx(factor(ranks) * BIG / BANDWIDTH, rel=1e-4)
    assert found.scatter == 0.1


@pytest.mark.parametrize(
    ("kind", "steps"), [("all_reduce", 14), ("all_gather", 7), ("reduce_scatter", 7), ("broadcast", 7)]
)
def test_few_bytes_take_the_steps_of_a_ring(kind, steps) -> None:
    assert collective(toy(start=5e-6), kind, 0, Group(8, 8)).seconds == pytest.approx(5e-6 + steps * STEP)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gloo_leaves_out_the_steps_of_a_tensor_with_fewer_elements_than_segments(ranks) -> None:
    gloo, group, steps = toy(segment=4), Group(ranks, 8), 2 * (ranks - 1)
    for elements in (1, ranks, 2 * ranks, 64 * ranks):
        share = min(1.0, elements / (2 * ranks))
        assert collective(gloo, "all_reduce", 4 * elements, group).seconds == pytest.approx(
            share * steps * STEP, rel=0.1
        )
    assert collective(gloo, "all_gather", 4, group).seconds == pytest.approx((ranks - 1) * STEP, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_takes_nothing(kind) -> None:
    assert collective(toy(), kind, BIG, Group(1, 1)) == Estimate(0.0)


def test_across_nodes_all_devices_of_a_node_share_the_rings() -> None:
    found = collective(toy(), "all_reduce", BIG, Group(64, 8))
    assert found.seconds == pytest.approx(2 * 63 / 64 * BIG / (8 * ACROSS), rel=1e-3)
    assert found.scatter == 0.2


def test_one_rank_a_node_has_its_own_adapter() -> None:
    found = collective(toy(), "all_gather", BIG, Group(4, 1))
    assert found.seconds == pytest.approx(3 / 4 * BIG / ACROSS, rel=1e-3)


def test_across_many_nodes_a_tree_reduces_few_bytes() -> None:
    # A ring would take 2 · 255 hops.
    found = collective(toy(), "all_reduce", 8, Group(256, 1))
    assert found.seconds == pytest.approx(2 * 8 * HOP, rel=1e-3)


def test_two_nodes_reduce_many_bytes_as_a_tree() -> None:
    slow = replace(toy(), network=Link(HOP, 1e8, FLAT, 0.2))
    assert collective(slow, "all_reduce", BIG, Group(16, 8)).seconds == pytest.approx(BIG / 8 / 1e8 / 0.92, rel=1e-3)


def test_a_switch_that_adds_up_takes_fewer_bytes() -> None:
    found, ring = (collective(toy(in_switch=s), "all_reduce", BIG, Group(8, 8)).seconds for s in (0.9, 0.0))
    assert found == pytest.approx(9 / 8 * BIG / (0.9 * BANDWIDTH), rel=1e-3)
    assert found < ring
    # Few bytes go round the ring all the same.
    few = [collective(toy(in_switch=s), "all_reduce", 1024, Group(8, 8)) for s in (0.9, 0.0)]
    assert few[0] == few[1]


def test_on_a_mesh_of_wires_a_group_uses_those_between_its_ranks() -> None:
    found, all_of_them = (collective(toy(mesh=True), "all_gather", BIG, Group(n, 8)).seconds for n in (2, 8))
    assert found == pytest.approx(1 / 2 * BIG / (BANDWIDTH / 7), rel=1e-3)
    assert all_of_them == pytest.approx(7 / 8 * BIG / BANDWIDTH, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_that_share_a_link_share_its_bandwidth(kind) -> None:
    alone, shared = (collective(toy(), kind, BIG, Group(2, 2), contention=c).seconds for c in (1, 2))
    assert shared == pytest.approx(2 * alone, rel=1e-3)


def test_a_send_is_one_step_and_its_bytes() -> None:
    assert collective(toy(), "send", BANDWIDTH, Group(2, 2)).seconds == pytest.approx(STEP + 1)
    assert collective(toy(), "send", ACROSS, Group(2, 1)).seconds == pytest.approx(HOP + 1)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "send"])
@pytest.mark.parametrize("name", profiles())
def test_more_nodes_are_never_faster(name, kind) -> None:
    profile = read_profile(name)
    for size in (2**12, 2**20, 2**24, 2**28, 2**32):
        seconds = [collective(profile, kind, size, Group(8, per_node)).seconds for per_node in (8, 4, 2, 1)]
        # Two devices of a mesh have one wire between them, which may be slower than their network.
        assert (min(seconds) == seconds[0]) if profile.node.mesh else (seconds == sorted(seconds)), (size, seconds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", profiles())
def test_more_bytes_and_more_ranks_are_never_faster(name, kind) -> None:
    profile = read_profile(name)
    sizes = [2.0**i for i in range(10, 36)]
    for group in (
        (Group(2, 2), Group(8, 8), Group(64, 8), Group(1024, 8)) if kind != "send" else (Group(2, 2), Group(2, 1))
    ):
        seconds = [collective(profile, kind, size, group).seconds for size in sizes]
        assert seconds == sorted(seconds), group
    if kind in ("all_gather", "reduce_scatter", "broadcast"):  # for all-reduces another algorithm may begin to pay
        for size in sizes[::5]:
            seconds = [collective(profile, kind, size, Group(n, 8)).seconds for n in (8, 16, 64, 512)]
            assert seconds == sorted(seconds), size


def test_100_000_ranks_are_a_finite_number_of_seconds() -> None:
    assert 0.005 < collective(read_profile("h100"), "all_reduce", 2**30, Group(100_000, 8)).seconds < 0.1


def test_what_cannot_stand_so_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 ranks in a node of 8 devices"):
        collective(toy(), "all_reduce", 1, Group(9, 9))
    with pytest.raises(ValueError, match="a group over 2 nodes, and h100-sxm has no network"):
        collective(replace(toy(), network=None), "all_reduce", 1, Group(16, 8))
    with pytest.raises(ValueError, match="at least one rank"):
        Group(0, 1)
    with pytest.raises(ValueError, match="at least one collective"):
        collective(toy(), "all_reduce", 1, Group(2, 2), contention=0.5)


@pytest.mark.parametrize(
    ("name", "network", "size", "group", "published"),
    [
        # stas00/ml-engineering, network/README.md (2026-08): all_reduce_bench.py; busbw in GB/s.
        ("h200", None, 2**34, Group(8, 8), 482.26),
        ("h200", None, 2**26, Group(8, 8), 346.51),
        ("b200", "efa-400", 2**34, Group(32, 8), 381.80),
        ("b200", "efa-400", 2**30, Group(32, 8), 361.99),
        # NVIDIA/nccl, issue 1576: "on an Nvidia DGX-A100 system we have 8x200Gbit/s IB cards and we measure 192GB/s".
        ("a100", "ib-200", 2**33, Group(64, 8), 192.0),
    ],
)
def test_published_all_reduces_are_within_the_interval(name, network, size, group, published) -> None:
    """Most of these the curves are made of: this is about the units and the sums, not about what a prediction is worth."""
    found = collective(read_profile(name, network=network), "all_reduce", size, group)
    seconds = 2 * (group.ranks - 1) / group.ranks * size / (published * 1e9)
    assert found.low < seconds < found.high
