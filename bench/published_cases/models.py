"""The models of published tables, in plain torch: a GPT (also MPT), a Llama, a ViT. Each returns its loss.

Sources of the shapes of computation: Megatron-LM's GPT (arXiv 1909.08053); MPT (mosaicml/llm-foundry); Llama 2
(arXiv 2307.09288); ViT (arXiv 2010.11929).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published_cases.case import ModelShape

PATCH = 3 * 14 * 14  # numbers of one patch of an image: ViT-H/14


@dataclass
class Output:
    loss: Tensor


def build_model(shape: ModelShape) -> Callable[[], nn.Module]:
    """A function without arguments that makes the model. Parameters are float32, on the default device (meta: no memory)."""
    return partial(_MODELS[shape.kind], shape)


class Gpt(nn.Module):
    """Learned positions, LayerNorm before each part, GELU, biases everywhere; the head shares the embedding's weight or not."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.dropout = Dropout(shape.dropout)
        self.layers = nn.ModuleList(GptBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        """``tokens``, ``labels``: (rows, sequence), whole numbers below the vocabulary's size."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return _token_loss(self.head(self.norm(x)), labels)


class GptBlock(nn.Module):
    def __init__(self, shape: ModelShape, *, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention = FusedAttention(shape, causal=causal)
        self.up = nn.Linear(shape.hidden, shape.intermediate)
        self.down = nn.Linear(shape.intermediate, shape.hidden)
        self.dropout = Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class FusedAttention(nn.Module):
    """Query, key and value of one matrix product; ``shape.attention`` says whether the scores are kept."""

    def __init__(self, shape: ModelShape, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.plain = shape.attention == "plain"
        self.dropout = Dropout(shape.dropout)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attend = self._plain if self.plain else self._flash
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The scores are kept. Megatron-LM scales them in their product and masks them in the kernel of their softmax
        (megatron/fused_kernels), which moves no bytes for it: neither is here, so no token is hidden from another."""
        return self.dropout((q @ k.transpose(-2, -1)).softmax(-1)) @ v

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Dropout(nn.Module):
    """The memory of dropout, a mask of one byte a number, and nearly its work, without random numbers.

    Over ``tp`` Meshwright draws the mask of the full tensor on each rank, so that every layout trains as one device does;
    Megatron-LM, which the tables measured, draws a rank's own part alone.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones_like(x, dtype=torch.bool) if self.probability > 0 else x


class Llama(nn.Module):
    """Rotary positions, RMSNorm, SwiGLU, no biases, grouped heads for key and value."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        """``tokens``, ``labels``: (rows, sequence), whole numbers below the vocabulary's size."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return _token_loss(self.head(self.norm(x)), labels)


class LlamaBlock(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = GroupedAttention(shape)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GroupedAttention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head, self.grouped = shape.hidden // shape.heads, shape.kv_heads != shape.heads
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k, self.v = (nn.Linear(shape.hidden, shape.kv_heads * self.head, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of (rows, heads, sequence, head)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Vit(nn.Module):
    """Images as rows of flat patches; a mean over patches; ``shape.vocab`` classes."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.layers = nn.ModuleList(GptBlock(shape, causal=False) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab)

    def forward(self, patches: Tensor, labels: Tensor) -> Output:
        """``patches``: (rows, sequence, PATCH); ``labels``: (rows,), whole numbers below the number of classes."""
        x = self.patches(patches) + self.positions(torch.arange(patches.shape[1], device=patches.device))
        for layer in self.layers:
            x = layer(x)
        return Output(F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels))


def _token_loss(logits: Tensor, labels: Tensor) -> Output:
    """The mean over all tokens, in float32, as Megatron-LM and torchtitan compute it."""
    return Output(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


_MODELS: dict[str, Callable[[ModelShape], nn.Module]] = {"gpt": Gpt, "mpt": Gpt, "llama": Llama, "vit": Vit}
