"""Which class of a model of transformers has a loss, and what its labels are.

tokens       one for every position                  classes      one for every row
transcript   fewer than there are frames (CTC)       map          a class for every pixel
captions     tokens, some of which stand for images  pairs        none: the rows of two inputs belong together
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

AUDIO = ("input_features", "input_values")
_SEEN_OR_HEARD = ("pixel_values", "pixel_values_videos", *AUDIO)


def _takes(cls: Any, *names: str) -> bool:
    return set(names) <= set(inspect.signature(cls.forward).parameters)


def _reads(cls: Any) -> bool:
    return _takes(cls, "input_ids", "labels")


def _sees_or_hears(cls: Any) -> bool:
    return cls.main_input_name in _SEEN_OR_HEARD and _takes(cls, cls.main_input_name, "labels")


def _hears(cls: Any) -> bool:
    return cls.main_input_name in AUDIO and _sees_or_hears(cls)


def _any(config: Any) -> bool:
    return True


# By what the model's own lists in transformers say, the first that fits: an encoder-decoder translates or takes down
# speech, an encoder fills masks, what else reads predicts the next token; what sees and reads compares images with texts
# or describes them; what hears writes; what sees or hears names what it is.
_Heads = tuple[tuple[str, str, Callable[[Any], bool], Callable[[Any], bool]], ...]
_HEADS: _Heads = (
    ("tokens", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", lambda config: config.is_encoder_decoder, _reads),
    ("tokens", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", _any, _hears),
    ("tokens", "MODEL_FOR_MASKED_LM_MAPPING", lambda config: not getattr(config, "is_decoder", False), _reads),
    ("tokens", "MODEL_FOR_CAUSAL_LM_MAPPING", _any, _reads),
    ("pairs", "MODEL_MAPPING", _any, lambda cls: _takes(cls, "return_loss")),
    ("captions", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", _any, lambda cls: _reads(cls) and _takes(cls, "pixel_values")),
    ("transcript", "MODEL_FOR_CTC_MAPPING", _any, _hears),
    ("classes", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _any, _sees_or_hears),
    ("classes", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING", _any, _sees_or_hears),
    ("classes", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", _any, _hears),
    ("map", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", _any, _sees_or_hears),
)
# Not chosen, but understood where a config names them.
_NAMED: _Heads = (
    ("classes", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", _any, _reads),
)  # fmt: skip


def head(config: Any) -> tuple[Any, str] | None:
    """The model class with a loss for a config, and what its labels are (see above).

    The config's own ``architectures`` come first, where their batch is one that we can make up.
    """
    named = set(getattr(config, "architectures", None) or ())
    for kind, cls, _ in _known(config, (*_HEADS, *_NAMED)):
        if cls.__name__ in named:
            return cls, kind
    return next(((cls, kind) for kind, cls, fits in _known(config, _HEADS) if fits), None)


def _known(config: Any, heads: _Heads) -> Iterator[tuple[str, Any, bool]]:
    """For each list with a class of this config that takes what we can make up: labels, class, and whether it is meant."""
    import transformers

    for kind, mapping, fits, takes in heads:
        classes = getattr(transformers, mapping).get(type(config), None)
        for cls in classes if isinstance(classes, tuple | list) else [classes]:
            if cls is not None and takes(cls):
                yield kind, cls, fits(config)
