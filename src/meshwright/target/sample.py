"""Generates a batch for a transformers model.

inputs    the class's ``main_input_name``; for pairs, all arguments of its forward that can be generated here
sizes     from the config. If it leaves the order of dims or a length open, each choice is tried on the model without values,
          and the first that runs is taken
labels    of the kind that the class needs (see ``heads``)
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

_PADDING = 2  # positions that some models keep for padding, so that a text can be shorter by two than they say
_IMAGE_SIZE = 224  # pixels, if the config does not say: the size of ImageNet models
_COLORS = 3  # channels, if the config does not say: red, green, blue
_TILES = (1, 4, 16, 64)  # numbers of images, or of tiles of an image, that are tried: grids of 1, 2, 4 and 8 a side
_STRIDE = 2  # of the convolutions before a speech encoder: it takes twice as many frames as it has positions
_FRAMES_PER_TOKEN = 4  # of a spectrogram: a speech encoder shortens it by up to four
_SAMPLES_PER_FRAME = 400  # of audio: 25 ms at 16 kHz, the usual window


def sample(
    config: Any, cls: Any, kind: str, build: Build, *, rows: int, length: int | None, default: int
) -> dict[str, Any]:
    """A batch of random tokens, images or audio, equal at each call. No label is ignored by the loss.

    Args:
        config: of transformers.
        cls: the class with a loss.
        kind: of the labels.
        build: returns the model. Called only if the config leaves sizes open.
        rows: number of rows.
        length: number of tokens in a row, or about as many frames of audio. None: ``default``, or less if the model has fewer
            positions.

    Raises:
        Exception: of the model, if it runs with none of the choices.
    """
    if length is None:
        limits = [_size(config.get_text_config(), name) for name in ("max_position_embeddings", "max_target_positions")]
        usable = [limit - _PADDING for limit in limits if limit > _PADDING]
        length = min([default, *usable])
    return _Generator(config, cls, kind, Shapes(build), rows, length).batch()


class _Generator:
    """Generates one batch.

    Attributes:
        arguments: names of the forward's arguments.
        main: the name of its main input.
    """

    def __init__(self, config: Any, cls: Any, kind: str, shapes: Shapes, rows: int, length: int) -> None:
        import torch

        self.config, self.cls, self.kind, self.shapes = config, cls, kind, shapes
        self.rows, self.length = rows, length
        self.arguments = set(inspect.signature(cls.forward).parameters)
        self.main: str = cls.main_input_name
        self.generator = torch.Generator().manual_seed(0)

    def batch(self) -> dict[str, Any]:
        return _KINDS[self.kind](self)

    # --- one method for each kind of labels ---------------------------------------------------------------------------

    def with_tokens(self) -> dict[str, Any]:
        return self.tried([self.main], {"labels": self.tokens()})

    def with_classes(self) -> dict[str, Any]:
        return self.tried([self.main], {"labels": self.classes(self.rows)})

    def with_map(self) -> dict[str, Any]:
        return self.tried([self.main], {"labels": self.classes(self.rows, *self.image()[-2:])})

    def with_pairs(self) -> dict[str, Any]:
        return self.tried([name for name in ("input_ids", *_SIZES) if name in self.arguments], {"return_loss": True})

    def with_transcript(self) -> dict[str, Any]:
        """At most half as many tokens as frames: the CTC loss may need a blank between any two tokens."""
        import torch

        inputs = self.tried([self.main], {})
        frames = self.shapes(inputs).logits.shape[1]
        batch = inputs | {"labels": self.tokens(max(1, min(frames // 2, self.length)))}
        masked = batch | {"attention_mask": torch.ones(inputs[self.main].shape[:2], dtype=torch.long)}
        needs_mask = self.error_with(batch) and not self.error_with(masked)
        return masked if needs_mask else batch

    def with_captions(self) -> dict[str, Any]:
        """Texts that begin with image tokens: as many as the model makes features of an image."""
        import torch

        argument = inspect.signature(self.cls.get_image_features).parameters.get("image_sizes")
        needs_sizes = argument is not None and argument.default is inspect.Parameter.empty
        sizes = {"image_sizes": torch.tensor([self.image()[-2:]] * self.rows)} if needs_sizes else {}
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
        """A batch of generated inputs and ``rest``, with the first sizes that the model runs with.

        Args:
            names: of the inputs to generate.
            rest: other arguments.
            method: of the model, which gets the batch.
        """
        import torch

        sized = [name for name in names if name in _SIZES]
        texts = {"input_ids": self.tokens()} if len(sized) < len(names) else {}
        choices = list(product(*(dict.fromkeys(_SIZES[name](self)) for name in sized)))
        errors: list[Exception] = []
        for sizes in choices:
            inputs = {
                name: torch.randn(self.rows, *size, generator=self.generator)
                for name, size in zip(sized, sizes, strict=True)
            }
            batch = texts | inputs | rest
            error = self.error_with(batch, method) if len(choices) > 1 else None
            if error is None:
                return batch
            errors.append(error)
        raise errors[0] if errors else ValueError(f"its config does not say how large {' or '.join(sized)} are")

    def error_with(self, batch: dict[str, Any], method: str = "forward") -> Exception | None:
        """The exception that the model raises with a batch; None if it runs."""
        try:
            self.shapes(batch, method)
        except Exception as error:  # a model may raise anything
            return error
        return None

    def classes(self, *shape: int) -> Tensor:
        """Random class numbers."""
        import torch

        return torch.randint(self.config.num_labels, shape, generator=self.generator)

    def tokens(self, length: int | None = None) -> Tensor:
        """Random tokens without special ones; but for pairs, the last token is the end of text, whose features some models
        take for the text."""
        import torch

        text = self.config.get_text_config()
        special = {value for part in (self.config, text) for key, value in vars(part).items() if is_token(key, value)}
        ordinary = torch.tensor([i for i in range(text.vocab_size) if i not in special] or [0])
        indices = torch.randint(len(ordinary), (self.rows, length or self.length), generator=self.generator)
        ids = ordinary[indices]
        if self.kind == "pairs" and isinstance(getattr(text, "eos_token_id", None), int):
            ids[:, -1] = text.eos_token_id
        return ids

    # --- sizes of a row, in the order in which they are tried ---------------------------------------------------------

    def image(self) -> _Shape:
        """Channels, height and width."""
        config = getattr(self.config, "vision_config", None) or self.config
        size = getattr(config, "image_size", None) or _IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
        return _size(config, "num_channels") or _COLORS, height, width

    def images(self) -> Iterator[_Shape]:
        """The frames of a video; an image; with captions also several images, or one image in several tiles."""
        config = getattr(self.config, "vision_config", None) or self.config
        frames = _size(config, "num_frames") or _size(config, "frames_per_clip")
        if frames:
            yield (frames, *self.image())
        yield self.image()
        if self.kind == "captions":
            yield from ((count, *self.image()) for count in _TILES)

    def videos(self) -> Iterator[_Shape]:
        yield next(self.images())

    def features(self) -> Iterator[_Shape]:
        """Shapes of a spectrogram. Frames or bands may come first, and some models take one number of frames only."""
        sizes = [_size(self.config, name) for name in _BANDS]
        channels = _size(self.config, "input_channels") or 1
        fixed = [_STRIDE * _size(self.config, "max_source_positions"), _size(self.config, "max_length")]
        for bands, frames in product(filter(None, sizes), filter(None, (_FRAMES_PER_TOKEN * self.length, *fixed))):
            yield from ((frames, bands * channels), (bands, frames), (1, frames, bands))

    def sounds(self) -> Iterator[_Shape]:
        """Number of audio samples that gives ``length`` frames; or shapes of a spectrogram, if the model takes one."""
        kernels, strides = getattr(self.config, "conv_kernel", None), getattr(self.config, "conv_stride", None)
        if kernels and strides:
            samples = self.length
            for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
                samples = (samples - 1) * stride + kernel
            yield (samples,)
            return
        yield from self.features()
        yield (_SAMPLES_PER_FRAME * self.length,)


_KINDS: dict[str, Callable[[_Generator], dict[str, Any]]] = {
    "tokens": _Generator.with_tokens,
    "transcript": _Generator.with_transcript,
    "captions": _Generator.with_captions,
    "classes": _Generator.with_classes,
    "map": _Generator.with_map,
    "pairs": _Generator.with_pairs,
}
_SIZES: dict[str, Callable[[_Generator], Iterator[_Shape]]] = {
    "pixel_values": _Generator.images,
    "pixel_values_videos": _Generator.videos,
    "input_features": _Generator.features,
    "input_values": _Generator.sounds,
}
# Keys of the config that have the number of frequency bands, in different models.
_BANDS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim")


def _size(config: Any, name: str) -> int:
    """A size in the config, or in a config within it; 0 if there is none."""
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        value = getattr(part, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
