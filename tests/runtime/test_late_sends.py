"""Gradients that are used late, by another stage or for a weight, are what they were."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

import meshwright as mw
from meshwright.runtime.pipeline.transfers import Transfers


class Shift(nn.Module):
    """A table is added to a value. For one row, both have one gradient, in one memory."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 4))

    def forward(self, h):
        return self.table[None] + h.reshape(-1, 2, 4)


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body, self.shift, self.head = nn.Linear(4, 8), nn.Linear(8, 8), Shift(), nn.Linear(4, 4)

    def forward(self, x):
        return SimpleNamespace(loss=self.head(self.shift(self.body(self.stem(x)))).square().mean())


def gradients(plan, late):
    """The gradients of a step, of what this rank holds; ``late``: gradients are sent when all actions are done."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 4, dtype=torch.float64)}
    job = mw.parallelize(Modulated, plan, batch=batch, dtype=torch.float64)
    send, end, waiting = Transfers._send, Transfers.end, []

    def sent(self, action, tensors):
        if action.kind == "SEND_B":
            waiting.append((action, tensors))
        else:
            send(self, action, tensors)

    def ended(self):
        for action, tensors in waiting:
            send(self, action, tensors)
        waiting.clear()
        end(self)

    with mock.patch.object(Transfers, "_send", sent if late else send), mock.patch.object(Transfers, "end", ended):
        job.step(batch)
    return {name: p.grad for name, p in job.named_parameters() if not p.is_meta}


def test_a_gradient_that_is_sent_late_is_what_it_was(workers):
    expected = workers.run(gradients, "dp_shard=1", False, ranks=1)[0]
    places = {"stem": {"on": "pp[0]"}, "body": {"on": "pp[0]"}, "shift": {"on": "pp[1]"}}
    plan = {"mesh": {"pp": 2}, "microbatches": 2, "modules": places}
    for found in workers.run(gradients, plan, True, ranks=2, timeout=60):
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def test_a_weight_s_gradient_that_is_made_late_is_of_what_it_was(workers):
    expected = workers.run(gradients, "dp_shard=1", False, ranks=1)[0]
    plan = {"mesh": {"pp": 2}, "microbatches": 2, "schedule": "zero_bubble", "modules": {"body": {"on": "pp[1]"}}}
    for found in workers.run(gradients, plan, False, ranks=2, timeout=60):
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)
