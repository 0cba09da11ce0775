"""Optimizers, schedulers, what cannot be saved, and ranks that fail while others do not."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint.storage import Writer
from meshwright.errors import CheckpointError
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.workers.pool import WorkerError
from saving import LAYOUTS, Tied, rows, start, steps


def groups(job):
    """What decays and what does not, as people make them."""
    named = list(job.named_parameters())
    return [
        {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0, "lr": 0.5},
        {"params": [p for n, p in named if p.dim() >= 2], "weight_decay": 0.1},
    ]


def momentum(job):
    return torch.optim.SGD(groups(job), lr=0.05, momentum=0.9)


def two(job):
    first, second = groups(job)
    return [torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.AdamW([second], lr=1e-2, amsgrad=True)]


def adagrad(job):
    return torch.optim.Adagrad(job.parameters(), lr=1e-2)


class Counting(torch.optim.SGD):
    """Keeps a number of its own, which is no tensor."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1


def counting(job):
    return Counting(job.parameters(), lr=0.05)


def trained(make, plan, folder, count, load):
    """Losses of ``count`` steps with learning rates that fall; saved, or loaded first."""
    job, _, data = start(plan)
    made = make(job)
    every = made if isinstance(made, list) else [made]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.7) for o in every]
    if load:
        job.load(folder, made, scheduler=schedulers[0], data=data)
        for other in schedulers[1:]:
            other.load_state_dict(schedulers[0].state_dict())
    losses = []
    for _, batch in zip(range(count), data, strict=False):
        losses.append(job.step(batch).item())
        for o in (*every, *schedulers):
            o.step()
        job.module.zero_grad()
    if not load:
        job.save(folder, made, step=count, scheduler=schedulers[0], data=data)
    rates = [g["lr"] for o in every for g in o.param_groups]
    states = [dict(o.state[p]) for o in every for g in o.param_groups for p in g["params"]]
    return losses, rates, [s.get("count") for s in states]


@pytest.mark.parametrize(
    "make", [two, counting, *(pytest.param(m, marks=pytest.mark.proof) for m in (momentum, adagrad))]
)
def test_optimizers_go_on_in_another_layout(make, tmp_path, workers):
    undisturbed, rates, counts = workers.run(trained, make, LAYOUTS["tp2"], str(tmp_path / "all"), 4, False, ranks=2)[0]
    workers.run(trained, make, LAYOUTS["tp2"], str(tmp_path / "two"), 2, False, ranks=2)
    went_on, again, counted = workers.run(trained, make, LAYOUTS["pp2"], str(tmp_path / "two"), 2, True, ranks=2)[1]
    assert went_on == pytest.approx(undisturbed[2:], rel=1e-9)
    assert again == pytest.approx(rates)
    assert set(counted) <= set(counts)


class Factored(torch.optim.SGD):
    """Keeps a mean of each row."""

    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"] if p.dim() == 2 and p.grad is not None):
            self.state[p]["rows"] = torch.ones(local_tensor(p).shape[0], 1, dtype=p.dtype)


def factored(folder):
    job, _, data = start(LAYOUTS["tp2"])
    optimizer = Factored(job.parameters(), lr=0.1)
    steps(job, optimizer, data, 1)
    job.save(folder, optimizer, step=1)


def test_a_state_of_another_shape_is_refused_before_anything_is_written(tmp_path, workers):
    with pytest.raises(WorkerError, match=r"Factored keeps a tensor of shape \(\d+, 1\) for it"):
        workers.run(factored, str(tmp_path / "runs"), ranks=2)
    assert not (tmp_path / "runs").exists()


def in_two(folder):
    job, _, _ = start(LAYOUTS["tp2"])
    with pytest.raises(
        CheckpointError, match=r"required: the parameter's shape, \(37, 12\), so that it can be sharded"
    ):
        job.load(folder, torch.optim.Adafactor(job.parameters()))


def test_where_all_of_the_parameter_is_here_any_state_is_saved(tmp_path, workers):
    module = Tied()
    optimizer = torch.optim.Adafactor(module.parameters())
    module(**rows())["loss"].backward()
    optimizer.step()
    mw.save_checkpoint(tmp_path, module, optimizer, step=1)
    mw.load_checkpoint(tmp_path, again := Tied(), other := torch.optim.Adafactor(again.parameters()))
    for p, q in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q) and optimizer.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(optimizer.state[p][k], other.state[q][k]) for k in optimizer.state[p])
    workers.run(in_two, str(tmp_path), ranks=2)


def unlike(folder):
    job, optimizer, data = start(LAYOUTS["dp_shard2"])
    steps(job, optimizer, data, 1)
    job.save(folder, optimizer, step=1)
    optimizer = torch.optim.AdamW(job.parameters())
    try:
        job.load(folder, [optimizer, optimizer], scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    except CheckpointError as error:
        many = [f.where for f in error.findings]
    try:
        job.load(folder, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1), data=data)
    except CheckpointError as error:
        none = [(f.where, f.fix) for f in error.findings]
    return many, none


def test_what_was_not_saved_is_not_loaded(tmp_path, workers):
    many, none = workers.run(unlike, str(tmp_path), ranks=2)[1]
    assert many == ["optimizer"]
    assert none == [("scheduler", "load without scheduler="), ("data", "load without data=")]


class FullDisk(Writer):
    def write_data(self, plan, planner):
        raise OSError(28, "No space left on device")


def full(folder, wait):
    from meshwright.checkpoint import save

    job, optimizer, _ = start(LAYOUTS["pp2-tp2"])
    job.save(folder, optimizer, step=1)
    if job.rank == 2:
        save.Writer = FullDisk
    try:
        job.save(folder, optimizer, step=2, wait=wait)
        job.saved()
    except CheckpointError as error:
        told = str(error)
    finally:
        save.Writer = Writer
    job.save(folder, optimizer, step=3, wait=False)
    job.save(folder, optimizer, step=4, wait=False, keep=2)
    job.saved()
    return told


@pytest.mark.parametrize("wait", [True, False])
def test_one_rank_without_space_ends_the_save_on_all(wait, tmp_path, workers):
    for told in workers.run(full, str(tmp_path), wait, ranks=4):
        assert "rank 2: [Errno 28] No space left on device" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]


class Stateful(Tied):
    """Has a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, ids):
        self.seen += 1
        return super().forward(ids)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_states_of_modules_that_are_no_tensors(tmp_path):
    module = Stateful()
    module(**rows())
    mw.save_checkpoint(tmp_path, module, step=1)
    mw.load_checkpoint(tmp_path, again := Stateful())
    assert again.seen == 1


def more_than_its_share(plan, folder, load):
    """Bytes that tensors take at the most during a save or load, besides those that are there; the largest; the share."""
    job = mw.parallelize(Wide, plan, batch=(torch.randn(4, 512),), loss=torch.sum)
    optimizer = torch.optim.AdamW(job.parameters())
    job.step((torch.randn(4, 512),))
    optimizer.step()
    optimizer.zero_grad()
    with Peak() as peak:
        job.load(folder, optimizer) if load else job.save(folder, optimizer, step=1)
    share = sum(p.numel() for p in job.parameters()) * 4 * 3
    return peak.most, 512 * 512 * 4, share


class Wide(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*(torch.nn.Linear(512, 512) for _ in range(8)))


class Peak:
    """The most resident memory above that at the start, sampled."""

    def __enter__(self):
        import threading

        self.start, self.most, self.on = self.now(), 0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def now(self):
        with open("/proc/self/statm") as counts:
            return int(counts.read().split()[1]) * 4096

    def watch(self):
        import time

        while self.on:
            self.most = max(self.most, self.now() - self.start)
            time.sleep(0.0005)

    def __exit__(self, *error):
        self.on = False
        self.thread.join()


@pytest.mark.parametrize("load", [False, True])
def test_no_rank_holds_more_than_its_share_and_one_tensor(load, tmp_path, workers):
    plan, other = {"mesh": {"dp_shard": 2}}, {"mesh": {"tp": 2}}
    workers.run(more_than_its_share, plan, str(tmp_path), False, ranks=2)  # what a first save imports and sets up
    for most, largest, share in workers.run(more_than_its_share, other if load else plan, str(tmp_path), load, ranks=2):
        assert share > 12 * largest
        # A load allocates the state that it reads; one chunk passes through a buffer or two, in a file and in a tensor.
        assert most < (share * 2 // 3 if load else 0) + 4 * largest


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def one_after_the_other(optimizer):
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.25, total_iters=1)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, falling(optimizer)], milestones=[1])


def in_phases(optimizer):
    peaks = [2 * group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, peaks, total_steps=8)


def optimizer_of(named, rate):
    """A group for each module; ``rate``: its name → the learning rate."""
    groups = {}
    for name, p in named:
        module = ".".join(name.split(".")[:2])
        groups.setdefault(module, {"params": [], "lr": rate(module)})["params"].append((name, p))
    return torch.optim.SGD(groups.values(), momentum=0.9)


def rates(optimizer):
    return {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}


def rate(module):
    return float(1 + sum(map(ord, module)) % 11)


def scheduled(schedule, plan, folder, load):
    """The learning rate of each parameter after three steps of a scheduler, between the first and the second of which it is
    saved and loaded; and the rates that the scheduler names."""
    job, *_ = start(plan)
    named = [*job.named_parameters()][:: -1 if load else 1]
    optimizer = optimizer_of(named, lambda module: 9.0 if load else rate(module))
    scheduler = schedule(optimizer)
    optimizer.step()
    if not load:
        scheduler.step()
        job.save(folder, optimizer, step=1, scheduler=scheduler)
    else:
        job.load(folder, optimizer, scheduler=scheduler)
    scheduler.step()
    scheduler.step()
    return rates(optimizer), scheduler.get_last_lr()


@pytest.mark.parametrize("schedule", [falling, one_after_the_other, in_phases])
@pytest.mark.parametrize(("before", "after"), [("pp2", "tp2"), ("tp2", "pp2"), ("pp2", "pp2")])
def test_each_module_may_have_a_rate_of_its_own_over_stages_too(schedule, before, after, tmp_path, workers):
    one = optimizer_of(Tied().named_parameters(), rate)
    scheduler = schedule(one)
    one.step()
    for _ in range(3):
        scheduler.step()
    for plan, load in ((before, False), (after, True)):
        for found, last in workers.run(scheduled, schedule, LAYOUTS[plan], str(tmp_path), load, ranks=2):
            assert found == {name: pytest.approx(rates(one)[name]) for name in found} and set(last) == {*found.values()}
