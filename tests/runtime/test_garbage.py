"""What a step leaves is freed when the step ends, and not when Python happens to collect garbage."""

import gc

import pytest
import torch

from meshwright import parallelize
from zoo import ZOO


def tensors_left(build, batch, plan):
    """Bytes of tensors that only Python's garbage collector frees, after a step."""
    job = parallelize(build, plan, batch=batch)
    for _ in range(2):
        job.step(batch)
    gc.collect()
    gc.disable()
    try:
        job.step(batch)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [tuple(t.shape) for t in gc.garbage if type(t) is torch.Tensor and t.numel()]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


PLANS = [
    "tp=2",
    {"mesh": "dp_shard=2", "recompute": "blocks"},
    {"mesh": "pp=2", "microbatches": 2},
    {"mesh": "pp=2", "microbatches": 2, "recompute": "blocks"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["alibi", "llama"])
def test_no_tensor_waits_for_the_garbage_collector(name, plan, workers):
    left = workers.run(tensors_left, ZOO[name].build, ZOO[name].batch(), plan, ranks=2)
    assert left == [[], []]
