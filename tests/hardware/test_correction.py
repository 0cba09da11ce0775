"""A profile is corrected by measured steps, as far as they say something of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from meshwright.hardware import read_profile
from meshwright.hardware.correction import MOST, PARTS, corrected, learnt
from meshwright.hardware.profile import Estimate, Profile

CPU = replace(read_profile("v100"), name="cpu-local", cores=2, network=None)
# Seconds of each part in steps of several layouts: some compute, some wait for the host or for each other.
STEPS = [
    {"products": 1.0, "memory": 0.1, "host": 0.1},
    {"products": 0.5, "memory": 0.5, "host": 0.1, "node": 0.1},
    {"products": 0.2, "memory": 0.1, "host": 0.9},
    {"products": 0.3, "memory": 0.2, "host": 0.2, "node": 0.8},
    {"products": 0.1, "memory": 0.9, "host": 0.3, "node": 0.2},
    {"products": 0.6, "memory": 0.1, "host": 0.6, "node": 0.5},
]


def predict(factors: Mapping[str, float]) -> list[float]:
    return [sum(seconds * factors.get(part, 1.0) for part, seconds in step.items()) for step in STEPS]


def measured(took: list[float], scatter: float = 0.0) -> list[Estimate]:
    return [Estimate(seconds, scatter) for seconds in took]


@pytest.mark.parametrize(
    "truth", [{"host": 1.5}, {"products": 1.2, "node": 0.7}, {"memory": 0.8, "host": 0.8, "node": 1.6}]
)
def test_what_the_steps_say_is_learnt(truth: dict[str, float]) -> None:
    found = learnt(CPU, predict, measured(predict(truth)))
    assert {part: found.factors.get(part, 1.0) for part in PARTS} == pytest.approx(
        {part: truth.get(part, 1.0) for part in PARTS}, rel=0.12
    )
    assert found.after < 0.03 < found.before
    assert found.profile == corrected(CPU, found.factors)
    again = learnt(found.profile, predict, measured(predict({"products": 0.5}))).profile
    assert again.notes.count("corrected") == found.profile.notes.count("corrected") == 1


def test_a_profile_that_is_right_stays_as_it_is() -> None:
    found = learnt(CPU, predict, measured(predict({})))
    assert found.factors == {} and found.profile == CPU and found.before == found.after == 0


def test_what_scatters_moves_a_profile_less_and_many_steps_more() -> None:
    def one(factors: Mapping[str, float]) -> list[float]:
        return predict(factors)[:1]

    slow = {"products": 1.3, "memory": 1.3, "host": 1.3, "node": 1.3}

    def products(steps: Callable[[Mapping[str, float]], list[float]], scatter: float) -> float:
        return learnt(CPU, steps, measured(steps(slow), scatter)).factors.get("products", 1.0)

    assert products(one, 0.0) == pytest.approx(1.3, rel=0.05)
    assert 1 < products(one, 0.2) < products(predict, 0.2) < products(predict, 0.0) < 1.35
    assert products(one, 0.4) < products(one, 0.2)
    assert "network" not in learnt(CPU, predict, measured(predict(slow))).factors  # this machine has none


def test_a_step_that_something_disturbed_decides_nothing() -> None:
    took = predict({})
    took[1] *= 3
    assert all(0.9 < factor < 1.1 for factor in learnt(CPU, predict, measured(took)).factors.values())


def test_no_factor_is_beyond_belief() -> None:
    found = learnt(CPU, predict, measured([1000 * seconds for seconds in predict({})]))
    assert found.factors and all(1 / MOST <= factor <= MOST for factor in found.factors.values())


def seconds(profile: Profile) -> dict[str, float]:
    assert profile.network is not None
    return {
        "products": profile.compute(1e12, 0, "float16", "matmul").seconds,
        "memory": profile.compute(0, 1e9, "float16", "other").seconds,
        "host": profile.host_backward,
        "node": profile.node.start + profile.node.latency + profile.node.seconds(1e6),
        "network": profile.network.latency + profile.network.seconds(1e6),
    }


@pytest.mark.parametrize("part", PARTS)
def test_a_factor_is_of_its_part_alone(part: str) -> None:
    profile = read_profile("a100")
    before, after = seconds(profile), seconds(corrected(profile, {part: 1.5}))
    assert after == pytest.approx({name: value * (1.5 if name == part else 1) for name, value in before.items()})
