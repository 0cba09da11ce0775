"""``head``: the class of a transformers model that has a loss, and the kind of its labels.

tokens       one for every position                  classes      one for every row
transcript   fewer than there are frames (CTC)       map          a class for every pixel
captions     tokens, some of which stand for images  pairs        none: each row has two inputs that belong together
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

AUDIO = ("input_features", "input_values")
_IMAGES_OR_AUDIO = ("pixel_values", "pixel_values_videos", *AUDIO)


def _has_arguments(cls: Any, *names: str) -> bool:
    return set(names) <= set(inspect.signature(cls.forward).parameters)


def _takes_text(cls: Any) -> bool:
    return _has_arguments(cls, "input_ids", "labels")


def _takes_images_or_audio(cls: Any) -> bool:
    return cls.main_input_name in _IMAGES_OR_AUDIO and _has_arguments(cls, cls.main_input_name, "labels")


def _takes_audio(cls: Any) -> bool:
    return cls.main_input_name in AUDIO and _takes_images_or_audio(cls)


def _takes_images_and_text(cls: Any) -> bool:
    return _takes_text(cls) and _has_arguments(cls, "pixel_values")


def _any(config: Any) -> bool:
    return True


# (kind of labels, mapping of transformers, whether a config is meant for it, whether a class's inputs can be generated).
# The first that fits a model is taken: an encoder-decoder translates or transcribes, an encoder fills masks, other models of
# text predict the next token; models of images and text compare or describe images; models of audio transcribe; other models
# of images or audio classify.
_Heads = tuple[tuple[str, str, Callable[[Any], bool], Callable[[Any], bool]], ...]
_HEADS: _Heads = (
    ("tokens", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", lambda config: config.is_encoder_decoder, _takes_text),
    ("tokens", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", _any, _takes_audio),
    ("tokens", "MODEL_FOR_MASKED_LM_MAPPING", lambda config: not getattr(config, "is_decoder", False), _takes_text),
    ("tokens", "MODEL_FOR_CAUSAL_LM_MAPPING", _any, _takes_text),
    ("pairs", "MODEL_MAPPING", _any, lambda cls: _has_arguments(cls, "return_loss")),
    (
        "captions",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        _any,
        lambda cls: _takes_text(cls) and _has_arguments(cls, "pixel_values"),
    ),
    ("transcript", "MODEL_FOR_CTC_MAPPING", _any, _takes_audio),
    ("classes", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _any, _takes_images_or_audio),
    ("classes", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING", _any, _takes_images_or_audio),
    ("classes", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", _any, _takes_audio),
    ("map", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", _any, _takes_images_or_audio),
)
# Taken only if a config names the class.
_NAMED: _Heads = (
    ("classes", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", _any, _takes_text),
)  # fmt: skip


def head(config: Any) -> tuple[Any, str] | None:
    """(class with a loss, kind of its labels) for a transformers config; None if there is no class.

    A class that the config's ``architectures`` names is preferred, if its batch can be generated.
    """
    architectures = set(getattr(config, "architectures", None) or ())
    for kind, cls, _ in _candidates(config, (*_HEADS, *_NAMED)):
        if cls.__name__ in architectures:
            return cls, kind
    return next(((cls, kind) for kind, cls, is_meant in _candidates(config, _HEADS) if is_meant), None)


def _candidates(config: Any, heads: _Heads) -> Iterator[tuple[str, Any, bool]]:
    """(kind of labels, class, whether the config is meant for it), for each class of a config whose batch can be generated."""
    import transformers

    for kind, mapping, is_meant, can_generate in heads:
        classes = getattr(transformers, mapping).get(type(config), None)
        for cls in classes if isinstance(classes, tuple | list) else [classes]:
            if cls is not None and can_generate(cls):
                yield kind, cls, is_meant(config)
