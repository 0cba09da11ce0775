"""A pool of workers: what a run gives, what it leaves, and how each way to fail ends."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import meshwright.workers.pool as workers_module
from meshwright.errors import Finding, PlanError
from meshwright.workers.pool import LocalWorkers, WorkerError, local_workers, report
from meshwright.workers.process import GROUP_THREAD


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    with local_workers(3) as pool:
        yield pool


# ---- functions that run in the workers ----


def rank_times(factor: int, offset: int = 0) -> int:
    return dist.get_rank() * factor + offset


def all_reduced(value: torch.Tensor) -> torch.Tensor:
    value = value * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value


def surroundings() -> dict[str, str]:
    seen = {key: os.environ.get(key, "") for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LEFT")}
    return seen | {"threads": str(torch.get_num_threads()), "dtype": str(torch.get_default_dtype())}


def leaves_traces() -> float:
    os.environ["LEFT"] = "behind"
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item()


def settings() -> list[Any]:
    x = torch.linspace(-1, 1, 8)
    layer = torch.nn.Linear(8, 2)
    return [
        layer(x).dtype,
        layer(x).requires_grad,
        float(torch.nn.Identity()(x).sum()),
        float(torch.tensor(1e-39) * 1),
        torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cudnn.deterministic,
        torch.rand(()).item(),
    ]


def leaves_settings() -> list[Any]:
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_grad_enabled(False)
    torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out + 1)
    torch.set_flush_denormal(True)
    torch.autograd.set_detect_anomaly(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(7)
    return settings()


def joins_anew() -> float:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    value = torch.ones(())
    dist.all_reduce(value)
    return value.item()


def sum_over_a_mesh(groups_before: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(groups_before):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    full = torch.arange(8.0).view(4, 2)
    cut = distribute_tensor(full, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    total = (cut + cut).sum()
    return torch.equal(total.full_tensor(), 2 * full.sum())  # type: ignore[attr-defined]


def raises(rank: int) -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == rank:
        raise ValueError("this one")
    dist.all_reduce(torch.ones(4))


def raises_while_the_others_work() -> None:
    if dist.get_rank() == 0:
        raise ValueError("the first")
    time.sleep(0.3)
    if dist.get_rank() == 1:
        raise ValueError("the second")


def ends(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            ctypes.string_at(0)
    dist.all_reduce(torch.ones(4))


def hangs_in_here(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(60)
    return 1


def leaves_a_process_and_hangs() -> None:
    child = subprocess.Popen(["sleep", "60"])
    report(child.pid)
    time.sleep(60)


def reports(count: int) -> None:
    for step in range(count):
        print(f"step {step} of rank {dist.get_rank()} ✓")
        report(step)


# ---- what a run gives and leaves ----


def test_results_come_by_rank(workers: LocalWorkers) -> None:
    assert workers.run(rank_times, 10, offset=1) == [1, 11, 21]
    assert workers.run(rank_times, 10, ranks=2) == [0, 10]


def test_each_run_has_a_process_group(workers: LocalWorkers) -> None:
    assert [result.tolist() for result in workers.run(all_reduced, torch.ones(2))] == [[6.0, 6.0]] * 3
    assert [result.tolist() for result in workers.run(all_reduced, torch.ones(2), ranks=2)] == [[3.0, 3.0]] * 2


@pytest.mark.proof
def test_processes_start_when_needed_and_are_used_again(workers: LocalWorkers) -> None:
    with local_workers(2) as pool:
        assert pool.pids() == []
        first = pool.run(os.getpid, ranks=1)
        assert pool.pids() == first
    before = workers.run(os.getpid)
    assert workers.run(os.getpid) == before


def leaves_threads(count: int, name: str) -> int:
    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.release()
        threading.Event().wait()

    named = threading.Semaphore(0)
    for _ in range(count):
        threading.Thread(target=wait, daemon=True).start()
        named.acquire()
    return os.getpid()


def test_a_worker_in_which_threads_of_groups_pile_up_is_replaced(workers: LocalWorkers) -> None:
    few = workers.run(leaves_threads, 4, GROUP_THREAD, ranks=2)
    assert workers.run(leaves_threads, 60, "of_the_model", ranks=2) == few
    assert workers.run(leaves_threads, 60, GROUP_THREAD, ranks=1) == few[:1], "threads of the model's own do not count"
    first, second = workers.run(os.getpid, ranks=2)
    assert first != few[0] and second == few[1]


def test_environment_is_a_ranks_and_is_restored(workers: LocalWorkers) -> None:
    mine = dict(os.environ)
    first = workers.run(leaves_traces)
    for rank, seen in enumerate(workers.run(surroundings, ranks=2)):
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "LEFT": "",
            "threads": "1",
            "dtype": "torch.float32",
        }
    assert workers.run(leaves_traces) == first, "torch's random numbers begin anew"
    assert dict(os.environ) == mine


def test_settings_of_torch_are_those_of_a_new_process_in_each_run(workers: LocalWorkers) -> None:
    (before,) = workers.run(settings, ranks=1)
    (left,) = workers.run(leaves_settings, ranks=1)
    assert not [i for i, (a, b) in enumerate(zip(before, left, strict=True)) if a == b], "each of them is another"
    assert workers.run(settings, ranks=1) == [before]


def test_a_function_may_join_by_the_environment(workers: LocalWorkers) -> None:
    assert workers.run(joins_anew) == [3.0] * 3


def test_meshes_of_earlier_runs_are_forgotten(workers: LocalWorkers) -> None:
    for groups_before in (0, 2, 1):
        assert workers.run(sum_over_a_mesh, groups_before, ranks=2) == [True, True]


def drawn() -> tuple[float, float]:
    return random.random(), float(numpy.random.rand())


def test_numbers_that_are_drawn_do_not_depend_on_earlier_runs_and_differ_by_rank(workers: LocalWorkers) -> None:
    first = workers.run(drawn, ranks=2)
    assert workers.run(drawn, ranks=2) == first
    assert not set(first[0]) & set(first[1])


def test_big_values_pass_both_ways(workers: LocalWorkers) -> None:
    big = torch.arange(12_500_000.0)
    results = workers.run(all_reduced, big, ranks=2)
    assert all(torch.equal(result, big * 3) for result in results)


def test_rank_0_reports_and_is_echoed(workers: LocalWorkers, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    workers.run(reports, 3, echo=True, on_report=seen.append)
    assert seen == [0, 1, 2]
    assert capsys.readouterr().out.splitlines() == [f"step {step} of rank 0 ✓" for step in range(3)]
    report("nobody listens outside a worker")


def hash_and_threads() -> tuple[int, int]:
    return hash("a"), len(os.listdir("/proc/self/task"))


@pytest.mark.proof
def test_forked_workers_share_what_is_imported_and_spawned_ones_nothing() -> None:
    with local_workers(2, start_method="fork") as forked, local_workers(2, start_method="spawn") as spawned:
        assert len({seen for seen, _ in forked.run(hash_and_threads)}) == 1
        assert len({seen for seen, _ in spawned.run(hash_and_threads)}) == 2
        assert forked._server is not None and spawned._server is None
        assert len(os.listdir(f"/proc/{forked._server.process.pid}/task")) == 1, "what is forked has one thread"
    with pytest.raises(ValueError, match="start_method"):
        local_workers(1, start_method="forkserver")  # type: ignore[arg-type]


IN_THE_SERVER = """
import os, sys
from meshwright.workers.pool import local_workers
with local_workers(1, start_method="fork", threads=4) as pool:
    assert "torch" not in sys.modules
    pool.run(os.getpid)
    server = f"/proc/{pool._server.process.pid}"
    print("libtorch" in open(f"{server}/maps").read(), len(os.listdir(f"{server}/task")))
"""


def test_what_forks_workers_has_torch_and_one_thread_whatever_its_pool_has_imported() -> None:
    assert python("-c", IN_THE_SERVER) == ["True 1"]


@pytest.mark.proof
def test_workers_end_with_the_process_that_forked_them_and_the_pool_starts_anew() -> None:
    with local_workers(2, start_method="fork") as pool:
        before = pool.run(os.getpid)
        assert pool._server is not None
        os.kill(pool._server.process.pid, signal.SIGKILL)
        assert wait_until_gone(before) == []
        after = pool.run(os.getpid)
        assert not set(before) & set(after)
        server = pool._server.process.pid
    assert wait_until_gone([*after, server], timeout=0) == []


@pytest.mark.proof
def test_a_server_that_dies_before_it_forks_is_told_and_the_pool_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_workers(2, start_method="fork") as pool:
        pool.run(os.getpid, ranks=1)
        assert pool._server is not None
        with monkeypatch.context() as patched:
            patched.setattr(type(pool._server), "alive", True)  # as it was a moment ago
            os.kill(pool._server.process.pid, signal.SIGKILL)
            pool._server.process.wait()
            with pytest.raises(WorkerError, match="did not start"):
                pool.run(os.getpid)
        assert len(pool.run(os.getpid)) == 2


@pytest.mark.proof
def test_a_server_that_cannot_start_is_told_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_workers(2, start_method="fork") as pool:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "path", [])
            with pytest.raises(WorkerError, match="did not start") as caught:
                pool.run(os.getpid)
        assert "ModuleNotFoundError" in caught.value.details
        assert len(pool.run(os.getpid)) == 2, "the pool is usable afterwards"


# ---- how it fails ----


def test_a_raise_is_told_once_and_peers_are_not_blamed(workers: LocalWorkers) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(raises, 1)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert caught.value.reason == "rank 1 of 3 failed: ValueError: this one"
    assert text.count("Traceback") == 1 and 'raise ValueError("this one")' in text
    assert "rank 1 was here" in text and "rank 0 was here" not in text
    assert workers.run(rank_times, 1) == [0, 1, 2]


def refuses(rank: int) -> None:
    if dist.get_rank() == rank:
        raise PlanError([Finding("mesh.tpp", "tpp", "an axis", "tp: 2")])


def test_a_plan_error_comes_back_as_it_is_and_is_told_once(workers: LocalWorkers) -> None:
    with pytest.raises(WorkerError) as caught:
        workers.run(refuses, 1)
    error = caught.value.plan_error
    assert error is not None and error.findings[0].where == "mesh.tpp"
    assert str(caught.value) == f"rank 1 of 3 failed: PlanError: 1 problem in this plan\n\n{error}"
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.plan_error.findings == error.findings
    with pytest.raises(WorkerError) as other:
        workers.run(raises, 1)
    assert other.value.plan_error is None


class Counted:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1


def test_what_is_kept_is_made_once_a_pool() -> None:
    with local_workers(1) as pool, local_workers(1) as other:
        assert pool.kept(Counted) is pool.kept(Counted) is not other.kept(Counted)
    assert Counted.made == 2


def test_the_first_failure_counts_and_who_comes_back_soon_is_kept(workers: LocalWorkers) -> None:
    before = workers.run(os.getpid)
    with pytest.raises(WorkerError, match="rank 0 of 3 failed: ValueError: the first"):
        workers.run(raises_while_the_others_work)
    assert workers.run(os.getpid) == before


@pytest.mark.parametrize(("how", "words"), [("exit", "exit code 7"), ("kill", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_a_death_names_rank_process_and_cause(workers: LocalWorkers, how: str, words: str) -> None:
    pid = workers.run(os.getpid)[1]
    with pytest.raises(WorkerError) as caught:
        workers.run(ends, 1, how, ranks=2)
    assert caught.value.rank == 1
    assert f"process {pid}" in caught.value.reason and words in caught.value.reason
    assert ("in ends" in caught.value.details) == (how == "segfault")
    assert workers.run(rank_times, 1) == [0, 1, 2]


def test_a_hang_shows_where(workers: LocalWorkers) -> None:
    before = workers.run(os.getpid)
    with pytest.raises(WorkerError) as caught:
        workers.run(hangs_in_here, 2, timeout=3)
    assert caught.value.reason == "no answer within 3 s from rank 2 of 3 (answered: 0, 1)"
    assert "in hangs_in_here" in caught.value.details
    assert "worker.py" not in caught.value.details
    after = workers.run(os.getpid)
    assert after[:2] == before[:2] and after[2] != before[2]


def test_an_interrupt_ends_all_workers_and_what_they_started(workers: LocalWorkers) -> None:
    started: list[int] = []

    def interrupt(pid: int) -> None:
        started.append(pid)
        raise KeyboardInterrupt

    pids = workers.run(os.getpid)
    with pytest.raises(KeyboardInterrupt):
        workers.run(leaves_a_process_and_hangs, on_report=interrupt)
    assert workers.pids() == []
    assert wait_until_gone(pids + started) == []


def test_what_cannot_be_sent_is_refused(workers: LocalWorkers) -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be sent .*lock"):
        workers.run(lambda: lock)
    with pytest.raises(WorkerError, match=r"cannot be sent .*lock"):
        workers.run(threading.Lock, ranks=1)
    with pytest.raises(ValueError, match="1 to 3"):
        workers.run(os.getpid, ranks=4)


# ---- where functions come from, and what stays ----

PLAIN_SCRIPT = """
import os, sys, time
from dataclasses import dataclass
import torch.distributed as dist
from meshwright.workers.pool import local_workers

@dataclass
class Answer:
    rank: int

def function(answer):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, Answer(dist.get_rank()))
    return Answer(answer.rank + dist.get_rank() + 100 * sum(a.rank for a in found))

print("started")
with local_workers(2) as workers:
    print(workers.run(function, Answer(5)), *workers.pids(), flush=True)
    if "die" in sys.argv:
        os.kill(os.getpid(), 9)

def last():
    return "last"

with local_workers(1) as workers:
    print(workers.run(last), flush=True)
"""


@pytest.mark.proof
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN_SCRIPT)
    lines = python("script.py", directory=tmp_path)
    assert lines[0] == "started" and lines[1].startswith("[Answer(rank=105), Answer(rank=106)]")
    assert lines[2:] == ["['last']"]
    assert wait_until_gone([int(pid) for pid in lines[1].split()[-2:]], timeout=0) == []


@pytest.mark.proof
def test_a_command_line_program_works_and_its_death_leaves_no_orphan() -> None:
    lines = python("-c", PLAIN_SCRIPT, "die", code=-signal.SIGKILL)
    assert wait_until_gone([int(pid) for pid in lines[1].split()[-2:]]) == []


@pytest.mark.proof
def test_an_interactive_session_works() -> None:
    """As a notebook's cells do: functions and classes that are in no file."""
    assert python("-", text=PLAIN_SCRIPT)[1].startswith("[Answer(rank=105), Answer(rank=106)]")


@functools.lru_cache(maxsize=8)
def _squared(number: int) -> int:
    return number**2


def test_functions_with_a_cache_of_results_can_be_sent(workers: LocalWorkers) -> None:
    """Of a module that workers have, of a function, and of the main script, whose module here is another."""

    @functools.cache
    def fibonacci(number: int) -> int:
        return number if number < 2 else fibonacci(number - 1) + fibonacci(number - 2)

    class Table:
        @staticmethod
        @functools.lru_cache(maxsize=4, typed=True)
        def of(number: int) -> list[int]:
            return [number] * number

    def used() -> tuple[Any, ...]:
        return fibonacci(20), Table.of(2), Table.of.cache_parameters(), _squared(3), Table.of(2) is Table.of(2)

    expected = (6765, [2, 2], {"maxsize": 4, "typed": True}, 9, True)
    assert workers.run(used, ranks=1) == [expected] == [used()]


def test_a_class_with_a_cached_property_can_be_sent(workers: LocalWorkers) -> None:
    class Squares:  # as one of the main script: its code travels
        @functools.cached_property
        def of_three(self) -> int:
            return 9

    assert workers.run(lambda: Squares().of_three, ranks=1) == [9]


def test_a_function_can_say_what_is_also_the_name_of_a_module_of_torch(workers: LocalWorkers) -> None:
    """``torch.classes`` and ``torch.ops`` are modules of their own types; cloudpickle takes along what a function may mean."""

    class Rows:  # as a dataset of images has them
        classes = ("cat", "dog")

    def counted() -> int:
        return len(Rows.classes) + int(torch.ops.aten.add(torch.ones(()), 1))

    assert workers.run(counted, ranks=1) == [4]


def test_a_lambda_and_what_it_names_can_be_sent(workers: LocalWorkers) -> None:
    scale = torch.arange(3)
    found = workers.run(lambda rows: (scale * rows, lambda: dist.get_rank()), 2, ranks=2)
    assert torch.equal(found[0][0], 2 * scale) and callable(found[1][1])


def test_a_file_loaded_by_its_path_is_found(workers: LocalWorkers, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("class Thing:\n    value = 3\n\ndef function():\n    return Thing()\n")
    spec = importlib.util.spec_from_file_location("a_name_of_its_own", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["a_name_of_its_own"] = module
    try:
        spec.loader.exec_module(module)
        (result,) = workers.run(module.function, ranks=1)
    finally:
        del sys.modules["a_name_of_its_own"]
    assert type(result) is module.Thing


def python(*arguments: str, directory: Path | None = None, text: str | None = None, code: int = 0) -> list[str]:
    """Run the interpreter, which reads ``text``; the lines it printed."""
    source = Path(workers_module.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def wait_until_gone(pids: list[int], timeout: float = 5.0) -> list[int]:
    """Those of the processes that still run after a while (a zombie does not run)."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
