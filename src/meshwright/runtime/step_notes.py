"""``StepNotes``: what a rank records in a step that the guard compares: inputs and outputs of its blocks, and the parameters
that FSDP2 has gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.calls.placeholder import Placeholder
from meshwright.private import without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.checksum import checksum
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.fsdp import gathered
from meshwright.spmd.tensor import GlobalTensor


class StepNotes:
    """Records one step of one rank.

    Args:
        places: the submeshes of this rank that have a tp group.

    Attributes:
        activations: (submesh, name, checksum) of unsharded tensors that are an input or output of a block.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, places: Sequence[int]) -> None:
        self._model, self._recipe, self._groups, self._places = model, recipe, groups, places
        self.activations: list[tuple[int, str, Tensor]] = []
        self._gathered: list[tuple[str, Tensor]] = []  # (parameter, checksum) before and after each forward of its unit

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for the forwards and backwards of a step: records inputs and outputs of blocks."""
        with ExitStack() as stack:
            self._watch_units(stack)
            # With branches and streams a value may not have arrived yet, and a checksum would wait for it.
            if not self._recipe.streams and not self._recipe.branches:
                for unit in self._recipe.units:
                    if unit.name and unit.place in self._places:
                        module = self._model.get_submodule(unit.name)
                        before, after = self._noting(unit.name, unit.place)
                        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                        stack.callback(module.register_forward_hook(after).remove)
            yield

    def _watch_units(self, stack: ExitStack) -> None:
        """Takes checksums of the gathered parameters of each FSDP2 unit, before its forward and after."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                noting = partial(self._note_gathered, names)
                stack.callback(module.register_forward_pre_hook(noting).remove)  # after FSDP2's own hook, which gathers
                stack.callback(module.register_forward_hook(noting, prepend=True).remove)

    def _note_gathered(self, names: Mapping[int, str], module: FSDPModule, *_: Any) -> None:
        with without_modes(), torch.no_grad():
            for p, value in gathered(module):
                if id(p) in names:  # the others have no name to tell them apart
                    self._gathered.append((names[id(p)], checksum(value)))

    def written(self) -> list[str]:
        """The parameters that a forward wrote to while they were gathered: FSDP2 drops such a write with the gathered
        memory."""
        seen: dict[str, set[int]] = {}
        for (name, _), number in zip(
            self._gathered, listed([s for _, s in self._gathered], self._groups.device), strict=True
        ):
            seen.setdefault(name, set()).add(number)
        return sorted(name for name, numbers in seen.items() if len(numbers) > 1)

    def _noting(self, name: str, place: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """The forward pre-hook and forward hook of a block."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(f"what enters {name}", place, [*args, *kwargs.values()])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._note(f"what leaves {name}", place, _items(output))

        return before, after

    def _note(self, name: str, place: int, values: Iterable[Any]) -> None:
        """Records checksums of the unsharded tensors among some values."""
        with without_modes():  # these operators are not part of the model's forward
            for t in values:
                is_full = isinstance(t, Tensor) and not isinstance(t, (GlobalTensor, Placeholder, nn.Parameter))
                if is_full and t.device == self._groups.device and is_plain(t):
                    self.activations.append((place, name, checksum(t)))


def _items(output: Any) -> Iterable[Any]:
    """The items of a module's output. Nested containers (a cache of all layers) are not opened."""
    if isinstance(output, dict):
        return output.values()
    return output if isinstance(output, (tuple, list)) else [output]


def is_plain(t: Tensor) -> bool:
    """Whether a tensor has strided memory of its own, of which a checksum can be taken."""
    return t.layout is torch.strided and not t.is_meta and not t.is_nested and not t.is_quantized


def listed(sums: Sequence[Tensor], device: torch.device) -> list[int]:
    """Numbers on a device as integers of the host, in one copy."""
    numbers: list[int] = torch.stack([s.to(device) for s in sums]).tolist() if sums else []
    return numbers
