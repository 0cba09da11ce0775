"""The zoo: tiny models of every kind, written as ordinary people write them, which the tests run unedited.

An `Entry` is a pair of picklable callables. `build()` gives a fresh module in train mode whose forward
takes the batch as keywords and returns something with `.loss`; `batch()` gives four rows (so two or four
data-parallel ranks divide it), the same ones at each call. Where the loss ignores labels, each row ignores
a different number of them, so that a mean of per-rank means is not the mean. A step takes some milliseconds.

`python tests/zoo.py [name ...]` runs one plain float64 step of each and prints what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Any]  # tensors; in `structures` a nested dict of them, in `clip` also a bool

ROWS, LENGTH, VOCAB, DIM, HEADS = 4, 12, 128, 32, 4
IGNORED = (1, 4, 2, 6)  # how many labels each row ignores


@dataclass(frozen=True)
class Entry:
    """One model and its batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    family: str = "odd"  # "issue": one of the ten kinds that the parity matrix runs; "odd": the rest
    mean: str = "rows"  # over what the loss is a mean: "rows"; "tokens": the labels that count; "shifted":
    # those but for each row's first, as a causal model of transformers has it; "mixed": a sum of unlike means
    couples_batch: bool = False  # rows computed apart change the loss, however they are averaged
    random: bool = False  # draws random numbers in forward
    float64: bool = True  # every op of it knows float64
    note: str = ""


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


# --- batches ------------------------------------------------------------------------------------------------


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _integers(high: int, *shape: int, seed: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def _labels(vocab: int, length: int, ignore_index: int = -100) -> Tensor:
    labels = _integers(vocab, ROWS, length, seed=1)
    for row, ignored in zip(labels, IGNORED, strict=True):
        row[length - ignored :] = ignore_index
    return labels


def _padding_mask(length: int) -> Tensor:
    """One where a token is real; the rows have different lengths."""
    return (torch.arange(length) < length - torch.tensor(IGNORED)[:, None]).long()


def tokens(vocab: int = VOCAB, length: int = LENGTH) -> Batch:
    return {"input_ids": _integers(vocab, ROWS, length, seed=0), "labels": _labels(vocab, length)}


def padded_tokens() -> Batch:
    return tokens() | {"attention_mask": _padding_mask(LENGTH)}


def nanogpt_tokens(ignore_index: int) -> Batch:
    return {"idx": _integers(VOCAB, ROWS, LENGTH, seed=0), "targets": _labels(VOCAB, LENGTH, ignore_index)}


def sequence_to_sequence() -> Batch:
    source = _integers(VOCAB, ROWS, 10, seed=0, low=2)
    return {"input_ids": source, "attention_mask": _padding_mask(10), "labels": _labels(VOCAB, 8)}


def features() -> Batch:
    return {"x": _normal(ROWS, DIM, seed=0), "y": _normal(ROWS, 10, seed=1)}


def sequences() -> Batch:
    return {"x": _normal(ROWS, LENGTH, DIM, seed=0), "labels": _labels(10, LENGTH)}


def images(channels: int = 3, size: int = 16) -> Batch:
    return {
        "pixel_values": _normal(ROWS, channels, size, size, seed=0),
        "labels": _integers(10, ROWS, seed=1),
    }


def image_pairs(channels: int = 3, size: int = 16) -> Batch:
    return {
        "x": _normal(ROWS, channels, size, size, seed=0),
        "y": _normal(ROWS, channels, size, size, seed=1),
    }


def captioned_images() -> Batch:
    captions = _integers(VOCAB - 1, ROWS, 10, seed=0, low=3)
    mask = _padding_mask(10)
    captions[mask == 0] = 1
    captions[range(ROWS), mask.sum(1) - 1] = VOCAB - 1  # the end of the text, which stands for all of it
    pixels = _normal(ROWS, 3, 16, 16, seed=1)
    return {"input_ids": captions, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def noisy_latents() -> Batch:
    return {
        "x": _normal(ROWS, 4, 8, 8, seed=0),
        "t": torch.tensor([1, 250, 500, 999]),
        "y": _integers(10, ROWS, seed=1),
        "noise": _normal(ROWS, 4, 8, 8, seed=2),
    }


def clicks() -> Batch:
    columns = [_integers(rows, ROWS, seed=rows) for rows in ClickModel.TABLES]
    return {
        "dense": _normal(ROWS, 13, seed=0),
        "sparse": torch.stack(columns, dim=1),
        "clicked": _integers(2, ROWS, seed=1).float(),
    }


def bags() -> Batch:
    bag = _integers(50, ROWS, 6, seed=0)
    return {"bag": bag, "x": _normal(ROWS, 12, seed=1), "labels": _integers(7, ROWS, seed=2)}


def nested() -> Batch:
    ids, dense = _integers(VOCAB, ROWS, LENGTH, seed=0), _normal(ROWS, LENGTH, 6, seed=2)
    return {
        "inputs": {"ids": ids, "extra": {"dense": dense}},
        "targets": {"tokens": _labels(VOCAB, LENGTH), "row": _normal(ROWS, seed=3)},
    }


def waves() -> Batch:
    return {"x": _normal(ROWS, 2, 16, seed=0), "y": _normal(ROWS, 2, 16, seed=1)}


# --- the kinds: Hugging Face ------------------------------------------------------------------------


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=DIM,
        n_layer=2,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def build_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def build_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=DIM,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def build_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    shared = {
        "hidden_size": DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
    }
    text = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 16,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": VOCAB - 1,
    }
    config = CLIPConfig(
        text_config=shared | text,
        vision_config=shared | {"image_size": 16, "patch_size": 4},
        projection_dim=16,
    )
    return CLIPModel(config)


def build_mixtral(experts: str = "eager") -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        router_jitter_noise=0.0,
        experts_implementation=experts,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


# --- the kinds: own code ----------------------------------------------------------------------------


class MLPRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x, y):
        x = F.gelu(self.fc1(x))
        x = torch.tanh(self.fc2(x))
        prediction = self.fc3(x)
        return Output(F.mse_loss(prediction, y), prediction)


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = VOCAB
    n_layer: int = 2
    n_head: int = HEADS
    n_embd: int = DIM
    dropout: float = 0.0
    bias: bool = True
    flash: bool = True
    ignore_index: int = -100


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        self.flash = config.flash
        if not self.flash:
            mask = torch.tril(torch.ones(config.block_size, config.block_size))
            self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            dropout = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = GPTMLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        _, t = idx.size()
        assert t <= self.config.block_size, f"{t} tokens, block size is {self.config.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=self.config.ignore_index
        )
        return Output(loss, logits)


def build_nanogpt() -> nn.Module:
    return GPT(GPTConfig())


def build_nanogpt_manual() -> nn.Module:
    return GPT(GPTConfig(flash=False, bias=False, ignore_index=-1))


def build_nanogpt_dropout() -> nn.Module:
    return GPT(GPTConfig(dropout=0.1))


def build_nanogpt_manual_dropout() -> nn.Module:
    return GPT(GPTConfig(flash=False, dropout=0.1))


class EncoderClassifier(nn.Module):
    """nn.TransformerEncoder and a class for each token; the layer's own dropout is off."""

    def __init__(self, norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, labels):
        logits = self.head(self.encoder(x))
        return Output(F.cross_entropy(logits.transpose(1, 2), labels), logits)  # logits: (rows, classes, length)


# --- odd ones: language models whose attention or MLP is written in another way -----------------------------


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, attention, mlp):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = mlp(dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LanguageModel(nn.Module):
    def __init__(self, attention, mlp=MLP, block=Block, vocab=VOCAB, dim=DIM, heads=HEADS, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([block(dim, heads, attention, mlp) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return Output(token_loss(logits, labels), logits)


class PermuteAttention(nn.Module):
    """Fused QKV as in timm: reshape to (B, N, 3, H, D), permute, unbind."""

    def __init__(self, dim, heads):
        super().__init__()
        self.num_heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class ChunkAttention(nn.Module):
    """Fused QKV by chunk(3); heads folded into the batch for bmm and baddbmm."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (
            t.view(b, n, self.heads, -1).transpose(1, 2).reshape(b * self.heads, n, -1)
            for t in self.to_qkv(x).chunk(3, dim=-1)
        )
        bias = torch.full((n, n), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        scores = torch.baddbmm(bias.expand(b * self.heads, n, n), q, k.mT, alpha=q.size(-1) ** -0.5)
        out = torch.bmm(scores.softmax(dim=-1), v)
        return self.to_out(out.view(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, d))


class BloomAttention(nn.Module):
    """Fused QKV as in BLOOM and GPT-NeoX: each head's q, k, v lie side by side, view(B, S, H, 3, D)."""

    def __init__(self, dim, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.dense = nn.Linear(dim, dim)

    def forward(self, x):
        b, s, _ = x.shape
        fused = self.query_key_value(x).view(b, s, self.num_heads, 3, self.head_dim)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
        scores = torch.matmul(q, k) / math.sqrt(self.head_dim)
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        context = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.dense(context.permute(0, 2, 1, 3).contiguous().view(b, s, -1))


class EinsumAttention(nn.Module):
    """Weights are 3-D parameters with a head dimension; everything is an einsum."""

    def __init__(self, dim, heads):
        super().__init__()
        size = dim // heads
        self.wq = nn.Parameter(torch.randn(dim, heads, size) * dim**-0.5)
        self.wk = nn.Parameter(torch.randn(dim, heads, size) * dim**-0.5)
        self.wv = nn.Parameter(torch.randn(dim, heads, size) * dim**-0.5)
        self.wo = nn.Parameter(torch.randn(heads, size, dim) * dim**-0.5)

    def forward(self, x):
        q = torch.einsum("btd,dhk->bthk", x, self.wq)
        k = torch.einsum("bsd,dhk->bshk", x, self.wk)
        v = torch.einsum("bsd,dhk->bshk", x, self.wv)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhts,bshk,hkd->btd", scores.softmax(-1), v, self.wo)


class MultiQueryAttention(nn.Module):
    """Three heads of 16 that share one key and value head; -1 in the views, expand for the shared head."""

    def __init__(self, dim, heads):
        super().__init__()
        self.q_proj = nn.Linear(dim, heads * 16)
        self.k_proj = nn.Linear(dim, 16)
        self.v_proj = nn.Linear(dim, 16)
        self.o_proj = nn.Linear(heads * 16, dim)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, -1, 16).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, 16).transpose(1, 2).expand(-1, q.size(1), -1, -1)
        v = self.v_proj(x).view(b, s, -1, 16).transpose(1, 2).expand_as(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class OddMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 65)
        self.gate = nn.Linear(dim, 1)
        self.down = nn.Linear(65, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) * torch.sigmoid(self.gate(x))


class AlibiAttention(nn.Module):
    """A bias per head, computed in __init__ into a buffer that no checkpoint holds."""

    def __init__(self, dim, heads, max_length=32):
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        distance = torch.arange(max_length)[None, :] - torch.arange(max_length)[:, None]
        bias = slopes[:, None, None] * distance.clamp(max=0)
        bias = bias.masked_fill(distance > 0, float("-inf"))
        self.register_buffer("alibi", bias, persistent=False)

    def forward(self, x):
        _, s, d = x.shape
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).split(d, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.alibi[:, :s, :s])
        return self.out(out.transpose(1, 2).flatten(2))


class ComplexRotaryAttention(nn.Module):
    """Rotary embedding by complex numbers (the first Llama code), kept as a plain attribute."""

    def __init__(self, dim, heads, max_length=32):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(max_length).float(), frequencies)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x):
        rotated = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * self.freqs_cis[: x.shape[1], None, :]
        return torch.view_as_real(rotated).flatten(3).type_as(x)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.rotate(self.wq(x).view(b, s, self.heads, self.head_dim))
        k = self.rotate(self.wk(x).view(b, s, self.heads, self.head_dim))
        v = self.wv(x).view(b, s, self.heads, self.head_dim)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))


class UnequalSplitAttention(nn.Module):
    """As in Phi-3: one linear for q (4 heads), k and v (2 heads each), cut at stored widths."""

    def __init__(self, dim, heads, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.qkv_proj = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        qkv = self.qkv_proj(x)
        query_pos = self.heads * self.head_dim
        q = qkv[..., :query_pos]
        k = qkv[..., query_pos : query_pos + self.kv_heads * self.head_dim]
        v = qkv[..., query_pos + self.kv_heads * self.head_dim :]
        q = q.view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = k.view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        v = v.view(b, s, self.kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, query_pos))


class GateUpMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate_up_proj = nn.Linear(dim, 2 * 48, bias=False)
        self.down_proj = nn.Linear(48, dim, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * F.silu(gate))


class ExpertsMLP(nn.Module):
    """Experts by one_hot, topk, where and index_add_ (the first Mixtral code), and two stacked for all."""

    def __init__(self, dim, experts=4, top=2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([GateUpMLP(dim) for _ in range(experts)])
        self.shared_up = nn.Parameter(torch.randn(2, dim, 16) * dim**-0.5)
        self.shared_down = nn.Parameter(torch.randn(2, 16, dim) * 0.25)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, chosen = torch.topk(F.softmax(self.router(x), dim=-1), self.top, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            place, row = torch.where(mask[index])
            if row.numel() == 0:
                continue
            out.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        shared = torch.bmm(F.gelu(torch.bmm(x.expand(2, -1, -1), self.shared_up)), self.shared_down)
        return (out + shared.sum(0)).reshape(shape)


class CheckpointedBlock(Block):
    """Recomputes itself in backward, as the model's author asked for."""

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False)
        return x

    def inner(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DropoutBlock(Block):
    """Dropout on the embedding's whole stream and inside the cut part: both kinds of random stream."""

    def __init__(self, dim, heads, attention, mlp):
        super().__init__(dim, heads, attention, mlp)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class DropoutMLP(MLP):
    def forward(self, x):
        return self.down(F.dropout(F.silu(self.up(x)), 0.1, self.training))


class Albert(nn.Module):
    """One block called three times; a factorised embedding whose both parts are used again in the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.widen = nn.Linear(16, DIM, bias=False)
        self.block = Block(DIM, HEADS, BloomAttention, MLP)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, input_ids, labels):
        x = self.widen(self.embed(input_ids))
        for _ in range(3):
            x = self.block(x)
        logits = self.norm(x) @ self.widen.weight @ self.embed.weight.T
        return Output(token_loss(logits, labels), logits)


class LSTMLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, 48, num_layers=2, batch_first=True)
        self.gru = nn.GRUCell(48, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, labels):
        x, (hidden, cell) = self.lstm(self.embed(input_ids))
        state = torch.tanh(hidden[-1] + cell[-1])[:, :DIM]
        states = []
        for step in range(x.size(1)):
            state = self.gru(x[:, step], state)
            states.append(state)
        logits = self.head(torch.stack(states, dim=1))
        return Output(token_loss(logits, labels), logits)


# --- odd ones: parameters and control flow ------------------------------------------------------------------


class RawParameters(nn.Module):
    """Parameters used raw: class token, positions, a scale, a 0-dim temperature, the embedding as a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM) * 0.02)
        self.position = nn.Parameter(torch.randn(1, LENGTH + 1, DIM) * 0.02)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.temperature = nn.Parameter(torch.tensor(1.5))  # 0-dim
        self.block = Block(DIM, HEADS, PermuteAttention, MLP)
        self.mix = nn.Linear(DIM, DIM, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        x = torch.cat([self.cls_token.expand(x.size(0), -1, -1), x], dim=1) + self.position
        x = self.block(self.scale * x)
        x = F.linear(x, self.mix.weight.t() + self.mix.weight)
        summary, x = x[:, 0], x[:, 1:]
        logits = F.linear(x + summary[:, None], self.embed.weight) / self.temperature.exp()
        return Output(token_loss(logits, labels), logits)


class ParameterLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(DIM, DIM) * DIM**-0.5) for _ in range(3)])
        self.biases = nn.ParameterDict({str(i): nn.Parameter(torch.zeros(DIM)) for i in range(3)})
        self.mixture = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(3)])
        self.head = nn.Parameter(torch.randn(DIM, 10) * DIM**-0.5)

    def forward(self, x, y):
        layers = [x]
        for index, weight in enumerate(self.weights):
            layers.append(torch.tanh(torch.addmm(self.biases[str(index)], layers[-1], weight)))
        shares = torch.stack(list(self.mixture)).softmax(0)
        x = sum(share * layer for share, layer in zip(shares, layers[1:], strict=True))
        prediction = x @ self.head
        return Output((prediction - y).pow(2).mean(), prediction)


class InPlace(nn.Module):
    """In-place functions and slices with a step, on tensors that a cut linear makes."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM, 64)
        self.fc2 = nn.Linear(64, DIM)
        self.fc3 = nn.Linear(DIM, 64)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, labels):
        h = self.fc1(x)
        h.relu_()
        h = h + 0.1
        h.masked_fill_(h > 1.0, 1.0)
        h = self.fc2(h)
        h.add_(x).mul_(0.5)
        h += 0.1 * x.flip(1)
        gate = self.fc3(h)
        even, odd = gate[..., ::2], gate[..., 1::2]
        h = even * torch.sigmoid(odd)
        shifted = torch.zeros_like(h)
        shifted[:, 1:] = h[:, :-1]
        shifted[:, 0, ::2] += h[:, -1, 1::2]
        shifted[..., :8] = shifted[..., :8] * 2.0
        out = torch.empty(*h.shape[:-1], h.shape[-1], dtype=h.dtype, device=h.device)
        out[..., 0::2] = shifted[..., 16:]
        out[..., 1::2] = h[..., :16]
        logits = self.head(out)
        return Output(F.cross_entropy(logits.reshape(-1, 10), labels.reshape(-1)), logits)


class BranchOnActivation(nn.Module):
    """The path depends on a value of the whole batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, 64)
        self.left = nn.Linear(64, DIM)
        self.right = nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, y):
        h = torch.tanh(self.inner(x))
        if h.mean() > 0:
            h = self.left(h)
        else:
            h = self.right(h).square()
        while h.norm().item() > 4.0:
            h = h / 2
        prediction = self.head(h)
        return Output(F.mse_loss(prediction, y), prediction)


class BranchOnParameter(nn.Module):
    """The path depends on a parameter's value, a shape and the training flag: the same on every row."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([0.7]))
        self.inner = nn.Linear(DIM, 64)
        self.outer = nn.Linear(64, DIM)
        self.skipped = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, y):
        if self.gate.item() > 0:
            x = x + self.gate * self.outer(F.gelu(self.inner(x)))
        else:
            x = self.skipped(x)
        if x.shape[-1] % 2 == 0 and self.training:
            x = x.reshape(x.shape[0], 2, -1).flip(1).reshape(x.shape)
        if float(self.inner.weight.detach().abs().sum()) < 0:
            raise RuntimeError("a sum of absolute values below zero")
        prediction = self.head(x)
        return Output(F.l1_loss(prediction, y), prediction)


class ReverseGradient(torch.autograd.Function):
    """Backward is not the derivative of forward: losing it is silent unless gradients are compared."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, beta):
        ctx.save_for_backward(x, beta)
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx, gradient):
        x, beta = ctx.saved_tensors
        s = torch.sigmoid(beta * x)
        slope = x * s * (1 - s)
        return gradient * (s + beta * slope), (gradient * x * slope).sum(tuple(range(x.dim() - 1)))


class CustomFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM, 64)
        self.beta = nn.Parameter(torch.ones(64))
        self.fc2 = nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, 10)
        self.domain = nn.Linear(DIM, 10)

    def forward(self, x, labels):
        x = x + self.fc2(Swish.apply(self.fc1(x), self.beta))
        logits = self.head(x) + self.domain(ReverseGradient.apply(x, 0.3))
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.fc1 = weight_norm(nn.Linear(DIM, 64))
        self.fc2 = weight_norm(nn.Linear(64, DIM), dim=1)
        self.head = weight_norm(nn.Linear(DIM, 10), dim=None)

    def forward(self, x, y):
        prediction = self.head(x + self.fc2(F.softplus(self.fc1(x))))
        return Output(F.smooth_l1_loss(prediction, y), prediction)


class UnusedAndFrozen(nn.Module):
    """Gradients that must stay None: frozen parameters, a module that nothing calls, a path without grad."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.embed.weight.requires_grad_(False)
        self.block = Block(DIM, HEADS, BloomAttention, MLP)
        self.block.mlp.up.requires_grad_(False)
        self.adapter = nn.Linear(DIM, DIM)
        self.teacher = nn.Linear(DIM, DIM)
        self.never_called = nn.Linear(DIM, 7)
        self.left_over = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, labels):
        x = self.block(self.embed(input_ids))
        with torch.no_grad():
            target = self.teacher(x)
        x = x + self.adapter(x.detach())
        logits = self.head(x)
        return Output(token_loss(logits, labels) + 0.01 * F.mse_loss(x, target), logits)


class Aliases(nn.Module):
    """A plain list that names modules again, hooks that change inputs and outputs, a bound method kept."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, 64)
        self.second = nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, 10)
        self.order = [self.first, self.second, self.first, self.second]
        self.finish = self.head.forward
        self.first.register_forward_hook(lambda module, args, output: F.gelu(output))
        self.second.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))

    def forward(self, x, y):
        for layer in self.order:
            x = layer(x)
        prediction = self.finish(x)
        return Output(F.mse_loss(prediction, y), prediction)


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM, 64)
        self.fc2 = nn.Linear(64, DIM)
        self.hidden = None

    def forward(self, x):
        self.hidden = F.gelu(self.fc1(x))
        return x + self.fc2(self.hidden)


class Stash(nn.Module):
    """Activations stashed on modules and read later, by another module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Recorder() for _ in range(2)])
        self.probe = nn.Linear(64, 10)
        self.head = nn.Linear(DIM, 10)
        self.penalties = []

    def forward(self, x, labels):
        self.penalties.clear()
        for layer in self.layers:
            x = layer(x)
            self.penalties.append(layer.hidden.square().mean())
        logits = self.head(x) + self.probe(self.layers[0].hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
        return SimpleNamespace(loss=loss + 0.01 * sum(self.penalties), logits=logits)


class HandMaskedLoss(nn.Module):
    """The loss divides by its own count of labels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.block = Block(DIM, HEADS, ChunkAttention, MLP)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, labels):
        logits = self.head(self.block(self.embed(input_ids)))
        mask = labels != -100
        chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return Output(-(chosen * mask).sum() / mask.sum(), logits)


# --- odd ones: what goes in and comes out -------------------------------------------------------------------


class DictBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 64)
        self.down = nn.Linear(64, DIM)

    def forward(self, state):
        hidden = F.gelu(self.up(state["x"]))
        return {"x": state["x"] + self.down(hidden), "trace": (*state["trace"], [hidden.mean(-1)])}


@dataclass
class StructuredOutput:
    loss: Tensor
    heads: dict[str, Tensor]
    trace: tuple[list[Tensor], ...]


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.dense = nn.Linear(6, DIM)
        self.blocks = nn.ModuleList([DictBlock() for _ in range(2)])
        self.heads = nn.ModuleDict({"token": nn.Linear(DIM, VOCAB), "row": nn.Linear(DIM, 1)})

    def forward(self, inputs, targets):
        state = {"x": self.embed(inputs["ids"]) + self.dense(inputs["extra"]["dense"]), "trace": ()}
        for block in self.blocks:
            state = block(state)
        heads = {"token": self.heads["token"](state["x"]), "row": self.heads["row"](state["x"].mean(1))}
        loss = token_loss(heads["token"], targets["tokens"])
        loss = loss + F.mse_loss(heads["row"].squeeze(-1), targets["row"])
        loss = loss + 0.1 * sum(part[0].square().mean() for part in state["trace"])
        return StructuredOutput(loss, heads, state["trace"])


class NoneBlock(nn.Module):
    """Takes None and returns it among its parts, as caches and attention weights do."""

    def __init__(self, weights):
        super().__init__()
        self.attention = PermuteAttention(DIM, HEADS)
        self.weights = nn.Linear(DIM, 1) if weights else None

    def forward(self, x, mask=None, cache=None, *, scale=1.0):
        x = x + scale * self.attention(x)
        if mask is not None:
            x = x * mask
        weights = self.weights(x).softmax(1) if self.weights is not None else None
        return x, None, (weights, cache)


class NoneOutput(NamedTuple):
    loss: Tensor | None
    logits: Tensor
    cache: None = None
    weights: tuple[Tensor | None, ...] = ()


class NoneParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([NoneBlock(weights=False), NoneBlock(weights=True)])
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, labels=None, mask=None):
        collected = ()
        for block in self.blocks:
            x, cache, (weights, _) = block(x, mask, None, scale=0.5)
            collected += (weights,)
            if weights is not None:
                x = x * weights
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return NoneOutput(loss, logits, cache, collected)


# --- odd ones: several streams ------------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """nn.MultiheadAttention: learnt queries, keys of another width, a padding mask, its weights used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.queries = nn.Parameter(torch.randn(5, DIM) * 0.5)
        self.read = nn.MultiheadAttention(DIM, HEADS, kdim=24, vdim=24, batch_first=True)
        self.think = nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True)
        self.write = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.up = nn.Linear(24, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids)
        latents = self.queries.expand(x.size(0), -1, -1)
        padding = attention_mask == 0
        read, weights = self.read(latents, x, x, key_padding_mask=padding, need_weights=True)
        latents = (latents + read).transpose(0, 1)  # this one wants (length, rows, width)
        thought, each = self.think(latents, latents, latents, need_weights=True, average_attn_weights=False)
        latents = (latents + thought).transpose(0, 1)
        x = self.up(x) + self.write(self.up(x), latents, latents, need_weights=False)[0]
        logits = self.head(x)
        focus = weights.square().sum(-1).mean() + each.square().sum(-1).mean()
        return Output(token_loss(logits, labels) + 0.1 * focus, logits)


class RelativeAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x, memory, bias):
        q, k, v = (
            layer(t).view(t.size(0), -1, self.heads, self.size).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = torch.matmul(q, k.transpose(2, 3))
        scores += bias
        out = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.o(out.transpose(1, 2).reshape(x.size(0), -1, self.heads * self.size))


class EncoderDecoder(nn.Module):
    """T5 by hand: one relative bias for all layers of a stack, encoder states used in every decoder layer,
    one embedding for both sides and the head."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.encoder_bias = nn.Embedding(16, HEADS)
        self.decoder_bias = nn.Embedding(16, HEADS)
        self.encoder = nn.ModuleList([RelativeAttention(DIM, HEADS) for _ in range(2)])
        self.decoder = nn.ModuleList([RelativeAttention(DIM, HEADS) for _ in range(2)])
        self.cross = nn.ModuleList([RelativeAttention(DIM, HEADS) for _ in range(2)])
        self.mlps = nn.ModuleList([MLP(DIM) for _ in range(4)])
        self.norms = nn.ModuleList([nn.RMSNorm(DIM) for _ in range(6)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.shared.weight

    @staticmethod
    def relative(table, length, device):
        position = torch.arange(length, device=device)
        bucket = (position[None, :] - position[:, None]).clamp(-8, 7) + 8
        return table(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, input_ids, attention_mask, labels):
        device = input_ids.device
        hide = (1.0 - attention_mask[:, None, None, :].to(self.shared.weight.dtype)) * -1e9
        bias = self.relative(self.encoder_bias, input_ids.size(1), device) + hide
        x = self.shared(input_ids)
        for norm, attention, mlp in zip(self.norms[:2], self.encoder, self.mlps[:2], strict=True):
            n = norm(x)
            x = x + attention(n, n, bias)
            x = x + mlp(x)
        memory = x

        start = labels.new_zeros(labels.size(0), 1)
        shifted = torch.cat([start, labels[:, :-1]], dim=1).masked_fill(labels == -100, 0).clamp(min=0)
        y = self.shared(shifted)
        length = y.size(1)
        causal = torch.full((length, length), -1e9, dtype=y.dtype, device=device).triu(1)
        bias = self.relative(self.decoder_bias, length, device) + causal
        layers = zip(self.norms[2:4], self.norms[4:], self.decoder, self.cross, self.mlps[2:], strict=True)
        for norm, cross_norm, attention, cross, mlp in layers:
            n = norm(y)
            y = y + attention(n, n, bias)
            y = y + cross(cross_norm(y), memory, hide)
            y = y + mlp(y)
        logits = self.head(y * DIM**-0.5)
        return Output(token_loss(logits, labels), logits)


class DiTBlock(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.attn = PermuteAttention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.mlp = MLP(hidden)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden, bias=True))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        n = self.norm1(x) * (1 + scale_msa.unsqueeze(1)) + shift_msa.unsqueeze(1)
        x = x + gate_msa.unsqueeze(1) * self.attn(n)
        n = self.norm2(x) * (1 + scale_mlp.unsqueeze(1)) + shift_mlp.unsqueeze(1)
        return x + gate_mlp.unsqueeze(1) * self.mlp(n)


class DiT(nn.Module):
    """A diffusion transformer; as in the original, gates and head start at zero."""

    def __init__(self, size=8, channels=4, patch=2, hidden=DIM):
        super().__init__()
        self.patch, self.channels, self.grid = patch, channels, size // patch
        self.x_embedder = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.pos_embed = nn.Parameter(torch.randn(1, self.grid**2, hidden) * 0.02, requires_grad=False)
        self.t_embedder = nn.Sequential(nn.Linear(16, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.y_embedder = nn.Embedding(10, hidden)
        self.blocks = nn.ModuleList([DiTBlock(hidden, HEADS) for _ in range(2)])
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.final_norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.final = nn.Linear(hidden, patch * patch * channels)
        for block in self.blocks:
            nn.init.zeros_(block.adaLN_modulation[-1].weight)
            nn.init.zeros_(block.adaLN_modulation[-1].bias)
        nn.init.zeros_(self.final.weight)
        nn.init.zeros_(self.final.bias)

    def forward(self, x, t, y, noise):
        frequencies = torch.exp(-math.log(10000) * torch.arange(8, dtype=x.dtype, device=x.device) / 8)
        angles = t[:, None].to(x.dtype) * frequencies[None]
        c = self.t_embedder(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.y_embedder(y)
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_modulation(c).chunk(2, dim=1)
        x = self.final(self.final_norm(x) * (1 + scale[:, None]) + shift[:, None])
        x = x.reshape(x.shape[0], self.grid, self.grid, self.patch, self.patch, self.channels)
        x = torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], self.channels, *[self.grid * self.patch] * 2)
        return Output(((x - noise) ** 2).mean(), x)


class ClickModel(nn.Module):
    """DLRM: embedding tables of unlike sizes, pairwise products of the features, a narrow head."""

    TABLES = (17, 50, 127, 3)

    def __init__(self, dim=16):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(rows, dim) for rows in self.TABLES])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU())
        features = len(self.TABLES) + 1
        pairs = features * (features - 1) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))

    def forward(self, dense, sparse, clicked):
        dense = self.bottom(dense)
        columns = [table(sparse[:, index]) for index, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *columns], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, cols = torch.tril_indices(stacked.size(1), stacked.size(1), offset=-1, device=dense.device)
        logits = self.top(torch.cat([dense, products[:, rows, cols]], dim=1)).squeeze(1)
        return Output(F.binary_cross_entropy_with_logits(logits, clicked), logits)


class BagBilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, DIM, mode="mean")
        self.bilinear = nn.Bilinear(DIM, 12, 24)
        self.prelu = nn.PReLU(24)
        self.single = nn.PReLU()
        self.out = nn.Linear(24, 7)

    def forward(self, bag, x, labels):
        h = self.prelu(self.bilinear(self.bag(bag), x))
        logits = self.single(self.out(h))
        return Output(F.nll_loss(F.log_softmax(logits, dim=1), labels), logits)


class Sorting(nn.Module):
    """Tokens are ranked, summed along the ranks, scattered into bins and put back."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(DIM, 1)
        self.up = nn.Linear(DIM, 64)
        self.down = nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, labels):
        b, s, d = x.shape
        score, order = self.score(x).squeeze(-1).sort(dim=1, descending=True)
        ranked = torch.gather(x, 1, order.unsqueeze(-1).expand(-1, -1, d)) * score.unsqueeze(-1)
        ranked = ranked.cumsum(1) / torch.arange(1, s + 1, device=x.device).view(1, -1, 1)
        hidden = torch.tanh(self.up(ranked))
        top, _ = hidden.topk(16, dim=-1)
        largest = hidden.sort(dim=-1).values[..., -1:]
        ranked = self.down(hidden) + top.mean(-1, keepdim=True) + largest
        back = torch.zeros_like(ranked).scatter(1, order.unsqueeze(-1).expand_as(ranked), ranked)
        bins = ranked.new_zeros(b, 3, d).scatter_add(1, (order % 3).unsqueeze(-1).expand_as(ranked), ranked)
        back = back + bins.amax(1, keepdim=True) + back.cumsum(-1) * 0.1
        logits = self.head(back)
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1), logits)


class Codebook(nn.Module):
    """A vector quantiser whose codes are moving averages over the batch, changed in forward before use."""

    def __init__(self, codes=16):
        super().__init__()
        self.encode = nn.Linear(DIM, 8)
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, DIM))
        self.register_buffer("codes", torch.randn(codes, 8))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x, labels):
        z = self.encode(x)
        flat = z.reshape(-1, 8)
        nearest = torch.cdist(flat, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                used = F.one_hot(nearest, len(self.codes)).type_as(flat)
                self.counts.mul_(0.9).add_(used.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(used.t() @ flat, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        quantised = F.embedding(nearest, self.codes).view_as(z)
        commitment = F.mse_loss(z, quantised)
        quantised = z + (quantised - z).detach()
        restored = self.decode(quantised)
        return Output(F.mse_loss(restored, x) + 0.25 * commitment, restored)


# --- odd ones: images and waves -----------------------------------------------------------------------------


class ResidualBatchNorm(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width, width, 1, stride=2)
        self.fc = nn.Linear(width, 10)

    def forward(self, pixel_values, labels):
        x = F.max_pool2d(self.stem(pixel_values), 2)
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = self.bn2(self.conv2(h))
        x = F.relu(h + self.shortcut(x))
        logits = self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return Output(F.cross_entropy(logits, labels), logits)


class DoubleConv(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
        )

    def forward(self, x):
        return self.net(x)


class UNet(nn.Module):
    def __init__(self, widths=(8, 16, 32)):
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList([DoubleConv(a, b) for a, b in pairs])
        self.up = nn.ModuleList([DoubleConv(a + b, a) for a, b in reversed(pairs[1:])])
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x, y):
        skips = []
        for index, down in enumerate(self.down):
            x = down(F.avg_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for up in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, skips.pop()], dim=1))
        x = self.out(x)
        return Output(F.mse_loss(x, y), x)


class MixerBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(patches, 24), nn.GELU(), nn.Linear(24, patches))
        self.norm2 = nn.LayerNorm(dim)
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.blocks = nn.Sequential(*[MixerBlock(16, dim) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, pixel_values, labels):
        x = self.patches(pixel_values).flatten(2).mT
        logits = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return Output(F.cross_entropy(logits, labels), logits)


class GroupedConv(nn.Module):
    """Depthwise, grouped and pointwise convolutions, a squeeze-and-excite gate, a channel shuffle."""

    def __init__(self, width=16):
        super().__init__()
        self.expand = nn.Conv2d(3, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.squeeze = nn.Conv2d(2 * width, 6, 1)
        self.excite = nn.Conv2d(6, 2 * width, 1)
        self.grouped = nn.Conv2d(2 * width, width, 3, stride=2, padding=1, groups=4)
        self.norm = nn.GroupNorm(1, width)
        self.fc = nn.Linear(width, 10)

    def forward(self, pixel_values, labels):
        x = F.hardswish(self.expand(pixel_values))
        x = F.silu(self.depthwise(x))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = self.grouped(x * gate)
        b, c, h, w = x.shape
        x = x.view(b, 4, c // 4, h, w).transpose(1, 2).reshape(b, c, h, w)
        logits = self.fc(self.norm(x).mean(dim=[-2, -1]))
        return Output(F.cross_entropy(logits, labels), logits)


class WaveNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.width = width
        self.inp = nn.Conv1d(2, width, 1)
        self.dilated = nn.ModuleList([nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(3)])
        self.skip = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(3)])
        self.out = nn.Conv1d(width, 2, 3, padding="same", padding_mode="circular")

    def forward(self, x, y):
        x = self.inp(x)
        total = 0
        for index, (conv, skip) in enumerate(zip(self.dilated, self.skip, strict=True)):
            value, gate = conv(F.pad(x, (2**index, 0))).chunk(2, dim=1)
            h = torch.tanh(value) * torch.sigmoid(gate)
            total = total + skip(h)
            x = x + h
        x = self.out(F.leaky_relu(total, 0.1))
        return Output(F.huber_loss(x, y), x)


class TransposedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 4, 2, 1), nn.ELU())
        self.code = nn.Linear(16 * 4 * 4, DIM)
        self.expand = nn.Linear(DIM, 16 * 4 * 4)
        self.decode = nn.Sequential(
            nn.Unflatten(1, (16, 4, 4)),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.InstanceNorm2d(8, affine=True),
            nn.ELU(),
            nn.ConvTranspose2d(8, 12, 3, padding=1, groups=2),
            nn.PixelShuffle(2),
        )

    def forward(self, x, y):
        code = torch.tanh(self.code(self.encode(x).flatten(1)))
        x = self.decode(F.elu(self.expand(code)))
        return Output(F.mse_loss(x, y), x)


# --- the registry -------------------------------------------------------------------------------------------


_lm = partial(partial, LanguageModel)  # _lm(attention, ...) -> a builder that pickles

_ENTRIES = [
    Entry("mlp", MLPRegressor, features, "issue"),
    Entry("nanogpt", build_nanogpt, partial(nanogpt_tokens, -100), "issue", mean="tokens"),
    Entry(
        "nanogpt_manual",
        build_nanogpt_manual,
        partial(nanogpt_tokens, -1),
        "issue",
        note="ignore_index=-1, no biases",
        mean="tokens",
    ),
    Entry("llama", build_llama, tokens, "issue", mean="shifted"),
    Entry("gpt2", build_gpt2, tokens, "issue", mean="shifted"),
    Entry("bert", build_bert, padded_tokens, "issue", mean="tokens"),
    Entry("vit", build_vit, images, "issue"),
    Entry("t5", build_t5, sequence_to_sequence, "issue", mean="tokens"),
    Entry("clip", build_clip, captioned_images, "issue", couples_batch=True, note="the batch holds a bool"),
    Entry("mixtral", build_mixtral, tokens, "issue", mean="shifted"),
    Entry("transformer_encoder", EncoderClassifier, sequences, "issue", mean="tokens"),
    Entry(
        "transformer_encoder_norm_first",
        partial(EncoderClassifier, norm_first=True),
        sequences,
        "issue",
        mean="tokens",
    ),
    Entry("lstm", LSTMLanguageModel, tokens, mean="tokens"),
    Entry(
        "batchnorm",
        ResidualBatchNorm,
        images,
        couples_batch=True,
        note="running statistics change in forward",
    ),
    Entry("unet", UNet, image_pairs),
    Entry("mixer", Mixer, images),
    Entry("einsum", _lm(EinsumAttention), tokens, mean="tokens"),
    Entry("raw_parameters", RawParameters, tokens, note="a 0-dim parameter", mean="tokens"),
    Entry("parameter_list", ParameterLists, features, note="0-dim parameters"),
    Entry("in_place", InPlace, sequences, mean="tokens"),
    Entry(
        "branch_on_activation",
        BranchOnActivation,
        features,
        couples_batch=True,
        note="one linear has no gradient",
    ),
    Entry("branch_on_parameter", BranchOnParameter, features, note="one linear has no gradient"),
    Entry(
        "custom_function",
        CustomFunctions,
        sequences,
        note="backward is not the derivative of forward",
        mean="tokens",
    ),
    Entry("checkpointed", _lm(ChunkAttention, block=CheckpointedBlock), tokens, mean="tokens"),
    Entry(
        "odd_sizes",
        _lm(MultiQueryAttention, mlp=OddMLP, vocab=127, dim=48, heads=3),
        partial(tokens, vocab=127, length=11),
        mean="tokens",
    ),
    Entry(
        "alibi",
        _lm(AlibiAttention),
        tokens,
        note="a computed buffer that is not in the state dict",
        mean="tokens",
    ),
    Entry(
        "complex_rotary",
        _lm(ComplexRotaryAttention),
        tokens,
        note="a complex table as a plain attribute",
        mean="tokens",
    ),
    Entry("weight_norm", WeightNorm, features, note="dim=None has a 0-dim parameter"),
    Entry("unused_and_frozen", UnusedAndFrozen, tokens, note="parameters that keep no gradient", mean="mixed"),
    Entry("albert", Albert, tokens, mean="tokens"),
    Entry("structures", Structures, nested, note="the batch is nested", mean="mixed"),
    Entry("cross_attention", CrossAttention, padded_tokens, mean="mixed"),
    Entry("encoder_decoder", EncoderDecoder, sequence_to_sequence, mean="tokens"),
    Entry("dropout", build_nanogpt_dropout, partial(nanogpt_tokens, -100), random=True, mean="tokens"),
    Entry(
        "dropout_manual",
        build_nanogpt_manual_dropout,
        partial(nanogpt_tokens, -100),
        random=True,
        mean="tokens",
    ),
    Entry(
        "dropout_blocks",
        _lm(BloomAttention, mlp=DropoutMLP, block=DropoutBlock),
        tokens,
        random=True,
        mean="tokens",
    ),
    Entry(
        "dit",
        DiT,
        noisy_latents,
        note="gates and head start at zero: most gradients are zero until perturbed",
    ),
    Entry("dlrm", ClickModel, clicks),
    Entry("qkv_permute", _lm(PermuteAttention), tokens, mean="tokens"),
    Entry("qkv_chunk", _lm(ChunkAttention), tokens, mean="tokens"),
    Entry("qkv_bloom", _lm(BloomAttention), tokens, mean="tokens"),
    Entry("phi3_like", _lm(UnequalSplitAttention, mlp=GateUpMLP), tokens, mean="tokens"),
    Entry("grouped_conv", GroupedConv, images),
    Entry("conv1d", WaveNet, waves),
    Entry("transposed_conv", TransposedConv, image_pairs),
    Entry("bag_bilinear", BagBilinear, bags),
    Entry("stash", Stash, sequences, note="the loss divides a sum by the number of all labels, ignored ones too"),
    Entry("none_parts", NoneParts, sequences, mean="tokens"),
    Entry("sorting", Sorting, sequences, mean="tokens"),
    Entry(
        "mixtral_grouped",
        partial(build_mixtral, "grouped_mm"),
        tokens,
        float64=False,
        note="torch._grouped_mm, the default of transformers, knows no float64",
        mean="shifted",
    ),
    Entry("experts", _lm(PermuteAttention, mlp=ExpertsMLP), tokens, mean="tokens"),
    Entry(
        "hand_masked_loss",
        HandMaskedLoss,
        tokens,
        note="the loss divides by its own count of labels",
        mean="tokens",
    ),
    Entry("aliases", Aliases, features, note="a plain list of modules, hooks, a bound method"),
    Entry("codebook", Codebook, sequences, couples_batch=True, note="buffers change in forward"),
]

ZOO: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
assert len(ZOO) == len(_ENTRIES), "two entries of one name"


# --- python tests/zoo.py ------------------------------------------------------------------------------------


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The same batch with its floating tensors in `dtype`."""
    from torch.utils._pytree import tree_map

    def cast(leaf):
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, value)


_REDUCTIONS = {"mean", "sum", "mm", "bmm", "addmm", "_softmax", "_log_softmax", "logsumexp", "norm", "cumsum"}


def float32_reductions(run: Callable[[], Any]) -> list[str]:
    """ATen functions that sum in float32 inside a float64 model: a cut there shows at 1e-7, not 1e-16."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, None] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if name in _REDUCTIONS and out.dtype == torch.float32:
                seen[name] = None
            return out

    with Watch():
        run()
    return list(seen)


def how_it_averages(model: nn.Module, batch: Batch) -> str:
    """`Entry.mean`, found by computing half the rows at a time; "coupled" where no mean gives the whole."""
    from torch.utils._pytree import tree_leaves, tree_map

    def half(rows: slice) -> Batch:
        return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, batch)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for part in (batch, half(slice(0, 2)), half(slice(2, 4))):
        losses.append(model(**part).loss.detach())
        model.load_state_dict(state)
    close = 1e-12 if losses[0].dtype == torch.float64 else 1e-6
    whole, first, second = (loss.double() for loss in losses)
    labels = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dtype == torch.long]
    counting = [leaf >= 0 for leaf in labels if (leaf < 0).any()]
    weights: dict[str, tuple[Any, Any]] = {"rows": (1, 1)}
    for mask in counting:
        count = mask.sum(1)
        weights["tokens"] = (count[:2].sum(), count[2:].sum())
        weights["shifted"] = (count[:2].sum() - 2, count[2:].sum() - 2)
    for name, (a, b) in weights.items():
        if abs((a * first + b * second) / (a + b) / whole - 1) < close:
            return name
    return "coupled"


def _survey(entry: Entry) -> str:
    import pickle
    import time

    entry = pickle.loads(pickle.dumps(entry))
    torch.manual_seed(0)
    model = entry.build()
    assert model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    dtype = torch.float64 if entry.float64 else torch.float32
    model.to(dtype)
    batch = to_dtype(entry.batch(), dtype)

    def step() -> Tensor:
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    narrow = float32_reductions(step) if entry.float64 else ["everything"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    started = time.perf_counter()
    loss = step()
    elapsed = time.perf_counter() - started
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    assert loss.isfinite() and norm.isfinite() and norm > 1e-6, (loss, norm)
    if not entry.random:
        model.load_state_dict(state)
        found = how_it_averages(model, batch)
        assert found == ("coupled" if entry.couples_batch or entry.mean == "mixed" else entry.mean), found
        assert step() == loss, "not deterministic"
    missing = sum(g is None for g in gradients.values())
    zero = sum(g is not None and not g.any() for g in gradients.values())
    marks = "".join(
        mark for mark, on in (("C", entry.couples_batch), ("R", entry.random), (f" none:{missing}", missing)) if on
    )
    marks += f" zero:{zero}" if zero else ""
    marks += f" float32: {' '.join(narrow)}" if narrow else ""
    count = sum(p.numel() for p in model.parameters())
    return f"{entry.name:31}{count:8d}{loss.item():10.5f}{norm.item():10.2e}{elapsed * 1e3:8.1f} ms  {marks}"


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    print(f"{'name':31}{'params':>8}{'loss':>10}{'|grad|':>10}{'step':>11}  C couples the batch, R random")
    for name in sys.argv[1:] or ZOO:
        print(_survey(ZOO[name]), flush=True)
