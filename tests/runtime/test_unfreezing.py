"""Parameters that are frozen, and trained again, between steps: as on one device, or one error."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.workers.pool import WorkerError

WIDTH, CLASSES = 8, 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids, labels):
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return {"loss": F.cross_entropy((self.scale * self.head(x)).flatten(0, 1), labels.flatten())}


class HeadAlone(Net):
    """All but the head is frozen when the job is made."""

    def __init__(self):
        super().__init__()
        for p in (*self.table.parameters(), *self.layers.parameters(), self.scale):
            p.requires_grad_(False)


def freeze(model):
    for p in (*model.table.parameters(), *model.layers[0].parameters(), model.scale):
        p.requires_grad_(False)


def unfreeze(model):
    model.requires_grad_(True)


CHANGES = {Net: (freeze, unfreeze), HeadAlone: (unfreeze, freeze)}


def sample():
    ids = torch.randint(0, CLASSES, (8, 5), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": (ids * 5 + 1) % CLASSES}


def trained(model, step, optimizer, build):
    losses = []
    for change in (lambda m: None, *CHANGES[build]):
        change(model)
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_job(build, plan):
    job = mw.parallelize(build, {**plan, "seed": 0}, batch=sample(), dtype=torch.float64)
    rows = 8 // job.recipe.mesh.data_size
    first = rows * job.recipe.mesh.data_index(job.rank)
    batch = {name: t[first : first + rows] for name, t in sample().items()}
    losses = trained(job.module, lambda: job.step(batch).item(), torch.optim.SGD(job.parameters(), lr=0.1), build)
    return losses, {line.name: value for line, value in job.full_parameters()}


def on_one_device(build):
    torch.manual_seed(0)
    model = build().double()

    def step():
        loss = model(**sample())["loss"]
        loss.backward()
        return loss.item()

    losses = trained(model, step, torch.optim.SGD(model.parameters(), lr=0.1), build)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


STAGED = {"mesh": "pp=2", "microbatches": 2}
PLANS = [{"mesh": "dp_shard=2"}, {"mesh": "dp_replicate=2"}, {"mesh": "tp=2"}, STAGED]


@pytest.mark.parametrize("build", CHANGES, ids=lambda build: build.__name__)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_what_is_frozen_and_unfrozen_is_trained_as_on_one_device(build, plan, workers):
    if (build, plan) == (HeadAlone, STAGED):
        with pytest.raises(WorkerError, match=r"UnfrozenError: .*freeze parameters after parallelize"):
            workers.run(in_job, build, plan, ranks=2)
        return
    losses, parameters = workers.run(in_job, build, plan, ranks=2)[0]
    expected_losses, expected = on_one_device(build)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-9, atol=1e-12)
