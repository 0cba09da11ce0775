"""Small models of several kinds for the benchmarks of predictions and of the search, each with a batch and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from meshwright.runtime.rows.loss import output_loss

VOCAB, WIDTH, LENGTH, ROWS = 2048, 256, 64, 16


def llama() -> nn.Module:
    """A decoder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH, intermediate_size=3 * WIDTH - 32, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, vocab_size=VOCAB,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """An encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=WIDTH, d_kv=32, d_ff=2 * WIDTH, num_layers=2, num_heads=8, vocab_size=VOCAB, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    """A classifier of images."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=4, num_attention_heads=8, image_size=64,
            patch_size=8, num_labels=10,
        )
    )  # fmt: skip


def mixtral() -> nn.Module:
    """A decoder whose blocks have experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
            num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCAB,
        )
    )  # fmt: skip


class Convolutions(nn.Module):
    """Two convolutions with norms."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, made, 3, padding=1) for channels in (given, made))
        self.norm1, self.norm2 = nn.GroupNorm(8, made), nn.GroupNorm(8, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.norm1(self.first(x)))
        return functional.silu(self.norm2(self.second(x)))


class UNet(nn.Module):
    """A U-Net with two skips."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.top, self.down1, self.down2 = (
            Convolutions(a, b) for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.up1, self.up0 = Convolutions(6 * width, 2 * width), Convolutions(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip0 = self.top(x)
        skip1 = self.down1(functional.avg_pool2d(skip0, 2))
        h = functional.interpolate(self.down2(functional.avg_pool2d(skip1, 2)), scale_factor=2)
        h = functional.interpolate(self.up1(torch.cat([h, skip1], 1)), scale_factor=2)
        return (self.out(self.up0(torch.cat([h, skip0], 1))) - x).square().mean()


class Towers(nn.Module):
    """Two encoders of one table's rows, side by side, and a head."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.left, self.right = (
            nn.Sequential(
                *(nn.TransformerEncoderLayer(WIDTH, 8, 2 * WIDTH, 0.0, batch_first=True) for _ in range(depth))
            )
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        return functional.cross_entropy(self.head(self.left(h) + self.right(h)).flatten(0, 1), ids.flatten())


def itself(output: Any) -> Any:
    """The loss of a model that returns it."""
    return output


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def ids_alone() -> tuple[torch.Tensor]:
    return (tokens()["input_ids"],)


def few_rows() -> tuple[torch.Tensor]:
    """Two long rows: fewer than most numbers of ranks."""
    return (torch.randint(0, VOCAB, (2, 4 * LENGTH), generator=torch.Generator().manual_seed(0)),)


def images(labels: bool) -> Any:
    pixels = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.arange(8)} if labels else (pixels,)


class Model(NamedTuple):
    """``branches``: whether parts of it can run at the same time. ``settings``: of its plans. A router chooses by what float32
    can tell apart, so that a run may take rows for coupled that are not; a prediction takes them as the plan says.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any], Any] = output_loss
    settings: Mapping[str, Any] = MappingProxyType({})
    branches: bool = False


MODELS = {
    "decoder": Model(llama, tokens),
    "encoder-decoder": Model(t5, tokens),
    "vision": Model(vit, partial(images, True)),
    "MoE": Model(mixtral, tokens, settings={"rows": "split"}),
    "two towers": Model(Towers, ids_alone, itself, branches=True),
    "two towers, two rows": Model(partial(Towers, 4), few_rows, itself, branches=True),
    "U-Net": Model(UNet, partial(images, False), itself),
}
