"""A step that was observed, as a timeline: what ran when on which line, what crossed, which collectives; and that other steps
enter no collective for it."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshwright as mw
from meshwright.draw.timeline import Timeline, differences, seconds_by_kind, timeline
from meshwright.private import collectives_entered
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.schedule import make_schedule
from test_report import Tower, loss, predicted, tokens

PLAN = {"mesh": "pp=2,dp_shard=2", "microbatches": 4, "verify": 0}


def observed(plan, steps):
    """Steps, of which the last but one is observed: its timeline as text, the collectives that each step entered, and the
    parameters at the end."""
    job = mw.parallelize(Tower, plan, batch=tokens(), loss=loss)
    optimizer = torch.optim.AdamW(job.parameters())
    rows, entered, told = rows_of_rank(tokens(), job.recipe, job.rank), [], []
    for step in range(steps):
        before = collectives_entered()
        if step == steps - 2:
            with job.observe(optimizer) as seen:
                one_step(job, rows, optimizer)
            told.append(None if seen.timeline is None else seen.timeline.to_json())
        else:
            one_step(job, rows, optimizer)
        entered.append(collectives_entered() - before)
    return told, entered, {name: p.norm().item() for name, p in job.full_state_dict().items()}


def one_step(job, rows, optimizer):
    job.step(rows)
    job.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def unobserved(plan, steps):
    job = mw.parallelize(Tower, plan, batch=tokens(), loss=loss)
    optimizer = torch.optim.AdamW(job.parameters())
    for _ in range(steps):
        one_step(job, rows_of_rank(tokens(), job.recipe, job.rank), optimizer)
    return {name: p.norm().item() for name, p in job.full_state_dict().items()}


@pytest.fixture(scope="module")
def of_pipeline(workers):
    return workers.run(observed, PLAN, 5, ranks=4)


@pytest.fixture(scope="module")
def step(of_pipeline):
    return Timeline.from_json(of_pipeline[0][0][0])


def test_each_line_has_its_actions_in_the_order_of_the_schedule(step):
    assert Timeline.from_json(step.to_json()) == step
    assert (step.unit, step.schedule, step.microbatches) == ("seconds", "1f1b", 4)
    assert [(line.stages, line.ranks) for line in step.lines] == [((0,), (0, 1)), ((1,), (2, 3))]
    planned = make_schedule("1f1b", 2, 2, 4)
    for line, actions in zip(step.lines, planned.ranks, strict=True):
        ran = [(slot.what, slot.stage, slot.microbatch) for slot in line.slots if slot.what in ("forward", "backward")]
        assert ran == [({"F": "forward", "B": "backward"}[a.kind], a.stage, a.microbatch) for a in actions]
        whats = [slot.what for slot in line.slots]
        assert whats[0] == "begin" and whats[-3:] == ["end", "clip", "optimizer"]
        assert all(one.stop <= other.start for one, other in itertools.pairwise(line.slots))  # one thing at a time
        assert all(sum(slot.parts.values()) == pytest.approx(slot.stop - slot.start) for slot in line.slots)
    assert min(line.slots[0].start for line in step.lines) == 0
    assert step.length == max(line.slots[-1].stop for line in step.lines)


def test_what_crosses_arrives_before_it_is_used(step):
    sent = {(t.way, t.microbatch): t for t in step.transfers}
    assert set(sent) == {(way, m) for way in ("forward", "backward") for m in range(4)}
    used = {
        (slot.what, slot.stage, slot.microbatch): slot
        for line in step.lines
        for slot in line.slots
        if slot.what in ("forward", "backward")
    }
    for (way, m), transfer in sent.items():
        source, target = (0, 1) if way == "forward" else (1, 0)
        assert (transfer.source, transfer.target) == (source, target)
        assert used[way, source, m].stop <= transfer.start < transfer.stop <= used[way, target, m].start
        assert transfer.bytes == 4 * 2 * 16 * 32  # float32: rows of a rank and microbatch, their length, the width


def test_collectives_stand_by_their_axis(step):
    counts = {(e.line, e.axis, e.kind) for e in step.exchanges}
    for line in (0, 1):
        assert {(line, "dp_shard", "all_gather"), (line, "dp_shard", "reduce_scatter")} <= counts
        assert (line, "pp·dp_shard", "all_reduce") in counts  # the norm of the gradient
    tables = [e for e in step.exchanges if e.kind == "all_gather" and e.line == 0]
    assert max(e.bytes for e in tables) == 4 * (2 * 32 + 2 * 32 * 64 + 64 + 32)  # a block, whole
    assert all(0 <= e.start <= e.stop <= step.length for e in step.exchanges)
    assert any("communication over dp_shard" in slot.parts for slot in step.lines[0].slots if slot.what == "forward")


def test_only_rank_0_is_told_and_other_steps_enter_nothing_for_it(of_pipeline):
    assert all(told == [None] for told, _, _ in of_pipeline[1:])
    for _, (*_, before, with_it, after), _ in of_pipeline:
        assert before == after < with_it


def test_it_changes_nothing_of_training(of_pipeline, workers):
    assert of_pipeline[0][2] == workers.run(unobserved, PLAN, 5, ranks=4)[0]


def test_kinds_add_up_to_the_step(step):
    assert sum(seconds_by_kind(step).values()) == pytest.approx(step.length)
    assert sum(seconds_by_kind(step, apart=False).values()) == pytest.approx(step.length)
    foretold = timeline(predicted().recipe, predicted().played)
    pairs = differences(foretold, step)
    assert sum(one for one, _ in pairs.values()) == pytest.approx(foretold.length)
    assert sum(other for _, other in pairs.values()) == pytest.approx(step.length)
    assert {
        "forward",
        "backward",
        "optimizer",
        "waiting",
        "communication over tp",
        "communication over dp_shard",
    } <= set(pairs)


def test_tensor_parallel_collectives_and_recorded_programs_are_seen(workers):
    (text,), _, _ = workers.run(observed, {"mesh": "tp=2", "verify": 0}, 5, ranks=2)[0]
    step = Timeline.from_json(text)
    assert [line.ranks for line in step.lines] == [(0, 1)] and not step.transfers
    assert sum(e.axis == "tp" for e in step.exchanges) >= 8  # one a block at least, forward and backward
    assert seconds_by_kind(step)["communication over tp"] > 0
