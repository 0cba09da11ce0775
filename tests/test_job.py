"""A job trains as one process would: rows, means, initial values, dropout, precision, what it gives back."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.workers.pool import WorkerError
from zoo import ZOO

LAYOUTS = ["tp=2", "tp=3", "dp_shard=2", "dp_shard=3", "dp_replicate=2", "dp_shard=2,tp=2", "tp=2,dp_shard=2"]


def job_of(name, plan, **options):
    entry = ZOO[name]
    return mw.parallelize(entry.build, plan, batch=entry.batch(), **options)


def plain(name, seed=0):
    torch.manual_seed(seed)
    return ZOO[name].build()


def ranks_of(plan):
    job = job_of("nanogpt", plan)
    return job.rank, job.recipe.mesh.coordinate(job.rank)


def test_a_job_knows_its_rank(workers):
    found = workers.run(ranks_of, "tp=2,dp_shard=2", ranks=4)
    assert [rank for rank, _ in found] == [0, 1, 2, 3]
    assert found[2][1] == {"tp": 1, "dp_shard": 0}


# --- initial values -------------------------------------------------------------------------------------------------


def state_of(name, plan):
    job = job_of(name, plan)
    assert not [note for note in job.notes if "does not repeat itself" in note], "a rank drew other values than rank 0"
    return job.full_state_dict()


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name in ("nanogpt", "odd_sizes") for plan in LAYOUTS]
    + [
        pytest.param(name, plan, marks=[pytest.mark.proof] if i else [])
        for name in ("llama", "phi3_like", "batchnorm")
        for i, plan in enumerate(LAYOUTS)
    ],
)
def test_weights_are_those_of_one_process_bitwise(name, plan, workers):
    size = mw.Mesh.parse(plan).size
    whole = workers.run(state_of, name, plan, ranks=size)
    assert all(not w for w in whole[1:]), "only rank 0 has the whole state"
    expected = plain(name).state_dict()
    assert set(whole[0]) == set(expected)
    for key, value in expected.items():
        assert torch.equal(whole[0][key], value), key


def held_bytes(name, plan):
    job = job_of(name, plan)
    return sum(local_tensor(p).numel() for p in job.parameters())


@pytest.mark.parametrize(
    ("mesh", "ranks"), [("dp_shard=2", 2), pytest.param("dp_shard=2,tp=2", 4, marks=pytest.mark.proof)]
)
def test_ranks_hold_their_share_only(mesh, ranks, workers):
    total = sum(p.numel() for p in plain("llama").parameters())
    held = workers.run(held_bytes, "llama", mesh, ranks=ranks)
    assert all(h < total * 1.2 / ranks for h in held)
    assert sum(held) >= total


# --- rows ------------------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 1)

    def forward(self, x, y):
        out = self.down(F.gelu(self.up(x)))
        return SimpleNamespace(loss=F.mse_loss(out, y), out=out)


ROWS = 22


def dataset():
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(ROWS, 6, generator=g), "y": torch.randn(ROWS, 1, generator=g)}


def trained(plan, microbatches=1):
    sample = {k: v[:4] for k, v in dataset().items()}
    job = mw.parallelize(
        Regression, mw.Plan(plan, microbatches=microbatches), batch=sample, dtype=torch.float64, transform=None
    )
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    losses, norms = [], []
    data = {k: v.double() for k, v in dataset().items()}
    for batch in job.batches(data, global_batch=8 if "3" not in plan else 6, seed=3, epochs=2):
        losses.append(float(job.step(batch)))
        norms.append(float(job.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, float(job.evaluate(next(iter(job.batches(data, 12, shuffle=False))))), job.full_state_dict()


def by_hand(global_batch):
    torch.manual_seed(0)
    model = Regression().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = {k: v.double() for k, v in dataset().items()}
    losses = []
    for epoch in range(2):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3 * 1_000_003 + epoch))
        for rows in order.split(global_batch):
            loss = model(**{k: v[rows] for k, v in data.items()}).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, float(model(**{k: v[:12] for k, v in data.items()}).loss), model.state_dict()


@pytest.mark.parametrize("plan,microbatches", [("tp=2", 1), ("dp_shard=2", 1), ("dp_shard=4", 1), ("dp_shard=2,tp=2", 2),
                                               ("dp_replicate=2,dp_shard=2", 1), ("dp_shard=3", 2)])  # fmt: skip
def test_the_same_losses_in_every_layout_ragged_last_batch_included(plan, microbatches, workers):
    losses, _, evaluated, state = workers.run(trained, plan, microbatches, ranks=mw.Mesh.parse(plan).size)[0]
    expected, value, weights = by_hand(6 if "3" in plan else 8)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert evaluated == pytest.approx(value, rel=1e-9)
    for key, tensor in weights.items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-9, atol=1e-12)


def one_row_short(plan):
    data = {k: v[:1].double() for k, v in dataset().items()}
    job = mw.parallelize(Regression, plan, batch={k: v[:4] for k, v in dataset().items()}, dtype=torch.float64)
    job.step({k: v[:2].double() for k, v in dataset().items()})
    for p in job.parameters():
        p.grad = None
    mine = {k: v[: 1 if job.rank == 0 else 0] for k, v in data.items()}
    loss = float(job.step(mine))
    return loss, {line.name: g for line, g in job.full_gradients()}


def test_a_rank_without_rows_takes_part_and_counts_nothing(workers):
    loss, grads = workers.run(one_row_short, "dp_shard=2", ranks=2)[0]
    torch.manual_seed(0)
    model = Regression().double()
    expected = model(**{k: v[:1].double() for k, v in dataset().items()}).loss
    expected.backward()
    assert loss == pytest.approx(float(expected), rel=1e-9)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-9, atol=1e-12)


class Sums(Regression):
    def forward(self, x, y):
        return SimpleNamespace(loss=((self.down(F.gelu(self.up(x))) - y) ** 2).sum())


def kind_of_rows(build, plan):
    data = {k: v[:8].double() for k, v in dataset().items()}
    job = mw.parallelize(build, plan, batch=data, dtype=torch.float64)
    start = job.rank * 4
    loss = float(job.step({k: v[start : start + 4] for k, v in data.items()}))
    return loss, job.rows, job.notes


def test_a_loss_that_is_a_sum_stays_a_sum(workers):
    loss, rows, _ = workers.run(kind_of_rows, Sums, "dp_shard=2", ranks=2)[0]
    torch.manual_seed(0)
    expected = Sums().double()(**{k: v[:8].double() for k, v in dataset().items()}).loss
    assert rows == "sum"
    assert loss == pytest.approx(float(expected), rel=1e-9)


class Normed(Regression):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x, y):
        return SimpleNamespace(loss=F.mse_loss(self.down(self.norm(self.up(x))), y))


def test_coupled_rows_are_found_and_said(workers):
    loss, rows, notes = workers.run(kind_of_rows, Normed, "dp_shard=2", ranks=2)[0]
    torch.manual_seed(0)
    expected = Normed().double()(**{k: v[:8].double() for k, v in dataset().items()}).loss
    assert rows == "coupled"
    assert any("couples the rows" in n for n in notes)
    assert loss == pytest.approx(float(expected), rel=1e-9)


class Unreduced(Regression):
    """A loss of its rows' mean that keeps its dim, or of each row."""

    def __init__(self, each=False):
        super().__init__()
        self.each = each

    def forward(self, x, y):
        losses = super().forward(x, y).loss * torch.ones(len(x), 1, dtype=x.dtype)
        return SimpleNamespace(loss=losses if self.each else losses.mean(0))


def test_a_loss_of_one_element_in_a_dim_is_a_number(workers):
    loss, rows, _ = workers.run(kind_of_rows, Unreduced, "dp_shard=2", ranks=2)[0]
    assert (loss, rows) == workers.run(kind_of_rows, Regression, "dp_shard=2", ranks=2)[0][:2]


@pytest.mark.parametrize("plan", ["dp_shard=2", "tp=2", "pp=2"])
def test_a_loss_of_each_row_is_an_error_of_the_plan(plan):
    with pytest.raises(mw.PlanError, match=r"one number.*\n.*loss.mean\(\)"):
        mw.make_recipe(partial(Unreduced, True), plan, {k: v[:4] for k, v in dataset().items()})


def test_rows_split_is_the_plan_to_say(workers):
    plan = {"mesh": {"dp_shard": 2}, "rows": "split"}
    loss, rows, _ = workers.run(kind_of_rows, Normed, plan, ranks=2)[0]
    torch.manual_seed(0)
    model = Normed().double()
    halves = [{k: v[i : i + 4].double() for k, v in dataset().items()} for i in (0, 4)]
    expected = sum(float(copy.deepcopy(model)(**h).loss) for h in halves) / 2
    assert rows == "split"
    assert loss == pytest.approx(expected, rel=1e-9)


# --- dropout, precision, outputs ----------------------------------------------------------------------------------------


def loss_and_next_number(name, plan):
    job = job_of(name, plan)
    batch = ZOO[name].batch()
    torch.manual_seed(5)
    loss = float(job.step(batch))
    return loss, float(torch.rand(())), {line.name: g for line, g in job.full_gradients()}


@pytest.mark.parametrize("name", ["dropout_manual", "dropout_blocks"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_cut_dropout_draws_slices_of_the_mask_of_one_device(name, ranks, workers):
    results = workers.run(loss_and_next_number, name, f"tp={ranks}", ranks=ranks)
    model, batch = plain(name), ZOO[name].batch()
    torch.manual_seed(5)
    loss = model(**batch).loss
    loss.backward()
    after = float(torch.rand(()))
    assert {r[1] for r in results} == {after}, "every rank's stream is where one device's would be"
    assert results[0][0] == pytest.approx(float(loss), rel=1e-5)
    for key, p in model.named_parameters():
        torch.testing.assert_close(results[0][2][key], p.grad, rtol=1e-3, atol=1e-6)


def dropout_in_attention(plan):
    job = job_of("dropout", plan)
    losses = [float(job.step(ZOO["dropout"].batch())) for _ in range(2)]
    return losses, float(torch.rand(()))


def test_dropout_inside_attention_keeps_the_trunk_in_step(workers):
    results = workers.run(dropout_in_attention, "tp=2", ranks=2)
    assert results[0] == results[1]
    assert results[0][0][0] != results[0][0][1], "two steps draw two masks"


def masks_of_data_ranks(plan):
    mw.parallelize(Regression, plan, batch={k: v[:4] for k, v in dataset().items()})
    return float(torch.rand(()))


def test_data_ranks_draw_different_numbers_and_tp_ranks_the_same(workers):
    a, b, c, d = workers.run(masks_of_data_ranks, "dp_shard=2,tp=2", ranks=4)
    assert a == b != c == d


def low_precision(plan):
    job = job_of("llama", {"mesh": plan, "precision": "bfloat16"})
    batch = ZOO["llama"].batch()
    rows = batch["input_ids"].shape[0] // job.recipe.mesh.data_size
    start = job.recipe.mesh.data_index(job.rank) * rows
    mine = {k: v[start : start + rows] for k, v in batch.items()}
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        losses.append(float(job.step(mine)))
        optimizer.step()
        kinds = {(p.dtype, p.grad.dtype) for p in job.parameters()}
        optimizer.zero_grad()
    return losses, kinds


@pytest.mark.parametrize("plan", ["dp_shard=2", "tp=2", pytest.param("dp_shard=2,tp=2", marks=pytest.mark.proof)])
def test_bfloat16_computes_low_and_keeps_parameters_and_gradients_in_float32(plan, workers):
    losses, kinds = workers.run(low_precision, plan, ranks=mw.Mesh.parse(plan).size)[0]
    assert kinds == {(torch.float32, torch.float32)}
    exact = float(plain("llama")(**ZOO["llama"].batch()).loss)
    assert losses[0] == pytest.approx(exact, rel=2e-2)
    assert losses[0] != pytest.approx(exact, rel=1e-7), "computed in bfloat16"
    assert losses[-1] < losses[0] * 0.9


def whole_output(plan):
    job = job_of("llama", plan)
    return job(**ZOO["llama"].batch()).logits


def test_the_output_is_whole(workers):
    expected = plain("llama")(**ZOO["llama"].batch()).logits
    for logits in workers.run(whole_output, "tp=2", ranks=2):
        torch.testing.assert_close(logits.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


# --- what a plan says -----------------------------------------------------------------------------------------------------


class Foo(nn.Module):
    """The forum's model (document 1)."""

    def __init__(self):
        super().__init__()
        self.block_a = nn.Linear(256, 32)
        self.block_b = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64), nn.Linear(64, 32))

    def forward(self, x):
        return SimpleNamespace(loss=(self.block_a(x) + self.block_b(x)).square().mean())


MIXED = {"mesh": {"dp_shard": 2, "tp": 2}, "modules": {"block_a": {"dp": "replicate"}, "block_b": {"dp": "shard"}}}


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}])
def test_one_block_replicated_and_another_sharded_over_the_same_ranks(mesh, workers):
    plan = MIXED | {"mesh": {("dp_shard" if k == "dp" else k): v for k, v in mesh.items()}}
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    report = mw.check(Foo, {"x": x}, plan, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    lines = report.recipe.by_name
    assert lines["block_a.weight"].data == "replicate"
    assert lines["block_b.0.weight"].data == "shard"
    # the ranks that differ on the data axis alone
    other = 2 if len(mesh) > 1 else 1
    assert report.recipe.held(lines["block_a.bias"], 0) == report.recipe.held(lines["block_a.bias"], other)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return SimpleNamespace(loss=self.b(torch.tanh(self.a(x))).square().mean())


@pytest.mark.parametrize("a", ["column", "row", "replicate", "shard:0", "shard:1"])
@pytest.mark.parametrize("b", ["column", "row", "replicate", "shard:0", "shard:1"])
def test_any_style_a_person_asks_for_is_right(a, b, workers):
    plan = {"mesh": {"tp": 2}, "modules": {"a.weight": {"tp": a}, "b.weight": {"tp": b}}}
    report = mw.check(
        Pair,
        {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))},
        plan,
        workers=workers,
        dtype=torch.float64,
    )
    assert report.passed, str(report)
    dims = {"column": 0, "row": 1, "replicate": None, "shard:0": 0, "shard:1": 1}
    for name, style in (("a.weight", a), ("b.weight", b)):
        assert getattr(report.recipe.by_name[name].tp, "dim", None) == dims[style], report.recipe.by_name[name]


@pytest.mark.parametrize(
    "mesh", [{"tp": 1}, {"dp_shard": 1}, {"dp_shard": 1, "tp": 2}, {"dp_replicate": 1, "dp_shard": 2}]
)
def test_axes_of_one_rank(mesh, workers):
    report = mw.check(
        ZOO["nanogpt"].build, ZOO["nanogpt"].batch(), {"mesh": mesh}, workers=workers, dtype=torch.float64
    )
    assert report.passed, str(report)


# --- what goes wrong --------------------------------------------------------------------------------------------------------


def test_a_mesh_that_is_not_the_world_is_one_clear_error(workers):
    with pytest.raises(WorkerError) as error:
        workers.run(state_of, "mlp", "dp_shard=4", ranks=2)
    text = str(error.value)
    assert "4 ranks" in text and "2 processes" in text and "torchrun --nproc-per-node 4" in text


def test_everything_wrong_is_said_at_once():
    batch = {k: v[:2] for k, v in dataset().items()}
    plan = mw.Plan("dp_shard=4,tp=64", {"upp": {"tp": "row"}})
    with pytest.raises(mw.PlanError) as error:
        mw.make_recipe(Regression, plan, batch)
    places = [f.where for f in error.value.findings]
    assert places == ["modules.upp", "batch", "mesh.tp"]
    assert "up" in str(error.value)


def test_a_global_batch_that_does_not_divide():
    from meshwright.runtime.rows.batches import check_global_batch

    with pytest.raises(mw.PlanError, match="multiple of 8"):
        check_global_batch(30, mw.Mesh.parse("dp_shard=4,tp=2"), 2)


class Registered(nn.Module):
    """Finds what is known of it by the name of its class, as some libraries do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * KNOWN[str(type(self))]


KNOWN = {str(Registered): 2.0}


class Registry(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Registered(), Registered())

    def forward(self, x):
        return {"loss": self.blocks(x).square().mean()}


def test_a_module_is_known_by_the_name_of_its_class(workers):
    for plan in ("dp_shard=2", "dp_replicate=2", "dp_shard=2,tp=2"):
        report = mw.check(Registry, {"x": torch.randn(8, 4)}, plan, workers=workers, dtype=torch.float64)
        assert report.passed, str(report)
