"""``Generators``: the random state of a rank, of every generator from which a forward may draw.

    generator                     seeded from               equal on               differs between
    torch's, of CPU and device    seed, data rank, stage    ranks of a tp group    data ranks, stages
    Python's and NumPy's          seed, data rank           tp group and stages    data ranks
    those that modules hold       by the model              tp group

Ranks of a tp group run the same forward, so they must draw the same numbers. So must data ranks in a step in which each runs
all rows (runtime/division.py): within it they draw from the first one's generators, and go on with their own afterwards.
Stages run the same Python between module calls, so Python's and NumPy's numbers, which may decide what is called, are equal
on all stages of a pipeline.

Before each step the ranks compare their states. If only some ranks drew (``if rank == 0: torch.rand(1)``), all ranks of the
group take the state of its first rank, and the job notes it.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.chance import held_in_modules, numpy_words, seed_host, set_state_of, state_of

State = dict[str, Any]  # name of a generator → its state, in the generator's own form
TORCH = ("cpu", "cuda")


def seed_all(seed: int) -> None:
    """Seeds torch's, Python's and, if NumPy is loaded, NumPy's generators."""
    torch.manual_seed(seed)
    seed_host(seed)


class Generators:
    """The generators from which the forward of one rank may draw.

    Args:
        device: the device of the rank.
        model: the model, whose modules may hold generators.
    """

    def __init__(self, device: torch.device, model: nn.Module | None = None) -> None:
        self.device = device
        self._held = dict(_held(model)) if model is not None else {}
        self._numpy = _NumPy()
        self._first: State | None = None  # of the first rank, after the last step in which this rank drew its numbers

    def start(self, seed: int, data: int, stage: int) -> None:
        """Seeds the generators of data rank ``data`` in the pipeline rank ``stage``."""
        for_all_stages = seed * 1_000_003 + data + 1
        self.seed(for_all_stages)
        self._seed_torch(for_all_stages + stage * 1_000_000_007)

    def seed(self, seed: int) -> None:
        """Seeds every generator except those that modules hold."""
        self._seed_torch(seed)
        seed_host(seed)

    def _seed_torch(self, seed: int) -> None:
        # Not torch.manual_seed: until a GPU is used, each of its calls keeps a stack trace.
        torch.default_generator.manual_seed(seed % 2**63)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed % 2**63)

    def state(self, *, held: bool = True) -> State:
        """The state of every generator; ``held``: including those that modules hold."""
        state: State = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state | self.host(held=held)

    def digest(self) -> int:
        """A number below 2**32 that differs, all but surely, between states that differ."""
        return state_digest(self.state())

    def host(self, *, held: bool = True) -> State:
        """The state of every generator except torch's default ones; ``held``: including those that modules hold."""
        state: State = {"python": random.getstate()}
        if "numpy" in sys.modules:
            state["numpy"] = self._numpy.state()
        return state | {name: state_of(generator) for name, generator in self._held.items() if held}

    def set(self, state: State) -> None:
        """Restores the generators that ``state`` names."""
        for name, value in state.items():
            if name == "cpu":
                torch.set_rng_state(value)
            elif name == "cuda":
                torch.cuda.set_rng_state(value, self.device)
            elif name == "python":
                random.setstate(value)
            elif name == "numpy":
                self._numpy.set(value)
            elif name in self._held:
                set_state_of(self._held[name], value)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restores all generators after the block."""
        before = self.state()
        try:
            yield
        finally:
            self.set(before)

    def agree(self, group: dist.ProcessGroup, *, torch_too: bool, told: Sequence[int] = ()) -> tuple[bool, list[int]]:
        """If the states of the ranks of a group differ, all take the first rank's. Collective over the group.

        Args:
            group: a group for tensors of the host, where states are, so that no device is waited for.
            torch_too: also compare torch's generators and those that modules hold. (Stages run different modules.)
            told: further numbers that ranks exchange in the same collective.

        Returns:
            (whether the states were equal, the maximum over ranks of each number in ``told``).
        """
        state = self.state() if torch_too else self.host(held=False)
        digest = state_digest(state)
        most = torch.tensor([digest, -digest, *told], device="cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        highest, lowest, *largest = most.tolist()
        if highest == -lowest:
            return True, largest
        holder = [state]
        dist.broadcast_object_list(holder, group_src=0, group=group, device=torch.device("cpu"))
        self.set(holder[0])
        return False, largest

    @contextmanager
    def of_first(self, groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
        """Inside the ``with``, the ranks of all groups draw the numbers that the first of them would draw. Afterwards each goes
        on with its own; generators that modules hold go on as they are. Collective over the groups, one after the other."""
        if all(group.rank() == 0 for group in groups):
            for group in groups:
                self.agree(group, torch_too=True)
            yield
            return
        own = self.state(held=False)
        try:
            self.set(self._first or {})  # usually still the state of the first rank: then none is sent
            for group in groups:
                self.agree(group, torch_too=True)
            yield
            self._first = self.state(held=False)
        finally:
            self.set(own)

    # --- as tensors, for checkpoints ----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The state of every generator as tensors, by name, for a checkpoint."""
        state = self.state()
        tensors = {name: state.pop(name) for name in TORCH if name in state}
        _, words, gauss = state.pop("python")
        tensors["python"] = torch.tensor(words, dtype=torch.int64)
        if gauss is not None:
            tensors["python_gauss"] = torch.tensor(gauss, dtype=torch.float64)
        if isinstance(state.get("numpy"), tuple):
            _, keys, position, has_gauss, cached = state.pop("numpy")
            tensors["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
            tensors["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
        for name, value in state.items():
            text = json.dumps(value, default=lambda x: x.tolist()).encode()
            tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restores the state that ``tensors`` returned."""
        gauss = tensors.get("python_gauss")
        state: State = {"cpu": tensors["cpu"]}
        state["python"] = (3, tuple(tensors["python"].tolist()), None if gauss is None else gauss.item())
        if "cuda" in tensors and self.device.type == "cuda":
            state["cuda"] = tensors["cuda"]
        if "numpy_gauss" in tensors:
            import numpy

            *keys, position, has_gauss = tensors["numpy"].tolist()
            words = numpy.array(keys, dtype=numpy.uint32)
            state["numpy"] = ("MT19937", words, position, has_gauss, tensors["numpy_gauss"].item())
        for name in self._held.keys() & tensors.keys():
            state[name] = json.loads(bytes(tensors[name].tolist()))
        self.set(state)


def random_numbers_kept() -> AbstractContextManager[None]:
    """Restores torch's, Python's and NumPy's generators after the block."""
    on_cuda = torch.cuda.is_initialized()
    return Generators(torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")).kept()


class _NumPy:
    """NumPy's default generator. NumPy takes 100 µs to return or set a state, and most forwards draw nothing from it.

    So the last state is cached with the bytes of the generator: its 624 words and its position. If these bytes are equal, and
    no second normal number was stored, nothing has been drawn since.
    """

    def __init__(self) -> None:
        self._known: tuple[bytes, Any] | None = None

    def state(self) -> Any:
        words = numpy_words()
        if not words:
            return sys.modules["numpy"].random.get_state()
        if self._known is None or self._known[0] != words or self._known[1][3]:
            self._known = words, sys.modules["numpy"].random.get_state()
        return self._known[1]

    def set(self, state: Any) -> None:
        if self.state() is not state:
            sys.modules["numpy"].random.set_state(state)
            self._known = numpy_words(), state


def _held(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, generator) of each generator that a module holds, each once."""
    seen = set[int]()
    for name, _, _, generator in held_in_modules(model):
        if id(generator) not in seen:
            seen.add(id(generator))
            yield f"held.{name}", generator


def state_digest(state: State) -> int:
    """A number below 2**32 that differs, all but surely, between states that differ."""
    digest = 0
    for name in sorted(state):
        for part in _parts(state[name]):
            digest = zlib.crc32(part, digest)
    return digest


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        return [value.numpy().tobytes()]
    if hasattr(value, "tobytes"):
        return [value.tobytes()]
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple):  # Python's: 625 numbers
        return [repr((hash(value[1]), value[2])).encode()]
    if isinstance(value, tuple):
        return [part for v in value for part in _parts(v)]
    return [repr(value).encode()]
