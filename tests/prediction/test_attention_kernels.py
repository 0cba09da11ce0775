"""Attention with dropout or a trained mask: one kernel on an accelerator, several functions on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import meshwright as mw
from meshwright.hardware import Profile, read_profile

GPU = read_profile("h100")
CPU = replace(GPU, name="cpu-local", cores=2, network=None)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, None, p, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.encoder = nn.MultiheadAttention(64, 4, dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.encoder(x, x, x, need_weights=False)[0].square().mean()


@pytest.mark.parametrize("plan", ["dp_shard=2", "tp=2", "pp=2"])
def test_dropout_in_attention_takes_no_memory_on_an_accelerator(plan: str) -> None:
    def of(dropout: float, hardware: Profile) -> tuple[int, float]:
        prediction = mw.predict(lambda: Layers(dropout), (torch.ones(4, 256, 64),), plan, hardware=hardware)
        return prediction.memory(0).peak, prediction.seconds.seconds

    assert of(0.1, GPU) == pytest.approx(of(0.0, GPU), rel=0.01)
    # On a CPU, a block stores some matrices of 4 heads x 256 x 256 numbers for each row.
    assert of(0.1, CPU)[0] > of(0.0, CPU)[0] + 2**20


def test_the_run_s_own_attention_has_its_dropout_again() -> None:
    mw.predict(lambda: Layers(1.0), (torch.ones(4, 8, 64),), "tp=2", hardware=GPU)
    ones = torch.ones(1, 4, 8, 16)
    assert functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=1.0).count_nonzero() == 0


class Biased(nn.Module):
    """A block whose attention adds a trained bias of relative positions, as in BEiT and Swin."""

    def __init__(self, tokens: int, trained: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.zeros(1, 4, tokens, tokens), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, self.bias)
        return x + self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("tokens", [256, 253])
@pytest.mark.parametrize(
    "plan", ["dp_shard=2", "tp=2", "dp_replicate=2", "{mesh: dp_replicate=2, precision: bfloat16}"]
)
def test_a_trained_mask_in_attention_takes_its_gradient_on_an_accelerator(plan: str, tokens: int) -> None:
    def of(trained: bool, hardware: Profile) -> int:
        blocks = nn.Sequential(*(Biased(tokens, trained) for _ in range(4)))
        batch = (torch.ones(4, tokens, 64),)
        return mw.predict(lambda: blocks, batch, plan, loss=torch.sum, hardware=hardware).memory(0).peak

    element = 2 if "bfloat16" in plan else 4
    rows, heads = (4, 2) if "tp" in plan else (2, 4)
    scores = element * rows * heads * tokens**2  # of one block
    biases = 4 * 4 * 4 * tokens**2  # of four blocks, in float32
    # The gradient of a bias has a number for each row until they are added, and that of a parameter has two states.
    assert of(True, GPU) - of(False, GPU) <= 2.2 * scores + 4 * biases
    assert of(True, CPU) - of(False, CPU) > 4 * scores
