"""Ranks of a save or load agree: the failure of one is an error of all, and what is saved is what was there at the call."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint import folder as checkpoints
from meshwright.checkpoint import jobs, load, pieces, pretrained, save, storage
from meshwright.errors import CheckpointError
from meshwright.generators import Generators
from saving import LAYOUTS, Tied, start, steps


class Unsendable(RuntimeError):
    """An exception that no other process can be sent."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class Stateful(Tied):
    """Has a state that is no tensor."""

    def get_extra_state(self):
        return {"seen": [1]}

    def set_extra_state(self, state):
        self.state = state


class Data:
    """A dataset's position, as a person writes one."""

    def state_dict(self):
        return {"at": [1, 2]}

    def load_state_dict(self, state):
        self.at = state["at"]


@contextmanager
def broken(here, where, name, error):
    """While entered, what has this name raises an error, on this rank alone."""

    def fail(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patched:
        if here:
            patched.setattr(where, name, fail)
        yield


# (rank, what is broken there, its name, the error)
IN_SAVE = [
    (1, Data, "state_dict", RuntimeError("no position")),
    (0, Stateful, "get_extra_state", MemoryError("not enough")),
    (1, Generators, "tensors", ValueError("no generator")),
    (0, save, "begin", PermissionError(13, "Permission denied")),
    (1, pieces.PieceSaver, "resolve_data", Unsendable("no value")),
    (1, pieces.PieceSaver, "_items", Unsendable("no plan")),
    (1, storage, "described", OSError(5, "Input/output error")),
    (0, save, "described", Unsendable("no file")),
    (0, save, "publish", RuntimeError("no rename")),
]
IN_LOAD = [
    (0, load, "find", Unsendable("not found")),
    (1, load, "read_manifest", PermissionError(13, "Permission denied")),
    (1, load, "check", OSError(5, "Input/output error")),
    (1, load, "loaded", EOFError("no run")),
    (1, load, "read_metadata", Unsendable("no metadata")),
    (0, Stateful, "get_extra_state", MemoryError("not enough")),
    (1, jobs, "rng_source", KeyError("mesh")),
    (0, storage.Reader, "read_data", Unsendable("no data")),
    (1, Data, "load_state_dict", RuntimeError("another dataset")),
    (1, Stateful, "set_extra_state", Unsendable("another model")),
]


def failures(folder):
    """What each rank is told of each failure, and what is in the folder after it."""
    job, optimizer, batches = start(LAYOUTS["dp_shard2"], Stateful)
    steps(job, optimizer, batches, 1)
    job.save(folder, optimizer, step=1, data=Data())
    told = []

    def tried(here, rank, broken_part, work):
        try:
            with broken(job.rank == rank, *broken_part):
                work()
            told.append((here, "nothing was raised"))
        except CheckpointError as error:
            left = [p.name for p in checkpoints.Path(folder).iterdir() if p.name.startswith(".saving")]
            told.append((here, str(error) + " ".join(left)))

    for number, (rank, *part) in enumerate(IN_SAVE):

        def saving(wait=number % 2 == 0):
            job.save(folder, optimizer, step=2, data=Data(), wait=wait)
            job.saved()

        tried("save", rank, part, saving)
    for rank, *part in IN_LOAD:
        tried("load", rank, part, lambda: job.load(folder, optimizer, data=Data()))
    tried("pretrained", 1, (pretrained, "open_folder", Unsendable("no folder")), lambda: job.load_pretrained(folder))
    parts = job.parts
    job.save(folder, optimizer, step=3, data=Data())
    saved = job.parts
    job.load(folder, optimizer, data=Data())
    assert parts < saved < job.parts, "a watch sees that it reads and writes"
    return told


def test_whatever_fails_on_one_rank_is_one_error_of_all_and_leaves_nothing(tmp_path, workers):
    first, second = workers.run(failures, str(tmp_path), ranks=2, timeout=60)
    assert first == second
    broken = [*IN_SAVE, *IN_LOAD, (1, pretrained, "open_folder", Unsendable("no folder"))]
    for (where, text), (rank, _, _, error) in zip(first, broken, strict=True):
        assert where == "pretrained" or text.startswith("1 problem in this "), (where, text)
        assert f"rank {rank}: " in text and str(error) in text and ".saving" not in text, (where, text)
    assert [p.name for p in checkpoints.complete(tmp_path)] == ["step-00000001", "step-00000003"]


# --- what is saved is what was there at the call --------------------------------------------------------------------


class Counted(Tied):
    """Hands out a state that it goes on changing."""

    def __init__(self):
        super().__init__()
        self.state = {"calls": [1]}

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Schedule:
    """A scheduler that hands out what it goes on changing."""

    def __init__(self):
        self.rates = [1.0]

    def state_dict(self):
        return {"rates": self.rates}

    def load_state_dict(self, state):
        self.rates = state["rates"]


def changed_after_the_call(folder):
    """What is loaded of a save that was written after all of it had changed."""
    job, _, batches = start(LAYOUTS["dp_shard2"], Counted)
    rate, schedule, extra = torch.tensor(1.0), Schedule(), {"list": [1], "tensor": torch.tensor(1.0)}
    optimizer = torch.optim.SGD(job.parameters(), lr=rate, momentum=0.9)
    steps(job, optimizer, batches, 1)
    changed, write = threading.Event(), jobs.write

    def late(*arguments):
        changed.wait(60)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "write", late)
        job.save(folder, optimizer, step=1, scheduler=schedule, extra=extra, wait=False)
        for values in (schedule.rates, extra["list"], job.module.state["calls"]):
            values[0] = 7
        for tensor in (optimizer.param_groups[0]["lr"], extra["tensor"]):
            tensor.fill_(7)
        changed.set()
        job.saved()
    loaded = job.load(folder, optimizer, scheduler=schedule)
    lr, extra = optimizer.param_groups[0]["lr"], loaded.extra
    return [schedule.rates[0], extra["list"][0], job.module.state["calls"][0], lr.item(), extra["tensor"].item()]


def test_what_changes_after_an_asynchronous_save_was_called_is_not_in_it(tmp_path, workers):
    assert workers.run(changed_after_the_call, str(tmp_path), ranks=2) == [[1.0] * 5] * 2


def test_values_that_were_on_a_gpu_load_without_one(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        mw.save_checkpoint(tmp_path, Tied(), step=1, extra={"rate": torch.tensor(0.5)})
    assert mw.load_checkpoint(tmp_path, Tied()).extra["rate"].device.type == "cpu"


def while_saving(folder):
    """In which order a save that is slow and a load of weights do their work."""
    job, optimizer, _ = start(LAYOUTS["dp_shard2"])
    order, reading, write = [], threading.Event(), jobs.write

    def slow(*arguments):
        reading.wait(0.5)  # the reading comes, or waits for this
        path = write(*arguments)
        order.append("saved")
        return path

    def no_folder(path):
        order.append("reads")
        reading.set()
        raise FileNotFoundError(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jobs, "write", slow)
        patched.setattr(pretrained, "open_folder", no_folder)
        job.save(folder, optimizer, step=1, wait=False)
        with pytest.raises(CheckpointError):
            job.load_pretrained(folder)
        job.saved()
    return order


def test_weights_are_not_loaded_while_a_checkpoint_is_being_written(tmp_path, workers):
    assert workers.run(while_saving, str(tmp_path), ranks=2) == [["saved", "reads"]] * 2
