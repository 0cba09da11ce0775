"""A made-up batch for a model of transformers.

what a row is     by the class: its ``main_input_name``; for pairs, all that its forward takes of what is known here
how large it is   by the config. Where that leaves the order of dims or a length open, each that may be meant is tried
                  on the model without values, and the first that runs is taken
its labels        by what the class is for (see ``heads``)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from meshwright.target.config import is_token
from meshwright.target.shapes import Shapes

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.deferred import Build

_Shape = tuple[int, ...]


def sample(
    config: Any, cls: Any, kind: str, build: Build, *, rows: int, length: int | None, default: int
) -> dict[str, Any]:
    """A batch, the same at each call: random tokens, images or sounds; every label counts.

    Args:
        kind: what the labels are.
        build: makes the model; called only where the config leaves something open.
        length: tokens a row, or about as many frames of a sound; None: ``default``, or less where the model has fewer
            positions.

    Raises:
        Exception: what the model raises, where none of what may be meant runs.
    """
    if length is None:
        limits = [_size(config.get_text_config(), name) for name in ("max_position_embeddings", "max_target_positions")]
        length = min([default, *(limit - 2 for limit in limits if limit > 2)])  # some keep two positions for padding
    return _Maker(config, cls, kind, Shapes(build), rows, length).batch()


class _Maker:
    """Makes one batch."""

    def __init__(self, config: Any, cls: Any, kind: str, shapes: Shapes, rows: int, length: int) -> None:
        import torch

        self.config, self.cls, self.kind, self.shapes = config, cls, kind, shapes
        self.rows, self.length = rows, length
        self.taken = set(inspect.signature(cls.forward).parameters)
        self.main: str = cls.main_input_name
        self.generator = torch.Generator().manual_seed(0)

    def batch(self) -> dict[str, Any]:
        return _KINDS[self.kind](self)

    # --- by what the labels are ---------------------------------------------------------------------------------------

    def with_tokens(self) -> dict[str, Any]:
        return self.tried([self.main], {"labels": self.tokens()})

    def with_classes(self) -> dict[str, Any]:
        return self.tried([self.main], {"labels": self.classes(self.rows)})

    def with_map(self) -> dict[str, Any]:
        return self.tried([self.main], {"labels": self.classes(self.rows, *self.image()[-2:])})

    def with_pairs(self) -> dict[str, Any]:
        return self.tried([name for name in ("input_ids", *_SIZES) if name in self.taken], {"return_loss": True})

    def with_transcript(self) -> dict[str, Any]:
        """Half as many tokens as there are frames: a blank may have to stand between any two."""
        import torch

        inputs = self.tried([self.main], {})
        frames = self.shapes(inputs).logits.shape[1]
        batch = inputs | {"labels": self.tokens(max(1, min(frames // 2, self.length)))}
        masked = batch | {"attention_mask": torch.ones(inputs[self.main].shape[:2], dtype=torch.long)}
        return masked if self.refusal(batch) and not self.refusal(masked) else batch

    def with_captions(self) -> dict[str, Any]:
        """Texts that open with as many tokens for the image as the model makes of it."""
        import torch

        asked = inspect.signature(self.cls.get_image_features).parameters.get("image_sizes")
        sized = asked is not None and asked.default is inspect.Parameter.empty
        sizes = {"image_sizes": torch.tensor([self.image()[-2:]] * self.rows)} if sized else {}
        images = self.tried(["pixel_values"], sizes, "get_image_features")
        output = self.shapes(images, "get_image_features")
        output = getattr(output, "pooler_output", output)
        features = output if isinstance(output, tuple | list) else [output]
        count = sum(prod(f.shape[:-1]) for f in features) // self.rows
        token = getattr(self.config, "image_token_id", None)
        token = self.config.image_token_index if token is None else token
        ids = torch.cat([torch.full((self.rows, count), token), self.tokens()], dim=1)
        return images | {"input_ids": ids, "labels": ids}

    # --- inputs -------------------------------------------------------------------------------------------------------

    def tried(self, names: list[str], rest: dict[str, Any], method: str = "forward") -> dict[str, Any]:
        """A batch of these inputs and the rest, of the first sizes that the model runs with."""
        import torch

        read = [name for name in names if name not in _SIZES]
        seen = [name for name in names if name in _SIZES]
        texts = {"input_ids": self.tokens()} if read else {}
        choices = list(product(*(dict.fromkeys(_SIZES[name](self)) for name in seen)))
        refusals: list[Exception] = []
        for sizes in choices:
            shapes = [(self.rows, *size) for size in sizes]
            made = {n: torch.randn(*s, generator=self.generator) for n, s in zip(seen, shapes, strict=True)}
            batch = texts | made | rest
            refused = self.refusal(batch, method) if len(choices) > 1 else None
            if refused is None:
                return batch
            refusals.append(refused)
        raise refusals[0] if refusals else ValueError(f"its config does not say how large {' or '.join(seen)} are")

    def refusal(self, batch: dict[str, Any], method: str = "forward") -> Exception | None:
        """What the model raises on a batch that is not its own."""
        try:
            self.shapes(batch, method)
        except Exception as error:  # whatever a model may raise
            return error
        return None

    def classes(self, *shape: int) -> Tensor:
        import torch

        return torch.randint(self.config.num_labels, shape, generator=self.generator)

    def tokens(self, length: int | None = None) -> Tensor:
        """Random tokens, none of them special; but the last one of a text that is compared, where some models look."""
        import torch

        text = self.config.get_text_config()
        special = {value for part in (self.config, text) for key, value in vars(part).items() if is_token(key, value)}
        plain = torch.tensor([i for i in range(text.vocab_size) if i not in special] or [0])
        chosen = torch.randint(len(plain), (self.rows, length or self.length), generator=self.generator)
        ids = plain[chosen]
        if self.kind == "pairs" and isinstance(getattr(text, "eos_token_id", None), int):
            ids[:, -1] = text.eos_token_id
        return ids

    # --- sizes of a row, one after the other to be tried -------------------------------------------------------------

    def image(self) -> _Shape:
        """Channels, height and width."""
        config = getattr(self.config, "vision_config", None) or self.config
        size = getattr(config, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        return _size(config, "num_channels") or 3, height, width

    def images(self) -> Iterator[_Shape]:
        """An image; or the frames of a film; or, where texts are read too, several images, or one in several tiles."""
        config = getattr(self.config, "vision_config", None) or self.config
        frames = _size(config, "num_frames") or _size(config, "frames_per_clip")
        if frames:
            yield (frames, *self.image())
        yield self.image()
        if self.kind == "captions":
            yield from ((count, *self.image()) for count in (1, 4, 16, 64))

    def videos(self) -> Iterator[_Shape]:
        yield next(self.images())

    def features(self) -> Iterator[_Shape]:
        """Frames of a spectrum: either dim may come first, and some models take one length only."""
        sizes = [_size(self.config, name) for name in _BANDS]
        channels = _size(self.config, "input_channels") or 1
        fixed = [2 * _size(self.config, "max_source_positions"), _size(self.config, "max_length")]
        for bands, frames in product(filter(None, sizes), filter(None, (4 * self.length, *fixed))):
            yield from ((frames, bands * channels), (bands, frames), (1, frames, bands))

    def sounds(self) -> Iterator[_Shape]:
        """Samples of a wave, as many as give ``length`` frames; or of a spectrum, where the model has bands."""
        kernels, strides = getattr(self.config, "conv_kernel", None), getattr(self.config, "conv_stride", None)
        if kernels and strides:
            samples = self.length
            for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
                samples = (samples - 1) * stride + kernel
            yield (samples,)
            return
        yield from self.features()
        yield (400 * self.length,)  # 25 ms a frame


_KINDS: dict[str, Callable[[_Maker], dict[str, Any]]] = {
    "tokens": _Maker.with_tokens,
    "transcript": _Maker.with_transcript,
    "captions": _Maker.with_captions,
    "classes": _Maker.with_classes,
    "map": _Maker.with_map,
    "pairs": _Maker.with_pairs,
}
_SIZES: dict[str, Callable[[_Maker], Iterator[_Shape]]] = {
    "pixel_values": _Maker.images,
    "pixel_values_videos": _Maker.videos,
    "input_features": _Maker.features,
    "input_values": _Maker.sounds,
}
_BANDS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim")


def _size(config: Any, name: str) -> int:
    """A size in the config, or in a part of it; 0 where there is none."""
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        value = getattr(part, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
