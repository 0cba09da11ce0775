"""The same loss, gradients and update as one device in plain PyTorch, on a GPU: alone, and shared by several processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gpu_models import Convolutions, Decoder, Experts, Twins, itself, numbers, words

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

DECODER: dict[str, Any] = {
    "shards": "dp_shard=2",
    "replicas": "dp_replicate=2",
    "replicas of shards": "dp_replicate=2,dp_shard=2",
    "tensor parallel": "tp=2",
    "sequence parallel": {"mesh": "tp=2", "sequence_parallel": True},
    "shards of shards": "dp_shard=2,tp=2",
    "stages": {"mesh": "pp=2", "microbatches": 4},
    "stages of shards": {"mesh": "pp=2,dp_shard=2", "microbatches": 4},
    "zero bubble": {"mesh": "pp=2", "microbatches": 4, "schedule": "zero_bubble"},
    "recompute": {"mesh": "dp_shard=2", "recompute": "blocks", "microbatches": 2},
    "half types": {"mesh": "dp_shard=2,tp=2", "precision": "bfloat16"},
}


@pytest.mark.parametrize("name", DECODER)
def test_a_decoder_with_uneven_labels(name: str, pool: LocalWorkers) -> None:
    report = mw.check(Decoder, words(), DECODER[name], loss=itself, workers=pool)
    assert report, str(report)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_a_world_of_one_rank(precision: str, alone: LocalWorkers) -> None:
    dtype = torch.float32 if precision == "float32" else None
    plan = {"mesh": "dp_shard=1", "microbatches": 2, "precision": precision}
    report = mw.check(Decoder, words(), plan, loss=itself, workers=alone, dtype=dtype)
    assert report, str(report)


@pytest.mark.parametrize(
    ("build", "batch", "plan"),
    [
        (Experts, numbers(8, 8), "dp_shard=2"),
        (Convolutions, numbers(4, 3, 6, 6), "dp_shard=2"),
        (Convolutions, numbers(4, 3, 6, 6), "tp=2"),
        (Twins, numbers(4, 16), {"mesh": "tp=2", "modules": {"a": {"on": "tp[0:1]"}, "b": {"on": "tp[1:2]"}}}),
        (partial(Twins, 16), numbers(4, 16), {"mesh": "dp_shard=1", "modules": {"a": {"on": "stream[0]"}, "b": {"on": "stream[1]"}}}),
    ],
    ids=["experts", "rows that couple", "convolutions over tp", "branches", "streams"],
)  # fmt: skip
def test_other_models(build: Any, batch: Any, plan: Any, pool: LocalWorkers) -> None:
    report = mw.check(build, batch, plan, loss=itself, workers=pool)
    assert report, str(report)
