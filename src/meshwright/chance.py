"""Random numbers of the host (Python's, NumPy's, torch's on the CPU) in a forward: were some drawn? What if others had been?

Planning runs a forward once, with some numbers. If they decide what is called (``if random.random() < 0.1: continue``), a run
takes other paths. So a forward that draws is run again: with the smallest numbers, with the largest, and with a few seeds.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SMALLEST, LARGEST = "smallest", "largest"
WAYS: tuple[str | int, ...] = (SMALLEST, LARGEST, 1, 2, 3)

# Python and legacy NumPy draw from a Mersenne Twister, whose state is the next 624 words, each before its last transformation.
# That makes 0 of 0, and 2³² - 1 of the other. Not all words: numbers that are drawn until one fits would be drawn for ever.
_WORDS = {SMALLEST: 0, LARGEST: 0x12DD9BB3}
_SET = 600


def drawn() -> tuple[Any, ...]:
    """Differs from what it was before if numbers of Python's, NumPy's or torch's generator (on the CPU) were drawn."""
    return *host_drawn(), torch.get_rng_state().numpy().tobytes()


def host_drawn() -> tuple[Any, ...]:
    """The same for Python's and NumPy's generators."""
    return random.getstate(), numpy_words() if "numpy" in sys.modules else b""


def numpy_words() -> bytes:
    """Bytes of NumPy's default generator that move with each draw: its words and their position. NumPy's own way to tell its
    state takes 100 µs. Empty for a generator of another kind, which somebody put in its place."""
    bits = sys.modules["numpy"].random.get_bit_generator()
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4) if type(bits).__name__ == "MT19937" else b""


@contextmanager
def drawing(way: str | int | None) -> Iterator[None]:
    """For the time of a block the generators give other numbers: the smallest, the largest (their first 300), or those of a
    seed; None: as they are. After it they go on as before."""
    own = torch.get_rng_state()
    try:
        with _host_kept():
            if isinstance(way, int):
                seed_host(way)
                torch.default_generator.manual_seed(way)
            elif way is not None:
                words = [_WORDS[way]] * _SET + list(random.Random(0).getstate()[1][_SET:624])
                random.setstate((3, (*words, 0), None))
                if (numpy := sys.modules.get("numpy")) is not None:
                    numpy.random.set_state(("MT19937", numpy.array(words, dtype=numpy.uint32), 0, 0, 0.0))
            yield
    finally:
        torch.set_rng_state(own)


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """For the time of a block Python and NumPy draw the numbers of a seed; then they go on as before."""
    with _host_kept():
        seed_host(seed)
        yield


@contextmanager
def _host_kept() -> Iterator[None]:
    """After a block Python's and NumPy's numbers go on as before it."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


def seed_host(seed: int) -> None:
    """Seeds Python's and, if NumPy is loaded, NumPy's generators."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
