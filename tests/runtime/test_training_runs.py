"""Runs that survive: resumed after an end, a kill, a signal; on fewer ranks; over steps that are not finite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import meshwright as mw
from meshwright.checkpoint import folder as checkpoints
from meshwright.cli import app, processes
from meshwright.errors import NonFiniteError
from meshwright.train import loop, metrics
from meshwright.workers.pool import WorkerError
from zoo import ZOO

ROWS, STEPS = 24, 6


def tokens(length=16):
    made = torch.Generator().manual_seed(1)
    idx, targets = torch.randint(0, 64, (2, ROWS, length), generator=made)
    targets[targets % 7 == 0] = -100  # unevenly over rows: means weigh by labels
    return {"idx": idx, "targets": targets}


def job_of(name, plan):
    return mw.parallelize(ZOO[name].build, plan, batch={k: v[:4] for k, v in tokens().items()})


def trained(name, plan, folder, steps, global_batch=8, stop=None, **record):
    """(losses, weights, whether it was told to stop); ``stop``: the step and the rank that gets SIGTERM."""
    job, stopped = job_of(name, plan), False
    kept = None if folder is None else loop.Record(Path(folder), **record)

    def told(progress):
        if stop == (progress.step, job.rank):
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        losses = loop.train(job, tokens(), steps=steps, global_batch=global_batch, lr=1e-2, record=kept, on_step=told)
    except loop.Preempted as preempted:
        losses, stopped = preempted.losses, preempted.code == 143
    return losses, job.full_state_dict(), stopped


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# --- resumed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2",
        pytest.param("dp_shard=2", marks=pytest.mark.proof),
        pytest.param("tp=2", marks=pytest.mark.proof),
        pytest.param("dp_shard=2,tp=2", marks=pytest.mark.proof),
        pytest.param("pp=2,dp_shard=2", marks=pytest.mark.proof),
        pytest.param("dp_replicate=3", marks=pytest.mark.proof),
    ],
)
def test_a_run_that_is_gone_on_with_is_the_undisturbed_one_bitwise(plan, tmp_path, workers):
    ranks, batch = mw.Mesh.parse(plan).size, 12 if "3" in plan else 8
    whole, weights, _ = workers.run(trained, "dropout", plan, tmp_path / "whole", STEPS, batch, ranks=ranks)[0]
    first, *_ = workers.run(
        trained, "dropout", plan, tmp_path / "parts", 2, batch, save_every=1, keep=2, asynchronous=True, ranks=ranks
    )[0]
    second, *_ = workers.run(trained, "dropout", plan, tmp_path / "parts", 4, batch, ranks=ranks)[0]
    third, found, _ = workers.run(trained, "dropout", plan, tmp_path / "parts", STEPS, batch, ranks=ranks)[0]
    assert first + second + third == whole
    assert same(found, weights)
    lines = metrics.read(tmp_path / "parts")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == whole
    again, *_ = workers.run(trained, "dropout", plan, tmp_path / "parts", STEPS, batch, ranks=ranks)[0]
    assert again == [], "nothing is left to do"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_sigterm_of_any_rank_stops_all_when_they_have_saved(rank, tmp_path, workers):
    whole, weights, _ = workers.run(trained, "dropout", "dp_shard=2", None, STEPS, ranks=2)[0]
    found = workers.run(trained, "dropout", "dp_shard=2", tmp_path, STEPS, stop=(2, rank), ranks=2)
    assert [stopped for *_, stopped in found] == [True, True]
    assert found[0][0] == whole[:3], "the step in which it came is done"
    assert [p.name for p in checkpoints.complete(tmp_path)] == ["step-00000003"]
    rest, after, stopped = workers.run(trained, "dropout", "dp_shard=2", tmp_path, STEPS, ranks=2)[0]
    assert rest == whole[3:] and same(after, weights) and not stopped


def handler(folder):
    before = signal.getsignal(signal.SIGTERM)
    trained("dropout", "dp_shard=1", folder, 1)
    return signal.getsignal(signal.SIGTERM) == before


def test_the_signal_s_handler_is_put_back(tmp_path, workers):
    assert workers.run(handler, tmp_path, ranks=1) == [True]


class Seen:
    """In place of a watch: what happened while it was on."""

    def __init__(self, job, timeout, *, folder):
        self.job, self.step, self.loads = job, 0, []
        Seen.last = self

    def __enter__(self):
        self.load, self.job.load = self.job.load, self.loaded
        return self

    def loaded(self, *arguments, **settings):
        self.loads.append(Path(arguments[0]).name)
        return self.load(*arguments, **settings)

    def __exit__(self, *_):
        self.left = self.step


def resumed(folder, steps):
    """A run that goes on; what is told of it, on each rank; what a watch sees."""
    job, notes = job_of("dropout", "dp_shard=2"), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "Watch", Seen)
        record = loop.Record(Path(folder), save_every=1)
        losses = loop.train(
            job, tokens(), steps=steps, global_batch=8, lr=1e-2, record=record, on_note=notes.append, timeout=60.0
        )
    return losses, notes, (Seen.last.loads, Seen.last.left)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so_under_a_watch(tmp_path, workers):
    run = tmp_path / "run"
    whole, *_ = workers.run(resumed, run, 3, ranks=2)[0]
    for step, name in ((3, "__1_0.distcp"), (2, "manifest.json")):
        (run / f"step-{step:08d}" / name).write_bytes(b"damaged")
    for rank, (losses, notes, watched) in enumerate(workers.run(resumed, run, 4, ranks=2)):
        assert losses[:2] == whole[1:] and len(losses) == 3
        assert watched == (["run"], 1)
        assert len(notes) == (2 if rank == 0 else 0)
        for note, (step, file) in zip(notes, ((3, "__1_0.distcp"), (2, "manifest.json")), strict=False):
            assert f"step-{step:08d} is damaged" in note and file in note
    kept = [checkpoints.read_manifest(p).step for p in checkpoints.complete(run)]
    assert kept == [1, 2, 3, 4] and not (run / ".lock").exists()
    for path in checkpoints.complete(run):
        checkpoints.verify(path)
    for path in run.glob("step-*/manifest.json"):
        path.unlink()
    with pytest.raises(WorkerError) as raised:
        workers.run(resumed, run, 5, ranks=2)
    assert "4 problems in these checkpoints" in str(raised.value.plan_error)


# --- fewer ranks ------------------------------------------------------------------------------------------------------

FEWER = "mesh: [{pp: 2, dp_shard: 2}, {dp_shard: 3}, {dp_shard: 2}]"
STAGES = "mesh: [{pp: 2, dp_shard: 2}, {pp: 3}]"


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (FEWER, 3),  # 8 rows: 3, 3 and 2
        pytest.param(FEWER, 2, marks=pytest.mark.proof),
        pytest.param(STAGES, 3, marks=pytest.mark.proof),  # 8 rows in 6 microbatches
    ],
)
def test_a_run_goes_on_with_fewer_ranks_and_the_same_batches(plan, ranks, tmp_path, workers):
    whole, weights, _ = workers.run(trained, "nanogpt", plan, None, STEPS, ranks=4)[0]
    first, *_ = workers.run(trained, "nanogpt", plan, tmp_path, 3, ranks=4)[0]
    rest, found, _ = workers.run(trained, "nanogpt", plan, tmp_path, STEPS, ranks=ranks)[0]
    assert first + rest == pytest.approx(whole, rel=2e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def meshes(plan):
    return str(mw.parallelize(ZOO["mlp"].build, plan, batch=ZOO["mlp"].batch()).recipe.mesh)


def test_auto_and_a_list_are_chosen_for_the_processes_there_are(workers):
    assert workers.run(meshes, "auto", ranks=1)[0] == "dp_shard=1"  # of several: tests/test_auto_plan.py
    assert workers.run(meshes, FEWER, ranks=2)[0] == "dp_shard=2"
    with pytest.raises(WorkerError) as raised:
        workers.run(meshes, FEWER, ranks=1)
    assert raised.value.plan_error is not None
    assert "pp=2 × dp_shard=2 (4), dp_shard=3 (3), dp_shard=2 (2)" in str(raised.value.plan_error)


# --- not finite -------------------------------------------------------------------------------------------------------


class Roots(nn.Module):
    """Of nothing, the root is finite and its gradient is not."""

    def __init__(self):
        super().__init__()
        self.up, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return SimpleNamespace(loss=(self.up(x).abs() + 1).log().mean() + (self.scale * x).abs().sqrt().mean())


def rows(bad):
    x = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        x[order[15]] = bad  # of 8 rows a step: in step 2, the last row, so of the last data rank
    return x, order


def finite(bad, nonfinite, folder, steps=3):
    x, _ = rows(bad)
    plan = {"mesh": {"dp_shard": 2}, "nonfinite": nonfinite, "rows": "split", "precision": "float64"}
    job, told = mw.parallelize(Roots, plan, batch={"x": x[:4]}), []
    record = loop.Record(Path(folder), save_every=1)
    try:
        loop.train(job, {"x": x}, steps=steps, global_batch=8, lr=1e-2, record=record, on_step=told.append)
    except NonFiniteError as error:
        return told, job.full_state_dict(), str(error)
    return told, job.full_state_dict(), None


def by_hand(bad, skipped):
    x, order = rows(bad)
    torch.manual_seed(0)
    model = Roots().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, chosen in enumerate(order.split(8), 1):
        if step not in skipped:
            model(x[chosen]).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("bad", "what"), [(0.0, "gradient"), (float("nan"), "loss")])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_by_all(bad, what, tmp_path, workers):
    found = workers.run(finite, bad, "skip", tmp_path, ranks=2)
    assert [[p.skipped for p in told] for told, *_ in found] == [[0, 1, 1]] * 2
    for name, value in by_hand(bad, skipped={2}).items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-9, atol=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 1, 1]
    assert lines[1]["grad_norm"] is None and (lines[1]["loss"] is None) == (what == "loss")
    told, *_ = workers.run(finite, None, "skip", tmp_path, 4, ranks=2)[0]
    assert [p.skipped for p in told] == [1], "what was counted is kept"


@pytest.mark.parametrize(("bad", "what"), [(0.0, "gradient"), (float("nan"), "loss")])
def test_a_step_that_is_not_finite_stops_all(bad, what, tmp_path, workers):
    found = workers.run(finite, bad, "stop", tmp_path, ranks=2)
    errors = {error for *_, error in found}
    assert len(errors) == 1 and f"step 2: the {what} is not finite" in (error := errors.pop())
    assert what == "loss" or "first that of scale on rank" in error
    for name, value in by_hand(bad, skipped={2, 3}).items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-9, atol=1e-12)
    (kept,) = checkpoints.complete(tmp_path)
    assert kept.name == "step-00000001"
    checkpoints.verify(kept)


# --- metrics ----------------------------------------------------------------------------------------------------------


def progress(step, loss=1.0):
    return loop.Progress(step, 9, loss, 0.5, 100.0, "tokens", 1 << 20, 0.25, 0, 0.1)


def test_metrics_are_a_line_a_step(tmp_path):
    out = metrics.Metrics(tmp_path)
    out.write(progress(1))
    out.write(progress(2, float("nan")))
    one, two = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())  # while it is open
    assert {"step", "loss", "grad_norm", "tokens_per_second", "memory", "waiting", "skipped", "seconds", "time"} == set(
        one
    )
    assert (one["step"], one["loss"], two["loss"]) == (1, 1.0, None)
    out.close()


def test_metrics_later_than_the_checkpoint_are_dropped_and_a_line_that_was_cut(tmp_path):
    out = metrics.Metrics(tmp_path)
    for step in range(1, 6):
        out.write(progress(step))
    out.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    out = metrics.Metrics(tmp_path, step=3)
    out.write(progress(4, 7.0))
    out.close()
    assert [(line["step"], line["loss"]) for line in metrics.read(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 7)]


def late(plan, seconds):
    """The share that is waited where data rank 1 comes late to each step."""
    job, shares = job_of("nanogpt", plan), []

    class Late(dict):
        pass

    step = job.step

    def slow(batch):
        if job.recipe.mesh.data_index(job.rank) == 1:
            time.sleep(seconds)
        return step(batch)

    job.step = slow
    loop.train(job, tokens(), steps=4, global_batch=8, on_step=lambda p: shares.append((p.waiting, p.seconds)))
    return shares


def test_waiting_for_a_late_rank_is_measured(workers):
    told = workers.run(late, "dp_shard=2", 1.0, ranks=2)
    assert told[0][1][0] == told[1][1][0], "the same on every rank"
    share, seconds = told[0][-1]
    assert share * seconds > 0.25, "one of two ranks waits a second, which is half a second in the mean"


# --- under torchrun ---------------------------------------------------------------------------------------------------

TARGET = """
import os, signal, time
from types import SimpleNamespace
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.steps = 0

    def forward(self, x):
        if not x.is_meta and torch.is_grad_enabled():
            self.steps += 1
            fate = os.environ.get("FATE", "").split(":")
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if fate[0] == "kill" and first and (os.environ["RANK"], self.steps) == (fate[1], 4):
                os.kill(os.getpid(), signal.SIGKILL)
            if fate[0] == "slow":
                time.sleep(0.3)
        return SimpleNamespace(loss=self.layers(x).square().mean())

def model():
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return Net, {"x": x[:4]}, {"x": x}
"""


def command(folder, *arguments, torchrun=()):
    """``torchrun``: options of it; None: alone."""
    (folder / "net.py").write_text(TARGET)
    launcher = (
        [] if torchrun is None else ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", *torchrun, "-m"]
    )
    return [
        sys.executable, "-m", *launcher, "meshwright", "train", "net.py:model", "--mesh", "fsdp=2", "--global-batch", "8",
        "--device", "cpu", "--lr", "0.01", *arguments,
    ]  # fmt: skip


def started(folder, *arguments, torchrun=(), fate=""):
    environment = {**os.environ, "FATE": fate, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        command(folder, *arguments, torchrun=torchrun), cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def ended(process, timeout=200):
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # what it has started ends with it
        text, _ = process.communicate(timeout=60)
        raise AssertionError(f"it did not end:\n{text}") from None
    return process.returncode, text


def losses(folder):
    return [line["loss"] for line in metrics.read(folder)]


def wait_for(condition, timeout=150):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.05)


def test_a_killed_rank_is_started_again_and_goes_on_to_the_same_losses(tmp_path, workers, monkeypatch):
    out = ("--steps", "6", "--save-every", "2", "--out")
    code, text = ended(started(tmp_path, *out, "killed", torchrun=("--max-restarts", "1"), fate="kill:1"))
    assert code == 0, text
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "workers", lambda given: nullcontext(workers))
    result = CliRunner().invoke(app, command(tmp_path, *out, "whole", torchrun=None)[3:], env={"RANK": None})
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 6


@pytest.mark.proof
@pytest.mark.parametrize("launched", [False, True], ids=["alone", "torchrun"])
def test_sigterm_to_the_launcher_saves(launched, tmp_path):
    arguments = ("--steps", "40", "--out", "run")
    process = started(tmp_path, *arguments, torchrun=() if launched else None, fate="slow")
    wait_for(lambda: len(losses(tmp_path / "run")) >= 3)
    process.terminate()
    code, text = ended(process)
    assert code == (1 if launched else 143), text  # torchrun's own code, whatever its processes end with
    assert "stopped by SIGTERM and saved" in text
    done = losses(tmp_path / "run")
    assert [p.name for p in checkpoints.complete(tmp_path / "run")] == [f"step-{len(done):08d}"]


@pytest.mark.proof
@pytest.mark.parametrize("launched", [False, True], ids=["alone", "torchrun"])
def test_an_interrupt_ends_all_ranks_at_once(launched, tmp_path):
    process = started(tmp_path, "--steps", "1000", "--out", "run", torchrun=() if launched else None, fate="slow")
    wait_for(lambda: len(losses(tmp_path / "run")) >= 2)
    if launched:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all
    else:
        process.send_signal(signal.SIGINT)
    code, text = ended(process, timeout=20)
    assert code != 0, text
    assert checkpoints.complete(tmp_path / "run") == []


class Weighed(nn.Module):
    """Its classes have weights, as many as the batch has rows."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 8)

    def forward(self, x, labels, weight):
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x), labels, weight=weight))


def trained_on_one_batch(plan):
    batch = {"x": torch.linspace(-1, 1, 48).view(8, 6), "labels": torch.arange(8), "weight": torch.arange(1.0, 9.0)}
    return loop.train(mw.parallelize(Weighed, plan, batch=batch), batch, steps=3, lr=1e-2)


def test_what_all_rows_share_is_not_divided_in_a_run_over_one_batch(workers):
    whole, divided = (
        workers.run(trained_on_one_batch, plan, ranks=n)[0] for plan, n in (("tp=1", 1), ("dp_shard=2", 2))
    )
    assert divided == pytest.approx(whole, rel=1e-6)
