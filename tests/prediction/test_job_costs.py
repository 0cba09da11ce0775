"""What a job takes on the host is measured by jobs, and reads back."""

import pytest

from meshwright.hardware.calibrate import calibrate
from meshwright.hardware.reader import parse_profile
from meshwright.prediction.job_costs import _JobRun, fraction_of_updates, host_seconds, job_costs


@pytest.mark.proof  # test_predict_cli measures this machine, too
def test_the_host_s_part_of_a_job(workers):
    plain = calibrate(sides=(32, 64), lengths=(32,), sizes=(2**14, 2**18), rounds=3, budget=0.1)
    measured = job_costs(plain, workers, steps=5)
    assert 1e-7 < measured.host < 1e-2 and 1e-7 < measured.host_backward < 1e-2
    assert 0 < measured.host_unit < 1 and 0 < measured.host_send < 1 and 0 < measured.host_update < 1e-2
    assert measured.host_sharded > measured.host_update  # DTensor's dispatch is Python
    assert 0 < measured.update_fraction <= 1
    assert measured.node == plain.node and measured.peak == plain.peak
    assert parse_profile(measured.text(), "cpu-local.yaml") == measured


@pytest.mark.parametrize(("wide", "fraction"), [(6.0, 0.5), (20.0, 1.0), (0.5, 0.05)])
def test_the_device_s_fraction_of_an_update_is_the_difference_between_a_wide_and_a_narrow_model(wide, fraction) -> None:
    """The host's part is the same in both. On a busy machine a fraction may come out above 1 or below 0."""

    def run(update: float, device: float) -> _JobRun:
        return _JobRun(0.0, update, {"update": 100}, {"update": device}, 0, 0, {})

    assert fraction_of_updates(run(1.0, 0.0), run(wide, 10.0)) == fraction


def test_the_host_has_a_time_even_if_nothing_was_left_beside_the_functions() -> None:
    """A profile says no 0 (hardware/reader.py): commands could not read what calibrate wrote on a busy machine."""
    assert host_seconds(seconds=2e-3, device=1e-3, functions=100) == pytest.approx(1e-5)
    assert host_seconds(seconds=1e-3, device=2e-3, functions=100) > 0
