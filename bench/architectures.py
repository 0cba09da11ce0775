"""The models of the coverage table (bench/coverage.py): public architectures at tiny sizes, with random weights.

    hf("llama", …)              the head with a loss and the made-up batch that ``hf:llama`` gives (meshwright/target)
    made("Wav2Vec2ForCTC", …)   a class of transformers, with a batch made here: audio, images with texts, series
    zoo("unet")                 a model of tests/zoo.py, as people write them

To add one: a line in its group below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.target import load_target

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # for zoo.py

ROWS, LENGTH, VOCAB, IMAGE = 8, 12, 96, 32
Batch = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A row of the table.

    Attributes:
        name: as ``--only`` takes it.
        kind: the group that it stands in.
        build: makes the model; pickled by name.
        batch: makes the batch.
        traits: what makes it worth its row.
        settings: that make it tiny.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    traits: str
    settings: str = ""


MODELS: dict[str, Model] = {}
NARROW = {"xglm"}  # checked in float32: it puts float64's smallest number into a tensor of torch's default type
_group = ""


def _add(name: str, build: Callable[[], nn.Module], batch: Callable[[], Batch], traits: str, settings: Any) -> None:
    assert name not in MODELS, name
    MODELS[name] = Model(name, _group, build, batch, traits, repr(settings))


def hf(model_type: str, traits: str, **settings: Any) -> None:
    """A model type of transformers, as the command line takes it."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    target = partial(_target, model_type, given)
    _add(model_type, partial(_hf_build, model_type, given), lambda: target().batch, traits, given)


def _target(model_type: str, settings: Mapping[str, Any]) -> Any:
    return load_target(f"hf:{model_type}", settings, rows=ROWS, length=LENGTH)


def _hf_build(model_type: str, settings: Mapping[str, Any]) -> nn.Module:
    return _target(model_type, settings).build()


def made(name: str, cls: str, traits: str, batch: Callable[[], Batch], **settings: Any) -> None:
    """A class of transformers with a batch of its own."""
    _add(name, partial(_made_build, cls, settings), batch, traits, (cls, settings))


def _made_build(cls: str, settings: Mapping[str, Any]) -> nn.Module:
    import transformers

    model = getattr(transformers, cls)
    model = model(model.config_class(**settings))
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model


def zoo(name: str, traits: str) -> None:
    from zoo import ZOO

    _add(f"zoo:{name}", ZOO[name].build, ZOO[name].batch, traits, name)


# --- batches ----------------------------------------------------------------------------------------------------------


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(2))


def words() -> Batch:
    return {"input_ids": _integers(3, VOCAB, ROWS, LENGTH), "labels": _integers(3, VOCAB, ROWS, LENGTH)}


def speech(samples: int = 400) -> Batch:
    """Waves, and letters for CTC."""
    return {"input_values": _normal(ROWS, samples), "labels": _integers(4, 30, ROWS, 4)}


def spectra(bins: int = 16, frames: int = 24) -> Batch:
    """Spectrograms, and tokens."""
    return {"input_features": _normal(ROWS, bins, frames), "labels": _integers(4, VOCAB, ROWS, 6)}


def frames(bins: int = 16, length: int = 24) -> Batch:
    return {"input_features": _normal(ROWS, length, bins), "labels": _integers(4, VOCAB, ROWS, 6)}


def pixels(labels: int = 2, key: str = "pixel_values") -> Batch:
    return {key: _normal(ROWS, 3, IMAGE, IMAGE), "labels": _integers(0, labels, ROWS)}


def masks() -> Batch:
    """Images, and a class for each pixel."""
    return {"pixel_values": _normal(ROWS, 3, IMAGE, IMAGE), "labels": _integers(0, 2, ROWS, IMAGE, IMAGE)}


def masked() -> Batch:
    """With the noise that patches are masked by, which the model would draw itself, for other rows in each layout."""
    return {"pixel_values": _normal(ROWS, 3, IMAGE, IMAGE), "noise": _normal(ROWS, 16)}


def captions(image: int = -1, count: int = 0, length: int = LENGTH) -> Batch:
    """Images and texts; the first ``count`` tokens of each are ``image``, which stands for the picture."""
    ids = _integers(4, VOCAB - 6, ROWS, length)
    if count:
        ids[:, :count] = image
    labels = torch.where(ids == image, -100, ids)
    return {"input_ids": ids, "pixel_values": _normal(ROWS, 3, IMAGE, IMAGE), "labels": labels}


def answers(classes: int = 2) -> Batch:
    """Images and texts, and one of a few answers."""
    onehot = torch.nn.functional.one_hot(_integers(0, classes, ROWS), classes).double()
    return {
        "input_ids": _integers(4, VOCAB, ROWS, LENGTH),
        "pixel_values": _normal(ROWS, 3, IMAGE, IMAGE),
        "labels": onehot,
    }


def pairs() -> Batch:
    return {
        "input_ids": _integers(4, VOCAB, ROWS, LENGTH),
        "pixel_values": _normal(ROWS, 3, IMAGE, IMAGE),
        "return_loss": True,
    }


def series(length: int = 16, channels: int = 2) -> Batch:
    return {"past_values": _normal(ROWS, length, channels), "future_values": _normal(ROWS, 4, channels)}


def spans() -> Batch:
    """Texts, and where in each the answer stands."""
    ids = _integers(4, VOCAB, ROWS, LENGTH)
    mask = torch.ones_like(ids)
    mask[1::2, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask, "start_positions": ids[:, 0] % 8, "end_positions": ids[:, 1] % 8}


def sentences(classes: int = 2) -> Batch:
    ids = _integers(4, VOCAB, ROWS, LENGTH)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": _integers(0, classes, ROWS)}


# --- decoders ---------------------------------------------------------------------------------------------------------

_group = "decoders"
TINY: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
GQA: dict[str, Any] = dict(TINY, num_key_value_heads=2)
KEYS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)

hf("llama", "GQA, split QKV, rotary, gated MLP", **GQA)
hf("gpt2", "fused QKV in Conv1D, tied head", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32)
hf("gpt_neox", "QKV fused by head, parallel attention and MLP, partial rotary", **TINY)
hf("gptj", "parallel attention and MLP with one norm", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
hf("codegen", "QKV fused in blocks of heads", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
hf("gpt_neo", "local and global attention in turn", vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4,
   attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=32)  # fmt: skip
hf("gpt_bigcode", "multi-query, fused", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32)
hf("openai-gpt", "norms after the sums", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32)
hf("opt", "learnt positions with an offset", vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
   num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=32)  # fmt: skip
hf("bloom", "ALiBi, QKV fused by head", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
hf("mpt", "ALiBi, fused QKV", vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4)
hf(
    "falcon",
    "multi-query, fused, parallel",
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
)
hf("phi", "parallel, biased, partial rotary", **TINY)
hf("phi3", "fused QKV of unequal parts, fused gate and up", **GQA, **KEYS)
hf("gemma", "scaled embedding, norms with 1 + w", head_dim=8, **GQA)
hf("gemma2", "soft caps, four norms a block, sliding window", head_dim=8, **GQA)
hf("gemma3_text", "norms of q and k, two rotary tables", head_dim=8, **GQA)
hf("mistral", "sliding window", **GQA)
hf("qwen2", "biases in QKV alone", **GQA)
hf("qwen3", "norms of q and k by head", head_dim=8, **GQA)
hf("olmo2", "norms after, of all of q and k", **GQA)
hf("cohere", "parallel, one norm, interleaved rotary, scaled logits", **GQA, **KEYS)
hf("stablelm", "partial rotary, LayerNorm", **GQA)
hf("starcoder2", "GQA with biases, GELU MLP", **GQA)
hf("granite", "multipliers of embedding, residual, attention", **GQA)
hf("nemotron", "squared ReLU, LayerNorm with 1 + w", **GQA)
hf("persimmon", "QKV fused by head, norms of q and k", **TINY)
hf("smollm3", "layers without rotary", **GQA, **KEYS)
hf("glm", "fused gate and up, interleaved partial rotary", head_dim=8, **GQA, **KEYS)
hf("xglm", "sinusoidal positions", vocab_size=VOCAB, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4)
hf("biogpt", "learnt positions, scaled embedding", **TINY, max_position_embeddings=32)
hf("ctrl", "sinusoidal, sequence of tuples", vocab_size=VOCAB, n_embd=32, dff=64, n_layer=2, n_head=4, n_positions=32)
hf(
    "xlnet",
    "two-stream relative attention, einsum, sequence first",
    vocab_size=VOCAB,
    d_model=32,
    d_inner=64,
    n_layer=2,
    n_head=4,
)

hf("olmo", "LayerNorm without weights", **GQA)
hf("olmo3", "sliding window, norms after", **GQA)
hf("apertus", "xIELU, norms of q and k", **GQA)
hf("arcee", "squared ReLU, no gate", **GQA)
hf("bitnet", "a norm before each output projection", **GQA)
hf("cohere2", "parallel, sliding window, layers without rotary", **GQA, **KEYS)
hf("diffllama", "differential attention", **GQA)
hf("ernie4_5", "interleaved rotary", **GQA)
hf("exaone4", "norms after, norms of q and k", **GQA)
hf("glm4", "four norms, interleaved partial rotary", head_dim=8, **GQA, **KEYS)
hf(
    "gpt_neox_japanese",
    "one bias after the last sum",
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
)
hf("helium", "interleaved rotary", head_dim=8, **GQA)
hf("hunyuan_v1_dense", "norms of q and k after rotary", head_dim=8, **GQA)
hf("ministral", "sliding window", head_dim=8, **GQA)
hf("nanochat", "norms without weights, squared ReLU", **GQA)
hf("seed_oss", "biases in QKV", head_dim=8, **GQA)
hf("vaultgemma", "soft caps, two norms a block", head_dim=8, query_pre_attn_scalar=8, **GQA)
hf(
    "youtu",
    "latent attention, dense",
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=4,
    qk_nope_head_dim=8,
    v_head_dim=8,
    **TINY,
)
hf(
    "modernbert-decoder",
    "local and global attention, causal",
    **TINY,
    max_position_embeddings=32,
    **KEYS,
    cls_token_id=1,
    sep_token_id=2,
)

# --- experts ----------------------------------------------------------------------------------------------------------

_group = "mixtures of experts"
MOE: dict[str, Any] = dict(GQA, experts_implementation="eager")  # grouped_mm, the default, knows no float64
made("mixtral", "MixtralForCausalLM", "top 2 of 4 experts", words, num_local_experts=4, **MOE)
made("qwen2_moe", "Qwen2MoeForCausalLM", "a shared expert, gated", words, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
   shared_expert_intermediate_size=32, decoder_sparse_step=1, **MOE)  # fmt: skip
made("qwen3_moe", "Qwen3MoeForCausalLM", "norms of q and k", words, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8,
   **MOE)  # fmt: skip
made("olmoe", "OlmoeForCausalLM", "norms of q and k, dropless", words, num_experts=4, num_experts_per_tok=2, **MOE)
made(
    "granitemoe",
    "GraniteMoeForCausalLM",
    "fused expert weights",
    words,
    num_local_experts=4,
    num_experts_per_tok=2,
    **MOE,
)
made("gpt_oss", "GptOssForCausalLM", "sinks in attention, biased experts, clamped gates", words, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
   **MOE)  # fmt: skip
made("deepseek_v3", "DeepseekV3ForCausalLM", "latent attention, grouped router, shared experts", words, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
   topk_group=1, first_k_dense_replace=1, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
   qk_nope_head_dim=8, v_head_dim=8, **dict(MOE, num_key_value_heads=4))  # fmt: skip
hf("switch_transformers", "encoder-decoder, top 1, capacity", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2,
   num_decoder_layers=2, num_heads=4, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)  # fmt: skip

made(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    "a shared expert, a dense first layer",
    words,
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=32,
    moe_layer_start_index=1,
    **MOE,
)
made(
    "dots1",
    "Dots1ForCausalLM",
    "grouped router, a dense first layer",
    words,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    n_shared_experts=1,
    num_experts_per_tok=2,
    **MOE,
)
made(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    "grouped router, partial rotary",
    words,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    head_dim=8,
    num_experts_per_tok=2,
    **MOE,
)
made("phimoe", "PhimoeForCausalLM", "sparse mixer", words, num_local_experts=4, num_experts_per_tok=2, **MOE)
made(
    "jetmoe",
    "JetMoeForCausalLM",
    "experts of attention and of MLPs",
    words,
    num_local_experts=4,
    kv_channels=8,
    num_experts_per_tok=2,
    num_key_value_heads=2,
    experts_implementation="eager",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
)
made("hunyuan_moe", "HunYuanMoEV1ForCausalLM", "a shared expert", words, num_experts=4, moe_topk=2, head_dim=8, **MOE)

# --- state spaces -----------------------------------------------------------------------------------------------------

_group = "state spaces and recurrences"
hf("mamba", "selective scan, causal convolution", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
hf("mamba2", "chunked scan, heads", vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, num_heads=8, head_dim=8,
   n_groups=2, chunk_size=4)  # fmt: skip
hf("falcon_mamba", "norms within the scan", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
made("jamba", "JambaForCausalLM", "attention, mamba and experts in turn", words, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
   expert_layer_offset=1, mamba_d_state=4, use_mamba_kernels=False, **MOE)  # fmt: skip
hf("bamba", "attention and mamba2 in turn", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1,
   mamba_d_state=8, mamba_chunk_size=4, **GQA)  # fmt: skip
hf("recurrent_gemma", "gated linear recurrence, local attention", lru_width=32, attention_window_size=8,
   block_types=["recurrent", "attention"], **dict(GQA, num_key_value_heads=1))  # fmt: skip
hf("rwkv", "linear attention in time", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, context_length=32)
made("qwen3_next", "Qwen3NextForCausalLM", "gated delta rule and attention in turn, experts", words, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
   shared_expert_intermediate_size=16, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
   linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"], **MOE)  # fmt: skip
hf(
    "falcon_h1",
    "attention beside mamba2 in each block",
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_chunk_size=4,
    mamba_d_ssm=64,
    **GQA,
)
hf(
    "xlstm",
    "matrix memories, chunks",
    vocab_size=VOCAB,
    hidden_size=32,
    num_heads=2,
    num_hidden_layers=2,
    chunkwise_kernel="chunkwise--native_autograd",
    sequence_kernel="native_sequence__native",
    step_kernel="native",
    chunk_size=4,
)
hf(
    "zamba2",
    "a shared block with adapters among mamba2",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    mamba_d_state=8,
    mamba_headdim=8,
    n_mamba_heads=8,
    chunk_size=4,
    use_mamba_kernels=False,
    layers_block_type=["mamba", "hybrid", "hybrid"],
    hybrid_layer_ids=[1, 2],
    num_mem_blocks=1,
    adapter_rank=4,
    mamba_ngroups=1,
)
hf(
    "nemotron_h",
    "mamba2, attention and MLPs as single blocks",
    hybrid_override_pattern="M*-",
    mamba_num_heads=8,
    mamba_head_dim=8,
    n_groups=1,
    ssm_state_size=8,
    chunk_size=4,
    head_dim=8,
    **dict(GQA, num_hidden_layers=3),
)

zoo("lstm", "torch's LSTM")

# --- encoders ---------------------------------------------------------------------------------------------------------

_group = "encoders"
ENCODER: dict[str, Any] = dict(TINY, max_position_embeddings=32)
hf("bert", "tied decoder with its own bias", **ENCODER)
hf("roberta", "positions from the ids", **ENCODER)
hf("albert", "one layer, shared by all", embedding_size=16, **ENCODER)
hf("electra", "narrow embedding", embedding_size=16, **ENCODER)
hf("distilbert", "", vocab_size=VOCAB, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32)
made("deberta-v2", "DebertaV2ForMaskedLM", "disentangled attention over relative positions", words, relative_attention=True, position_buckets=4,
   pos_att_type=["p2c", "c2p"], **ENCODER)  # fmt: skip
hf("modernbert", "fused Wqkv and Wi, local attention, no biases", **ENCODER, **KEYS, cls_token_id=1, sep_token_id=2)
hf("mpnet", "relative bias shared by layers", **ENCODER)
hf("fnet", "Fourier transforms for attention", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
   max_position_embeddings=32)  # fmt: skip
hf("convbert", "convolution by span beside attention", embedding_size=32, **ENCODER)
hf("mobilebert", "bottlenecks", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, **ENCODER)
hf("squeezebert", "grouped 1-d convolutions", embedding_size=32, **ENCODER)
hf("roformer", "rotary over sinusoids", embedding_size=32, **ENCODER)
hf("funnel", "pools the sequence", vocab_size=VOCAB, d_model=32, n_head=4, d_head=8, d_inner=64, block_sizes=[1, 1],
   num_decoder_layers=1)  # fmt: skip
hf("longformer", "windows of attention, padded", attention_window=4, **dict(ENCODER, max_position_embeddings=40))
hf("big_bird", "full attention", attention_type="original_full", **ENCODER)
hf(
    "nystromformer",
    "landmarks; its inverse starts from the largest of all rows, which couples them at 1e-8",
    num_landmarks=4,
    segment_means_seq_len=LENGTH,
    **ENCODER,
)
hf("ibert", "quantization-ready layers", **ENCODER)
made("bert, answers", "BertForQuestionAnswering", "two losses, padding", spans, **ENCODER)
made("roberta, classes", "RobertaForSequenceClassification", "loss of the first token", sentences, **ENCODER)

# --- encoder-decoders -------------------------------------------------------------------------------------------------

_group = "encoder-decoders"
SEQ2SEQ: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4
)
hf("t5", "relative bias made by the first layer, tied three times", **T5)
hf("mt5", "gated, untied", **T5)
hf("umt5", "a relative bias in each layer", **T5)
hf("longt5", "local attention in blocks", local_radius=3, **T5)
hf("bart", "encoder states in every decoder layer", **SEQ2SEQ)
hf("mbart", "norms before", **SEQ2SEQ)
hf("pegasus", "sinusoids", **SEQ2SEQ)
hf("marian", "a bias of the logits in a buffer", **SEQ2SEQ, pad_token_id=0, decoder_start_token_id=0)
hf("m2m_100", "sinusoids that grow", **SEQ2SEQ)
hf("blenderbot", "", **SEQ2SEQ)
hf("led", "windows in the encoder", **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, attention_window=4,
   max_encoder_position_embeddings=32, max_decoder_position_embeddings=32)  # fmt: skip
hf("prophetnet", "predicts two tokens ahead", vocab_size=VOCAB, hidden_size=32, num_encoder_layers=2, num_decoder_layers=2,
   num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
   max_position_embeddings=32)  # fmt: skip

# --- vision -----------------------------------------------------------------------------------------------------------

_group = "vision"
SIGHT: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=IMAGE, patch_size=8
)
hf("vit", "a class token", **SIGHT)
hf("deit", "two tokens", **SIGHT)
hf("beit", "relative bias, layer scale", use_relative_position_bias=True, layer_scale_init_value=0.1, **SIGHT)
hf("dinov2", "layer scale, interpolated positions", hidden_size=32, mlp_ratio=2, num_hidden_layers=2, num_attention_heads=4,
   image_size=IMAGE, patch_size=8)  # fmt: skip
hf(
    "swin",
    "shifted windows, merging",
    image_size=IMAGE,
    patch_size=4,
    embed_dim=16,
    depths=[1, 1],
    num_heads=[2, 4],
    window_size=4,
)
hf("swinv2", "cosine attention, positions by an MLP", image_size=IMAGE, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
   window_size=4)  # fmt: skip
hf(
    "convnext",
    "depthwise convolutions, layer scale",
    hidden_sizes=[16, 32],
    depths=[1, 1],
    num_stages=2,
    image_size=IMAGE,
)
hf("convnextv2", "global response norm", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, image_size=IMAGE)
hf("resnet", "batch norm", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
hf(
    "regnet",
    "grouped convolutions, squeeze and excite",
    embedding_size=16,
    hidden_sizes=[16, 32],
    depths=[1, 1],
    groups_width=8,
)
hf("bit", "weight standardization, group norm", embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4)
hf("mobilenet_v2", "inverted residuals, batch norm", depth_multiplier=0.25, image_size=IMAGE)
hf(
    "efficientnet",
    "depthwise, squeeze and excite",
    width_coefficient=0.25,
    depth_coefficient=0.1,
    image_size=IMAGE,
    hidden_dim=320,
)
hf("mobilevit", "convolutions around transformers", hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32],
   num_attention_heads=4, image_size=IMAGE)  # fmt: skip
hf("poolformer", "pooling for attention", hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
   padding=[2, 1])  # fmt: skip
hf("pvt", "spatial reduction", hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, num_attention_heads=[1, 2],
   sequence_reduction_ratios=[2, 1], image_size=IMAGE, patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2])  # fmt: skip
hf("levit", "batch norm in attention, biases by offset", hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1],
   key_dim=[8, 8, 8], image_size=64, attention_ratio=[2, 2, 2], mlp_ratio=[2, 2, 2])  # fmt: skip
hf("focalnet", "focal modulation", image_size=IMAGE, embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
   hidden_sizes=[16, 32])  # fmt: skip
made("segformer, masks", "SegformerForSemanticSegmentation", "four scales joined, a loss for each pixel", masks, num_labels=2,
     num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
     num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32)  # fmt: skip
made("vit_mae", "ViTMAEForPreTraining", "masks by noise, decodes", masked, **SIGHT, decoder_hidden_size=16,
     decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32)  # fmt: skip
zoo("unet", "skips")
zoo("mixer", "MLPs across patches")
zoo("batchnorm", "running statistics")
zoo("dit", "adaptive norms")

# --- images with texts ------------------------------------------------------------------------------------------------

_group = "vision and language"
TEXT: dict[str, Any] = dict(ENCODER, eos_token_id=2, pad_token_id=1, bos_token_id=0)
hf("clip", "in-batch contrast", text_config__vocab_size=VOCAB, projection_dim=16,
   **{f"text_config__{k}": v for k, v in TEXT.items() if k != "vocab_size"}, **{f"vision_config__{k}": v for k, v in SIGHT.items()})  # fmt: skip
made("siglip", "SiglipModel", "sigmoid contrast, pooling by attention", pairs, text_config=dict(TEXT, projection_size=32),
     vision_config=SIGHT)  # fmt: skip
made("blip", "BlipForConditionalGeneration", "cross attention into text", captions,
     text_config=dict(TEXT, projection_dim=16, encoder_hidden_size=32), vision_config=SIGHT, projection_dim=16)  # fmt: skip
made("vilt", "ViltForQuestionAnswering", "patches and words in one sequence", answers, num_labels=2, **SIGHT,
     vocab_size=VOCAB, max_position_embeddings=32)  # fmt: skip
made("llava", "LlavaForConditionalGeneration", "features of images put among words", partial(captions, 90, 16, 24),
     text_config=dict(GQA, model_type="llama"), vision_config=dict(SIGHT, model_type="clip_vision_model"), image_token_index=90,
     image_token_id=90)  # fmt: skip
made("paligemma", "PaliGemmaForConditionalGeneration", "an image before the text", partial(captions, 90, 16, 24),
     text_config=dict(GQA, head_dim=8, model_type="gemma"), vision_config=dict(SIGHT, model_type="siglip_vision_model", vision_use_head=False),
     projection_dim=32, hidden_size=32, image_token_id=90, image_token_index=90)  # fmt: skip
made("git", "GitForCausalLM", "images before the words, one stack", captions, **TEXT, vision_config=SIGHT)

# --- audio and series -------------------------------------------------------------------------------------------------

_group = "audio and series"
WAVES: dict[str, Any] = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, conv_dim=[16, 16],
    conv_kernel=[10, 3], conv_stride=[5, 2], num_feat_extract_layers=2, num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
)  # fmt: skip
SPEECH: dict[str, Any] = dict({k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}, **KEYS)
made("wav2vec2", "Wav2Vec2ForCTC", "convolutions over waves, weight norm, CTC", speech, **WAVES)
made("hubert", "HubertForCTC", "", speech, **WAVES)
made("wavlm", "WavLMForCTC", "gated relative bias", speech, **WAVES)
made("data2vec-audio", "Data2VecAudioForCTC", "positions by five convolutions", speech, **WAVES)
made("sew", "SEWForCTC", "squeezes the sequence", speech, squeeze_factor=2, **WAVES)
made("wav2vec2-conformer", "Wav2Vec2ConformerForCTC", "convolutions in blocks, batch norm", speech, **WAVES)
made("whisper", "WhisperForConditionalGeneration", "spectrogram encoder, decoder", spectra, num_mel_bins=16, max_source_positions=12,
     max_target_positions=16, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **SPEECH)  # fmt: skip
made("speech_to_text", "Speech2TextForConditionalGeneration", "gated convolutions before", frames, input_feat_per_channel=16,
     input_channels=1, num_conv_layers=2, conv_kernel_sizes=[3, 3], conv_channels=16, max_source_positions=24, max_target_positions=16,
     decoder_start_token_id=1, **SPEECH)  # fmt: skip
made("audio-spectrogram-transformer", "ASTForAudioClassification", "patches of a spectrogram",
     lambda: {"input_values": _normal(ROWS, 24, 16), "labels": _integers(0, 2, ROWS)}, hidden_size=32, intermediate_size=64,
     num_hidden_layers=2, num_attention_heads=4, max_length=24, num_mel_bins=16, patch_size=4, frequency_stride=4, time_stride=4)  # fmt: skip
made("patchtst", "PatchTSTForPrediction", "patches of series, channels apart", series, num_input_channels=2, context_length=16,
     patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=32,
     loss="mse")  # fmt: skip
made("patchtsmixer", "PatchTSMixerForPrediction", "mixers over series", series, num_input_channels=2, context_length=16,
     patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_layers=2, loss="mse")  # fmt: skip
zoo("conv1d", "dilated causal convolutions")

# --- as people write them ---------------------------------------------------------------------------------------------

_group = "own modules"
zoo("nanogpt", "one file, fused QKV")
zoo("dlrm", "tables of clicks")
zoo("einsum", "attention by einsum")
zoo("raw_parameters", "parameters outside linears, one without dims")
zoo("custom_function", "autograd.Function")
zoo("codebook", "moving averages")
zoo("complex_rotary", "complex numbers")
zoo("weight_norm", "parametrizations")
zoo("experts", "routing by index")
zoo("structures", "nested inputs and outputs")
