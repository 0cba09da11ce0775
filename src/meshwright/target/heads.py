"""Which class of a model of transformers has a loss, and what kind of batch it takes."""

from __future__ import annotations

import inspect
from typing import Any

# Which class of a model has a loss, by what the model's own lists in transformers say, the first that fits:
# an encoder-decoder is a translator, an encoder fills masks, what else reads predicts the next token; what sees
# compares images with texts, or names what they show.
_HEADS = (
    ("tokens", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", lambda config: config.is_encoder_decoder),
    ("tokens", "MODEL_FOR_MASKED_LM_MAPPING", lambda config: not getattr(config, "is_decoder", False)),
    ("tokens", "MODEL_FOR_CAUSAL_LM_MAPPING", lambda config: True),
    ("pairs", "MODEL_MAPPING", lambda config: True),
    ("classes", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", lambda config: True),
)
_INPUTS = {"tokens": ("input_ids", "labels"), "classes": ("pixel_values", "labels"), "pairs": ("return_loss",)}


def head(config: Any) -> tuple[Any, str] | None:
    """The model class with a loss for a config, and what its batch is: ``tokens``, ``classes`` or ``pairs``.

    The config's own ``architectures`` come first, where their forward takes what we can make up.
    """
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    for cls in filter(None, named):
        for kind, inputs in _INPUTS.items():
            if _takes(cls, inputs):
                return cls, kind
    for kind, mapping, fits in _HEADS:
        cls = getattr(transformers, mapping).get(type(config), None)
        cls = cls[0] if isinstance(cls, tuple | list) else cls
        if cls is not None and fits(config) and _takes(cls, _INPUTS[kind]):
            return cls, kind
    return None


def _takes(cls: Any, names: tuple[str, ...]) -> bool:
    return set(names) <= set(inspect.signature(cls.forward).parameters)
