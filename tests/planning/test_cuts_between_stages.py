"""Where a model is cut into stages: exact, balanced by work, as the plan says, or an error that says where it can be."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.graph import Event, ModelGraph, Value
from meshwright.planning.pipeline import RECEIVED, SLACK, Costs, StageMemory, choose_cuts, free_crossing
from meshwright.schedule import make_schedule, microbatches_held, most_in_flight

SIZES = {"p0": 1, "p1": 2, "p2": 5, "p3": 20}  # bytes of parameters
Pinned = dict[int, frozenset[int]]


def program(*events: tuple[int, str, int, int]) -> ModelGraph:
    """Of each event its work, its parameter, the bytes of its result, and which event's result it takes (-1: none)."""
    graph = ModelGraph()
    for i, (work, name, size, taken) in enumerate(events):
        inputs = (taken,) if taken >= 0 else ()
        graph.events.append(Event((), i, "f", inputs, (i,), None, (name,), (), work, 0, False, False, ""))
        graph.values.append(Value((size,), (1,), "int8", 1, False, i, i, i))
    return graph


@st.composite
def programs(draw: st.DrawFn) -> tuple[ModelGraph, list[float], Pinned, bool]:
    """A short program; for each stage how many times it holds its activations; on which stages some events may be; and whether
    a stage may be empty."""
    n, stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    names, number = st.sampled_from(sorted(SIZES)), st.integers(0, 9)
    graph = program(*((draw(number), draw(names), draw(number), draw(st.integers(-1, i - 1))) for i in range(n)))
    some = st.sets(st.integers(0, stages - 1), min_size=1).map(frozenset)
    held = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=stages, max_size=stages))
    return graph, held, draw(st.dictionaries(st.integers(0, n - 1), some, max_size=2)), draw(st.booleans())


@given(programs())
def test_the_cuts_are_the_best_of_all(given_: tuple[ModelGraph, list[float], Pinned, bool]) -> None:
    graph, held, pinned, empty = given_
    n, stages, memory_of_stages = len(graph.events), len(held), StageMemory(SIZES, held)
    free = free_crossing(graph, range(1, n))
    crossing_at = Costs(graph, memory_of_stages, range(n + 1), free).crossing

    def runs(cuts: Sequence[int]) -> list[tuple[int, int]]:
        return list(pairwise((0, *cuts, n)))

    def allowed(cuts: Sequence[int]) -> bool:
        said = all(k in pinned.get(i, [k]) for k, (start, stop) in enumerate(runs(cuts)) for i in range(start, stop))
        return said and all(start < stop for start, stop in runs(cuts) if not empty or stop == n)

    def work_of(start: int, stop: int) -> float:
        return sum(e.work for e in graph.events[start:stop]) + RECEIVED * max(0, crossing_at[start] - free)

    def work(cuts: Sequence[int]) -> float:
        """Starting later never counts as more."""
        return max(min(work_of(k, j) for k in marks if k <= i) for i, j in runs(cuts) if i < j)

    def memory(cuts: Sequence[int]) -> float:
        return max(
            sum(SIZES[name] for name in {e.parameters[0] for e in graph.events[i:j]})
            + times * (sum(v.bytes for v in graph.values[i:j]) + crossing_at[i])
            for times, (i, j) in zip(held, runs(cuts), strict=True)
            if i < j
        )

    def crossing(cuts: Sequence[int]) -> int:
        return sum(crossing_at[cut] for cut in cuts)

    found = choose_cuts(graph, range(1, n), memory_of_stages, pinned, empty=empty)
    worthwhile = [i for i in range(1, n) if all(work_of(i, n) <= work_of(k, n) for k in range(i))]
    for marks in ([0, *worthwhile, n], range(n + 1)):
        ways = [cuts for cuts in combinations_with_replacement(marks, stages - 1) if allowed(cuts)]
        if ways:
            break
    if found is None:
        assert not ways
        return
    light = [cuts for cuts in ways if work(cuts) <= SLACK * min(map(work, ways))]
    small = [cuts for cuts in light if memory(cuts) <= SLACK * min(map(memory, light))]
    assert tuple(found) in small and crossing(found) == min(map(crossing, small))


def test_what_choosing_cuts_takes_grows_with_the_places_and_not_with_their_square() -> None:
    names = sorted(SIZES)
    graph = program(*((1 + i % 7, names[i % 4], 1 + i % 5, i - 1) for i in range(2000)))
    tracemalloc.start()
    cuts = choose_cuts(graph, range(1, 2000), StageMemory(SIZES, [4.0, 3.0, 2.0, 1.0]), {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cuts is not None and len(cuts) == 3
    assert peak < 4e6, "a number for each pair of places is 16 MB at least"


class Stack(nn.Module):
    def __init__(self, blocks: int = 8, head: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(blocks))
        self.head = nn.Linear(32, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class HeavyHead(Stack):
    def __init__(self) -> None:
        super().__init__(8, 32 * 4)  # as much work as four blocks


BATCH = (torch.ones(4, 32),)


def layers_of(recipe: mw.Recipe) -> list[list[int]]:
    return [[int(m.split(".")[1]) for m in s.modules if m.startswith("layers.")] for s in recipe.stages]


def test_stages_are_balanced_by_work_with_the_head_counted() -> None:
    assert layers_of(mw.make_recipe(Stack, "pp=2", BATCH)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    heavy = layers_of(mw.make_recipe(HeavyHead, "pp=2", BATCH))
    assert len(heavy[0]) > len(heavy[1]) + 1
    shares = [s.work for s in mw.make_recipe(HeavyHead, "pp=2", BATCH).stages]
    assert max(shares) / sum(shares) < 0.56


class Words(nn.Module):
    """A small decoder with a large vocabulary: its head and its loss each have more work than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(12))
        self.head = nn.Linear(32, 4000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("more", [{}, {"recompute": "blocks"}, {"schedule": "interleaved", "stages_per_rank": 2}])
def test_a_loss_is_not_cut_from_the_head_that_would_send_it_all_logits(more: dict[str, object]) -> None:
    plan = mw.Plan.parse({"mesh": {"pp": 4}, "microbatches": 8, **more})
    stages = mw.make_recipe(Words, plan, (torch.zeros(64, 32, dtype=torch.long),)).stages
    assert "head" in stages[-1].modules
    assert stages[-1].work > 2 * max(s.work for s in stages[:-1]), "all blocks together are not so much"


def test_early_stages_have_fewer_blocks_as_they_hold_more_microbatches() -> None:
    """The head has as much work as seven blocks, so the other stages may have up to seven."""

    plan = mw.Plan.parse({"mesh": {"pp": 4}, "microbatches": 8})
    recipe = mw.make_recipe(partial(Stack, 12, 32 * 7), plan, (torch.ones(4096, 32),))
    assert [len(blocks) for blocks in layers_of(recipe)] == [2, 4, 6, 0]  # of as many as 4, 3, 2 and 1 microbatches


def test_a_stage_holds_as_many_microbatches_as_its_schedule_runs_before_its_backward() -> None:
    for name, ranks, stages in (("1f1b", 4, 4), ("gpipe", 4, 4), ("interleaved", 4, 8), ("interleaved", 2, 8)):
        schedule = make_schedule(name, ranks, stages, 16)
        for rank in range(ranks):
            of_rank = range(rank, stages, ranks)
            held = sum(microbatches_held(name, ranks, stages, 16, stage) for stage in of_rank)
            assert held == pytest.approx(most_in_flight(schedule, rank), abs=1), (name, rank)


def test_the_plan_places_modules() -> None:
    plan = {"mesh": {"pp": 2}, "modules": {"layers.0-1": {"on": "pp[0]"}, "layers.2-7": {"on": "pp[1]"}}}
    assert layers_of(mw.make_recipe(Stack, plan, BATCH)) == [[0, 1], [2, 3, 4, 5, 6, 7]]
    plan = {"mesh": {"pp": 4}, "modules": {"layers.5": {"on": "pp[0]"}}}
    assert layers_of(mw.make_recipe(Stack, plan, BATCH))[0] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("modules", "where", "required"),
    [
        ({"layers.0": {"on": "pp[1]"}, "layers.7": {"on": "pp[0]"}}, "modules.on", "layers.1"),
        ({"layers.3": {"on": "pp[2]"}}, "modules.layers.3.on", "from 0 to 1"),
        ({"layers.8-9": {"on": "pp[1]"}}, "modules.layers.8-9", "the name of one"),
    ],
)
def test_places_that_cannot_be_are_told(modules: dict[str, object], where: str, required: str) -> None:
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Stack, {"mesh": {"pp": 2}, "modules": modules}, BATCH)
    (finding,) = caught.value.findings
    assert finding.where == where
    assert required in finding.required


class Giant(nn.Module):
    """One module, with nothing in it to cut between but functions of a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x).mean()


class Reads(Stack):
    """What it does after its first block follows from a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            if x.mean() > 0:
                x = layer(x)
        return self.head(x).square().mean()


def test_a_model_that_cannot_be_cut_so_often_says_where_it_can_be() -> None:
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Giant, "pp=4", BATCH)
    (finding,) = caught.value.findings
    assert finding.where == "mesh.pp" and "4 stages, of a model that can be cut in" in finding.given
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Reads, "pp=6", BATCH)
    (finding,) = caught.value.findings
    assert "reads a value" in finding.given
    fixed = mw.Plan.from_yaml(finding.fix)
    assert len(mw.make_recipe(Reads, fixed, BATCH).stages) == fixed.mesh.axis_size("pp")


@pytest.mark.parametrize(("ranks", "each"), [(2, 3), (4, 2)])
def test_fewer_stages_a_rank_are_asked_for_first(ranks: int, each: int) -> None:
    plan = {"mesh": {"pp": ranks}, "schedule": "interleaved", "stages_per_rank": each}
    with pytest.raises(PlanError) as caught:
        mw.make_recipe(Reads, plan, BATCH)
    (finding,) = caught.value.findings
    fixed = {**plan, **yaml.safe_load(finding.fix)}
    if fixed["schedule"] != "interleaved":
        del fixed["stages_per_rank"]
    assert 2 <= len(mw.make_recipe(Reads, fixed, BATCH).stages) < ranks * each


def test_many_stages_go_into_blocks() -> None:
    """Two blocks of two layers and a head, on six ranks: where blocks are too few, they are cut themselves."""

    recipe = mw.make_recipe(_Two, "pp=6", BATCH)
    assert len(recipe.stages) == 6
    assert any("a cut between stages goes through it" in note for note in recipe.notes)


class _Two(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2))


class _Nested(nn.Module):
    """Pads its rows apart between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.within, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nested.as_nested_tensor(list(self.first(x).unbind()), layout=torch.jagged)
        return self.last(self.within(h).to_padded_tensor(0.0)).square().mean()


def test_a_nested_tensor_stays_in_its_stage() -> None:
    recipe = mw.make_recipe(_Nested, "pp=3", (torch.ones(4, 2, 8),))
    assert [stage.modules for stage in recipe.stages] == [("first",), ("within",), ("last",)]


class ScalesItsInput(nn.Module):
    """Writes its input in place, and reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(self.scale)
        assert x.square().mean().item() >= 0
        return x


class UsesItsBatchAfterwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = ScalesItsInput(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.first(x)
        total = x.sum()
        return total + self.last(scaled.sigmoid()).sum()


def test_no_stage_follows_a_call_that_reads_a_value_and_writes_the_batch() -> None:
    with pytest.raises(PlanError, match="reads a value"):  # a later stage would sum the batch as it was
        mw.make_recipe(UsesItsBatchAfterwards, "pp=2", (torch.randn(4, 4),), lambda loss: loss)
