"""``rare_garbage_collection``: Python's garbage collector runs rarely while nearly all new objects stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 200_000  # before the collector looks at them; Python's own number is 700 to 2,000


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """In its block, Python's garbage collector runs a tenth as often, or less.

    For a block that imports large packages or builds models without memory: most objects that it makes stay (modules of torch
    and transformers, the model) and hold no tensor memory, so that the collector would look at them in vain.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


__all__ = ["rare_garbage_collection"]
