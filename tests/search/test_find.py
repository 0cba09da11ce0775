"""Plans that are found: they run, they fit, what is estimated of them is what is predicted, and the best is the best."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright import PlanError, find_plans, make_recipe, predict
from meshwright import planned as planned_module
from meshwright.hardware.profile import Curve
from meshwright.hardware.reader import read_profile
from meshwright.prediction.clock import before_last_step, last_step
from meshwright.prediction.predict import adamw_on
from meshwright.prediction.rehearsal import TWO_STEPS, RehearsedStep, rehearse
from meshwright.prediction.result import Prediction, StepSeconds
from meshwright.prediction.trace import Collective, Op
from meshwright.schedule import Action, make_schedule, timeline
from meshwright.search import find as search
from meshwright.search import reasons
from meshwright.search.estimate import CandidateEstimate, Estimator
from meshwright.search.find import repeat_rows
from meshwright.search.measured import _correction as measured_correction
from meshwright.search.pipeline import pipelined
from meshwright.search.rehearsals import Rehearsals
from meshwright.search.sizes import DP_SHARD, MANY_ROWS
from meshwright.search.space import Candidate, Family, Sharding, candidates, divisors

WIDTH, WORDS = 256, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h):
        return h + self.down(nn.functional.gelu(self.up(self.norm(h))))


class Tower(nn.Module):
    def __init__(self, depth: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def loss(output):
    return output


def tokens(rows=4, length=512):
    return (torch.arange(rows * length).remainder(WORDS).view(rows, length),)


GPU = replace(read_profile("h100"), context=0, reserve=0.0, host=0.0, host_backward=0.0, host_collective=0.0)


def find(**options):
    arguments = {"devices": 8, "global_batch": 64, "hardware": GPU, "verify": False} | options
    return find_plans(Tower, tokens(), loss=loss, **arguments)


@pytest.fixture(scope="module")
def found():
    return find(top=4)


@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.proof)])
def test_every_plan_resolves_and_its_estimate_is_near_its_prediction(found, most):
    whole = tokens(64)
    assert len({proposal.estimate.candidate.family for proposal in found.plans}) == 4
    for proposal in found.plans[:most]:
        prediction = predict(Tower, whole, proposal.plan, hardware=GPU, loss=loss)
        assert proposal.estimate.nbytes == pytest.approx(prediction.peak, rel=0.2)
        assert proposal.estimate.seconds == pytest.approx(prediction.seconds.seconds, rel=0.25)
        if proposal.estimate.candidate.pp == 1:
            computed = prediction.seconds.waterfall["compute"]
            assert proposal.estimate.terms["compute"] == pytest.approx(computed, rel=0.02)


def test_a_host_that_takes_long_to_call_collectives_is_waited_for():
    slow, build = replace(GPU, host_collective=1e-3), partial(Tower, depth=4)
    rehearsals = Rehearsals(build, tokens(MANY_ROWS * DP_SHARD, 32), {}, loss, adamw_on(GPU), 1.0, accelerator=True)
    estimator = Estimator(slow, {Sharding(1): rehearsals.layer_costs(Sharding(1))}, 0.0, 0.0, 4)
    for replicate, shard, reshard in ((1, 2, True), (1, 2, False), (2, 1, True), (2, 2, True)):
        candidate = Candidate(1, replicate, shard, 1, microbatches=2, rows=2, reshard=reshard)
        rows = tokens(4 * replicate * shard, 32)
        predicted = predict(build, rows, candidate.plan({}), hardware=slow, loss=loss).seconds.waterfall["host"]
        assert estimator.estimate(candidate).terms["host"] == pytest.approx(predicted, rel=0.1, abs=2e-4) != 0, (
            candidate
        )


MEETING = [(1, 1, 2, 1), (2, 1, 1, 1)], [(1, 2, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2)]
"""Sizes of (pp, dp_replicate, dp_shard, tp)."""


@pytest.mark.parametrize("sizes", [MEETING[0], pytest.param(MEETING[1], marks=pytest.mark.proof)], ids=["few", "more"])
def test_an_estimate_waits_for_other_ranks_as_long_as_a_prediction(sizes):
    skewed, build = replace(GPU, skew=Curve(((1e-6, 0.9), (1.0, 1e-3)))), partial(Tower, depth=4)
    rehearsals = Rehearsals(build, tokens(MANY_ROWS * DP_SHARD, 32), {}, loss, adamw_on(GPU), 1.0, accelerator=True)
    estimator = Estimator(
        skewed, {Sharding(tp): rehearsals.layer_costs(Sharding(tp)) for tp in {tp for *_, tp in sizes}}, 0.0, 0.0, 4
    )
    for pp, replicate, shard, tp in sizes:
        candidate = Candidate(pp, replicate, shard, tp, microbatches=2, rows=2, reshard=True)
        rows = tokens(4 * replicate * shard, 32)
        predicted = predict(build, rows, candidate.plan({}), hardware=skewed, loss=loss).seconds.waterfall
        estimated = estimator.estimate(candidate).terms["waiting for other ranks"]
        assert estimated == pytest.approx(predicted["waiting for other ranks"], rel=0.25), candidate


def test_all_candidates_use_all_devices_and_all_rows():
    for of in candidates(8, 4, 64, [1, 2, 4, 8], 16, recompute=True):
        assert of.pp * of.data * of.tp == 8
        assert of.data * of.microbatches * of.rows == 64
        assert of.tp <= 4
    sample = [*candidates(8, 8, 64, [1, 2], 16, recompute=True)][::40]
    for of in sample:
        assert make_recipe(Tower, of.plan({}), tokens(64), loss).mesh.size == 8


def test_the_frontier_gets_faster_as_it_gets_larger(found):
    sizes = [estimate.nbytes for estimate in found.frontier]
    times = [estimate.seconds for estimate in found.frontier]
    assert sizes == sorted(sizes)
    assert times == sorted(times, reverse=True)
    assert times[-1] == min(times)


@pytest.mark.proof
def test_a_search_is_deterministic(found):
    again = find(top=4)
    assert [p.plan.dump() for p in again.plans] == [p.plan.dump() for p in found.plans]


@pytest.mark.proof
def test_with_less_memory_it_takes_another_plan_or_says_what_does_not_fit(found):
    fastest = found.plans[0].estimate
    less = int(0.5 * fastest.nbytes)
    small = find(hardware=replace(GPU, memory=less))
    assert all(proposal.nbytes <= less for proposal in small.plans)
    assert small.plans[0].seconds > fastest.seconds
    with pytest.raises(PlanError, match="needs least needs"):
        find(hardware=replace(GPU, memory=1 << 20))


@pytest.mark.proof
def test_what_is_verified_is_what_predict_says():
    (proposal,) = find(devices=2, top=1, verify=True).plans
    same = predict(Tower, tokens(64), proposal.plan, hardware=GPU, loss=loss, fold=True)
    assert proposal.prediction is not None
    assert proposal.prediction.peak == same.peak


def test_wrong_arguments_are_told_at_once():
    with pytest.raises(PlanError, match="as many devices on each node"):
        find(devices=8, nodes=3)
    with pytest.raises(PlanError, match="rows that divide"):
        find(devices=7, nodes=7, global_batch=2)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(PlanError, match="without parameters"):
        find_plans(nn.Identity, (torch.zeros(8, 4),), devices=2, hardware=GPU, loss=torch.mean)


@pytest.mark.proof  # the collectives have a test of their own, and `show` draws the nodes of a search
def test_what_crosses_nodes_takes_longer():
    on_one, on_four = (find(devices=4, nodes=nodes, top=1, global_batch=16).plans[0] for nodes in (1, 4))
    assert on_four.seconds > 1.01 * on_one.seconds
    for nodes in (None, 2):  # sixteen devices need two nodes
        with pytest.raises(PlanError, match="no network"):
            find(devices=16, nodes=nodes, hardware=replace(GPU, network=None))


def test_divisors_are_those_that_divide():
    assert all(24 % n == 0 for n in divisors(24))
    assert len(divisors(24)) == 8


def test_a_candidate_as_a_plan():
    plan = Candidate(2, 1, 2, 2, microbatches=4, rows=2, chunks=2, recompute=True).plan({"precision": "bfloat16"})
    assert plan["mesh"] == {"pp": 2, "dp_shard": 2, "tp": 2}
    assert plan["schedule"] == "interleaved"
    assert plan["recompute"] == "blocks"


def test_as_many_blocks_keep_their_activations_as_fit():
    one = {"devices": 1, "global_batch": 4, "options": {"precision": "bfloat16", "microbatches": 1}}
    roomy = find(**one)
    none, every = (next(e for e in roomy.frontier if e.candidate.recompute == again) for again in (False, True))
    between = round((3 * none.nbytes + every.nbytes) / 4)
    best = find(**one, hardware=replace(GPU, memory=between)).plans[0]
    saved = best.estimate.candidate.saved_blocks
    assert 8 < saved < 16
    assert every.nbytes < best.nbytes <= between
    assert none.seconds < best.seconds < every.seconds
    recipe = make_recipe(Tower, best.plan, tokens(), loss)
    assert len(recipe.recompute) == 16 - saved
    assert predict(Tower, tokens(), best.plan, hardware=GPU, loss=loss).peak == pytest.approx(best.nbytes, rel=0.2)


def test_blocks_that_keep_their_activations_are_as_many_in_each_stage():
    of = Candidate(2, 1, 2, 1, microbatches=2, rows=1, recompute=True, saved_blocks=3)
    blocks = [f"blocks.{i}" for i in range(16)]
    plan = of.plan({"modules": {"blocks.7": {"dp": "replicate"}}}, blocks)
    recomputed = make_recipe(Tower, plan, tokens(), loss).recompute
    assert len(recomputed) == 10
    assert sum(blocks.index(name) < 8 for name in recomputed) == 5
    assert plan["modules"]["blocks.7"] == {"recompute": "none", "dp": "replicate"}


def test_what_does_not_fit_names_the_nearest_change_that_does():
    def memory(of):
        return 100 / (of.pp * of.dp_shard * of.tp)

    one = Candidate(pp=1, dp_replicate=1, dp_shard=2, tp=1, microbatches=1, rows=1)
    assert reasons._change(one, 30, memory, ()) == "2 times the devices, dp_shard=4"
    families = {Family(1, 8), Family(2, 2), Family(4, 1)}
    assert reasons._change(one, 10, memory, families).startswith("pp=2, tp=2 on as many devices or 8 times the devices")
    assert reasons._change(one, 1e-9, memory, ()) == ""


def test_a_search_in_which_nothing_fits_says_what_would():
    with pytest.raises(PlanError, match="2 times the devices, dp_shard=4") as raised:
        find(devices=2, global_batch=2, hardware=replace(GPU, memory=80 << 20), options={"precision": "bfloat16"})
    assert "dp_shard=2, recompute blocks" in str(raised.value)


def test_plans_within_the_interval_say_what_to_measure(found):
    first, second = found.plans[0], found.plans[1]
    assert first.interval[0] < first.seconds < first.interval[1]
    meets = first.interval[1] >= second.interval[0]
    assert (
        any("to be surer, run both, or measure" in line for line in found.why if line.startswith(str(second.plan.mesh)))
        == meets
    )


def test_backwards_in_halves_are_as_they_are_said():
    every = [*candidates(4, 8, 16, [1], 16, {"microbatches": 8}, recompute=True)]
    assert {of.schedule for of in every if of.pp == 4} == {"1f1b", "interleaved"}
    halves = [*candidates(4, 8, 16, [1], 16, {"schedule": "zero_bubble"}, recompute=True)]
    assert {of.schedule for of in halves if of.pp > 1} == {"zero_bubble"}
    plan = next(of for of in halves if of.pp == 4).plan({})
    assert make_recipe(Tower, plan, tokens(16), loss).schedule == "zero_bubble"


@pytest.mark.parametrize(("halves", "schedule"), [(1.0, "zero_bubble"), (3.0, "1f1b")])
def test_a_verified_pipeline_has_the_schedule_that_is_predicted_to_be_faster(monkeypatch, halves, schedule):
    def predicted(build, batch, plan, **_):
        seconds = halves if plan.schedule == "zero_bubble" else 2.0
        return SimpleNamespace(
            fits=True, peak=1, seconds=SimpleNamespace(seconds=seconds, low=seconds, high=seconds, waterfall={})
        )

    monkeypatch.setattr(search, "predict", predicted)
    model = search._Model(Tower, tokens(4), 4, GPU, {"precision": "bfloat16"}, loss, adamw_on(GPU), 1.0)
    one = CandidateEstimate(Candidate(2, 1, 1, 1, microbatches=4, rows=1), 2.0, 1.0, {})
    proposal = model.proposed(one, (), lambda text: None)
    assert proposal.plan.schedule == schedule and proposal.seconds == min(halves, 2.0)
    assert make_recipe(Tower, proposal.plan, tokens(4), loss).schedule == schedule


def test_backwards_in_halves_take_less_time_for_more_memory():
    """ZB-H1: (p - 1) (F + I - W) of a step is bubble. As the schedule that runs, played with actions of a unit each."""
    one = Candidate(pp=4, dp_replicate=1, dp_shard=1, tp=1, microbatches=8, rows=1)
    halves = replace(one, split=True)
    assert pipelined(one, [3.0] * 4, 0.0) == 33 == max(s.stop for s in timeline(make_schedule("1f1b", 4, 4, 8)))
    played = max(s.stop for s in timeline(make_schedule("zero_bubble", 4, 4, 8)))
    assert pipelined(halves, [3.0] * 4, 0.0, [1.0] * 4) == 27 == played


def test_what_the_optimizer_needs_is_not_taken_for_activations():
    """Few tokens: updating parameters takes more memory than computing does."""
    batch = repeat_rows(tokens(length=32), MANY_ROWS * DP_SHARD)
    rehearsals = Rehearsals(Tower, batch, {"precision": "bfloat16"}, loss, adamw_on(GPU), 1.0, accelerator=True)
    assert rehearsals.recomputed() == pytest.approx(2 * 32 * WIDTH, rel=0.01)  # of a row, what enters a block
    layer_costs = rehearsals.layer_costs(Sharding(1))
    assert layer_costs.updating == pytest.approx(
        2 * 4, rel=0.01
    )  # of an element, its gradient, and its step in float32
    estimator = Estimator(GPU, {Sharding(1): layer_costs}, rehearsals.recomputed(), 0.0, 2)
    one = Candidate(pp=1, dp_replicate=4, dp_shard=2, tp=1, microbatches=1, rows=8)
    assert estimator.memory.peak(one) == pytest.approx((layer_costs.persistent + 8) * layer_costs.total_elements / 2)


class ManyWords(Tower):
    def __init__(self) -> None:
        super().__init__(4)
        self.table, self.head = nn.Embedding(200_000, WIDTH), nn.Linear(WIDTH, 200_000, bias=False)


def test_the_gradient_of_a_large_table_is_not_taken_for_activations():
    """It comes when all blocks have freed theirs, and takes more memory than few blocks with few rows."""
    batch = repeat_rows(tokens(length=32), MANY_ROWS * DP_SHARD)
    rehearsals = Rehearsals(ManyWords, batch, {"precision": "bfloat16"}, loss, adamw_on(GPU), 1.0, accelerator=True)
    assert rehearsals.recomputed() == pytest.approx(2 * 32 * WIDTH, rel=0.01)
    layer_costs = rehearsals.layer_costs(Sharding(1))
    assert layer_costs.activations > 5 * rehearsals.recomputed()
    estimator = Estimator(GPU, {Sharding(1): layer_costs}, rehearsals.recomputed(), 0.0, 2)
    one = Candidate(pp=1, dp_replicate=1, dp_shard=2, tp=1, microbatches=1, rows=2)
    predicted = predict(
        ManyWords, repeat_rows(batch, 4), {"mesh": "dp_shard=2", "precision": "bfloat16"}, hardware=GPU, loss=loss
    )
    assert estimator.memory.peak(one) == pytest.approx(predicted.memory(0).peak, rel=0.2)


class TwoKinds(Tower):
    """Blocks of two widths."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        for _ in range(5):
            wide = Block()
            wide.up, wide.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)
            self.blocks.append(wide)


def rehearsals_of(build):
    return Rehearsals(
        build,
        repeat_rows(tokens(length=32), MANY_ROWS * DP_SHARD),
        {"precision": "bfloat16"},
        loss,
        adamw_on(GPU),
        1.0,
        accelerator=True,
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("build", [Tower, TwoKinds])
def test_what_is_planned_with_more_blocks_is_planned_of_few(build, tp):
    rehearsals = rehearsals_of(build)
    few = rehearsals._few
    assert len(few.more) == (2 if build is TwoKinds else 1)
    most = rehearsals._rehearsal(few.most, Sharding(tp))
    for blocks in (few.base, *few.more):
        restricted = most.passing_through(blocks)
        anew = rehearsals._rehearsal(restricted.build, Sharding(tp)).recipe
        assert restricted.recipe.parameters == anew.parameters
        assert (restricted.recipe.units, restricted.recipe.buffers) == (anew.units, anew.buffers)
    names = [p.name for p in most.passing_through(few.base).recipe.parameters]
    assert sum(name.endswith("up.weight") for name in names) == 2 * len(few.kinds)


def test_a_model_is_planned_once_for_the_rehearsals_of_one_size_of_tp(monkeypatch):
    planned = []
    plain = planned_module.resolve
    monkeypatch.setattr(
        planned_module,
        "resolve",
        lambda model, plan, *args, **kwargs: planned.append(plan) or plain(model, plan, *args, **kwargs),
    )
    rehearsals = rehearsals_of(Tower)
    assert all(rehearsals.layer_costs(Sharding(tp)) is not None for tp in (1, 2))
    assert [plan.mesh.axis_size("tp") for plan in planned] == [1, 2]
    assert rehearsals.recomputed() > 0
    assert len(planned) == 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_more_rows_of_one_rehearsal_are_those_of_another(device):
    """A step with more rows follows two steps with few: it has the functions that it has in a rehearsal of its own."""
    build, batch = partial(Tower, depth=2), tokens(MANY_ROWS * DP_SHARD, 8)[0].to(device)
    rehearsals = Rehearsals(build, (batch,), {}, loss, adamw_on(GPU), 1.0, accelerator=True)
    few = rehearsals._rehearsal(build, Sharding(2))
    both = rehearse(few, 0, (*TWO_STEPS, RehearsedStep(updated=False, batch=rehearsals.batch)))
    many = rehearse(replace(few, batch=rehearsals.batch), 0)
    assert before_last_step(both).events == rehearse(few, 0).events
    for of_both, alone in zip(last_step(both), last_step(many), strict=False):
        if isinstance(alone[0], Action):
            functions = [[event for event in of[1] if isinstance(event, Op | Collective)] for of in (of_both, alone)]
            assert functions[0] == functions[1] != []


def test_measured_plans_correct_the_profile_from_their_predictions(found):
    """A split backward has the estimate of the whole one: what counts is how the estimate changes with the profile."""
    staged = next(proposal for proposal in found.plans if proposal.estimate.candidate.pp > 1)
    candidate = replace(staged.estimate.candidate, chunks=1, recompute=False, saved_blocks=0, split=True)
    split = replace(staged, estimate=replace(staged.estimate, candidate=candidate))

    def took(factor):
        measured = Prediction((), {}, StepSeconds(factor * split.seconds), "this machine", "", source="measured")
        return measured_correction(found, [replace(split, measured=measured)])

    assert took(1.0).before == pytest.approx(0, abs=1e-9) and not took(1.0).factors
    assert took(1.25).before == pytest.approx(0.2) and took(1.25).after < 0.1
