"""What FSDP2's hooks and copies take on the host, where a device waits for it: in predictions, and in the estimates of searches."""

from collections import Counter
from functools import partial

import pytest
import torch

import meshwright as mw
from meshwright.prediction.clock import SPAN, last_step
from meshwright.prediction.job_costs import Block, Small
from meshwright.prediction.rehearsal import rehearsal_of, rehearse
from meshwright.prediction.trace import Op
from meshwright.schedule import Action

IDS = (torch.arange(8 * 16).reshape(8, 16) % 64,)


class Decoder(Small):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(32) for _ in range(depth))


def itself(loss):
    return loss


def spans(depth, settings):
    """Kind of action → number of spans in the last step of rank 0."""
    rehearsal = rehearsal_of(partial(Decoder, depth), IDS, mw.Plan.parse(settings), itself, torch.optim.AdamW, 1.0)
    counts = Counter()
    for label, events in last_step(rehearse(rehearsal, 0)):
        if isinstance(label, Action):
            counts[label.kind] += sum(isinstance(event, Op) and event.name == SPAN for event in events)
    return counts


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({"mesh": "dp_shard=2", "microbatches": 2}, 2 * (2 + 2), 2 * (4 + 2) + 2),
        ({"mesh": "dp_replicate=2", "precision": "bfloat16"}, 2, 4 + 2),
        pytest.param({"mesh": "dp_shard=2"}, 2 + 2, 4 + 2 + 2, marks=pytest.mark.proof),
        pytest.param({"mesh": "dp_shard=2", "reshard_after_forward": False}, 2 + 2, 4 + 2, marks=pytest.mark.proof),
        pytest.param({"mesh": "dp_replicate=2,tp=2"}, 2, 4 + 2, marks=pytest.mark.proof),
        pytest.param({"mesh": "dp_replicate=2"}, 0, 0, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_the_hooks_of_a_unit_have_as_many_spans_as_are_counted(settings, forward, backward):
    """``search/units.py`` counts them so: of a pass, a gather and a reduction. Another torch may have others."""
    fewer, more = spans(2, settings), spans(3, settings)
    assert more["F"] - fewer["F"] == forward and more["B"] - fewer["B"] == backward


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.proof)])
def test_an_estimate_is_near_its_prediction_where_the_host_is_slower_than_the_device(precision):
    """A narrow model on a fast device: nearly all time is the host's."""
    found = mw.find_plans(
        partial(Decoder, 4), IDS, devices=2, hardware="a100-80", loss=itself, top=100, options={"precision": precision}
    )
    best = {}
    for plan in found.plans:
        if plan.plan.mesh.axis_size("pp") == 1:
            best.setdefault(str(plan.plan.mesh), plan)
    assert len(best) >= 2
    for mesh, plan in best.items():
        predicted = mw.predict(partial(Decoder, 4), IDS, plan.plan, hardware="a100-80", loss=itself).seconds.seconds
        assert plan.estimate.seconds == pytest.approx(predicted, rel=0.1), mesh
