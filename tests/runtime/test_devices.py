"""What a run does with devices, as far as that can be seen without one: calls of torch's are taken down in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright import private
from meshwright.checkpoint.save import Saving
from meshwright.errors import PlanError
from meshwright.recipe import Recipe
from meshwright.runtime.apply import _streams
from meshwright.runtime.branches import streams
from meshwright.runtime.groups import Groups, backend_of, check_unbound, ensure_world
from meshwright.runtime.rows.batch import host_of, moved, with_host
from meshwright.runtime.rows.collectives import gather_rows
from meshwright.runtime.rows.microbatches import take_rows
from meshwright.train.loop import foreach_setting
from meshwright.watch.location import whereabouts
from meshwright.watch.timer import CommunicationTimer
from meshwright.workers.pool import LocalWorkers


class Model(nn.Module):
    """A linear, whose loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.float()).square().mean()


class Scaled(Model):
    """With a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class TwoBlocks(nn.Module):
    """Two blocks that take nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return (a + b).mean()


def _loss(out: Tensor) -> Tensor:
    return out


# --- the world ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine of four GPUs on which this process is rank 6 of 8; what torch is asked for."""
    asked: dict[str, Any] = {}
    for name, value in {"RANK": 6, "WORLD_SIZE": 8, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: asked.update(more, backend=backend))
    return asked


def test_a_world_of_gpus_has_gloo_between_hosts_and_is_bound_to_its_device(node: dict[str, Any]) -> None:
    assert ensure_world("cuda", 60.0) == torch.device("cuda", 2)
    assert node["device"] == node["device_id"] == torch.device("cuda", 2)
    assert node["backend"] == "cpu:gloo,cuda:nccl"


def test_two_ranks_on_one_gpu_are_refused_before_anything_starts(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    with pytest.raises(PlanError) as told:
        ensure_world("cuda", 60.0)
    (finding,) = told.value.findings
    assert finding.given == "5 processes on this machine, which has 4 devices (cuda)"
    assert "--nproc-per-node 4" in finding.fix
    assert not node


def test_a_batch_on_another_device_is_told_in_the_step() -> None:
    job = mw.parallelize(Model, "dp_shard=1", batch=(torch.zeros(2, 4),), loss=_loss, device="cpu")
    with pytest.raises(PlanError, match=r"on meta(.|\n)*on cpu, as the model(.|\n)*t.to\('cpu'\)"):
        job.step((torch.zeros(2, 4, device="meta"),))
    job.step((torch.zeros(2, 4), {"lengths": torch.zeros(2, device="meta")})[:1])


# --- what is the host's -------------------------------------------------------------------------------------------------


def _trains_where_tensors_are_made_elsewhere() -> tuple[float, float, list[str]]:
    data = {"x": torch.arange(32.0).view(8, 4) / 32}
    job = mw.parallelize(Model, "dp_shard=2", batch={"x": torch.zeros(2, 4)}, loss=_loss, device="cpu")
    torch.set_default_device("meta")  # what says no device is made where it has no value
    try:
        batches = job.batches(data, 4, seed=1)
        loss, norm = [(job.step(batch), job.clip_grad_norm_(1.0)) for batch in batches][-1]
        whole = job.full_state_dict()
    finally:
        torch.set_default_device(None)
    return loss.item(), norm.item(), [str(t.device) for t in whole.values()]


def test_what_hosts_tell_each_other_is_on_the_host_whatever_device_is_the_default(workers: LocalWorkers) -> None:
    (loss, norm, devices), (other, _, _) = workers.run(_trains_where_tensors_are_made_elsewhere, ranks=2)
    assert loss == other and loss > 0 and norm > 0
    assert devices == ["cpu"] * 2


def test_a_batch_remembers_its_values_on_the_host_until_it_is_written_to() -> None:
    host = torch.arange(12.0).view(4, 3)
    t = with_host(torch.empty(4, 3, device="meta"), host)
    assert host_of(t) is host and host_of(host) is host and moved(host, torch.device("cpu")) is host
    rows = take_rows((t,), 1, 3)[0]
    assert host_of(rows).equal(host[1:3])
    rows.zero_()  # in the memory of all rows
    assert host_of(t) is None and host_of(rows) is None
    assert host_of(torch.empty(1, device="meta")) is None
    t = with_host(torch.empty(4, 3, device="meta"), host)
    host.add_(1)
    assert host_of(t) is None


def _gathered(dtype: torch.dtype) -> tuple[list[Any], int]:
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    own = torch.tensor([[1, 0], [3, 1], [5, 0]][: rank + 1]).to(dtype)
    batch, first = gather_rows({"x": own}, [(world, world)])
    assert batch["x"].dtype == dtype
    return batch["x"].long().tolist(), first


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.bool, torch.bfloat16], ids=str)
def test_rows_of_types_that_no_backend_knows_are_gathered(workers: LocalWorkers, dtype: torch.dtype) -> None:
    other = [[1, 0], [1, 1]] if dtype == torch.bool else [[1, 0], [3, 1]]
    assert workers.run(_gathered, dtype, ranks=2) == [([[1, 0], *other], 0), ([[1, 0], *other], 1)]


def _kinds(plan: str) -> tuple[bool | None, int]:
    job = mw.parallelize(Scaled, plan, batch=(torch.zeros(2, 4),), loss=_loss, device="cpu")
    parameters = list(job.parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=foreach_setting(parameters))
    job.step((torch.ones(2, 4),))
    optimizer.step()
    return foreach_setting(parameters), len({type(p) for p in parameters})


@pytest.mark.parametrize(("plan", "answer"), [("tp=2", (True, 1)), ("dp_shard=2", (None, 2))])
def test_an_optimizer_updates_parameters_together_if_they_are_of_one_kind(
    workers: LocalWorkers, plan: str, answer: tuple[bool | None, int]
) -> None:
    assert workers.run(_kinds, plan, ranks=2) == [answer] * 2  # over data ranks, a parameter without dims is no DTensor


def _hosts() -> tuple[bool, str, str]:
    job = mw.parallelize(Model, "dp_shard=2", batch=(torch.zeros(2, 4),), loss=_loss, device="cpu")
    groups: Groups = job.groups
    counts = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    groups.sum(counts)
    same = groups.hosts[""] is dist.group.WORLD
    return same, str([c.tolist() for c in counts]), backend_of(groups.hosts["dp_shard"], torch.device("cpu"))


def test_hosts_have_the_groups_of_the_world_if_these_carry_their_tensors(workers: LocalWorkers) -> None:
    assert workers.run(_hosts, ranks=2) == [(True, "[[2.0, 4.0], [[6.0]]]", "gloo")] * 2


def _in_a_world_that_carries_no_tensors_of_the_host() -> tuple[str, list[list[float]]]:
    """The groups of hosts, and sums over them, where the world is said to be of NCCL alone."""
    config = dist.get_backend_config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl" if group is None else config(group))
        job = mw.parallelize(Model, "dp_shard=2,tp=2", batch=(torch.zeros(2, 4),), loss=_loss, device="cpu")
    sums = []
    for axis in ("", "dp_shard", "tp"):
        t = torch.tensor([float(job.rank)])
        dist.all_reduce(t, group=job.groups.hosts[axis])
        sums += t.tolist()
    job.step((torch.ones(2, 4),))
    return backend_of(job.groups.hosts["tp"], torch.device("cpu")), sums


def test_a_persons_world_of_nccl_alone_gets_groups_between_hosts(workers: LocalWorkers) -> None:
    found = workers.run(_in_a_world_that_carries_no_tensors_of_the_host, ranks=4)
    assert found[1] == ("gloo", [0.0 + 1 + 2 + 3, 1.0 + 3, 0.0 + 1])


def test_such_a_world_that_is_bound_to_its_device_is_refused() -> None:
    check_unbound("cuda:nccl", None)
    with pytest.raises(PlanError) as told:
        check_unbound("cuda:nccl", torch.device("cuda", 0))
    assert told.value.findings[0].fix == 'init_process_group("cpu:gloo,cuda:nccl", device_id=...)'


# --- time, threads, streams -----------------------------------------------------------------------------------------------


class _Event:
    """An event of a stream; those past ``reached`` are to come."""

    made, reached = 0, 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        _Event.made += 1
        self.number = _Event.made

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.number <= _Event.reached

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end.number - self.number)


def test_time_that_a_stream_waits_is_added_when_it_is_past_and_no_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    timer = CommunicationTimer(torch.device("cuda", 0))
    for _ in range(3):
        with timer.on():
            pass
    assert timer.take() == 0.0
    _Event.reached = 4  # two of three pairs
    assert timer.take() == 2.0 and timer.take() == 0.0
    for _ in range(100):  # a loop that never asks: what the stream is past is not kept
        _Event.reached = _Event.made
        with timer.on():
            pass
    assert len(timer._pairs) <= 1
    with timer.on(between_hosts=True):
        pass
    assert 0 < timer.take() < 101.0 + 1.0


def test_the_thread_that_saves_is_on_the_device_of_the_one_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    Saving(lambda: __import__("pathlib").Path("there"), wait=False).wait()
    assert chosen == [3]


@pytest.mark.parametrize(("plan", "device"), [("tp=2", "cuda"), ("dp_shard=2", "cuda"), ("tp=2", "cpu")])
def test_streams_beside_collectives_are_refused(plan: str, device: str) -> None:
    batch = (torch.zeros(2, 4),)
    modules = {"a": {"on": "stream[0]"}, "b": {"on": "stream[1]"}}
    recipe: Recipe = mw.make_recipe(TwoBlocks, {"mesh": plan, "modules": modules}, batch, _loss)
    groups = type("Groups", (), {"device": torch.device(device)})()
    assert recipe.streams
    assert _streams(recipe, groups) is None
    assert "one after the other" in streams.note(recipe, torch.device(device))


# --- a hang ---------------------------------------------------------------------------------------------------------------


def test_a_main_thread_that_reads_a_value_waits_in_the_collective_that_its_device_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = {
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": 7,
        "state": "started",
        "process_group": ["0", "tp"],
    }
    monkeypatch.setattr(private, "last_collective", lambda: entry)
    seen = whereabouts()
    assert seen.collective == "all_reduce on the device"
    assert seen.recorded == "all_reduce number 7 of group 0 tp (): started".replace("all_reduce", "nccl:all_reduce")
    entry["state"] = "completed"
    assert whereabouts().collective == ""
    entry.update(profiling_name="gloo:all_reduce", state="scheduled")  # gloo's are the main thread's own
    assert whereabouts().collective == ""
