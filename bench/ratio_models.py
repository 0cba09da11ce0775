"""The models of ``ratios.py``: small ones of four shapes, and their batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, VOCAB, EXPERTS, PATCH = 4, 128, 4, 48


class Attention(nn.Module):
    def __init__(self, width: int, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.head, self.causal = width // HEADS, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    """GPT-2's and ViT's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token takes two of them, weighed; none is left out of a step, so that every side reduces all gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(width, EXPERTS, bias=False),
            nn.ModuleList(Gated(width) for _ in range(EXPERTS)),
        )

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype).scatter(-1, chosen, shares)
        return sum((weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros_like(x))


class Block(nn.Module):
    def __init__(self, shape: str, width: int) -> None:
        super().__init__()
        biased, norm = shape in ("gpt2", "vit"), nn.LayerNorm if shape in ("gpt2", "vit") else nn.RMSNorm
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, bias=biased, causal=shape != "vit")
        self.mlp = {"gpt2": Plain, "vit": Plain, "moe": Experts}.get(shape, Gated)(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A decoder of token ids; of the shape ``vit`` an encoder of patches, which gives one class a row."""

    def __init__(self, shape: str, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, width) if shape == "vit" else nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(shape, width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.cross_entropy(self.head(x.mean(1) if labels.dim() == 1 else x).flatten(0, -2), labels.flatten())


def built(case: Any) -> nn.Module:
    """The model of a case."""
    if case.shape != "hf_llama":
        return Model(case.shape, case.blocks, case.width)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=case.width, intermediate_size=3 * case.width, num_hidden_layers=case.blocks,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch_of(case: Any) -> dict[str, Tensor]:
    """The global batch of a case."""
    draw = torch.Generator().manual_seed(1)
    if case.shape == "vit":
        patches = torch.randn(case.rows, case.tokens, PATCH, generator=draw)
        return {"x": patches, "labels": torch.randint(0, VOCAB, (case.rows,), generator=draw)}
    ids = torch.randint(0, VOCAB, (case.rows, case.tokens), generator=draw)
    if case.shape == "hf_llama":
        return {"input_ids": ids, "labels": ids}
    return {"x": ids, "labels": ids.roll(-1, 1)}
