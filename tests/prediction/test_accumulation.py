"""Sums of two gradients of one value: the memory that a tracker counts is what torch's allocator reports without a tracker."""

import pytest
import torch
from test_allocations import taken
from torch import nn

from meshwright.prediction.memory import levels_of
from meshwright.prediction.tracker import Tracker, followed


def used_twice(h):
    return h.neg(), h * 3


def used_three_times(h):
    return h.neg(), h * 3, h * 4


def used_twice_by_one(h):
    return ((h + h).neg(),)


def a_gradient_that_another_use_needs_too(h):
    both = (h + h.neg()).neg()  # both summands get one gradient: the sum of it and its negative
    return both, h * 3


def of_views(h):
    return h.view(-1, 4).neg(), h.view(-1, 4) * 3


@pytest.mark.parametrize(
    "uses", [used_twice, used_three_times, used_twice_by_one, a_gradient_that_another_use_needs_too, of_views]
)
def test_a_sum_of_gradients_takes_what_it_takes_without_a_tracker(uses):
    x = torch.randn(500, 500, requires_grad=True)
    loss = sum(use.sum() for use in uses(x.exp()))

    def backward():
        return torch.autograd.grad(loss, x, retain_graph=True)

    most, _, _ = taken(backward)
    tracker = Tracker(nn.Module(), lambda: None)
    with followed(tracker):
        tracker.begin("backward")
        backward()
    phases = levels_of(tracker.close()).phases
    assert max(moment.nbytes for phase in phases for moment in phase.moments) == pytest.approx(most, rel=0.01)
