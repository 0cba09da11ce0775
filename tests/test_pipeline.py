"""Pipelines: equal to one process in every layout and schedule; what a stage holds; what happens when a rank dies."""

from __future__ import annotations

import functools
import os
import signal
import weakref

import pytest
import torch

import meshwright as mw
from meshwright.runtime.pipeline import transfers
from meshwright.runtime.rows.microbatches import rows_of, take_rows
from meshwright.schedule import make_schedule, most_in_flight
from meshwright.submesh import bounds
from meshwright.workers.pool import WorkerError, local_workers
from zoo import ZOO

ISSUE = [name for name, entry in ZOO.items() if entry.family == "issue"]
LAYOUTS = {
    "pp2": {"mesh": {"pp": 2}},
    "pp4": {"mesh": {"pp": 4}},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}},
    "pp2-dp_shard2": {"mesh": {"pp": 2, "dp_shard": 2}},
    "pp2-dp_shard2-tp2": {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}},
}
# What continuous integration runs: models that are unlike each other in two stages, other layouts with one that needs no
# package (t5 is among the settings of `make proof`; models as people write them are over pp and dp_shard).
REST = {"bert", "clip", "gpt2", "t5", "vit", "mixtral", "nanogpt_manual", "transformer_encoder"}
QUICK = {("pp2", n) for n in ISSUE if n not in REST} | {("pp4", "nanogpt"), ("pp2-dp_shard2-tp2", "nanogpt")}


def checked(name, plan, workers):
    entry = ZOO[name]
    dtype = torch.float64 if entry.float64 else torch.float32
    report = mw.check(entry.build, entry.batch(), plan, workers=workers, dtype=dtype)
    assert report.passed, str(report)
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.tolerance <= (1e-9 if entry.float64 else 1e-4)
    return report


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(k, n, marks=() if (k, n) in QUICK else pytest.mark.proof) for k in LAYOUTS for n in ISSUE],
)
def test_the_same_as_one_process(layout, name, workers):
    report = checked(name, LAYOUTS[layout], workers)
    assert len(report.recipe.stages) == LAYOUTS[layout]["mesh"]["pp"]
    assert {s for line in report.recipe for s in line.stages} <= set(range(len(report.recipe.stages)))


SETTINGS = {
    "gpipe": {"mesh": {"pp": 2}, "schedule": "gpipe", "microbatches": 4},
    "interleaved": {"mesh": {"pp": 2}, "schedule": "interleaved", "microbatches": 4},
    "zero_bubble": {"mesh": {"pp": 2}, "schedule": "zero_bubble", "microbatches": 4},
    "zero_bubble, sharded": {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "zero_bubble", "microbatches": 2},
    "interleaved, sharded": {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved", "microbatches": 2},
    "zero_bubble, cut": {"mesh": {"pp": 2, "tp": 2}, "schedule": "zero_bubble", "microbatches": 2},
    "one microbatch": {"mesh": {"pp": 2}, "microbatches": 1},
    "pieces that do not divide": {"mesh": {"pp": 2, "dp_shard": 2}, "microbatches": 3},
    "recompute": {"mesh": {"pp": 2}, "recompute": "blocks", "microbatches": 2},
    "recompute asked of halves": {
        "mesh": {"pp": 2},
        "recompute": "blocks",
        "schedule": "zero_bubble",
        "microbatches": 2,
    },
    "gathered for each microbatch": {
        "mesh": {"pp": 2, "dp_shard": 2},
        "reshard_after_forward": True,
        "microbatches": 2,
    },
    "replicated": {"mesh": {"dp_replicate": 2, "pp": 2}, "microbatches": 2},
    "pp inside": {"mesh": {"tp": 2, "pp": 2}, "microbatches": 2},
    "sequence": {"mesh": {"pp": 2, "tp": 2}, "sequence_parallel": True, "microbatches": 2},
    "rows whole": {"mesh": {"pp": 2, "dp_shard": 2}, "rows": "whole"},
}


OFTEN = {
    ("nanogpt", s) for s in SETTINGS.keys() - {"zero_bubble, cut", "interleaved, sharded", "replicated", "pp inside"}
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(n, s, marks=() if (n, s) in OFTEN else pytest.mark.proof)
        for n in ("nanogpt", "t5", "llama")
        for s in SETTINGS
    ],
)
def test_schedules_and_settings(name, setting, workers):
    checked(name, SETTINGS[setting], workers)


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        pytest.param(m, s, marks=() if (m, s) == ("tp=2", "interleaved") else pytest.mark.proof)
        for m in ("tp=2", "dp_shard=2")
        for s in ("gpipe", "interleaved", "zero_bubble")
    ],
)
def test_a_schedule_without_a_pipeline_has_no_effect_and_is_noted(mesh, schedule, workers):
    plan = {"mesh": mesh, "schedule": schedule, "stages_per_rank": 1, "microbatches": 2}
    report = checked("nanogpt", plan, workers)
    (note,) = [note for note in report.recipe.notes if "without effect" in note]
    assert schedule in note and "stages_per_rank" in note and "no pipeline" in note
    entry = ZOO["nanogpt"]
    same = {"mesh": mesh, "microbatches": 2}
    predicted, plain = (mw.predict(entry.build, entry.batch(), p) for p in (plan, same))
    assert predicted.seconds.seconds == plain.seconds.seconds and predicted.peak == plain.peak
    assert not any("without effect" in note for note in plain.notes)


def gradients_in_halves(schedule, precision):
    """Of a step with bfloat16, in the float32 in which they are reduced."""
    entry = ZOO["nanogpt"]
    plan = {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": schedule, "microbatches": 2, "precision": precision}
    job = mw.parallelize(entry.build, plan, batch=entry.batch())
    data = job.recipe.mesh.data_size
    job.step(take_rows(entry.batch(), 0, rows_of(entry.batch()) // data))
    return {line.name: g for line, g in job.full_gradients() if g is not None}


def test_weight_gradients_apart_add_up_in_the_type_of_the_reduction(workers):
    """FSDP2 raised: gradients of weights stayed in bfloat16, those of biases were float32."""
    apart, together = (
        workers.run(gradients_in_halves, schedule, "bfloat16", ranks=4)[0] for schedule in ("zero_bubble", "1f1b")
    )
    assert apart.keys() == together.keys()
    for name, g in together.items():
        assert apart[name].dtype == torch.float32
        torch.testing.assert_close(apart[name], g, rtol=0, atol=0.02 * float(g.abs().max()), msg=name)


# Tied across stages, U-Net skips, stashes, an in-place residual, branches on values, statistics of the batch, experts,
# outputs of any structure, shared layers.
ODD = ["unet", "stash", "in_place", "branch_on_activation", "branch_on_parameter", "batchnorm", "experts", "structures", "albert",
       "custom_function", "lstm", "codebook"]  # fmt: skip


ODD_OFTEN = ["stash", "in_place", "branch_on_parameter", "codebook"]


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        pytest.param(p, n, marks=() if p == "pp=2,dp_shard=2" and n in ODD_OFTEN else pytest.mark.proof)
        for p in ("pp=2", "pp=2,dp_shard=2")
        for n in ODD
    ],
)
def test_models_as_people_write_them(name, plan, workers):
    checked(name, plan, workers)


@pytest.mark.proof
@pytest.mark.parametrize("plan", ["pp=2", "pp=2,tp=2", "pp=2,dp_shard=2"])
@pytest.mark.parametrize("name", [n for n, entry in ZOO.items() if entry.family == "odd"])
def test_every_model_of_the_zoo(name, plan, workers):
    checked(name, plan, workers)


# --- what a stage holds -----------------------------------------------------------------------------------------------


def held(plan):
    """On each rank: bytes of parameters that are there, their names, what the recipe says, what the optimizer has."""
    job = mw.parallelize(ZOO["llama"].build, plan, batch=ZOO["llama"].batch())
    there = [n for n, p in job.module.named_parameters() if not p.is_meta]
    planned = [line.name for line in job.recipe if job.recipe.holds(line, job.rank)]
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return there, planned, [n for n, _ in job.named_parameters()], count, [s.parameters for s in job.recipe.stages]


class Moved(torch.nn.Module):
    """Asks for parameters on the device of what it has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.early, self.late = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.first(x * self.early.to(x.device).exp())
        x = self.second(x)
        return {"loss": (x * self.late.to(x.device).exp()).square().mean()}


def test_parameters_that_are_moved_are_on_one_stage(workers):
    report = mw.check(Moved, {"x": torch.randn(8, 6)}, {"mesh": {"pp": 2}}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert [report.recipe.by_name[n].stages for n in ("early", "late")] == [(0,), (1,)]


class Cast(Moved):
    """Casts a module of its own in its forward, as routers do that compute in float32."""

    def forward(self, x):
        x = self.first(x * self.early)
        self.second = self.second.to(torch.float32)
        x = self.second(x.float()).to(x.dtype)
        return {"loss": (x * self.late).square().mean()}


def test_a_module_that_its_forward_casts_is_on_one_stage(workers):
    report = mw.check(
        Cast, {"x": torch.randn(8, 6)}, {"mesh": {"pp": 2, "dp_shard": 2}}, workers=workers, dtype=torch.float64
    )
    assert report.passed, str(report)
    assert report.recipe.by_name["second.weight"].stages in ((0,), (1,)), "to ask whether it can be cast reads no value"


def test_parameters_of_other_stages_take_no_memory(workers):
    ranks = workers.run(held, "pp=2", ranks=2)
    for stage, (there, planned, named, count, parameters) in enumerate(ranks):
        assert sorted(there) == sorted(planned) == sorted(named)
        assert count == parameters[stage]
    assert not set(ranks[0][0]) & set(ranks[1][0])


class Live:
    """Bytes of activations that autograd has saved and not let go of."""

    def __init__(self, module):
        self.now = self.most = 0
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters() if not p.is_meta}

    def pack(self, t):
        if t.is_meta or t.untyped_storage().data_ptr() in self.weights:  # meta: the forward that was recorded
            return t
        kept = _Kept(t)
        size = t.numel() * t.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self._gone, size)
        return kept

    def _gone(self, size):
        self.now -= size

    def unpack(self, kept):
        return kept.tensor if isinstance(kept, _Kept) else kept


class _Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def activations(schedule, microbatches):
    entry = ZOO["nanogpt"]
    batch = {k: v.repeat(8, *[1] * (v.dim() - 1))[:16] for k, v in entry.batch().items()}
    plan = {"mesh": {"pp": 2}, "schedule": schedule, "microbatches": microbatches, "rows": "split"}
    job = mw.parallelize(entry.build, plan, batch=batch)
    live = Live(job.module)
    with torch.autograd.graph.saved_tensors_hooks(live.pack, live.unpack):
        job.step(batch)
    return live.most


def test_activations_in_flight_are_those_of_the_schedule(workers):
    """16 rows in 8 microbatches: GPipe holds all 8 on each rank; 1F1B 2 on the first, 1 on the last."""
    gpipe, one = (workers.run(activations, s, 8, ranks=2) for s in ("gpipe", "1f1b"))
    for rank in (0, 1):
        plans = [most_in_flight(make_schedule(s, 2, 2, 8), rank) for s in ("gpipe", "1f1b")]
        assert plans == [8, 2 - rank]
        measured = gpipe[rank] / one[rank]
        assert measured == pytest.approx(plans[0] / plans[1], rel=0.25)


# --- a job ------------------------------------------------------------------------------------------------------------


def trained(name, mesh, steps=3):
    entry = ZOO[name]
    batch = entry.batch()
    job = mw.parallelize(entry.build, {"mesh": mesh, "precision": "float64"}, batch=batch)
    mesh = job.recipe.mesh
    mine = take_rows(batch, *bounds(rows_of(batch), mesh.data_size)[mesh.data_index(job.rank)])
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(job.step(mine).item())
        norms.append(job.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    output = job(**mine)
    state = job.full_state_dict()
    logits = None if output is None else output.logits.detach()
    return losses, norms, job.evaluate(mine).item(), logits, state


@pytest.fixture(scope="module")
def alone(workers):
    return functools.cache(lambda name: workers.run(trained, name, "tp=1", ranks=1)[0])


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("nanogpt", "pp=2"),
        *(pytest.param("t5", p, marks=pytest.mark.proof) for p in ("pp=2", "pp=2,tp=2", "pp=2,dp_shard=2", "pp=4")),
    ],
)
def test_training_norms_evaluation_output_and_state(name, plan, workers, alone):
    ranks = workers.run(trained, name, plan, ranks=mw.Mesh.parse(plan).size)
    losses, norms, evaluated, logits, state = alone(name)
    for found in ranks:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
        assert found[2] == pytest.approx(evaluated, rel=1e-9)
    assert ranks[0][4].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(ranks[0][4][name], value, rtol=1e-7, atol=1e-8, msg=lambda text: f"{name}: {text}")  # noqa: B023
    mesh = mw.Mesh.parse(plan)
    rows = bounds(len(logits), mesh.data_size)
    for rank, (*_, output, _) in enumerate(ranks):
        last = mesh.coordinate(rank)["pp"] == mesh.axis_size("pp") - 1
        assert (output is not None) == last
        if last:
            start, stop = rows[mesh.data_index(rank)]
            torch.testing.assert_close(output, logits[start:stop], rtol=1e-7, atol=1e-8)


class Wide(torch.nn.Module):
    """A model whose values that cross are large: 2 × 3 × 6 doubles, and a mask that is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def crossing(large):
    """(loss, gradients of this rank's parameters, bytes sent to other stages) of a step, where values of so many are shared."""
    before, transfers.LARGE = transfers.LARGE, large
    try:
        x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        plan = {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b", "microbatches": 2}
        job = mw.parallelize(lambda: Wide().double(), plan, batch=(x,))
        loss = job.step((x,)).item()
        grads = {name: p.grad.to_local() for name, p in job.named_parameters() if p.grad is not None}
        return loss, grads, job.pipeline.traffic.bytes
    finally:
        transfers.LARGE = before


def test_a_large_value_crosses_once_for_all_ranks_of_a_tp_group(workers):
    for whole, shared in zip(*(workers.run(crossing, large, ranks=4) for large in (1 << 20, 16)), strict=True):
        assert shared[0] == whole[0] and shared[1].keys() == whole[1].keys()
        assert all(torch.equal(g, whole[1][name]) for name, g in shared[1].items())
        assert shared[2] == whole[2] // 2 > 0


def narrow(plan):
    entry = ZOO["llama"]
    job = mw.parallelize(entry.build, plan, batch=entry.batch())
    optimizer = torch.optim.AdamW(job.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        losses.append(job.step(entry.batch()).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {str(p.dtype) for p in job.parameters()}


def test_bfloat16_with_float32_parameters(workers):
    wide = workers.run(narrow, {"mesh": {"pp": 2}}, ranks=2)[0]
    half = workers.run(narrow, {"mesh": {"pp": 2}, "precision": "bfloat16"}, ranks=2)[0]
    assert half[1] == {"torch.float32"}
    assert half[0] != wide[0]
    assert half[0] == pytest.approx(wide[0], rel=5e-3)
    assert half[0][-1] < half[0][0] - 0.1


def other_shapes():
    """Batches of other lengths, and of fewer rows than microbatches, in one job."""
    entry = ZOO["llama"]
    job = mw.parallelize(entry.build, "pp=2", batch=entry.batch())
    found = []
    for length, rows in ((12, 4), (7, 4), (7, 3), (12, 1), (12, 4)):
        batch = {k: v[:rows, :length] for k, v in entry.batch().items()}
        found.append(job.evaluate(batch).item())
    return found


def test_batches_of_other_shapes(workers):
    entry = ZOO["llama"]
    torch.manual_seed(0)
    model = entry.build()
    expected = []
    for length, rows in ((12, 4), (7, 4), (7, 3), (12, 1), (12, 4)):
        batch = {k: v[:rows, :length] for k, v in entry.batch().items()}
        expected.append(model(**batch).loss.item())
    for found in workers.run(other_shapes, ranks=2):
        assert found == pytest.approx(expected, rel=1e-5)


class Fickle(torch.nn.Module):
    """What it does between its blocks follows from a value of the batch."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))

    def forward(self, x, flag):
        for block in self.blocks:
            x = block(x)
            if flag.any():
                x = x * 2
        return x.square().mean()


def fickle():
    x, found = torch.ones(4, 8), []
    job = mw.parallelize(Fickle, {"mesh": {"pp": 2}, "rows": "split"}, batch=(x, torch.zeros(4)))
    for flags in ([0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 1.0], [0.0] * 4):
        found.append(job.step((x, torch.tensor(flags))).item())
    return found


def test_a_path_that_follows_from_the_batch_is_recorded_for_each_batch(workers):
    torch.manual_seed(0)
    model, x = Fickle(), torch.ones(4, 8)
    rows = [model(x[:1], torch.tensor([flag])).item() for flag in (0.0, 1.0)]
    expected = [rows[0], rows[1], sum(rows) / 2, rows[0]]
    for found in workers.run(fickle, ranks=2):
        assert found == pytest.approx(expected)


# --- failures ---------------------------------------------------------------------------------------------------------


class Dies(torch.nn.Module):
    """On the rank that runs the last block, the process is killed in the second microbatch."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return Mortal.apply(x).square().mean()


class Mortal(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Mortal.calls += 0 if x.is_meta else 1
        if Mortal.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def run_to_death():
    job = mw.parallelize(
        Dies, {"mesh": {"pp": 2}, "microbatches": 4, "rows": "split"}, batch=(torch.ones(4, 8),), timeout=20
    )
    job.step((torch.ones(4, 8),))


@pytest.mark.proof
def test_a_rank_that_is_killed_ends_the_job_and_the_others_say_where(tmp_path):
    with local_workers(2, timeout=60) as workers, pytest.raises(WorkerError) as caught:
        workers.run(run_to_death, ranks=2)
    text = str(caught.value)
    assert "rank 1" in text and "SIGKILL" in text


@pytest.mark.proof
def test_the_rank_that_is_left_names_rank_stage_and_action(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\nimport test_pipeline\ntest_pipeline.run_to_death()\n"
    )
    import subprocess
    import sys

    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "5", "--nproc-per-node", "2", str(script), os.path.dirname(__file__)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "StageError: rank 0, stage 0 (rank 0), action" in ended.stderr, ended.stderr[-3000:]
    assert "with stage 1 (rank 1)" in ended.stderr
