"""Saved under one layout, loaded under another: bitwise the same values, and the same training from there on."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from saving import LAYOUTS, Dropping, Tied, load, ranks, rows, save, start, state, steps

NAMES = list(LAYOUTS)
# What continuous integration runs: each layout once, to or from another kind.
QUICK = {
    ("dp_shard3", "branches 1+3"), ("branches 1+3", "tp4"), ("pp2", "dp_shard2"),
}  # fmt: skip


@pytest.fixture(scope="session")
def runs(workers, tmp_path_factory):
    """layout → its folder, the state that was saved, and how the run went on."""
    made = {}

    def of(name):
        if name not in made:
            folder = str(tmp_path_factory.mktemp("saved"))
            made[name] = folder, workers.run(save, LAYOUTS[name], folder, ranks=ranks(LAYOUTS[name]))[0]
        return made[name]

    return of


def same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(a, b, marks=() if (a, b) in QUICK else pytest.mark.proof) for a in NAMES for b in NAMES],
)
def test_any_layout_to_any_layout(saved, loaded, runs, workers):
    folder, (before, losses, after) = runs(saved)
    found, went_on, ended = workers.run(load, LAYOUTS[loaded], folder, ranks=ranks(LAYOUTS[loaded]))[0]
    assert {"words.weight", "blocks.0.attention.qkv.weight.exp_avg", "blocks.1.calls", "step"} <= found.keys()
    same(before, found)
    assert went_on == pytest.approx(losses, rel=1e-12)
    for name, value in after.items():
        if name.endswith("calls"):  # once a microbatch
            continue
        torch.testing.assert_close(ended[name], value, rtol=1e-9, atol=1e-10)


def plain():
    torch.manual_seed(1)
    module = Tied().double()
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("name", ["single", "branches 1+3"])
def test_into_one_plain_process(name, runs):
    folder, (before, *_) = runs(name)
    module, optimizer = plain()
    assert mw.load_checkpoint(folder, module, optimizer).step == 2
    states = {
        f"{n}.{k}": optimizer.state[p][k] for n, p in module.named_parameters() for k in ("exp_avg", "exp_avg_sq")
    }
    values = {n: v for n, v in module.state_dict().items() if n != "head.weight"}
    same(before, {**values, **states, "step": optimizer.state[module.words.weight]["step"].double().float()})
    assert module.head.weight is module.words.weight


def test_from_one_plain_process(tmp_path, workers):
    module, optimizer = plain()
    for _ in range(2):
        module(**rows())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    path = mw.save_checkpoint(tmp_path, module, optimizer, step=2, extra={"note": "odd"})
    assert path == tmp_path / "step-00000002"
    found = workers.run(loaded_without_data, str(tmp_path), ranks=4)[0]
    for name, p in module.named_parameters():
        assert torch.equal(found[name], p)
        assert torch.equal(found[f"{name}.exp_avg"], optimizer.state[p]["exp_avg"])


def loaded_without_data(folder):
    job, optimizer, _ = start(LAYOUTS["pp2-tp2"])
    job.load(folder, optimizer)
    return state(job, optimizer)


@pytest.mark.parametrize("name", ["pp2", pytest.param("pp2-tp2", marks=pytest.mark.proof)])
def test_plain_dcp_reads_it(name, runs):
    """Under the names that ``get_state_dict`` gives, with nothing of ours."""
    from torch.distributed.checkpoint import FileSystemReader, state_dict_loader

    folder, (before, *_) = runs(name)
    module, _ = plain()
    wanted = {"model": {n: torch.empty_like(p) for n, p in module.named_parameters()}}
    state_dict_loader.load(wanted, storage_reader=FileSystemReader(f"{folder}/step-00000002"), no_dist=True)
    for name, value in wanted["model"].items():
        assert torch.equal(value, before[name])


def on(plan, folder):
    job, optimizer, data = start(plan, Dropping)
    job.load(folder, optimizer, data=data)
    return steps(job, optimizer, data, 2), job.load(folder, optimizer, data=data).notes


@pytest.mark.parametrize("name", ["pp2-tp2", pytest.param("branches 1+3", marks=pytest.mark.proof)])
def test_in_its_own_layout_it_goes_on_bitwise_with_the_same_random_numbers(name, tmp_path, workers):
    _, losses, _ = workers.run(save, LAYOUTS[name], str(tmp_path), Dropping, ranks=ranks(LAYOUTS[name]))[0]
    again, notes = workers.run(on, LAYOUTS[name], str(tmp_path), ranks=ranks(LAYOUTS[name]))[0]
    assert again == losses
    assert notes == ()


def test_where_random_numbers_cannot_go_on_it_is_said(tmp_path, workers):
    workers.run(save, LAYOUTS["dp_shard2"], str(tmp_path), Dropping, ranks=2)
    _, notes = workers.run(on, LAYOUTS["dp_shard3"], str(tmp_path), ranks=3)[0]
    assert "random numbers" in notes[0]


@pytest.mark.parametrize("name", ["dp_shard2", pytest.param("pp2-tp2", marks=pytest.mark.proof)])
def test_asynchronously_what_was_is_saved_while_training_goes_on(name, tmp_path, workers):
    before, losses, _ = workers.run(save, LAYOUTS[name], str(tmp_path), Tied, False, ranks=ranks(LAYOUTS[name]))[0]
    found, went_on, _ = workers.run(load, LAYOUTS[name], str(tmp_path), ranks=ranks(LAYOUTS[name]))[0]
    same(before, found)
    assert went_on == losses


def saved_twice(plan, folder):
    """Two asynchronous saves with steps between them; the state at each."""
    job, optimizer, data = start(plan)
    states = []
    for step in (2, 4):
        steps(job, optimizer, data, 2)
        data.start = data.batches_taken
        job.save(folder, optimizer, step=step, data=data, wait=False)
        states.append(state(job, optimizer))
    steps(job, optimizer, data, 1)
    job.saved()
    return states


def loaded_twice(plan, folder):
    states = []
    for step in ("step-00000002", "step-00000004"):
        job, optimizer, data = start(plan)
        job.load(f"{folder}/{step}", optimizer, data=data)
        states.append(state(job, optimizer))
    return states


def test_memory_of_an_asynchronous_save_is_used_again_once_it_is_written(tmp_path, workers):
    before = workers.run(saved_twice, LAYOUTS["dp_shard2"], str(tmp_path), ranks=2)[0]
    found = workers.run(loaded_twice, LAYOUTS["dp_shard2"], str(tmp_path), ranks=2)[0]
    for a, b in zip(before, found, strict=True):
        same(a, b)
