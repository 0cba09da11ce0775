"""Curves interpolate, estimates add, and a call takes the longest of arithmetic, memory and launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hardware import Curve, Estimate, Link, Profile

HALF = Curve(((1e9, 0.25), (1e11, 0.75)))
FLAT = Curve(((1.0, 1.0),))
PROFILE = Profile(
    name="toy",
    source="this test",
    date="2026-11-23",
    notes="",
    memory=2**30,
    context=0,
    per_group=0,
    reserve=0.0,
    peak={"bfloat16": 1e14, "float32": 1e13},
    matmul={"bfloat16": HALF},
    attention={"bfloat16": HALF},
    bandwidth=1e12,
    streaming=FLAT,
    launch=2e-6,
    host=5e-6,
    host_backward=5e-6,
    devices_per_node=8,
    node=Link(1e-6, 1e11, FLAT, 0.1, "wire"),
    network=None,
    scatter=0.1,
)


def test_the_time_of_a_call_is_a_power_of_its_size_between_points() -> None:
    assert HALF.at(1e10) == pytest.approx((0.25 * 0.75) ** 0.5)
    assert HALF.at(1e9) == 0.25 and HALF.at(1e11) == 0.75


def test_a_curve_ends_where_its_points_end() -> None:
    assert HALF.at(1) == HALF.at(0) == 0.25
    assert HALF.at(1e20) == 0.75


@given(st.floats(1.0, 1e15))
def test_a_curve_stays_between_its_points(size: float) -> None:
    assert 0.25 <= HALF.at(size) <= 0.75 + 1e-12


@pytest.mark.parametrize("points", [(), ((0.0, 0.5),), ((2.0, 0.5), (1.0, 0.6)), ((1.0, 0.0),), ((1.0, 1.1),)])
def test_points_that_are_no_curve_are_an_error(points) -> None:
    with pytest.raises(ValueError, match=r"a curve has|an efficiency is"):
        Curve(points)


def test_ranks_wait_for_each_other_by_the_seconds_between_two_meetings() -> None:
    skewed = replace(PROFILE, skew=Curve(((0.01, 0.2), (0.1, 0.05))))
    assert skewed.waiting(2.0, 200) == pytest.approx(2.0 * 0.2) and skewed.waiting(2.0, 20) == pytest.approx(2.0 * 0.05)
    assert skewed.waiting(2.0, 0) == skewed.waiting(0.0, 20) == PROFILE.waiting(2.0, 20) == 0


def test_the_interval_is_as_many_times_as_far_on_both_sides() -> None:
    found = Estimate(3.0, 0.25)
    assert (found.low, found.high) == (2.0, 4.5)


def test_errors_of_a_sum_are_correlated() -> None:
    found = Estimate(1.0, 0.1) + Estimate(3.0, 0.3)
    assert found.seconds == 4.0
    assert found.scatter * found.seconds == pytest.approx(1.0 * 0.1 + 3.0 * 0.3)


def test_estimates_are_multiplied_and_summed() -> None:
    one = Estimate(2.0, 0.1)
    assert 3 * one == one * 3 == Estimate(6.0, 0.1)
    assert Estimate.total([one] * 3).seconds == 6.0
    assert Estimate.total([one] * 3).scatter == pytest.approx(0.1)
    assert Estimate.total([]) == Estimate(0.0, 0.0)


def test_a_large_product_is_bound_by_arithmetic() -> None:
    found = PROFILE.compute(flops=1e12, moved=1e6, dtype="bfloat16", kind="matmul")
    assert found == Estimate(1e12 / (1e14 * 0.75), 0.1)


def test_a_thin_product_is_bound_by_memory() -> None:
    assert PROFILE.compute(1e9, 1e9, "bfloat16", "matmul").seconds == pytest.approx(1e-3)


def test_a_small_call_is_bound_by_its_launch() -> None:
    assert PROFILE.compute(1.0, 8.0, "bfloat16", "other").seconds == 2e-6
    assert PROFILE.compute(0.0, 0.0, "float32", "other").seconds == 2e-6


def test_other_work_computes_at_the_peak_of_float32() -> None:
    assert PROFILE.compute(1e12, 0.0, "bfloat16", "other").seconds == pytest.approx(0.1)


def test_a_slower_product_takes_longer_to_compute_and_another_function_to_move() -> None:
    slower = replace(PROFILE, slower={"convolution_backward": 1.5, "exp": 4.0, "attention_backward": 1.25})

    def times(kind: str, flops: float, moved: float) -> float:
        after, before = (of.compute(flops, moved, "bfloat16", kind).seconds for of in (slower, PROFILE))
        return after / before

    assert times("convolution_backward", 1e12, 1e3) == pytest.approx(1.5)
    assert times("convolution", 1e12, 1e3) == times("matmul", 1e12, 1e3) == times("convolution_backward", 1e6, 1e9) == 1
    assert times("exp", 0, 1e9) == pytest.approx(4.0)
    assert times("attention_backward", 1e12, 1e3) == pytest.approx(1.25) and times("attention", 1e12, 1e3) == 1
    of_attention = PROFILE.compute(1e12, 1e3, "bfloat16", "attention")
    assert PROFILE.compute(1e12, 1e3, "bfloat16", "attention_backward") == of_attention
    of_product = PROFILE.compute(1e12, 1e3, "bfloat16", "matmul")
    assert PROFILE.compute(1e12, 1e3, "bfloat16", "convolution") == of_product


def test_a_type_without_a_curve_has_that_of_the_nearest_in_calls_of_the_same_time_and_scatters_twice_as_much() -> None:
    # 1e9 flops take as long at the peak of float32 as 1e10 at that of bfloat16.
    assert PROFILE.compute(1e9, 0.0, "float32", "matmul") == Estimate(pytest.approx(1e9 / (1e13 * HALF.at(1e10))), 0.2)


@pytest.mark.parametrize(
    ("dtype", "as_if"),
    [
        ("float16", "bfloat16"),
        ("float8_e4m3fn", "bfloat16"),
        ("float64", "float32"),
        ("complex64", "float32"),
        ("int64", "float32"),
    ],
)
def test_a_type_without_a_peak_is_as_fast_as_the_nearest(dtype, as_if) -> None:
    found, known = (PROFILE.compute(1e12, 0.0, d, "attention") for d in (dtype, as_if))
    assert found == Estimate(known.seconds, 0.2)


def test_a_profile_is_a_value() -> None:
    assert replace(PROFILE) == PROFILE and hash(replace(PROFILE)) == hash(PROFILE)
    assert replace(PROFILE, peak={"bfloat16": 2e14, "float32": 1e13}) != PROFILE
