"""This machine is measured, and what was measured reads back."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest

from meshwright.hardware import Curve, Link, Profile, calibrate, measured_link, measured_skew
from meshwright.hardware.calibrate import MOST_COPIES, POOL, RESULTS, _with_copies
from meshwright.hardware.functions import CONVOLUTIONS
from meshwright.hardware.meter import Meter, curve, monotone_points, rate
from meshwright.hardware.reader import parse_profile
from meshwright.workers.pool import LocalWorkers


@pytest.fixture(scope="module")
def measured() -> Profile:
    return calibrate(sides=(32, 64, 128), lengths=(32, 64), sizes=(2**14, 2**18, 2**20), rounds=3, budget=2.0)


def test_rates_are_those_of_a_machine(measured: Profile) -> None:
    assert all(1e7 < rate < 1e14 for rate in measured.peak.values())
    assert set(measured.peak) == set(measured.matmul) == {"float32", "float64", "bfloat16"}
    assert 1e8 < measured.bandwidth < 1e13
    assert 1e-7 < measured.host < 1e-3 and 1e-7 < measured.host_backward < 1e-3
    assert 0.02 <= measured.scatter <= 1
    least = {name: 0.01 if name in {*CONVOLUTIONS, "attention_backward"} else 1 for name in measured.slower}
    assert all(least[name] <= times < 1e4 for name, times in measured.slower.items())
    assert {"exp", *CONVOLUTIONS, "attention_backward"} <= {*measured.slower}
    assert measured.memory > 2**28 and measured.cores >= 1


def test_what_was_measured_predicts_what_is_measured(measured: Profile) -> None:
    """A product of a size that was measured takes about what it took: within ten times, whatever else the machine does."""
    import torch

    a, b = torch.randn(128, 128), torch.randn(128, 128)
    seconds = Meter(5, 1.0).seconds(lambda: a @ b)
    found = measured.compute(2 * 128**3, 3 * 4 * 128**2, "float32", "matmul").seconds + measured.host
    assert seconds / 10 < found < seconds * 10


def test_a_measured_profile_reads_back(measured: Profile) -> None:
    assert parse_profile(measured.text(), "cpu-local.yaml") == measured


def test_a_timed_call_finds_none_of_its_tensors_in_the_nearest_cache() -> None:
    """As in a step, which reads each weight once for each microbatch. The layout of a matrix stays: products differ by it."""
    import torch

    seen: list[torch.Tensor] = []

    def function(a: torch.Tensor, number: int, b: torch.Tensor) -> torch.Tensor:
        seen.extend((a, b))
        return b

    call = _with_copies(function, [torch.ones(300, 200).t(), 3, torch.ones(200, 8)])
    calls = POOL // (4 * 200 * 308)
    assert 2 < calls < MOST_COPIES
    for _ in range(calls):
        call()
    assert len({t.data_ptr() for t in seen}) == 2 * calls > 100
    assert {t.stride() for t in seen} == {(1, 200), (8, 1)}


def test_results_of_a_timed_call_live_on() -> None:
    """As in a step, where a function finds memory that an earlier step has given back."""
    import torch

    call = _with_copies(torch.neg, [torch.ones(1000)])
    results = [weakref.ref(call()) for _ in range(RESULTS + 1)]
    assert [ref() is not None for ref in results] == [False] + [True] * RESULTS


def test_shapes_of_a_type_that_the_machine_lacks_do_not_rule_the_scatter() -> None:
    meter = Meter(3, 1.0, repeats=[0.03, 0.04, 0.05], shapes=[0.05, 0.06, 0.07, 1.0, 1.2])
    assert meter.scatter == pytest.approx(0.081, abs=1e-3)


def test_only_cpus_are_measured() -> None:
    with pytest.raises(ValueError, match="read_profile has the profiles of GPUs"):
        calibrate("cuda")


def test_disturbances_only_add_time() -> None:
    assert monotone_points([(3.0, 5.0), (1.0, 4.0), (2.0, 9.0)]) == [(1.0, 4.0), (2.0, 5.0), (3.0, 5.0)]


@pytest.mark.parametrize("highest", [1.23456e9, 1.23444e9, 9.99996e9, 9.99994e9, 1e9, 0.99999, 123.46])
def test_the_call_of_the_highest_rate_attains_all_of_it(highest: float) -> None:
    points = [(1.0, 4.0 / highest), (2.0, 2.0 / highest)]
    peak = rate(points)
    assert 0.999 * highest < peak <= highest
    assert max(efficiency for _, efficiency in curve(points, peak).points) == 1


def test_ranks_measure_the_link_between_them(workers: LocalWorkers, measured: Profile) -> None:
    found = workers.run(measured_link, sizes=(2**12, 2**14, 2**16, 2**18), rounds=3, ranks=2)
    assert found[0] == found[1]
    link: Link = found[0]
    assert 1e-7 < link.latency < 1 and 1e5 < link.bandwidth < 1e12
    assert isinstance(link.efficiency, Curve) and max(e for _, e in link.efficiency.points) == 1
    assert "2 ranks" in link.source
    assert {"all_gather", "reduce_scatter"} == set(link.kinds) and all(
        0.05 < times < 50 for times in link.kinds.values()
    )
    profile = replace(measured, node=link)
    assert parse_profile(profile.text(), "cpu-local.yaml") == profile


def test_ranks_measure_how_long_they_wait_for_each_other(workers: LocalWorkers, measured: Profile) -> None:
    found = workers.run(measured_skew, cores=2, segments=(1e-3, 8e-3), budget=0.05, ranks=2)
    assert found[0] == found[1]
    (short, wait), (long, wait_of_long) = found[0].points
    assert 1e-3 / 4 < short < long < 10  # the machine may do other work
    assert 0 < wait_of_long <= wait < 1
    profile = replace(measured, skew=found[0])
    assert parse_profile(profile.text(), "cpu-local.yaml") == profile


def one_rank() -> str:
    with pytest.raises(ValueError, match="the group has one"):
        measured_link()
    return "told"


def test_one_rank_has_no_link(workers: LocalWorkers) -> None:
    assert workers.run(one_rank, ranks=1) == ["told"]
