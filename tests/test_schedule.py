"""Schedules: their pictures, their text, and what holds for all of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedule import (
    COMPUTE,
    DURATIONS,
    NAMES,
    TRANSFERS,
    Action,
    Schedule,
    idle,
    make_schedule,
    most_in_flight,
    timeline,
    with_transfers,
)


def picture(schedule: Schedule) -> str:
    """A line a rank; a column of four characters a forward's time."""
    lines = [""] * len(schedule.ranks)
    for span in sorted(timeline(schedule), key=lambda s: s.start):
        lines[span.rank] = lines[span.rank].ljust(int(4 * span.start)) + str(span.action)
    return "\n".join(line.rstrip() for line in lines)


def test_1f1b_looks_like_its_drawing() -> None:
    assert (
        picture(make_schedule("1f1b", 4, 4, 4))
        == """\
0F0 0F1 0F2 0F3                         0B0         0B1         0B2         0B3
    1F0 1F1 1F2                 1B0     1F3 1B1         1B2         1B3
        2F0 2F1         2B0     2F2 2B1     2F3 2B2         2B3
            3F0 3B0     3F1 3B1     3F2 3B2     3F3 3B3""".replace(
            "                         0B0", "                            0B0"[3:]
        )
    )


def test_gpipe_runs_all_forwards_first() -> None:
    assert str(make_schedule("gpipe", 2, 2, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_zero_bubble_fills_the_end_with_weights() -> None:
    assert (
        picture(make_schedule("zero_bubble", 2, 2, 3))
        == """\
0F0 0F1     0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"""
    )


shapes = st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))


@given(shapes)
def test_every_schedule_is_complete_and_never_waits_for_ever(shape: tuple[str, int, int, int]) -> None:
    name, ranks, chunks, microbatches = shape
    schedule = make_schedule(name, ranks, ranks * chunks, microbatches)
    done = Counter((a.stage, a.kind, a.microbatch) for rank in schedule.ranks for a in rank)
    halves = ("I", "W") if name == "zero_bubble" else ("B",)
    expected = {(s, k, m) for s in range(ranks * chunks) for k in ("F", *halves) for m in range(microbatches)}
    assert set(done) == expected and set(done.values()) == {1}
    assert all(schedule.stage_rank[a.stage] == r for r, rank in enumerate(schedule.ranks) for a in rank)
    assert len(timeline(schedule)) == len(expected)
    assert Schedule.parse(str(schedule), schedule.stage_rank) == schedule
    forwards = make_schedule(name, ranks, ranks * chunks, microbatches, backward=False)
    assert {a.kind for rank in forwards.ranks for a in rank} == {"F"}


@given(shapes, st.data())
def test_both_ends_of_a_pair_have_their_transfers_in_the_same_order(
    shape: tuple[str, int, int, int], data: st.DataObject
) -> None:
    name, ranks, chunks, microbatches = shape
    stages = ranks * chunks
    pairs = [(s, t) for s in range(stages) for t in range(s + 1, stages)]
    skips = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    edges = sorted({(s, s + 1) for s in range(stages - 1)} | set(skips))
    plain = make_schedule(name, ranks, stages, microbatches)
    full = with_transfers(plain, edges, edges)
    home = full.stage_rank
    assert [[a for a in rank if a.kind in COMPUTE] for rank in full.ranks] == [list(rank) for rank in plain.ranks]
    assert Schedule.parse(str(full), home) == full
    for a in range(ranks):
        for b in range(a + 1, ranks):

            def seen(rank: int, other: int) -> list[tuple[int, ...]]:
                """(sending stage, receiving stage, way, microbatch) of each transfer with another rank, in order."""
                found = []
                for t in full.ranks[rank]:
                    if t.kind in TRANSFERS and home[t.other] == other:
                        ends = (t.stage, t.other) if t.kind.startswith("SEND") else (t.other, t.stage)
                        found.append((*ends, t.kind[-1], t.microbatch))
                return found

            assert seen(a, b) == seen(b, a)
    received: set[Action] = set()
    for rank in full.ranks:
        for action in rank:  # nothing runs before what it takes was asked for
            if action.kind == "F":
                sources = [s for s, t in edges if t == action.stage and home[s] != home[t]]
                assert all(Action(action.stage, "RECV_F", action.microbatch, s) in received for s in sources)
            received.add(action)


@given(st.integers(1, 6), st.integers(1, 12))
def test_the_bubble_and_what_is_in_flight(ranks: int, microbatches: int) -> None:
    formula = (ranks - 1) / (microbatches + ranks - 1)
    gpipe, one = (make_schedule(name, ranks, ranks, microbatches) for name in ("gpipe", "1f1b"))
    assert idle(timeline(gpipe)) == pytest.approx(formula)
    assert idle(timeline(one)) == pytest.approx(formula)
    for rank in range(ranks):
        assert most_in_flight(gpipe, rank) == microbatches
        assert most_in_flight(one, rank) == min(ranks - rank, microbatches)
        assert most_in_flight(make_schedule("zero_bubble", ranks, ranks, microbatches), rank) <= ranks
    assert idle(timeline(make_schedule("zero_bubble", ranks, ranks, microbatches))) <= formula + 1e-9


def test_interleaving_shrinks_the_bubble_by_the_number_of_stages_a_rank() -> None:
    # (p − 1) / (v m + p − 1), Narayanan et al., arXiv 2104.04473
    assert idle(timeline(make_schedule("interleaved", 4, 8, 8))) == pytest.approx(3 / (2 * 8 + 3))
    # (p − 1)(F + I − W) of ZB-H1, Qi et al., arXiv 2401.10241
    assert idle(timeline(make_schedule("zero_bubble", 4, 4, 8))) == pytest.approx(3 / (3 * 8 + 3))


@pytest.mark.parametrize("text", ["F0", "0F", "0X1", "0F1:2", "0SEND_F1", "0F1 0F1x"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Schedule.parse(text, [0])


def test_a_schedule_that_waits_for_ever_says_where() -> None:
    stuck = Schedule.parse("0F0 0B0\n1B0 1F0", [0, 1])
    with pytest.raises(ValueError, match="rank 0 at 0B0, rank 1 at 1B0"):
        timeline(stuck)


def test_ours_are_torchs() -> None:
    """Torch's own generators give the same orders: a change of theirs is noticed here."""
    from torch.distributed.pipelining import schedules as torchs

    def order(cls: object, ranks: int, stages: int, microbatches: int) -> list[list[str]]:
        made = object.__new__(cls)  # its constructor wants process groups
        made.pp_group_size, made._num_stages, made._n_microbatches = ranks, stages, microbatches
        made.n_local_stages = stages // ranks
        made.number_of_rounds = max(1, microbatches // ranks)
        made.microbatches_per_round = microbatches // made.number_of_rounds
        return [[str(a) for a in made._calculate_single_rank_operations(r) if a is not None] for r in range(ranks)]

    for ranks, chunks, microbatches in ((2, 2, 4), (4, 2, 8), (2, 3, 6)):
        theirs = order(torchs.ScheduleInterleaved1F1B, ranks, ranks * chunks, microbatches)
        ours = str(make_schedule("interleaved", ranks, ranks * chunks, microbatches)).splitlines()
        assert [line.split() for line in ours] == theirs
    assert DURATIONS["B"] == DURATIONS["I"] + DURATIONS["W"]
