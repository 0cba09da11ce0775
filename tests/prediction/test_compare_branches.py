"""The cost of branches: the split against brute force, the bytes against a job's ledger, and what is said."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import branching as models
import meshwright as mw
from branching import beside, on
from meshwright.hardware import Curve, Group, Profile, collective, read_profile
from meshwright.planning.split import best_split, imbalance
from meshwright.prediction.branches.ways import BEST, DATA, ONE, PLANNED, TENSOR
from meshwright.workers.pool import LocalWorkers

H100 = read_profile("h100")
EVEN = Curve(((1.0, 1.0),))
FLAT = replace(H100, matmul={"bfloat16": EVEN}, streaming=EVEN, launch=0.0, host=0.0, host_backward=0.0)
"""Of which every call attains the peak, and for which no host is waited for."""
FREE = replace(H100.node, latency=0.0, start=0.0, bandwidth=1e30, efficiency=EVEN, in_switch=0.0)

# --- the split --------------------------------------------------------------------------------------------------------

RANKS = 6


@given(st.lists(st.lists(st.integers(1, 40), min_size=RANKS, max_size=RANKS), min_size=1, max_size=4))
def test_the_split_is_the_best_of_all(drawn: list[list[int]]) -> None:
    tables = [sorted(map(float, table), reverse=True) for table in drawn]
    split = best_split(tables, RANKS)
    assert sum(split) <= RANKS and min(split) >= 1

    def slowest(ranks: tuple[int, ...]) -> float:
        return max(table[n - 1] for table, n in zip(tables, ranks, strict=True))

    every = [s for s in product(range(1, RANKS + 1), repeat=len(tables)) if sum(s) <= RANKS]
    assert slowest(split) == min(map(slowest, every))
    for i, ranks in enumerate(split):  # and none has a rank that it can spare
        fewer = (*split[:i], ranks - 1, *split[i + 1 :])
        assert ranks == 1 or slowest(fewer) > slowest(split)


def test_a_table_that_rises_counts_as_what_fewer_ranks_take() -> None:
    assert best_split([[4, 9, 9, 1], [3, 3, 3, 3]], 5) == (4, 1)
    assert best_split([[4, 9, 9, 1], [3, 3, 3, 3]], 4) == (1, 1)


def test_more_branches_than_ranks_have_no_split() -> None:
    with pytest.raises(ValueError, match="3 branches, and 2 ranks"):
        best_split([[1.0, 1.0]] * 3, 2)


def test_imbalance() -> None:
    assert imbalance([1, 1], [1, 1]) == 1
    assert imbalance([1, 3], [1, 1]) == 1.5
    assert imbalance([1, 3], [1, 3]) == 1
    assert imbalance([1, 2, 3], [2, 2, 2]) == 1.5


# --- bytes, against jobs ----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two branches and nothing else with parameters but a stem, which is whole."""

    def __init__(self, first: int = 32, second: int = 32, dim: int = models.DIM, depth: int = 1) -> None:
        super().__init__()
        self.stem = nn.Linear(dim, dim)
        self.block_a = nn.Sequential(*(models.MLP(first, dim) for _ in range(depth)))
        self.block_b = nn.Sequential(*(models.MLP(second, dim) for _ in range(depth)))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        return {"loss": (self.block_a(x) * self.block_b(x)).square().mean()}


def moved(build: Any, batch: Any, plan: Any) -> tuple[Counter[str], Counter[str]]:
    """Runs on every rank: calls and bytes of its second step, by kind."""
    job = mw.parallelize(build, {**plan, "rows": "split"}, batch=batch)
    job.step(batch)
    calls, size = job.ledger.calls.copy(), job.ledger.bytes.copy()
    job.step(batch)
    return job.ledger.calls - calls, job.ledger.bytes - size


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "toy": (models.Toy, models.rows(), beside(1, 1)),
    "toy 1+2": (models.Toy, models.rows(), beside(1, 2)),
    "tracks, several regions": (
        models.Tracks, models.rows(), {"mesh": {"tp": 2}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1]"}}}
    ),
    "rows in uneven shares": (models.Toy, models.rows(7), beside(1, 2, b={"dp": 2})),
    "outputs of several types": (models.Several, models.rows(), on({"tp": 2}, a="tp[0]", b="tp[1]")),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.proof] * (c == "toy")) for c in CASES])
def test_forks_and_joins_are_what_a_job_counts(case: str, workers: LocalWorkers) -> None:
    build, batch, plan = CASES[case]
    ways = [r[PLANNED] for r in mw.compare_branches(build, batch, plan).regions]
    found = workers.run(moved, build, batch, plan, ranks=plan["mesh"]["tp"])
    ours = [(c["fork"] + c["join"], b["fork"] + b["join"]) for c, b in found]
    ranks = [[w.crossing[r] for w in ways] for r in range(len(found))]
    assert [(sum(t.calls for t in crossing), sum(t.bytes for t in crossing)) for crossing in ranks] == ours


def test_tensor_parallel_is_what_a_job_counts(workers: LocalWorkers) -> None:
    plan = {**beside(1, 1), "modules": {**beside(1, 1)["modules"], "stem": {"tp": "replicate"}}}
    way = mw.compare_branches(Pair, models.rows(), plan).regions[0][TENSOR]
    calls, size = workers.run(
        moved, Pair, models.rows(), {"mesh": {"tp": 2}, "modules": {"stem": {"tp": "replicate"}}}, ranks=2
    )[0]
    assert set(calls) == {"all_reduce"}
    assert (way.traffic.calls, way.traffic.bytes) == (calls["all_reduce"], size["all_reduce"])


def test_equal_branches_move_a_share_of_the_parameters() -> None:
    build, batch = models.Three, models.rows()
    own, whole = mw.compare_branches(Pair, batch, beside(1, 1)).regions[0].parameter_bytes
    assert whole == 2 * own == 2 * sum(p.numel() * 4 for name, p in Pair().named_parameters() if "stem" not in name)
    places = on({"tp": 3}, block_a="tp[0]", block_b="tp[1]", block_c="tp[2]")
    own, whole = mw.compare_branches(build, batch, places).regions[0].parameter_bytes
    sizes = {
        k: 2 * 4 * sum(p.numel() for n, p in build().named_parameters() if n.startswith(f"block_{k}")) for k in "abc"
    }
    assert (own, whole) == (max(sizes.values()), sum(sizes.values()))


# --- what functions take ----------------------------------------------------------------------------------------------


class Looks(nn.Module):
    """Two branches of a convolution, or of an attention, each."""

    def __init__(self, *, attention: bool) -> None:
        super().__init__()
        kind = Attends if attention else partial(nn.Conv2d, 8, 8, 3, padding=1)
        self.block_a, self.block_b = nn.Sequential(kind(), kind()), nn.Sequential(kind(), kind())

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.block_a(x) + self.block_b(x)).square().mean() + 0 * y.sum()}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.query(x), x, x)


@pytest.mark.parametrize(("attention", "kind"), [(False, "convolution"), (True, "attention")])
def test_functions_take_what_the_profile_measured_of_them(attention: bool, kind: str) -> None:
    """The compute of both branches on one device, with a profile whose functions of this kind are three times as slow."""
    batch = {"x": torch.ones(4, 8, 64, 64), "y": torch.ones(4)}
    quick = replace(H100, host=0.0, host_backward=0.0, launch=0.0, slower={})
    slow = replace(quick, slower={kind: 3.0, f"{kind}_backward": 3.0})
    build = partial(Looks, attention=attention)
    alone, slower = (
        mw.compare_branches(build, batch, beside(1, 1), hardware=hardware).regions[0][ONE].compute
        for hardware in (quick, slow)
    )
    predicted = [
        mw.predict(build, batch, "dp_shard=1", hardware=hardware, max_norm=None).seconds.waterfall["compute"]
        for hardware in (quick, slow)
    ]
    assert slower > 1.5 * alone
    assert slower - alone == pytest.approx(predicted[1] - predicted[0], rel=0.2)


# --- what pays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hardware",
    [H100, replace(H100, name="processes", cores=2, node=replace(H100.node, latency=1e-4))],
    ids=lambda h: h.name,
)
def test_the_forum_s_toy_is_too_small(hardware: Profile) -> None:
    found = mw.compare_branches(models.Toy, models.rows(), beside(1, 1), hardware=hardware)
    assert not found.pays and found.fastest == ONE
    assert "\n" not in found.verdict
    assert re.match(
        r"distributing does not pay: [\d.]+ µs of work on one device, against \d collectives? of", found.verdict
    )
    table = str(found)
    assert table.endswith(found.verdict)
    for way in found.regions[0].ways:
        assert way.name in table


def test_links_without_cost_make_the_toy_pay() -> None:
    free = replace(H100, node=FREE, host_collective=0.0)
    found = mw.compare_branches(models.Toy, models.rows(), beside(1, 1), hardware=free)
    assert found.fastest == PLANNED
    way = found.regions[0][PLANNED]
    assert way.seconds == pytest.approx(max(row[0] for row in found.regions[0].tables))


BLOCKS = 6


def big(first: int = 4096, second: int = 4096) -> Any:
    return lambda: Pair(first, second, dim=1024, depth=BLOCKS)


def one_row(rows: int = 1) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, 512, 1024), "y": torch.zeros(rows, 512, 5)}


def test_deep_branches_at_batch_1_prefer_branches() -> None:
    found = mw.compare_branches(big(), one_row(), beside(1, 1))
    region = found.regions[0]
    assert found.fastest == PLANNED
    assert region[BEST].split == (1, 1)
    assert region[PLANNED].imbalance == pytest.approx(1)
    # In each block of each branch an all-reduce forward and one backward, of which the two at the fork share one.
    assert region[TENSOR].traffic.calls == 2 * 2 * BLOCKS - 1
    assert region[PLANNED].traffic.calls == 2
    assert region[DATA].seconds >= region[ONE].seconds
    assert region[DATA].note == "1 row: 1 of 2 ranks have none"
    assert "branches, as planned 1+1" in found.verdict


def test_many_rows_of_much_work_prefer_data() -> None:
    found = mw.compare_branches(big(512, 8192), one_row(64), beside(1, 1))
    assert found.fastest == DATA
    assert found.regions[0][PLANNED].imbalance == pytest.approx(2 * 8192 / (512 + 8192), abs=0.1)


def test_ranks_go_where_the_work_is() -> None:
    found = mw.compare_branches(
        big(1024, 3072),
        one_row(),
        beside(2, 2),
        hardware=replace(FLAT, node=replace(FREE, bandwidth=H100.node.bandwidth)),
    )
    region = found.regions[0]
    assert region[BEST].split == (1, 3)
    assert region[BEST].seconds < region[PLANNED].seconds
    assert region[BEST].imbalance == pytest.approx(1, abs=0.15)  # what moves bytes alone is no more work in the larger


def test_what_a_job_adds_to_an_operation_is_not_on_one_device() -> None:
    plain, slowed = (
        mw.compare_branches(models.Toy, models.rows(), beside(1, 1), hardware=replace(H100, job_call=added)).regions[0]
        for added in (0.0, 1.0)
    )
    more = {w.name: slowed[w.name].seconds - w.seconds for w in plain.ways}
    # Each branch has two linears and a ReLU.
    assert more == pytest.approx({ONE: 0, DATA: 6, TENSOR: 6, PLANNED: 3, BEST: 3})


def test_measured_tables_count_instead_of_predictions() -> None:
    tables = {
        ("block_a", 1): 1.0,
        ("block_a", 2): 0.5,
        ("block_a", 3): 0.4,
        ("block_b", 1): 0.3,
        ("block_b", 2): 0.2,
        ("block_b", 3): 0.1,
    }
    region = mw.compare_branches(models.Toy, models.rows(), beside(2, 2), tables=tables).regions[0]
    assert region.tables[0][:3] == (1.0, 0.5, 0.4)
    assert region[ONE].seconds == 1.3
    assert region[BEST].split == (3, 1)
    assert region[PLANNED].compute == 0.5
    assert region[BEST].seconds == pytest.approx(0.4, abs=1e-3)
    with pytest.raises(ValueError, match="the branches are block_a, block_b"):
        mw.compare_branches(models.Toy, models.rows(), beside(2, 2), tables={("block_c", 1): 1.0})


def test_branches_that_compare_rows_have_no_data_parallelism() -> None:
    class Normed(models.Toy):
        def __init__(self) -> None:
            super().__init__()
            self.block_a = nn.Sequential(nn.Linear(models.DIM, models.DIM), nn.BatchNorm1d(models.DIM))

    region = mw.compare_branches(Normed, models.rows(), beside(1, 1)).regions[0]
    assert region[DATA].note == "rows depend on each other: each rank runs all rows"
    assert region[DATA].compute == pytest.approx(region[ONE].compute)


def test_a_frozen_branch_has_no_backward() -> None:
    plain, frozen = (
        mw.compare_branches(m, models.rows(), beside(1, 1)).regions[0] for m in (models.Toy, models.Frozen)
    )
    assert frozen.tables[1][0] < 0.5 * plain.tables[1][0]
    assert frozen[PLANNED].traffic.calls == 1  # a join alone: what is forked wants no gradient


def test_each_region_of_a_stack() -> None:
    plan = {"mesh": {"tp": 2}, "modules": {"*.attn": {"on": "tp[0]"}, "*.mlp": {"on": "tp[1]"}}}
    found = mw.compare_branches(models.Parallel, models.rows(6, 5), plan)
    assert [r.name for r in found.regions] == [f"layers.{i}.attn | layers.{i}.mlp" for i in range(3)]
    assert "layers.1.attn | layers.1.mlp, and 1 like it" in str(found)  # what enters the first wants no gradient
    assert found.seconds[ONE] == pytest.approx(sum(r[ONE].seconds for r in found.regions))


def test_branches_that_are_found_are_compared() -> None:
    found, said = (
        mw.compare_branches(models.Toy, models.rows(), plan)
        for plan in ({"mesh": {"tp": 2}, "branches": "auto"}, beside(1, 1))
    )
    assert found.regions == said.regions


def test_rows_are_those_of_a_data_rank() -> None:
    plan = {**beside(1, 1), "mesh": {"dp_shard": 2, "tp": 2}, "microbatches": 3}
    assert mw.compare_branches(models.Toy, models.rows(12), plan).regions[0].rows == 2


def test_no_branches_is_an_error() -> None:
    with pytest.raises(mw.PlanError, match="no branches that run beside each other"):
        mw.compare_branches(models.Toy, models.rows(), "tp=2")


def test_seconds_are_those_of_the_profile() -> None:
    """Of the product of the stem and of its backward, and of an all-reduce: as the functions have them that ``predict`` uses."""
    fast = replace(H100, host=0.0, host_backward=0.0, host_collective=0.0)
    found = mw.compare_branches(big(), one_row(), beside(1, 1), hardware=fast)
    way = found.regions[0][PLANNED]
    size = 512 * 1024 * 4  # the fork's gradient; and the join's value
    fork = collective(H100, "all_reduce", size, Group(2, 2)).seconds
    join = collective(H100, "all_to_all", 2 * size, Group(2, 2)).seconds
    assert way.seconds - way.compute == pytest.approx(fork + join)
    slower = replace(fast, matmul={"bfloat16": Curve(((1.0, 0.01),))})
    assert mw.compare_branches(big(), one_row(), beside(1, 1), hardware=slower).seconds[ONE] > 10 * found.seconds[ONE]


def test_a_host_that_is_slow_is_hidden_by_a_device_with_a_queue() -> None:
    slow = replace(H100, host=1e-5, host_backward=1e-5)
    queue, none = (
        mw.compare_branches(big(), one_row(), beside(1, 1), hardware=replace(slow, cores=cores)) for cores in (0, 8)
    )
    assert queue.seconds[ONE] == mw.compare_branches(big(), one_row(), beside(1, 1)).seconds[ONE] < none.seconds[ONE]
