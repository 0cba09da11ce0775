"""A rank that stops answering ends the job in time, and the report says which, where and in what."""

from __future__ import annotations

import functools
import inspect
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.identity import started
from meshwright.runtime.job import Job
from meshwright.runtime.pipeline.transfers import Transfers
from meshwright.spmd.comm import Ledger
from meshwright.watch import location
from meshwright.watch.heartbeat import FAILED, Alarm, Beat, Board, RankProcess
from meshwright.watch.location import Whereabouts
from meshwright.watch.report import Hang, spelled_ranks
from meshwright.watch.watchdog import HANG, _lives
from meshwright.workers.pool import LocalWorkers

SCRIPT = Path(__file__).parent / "watched.py"
TIMEOUT = 6.0


@dataclass(frozen=True)
class Trial:
    """How a job of two ranks ended: each rank's exit code and output."""

    codes: list[int]
    output: list[str]
    file: str

    @property
    def report(self) -> str:
        told = [text for text in self.output if "; the job ends" in text]
        assert len(told) == 1, f"one report, of the lowest rank that lives: {self.output}"
        start = told[0].index("meshwright, ")
        return told[0][start:]


def trial(trouble: str, mesh: str, folder: Path) -> Trial:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(mw.__file__).parent.parent), "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    logs = [folder / f"rank-{rank}" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            words = [sys.executable, str(SCRIPT), trouble, mesh, str(TIMEOUT), str(folder)]
            ranks.append(
                subprocess.Popen(
                    words, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=file, stderr=file
                )
            )
    try:
        codes = [rank.wait(180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    report = folder / "hang.txt"
    file = report.read_text() if report.exists() else ""
    return Trial(codes, [log.read_text() for log in logs], file)


def ranks_of_suspects(report: str) -> list[str]:
    return re.findall(r"^suspect: ranks? ([\d ]+)", report, re.MULTILINE)


def test_the_functions_by_which_a_report_tells_a_receive_and_a_step_are_where_it_looks() -> None:
    assert inspect.getsourcefile(Job) == location._JOB
    assert inspect.getsourcefile(Transfers._received) == location._TRANSFERS


@pytest.mark.proof
def test_a_rank_that_sleeps_in_its_forward_is_named_with_its_step_stage_and_action(tmp_path: Path) -> None:
    found = trial("sleep", "pp=2", tmp_path)
    assert found.codes == [HANG, HANG]
    assert ranks_of_suspects(found.report) == ["1"]
    about = found.report[found.report.index("\nrank 1 ") :]
    assert "step 3" in about and "stage 1, action 1F0" in about and "forward" in about
    assert "watched.py" in about and "time.sleep(600)" in about
    assert "waits in receive with rank 1" in found.report, "rank 0 says for whom it waits"
    assert "recorded last: gloo:" in found.report
    assert len(found.report.splitlines()) < 40
    assert found.report.splitlines()[0] in found.file and "the innermost frame last" in found.file


def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    found = trial("stop", "dp_shard=2", tmp_path)
    assert found.codes == [HANG, -9]
    assert ranks_of_suspects(found.report) == ["1"] and "no sign of life" in found.report
    assert "waits in all_reduce with ranks 0 1" in found.report and "clip_grad_norm_" in found.report
    assert re.search(r"rank 1 .*last heard of in step [23]\b", found.report)


@pytest.mark.proof
def test_a_healthy_job_is_left_alone(tmp_path: Path) -> None:
    found = trial("none", "pp=2", tmp_path)
    assert found.codes == [0, 0] and not found.file
    assert [text.strip() for text in found.output] == [
        found.output[0].strip().replace("rank 0", f"rank {r}") for r in (0, 1)
    ]


@pytest.mark.proof
@pytest.mark.parametrize("mesh", ["pp=2", "dp_shard=2", "tp=2"])
def test_a_killed_rank_is_named_by_the_error_of_the_other(mesh: str, tmp_path: Path) -> None:
    """Its connections are closed, so no rank waits, and the watch has nothing to report."""
    found = trial("kill", mesh, tmp_path)
    assert found.codes == [1, -9]
    assert "RankError: step 3: rank 1 ended without a word" in found.output[0]


@pytest.mark.proof
@pytest.mark.parametrize("mesh", ["pp=2", "dp_shard=2", "tp=2"])
@pytest.mark.parametrize("trouble", ["sleep", "stop", "other"])
def test_every_trouble_in_every_layout(trouble: str, mesh: str, tmp_path: Path) -> None:
    found = trial(trouble, mesh, tmp_path)
    suspects = ranks_of_suspects(found.report)
    if trouble == "other":
        assert sorted(suspects) == ["0", "1"] and "all_gather_object" in found.report and "all_reduce" in found.report
    else:
        assert suspects == ["1"]
    assert found.codes == ([HANG, -9] if trouble == "stop" else [HANG, HANG])
    assert "step 3" in found.report
    if mesh == "pp=2":
        assert "stage 0" in found.report and "stage 1" in found.report


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_two_nodes_go_on_after_a_cut_link_and_a_killed_node(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "bench" / "two_nodes.py"
    command = [sys.executable, str(script), "--ranks", "1", "--folder", str(tmp_path)]
    source = str(Path(mw.__file__).parent.parent)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False, env={**os.environ, "PYTHONPATH": source}
    )
    if "need network namespaces" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0 and done.stdout.count("losses equal, bit by bit") == 2, done.stdout + done.stderr


# --- who is to blame --------------------------------------------------------------------------------------------------


def hang(where: dict[int, Whereabouts], ranks: int = 4, **states: Any) -> Hang:
    beats = {r: Beat(1, 7, "", 0) for r in range(ranks)} | states.pop("beats", {})
    who = {r: RankProcess("host", "host/0", 1) for r in beats}
    return Hang("no rank made progress", ranks, who, beats, where, {}, **states)


def inside(name: str, *group: int) -> Whereabouts:
    return Whereabouts(step=7, collective=name, group=group)


def test_who_is_in_no_collective_is_suspected_before_those_that_wait() -> None:
    found = hang(
        {0: inside("all_reduce", 0, 1, 2, 3), 1: Whereabouts(line="model.py:1"), 2: inside("x"), 3: inside("y")}
    )
    assert list(found.suspects()) == [1] and "ranks 0 2 3 wait in one" in found.suspects()[1]


def test_who_is_in_another_collective_than_most_of_its_group_is_suspected() -> None:
    everyone = (0, 1, 2, 3)
    where = {r: inside("all_reduce", *everyone) for r in (0, 1, 3)} | {2: inside("all_gather", *everyone)}
    assert list(hang(where).suspects()) == [2]


def test_who_is_silent_or_never_came_is_suspected_before_all() -> None:
    where = {0: inside("all_reduce", 0, 1, 2, 3), 1: Whereabouts(line="model.py:1")}
    found = hang(where, beats={3: Beat(1, 7, "", 0, FAILED, "ValueError: no")}, silent=(2,))
    assert list(found.suspects()) == [2]
    never = Hang("c", 3, {}, {0: Beat(1, 7, "", 0)}, where, {})
    assert never.suspects()[2] == "it never came" and "has not come to the first step" in never.report()


def test_a_report_of_many_ranks_fits_a_screen() -> None:
    where = {r: inside(f"all_reduce{r % 50}", *range(400)) for r in range(400)}
    report = hang(where, ranks=400).report()
    assert len(report.splitlines()) < 40 and max(map(len, report.splitlines())) <= 120
    assert "more ranks, in other places" in report
    same = hang({r: inside("all_reduce", *range(400)) for r in range(400)}, ranks=400).report()
    assert "ranks 0–399" in same


def test_ranks_are_spelled_in_runs() -> None:
    assert spelled_ranks([3]) == "rank 3" and spelled_ranks([0, 2, 3, 5, 6, 7]) == "ranks 0 2 3 5–7"


# --- what ranks tell each other ---------------------------------------------------------------------------------------


def test_one_alarm_stands_whoever_else_raises_one() -> None:
    store = dist.HashStore()
    first, second = (Board(store, "a", rank, 2) for rank in range(2))
    assert first.alarm() is None and not first.is_reported()
    assert second.raise_alarm("slow") == first.raise_alarm("other") == first.alarm() == Alarm(1, "slow")
    assert Board(store, "b", 0, 2).alarm() is None, "another watch is not this one"


def test_what_is_posted_is_read_also_while_others_have_not_come() -> None:
    store = dist.HashStore()
    board = Board(store, "a", 1, 3)
    beat, where, who = Beat(4, 7, "1F2", 9), inside("all_reduce", 0, 1), RankProcess("h", "h/0", 12, "99")
    board.post(beat)
    board.post_location(where)
    board.introduce(who)
    reader = Board(store, "a", 0, 3)
    assert (reader.beats([0, 1, 2]), reader.where(), reader.who()) == ({1: beat}, {1: where}, {1: who})


def test_a_process_is_known_by_when_it_started() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = RankProcess("h", "h/0", child.pid, started(child.pid))
    if not who.started:
        pytest.skip("only Linux tells when a process started")
    assert _lives(who) and not _lives(RankProcess("h", "h/0", child.pid, "1"))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not _lives(who), "killed, and not yet waited for"
    child.communicate()
    assert not _lives(who) and started(child.pid) == ""


def test_reading_and_writing_checkpoints_is_getting_on() -> None:
    job: Any = SimpleNamespace(steps=3, pipeline=None, parts=0, ledger=Ledger())
    watch = mw.Watch(job, 60.0)
    before = watch._progress()
    mw.Job.count_file(job)
    assert watch._progress() != before


def test_a_timeout_is_positive() -> None:
    with pytest.raises(mw.PlanError, match="more than the longest step"):
        mw.Watch(None, 0.0)  # type: ignore[arg-type]


def timeouts() -> tuple[set[float], set[float]]:
    """For how many seconds collectives of all groups of a job wait: before a watch, and under it."""
    batch = {"x": torch.randn(4, 8)}
    build = functools.partial(torch.nn.Linear, 8, 8)
    job = mw.parallelize(
        build, "pp=1,dp_shard=2,tp=1", batch=(batch["x"],), loss=lambda y: y.square().mean(), timeout=20
    )
    found = []
    groups = [job.groups.files, *job.groups.joined_groups]
    found.append({seconds_of(g) for g in groups})
    with mw.Watch(job, 900.0):
        found.append({seconds_of(g) for g in [*groups, dist.group.WORLD]})
    return found[0], found[1]


def seconds_of(group: Any) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_collectives_wait_longer_than_a_watch_and_those_of_files_as_long_as_the_others(workers: LocalWorkers) -> None:
    for alone, watched in workers.run(timeouts, ranks=2):
        assert alone == {20.0} and min(watched) > 900
