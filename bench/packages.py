"""The models of the coverage table that come from other packages than transformers, unedited, at tiny sizes.

    take("x-transformers", "encoder", "x_transformers:ContinuousTransformerWrapper", batch, traits, ...)

The packages are installed for coverage alone (``make coverage``, bench/packages.txt). A model that returns no loss of
its own is judged by ``mean_square`` of everything that it returns.

To add one: a line in the group of its package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ROWS, VOCAB = 8, 96


@dataclass(frozen=True)
class PackageModel:
    """A row of the table.

    Attributes:
        name: ``package/model``, as ``--only`` takes it.
        package: the distribution that it comes from.
        kind: the group that it stands in.
        build: makes the model; pickled by name.
        batch: makes the batch: a tuple of positional arguments, or a dict.
        traits: what makes it worth its row.
        loss: of the model's output; None if the output is a loss.
        settings: that make it tiny.
    """

    name: str
    package: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    traits: str
    loss: Callable[[Any], Tensor] | None
    settings: str

    @property
    def version(self) -> str:
        """The installed version of the package."""
        return metadata.version(self.package)


PACKAGE_MODELS: dict[str, PackageModel] = {}


def take(
    package: str, name: str, path: str, batch: Callable[[], Any], traits: str, *args: Any,
    returns_loss: bool = False, **settings: Any,
) -> None:  # fmt: skip
    """Adds the model that ``path`` (``module:Class``, or ``module:function``) makes of the arguments."""
    full = f"{package}/{name}"
    assert full not in PACKAGE_MODELS, full
    loss = None if returns_loss else mean_square
    build = partial(_make, path, args, settings)
    PACKAGE_MODELS[full] = PackageModel(
        full, package, package, build, batch, traits, loss, repr((path, args, settings))
    )


def _make(path: str, args: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    module, _, name = path.partition(":")
    package = module.partition(".")[0]
    if package in _PARTLY and package not in sys.modules:
        sys.modules[package] = _without_init(package)
    positional = [x() if isinstance(x, Of) else x for x in args]
    named = {key: x() if isinstance(x, Of) else x for key, x in settings.items()}
    return attrgetter(name)(import_module(module))(*positional, **named)


# Packages whose ``__init__`` imports all that they have, for which further packages would be needed.
_PARTLY = frozenset(["vit_pytorch", "mambapy"])


def _without_init(package: str) -> ModuleType:
    """A package of which single files can be imported, its ``__init__`` not being run."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    module = ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    module.__spec__ = spec
    return module


class Of:
    """An argument that is itself made from the package: a module or a config within a model."""

    def __init__(self, path: str, *args: Any, **settings: Any) -> None:
        self.path, self.args, self.settings = path, args, settings

    def __call__(self) -> Any:
        return _make(self.path, self.args, self.settings)

    def __repr__(self) -> str:
        return repr((self.path, self.args, self.settings))


def mean_square(output: Any) -> Tensor:
    """The sum over the floating tensors of an output of the mean of their squares; complex ones by their modulus."""
    leaves = [x for x in pytree.tree_leaves(_plain(output)) if isinstance(x, Tensor)]
    floating = [
        torch.view_as_real(x) if x.is_complex() else x for x in leaves if x.is_floating_point() or x.is_complex()
    ]
    losses = [x.square().mean() for x in floating if x.requires_grad]
    return torch.stack(losses).sum() if losses else torch.stack([x.square().mean() for x in floating]).sum()


def _plain(output: Any) -> Any:
    """Dataclasses and mappings as dicts: pytree takes what it does not know for a leaf."""
    if hasattr(output, "__dataclass_fields__") and not isinstance(output, dict):
        return {name: _plain(getattr(output, name)) for name in output.__dataclass_fields__}
    if isinstance(output, Mapping):
        return {key: _plain(value) for key, value in output.items()}
    if isinstance(output, (tuple, list)):
        return [_plain(value) for value in output]
    return output


# --- batches ----------------------------------------------------------------------------------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1))


def integers(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, (ROWS, *shape), generator=torch.Generator().manual_seed(2))


def features(*shape: int) -> tuple[Tensor, ...]:
    return (normal(*shape),)


def tokens(length: int = 16) -> tuple[Tensor, ...]:
    return (integers(VOCAB, length),)


def image(size: int = 32, channels: int = 3) -> tuple[Tensor, ...]:
    return (normal(channels, size, size),)


def volume(size: int = 32, channels: int = 1) -> tuple[Tensor, ...]:
    return (normal(channels, size, size, size),)


# --- x-transformers ---------------------------------------------------------------------------------------------------

_X = "x_transformers"
_LAYERS: dict[str, Any] = dict(dim=32, depth=2, heads=4, attn_dim_head=8)


def _decoder(**settings: Any) -> Of:
    return Of(f"{_X}:Decoder", **_LAYERS, **settings)


def _lm(name: str, traits: str, wrapper: Mapping[str, Any] | None = None, **settings: Any) -> None:
    net = Of(
        f"{_X}:TransformerWrapper",
        num_tokens=VOCAB,
        max_seq_len=32,
        attn_layers=_decoder(**settings),
        **(wrapper or {}),
    )
    take("x-transformers", name, f"{_X}:AutoregressiveWrapper", tokens, traits, net, returns_loss=True)


_lm("gpt", "pre-norm decoder, loss inside")
_lm("llama-like", "rotary, swiglu, RMS norm", {"use_abs_pos_emb": False}, rotary_pos_emb=True,
     ff_swish=True, ff_glu=True, use_rmsnorm=True, ff_no_bias=True)  # fmt: skip
_lm("alibi", "ALiBi, qk norm", alibi_pos_bias=True, attn_qk_norm=True)
_lm("t5-bias", "relative bias, sandwich norm", rel_pos_bias=True, sandwich_norm=True)
_lm("kv-heads", "grouped queries, talking heads", attn_kv_heads=2)
_lm("memory", "memory tokens, learnt key and value", {"num_memory_tokens": 3}, attn_num_mem_kv=2)
_lm("macaron", "macaron, residual attention", macaron=True, residual_attn=True)
_lm("shift", "token shift, deep norm scale", shift_tokens=1, scale_residual=True)
_lm("hyper", "hyper-connections", num_residual_streams=2)
take("x-transformers", "bert", f"{_X}:TransformerWrapper", tokens, "bidirectional encoder",
     num_tokens=VOCAB, max_seq_len=32, attn_layers=Of(f"{_X}:Encoder", **_LAYERS))  # fmt: skip
take("x-transformers", "continuous", f"{_X}:ContinuousTransformerWrapper", partial(features, 12, 6),
     "vectors in and out", dim_in=6, dim_out=5, max_seq_len=32, attn_layers=Of(f"{_X}:Encoder", **_LAYERS))  # fmt: skip
take("x-transformers", "vit", f"{_X}:ViTransformerWrapper", image, "images", image_size=32, patch_size=8,
     num_classes=5, attn_layers=Of(f"{_X}:Encoder", **_LAYERS))  # fmt: skip
take("x-transformers", "seq2seq", f"{_X}:XTransformer", lambda: (integers(VOCAB, 10), integers(VOCAB, 8)),
     "encoder and decoder, loss inside", dim=32, enc_num_tokens=VOCAB, enc_depth=2, enc_heads=4,
     enc_max_seq_len=16, dec_num_tokens=VOCAB, dec_depth=2, dec_heads=4, dec_max_seq_len=16,
     returns_loss=True)  # fmt: skip

# --- vit-pytorch ------------------------------------------------------------------------------------------------------


def _vit(name: str, module: str, cls: str, traits: str, batch: Callable[[], Any] = image, **settings: Any) -> None:
    take("vit-pytorch", name, f"vit_pytorch.{module}:{cls}", batch, traits, **settings)


_SEEN: dict[str, Any] = dict(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64)
_vit("vit", "vit", "ViT", "class token", **_SEEN)
_vit("simple_vit", "simple_vit", "SimpleViT", "fixed positions", **_SEEN)
_vit("deepvit", "deepvit", "DeepViT", "re-attention", **_SEEN)
_vit("cait", "cait", "CaiT", "layer scale, class attention", cls_depth=1, **_SEEN)
_vit("t2t", "t2t", "T2TViT", "unfolds, tokens to tokens", image_size=32, num_classes=5, dim=32, depth=2,
     heads=4, mlp_dim=64, t2t_layers=((3, 2), (3, 2)))  # fmt: skip
_vit("cct", "cct", "CCT", "convolutional tokens, pooling over the sequence", img_size=32, embedding_dim=32,
     n_conv_layers=1, kernel_size=3, stride=2, padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0,
     num_classes=5, positional_embedding="learnable")  # fmt: skip
_vit("cross_vit", "cross_vit", "CrossViT", "two scales that exchange class tokens", image_size=32,
     num_classes=5, depth=1, sm_dim=16, sm_patch_size=8, sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=32,
     lg_dim=32, lg_patch_size=16, lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=64, cross_attn_depth=1,
     cross_attn_heads=2)  # fmt: skip
_vit("pit", "pit", "PiT", "pooling between stages", image_size=32, patch_size=8, num_classes=5, dim=32,
     depth=(1, 1), heads=2, mlp_dim=64)  # fmt: skip
_vit("cvt", "cvt", "CvT", "convolutional projections", num_classes=5, s1_emb_dim=16, s1_heads=1, s1_depth=1,
     s2_emb_dim=16, s2_heads=2, s2_depth=1, s3_emb_dim=32, s3_heads=2, s3_depth=1)  # fmt: skip
_vit("twins_svt", "twins_svt", "TwinsSVT", "local and global attention", num_classes=5, s1_emb_dim=16,
     s1_patch_size=4, s1_local_patch_size=4, s1_global_k=4, s1_depth=1, s2_emb_dim=16, s2_patch_size=2,
     s2_local_patch_size=4, s2_global_k=4, s2_depth=1, s3_emb_dim=32, s3_patch_size=1,
     s3_local_patch_size=4, s3_global_k=4, s3_depth=1, s4_emb_dim=32, s4_patch_size=1,
     s4_local_patch_size=4, s4_global_k=4, s4_depth=1)  # fmt: skip
_vit("regionvit", "regionvit", "RegionViT", "regional tokens", partial(image, 64), dim=(8, 16, 16, 32),
     depth=(1, 1, 1, 1), window_size=2, num_classes=5)  # fmt: skip
_vit("nest", "nest", "NesT", "nested blocks", image_size=32, patch_size=4, dim=16, heads=2,
     num_hierarchies=2, block_repeats=(1, 1), num_classes=5)  # fmt: skip
_vit("mobile_vit", "mobile_vit", "MobileViT", "convolutions around transformers", partial(image, 64),
     image_size=(64, 64), dims=[16, 16, 16], channels=[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16], num_classes=5,
     depths=(1, 1, 1))  # fmt: skip
_vit("max_vit", "max_vit", "MaxViT", "windows and grids", partial(image, 64), num_classes=5,
     dim_conv_stem=8, dim=16, dim_head=8, depth=(1, 1), window_size=4, dropout=0.0)  # fmt: skip
_vit("scalable_vit", "scalable_vit", "ScalableViT", "reduced keys", partial(image, 64), num_classes=5,
     dim=8, heads=(1, 2, 2, 4), depth=(1, 1, 1, 1), ssa_dim_key=(4, 4, 4, 4), reduction_factor=(8, 4, 2, 1),
     window_size=(4, None, None, None))  # fmt: skip
_vit("xcit", "xcit", "XCiT", "attention across channels", cls_depth=1, local_patch_kernel_size=3, **_SEEN)
_vit("parallel_vit", "parallel_vit", "ViT", "blocks side by side", num_parallel_branches=2, **_SEEN)
_vit("vit_1d", "vit_1d", "ViT", "series", partial(features, 3, 32), seq_len=32, patch_size=4, num_classes=5,
     dim=32, depth=2, heads=4, mlp_dim=64)  # fmt: skip
_vit("vit_3d", "vit_3d", "ViT", "video", lambda: features(3, 4, 16, 16), image_size=16, image_patch_size=8,
     frames=4, frame_patch_size=2, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64)  # fmt: skip
_vit("patch_merger", "vit_with_patch_merger", "ViT", "merges patches", patch_merge_layer=1,
     patch_merge_num_tokens=4, **_SEEN)  # fmt: skip
_vit("small_dataset", "vit_for_small_dataset", "ViT", "shifted patches, learnt temperature", **_SEEN)
_vit("registers", "simple_vit_with_register_tokens", "SimpleViT", "register tokens", **_SEEN)
_vit("qk_norm", "simple_vit_with_qk_norm", "SimpleViT", "norms of q and k", **_SEEN)
_vit("fft", "simple_vit_with_fft", "SimpleViT", "Fourier transform of the image", freq_patch_size=8, **_SEEN)
_vit("value_residual", "simple_vit_with_value_residual", "SimpleViT", "values of the first layer", **_SEEN)
_vit("normalized", "normalized_vit", "nViT", "weights of unit norm", image_size=32, patch_size=8,
     num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64, dim_head=8)  # fmt: skip
_vit("simple_uvit", "simple_uvit", "SimpleUViT", "skips across the depth", **_SEEN)
_vit("ats", "ats_vit", "ViT", "samples tokens by score", max_tokens_per_depth=(8, 4), **_SEEN)

# --- monai ------------------------------------------------------------------------------------------------------------


def _monai(name: str, cls: str, traits: str, batch: Callable[[], Any] = image, **settings: Any) -> None:
    take("monai", name, f"monai.networks.nets:{cls}", batch, traits, **settings)


_FLAT: dict[str, Any] = dict(spatial_dims=2, in_channels=3, out_channels=2)
_monai("unet", "UNet", "residual units, instance norm, skips by cat", channels=(8, 16, 32), strides=(2, 2),
     num_res_units=1, **_FLAT)  # fmt: skip
_monai("basic_unet", "BasicUNet", "plain", features=(8, 8, 16, 16, 32, 8), **_FLAT)
_monai("unetpp", "BasicUNetPlusPlus", "dense skips, a list of outputs", features=(8, 8, 16, 16, 32, 8), **_FLAT)
_monai("attention_unet", "AttentionUnet", "gated skips, batch norm", channels=(8, 16, 32), strides=(2, 2), **_FLAT)
_monai("dynunet", "DynUNet", "built by recursion", kernel_size=(3, 3, 3), strides=(1, 2, 2),
     upsample_kernel_size=(2, 2), filters=(8, 16, 16), **_FLAT)  # fmt: skip
_monai("segresnet", "SegResNet", "group norm", init_filters=8, blocks_down=(1, 1), blocks_up=(1,), **_FLAT)
_monai("segresnet_ds", "SegResNetDS", "deep supervision", init_filters=8, blocks_down=(1, 1), dsdepth=2, **_FLAT)
_monai("vnet", "VNet", "volumes", partial(volume, 16, 1), spatial_dims=3, in_channels=1, out_channels=2)
_monai("unetr", "UNETR", "transformer encoder, hidden states kept", img_size=(32, 32), feature_size=8,
     hidden_size=32, mlp_dim=64, num_heads=4, **_FLAT)  # fmt: skip
_monai("swin_unetr", "SwinUNETR", "shifted windows", partial(image, 64), feature_size=12, depths=(1, 1, 1,
     1), num_heads=(1, 2, 2, 4), **_FLAT)  # fmt: skip
_monai("vit", "ViT", "returns its hidden states too", in_channels=3, img_size=(32, 32), patch_size=(8, 8),
     hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4, spatial_dims=2, classification=True,
     num_classes=5)  # fmt: skip
_monai("vit_autoenc", "ViTAutoEnc", "reconstructs", in_channels=3, img_size=(32, 32), patch_size=(4, 4),
     hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4, spatial_dims=2, out_channels=3)  # fmt: skip
_monai("densenet", "DenseNet", "dense blocks, batch norm", spatial_dims=2, in_channels=3, out_channels=5,
     init_features=8, growth_rate=4, block_config=(2, 2), bn_size=2)  # fmt: skip
_monai("resnet", "ResNet", "basic blocks", block="basic", layers=[1, 1, 1, 1], block_inplanes=[8, 8, 16,
     16], spatial_dims=2, n_input_channels=3, num_classes=5)  # fmt: skip
_monai("senet", "SENet", "squeeze and excite", spatial_dims=2, in_channels=3, block="se_resnet_bottleneck",
     layers=(1, 1, 1, 1), groups=1, reduction=4, inplanes=16, num_classes=5, dropout_prob=None)  # fmt: skip
_monai("highresnet", "HighResNet", "dilated", **_FLAT)
_monai("autoencoder", "AutoEncoder", "strided", channels=(8, 16), strides=(2, 2), **_FLAT)
_monai("quicknat", "Quicknat", "dense, max unpooling", num_classes=2, num_channels=3, num_filters=8)
_monai("vqvae", "VQVAE", "codebook by moving averages", spatial_dims=2, in_channels=3, out_channels=3,
     channels=(8, 16), num_res_layers=1, num_res_channels=(8, 16), downsample_parameters=((2, 4, 1, 1), (2,
     4, 1, 1)), upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)), num_embeddings=16, embedding_dim=8)  # fmt: skip
_monai("diffusion_unet", "DiffusionModelUNet", "time embedding, attention", lambda: (normal(3, 16, 16),
     integers(100)), channels=(8, 16), num_res_blocks=1, attention_levels=(False, True), norm_num_groups=4,
     num_head_channels=8, **_FLAT)  # fmt: skip
_monai("transformer", "DecoderOnlyTransformer", "tokens", tokens, num_tokens=VOCAB, max_seq_len=32,
     attn_layers_dim=32, attn_layers_depth=2, attn_layers_heads=4)  # fmt: skip
_monai("hovernet", "HoVerNet", "three heads", partial(image, 256), mode="fast", in_channels=3, out_classes=3)
_monai("mednext", "MedNeXt", "ConvNeXt in a U", spatial_dims=2, init_filters=8, in_channels=3,
     out_channels=2, encoder_expansion_ratio=2, decoder_expansion_ratio=2, bottleneck_expansion_ratio=2,
     blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1))  # fmt: skip

# --- diffusers --------------------------------------------------------------------------------------------------------


def _diffusers(name: str, cls: str, traits: str, batch: Callable[[], Any], **settings: Any) -> None:
    take("diffusers", name, f"diffusers:{cls}", batch, traits, **settings)


def _noisy(size: int = 16, channels: int = 4, **more: Callable[[], Any]) -> dict[str, Any]:
    return {
        "sample": normal(channels, size, size),
        "timestep": integers(1000),
        **{key: make() for key, make in more.items()},
    }


def _latent(size: int = 8, channels: int = 4, width: int = 16, **more: Callable[[], Any]) -> dict[str, Any]:
    return {
        "hidden_states": normal(channels, size, size),
        "timestep": integers(1000),
        "encoder_hidden_states": normal(6, width),
        **{key: make() for key, make in more.items()},
    }


_diffusers("unet2d", "UNet2DModel", "group norm, time embedding", partial(_noisy, 16, 3), sample_size=16,
     in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
     down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
     norm_num_groups=8, attention_head_dim=8)  # fmt: skip
_diffusers("unet2d_condition", "UNet2DConditionModel", "cross attention", lambda: _noisy(16, 4,
     encoder_hidden_states=lambda: normal(6, 16)), sample_size=16, block_out_channels=(16, 32),
     layers_per_block=1, cross_attention_dim=16, attention_head_dim=4, norm_num_groups=8,
     down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D",
     "CrossAttnUpBlock2D"))  # fmt: skip
_diffusers("autoencoder_kl", "AutoencoderKL", "moments, the mode decoded", partial(image, 16),
     block_out_channels=(16, 16), norm_num_groups=8, layers_per_block=1,
     down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip
_diffusers("autoencoder_tiny", "AutoencoderTiny", "small", partial(image, 16),
     encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
     num_encoder_blocks=(1, 1, 1, 1), num_decoder_blocks=(1, 1, 1, 1))  # fmt: skip
_diffusers("vq", "VQModel", "codebook", partial(image, 16), block_out_channels=(16, 16), norm_num_groups=8,
     layers_per_block=1, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",
    ) * 2, num_vq_embeddings=16, latent_channels=4)  # fmt: skip
_diffusers("dit", "DiTTransformer2DModel", "class labels, adaptive norm",
     lambda: {"hidden_states": normal(4, 8, 8), "timestep": integers(1000), "class_labels": integers(10)},
     num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
     sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10)  # fmt: skip
_diffusers("transformer2d", "Transformer2DModel", "spatial transformer",
     lambda: {"hidden_states": normal(16, 8, 8), "encoder_hidden_states": normal(6, 16)},
     num_attention_heads=2, attention_head_dim=8, in_channels=16, num_layers=2, cross_attention_dim=16,
     norm_num_groups=4)  # fmt: skip
_diffusers("pixart", "PixArtTransformer2DModel", "one table of modulations",
     lambda: _latent(added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None}),
     num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
     sample_size=8, cross_attention_dim=32, caption_channels=16, use_additional_conditions=False)  # fmt: skip
_diffusers("sd3", "SD3Transformer2DModel", "two streams in one attention",
     lambda: _latent(pooled_projections=lambda: normal(24)), sample_size=8, patch_size=2, in_channels=4,
     num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
     caption_projection_dim=32, pooled_projection_dim=24, out_channels=4, pos_embed_max_size=8)  # fmt: skip
_diffusers("flux", "FluxTransformer2DModel", "double and single blocks, rotary of three axes",
     lambda: {"hidden_states": normal(16, 4), "encoder_hidden_states": normal(6, 16),
     "pooled_projections": normal(24), "timestep": integers(1000) / 1000, "img_ids": torch.zeros(16, 3),
     "txt_ids": torch.zeros(6, 3)}, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
     num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6))  # fmt: skip
_diffusers("auraflow", "AuraFlowTransformer2DModel", "joint then single blocks", partial(_latent),
     sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
     attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32,
     pos_embed_max_size=64, out_channels=4)  # fmt: skip
_diffusers("prior", "PriorTransformer", "a transformer that predicts an embedding",
     lambda: {"hidden_states": normal(16), "timestep": integers(1000), "proj_embedding": normal(16),
     "encoder_hidden_states": normal(5, 16)}, num_attention_heads=2, attention_head_dim=8, num_layers=2,
     embedding_dim=16, num_embeddings=5)  # fmt: skip
_diffusers("stable_audio", "StableAudioDiTModel", "rotary, cross attention",
     lambda: {"hidden_states": normal(4, 16), "timestep": integers(10) / 10,
     "encoder_hidden_states": normal(5, 16), "global_hidden_states": normal(1, 16)}, sample_size=16,
     in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
     num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=16, time_proj_dim=16,
     global_states_input_dim=16, cross_attention_input_dim=16)  # fmt: skip
_diffusers("uvit", "UVit2DModel", "tokens of images, convolutions around", lambda: (integers(16, 8, 8),
     normal(5, 16), normal(16), torch.ones(ROWS, 5)), hidden_size=32, hidden_dropout=0.0, cond_embed_dim=16,
     micro_cond_encode_dim=4, micro_cond_embed_dim=20, encoder_hidden_size=16, vocab_size=20,
     codebook_size=16, in_channels=32, block_out_channels=32, num_res_blocks=1, num_hidden_layers=2,
     num_attention_heads=4, attention_dropout=0.0, intermediate_size=64, block_num_heads=4, sample_size=8)  # fmt: skip

# --- smaller packages -------------------------------------------------------------------------------------------------

take("conformer", "conformer", "conformer:Conformer", partial(features, 12, 32),
     "convolutions in blocks, batch norm", dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=5)  # fmt: skip
take("perceiver-pytorch", "perceiver", "perceiver_pytorch:Perceiver", lambda: features(8, 8, 3),
     "latents attend to pixels, shared weights", num_freq_bands=2, depth=2, max_freq=4.0, num_latents=8,
     latent_dim=16, cross_dim_head=8, latent_heads=2, latent_dim_head=8, num_classes=5,
     self_per_cross_attn=1, weight_tie_layers=True)  # fmt: skip
take("perceiver-pytorch", "io", "perceiver_pytorch:PerceiverLM", tokens, "queries decode", dim=32,
     num_tokens=VOCAB, max_seq_len=32, depth=1, num_latents=8, latent_dim=16, cross_dim_head=8,
     latent_heads=2, latent_dim_head=8)  # fmt: skip
take("performer-pytorch", "lm", "performer_pytorch:PerformerLM", tokens,
     "random features, kernel attention", num_tokens=VOCAB, max_seq_len=32, dim=32, depth=2, heads=4,
     dim_head=8, causal=False)  # fmt: skip
take("reformer-pytorch", "lm", "reformer_pytorch:ReformerLM", tokens,
     "hashing attention, reversible blocks", num_tokens=VOCAB, dim=32, depth=2, max_seq_len=32, heads=2,
     bucket_size=4, n_hashes=2, causal=True)  # fmt: skip
take("linear-attention-transformer", "lm", "linear_attention_transformer:LinearAttentionTransformerLM",
     tokens, "linear attention, local heads", num_tokens=VOCAB, dim=32, depth=2, heads=4, max_seq_len=32,
     causal=True, n_local_attn_heads=0)  # fmt: skip
take("routing-transformer", "lm", "routing_transformer:RoutingTransformerLM", tokens, "k-means attention",
     num_tokens=VOCAB, dim=32, depth=2, heads=4, max_seq_len=16, window_size=8, causal=True)  # fmt: skip
take("sinkhorn-transformer", "lm", "sinkhorn_transformer:SinkhornTransformerLM", tokens, "sorted buckets",
     num_tokens=VOCAB, dim=32, depth=2, heads=4, max_seq_len=16, bucket_size=4, causal=False)  # fmt: skip
take("mixture-of-experts", "moe", "mixture_of_experts:MoE", partial(features, 12, 16),
     "routes by gates, balancing loss", dim=16, num_experts=4)  # fmt: skip
take("st-moe-pytorch", "moe", "st_moe_pytorch:MoE", partial(features, 12, 16), "top-n routing, two losses",
     dim=16, num_experts=4)  # fmt: skip
take("soft-moe-pytorch", "soft_moe", "soft_moe_pytorch:SoftMoE", partial(features, 12, 16), "soft slots",
     dim=16, seq_len=12, num_experts=4)  # fmt: skip
take("g-mlp-pytorch", "gmlp", "g_mlp_pytorch:gMLP", tokens, "spatial gates", num_tokens=VOCAB, dim=32,
     depth=2, seq_len=16, causal=True)  # fmt: skip
take("mlp-mixer-pytorch", "mixer", "mlp_mixer_pytorch:MLPMixer", image, "MLPs across patches",
     image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5)  # fmt: skip
take("megabyte-pytorch", "megabyte", "MEGABYTE_pytorch:MEGABYTE", lambda: (integers(VOCAB, 4, 4),),
     "a transformer in a transformer, loss inside", num_tokens=VOCAB, dim=(32, 16), depth=(2, 1),
     max_seq_len=(4, 4), dim_head=8, heads=4)  # fmt: skip
take("local-attention", "lm", "local_attention:LocalTransformer", tokens, "windows that look back",
     num_tokens=VOCAB, dim=32, depth=2, causal=True, local_attn_window_size=4, max_seq_len=32, heads=4,
     dim_head=8)  # fmt: skip
take("axial-attention", "axial", "axial_attention:AxialImageTransformer", partial(image, 8, 16),
     "rows and columns, reversible", dim=16, depth=2, heads=2, reversible=False)  # fmt: skip
take("nystrom-attention", "nystromformer", "nystrom_attention:Nystromformer", partial(features, 16, 32),
     "landmarks, iterated inverse", dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4)  # fmt: skip
take("linformer", "lm", "linformer:LinformerLM", tokens, "keys projected along the sequence",
     num_tokens=VOCAB, dim=32, seq_len=16, depth=2, heads=4, k=4)  # fmt: skip
take("vector-quantize-pytorch", "vq", "vector_quantize_pytorch:VectorQuantize", partial(features, 12, 16),
     "codebook by moving averages", dim=16, codebook_dim=8, codebook_size=8, commitment_weight=0.5)  # fmt: skip
take("vector-quantize-pytorch", "fsq", "vector_quantize_pytorch:FSQ", partial(features, 12, 16),
     "finite scalars", levels=[4, 4, 4], dim=16)  # fmt: skip
take("vector-quantize-pytorch", "lfq", "vector_quantize_pytorch:LFQ", partial(features, 12, 16),
     "signs, entropy loss", dim=16, codebook_size=16)  # fmt: skip
take("vector-quantize-pytorch", "residual_vq", "vector_quantize_pytorch:ResidualVQ", partial(features, 12,
     16), "codebooks one after another", dim=16, codebook_dim=8, codebook_size=8, num_quantizers=2)  # fmt: skip
take("egnn-pytorch", "egnn", "egnn_pytorch:EGNN", lambda: (normal(6, 16), normal(6, 3)),
     "equivariant, distances", dim=16)  # fmt: skip
take("mambapy", "mamba", "mambapy.mamba:Mamba", partial(features, 8, 16), "parallel scan, custom backward",
     Of("mambapy.mamba:MambaConfig", d_model=16, n_layers=2, d_state=4))  # fmt: skip
take("rtdl-revisiting-models", "ft_transformer", "rtdl_revisiting_models:FTTransformer", lambda: (normal(4),
     integers(3, 2)), "a token for each column", n_cont_features=4, cat_cardinalities=[3, 3], d_out=2,
     n_blocks=2, d_block=16, attention_n_heads=2, attention_dropout=0.0, ffn_d_hidden=None,
     ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0)  # fmt: skip
take("rtdl-revisiting-models", "resnet", "rtdl_revisiting_models:ResNet", partial(features, 6),
     "batch norm over columns", d_in=6, d_out=2, n_blocks=2, d_block=16, d_hidden=None,
     d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0)  # fmt: skip
take("pytorch-tabnet", "tabnet", "pytorch_tabnet.tab_network:TabNetNoEmbeddings", partial(features, 6),
     "sparse masks, ghost batch norm", input_dim=6, output_dim=3)  # fmt: skip
take("neuraloperator", "fno", "neuralop.models:FNO", partial(image, 16, 2),
     "spectral convolutions, complex weights", n_modes=(4, 4), in_channels=2, out_channels=1,
     hidden_channels=8, n_layers=2)  # fmt: skip
take("efficientnet-pytorch", "b0", "efficientnet_pytorch:EfficientNet.from_name", image,
     "depthwise, squeeze and excite", "efficientnet-b0")  # fmt: skip
take("segment-anything", "image_encoder", "segment_anything.modeling:ImageEncoderViT", partial(image, 32),
     "windows, decomposed relative positions", img_size=32, patch_size=8, embed_dim=32, depth=2,
     num_heads=4, out_chans=8, use_rel_pos=True, window_size=2, global_attn_indexes=(1,))  # fmt: skip
take("gated-state-spaces-pytorch", "gss", "gated_state_spaces_pytorch:GatedStateSpacesLM", tokens, "diagonal state spaces by FFT",
     num_tokens=VOCAB, dim=32, depth=2, dim_expansion_factor=2, dss_kernel_N=16, dss_kernel_H=16)  # fmt: skip
take("gated-state-spaces-pytorch", "dsconv", "gated_state_spaces_pytorch:GatedDsConvLM", tokens, "long convolutions by FFT",
     num_tokens=VOCAB, dim=32, depth=2)  # fmt: skip
take("gated-state-spaces-pytorch", "mhesa", "gated_state_spaces_pytorch:GatedExponentialSmoothingLM", tokens, "smoothing by heads",
     num_tokens=VOCAB, dim=32, depth=2, heads=4)  # fmt: skip
take("pytorch-tcn", "weight_norm", "pytorch_tcn:TCN", partial(features, 4, 16), "dilated causal convolutions, weight norm",
     num_inputs=4, num_channels=[8, 8], kernel_size=3, dropout=0.0, causal=True, use_norm="weight_norm",
     use_skip_connections=True)  # fmt: skip
take("pytorch-tcn", "batch_norm", "pytorch_tcn:TCN", partial(features, 4, 16), "gates, batch norm", num_inputs=4, num_channels=[8, 8],
     kernel_size=3, dropout=0.0, causal=False, use_norm="batch_norm", use_gate=True)  # fmt: skip
take(
    "ncps",
    "cfc",
    "ncps.torch:CfC",
    partial(features, 8, 6),
    "closed-form recurrence, step by step",
    input_size=6,
    units=16,
)
take(
    "ncps",
    "ltc",
    "ncps.torch:LTC",
    partial(features, 6, 6),
    "an ODE solved in each step",
    6,
    Of("ncps.wirings:AutoNCP", 12, 4),
)
take("ncps", "wired_cfc", "ncps.torch:CfC", partial(features, 6, 6), "masked wiring, an LSTM beside it", 6,
     Of("ncps.wirings:AutoNCP", 12, 4), mixed_memory=True)  # fmt: skip
take("tabm", "tabm", "tabm:TabM.make", lambda: (normal(4), integers(3, 2)), "an ensemble in one batched MLP", n_num_features=4,
     cat_cardinalities=[3, 3], d_out=2, n_blocks=2, d_block=16, k=4)  # fmt: skip
take("siren-pytorch", "siren", "siren_pytorch:SirenNet", partial(features, 2), "sines for activations", dim_in=2, dim_hidden=16,
     dim_out=3, num_layers=2, w0_initial=30.0)  # fmt: skip
take("lambda-networks", "lambda", "lambda_networks:LambdaLayer", partial(image, 8, 16), "lambdas over positions", dim=16, dim_out=16,
     r=5, dim_k=8, heads=4, dim_u=2)  # fmt: skip
take("hourglass-transformer-pytorch", "lm", "hourglass_transformer_pytorch:HourglassTransformerLM", tokens,
     "shortens the sequence and lengthens it", num_tokens=VOCAB, dim=32, max_seq_len=16, heads=4, dim_head=8, shorten_factor=(2,),
     depth=(1, 1, 1), attn_resampling=True, updown_sample_type="linear", causal=True)  # fmt: skip
take("memory-efficient-attention-pytorch", "attention", "memory_efficient_attention_pytorch:Attention", partial(features, 16, 32),
     "attention in buckets, checkpoints", dim=32, heads=4, dim_head=8, causal=True, memory_efficient=True, q_bucket_size=8,
     k_bucket_size=8)  # fmt: skip
take("point-transformer-pytorch", "layer", "point_transformer_pytorch:PointTransformerLayer", lambda: (normal(8, 16), normal(8, 3)),
     "attention among nearest points", dim=16, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2, num_neighbors=4)  # fmt: skip
take("bottleneck-transformer-pytorch", "stack", "bottleneck_transformer_pytorch:BottleStack", partial(image, 8, 16),
     "attention in bottlenecks, batch norm", dim=16, fmap_size=8, dim_out=32, proj_factor=4, downsample=True, heads=2, dim_head=8,
     rel_pos_emb=True, num_layers=2)  # fmt: skip
