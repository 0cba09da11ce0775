"""A made-up batch for a model of transformers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def sample(config: Any, cls: Any, kind: str, *, rows: int, length: int | None, default: int) -> dict[str, Any]:
    """A made-up batch, the same at each call: random tokens and images, every label counts.

    Args:
        length: tokens a row; None: ``default``, or less where the model has fewer positions.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None) or config
    limit = getattr(text, "max_position_embeddings", None)
    if length is None:  # some models keep two positions for padding
        length = min(default, limit - 2) if isinstance(limit, int) and limit > 2 else default
    batch: dict[str, Any] = {}
    if "input_ids" in inspect.signature(cls.forward).parameters:
        batch["input_ids"] = _tokens(text, (rows, length), generator)
    if kind in ("classes", "pairs"):
        batch["pixel_values"] = torch.randn(rows, *_image(vision), generator=generator)
    if kind == "tokens":
        batch["labels"] = _tokens(text, (rows, length), generator)
    elif kind == "classes":
        batch["labels"] = torch.randint(config.num_labels, (rows,), generator=generator)
    else:
        batch["return_loss"] = True
    return batch


def _tokens(config: Any, shape: tuple[int, int], generator: Any) -> Tensor:
    """Random tokens, none of them padding."""
    import torch

    ids = torch.randint(config.vocab_size, shape, generator=generator)
    pad = getattr(config, "pad_token_id", None)
    return ids if not isinstance(pad, int) else torch.where(ids == pad, (pad + 1) % config.vocab_size, ids)


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return getattr(config, "num_channels", None) or 3, height, width
