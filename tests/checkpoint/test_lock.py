"""A folder of checkpoints is one run's at a time: who holds it is said, the dead block nobody, and one dies by no clock."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from meshwright import identity
from meshwright.checkpoint import lock as locks
from meshwright.checkpoint.folder import begin
from meshwright.checkpoint.lock import LOCK, Holder, hold
from meshwright.errors import CheckpointError

FAST = {"patience": 0.4, "beat": 0.02, "tell": lambda text: None}
linux = pytest.mark.skipif(not identity.machine(), reason="only Linux tells of other processes")

HOLDS = """
import sys
from pathlib import Path
from meshwright.checkpoint.lock import hold
lock = hold(Path(sys.argv[1]), beat=0.02)
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which holds the folder ``run`` until its input ends, or it is killed."""
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def left_by(folder, **facts):
    """A lock of a process that does not count in it."""
    folder.mkdir(exist_ok=True)
    holder = replace(Holder.this_process(), **facts)
    (folder / LOCK).write_bytes(locks._text(holder, 3))
    return holder


def test_a_folder_is_held_and_released(tmp_path):
    run = tmp_path / "run"
    with hold(run) as lock:
        assert json.loads((run / LOCK).read_text().splitlines()[0])["pid"] == os.getpid()
        lock.check()
        with hold(run) as again:  # the same process once more: a save of a run that holds its folder
            again.check()
        lock.check()
    assert list(run.iterdir()) == []


def test_a_process_that_lives_is_named_and_waited_for(tmp_path, other):
    told = []
    with pytest.raises(CheckpointError, match=rf"held by process {other.pid} of .*, since 20") as raised:
        hold(tmp_path / "run", patience=0.3, tell=told.append)
    assert f"{tmp_path / 'run'}-2" in raised.value.findings[0].fix
    assert len(told) == 1 and f"process {other.pid} of" in told[0]

    def release(text):
        other.stdin.close()

    hold(tmp_path / "run", patience=60, tell=release).release()


@linux
def test_a_process_that_is_killed_blocks_nobody(tmp_path, other):
    other.kill()
    other.wait()
    hold(tmp_path / "run", patience=60, tell=lambda text: None).release()


def test_on_another_machine_the_count_tells_whether_it_lives(tmp_path, other):
    path = tmp_path / "run" / LOCK
    line, count = path.read_text().splitlines()
    assert len(count) == 12
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Holder, "lives", lambda self: None)
        with pytest.raises(CheckpointError, match=f"held by process {other.pid} of"):
            hold(tmp_path / "run", **FAST)
    assert path.read_text().splitlines()[0] == line
    left_by(tmp_path / "dead", machine="another", host="node-7", pid=1)
    hold(tmp_path / "dead", **FAST).release()


@linux
@pytest.mark.parametrize("facts", [{"started": "1"}, {"pid": 2**22 + 1}])
def test_another_process_of_the_number_is_not_the_holder(facts, tmp_path):
    left_by(tmp_path, **facts)
    hold(tmp_path, patience=60, tell=lambda text: None).release()


@pytest.mark.parametrize("text", [b"", b"\xff", b"{}\n", b"[1]\n000000000001\n"])
def test_a_lock_that_cannot_be_read_is_taken_over_once_it_has_stood_still(text, tmp_path):
    (tmp_path / LOCK).write_bytes(text)
    hold(tmp_path, **FAST).release()


def test_who_was_taken_for_dead_is_told(tmp_path):
    with hold(tmp_path, **FAST) as first:
        (tmp_path / LOCK).unlink()
        holder = left_by(tmp_path, key="other", host="node-7")
        with pytest.raises(CheckpointError, match=r"taken over by process \d+ of node-7"):
            first.check()
    assert (tmp_path / LOCK).read_bytes() == locks._text(holder, 3), (
        "a lock that is another's stays, and so does its text"
    )


def test_a_lock_that_another_looks_at_is_released(tmp_path):
    """Who found a dead holder a moment ago has the file locked while it sees that another has taken it over."""
    lock = hold(tmp_path)
    with open(lock.path, "r+") as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        threading.Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        lock.release()
        assert not lock.path.exists()


def test_of_many_that_find_a_dead_holder_one_holds_the_folder(tmp_path, monkeypatch):
    """Each in a thread that takes itself for a process of its own."""
    monkeypatch.setattr(Holder, "is_this_process", property(lambda self: False))
    monkeypatch.setattr(Holder, "lives", lambda self: self.key != "dead")
    left_by(tmp_path, key="dead")
    holding, most, errors, start = [], [], [], threading.Barrier(8)

    def contend():
        start.wait(10)
        try:
            lock = hold(tmp_path, patience=60, beat=0.02, tell=lambda text: None)
            holding.append(lock)
            most.append(len(holding))
            lock.check()
            holding.remove(lock)
            lock.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and most == [1] * 8


def test_what_another_thread_of_the_process_is_writing_is_left_alone(tmp_path):
    begin(tmp_path, 1, "host-7")
    begin(tmp_path, 2, "host-7")
    assert len(list(tmp_path.glob(".saving-*"))) == 2
    begin(tmp_path, 3, "host-8")
    assert [p.name.rpartition(".")[0] for p in tmp_path.glob(".saving-*")] == [".saving-step-00000003.host-8"]
