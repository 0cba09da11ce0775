"""Stages of a pipeline as a search sees them: cut as planning cuts, and played as a schedule."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from meshwright import Plan, make_recipe
from meshwright.hardware import read_profile
from meshwright.planning.pipeline import SLACK
from meshwright.prediction.predict import adamw_on
from meshwright.schedule import held_at_peaks, make_schedule, timeline
from meshwright.search.pipeline import pipelined
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.space import Candidate
from meshwright.search.stages import StageCuts, filled, room_of

ENDS = st.sampled_from([0.0, 0.5, 1.0, 2.5, 7.3])


@given(st.integers(2, 9), st.integers(2, 4), st.sampled_from([0.3, 1.0, 2.5]), ENDS, ENDS)
def test_the_largest_stage_is_as_small_as_can_be(blocks, stages, block, first, last):
    stages = min(stages, blocks)
    room = room_of(blocks, stages, block, first, last)
    assert sum(room) >= blocks

    def largest(numbers):
        return max(first + numbers[0] * block, *(n * block for n in numbers[1:-1]), last + numbers[-1] * block)

    every = [n for n in product(range(blocks + 1), repeat=stages) if sum(n) == blocks]
    assert largest(room) <= SLACK * min(map(largest, every)) * 1.0001


@given(st.lists(st.tuples(st.integers(2, 5), st.integers(0, 9), st.integers(1, 4)), min_size=2, max_size=4), st.data())
def test_the_stage_with_most_memory_has_as_little_as_can_be(stages, data):
    room, memory = [most for most, *_ in stages], [(fixed, block) for _, fixed, block in stages]
    blocks = data.draw(st.integers(len(room), sum(room)))

    def largest(numbers):
        return max(fixed + n * block for n, (fixed, block) in zip(numbers, memory, strict=True))

    fewest = [0, *[1] * (len(room) - 2), 0]
    every = [
        n for n in product(*(range(low, high + 1) for low, high in zip(fewest, room, strict=True))) if sum(n) == blocks
    ]
    found = filled(blocks, room, memory)
    assert found in every and largest(found) <= SLACK * min(map(largest, every)) * 1.0001


class Words(nn.Module):
    """A decoder's shape: its head has as much work as several blocks."""

    def __init__(self, blocks=10, vocabulary=2000):
        super().__init__()
        self.words = nn.Embedding(vocabulary, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(blocks)
        )
        self.head = nn.Linear(64, vocabulary)

    def forward(self, x):
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        return functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("blocks, vocabulary", [(10, 2000), (9, 100), (12, 700)])
def test_stages_have_as_many_blocks_as_planning_gives_them(blocks, vocabulary):
    build, words = partial(Words, blocks, vocabulary), torch.zeros(64, 32, dtype=torch.long)
    rehearsals = Rehearsals(build, (words[:8],), {}, None, adamw_on(read_profile("h100")), 1.0, accelerator=True)
    cuts = StageCuts(rehearsals.stage_parts(), blocks, 64)
    for candidate in (
        Candidate(2, 1, 1, 1, 8, 8), Candidate(4, 1, 1, 1, 8, 8), Candidate(4, 1, 2, 1, 8, 4),
        Candidate(4, 1, 1, 1, 8, 8, recompute=True), Candidate(2, 1, 1, 1, 8, 8, chunks=2),
        Candidate(2, 1, 1, 1, 16, 4, chunks=4), Candidate(4, 1, 1, 1, 16, 4, split=True),
    ):  # fmt: skip
        stages = make_recipe(build, Plan.parse(candidate.plan({})), (words,)).stages
        planned = [sum(name.startswith("layers.") for name in stage.modules) for stage in stages]
        assert list(cuts(candidate)) == planned, candidate


@pytest.mark.parametrize("ranks, chunks", [(2, 2), (2, 4), (4, 2), (4, 4)])
@pytest.mark.parametrize("microbatches", [4, 16])
def test_an_interleaved_rank_holds_what_its_schedule_holds(ranks, chunks, microbatches):
    schedule = make_schedule("interleaved", ranks, ranks * chunks, microbatches)
    for rank in range(ranks):
        held, states = [0] * chunks, []
        for action in schedule.ranks[rank]:
            held[action.stage // ranks] += {"F": 1, "B": -1}[action.kind]
            states.append(tuple(held))
        most = max(map(sum, states))
        assert held_at_peaks(ranks, chunks, microbatches, rank) == {state for state in states if sum(state) == most}


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
