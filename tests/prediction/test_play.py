"""The pipeline in time: known bubbles of known schedules."""

import pytest

from meshwright.hardware.profile import NOTHING, Estimate
from meshwright.prediction.clock import Phase, PhaseSeconds
from meshwright.prediction.play import play
from meshwright.schedule import TRANSFERS, make_schedule, with_transfers

DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def phases(schedule, durations=DURATIONS):
    return {
        rank: [
            Phase(a, PhaseSeconds(Estimate(0.0 if a.kind in TRANSFERS else durations[a.kind])), sends=8)
            for a in actions
        ]
        for rank, actions in enumerate(schedule.ranks)
    }


def pipeline(name, stages, microbatches, ranks=None):
    plain = make_schedule(name, ranks or stages, stages, microbatches)
    edges = tuple((s, s + 1) for s in range(stages - 1))
    return with_transfers(plain, edges, edges)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (3, 5)])
def test_a_bubble_is_that_of_the_papers(name, stages, microbatches):
    # GPipe and 1F1B: (m + p − 1)(f + b), arXiv 2104.04473, section 2.2.
    played = play(phases(pipeline(name, stages, microbatches)), lambda *_: NOTHING)
    assert max(played.ends.values()) == pytest.approx((microbatches + stages - 1) * 3.0)


def test_interleaved_stages_have_a_smaller_bubble():
    one = play(phases(pipeline("1f1b", 4, 8)), lambda *_: NOTHING)
    halves = {"F": 0.5, "B": 1.0}
    two = play(phases(pipeline("interleaved", 8, 8, ranks=4), halves), lambda *_: NOTHING)
    assert max(two.ends.values()) < max(one.ends.values())


def test_a_transfer_delays_who_takes_it_and_nobody_else():
    fast = play(phases(pipeline("1f1b", 2, 1)), lambda *_: NOTHING)
    slow = play(phases(pipeline("1f1b", 2, 1)), lambda *_: Estimate(0.5))
    assert max(slow.ends.values()) == pytest.approx(max(fast.ends.values()) + 2 * 0.5)
    assert slow.waits[0] == pytest.approx(1 + 2 + 2 * 0.5)
    assert [str(span.action) for span in slow.spans if span.rank == 1 and span.action.kind in "FB"] == ["1F0", "1B0"]


def test_a_sender_s_bytes_are_those_of_its_send():
    seen = []
    play(phases(pipeline("1f1b", 2, 1)), lambda stage, other, nbytes: seen.append((stage, other, nbytes)) or NOTHING)
    assert seen == [(0, 1, 8), (1, 0, 8)]


def test_ranks_that_wait_for_each_other_are_an_error():
    broken = phases(pipeline("1f1b", 2, 1))
    broken[0] = [p for p in broken[0] if not p.label.kind.startswith("SEND")]
    with pytest.raises(ValueError, match="wait for each other"):
        play(broken, lambda *_: NOTHING)
