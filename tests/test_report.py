"""What there is to see of a plan, as data: the timeline, memory, communication, and what holds them all."""

from __future__ import annotations

import functools
import io
import json
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from rich.console import Console, Group
from torch import nn

from meshwright.draw.communication import communication
from meshwright.draw.facts import shard_map
from meshwright.draw.memory import memory_profile
from meshwright.draw.plain import from_plain, to_plain
from meshwright.draw.prediction import drawn
from meshwright.draw.report import Report, report
from meshwright.draw.stages import drawn as schedule_lines
from meshwright.draw.timeline import timeline
from meshwright.mesh import Mesh
from meshwright.mismatch import Mismatch
from meshwright.parity.compare import Errors
from meshwright.parity.report import Report as Verdict
from meshwright.plan import Plan
from meshwright.planned import make_recipe
from meshwright.prediction.dryrun import dry_run
from meshwright.prediction.predict import predict
from meshwright.prediction.result import Prediction
from meshwright.recipe import ParameterRecipe, Recipe, Stage
from meshwright.schedule import idle, make_schedule
from meshwright.schedule import timeline as spans_of
from test_shard_map import recipes

WORDS, WIDE = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, blocks=8):
        super().__init__()
        self.table, self.blocks = nn.Embedding(WORDS, WIDE), nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids):
        h = self.table(ids)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


def loss(output):
    return output


def tokens(rows=16, length=16):
    return (torch.arange(rows * length).remainder(WORDS).view(rows, length),)


PLAN = {"mesh": "pp=2,dp_shard=2,tp=2", "microbatches": 8}


@functools.cache
def predicted() -> Prediction:
    return predict(Tower, tokens(), PLAN, loss=loss)


def stages(*work: int, sends: int = 1) -> tuple[Stage, ...]:
    last = len(work) - 1
    return tuple(
        Stage(i, ((("", 0),), i), f"blocks.{i}", (f"blocks.{i}",), w, w, w, sends if i < last else 0, 10)
        for i, w in enumerate(work)
    )


def piped(*work: int, schedule: str = "1f1b", microbatches: int = 4) -> Recipe:
    lines = tuple(ParameterRecipe(f"blocks.{i}.weight", (8, 8), "float32", stages=(i,)) for i in range(len(work)))
    return Recipe(
        Mesh.parse({"pp": len(work), "dp_shard": 2}),
        lines,
        stages=stages(*work),
        schedule=schedule,
        microbatches=microbatches,
    )


def test_axes_that_leave_a_node_are_told() -> None:
    recipe = Recipe(Mesh.parse("pp=2,dp_shard=4,tp=2"), (ParameterRecipe("a.weight", (8, 8), "float32"),))
    told = io.StringIO()
    Console(file=told, width=80).print(drawn(replace(predicted(), recipe=recipe, per_node=4)))
    rows = [line.split() for line in told.getvalue().splitlines()]
    assert "4 nodes of 4 ranks, numbered node by node".split() in rows
    assert "pp 0 ═ 8 between 2 nodes".split() in rows and "tp 0 ─ 1 within a node".split() in rows
    assert "dp_shard 0 ─ 2 ═ 4 ─ 6 between 2 nodes, 2 ranks on each".split() in rows
    told.truncate(0)
    Console(file=told, width=80).print(drawn(replace(predicted(), per_node=8)))
    assert "nodes of" not in told.getvalue()


def test_a_narrow_terminal_keeps_the_names_of_roles() -> None:
    told = io.StringIO()
    Console(file=told, width=80).print(drawn(predicted()))
    memory = told.getvalue().partition("what lives when")[0]
    assert all(role.name in memory for role in predicted().roles) and "…" not in memory


@pytest.mark.parametrize("width", [80, 100])
def test_the_timeline_of_a_pipeline_breaks_no_line(width: int) -> None:
    told = io.StringIO()
    Console(file=told, width=width).print(Group(*schedule_lines(piped(1, 1, 1, microbatches=32))))
    lines = told.getvalue().splitlines()
    assert lines[1].startswith("pp 0   F0") and lines[2].startswith("pp 1 ") and lines[3].startswith("pp 2 ")
    assert lines[4] == "F forward  B backward"
    assert all(len(line) <= width for line in lines) and lines[1].endswith("…")


# --- the timeline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_plan_alone_is_played_as_its_schedule_says(schedule: str) -> None:
    facts = timeline(piped(5, 5, 5, schedule=schedule))
    spans = spans_of(make_schedule(schedule, 3, 3, 4))
    assert facts.idle == pytest.approx(idle(spans))
    drawn = [(r, s.start, s.stop, s.stage, s.microbatch) for r, line in enumerate(facts.lines) for s in line.slots]
    assert drawn == [
        (s.rank, s.start, s.stop, s.action.stage, s.action.microbatch)
        for s in sorted(spans, key=lambda s: (s.rank, s.start))
    ]


def test_stages_of_more_work_take_longer() -> None:
    first, second = timeline(piped(3, 1)).lines
    assert [line.slots[0].stop - line.slots[0].start for line in (first, second)] == [1.5, 0.5]  # of the mean
    assert second.slots[0].start == first.slots[0].stop
    assert timeline(piped(3, 1)).idle > timeline(piped(2, 2)).idle


def test_values_go_to_the_next_stage_and_their_gradients_back() -> None:
    transfers = timeline(piped(1, 1, microbatches=2)).transfers
    assert sorted((t.source, t.target, t.way, t.microbatch) for t in transfers) == [
        (0, 1, "forward", 0), (0, 1, "forward", 1), (1, 0, "backward", 0), (1, 0, "backward", 1),
    ]  # fmt: skip


def test_without_a_pipeline_there_is_one_line_and_no_bubble() -> None:
    facts = timeline(Recipe(Mesh.parse("dp_shard=4"), (ParameterRecipe("w", (8,), "float32"),), microbatches=2))
    assert [(slot.what, slot.microbatch) for slot in facts.lines[0].slots] == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1),
    ]  # fmt: skip
    assert facts.lines[0].ranks == (0, 1, 2, 3) and facts.idle == 0


def test_a_predicted_step_is_as_long_as_the_prediction_says() -> None:
    prediction = predicted()
    assert prediction.recipe is not None
    facts = timeline(prediction.recipe, prediction.played)
    assert facts.unit == "seconds" and facts.length == pytest.approx(prediction.seconds.seconds)
    for line in facts.lines:
        assert sum(slot.what == "forward" for slot in line.slots) == 8
        assert all(sum(slot.parts.values()) == pytest.approx(slot.stop - slot.start) for slot in line.slots)
        assert all(a.stop <= b.start + 1e-12 for a, b in zip(line.slots, line.slots[1:], strict=False))
    forward = [t for t in facts.transfers if t.way == "forward"]
    assert {(t.source, t.target) for t in forward} == {(0, 1)} and len(forward) == 8
    assert all(t.bytes == 16 * WIDE * 4 for t in forward)  # one row of 16 tokens
    for sent in forward:  # what is sent comes before the forward that takes it
        taken = next(s for s in facts.lines[1].slots if s.what == "forward" and s.microbatch == sent.microbatch)
        assert taken.start >= sent.stop > sent.start


# --- memory and communication -----------------------------------------------------------------------------------------


def test_a_plan_alone_tells_what_lies_at_rest() -> None:
    shards = shard_map(piped(1, 1))
    roles = memory_profile(shards).roles
    assert [role.name for role in roles] == ["stage 0", "stage 1"]
    assert [role.at_rest for role in roles] == [(128, 128)] * 2 and not roles[0].moments


@pytest.mark.parametrize("fold", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_what_lives_in_each_moment_adds_up_and_its_most_is_the_peak(fold: bool) -> None:
    prediction = predicted() if fold else predict(Tower, tokens(), PLAN, loss=loss, fold=False)
    assert prediction.recipe is not None
    profile = memory_profile(shard_map(prediction.recipe), prediction)
    for role in profile.roles:
        memory = prediction.memory(role.ranks[0])
        assert role.moments[role.peak].bytes == memory.peak == max(moment.bytes for moment in role.moments)
        assert role.moments[role.peak].items == dict(memory.items)
        for moment in role.moments:
            assert sum(moment.items.values()) == pytest.approx(moment.bytes, rel=0.02), moment.what
            assert min(moment.items.values()) > 0, moment.what
        whats = [moment.what for moment in role.moments]
        assert sum(what in [f"{role.stage}F{m}" for m in range(8)] for what in whats) == 8
        assert whats.index(f"{role.stage}F0") < whats.index(f"{role.stage}B7") < whats.index("optimizer")
        assert role.device == prediction.device_bytes(role.ranks[0])


def test_what_is_exchanged_is_what_a_dry_run_counts() -> None:
    prediction = predicted()
    assert prediction.recipe is not None
    facts = communication(prediction.recipe, prediction)
    run = dry_run(Tower, tokens(), PLAN, 0, loss=loss)
    counted: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in facts.exchanges:
        if one.role == run.role.name:
            counted[one.kind, one.axis][0] += one.calls
            counted[one.kind, one.axis][1] += one.bytes
    expected = {(e.kind, e.axis): [e.calls, e.nbytes] for e in run.exchanges}
    assert set(counted) == set(expected)
    for key, (calls, nbytes) in expected.items():
        assert counted[key] == [pytest.approx(calls), pytest.approx(nbytes)], key
    modules = {one.module for one in facts.exchanges if one.axis == "tp"}
    assert "backward" in modules and any(module.startswith("blocks.*") for module in modules)


class Odd(Tower):
    def forward(self, ids):
        h = self.blocks[0].up(self.blocks[0].norm(self.table(ids)))
        h = torch.fft.fft(h, dim=-1).real  # no rule says how it is computed on shards
        return super().forward(ids) + self.blocks[0].down(h).square().mean()


def test_a_function_that_runs_whole_is_told_with_its_line() -> None:
    prediction = predict(
        functools.partial(Odd, 1), tokens(), {"mesh": "tp=2", "modules": {"*.up": {"tp": "column"}}}, loss=loss
    )
    assert prediction.recipe is not None
    told = communication(prediction.recipe, prediction).ran_whole
    assert [(one.function, one.line.rpartition("/")[2].partition(":")[0]) for one in told] == [
        ("fft_fft", "test_report.py")
    ]


def test_a_plan_alone_tells_what_units_gather_and_stages_hand_on() -> None:
    facts = communication(make_recipe(Tower, PLAN, tokens(), loss))
    blocks = next(one for one in facts.exchanges if one.module == "blocks.{0…7}")
    norm, half_of_up, half_of_down = 2 * WIDE, WIDE * WIDE + WIDE, WIDE * WIDE + WIDE  # each with its bias
    per_block = norm + half_of_up + half_of_down
    assert (blocks.axis, blocks.bytes) == ("dp_shard", 8 * 4 * per_block)
    assert [one.module for one in facts.exchanges if one.axis == "pp"] == ["stage 0"]


# --- all of it --------------------------------------------------------------------------------------------------------


@given(recipes())
def test_a_report_comes_back_from_json_as_it_was(recipe: Recipe) -> None:
    facts = report(recipe, title="any", mismatches=[Mismatch(1, "p0", "rows 0:4", "rows 4:8")])
    assert Report.from_json(facts.to_json()) == facts


def test_a_predicted_report_comes_back_from_json_as_it_was() -> None:
    prediction = predicted()
    assert prediction.recipe is not None
    facts = report(prediction.recipe, prediction, title="tower", others={"another": predicted()})
    again = Report.from_json(facts.to_json())
    assert again == facts and again.shards.held_by("table.weight") == facts.shards.held_by("table.weight")
    assert [step.name for step in again.steps] == ["this plan", "another"]


def test_a_prediction_and_a_shard_map_come_back_from_json_as_they_were() -> None:
    for facts in (predicted(), shard_map(piped(3, 1, 2), ranks=[0, 5])):
        again = from_plain(type(facts), json.loads(json.dumps(to_plain(facts), allow_nan=False)))
        assert again == facts


def test_a_notebook_shows_what_the_terminal_shows() -> None:
    recipe = Recipe(Mesh.parse("tp=2"), (ParameterRecipe("<b>.weight", (4, 4), "float32"),), notes=("a & b",))
    for shown in (recipe._repr_html_(), shard_map(recipe)._repr_html_()):
        assert "&lt;b&gt;.weight" in shown and "a &amp; b" in shown and "<b>" not in shown
    prediction = predicted()
    assert "seconds of a step" in prediction._repr_html_() and "a second" not in prediction._repr_html_()
    assert Plan.parse(PLAN)._repr_html_().startswith("<pre>mesh:")
    verdict = Verdict(
        True, Plan.parse(PLAN), 1e-9, "float64", 3, 1.0, Errors(loss=0.0, gradients={}, parameters={}, buffers={})
    )
    assert "PASSED" in verdict._repr_html_()
    frame = report(recipe, title="it's")._repr_html_()
    assert frame.count("<") == 2 and "&lt;!DOCTYPE html&gt;" in frame  # nothing of the page ends the frame


def test_what_is_no_report_is_an_error() -> None:
    with pytest.raises((TypeError, KeyError)):
        Report.from_json('{"title": 3}')


def test_ten_thousand_ranks_are_worked_out_at_once() -> None:
    """Bytes of every rank, against those of some ranks asked one by one."""
    lines = tuple(ParameterRecipe(f"layers.{i}.w", (4096, 512), "float32", stages=(i // 8,)) for i in range(80))
    recipe = Recipe(Mesh.parse("pp=10,dp_shard=125,tp=8"), lines, stages=stages(*[1] * 10))
    shards = shard_map(recipe)
    assert [shards.bytes_by_rank[r] for r in range(0, 10_000, 997)] == [
        shards.bytes_at(r) for r in range(0, 10_000, 997)
    ]
