"""Packed sequences: rows of different lengths for ``nn.LSTM`` and its like. The lengths are read on the host, from the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import meshwright as mw
from meshwright.workers.pool import LocalWorkers


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lower = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.upper, self.head = nn.GRU(16, 8, num_layers=2, batch_first=True), nn.Linear(8, 5)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.lower(packed)
        packed, last = self.upper(packed)
        padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])
        return self.head(padded + last[-1][:, None])


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    return ids, torch.tensor([6, 2, 4, 3])


PLANS: dict[str, Any] = {
    "pp": {"mesh": "pp=2"},
    "pp, microbatches": {"mesh": "pp=3", "microbatches": 2},
    "tp": {"mesh": "tp=2"},
    "dp_shard": {"mesh": "dp_shard=2"},
    "pp, dp_shard": {"mesh": "pp=2,dp_shard=2"},
}


@pytest.mark.parametrize("plan", [p if p.startswith("pp") else pytest.param(p, marks=pytest.mark.proof) for p in PLANS])
def test_lengths_of_rows_are_those_of_each_batch(plan: str, workers: LocalWorkers) -> None:
    """The rows of later steps, and of microbatches, have other lengths than the sample's."""
    report = mw.check(
        Encoder, batch(), PLANS[plan], loss=lambda out: out.square().mean(), dtype=torch.float64, workers=workers
    )
    assert report, report
