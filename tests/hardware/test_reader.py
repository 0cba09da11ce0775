"""Every profile that ships can be read and written, and every problem of a file is told at once."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from math import exp, log
from pathlib import Path

import pytest
import yaml

from meshwright.errors import PlanError
from meshwright.hardware import Curve, Link, Profile, profiles, read_profile
from meshwright.hardware.reader import ALIASES, parse_profile

NAMES = ("a100-40", "a100-80", "b200-sxm", "h100-sxm", "h200-sxm", "mi300x", "v100")

SMALL = """
name: toy
source: nobody
date: 2026-11-23
memory: 1 GiB
context: 0 B
per_group: 0 B
reserve: 0
peak: {float32: 1 Tflop/s}
matmul: {float32: {1 Mflop: 0.5, 1 Gflop: 0.9}}
attention: {float32: {1 Mflop: 0.5}}
bandwidth: 100 GB/s
streaming: {1 kB: 0.1, 1 MB: 0.9}
launch: 0 s
host: 5 us
host_backward: 6 us
scatter: 0.1
nodes:
  box: {devices: 4, latency: 1 us, bandwidth: 10 GB/s, efficiency: {1 kB: 0.5}, scatter: 0.2}
"""


def curves(profile: Profile) -> list[Curve]:
    links = [link for link in (profile.node, profile.network) if link]
    return [
        *profile.matmul.values(),
        *profile.attention.values(),
        profile.streaming,
        *(link.efficiency for link in links),
    ]


def test_the_profiles_that_ship_are_package_data() -> None:
    shipped = sorted(f.name for f in (files("meshwright.hardware") / "profiles").iterdir() if f.name.endswith(".yaml"))
    assert tuple(profiles()) == NAMES == tuple(name.removesuffix(".yaml") for name in shipped)


def test_each_says_in_a_line_what_it_is() -> None:
    assert profiles()["h100-sxm"].startswith("NVIDIA H100 SXM, 80 GB: 8 a node")
    assert all(line and len(line) < 100 for line in profiles().values())


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_that_ships_reads(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert profile.source and profile.date and profile.network is not None
    assert 2**34 < profile.memory < 2**38 and 1e11 < profile.bandwidth < 1e13
    assert 1e13 < max(profile.peak.values()) < 1e16
    assert 0 < profile.compute(1e12, 1e9, "bfloat16", "matmul").seconds < 1


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_that_ships_reads_back(name: str) -> None:
    profile = read_profile(name)
    assert parse_profile(profile.text(), "written.yaml") == profile


@pytest.mark.parametrize("name", NAMES)
def test_a_larger_call_takes_longer(name: str) -> None:
    """Also between the points of a curve, where efficiencies are interpolated."""
    for curve in curves(read_profile(name)):
        ends = curve.points[0][0] / 10, curve.points[-1][0] * 10
        sizes = [exp(log(ends[0]) + i / 500 * log(ends[1] / ends[0])) for i in range(501)]
        seconds = [size / curve.at(size) for size in sizes]
        assert all(a <= b * 1.001 for a, b in pairwise(seconds))


def test_an_alias_is_a_name() -> None:
    for alias, name in ALIASES.items():
        assert read_profile(alias) == read_profile(name)


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL)
    profile = read_profile(str(path))
    assert (profile.name, profile.devices_per_node, profile.network) == ("toy", 4, None)
    assert profile.node == Link(1e-6, 1e10, Curve(((1000.0, 0.5),)), 0.2, "box")
    assert profile.date == "2026-11-23"


def test_a_network_and_a_node_are_chosen_by_name() -> None:
    assert read_profile("h100").network.bandwidth == 50e9
    assert read_profile("h100", network="roce-100").network.bandwidth == 12.5e9
    assert read_profile("v100").devices_per_node == 8
    assert read_profile("v100", node="dgx-2").devices_per_node == 16


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"required: a YAML file, or one of a100-40, .*\n *fix: *h100") as error:
        read_profile("h10O")
    assert len(error.value.findings) == 1


def test_an_unknown_network_lists_those_there_are() -> None:
    with pytest.raises(PlanError, match="one of the networks of this profile: ib-400, ib-200") as error:
        read_profile("h100", network="ib-40")
    (finding,) = error.value.findings
    assert (finding.where, finding.given, finding.fix) == ("network ib-40", "ib-40", "network: ib-400")


def test_every_problem_is_told_at_once() -> None:
    wrong = (
        SMALL.replace("memory: 1 GiB", "memory: 1 GiB/s")
        .replace("bandwidth: 100 GB/s", "bandwith: 100 GB/s")
        .replace("date: 2026-11-23", "date: yesterday")
        .replace("reserve: 0", "reserve: 3")
        .replace("host: 5 us", "host: 0 us")
        .replace("matmul: {float32: {1 Mflop: 0.5, 1 Gflop: 0.9}}", "matmul: {float32: {1 Gflop: 0.5, 1 Mflop: 1.9}}")
        .replace("attention: {float32", "attention: {bfloat16")
        .replace("streaming: {1 kB: 0.1, 1 MB: 0.9}", "streaming: {1 kB: 0.1, 2 kB: 0.9}")
        .replace("devices: 4, ", "devices: 0, ")
        .replace("efficiency: {1 kB: 0.5}", "efficiency: 0.5, mesh: maybe")
    )
    with pytest.raises(PlanError) as error:
        parse_profile(wrong, "mine.yaml")
    told = {finding.where.partition("(")[2] or finding.given for finding in error.value.findings}
    assert told == {
        "memory)", "bandwith)", "no bandwidth", "date)", "reserve)", "host)", 'matmul.float32."1 Mflop")', "attention.bfloat16)",
        'streaming."2 kB")', "nodes.box.devices)", "nodes.box.efficiency)", "nodes.box.mesh)",
    }  # fmt: skip
    assert all(f.where.startswith("mine.yaml:") and f.required for f in error.value.findings)
    assert str(error.value).startswith("12 problems in hardware profile mine.yaml\n")


@pytest.mark.parametrize(
    ("line", "instead", "finding"),
    [
        ("memory: 1 GiB", "memory: 1GiB", ("1GiB", "memory: 80 GiB")),
        ("memory: 1 GiB", "memory: 1000000", ("1000000", "memory: 80 GiB")),
        ("bandwidth: 100 GB/s", "bandwith: 100 GB/s", ("the key bandwith", "bandwidth: 100 GB/s")),
        ("scatter: 0.1\n", "scatter: yes\n", ("true", "scatter: 0.1")),
        ("peak: {float32: 1 Tflop/s}", "peak: 1 Tflop/s", ("1 Tflop/s", "")),
    ],
)
def test_a_problem_is_told_with_what_to_write(line, instead, finding) -> None:
    with pytest.raises(PlanError) as error:
        parse_profile(SMALL.replace(line, instead), "mine.yaml")
    assert finding in [(f.given, f.fix) for f in error.value.findings]


@pytest.mark.parametrize("text", ["", "[1, 2]", "nothing", "name: [", "a: &a [*a]", "{1: 2}: 3"])
def test_what_is_no_profile_is_an_error_of_the_file(text: str) -> None:
    with pytest.raises(PlanError, match=r"hardware profile mine\.yaml") as error:
        parse_profile(text, "mine.yaml")
    assert "dp_shard" not in str(error.value)  # what a plan would say


KEYS = [*yaml.safe_load(SMALL), "notes", "cores", "node", "networks", "network", "nonsense"]
ODD = [
    None, "", "x", 0, -1, 1.5, True, [], [1], {}, {"x": 1}, {1: {2: 3}}, "1 us", "1 GiB", "1e999 s", float("nan"), float("inf"), ["box"],
    {"float32": {"1 Mflop": 0.5}}, {"float32": {"1 Mflop": float("nan")}}, {"box": {"devices": 4}}, {"box": None},
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_whatever_stands_under_a_key_is_read_or_told(key: str) -> None:
    for odd in ODD:
        try:
            parse_profile(yaml.safe_dump({**yaml.safe_load(SMALL), key: odd}), "mine.yaml")
        except PlanError as error:
            assert error.findings


@pytest.mark.parametrize(
    "key",
    ["devices", "latency", "bandwidth", "efficiency", "scatter", "start", "in_switch", "mesh", "segment", "nonsense"],
)
def test_whatever_stands_in_a_link_is_read_or_told(key: str) -> None:
    values = yaml.safe_load(SMALL)
    for odd in ODD:
        try:
            parse_profile(
                yaml.safe_dump({**values, "nodes": {"box": {**values["nodes"]["box"], key: odd}}}), "mine.yaml"
            )
        except PlanError as error:
            assert error.findings


def test_a_peak_that_is_wrong_is_one_problem() -> None:
    with pytest.raises(PlanError) as error:
        parse_profile(SMALL.replace("peak: {float32: 1 Tflop/s}", "peak: {float32: 1 TB/s}"), "mine.yaml")
    assert len(error.value.findings) == 1


def test_numbers_that_no_unit_makes_round_read_back() -> None:
    profile = parse_profile(SMALL, "mine.yaml")
    odd = replace(
        profile,
        memory=12_345_678_901,
        bandwidth=1 / 3 * 1e11,
        host=1 / 7 * 1e-6,
        streaming=Curve(((1000 / 3, 0.1234567890123), (1e7, 1.0))),
        node=replace(profile.node, start=1e-9 / 3, mesh=True, in_switch=1 / 3, segment=4),
        cores=2,
        skew=Curve(((1 / 300, 0.2), (1 / 7, 0.05))),
    )
    assert parse_profile(odd.text(), "mine.yaml") == odd
