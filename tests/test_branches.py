"""Branches: different blocks of a model on different groups of ranks at the same time, equal to one device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import branching as models
import drawing
import meshwright as mw
from branching import beside, on
from meshwright import private
from meshwright.private import TorchDispatchMode
from meshwright.workers.pool import LocalWorkers

CLOSE = 1e-12  # relative, in float64, over five steps of the optimizer


def same(build: Any, batch: Any, plan: Any, workers: LocalWorkers) -> mw.Report:
    report = mw.check(build, batch, plan, workers=workers, dtype=torch.float64, tolerance=CLOSE, steps=5)
    assert report.passed, str(report)
    assert report.dtype == "float64"
    return report


# --- the forum's model ------------------------------------------------------------------------------------------------

SHARES = {
    "1+1": beside(1, 1),
    "1+3": beside(1, 3),
    "3+1": beside(3, 1),
    "2+2": beside(2, 2),
    "2+6": beside(2, 6),
    "tp2 | dp3 x tp2": beside(2, 6, b={"dp": 3, "tp": 2}),
    "dp2 | dp_shard2": beside(2, 2, a={"dp": 2}, b={"dp_shard": 2}),
    "dp_shard2 | dp_shard3": beside(2, 3, a={"dp_shard": 2}, b={"dp_shard": 3}),
    "dp_shard=2 x (1+3)": {**beside(1, 3), "mesh": {"dp_shard": 2, "tp": 4}},
    "dp_replicate=2 x (2+2), sharded within": {
        **beside(2, 2, a={"dp_shard": 2}), "mesh": {"dp_replicate": 2, "tp": 4}
    },
    "pp=2 x (1+1)": {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}},
    "microbatches": {**beside(1, 2, b={"dp": 2}), "microbatches": 3},
    "recompute": {**beside(1, 2), "recompute": "blocks"},
}  # fmt: skip


# What continuous integration leaves out: what another case shows with fewer ranks, or the other way round.
REST = {
    "3+1", "2+2", "2+6", "dp2 | dp_shard2", "evoformer over data", "dp_shard of parallel attention and MLP", "siamese, unequal",
    "inception with rows divided", "towers with projections, dp_shard", "rows that the model asks for", "three 2+1+1",
    "dp_shard=2 x (1+3)", "dp_replicate=2 x (2+2), sharded within", "on each other's way, with rows divided",
    "on each other's way, over stages", "two tracks that exchange, with rows divided", "a dropout that is off, with rows divided",
    "buffers that branches change, over stages", "types that do not align, of several ranks", "experts on several ranks",
    "rows that the model asks for, of both", "nested in a branch of several data ranks", "towers by data",
}  # fmt: skip


def often(names: Iterable[str]) -> list[Any]:
    """Cases, of which those of ``REST`` are run by ``make proof``."""
    return [pytest.param(name, marks=[pytest.mark.proof] if name in REST else []) for name in names]


@pytest.mark.parametrize("plan", often(SHARES))
def test_the_forum_s_two_blocks(plan: str, workers: LocalWorkers) -> None:
    same(models.Toy, models.rows(), SHARES[plan], workers)


def with_mesh(plan: dict[str, Any], mesh: dict[str, int], *modules: str) -> dict[str, Any]:
    """A plan in which these modules' ranks form a mesh."""
    return {**plan, "modules": {n: {**e, "mesh": mesh} if n in modules else e for n, e in plan["modules"].items()}}


# --- ways of models ---------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Any, Any, Any]] = {
    "towers with projections 2+1": (models.ProjectedTowers, models.rows(), on({"tp": 3}, tower_a="tp[0:2]", tower_b="tp[2]")),
    "towers with projections, dp_shard": (
        models.ProjectedTowers, models.rows(), {**on({}, tower_a="tp[0]", tower_b="tp[1]"), "mesh": {"dp_shard": 2, "tp": 2}}
    ),
    "three 1+2+1": (models.Three, models.rows(), on({"tp": 4}, block_a="tp[0:1]", block_b="tp[1:3]", block_c="tp[3:4]")),
    "three 2+1+1": (models.Three, models.rows(), on({"tp": 4}, block_a="tp[0:2]", block_b="tp[2]", block_c="tp[3]")),
    "parallel attention and MLP": (
        models.Parallel, models.rows(6, 5), {"mesh": {"tp": 3}, "modules": {"*.attn": {"on": "tp[0:2]"}, "*.mlp": {"on": "tp[2:3]"}}}
    ),
    "dp_shard of parallel attention and MLP": (
        models.Parallel, models.rows(6, 5),
        {"mesh": {"dp_shard": 2, "tp": 2}, "modules": {"*.attn": {"on": "tp[0]"}, "*.mlp": {"on": "tp[1]"}}},
    ),
    "two tracks": (
        models.Tracks, models.rows(), {"mesh": {"tp": 3}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1:3]"}}}
    ),
    "two tracks that exchange": (
        models.Mutual, models.rows(), {"mesh": {"tp": 2}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1]"}}}
    ),
    "two tracks that exchange, of several ranks": (
        models.Mutual, models.rows(), {"mesh": {"tp": 4}, "modules": {"left.*": {"on": "tp[0:3]"}, "right.*": {"on": "tp[3]"}}}
    ),
    "two tracks that exchange, with rows divided": (
        models.Mutual, models.rows(),
        {"mesh": {"tp": 3}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1:3]", "mesh": {"dp_shard": 2}}}},
    ),
    "on each other's way": (
        models.Staged, models.rows(), {"mesh": {"tp": 3}, "modules": {"left.*": {"on": "tp[0:2]"}, "right.*": {"on": "tp[2]"}}}
    ),
    "on each other's way, with rows divided": (
        models.Staged, models.rows(),
        {"mesh": {"tp": 3}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1:3]", "mesh": {"dp": 2}}}},
    ),
    "on each other's way, over stages": (
        models.Staged, models.rows(),
        {"mesh": {"pp": 2, "tp": 2}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1]"}}, "microbatches": 2},
    ),
    "buffers that branches change, over stages": (
        models.Averages, models.rows(), {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}, "microbatches": 2}
    ),
    "what branches leave in an argument": (models.Cached, models.rows(), {**beside(1, 1), "recompute": "blocks"}),
    "what branches leave in an argument, with rows divided": (
        models.Cached, models.rows(), {**beside(1, 2, b={"dp": 2}), "microbatches": 2}
    ),
    "what branches leave in an argument, over stages": (
        models.Cached, models.rows(), {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}, "microbatches": 2, "recompute": "blocks"}
    ),
    "a dropout that is off": (models.Off, models.rows(), on({"tp": 3}, block_a="tp[0:2]", block_b="tp[2]", drop="tp[0:2]")),
    "a dropout that is off, with rows divided": (
        models.Off, models.rows(),
        with_mesh(on({"tp": 3}, block_a="tp[0:2]", block_b="tp[2]", drop="tp[0:2]"), {"dp": 2}, "block_a", "drop"),
    ),
    "the trunk after branches": (models.Residuals, models.rows(), beside(1, 2, b={"dp": 2})),
    "results of branches, from blocks of the trunk": (
        models.Blocks, models.rows(),
        {"mesh": {"tp": 3}, "modules": {
            "*.a": {"on": "tp[0]"}, **{f"*.{n}": {"on": "tp[1:3]", "mesh": {"dp_shard": 2}} for n in ("b", "last")}}},
    ),
    "a tensor of the batch as it is": (models.Weighed, models.rows(), beside(1, 2)),
    "types that do not align": (models.Typed, models.rows(7), beside(1, 1)),
    "types that do not align, of several ranks": (models.Typed, models.rows(7), beside(1, 2, b={"dp": 2})),
    "one of two written to": (models.Overwritten, models.rows(), beside(1, 1)),
    "put together in memory": (models.Pieced, models.rows(), on({"tp": 2}, a="tp[0]", b="tp[1]")),
    "experts, whose way depends on values": (models.Chosen, models.rows(), on({"tp": 2}, experts="tp[0]", shared="tp[1]")),
    "experts on several ranks": (models.Chosen, models.rows(), on({"tp": 3}, experts="tp[0:2]", shared="tp[2]")),
    "a parameter that is handed on": (models.HandedOn, models.rows(), on({"tp": 2}, a="tp[0]", b="tp[1]", drop="tp[1]")),
    "evoformer": (models.Evoformer, models.alignment(), {"mesh": {"tp": 2}, "branches": "auto"}),
    "evoformer over data": (models.Evoformer, models.alignment(), {"mesh": {"dp_shard": 2, "tp": 3}, "branches": "auto"}),
    "inception": (
        models.Inception, models.images(),
        on({"tp": 4}, one="tp[0]", reduce3="tp[1:3]", conv3="tp[1:3]", pool="tp[3]", project="tp[3]"),
    ),
    "inception with rows divided": (
        models.Inception, models.images(),
        with_mesh(on({"tp": 4}, one="tp[0]", reduce3="tp[1:3]", conv3="tp[1:3]", pool="tp[3]", project="tp[3]"), {"dp": 2}, "reduce3", "conv3"),
    ),
    "towers with rows divided": (
        models.Towers, models.pairs(),
        with_mesh(
            on({"tp": 4}, words="tp[0:2]", text="tp[0:2]", text_out="tp[0:2]", image="tp[2:4]", image_out="tp[2:4]"), {"dp_shard": 2},
            "words", "text", "text_out", "image", "image_out",
        ),
    ),
    "rows that are counted": (models.Counted, models.rows(), beside(1, 2, b={"dp": 2})),
    "rows that the model asks for": (models.Asked, models.rows(), beside(1, 3, b={"dp_shard": 3})),
    "rows that the model asks for, of both": (models.Asked, models.rows(), beside(2, 2, a={"dp": 2}, b={"dp_shard": 2})),
    "as many positions as rows": (models.Masked, models.rows(6, 6), beside(1, 2, b={"dp": 2})),
    "nested in a branch of several data ranks": (
        models.Nested, models.rows(),
        with_mesh(on({"tp": 5}, inner="tp[0:4]", other="tp[4]", inner__left="tp[0]", inner__right="tp[1]"), {"dp": 2, "tp": 2}, "inner"),
    ),
    "towers": (
        models.Towers, models.pairs(),
        on({"tp": 3}, words="tp[0:1]", text="tp[0:1]", text_out="tp[0:1]", image="tp[1:3]", image_out="tp[1:3]"),
    ),
    "towers by data": (
        models.Towers, models.pairs(),
        on({"dp_shard": 2, "tp": 2}, words="tp[0]", text="tp[0]", text_out="tp[0]", image="tp[1]", image_out="tp[1]"),
    ),
    "siamese": (models.Siamese, models.rows(), {"mesh": {"tp": 2}, "modules": {"tower": {"on": ["tp[0]", "tp[1]"]}}}),
    "siamese, unequal": (
        models.Siamese, models.rows(), {"mesh": {"dp_shard": 2, "tp": 3}, "modules": {"tower": {"on": ["tp[0:2]", "tp[2]"]}}}
    ),
    "nested": (
        models.Nested, models.rows(), on({"tp": 4}, inner="tp[0:3]", other="tp[3]", inner__left="tp[0]", inner__right="tp[1:3]")
    ),
    "several outputs": (models.Several, models.rows(), on({"tp": 3}, a="tp[0]", b="tp[1:3]")),
    "the trunk between": (models.Late, models.rows(), on({"tp": 2}, a="tp[0]", b="tp[1]")),
    "frozen": (models.Frozen, models.rows(), beside(1, 2)),
    "rows that do not divide": (models.Toy, models.rows(7), beside(2, 3, a={"dp": 2}, b={"dp_shard": 3})),
    "fewer rows than data ranks": (models.Toy, models.rows(2), beside(1, 3, b={"dp": 3})),
}  # fmt: skip


@pytest.mark.parametrize("way", often(WAYS))
def test_ways_of_models(way: str, workers: LocalWorkers) -> None:
    build, batch, plan = WAYS[way]
    same(build, batch, plan, workers)


@pytest.mark.parametrize("where", ["a", "both", "head"])
def test_a_function_that_gives_no_gradient_gives_none(where: str, workers: LocalWorkers) -> None:
    same(functools.partial(models.Stopping, where), models.rows(), beside(1, 2, b={"dp": 2}), workers)


def test_a_branch_that_gives_another_no_gradient_gives_none(workers: LocalWorkers) -> None:
    same(models.StoppingTracks, models.rows(), WAYS["two tracks that exchange"][2], workers)


# --- deadlock hunt ----------------------------------------------------------------------------------------------------

MANY = 200  # random graphs, of which `make test` runs some


def small() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn((6, 6), generator=draw), "y": torch.randn((6, 3), generator=draw)}


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.proof] if s % 80 else []) for s in range(MANY)])
def test_random_graphs_of_forks_and_joins_neither_hang_nor_differ(seed: int, workers: LocalWorkers) -> None:
    plan = models.Graph(seed).plan(data=seed % 3 == 0)
    if not plan["modules"]:
        pytest.skip("a graph without branches")
    build = functools.partial(models.Graph, seed)
    try:
        report = mw.check(
            build, small(), plan, workers=workers, dtype=torch.float64, tolerance=CLOSE, steps=2, timeout=30
        )
    except mw.PlanError as error:  # one after the other
        assert all("at the same time as" in f.given or "does not call" in f.given for f in error.findings), str(error)
        return
    assert report.passed, str(report)


# --- what a rank has, does and sends ----------------------------------------------------------------------------------


def facts(plan: Any, build: Any, batch: Any) -> dict[str, Any]:
    """On each rank, after a step: the elements it holds, what it sent, which random numbers the trunk is at."""
    job = mw.parallelize(build, plan, batch=batch)
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in job.parameters())
    job.step(batch)
    counted = {k: (job.ledger.calls[k], job.ledger.bytes[k]) for k in ("fork", "join", "all_reduce")}
    meta = [name for name, p in job.module.named_parameters() if p.is_meta]
    return {"held": held, "counted": counted, "meta": meta, "random": torch.get_rng_state().tolist()}


def test_a_rank_holds_its_own_branch_and_sends_what_others_lack_once(workers: LocalWorkers) -> None:
    found = workers.run(facts, beside(1, 3), models.Toy, models.rows(), ranks=4)
    trunk = "stem.weight", "head.weight"
    assert all(not set(trunk) & set(f["meta"]) for f in found)
    assert all(name.startswith("block_b") for name in found[0]["meta"]) and len(found[0]["meta"]) == 4
    assert all(name.startswith("block_a") for f in found[1:] for name in f["meta"])
    value = models.ROWS * models.DIM * 4  # bytes of what crosses, in float32
    for rank, f in enumerate(found):
        assert f["counted"]["fork"] == (1, value)  # one all-reduce, of the gradient of what was forked
        # a's one rank sends it to the three of b; b's three share one receiver.
        assert f["counted"]["join"] == (1, 3 * value if rank == 0 else value if rank == 1 else 0)


def test_towers_send_their_embeddings_and_nothing_else(workers: LocalWorkers) -> None:
    plan = on({"tp": 2}, words="tp[0]", text="tp[0]", text_out="tp[0]", image="tp[1]", image_out="tp[1]")
    found = workers.run(facts, plan, models.Towers, models.pairs(), ranks=2)
    assert [f["counted"]["join"] for f in found] == [(1, 8 * 16 * 4)] * 2  # 8 rows of 16 features
    assert [f["counted"]["fork"] for f in found] == [(1, 4)] * 2  # the scale alone, which is the trunk's


def test_branches_move_fewer_bytes_than_fsdp_of_the_whole(workers: LocalWorkers) -> None:
    whole = sum(p.numel() for p in models.Toy().parameters())
    found = workers.run(facts, beside(1, 1), models.Toy, models.rows(), ranks=2)
    stem_and_head = sum(p.numel() for n, p in models.Toy().named_parameters() if not n.startswith("block"))
    blocks = whole - stem_and_head
    assert found[0]["held"] + found[1]["held"] <= blocks + 2 * stem_and_head


class Gathers(TorchDispatchMode):
    """Counts all-gathers into one tensor: those of parameters, and that of the join."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "c10d::_allgather_base_"
        return func(*args, **(kwargs or {}))


def gathers(plan: Any) -> int:
    job, batch = mw.parallelize(models.Toy, plan, batch=models.rows()), models.rows(4)
    job.step(batch)
    with Gathers() as seen:
        job.step(batch)
    return seen.count


def test_units_of_branches_are_freed_after_their_forward(workers: LocalWorkers) -> None:
    plan = {**beside(1, 1), "mesh": {"dp_shard": 2, "tp": 2}}
    once = workers.run(gathers, {**plan, "reshard_after_forward": False}, ranks=4)
    again = workers.run(gathers, plan, ranks=4)
    # The root, which stays, and the branch's own unit; the join.
    assert once == [2 + 1] * 4 and again == [3 + 1] * 4


class Refusing(models.Toy):
    """One of its branches refuses values that are larger than they are at its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.block_b.up.register_forward_pre_hook(_refuses)
        for p in (self.stem.weight, self.stem.bias):
            torch.nn.init.zeros_(p)


def _refuses(module: Any, args: tuple[Tensor]) -> None:
    if not args[0].is_meta and bool((args[0] != 0).any()):
        raise ValueError("too large")


class Meeting(models.Toy):
    """Its rows meet in a term that float32 takes for rounding."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, y)
        return {**found, "loss": found["loss"] + 1e-5 * found["out"].mean(0).square().sum()}


def rows_of_first_step(build: Any, plan: Any, dtype: torch.dtype) -> tuple[str, ...]:
    batch = {name: t.to(dtype) for name, t in models.rows(8).items()}
    job = mw.parallelize(build, plan, batch=batch, dtype=dtype)
    first = 4 * job.recipe.mesh.data_index(job.rank)
    job.step({name: t[first : first + 4] for name, t in batch.items()})
    return (job.rows, *job.notes)


@pytest.mark.parametrize(("build", "rows"), [(models.Toy, "mean"), (Meeting, "coupled")])
def test_a_trial_over_branches_computes_in_float64(build: Any, rows: str, workers: LocalWorkers) -> None:
    plan = {**beside(1, 1), "mesh": {"dp_shard": 2, "tp": 2}}
    assert [found for found, *_ in workers.run(rows_of_first_step, build, plan, torch.float32, ranks=4)] == [rows] * 4


def test_an_error_of_one_branch_in_a_trial_leaves_nobody_waiting(workers: LocalWorkers) -> None:
    """One rank alone refuses perturbed weights: all run all rows, and all know why."""
    plan = {**beside(1, 1), "mesh": {"dp_shard": 2, "tp": 2}}
    for rows, *notes in workers.run(rows_of_first_step, Refusing, plan, torch.float32, ranks=4, timeout=60):
        assert rows == "coupled" and any("could not be tried (" in n and "too large" in n for n in notes), notes


def dropped(steps: int) -> tuple[list[Tensor], list[Any]]:
    plan = on({"tp": 2}, a="tp[0]", b="tp[1]")
    job = mw.parallelize(models.Dropped, plan, batch=models.rows())
    with torch.no_grad():
        outputs = [job(**models.rows()) for _ in range(steps)]
    return [o["out"] for o in outputs], [(o["a"] == 0, o["b"] == 0) for o in outputs]


def test_dropout_differs_between_branches_and_leaves_the_trunk_in_step(workers: LocalWorkers) -> None:
    (first, zeros), (second, others) = workers.run(dropped, 3, ranks=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # the trunk's mask is the same
    for (a, b), (c, d) in zip(zeros, others, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)
        assert 0.3 < a.float().mean() < 0.7 and 0.3 < b.float().mean() < 0.7
        assert not torch.equal(a, b)
    assert not torch.equal(zeros[0][0], zeros[1][0])  # and every forward draws anew


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ({"mesh": {"tp": 2}, "modules": {"block_b": {"on": "tp[1:2]"}}}, 6),
        pytest.param(beside(1, 2, b={"dp": 2}), 7, marks=pytest.mark.proof),
    ],
    ids=["one on the trunk", "1+2"],
)
def test_what_no_branch_holds_draws_what_one_device_draws(
    plan: dict[str, Any], rows: int, workers: LocalWorkers
) -> None:
    for found in workers.run(drawing.all_beside_one_device, plan, rows, ranks=plan["mesh"]["tp"]):
        for draw, got in found.items():
            if "error" in got:  # it would have to wait for one branch, before the other
                assert draw == "by_values" and "at the same time as" in got["error"], (draw, got)
                continue
            assert got["losses"] == pytest.approx(got["expected"], rel=CLOSE), draw
            assert got["off"] < CLOSE and got["in step"], draw


def whole_state(plan: Any) -> dict[str, Tensor]:
    job = mw.parallelize(models.Toy, plan, batch=models.rows())
    return job.full_state_dict()


def losses(plan: Any, how: dict[str, bool]) -> list[float]:
    batch = models.rows()
    job = mw.parallelize(models.Siamese, plan, batch=batch)
    optimizer = torch.optim.AdamW(job.parameters(), lr=0.01, **how)
    found = []
    for _ in range(3):
        found.append(float(job.step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_optimizers_that_take_parameters_together_take_those_of_all_places(workers: LocalWorkers) -> None:
    plan = WAYS["siamese"][2]  # a weight of two branches, and the trunk's: lists of parameters must be of one kind
    found = [workers.run(losses, plan, how, ranks=2)[0] for how in ({}, {"foreach": True}, {"fused": True})]
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


def loss_of(plan: Any, build: Any, sample: Any, batch: Any) -> float:
    return mw.parallelize(build, plan, batch=sample, dtype=torch.float64).step(batch).item()


def seen(plan: Any) -> Any:
    """What a hook on the second block sees on this rank: its type, shape, and the rows that are here."""
    found: list[Any] = []
    job = mw.parallelize(models.Toy, plan, batch=models.rows(8))
    block = job.module.get_submodule("block_b")
    block.register_forward_hook(
        lambda m, i, out: found.append((type(out), tuple(out.shape), getattr(out, "rows", None), out))
    )
    job.step(models.rows(8))
    kind, shape, rows, out = found[0]
    message = ""
    try:
        out.sum()
    except RuntimeError as error:
        message = str(error)
    return kind, shape, None if rows is None else tuple(rows.shape), message


def test_hooks_see_what_is_here_and_its_shape_on_one_device(workers: LocalWorkers) -> None:
    first, *others = workers.run(seen, beside(1, 2, b={"dp": 2}), ranks=3)
    shape = (8, models.DIM)
    assert first[:3] == (mw.RemoteTensor, shape, None) and "lives on other ranks" in first[3]
    for found in others:
        assert found[:3] == (mw.RowShard, shape, (4, models.DIM)) and ".rows" in found[3]


def test_rows_of_a_batch_that_come_to_be_as_many_as_something_else(workers: LocalWorkers) -> None:
    plan, sample = beside(1, 2, b={"dp": 2}), models.rows(8, 6)
    for rows in (8, 6, 5):
        batch = {name: t.double() for name, t in models.rows(rows, 6).items()}
        (alone,) = workers.run(loss_of, {"mesh": "dp_shard=1"}, models.Masked, sample, batch, ranks=1)
        found = workers.run(loss_of, plan, models.Masked, sample, batch, ranks=3)
        assert found == [pytest.approx(alone, rel=1e-12)] * 3


def test_plain_functions_of_a_branch_stay_there_with_its_rows(workers: LocalWorkers) -> None:
    build, batch, plan = WAYS["inception with rows divided"]
    recipe = mw.make_recipe(build, plan, batch)
    assert recipe.branches[1].splits and not any("all rows" in note for note in recipe.notes)
    for found in workers.run(facts, plan, build, batch, ranks=4):
        assert (found["counted"]["join"][0], found["counted"]["fork"][0]) == (1, 1)


def test_shapes_that_begin_with_the_rows_stay_with_them(workers: LocalWorkers) -> None:
    for found in workers.run(facts, beside(1, 2, b={"dp": 2}), models.Asked, models.rows(), ranks=3):
        assert (found["counted"]["join"][0], found["counted"]["fork"][0]) == (1, 1)


def test_names_and_values_are_those_of_one_device(workers: LocalWorkers) -> None:
    state = workers.run(whole_state, beside(1, 2, b={"dp_shard": 2}), ranks=3)[0]
    torch.manual_seed(0)
    plain = models.Toy().state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[name], plain[name]) for name in plain)


class OnlyBranches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = models.MLP(), models.MLP(48)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.nn.functional.mse_loss((self.a(x) + self.b(x))[:, :5], y)}


def test_a_rank_without_a_parameter_takes_part(workers: LocalWorkers) -> None:
    report = same(OnlyBranches, models.rows(), on({"tp": 3}, a="tp[0]", b="tp[1]"), workers)
    assert report.recipe is not None
    assert not any(report.recipe.holds(line, 2) for line in report.recipe)


def say(event: str) -> None:
    """Lets every rank know of an event."""
    private.job_store().set(event, "")


def wait_for(*events: str) -> None:
    """Until some rank has said each; an error if that does not come."""
    if events:
        private.job_store().wait(list(events), timedelta(seconds=60))


ARMED: set[str] = set()  # of a worker: what it says in a step. Planning and trials run it too


class Awaiting(torch.nn.Module):
    """Says that it has begun, and ends after some events; once it is armed."""

    def __init__(self, begins: str, *awaits: str) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(models.DIM, models.DIM)
        self.begins, self.awaits = begins, awaits

    def forward(self, x: Tensor) -> Tensor:
        if self.begins in ARMED:
            say(self.begins)
            wait_for(*self.awaits)
        return self.inner(x)


def arm(job: mw.Job) -> None:
    for module in job.module.modules():
        module.armed = True


class Together(models.Toy):
    """Each block ends after the other has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.block_a, self.block_b = Awaiting("a begun", "b begun"), Awaiting("b begun", "a begun")


def stepped(plan: Any, build: Any) -> bool:
    job = mw.parallelize(build, plan, batch=models.rows())
    job.step(models.rows())
    ARMED.update(module.begins for module in job.module.modules() if isinstance(module, Awaiting))
    try:
        job.step(models.rows())
    finally:
        ARMED.clear()
    return True


def test_branches_run_at_the_same_time(workers: LocalWorkers) -> None:
    assert workers.run(stepped, beside(1, 1), Together, ranks=2) == [True, True]


class Ahead(models.Tracks):
    """Two tracks; the first takes of the second. Its first block ends after the last of the other has begun."""

    def __init__(self) -> None:
        super().__init__(3)
        self.left[0] = Awaiting("left0 begun", "right2 begun")
        self.right[2] = Awaiting("right2 begun")


def test_a_branch_that_only_gives_does_not_wait_for_those_that_take(workers: LocalWorkers) -> None:
    plan = {"mesh": {"tp": 2}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1]"}}}
    assert workers.run(stepped, plan, Ahead, ranks=2) == [True, True]


class Ordered(torch.autograd.Function):
    """Says when it has ended, in both directions, and ends after some events."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, awaits: dict[str, list[str]]) -> Tensor:
        ctx.name, ctx.awaits = name, awaits
        wait_for(*awaits.get(name, ()))
        say(name)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        name = f"{ctx.name} back"
        wait_for(*ctx.awaits.get(name, ()))
        say(name)
        return g * 2, None, None


class Noted(models.MLP):
    def __init__(self, name: str, awaits: dict[str, list[str]]) -> None:
        super().__init__()
        self.name, self.awaits, self.armed = name, awaits, False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return Ordered.apply(x, self.name, self.awaits) if self.armed and not x.is_meta else x * 2


# A slow block → when it ends: after blocks of the other rank and its own, which have work of their own, do not wait for who
# is slow, and get what was made before.
AHEAD = {
    "right0": {"right0": ["left1"], "right0 back": ["left1 back", "left0 back"]},
    "left1": {"left1": ["right1"], "left1 back": ["right1 back", "right0 back"]},
}


@pytest.mark.parametrize("slow", AHEAD)
def test_no_branch_waits_before_it_needs_what_another_makes(slow: str, workers: LocalWorkers) -> None:
    plan = {"mesh": {"tp": 2}, "modules": {"left.*": {"on": "tp[0]"}, "right.*": {"on": "tp[1]"}}}
    build = functools.partial(models.Staged, functools.partial(Noted, awaits=AHEAD[slow]))
    assert workers.run(stepped, plan, build, ranks=2) == [True, True]


def trained(plan: Any, build: Any, batch: Any) -> list[float]:
    job = mw.parallelize(build, plan, batch=batch)
    optimizer = torch.optim.SGD(job.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        losses.append(job.step(batch).item())
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.float32 for p in job.parameters())
    return losses


@pytest.mark.parametrize(
    ("build", "plan"),
    [
        (models.Toy, beside(1, 2)),
        (models.Siamese, {"mesh": {"tp": 2}, "modules": {"tower": {"on": ["tp[0]", "tp[1]"]}}}),
        (models.Nested, on({"tp": 3}, inner="tp[0:2]", other="tp[2]", inner__left="tp[0]", inner__right="tp[1]")),
    ],
    ids=["toy", "siamese", "nested"],
)
def test_bfloat16_in_branches(build: Any, plan: Any, workers: LocalWorkers) -> None:
    ranks = plan["mesh"]["tp"]
    exact = workers.run(trained, plan, build, models.rows(), ranks=ranks)[0]
    low = workers.run(trained, {**plan, "precision": "bfloat16"}, build, models.rows(), ranks=ranks)[0]
    assert low == pytest.approx(exact, rel=0.05) and low != exact


def test_zero_bubble_around_branches(workers: LocalWorkers) -> None:
    plan = {**beside(1, 1), "mesh": {"pp": 2, "tp": 2}, "schedule": "zero_bubble"}
    same(models.Toy, models.rows(), plan, workers)


# --- on the same rank -------------------------------------------------------------------------------------------------

STREAMS = {"block_a": {"on": "stream[0]"}, "block_b": {"on": "stream[1]"}}


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2", "tp=2", "pp=2"])
def test_blocks_on_streams_are_right(mesh: str, workers: LocalWorkers) -> None:
    same(models.Toy, models.rows(), {"mesh": mesh, "modules": STREAMS}, workers)


def test_two_tracks_on_streams(workers: LocalWorkers) -> None:
    modules = {"left.*": {"on": "stream[0]"}, "right.*": {"on": "stream[1]"}}
    same(models.Tracks, models.rows(), {"mesh": "dp_shard=1", "modules": modules, "microbatches": 2}, workers)
    same(models.Contained, models.rows(), {"mesh": "dp_shard=1", "modules": {
        "both.branches.a": {"on": "stream[0]"}, "both.branches.b": {"on": "stream[1]"}}}, workers)  # fmt: skip


MEETING = threading.Barrier(2)


class Meeting(torch.autograd.Function):
    """Goes on when two of it have come, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        MEETING.wait(60)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        MEETING.wait(60)
        return g * 2


class Meets(models.MLP):
    armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return Meeting.apply(x) if self.armed and not x.is_meta else x * 2


class Pair(models.Toy):
    def __init__(self) -> None:
        super().__init__()
        self.block_a, self.block_b = Meets(), Meets()


def on_streams() -> tuple[str, ...]:
    job = mw.parallelize(Pair, {"mesh": "dp_shard=1", "modules": STREAMS}, batch=models.rows())
    job.step(models.rows())
    arm(job)
    job.step(models.rows())
    return job.notes


def test_blocks_on_streams_run_at_the_same_time_forward_and_backward(workers: LocalWorkers) -> None:
    (notes,) = workers.run(on_streams, ranks=1)
    assert any("run in threads" in note for note in notes)


def test_blocks_on_streams_that_follow_each_other_are_refused() -> None:
    plan = {"mesh": "dp_shard=1", "modules": {"a": {"on": "stream[0]"}, "b": {"on": "stream[1]"}}}
    with pytest.raises(mw.PlanError, match="no block on another stream that could run at the same time"):
        mw.make_recipe(models.Chain, plan, models.rows())


# --- the container ----------------------------------------------------------------------------------------------------

JOINS = {join: join for join in ("sum", "mean", "cat", "stack", "tuple", "dict")} | {"product": models.product}


@pytest.mark.parametrize(
    "join",
    [pytest.param(JOINS[k], id=k, marks=[pytest.mark.proof] if k in ("mean", "stack", "tuple") else []) for k in JOINS],
)
def test_a_container_of_branches(join: Any, workers: LocalWorkers) -> None:
    plan = on({"tp": 3}, both__branches__a="tp[0]", both__branches__b="tp[1:3]")
    build = functools.partial(models.Contained, join, 0 if join == "stack" else -1)
    same(build, models.rows(), plan, workers)


def test_a_container_takes_known_joins_only() -> None:
    with pytest.raises(ValueError, match="one of sum, mean, cat"):
        mw.Branches({"a": torch.nn.Linear(1, 1)}, join="plus")
    with pytest.raises(ValueError, match="at least one"):
        mw.Branches({})


# --- found -----------------------------------------------------------------------------------------------------------

FOUND = {
    "Toy": (models.Toy, models.rows(), {"block_a": "tp[0:2]", "block_b": "tp[2:3]"}),
    "Three": (models.Three, models.rows(), {"block_a": "tp[0:1]", "block_b": "tp[1:2]", "block_c": "tp[2:3]"}),
    "Inception": (
        models.Inception, models.images(),
        {"one": "tp[0:1]", "reduce3": "tp[1:2]", "conv3": "tp[1:2]", "pool": "tp[2:3]", "project": "tp[2:3]"},
    ),
    "Towers": (
        models.Towers, models.pairs(),
        {"words": "tp[0:2]", "text": "tp[0:2]", "text_out": "tp[0:2]", "image": "tp[2:3]", "image_out": "tp[2:3]"},
    ),
    "Siamese": (models.Siamese, models.rows(), {"tower": ("tp[0:2]", "tp[2:3]")}),
    "Evoformer": (
        models.Evoformer, models.alignment(),
        {f"{name}.{i}": on for i in range(2) for name, on in
         {"rows": "tp[0:2]", "outer": "tp[0:2]", "triangles": "tp[2:3]"}.items()},
    ),
    "Tracks": (
        models.Tracks, models.rows(),
        {"left.0": "tp[0:1]", "left.1": "tp[0:1]", "right.0": "tp[1:3]", "right.1": "tp[1:3]"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_can_run_at_the_same_time_is_found(name: str, workers: LocalWorkers) -> None:
    build, batch, expected = FOUND[name]
    plan = {"mesh": {"tp": 3}, "branches": "auto"}
    recipe = mw.make_recipe(build, plan, batch)
    placed = {m: tuple(recipe.places[p].on for p in places) for m, places in recipe.placed.items()}
    assert placed == {m: on if isinstance(on, tuple) else (on,) for m, on in expected.items()}
    same(build, batch, plan, workers)


def test_only_within_a_module_that_says_auto() -> None:
    recipe = mw.make_recipe(
        models.Parallel, {"mesh": "tp=2", "modules": {"layers.1": {"on": "auto"}}}, models.rows(6, 5)
    )
    assert set(recipe.placed) == {"layers.1.attn", "layers.1.mlp"}


def test_nothing_to_find_is_said() -> None:
    recipe = mw.make_recipe(models.Chain, {"mesh": "tp=2", "branches": "auto"}, models.rows())
    assert not recipe.branches and any("nothing in this model" in note for note in recipe.notes)


def test_what_stages_would_share_is_not_found_in_a_pipeline(workers: LocalWorkers) -> None:
    plan = {"mesh": {"pp": 2, "tp": 2}, "branches": "auto", "microbatches": 2}
    report = same(models.Borrowed, models.rows(6, 5), plan, workers)
    assert report.recipe is not None and {m.split(".")[1] for m in report.recipe.placed} == {"1", "2"}


def test_one_region_however_it_is_written(workers: LocalWorkers) -> None:
    written = on({"tp": 2}, both__branches__a="tp[0]", both__branches__b="tp[1]")
    by_container = workers.run(facts, written, models.Contained, models.rows(), ranks=2)
    by_hand = workers.run(facts, beside(1, 1), models.Toy, models.rows(), ranks=2)
    assert [f["counted"]["fork"] for f in by_container] == [f["counted"]["fork"] for f in by_hand] == [(1, 1152)] * 2
    assert [f["counted"]["join"] for f in by_container] == [f["counted"]["join"] for f in by_hand] == [(1, 1152)] * 2


class Product(models.MLP):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a * b)


class Exchanged(models.Toy):
    """Three branches; what the first gives only the second takes, in the next region."""

    def __init__(self) -> None:
        super().__init__()
        self.block_c, self.block_d, self.block_e = models.MLP(), Product(), models.MLP(17)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        a, b, c = self.block_a(x), self.block_b(x), self.block_c(x)
        d, e = self.block_d(a, b), self.block_e(c)
        return {"loss": torch.nn.functional.mse_loss(self.head(d + e), y)}


def test_what_one_branch_gives_another_is_sent_to_it_alone(workers: LocalWorkers) -> None:
    plan = on({"tp": 4}, block_a="tp[0]", block_b="tp[1:3]", block_c="tp[3]", block_d="tp[1:3]", block_e="tp[3]")
    same(Exchanged, models.rows(), plan, workers)
    value = models.ROWS * models.DIM * 4
    found = workers.run(facts, plan, Exchanged, models.rows(), ranks=4)
    # First join: a to the two ranks of b alone; nothing of b and c. Second: d from two ranks to two others, e to three.
    assert [f["counted"]["join"] for f in found] == [(2, 2 * value), (2, value), (2, value), (2, 3 * value)]


def test_two_tracks_send_each_other_what_they_take_once_a_block(workers: LocalWorkers) -> None:
    build, plan = functools.partial(models.Mutual, 3), WAYS["two tracks that exchange"][2]
    value = models.ROWS * models.DIM * 4
    for found in workers.run(facts, plan, build, models.rows(), ranks=2):
        # After each block one value each way, and at the end what the trunk takes; gradients of the first two blocks' back.
        assert (found["counted"]["join"], found["counted"]["fork"]) == ((4, 4 * value), (2, 2 * value))


def test_what_comes_after_the_branches_is_not_drawn_into_one(workers: LocalWorkers) -> None:
    for found in workers.run(facts, beside(1, 1), models.Residuals, models.rows(), ranks=2):
        assert (found["counted"]["join"][0], found["counted"]["fork"][0]) == (1, 1)


def test_slices_that_overlap(workers: LocalWorkers) -> None:
    modules = {"block_a": {"on": "tp[0:2]"}, "block_b": {"on": "tp[1:3]"}}
    same(models.Toy, models.rows(), {"mesh": {"tp": 3}, "modules": modules}, workers)


def test_ddp_for_one_branch_and_fsdp_for_another_on_the_same_ranks(workers: LocalWorkers) -> None:
    within = {
        "block_a": {"on": "tp[0:2]", "mesh": {"dp_replicate": 2}}, "block_b": {"on": "tp[0:2]", "mesh": {"dp_shard": 2}}
    }  # fmt: skip
    same(models.Toy, models.rows(), {"mesh": {"tp": 2}, "modules": within}, workers)
    over = {"block_a": {"dp": "replicate"}, "block_b": {"dp": "shard"}}
    same(models.Toy, models.rows(), {"mesh": {"dp_shard": 2}, "modules": over}, workers)


# --- one generator of the model's own, in several branches ------------------------------------------------------------


@pytest.mark.parametrize("which", ["both", "one"])
@pytest.mark.parametrize("plan", [beside(1, 1), beside(1, 2, b={"dp": 2})], ids=["1+1", "1+2"])
def test_branches_draw_from_one_generator_what_one_device_draws(which: str, plan: Any, workers: LocalWorkers) -> None:
    same(functools.partial(models.NoisyToy, which), models.rows(), plan, workers)


def test_a_generator_is_told_that_cannot_be_drawn_from_in_several_branches() -> None:
    with pytest.raises(
        mw.PlanError, match=r"block_a(.|\n)*from a generator that other ranks draw from too \(poisson, .*branching"
    ) as raised:
        mw.make_recipe(functools.partial(models.NoisyToy, "both", by_values=True), beside(1, 1), models.rows())
    assert len(raised.value.findings) == 1
