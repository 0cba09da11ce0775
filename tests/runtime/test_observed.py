"""A step that was observed, as a timeline: what ran when on which line, what crossed, which collectives; and what others cost."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.draw.timeline import Timeline, differences, seconds_by_kind
from meshwright.runtime.observed import Observer
from meshwright.runtime.rows.microbatches import rows_of_rank
from test_report import Tower, loss, tokens

PLAN = {"mesh": "pp=2,dp_shard=2", "microbatches": 4}


def observed(plan: object, steps: int) -> tuple[list[str | None], list[int]]:
    """Steps, of which the last is observed: its timeline as text, and the collectives that each step entered."""
    job = mw.parallelize(Tower, plan, batch=tokens(), loss=loss)
    optimizer = torch.optim.AdamW(job.parameters())
    rows = rows_of_rank(tokens(), job.recipe, job.rank)
    timelines: list[str | None] = []
    entered = []
    for step in range(steps):
        before = mw.private.collectives_entered()
        if step < steps - 1:
            one_step(job, rows, optimizer)
        else:
            with job.observe(optimizer) as seen:
                one_step(job, rows, optimizer)
            timelines.append(None if seen.timeline is None else seen.timeline.to_json())
        entered.append(mw.private.collectives_entered() - before)
    return timelines, entered


def one_step(job, rows, optimizer):
    job.step(rows)
    job.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def of_pipeline(workers):
    return workers.run(observed, PLAN, 4, ranks=4)


def test_each_line_has_its_actions_in_the_order_of_the_schedule(of_pipeline) -> None:
    ((text, *others),) = [[one for one in told] for told, _ in of_pipeline[:1]]
    assert text is not None and not others and all(told == [None] for told, _ in of_pipeline[1:])
    step = Timeline.from_json(text)
    assert Timeline.from_json(step.to_json()) == step
    assert step.unit == "seconds" and [line.stages for line in step.lines] == [(0,), (1,)]
    print(step)
