"""Shapes of models by name, with their sources."""

from __future__ import annotations

from math import ceil

from published_cases.case import ModelShape

_LLAMA2_VOCAB, _LLAMA3_VOCAB, _INTERNLM_VOCAB = 32000, 128256, 103168
_LLAMAS = {  # layers, hidden, heads, kv heads, intermediate, vocabulary
    # arXiv 2307.09288; the 34B's shape is that of Code Llama, arXiv 2308.12950, as in fms_fsdp/utils/config_utils.py
    "llama2-7b": (32, 4096, 32, 32, 11008, _LLAMA2_VOCAB),
    "llama2-13b": (40, 5120, 40, 40, 13824, _LLAMA2_VOCAB),
    "llama2-34b": (48, 8192, 64, 8, 22016, _LLAMA2_VOCAB),
    "llama2-70b": (80, 8192, 64, 8, 28672, _LLAMA2_VOCAB),
    # arXiv 2407.21783
    "llama3-8b": (32, 4096, 32, 8, 14336, _LLAMA3_VOCAB),
    "llama3-70b": (80, 8192, 64, 8, 28672, _LLAMA3_VOCAB),
    # InternLM/InternEvo, configs/7B_sft.py and configs/_base_/models/internlm_20B.py: an MLP of 8/3 of the width, rounded up
    "internlm-7b": (32, 4096, 32, 32, 11008, _INTERNLM_VOCAB),
    "internlm-20b": (60, 5120, 40, 40, 13824, _INTERNLM_VOCAB),
}


def llama(name: str, sequence: int) -> ModelShape:
    """A Llama-like model by its name. Raises KeyError where there is none."""
    layers, hidden, heads, kv_heads, intermediate, vocab = _LLAMAS[name]
    return ModelShape("llama", layers, hidden, heads, vocab, sequence, kv_heads, intermediate, gated=True)


def megatron_gpt(layers: int, hidden: int, heads: int, sequence: int, vocab: int) -> ModelShape:
    """A GPT of Megatron-LM before fused attention: scores kept, dropout of 0.1, the head tied to the embedding."""
    return ModelShape(
        "gpt", layers, hidden, heads, vocab, sequence, heads, 4 * hidden, tied=True, attention="plain", dropout=0.1
    )


def mpt(layers: int, hidden: int, heads: int, sequence: int, vocab: int) -> ModelShape:
    """An MPT of mosaicml/llm-foundry with flash attention: no dropout, the head tied to the embedding."""
    return ModelShape("mpt", layers, hidden, heads, vocab, sequence, heads, 4 * hidden, tied=True)


def padded_vocab(tokens: int, ranks: int = 1) -> int:
    """A vocabulary as Megatron-LM pads it: to a multiple of 128 for each tensor-parallel rank."""
    return ceil(tokens / (128 * ranks)) * 128 * ranks


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the model that ``build_model`` makes of a shape of text; a tied head counts once."""
    h, f, kv = shape.hidden, shape.intermediate, shape.hidden // shape.heads * shape.kv_heads
    ends = shape.vocab * h * (1 if shape.tied else 2)
    if shape.kind == "llama":
        return shape.layers * (2 * h * h + 2 * h * kv + 3 * h * f + 2 * h) + ends + h
    matrices, biases, norms = 4 * h * h + 2 * h * f, 5 * h + f, 4 * h
    return shape.layers * (matrices + biases + norms) + ends + shape.sequence * h + 2 * h
