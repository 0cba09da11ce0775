"""What ranks really hold, beside the recipe: nothing to say where a job is sound; what was broken, by rank and name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.mismatch import Mismatch
from meshwright.runtime.weights.parameters import local_tensor
from zoo import ZOO


def broken(plan, break_it=None):
    """What is told of a job, and of one in which some rank was made to hold something else."""
    entry = ZOO["nanogpt"]
    job = mw.parallelize(entry.build, plan, batch=entry.batch())
    before = job.mismatches()
    named = dict(job.module.named_parameters())
    name = next(line.name for line in job.recipe.parameters if len(line.shape) == 2 and job.recipe.holds(line, 0))
    if break_it == "another value" and job.rank == 1:
        with torch.no_grad():
            local_tensor(named[name]).view(-1)[0].add_(1.0)
    if break_it == "left whole" and job.rank == 1:
        line, module = job.recipe.by_name[name], job.module.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], nn.Parameter(torch.zeros(line.shape)))
    return before, name, job.mismatches(), job.report().sound


@pytest.mark.parametrize("plan", ["dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", {"mesh": "pp=2,tp=2"}])
def test_of_a_sound_job_there_is_nothing_to_tell(plan, workers):
    for before, _, after, sound in workers.run(broken, plan, ranks=4):
        assert before == after == () and sound


def test_a_copy_with_another_value_is_told_on_all_ranks(workers):
    told = workers.run(broken, "dp_replicate=3", "another value", ranks=3)
    for before, name, after, sound in told:
        assert before == () and not sound
        assert after == (Mismatch(1, name, "the values of rank 0", "other values"),)


def test_a_rank_that_holds_all_where_it_should_hold_a_slice_is_told(workers):
    for before, name, after, sound in workers.run(broken, "tp=2", "left whole", ranks=2):
        assert before == () and not sound
        assert [(one.rank, one.parameter, one.held) for one in after] == [(1, name, "all of it")]
        assert " of " in after[0].recipe
