"""Random numbers of the host (Python's, NumPy's, torch's on the CPU) in a forward: notes draws, and substitutes other numbers.

Planning runs a forward once, with some numbers. If they decide which modules are called (``if random.random() < 0.1:
continue``), a run takes other paths. So a forward that draws runs again: with the smallest numbers, with the largest, and with
a few seeds.

A generator that a module holds (``self.rng = random.Random(3)``) counts like those of the process.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from meshwright.private import TorchDispatchMode

SMALLEST, LARGEST = "smallest", "largest"
WAYS: tuple[str | int, ...] = (SMALLEST, LARGEST, 1, 2, 3)

# Python and legacy NumPy draw from a Mersenne Twister, whose state is the next 624 words, each before its last transformation
# (tempering). Tempering maps 0 to 0, and the other word to 2³² - 1. Only the first words are set: code that draws until a
# number fits would otherwise never end.
_WORDS = {SMALLEST: 0, LARGEST: 0x12DD9BB3}
_SET = 600


class GeneratorUse:
    """Notes from which generators of the host a forward draws: those of the process, and those that modules hold.

    Attributes:
        of_host: whether it drew from a generator of Python or NumPy.
        of_torch: whether it drew from a generator of torch on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.of_host = self.of_torch = False

    def noted(self, run: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        """A function that runs the forward and notes its draws."""

        def noting(model: nn.Module) -> Any:
            generators = host_generators(self._model)
            of_host, of_torch = host_drawn(generators), self._torch()
            try:
                return run(model)
            finally:
                self.of_host |= host_drawn(generators) != of_host
                self.of_torch |= self._torch() != of_torch

        return noting

    def _torch(self) -> tuple[Any, ...]:
        states = [state_of(g) for g in generators_in(self._model) if isinstance(g, torch.Generator)]
        return torch.get_rng_state().numpy().tobytes(), states


def host_drawn(generators: Sequence[Any] = ()) -> tuple[Any, ...]:
    """A value that changes if numbers are drawn from Python's or NumPy's generator, or from those in ``generators``."""
    return random.getstate(), numpy_words() if "numpy" in sys.modules else b"", drawn_from(generators)


def drawn_from(generators: Sequence[Any]) -> list[bytes]:
    """A value that changes if numbers are drawn from one of these generators."""
    return [pickle.dumps(g) for g in generators]


def host_generators(model: nn.Module) -> list[Any]:
    """The generators of Python and NumPy that modules hold, each once."""
    return [g for g in generators_in(model) if not isinstance(g, torch.Generator)]


def numpy_words() -> bytes:
    """Bytes of NumPy's default generator that change with each draw: its words and their position. NumPy's own function for
    its state takes 100 µs. Empty for a generator of another kind, with which somebody has replaced it."""
    bits = sys.modules["numpy"].random.get_bit_generator()
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4) if type(bits).__name__ == "MT19937" else b""


@contextmanager
def drawing(way: str | int | None, model: nn.Module | None = None) -> Iterator[None]:
    """Within the block the generators give other numbers; afterwards they continue as if nothing had been drawn.

    Args:
        way: ``SMALLEST``, ``LARGEST`` (the first 300 numbers) or a seed; None: their own numbers.
        model: the generators that its modules hold are included.
    """
    torch_state = torch.get_rng_state()
    try:
        with _host_kept(), held_kept(model):
            if isinstance(way, int):
                seed_host(way)
                torch.default_generator.manual_seed(way)
            elif way is not None:
                random.setstate(_python_words(way))
                if (numpy := sys.modules.get("numpy")) is not None:
                    numpy.random.set_state(_numpy_words(way))
            with _held_drawing(way, model), _TorchDraws(way) if isinstance(way, str) else nullcontext():
                yield
    finally:
        torch.set_rng_state(torch_state)


class _TorchDraws(TorchDispatchMode):
    """While on, torch's uniform numbers are the smallest, or the largest, of their range: those of the first calls, so that a
    model that draws until a number fits comes to an end."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._largest, self._calls = way == LARGEST, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(out, torch.Tensor) or out.is_meta:
            return out
        self._calls += 1
        if self._calls > _SET:
            return out
        if name in ("bernoulli", "bernoulli_"):
            return out.fill_(self._largest)
        bounds: tuple[Any, ...] = (0.0, 1.0)
        if name == "uniform_":
            bounds = (*args[1:3], *bounds[len(args[1:3]) :])
        elif name == "randint":
            bounds = tuple(a for a in (0, *args) if isinstance(a, int))[-2:]
        elif name not in ("rand", "rand_like"):
            return out
        below = 1 if name == "randint" else (bounds[1] - bounds[0]) * 2**-20
        return out.fill_(bounds[1] - below if self._largest else bounds[0])


def _python_words(way: str) -> Any:
    words = [_WORDS[way]] * _SET + list(random.Random(0).getstate()[1][_SET:624])
    return 3, (*words, 0), None


def _numpy_words(way: str) -> Any:
    return "MT19937", sys.modules["numpy"].array(_python_words(way)[1][:624], dtype="uint32"), 0, 0, 0.0


# --- generators that modules hold -------------------------------------------------------------------------------------


_DEPTH = 3  # how many containers and plain objects to look into, one within the other
_OF_TORCH = frozenset(vars(nn.Module()))
_Holder = dict[Any, Any] | list[Any]
_HOLD_NOTHING = frozenset([bool, int, float, str, type(None), torch.Tensor, nn.Parameter])


def held_in_modules(model: nn.Module) -> Iterator[tuple[str, _Holder, Any, Any]]:
    """(name, holder, key, generator) for each generator of torch, Python or NumPy that a module holds: as an attribute, or in
    a list, a dict or a plain object. The generator is ``holder[key]``."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    seen: set[int] = set()

    def look(name: str, holder: _Holder, depth: int) -> Iterator[tuple[str, _Holder, Any, Any]]:
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if type(value) in _HOLD_NOTHING or (depth == _DEPTH and key in _OF_TORCH):
                continue
            if isinstance(value, kinds):
                yield f"{name}.{key}" if name else str(key), holder, key, value
            elif depth and (within := _holder(value)) is not None and id(within) not in seen:
                seen.add(id(within))
                if within:
                    yield from look(f"{name}.{key}" if name else str(key), within, depth - 1)

    for path, module in model.named_modules():
        yield from look(path, vars(module), _DEPTH)


def _holder(value: Any) -> _Holder | None:
    """The dict or list of the items of a container, or of the attributes of a plain object; None for anything else."""
    if isinstance(value, (dict, list)):
        return value
    plain = (
        not isinstance(value, (torch.Tensor, nn.Module, type)) and not callable(value) and hasattr(value, "__dict__")
    )
    return vars(value) if plain else None


def generators_in(model: nn.Module | None) -> list[Any]:
    """The generators that modules hold, each once."""
    return list({id(g): g for *_, g in held_in_modules(model)}.values()) if model is not None else []


def state_of(generator: Any) -> Any:
    """The state of a generator as lists, numbers and strings, as in JSON; but with NumPy arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    return generator.get_state(legacy=False) if bits is None else bits.state


def set_state_of(generator: Any, state: Any) -> None:
    """Restores the state that ``state_of`` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif (bits := getattr(generator, "bit_generator", None)) is not None:
        bits.state = state
    else:
        generator.set_state(state)


@contextmanager
def held_kept(model: nn.Module | None) -> Iterator[None]:
    """Restores the state of the generators that modules hold after the block."""
    before = [(g, state_of(g)) for g in generators_in(model)]
    try:
        yield
    finally:
        for generator, state in before:
            set_state_of(generator, state)


@contextmanager
def _held_drawing(way: str | int | None, model: nn.Module | None) -> Iterator[None]:
    """Within the block the generators that modules hold give other numbers. A new-style generator of NumPy has no state that
    gives the smallest or the largest numbers: it is replaced by one that has."""
    slots = list(held_in_modules(model)) if model is not None and way is not None else []
    others: dict[int, Any] = {}
    for *_, generator in slots:
        if way is not None and id(generator) not in others:
            others[id(generator)] = _other_numbers(generator, way)
    try:
        for _, holder, key, generator in slots:
            holder[key] = others[id(generator)]
        yield
    finally:
        for _, holder, key, generator in slots:
            if (key in holder if isinstance(holder, dict) else key < len(holder)) and holder[key] is others[
                id(generator)
            ]:
                holder[key] = generator


def _other_numbers(generator: Any, way: str | int) -> Any:
    """The generator, set so that it gives other numbers, or another generator that does."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, torch.Generator):
        generator.manual_seed(way if isinstance(way, int) else 0)
    elif isinstance(generator, random.Random):
        generator.seed(way) if isinstance(way, int) else generator.setstate(_python_words(way))
    elif numpy is not None:
        bits = numpy.random.MT19937(way if isinstance(way, int) else 0)
        other = type(generator)(bits)
        if isinstance(way, str):
            bits.state = {"bit_generator": "MT19937", "state": {"key": _numpy_words(way)[1], "pos": 0}}
        return other
    return generator


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """Within the block Python and NumPy draw the numbers of a seed; afterwards they continue as if nothing had been drawn."""
    with _host_kept():
        seed_host(seed)
        yield


@contextmanager
def _host_kept() -> Iterator[None]:
    """Restores the state of Python's and NumPy's generators after the block."""
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
