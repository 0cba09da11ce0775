"""Stages of a pipeline as a search sees them: cut as planning cuts, and played as a schedule."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.schedule import make_schedule, timeline
from meshwright.search.pipeline import pipelined
from meshwright.search.space import Candidate
from meshwright.search.stages import balanced

ENDS = st.sampled_from([0.0, 0.5, 1.0, 2.5, 7.3])


@given(st.integers(2, 9), st.integers(2, 4), st.sampled_from([0.3, 1.0, 2.5]), ENDS, ENDS)
def test_the_largest_stage_is_as_small_as_can_be(blocks, stages, block, first, last):
    stages = min(stages, blocks)
    sizes = balanced(blocks, stages, block, first, last)
    assert sizes.first + (stages - 2) * sizes.between + sizes.last >= blocks

    def largest(numbers):
        return max(first + numbers[0] * block, *(n * block for n in numbers[1:-1]), last + numbers[-1] * block)

    every = [n for n in product(range(blocks + 1), repeat=stages) if sum(n) == blocks]
    ours = (sizes.first, *[sizes.between] * (stages - 2), sizes.last)
    assert largest(ours) == pytest.approx(min(map(largest, every)))


@pytest.mark.parametrize("microbatches", [8, 32])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 1, 1, 1), (1, 1, 1, 1.7), (0.4, 1, 1, 0.8)])
def test_a_pipeline_takes_what_its_schedule_does(lengths, microbatches):
    """The schedule's own actions, played; uneven stages, no sends."""
    ranks = len(lengths)
    spans = timeline(make_schedule("1f1b", ranks, ranks, microbatches), lengths=lengths)
    of = Candidate(pp=ranks, dp_replicate=1, dp_shard=1, tp=1, microbatches=microbatches, rows=1)
    taken = pipelined(of, [3.0 * length for length in lengths], 0.0)
    assert taken == pytest.approx(max(span.stop for span in spans), rel=0.02)


def test_a_first_stage_that_has_most_to_do_is_taken_to_wait_too_long_and_never_too_short():
    """Its forwards of other microbatches run while the first comes back: planning makes no such stages where it can cut otherwise."""
    spans = timeline(make_schedule("1f1b", 4, 4, 16), lengths=(2, 1, 1, 1))
    of, end = Candidate(pp=4, dp_replicate=1, dp_shard=1, tp=1, microbatches=16, rows=1), max(s.stop for s in spans)
    assert end <= pipelined(of, [6.0, 3.0, 3.0, 3.0], 0.0) <= 1.1 * end
