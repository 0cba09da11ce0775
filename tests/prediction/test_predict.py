"""A step's seconds, from those of its roles."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright import predict
from meshwright.hardware.profile import Curve
from meshwright.hardware.reader import read_profile

WIDTH = 256


class Fork(nn.Module):
    """Two branches of one input; one has 64 times the work of the other."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, first), nn.Linear(first, WIDTH))
        self.second = nn.Sequential(nn.Linear(WIDTH, second), nn.Linear(second, WIDTH))

    def forward(self, x):
        x = self.stem(x)
        return (self.first(x) + self.second(x)).square().mean()


def loss(output):
    return output


def test_of_two_branches_the_slower_one_counts():
    plan = {"mesh": "tp=2", "modules": {"first": {"on": "tp[0]"}, "second": {"on": "tp[1]"}}}
    batch = (torch.empty(4096, WIDTH, device="meta"),)
    widths = (16384, 256), (256, 16384), (256, 256)
    slow_first, slow_second, fast = (
        predict(lambda w=w: Fork(*w), batch, plan, loss=loss).seconds.seconds for w in widths
    )
    assert slow_first == pytest.approx(slow_second, rel=0.02)
    assert slow_second > 2 * fast


def deep():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def square(output):
    return output.square().mean()


@pytest.mark.parametrize(("ranks_a_node", "crosses"), [(3, True), (2, False)])
def test_a_transfer_takes_what_it_takes_between_the_farthest_ranks_of_its_stages(ranks_a_node, crosses):
    """Stages on ranks 0, 2 and 1, 3: in nodes of three, rank 2 sends to another node."""
    h100 = read_profile("h100")
    assert h100.network is not None
    far = replace(h100, devices_per_node=ranks_a_node, network=replace(h100.network, latency=1.0))
    batch = (torch.empty(8, WIDTH, device="meta"),)
    plan = {"mesh": "dp_replicate=2,pp=2", "microbatches": 1}
    sends = predict(deep, batch, plan, hardware=far, loss=square).seconds.waterfall["waiting for other stages"]
    assert (sends > 0.5) == crosses


@pytest.mark.parametrize(
    ("mesh", "meetings"), [("dp_replicate=2", 2), ("dp_shard=2", 3), ("pp=2", 3), ("dp_shard=1", 0)]
)
def test_ranks_wait_for_each_other_as_often_as_they_meet(mesh, meetings):
    """A gather, a reduction and the norm of gradients; or a sum and the norm; or two microbatches, and the norm."""
    h100 = read_profile("h100")
    skewed = replace(h100, skew=Curve(((1e-9, 1.0), (1.0, 1e-3))))
    batch, plan = (torch.empty(8, WIDTH, device="meta"),), {"mesh": mesh, "microbatches": 2 if "pp" in mesh else 1}
    before, now = (predict(deep, batch, plan, hardware=profile, loss=square).seconds for profile in (h100, skewed))
    assert now.waterfall.get("waiting for other ranks", 0.0) == pytest.approx(skewed.waiting(before.seconds, meetings))
    assert now.seconds == pytest.approx(sum(now.waterfall.values()))
