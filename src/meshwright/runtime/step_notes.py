"""``StepNotes``: what a rank records in a step that the guard compares: inputs and outputs of its blocks, the parameters that
FSDP2 has gathered, and the order of the collectives of tensor parallelism.

Ranks that enter different collectives may deadlock, or add up different tensors. So the ranks of a tp group compare which
collective they enter, before they enter it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.calls.placeholder import Placeholder
from meshwright.errors import ReplicaError
from meshwright.private import without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.checksum import checksum
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.fsdp import gathered
from meshwright.spmd.comm import Ledger
from meshwright.spmd.tensor import GlobalTensor
from meshwright.watch.report import spelled_ranks


class StepNotes:
    """Records one step of one rank.

    Args:
        ledger: counts the collectives of tensor parallelism, whose order is compared.
        cost: counts the collectives of the comparison itself.

    Attributes:
        places: the submeshes of this rank that have a tp group.
        activations: (submesh, name, checksum) of unsharded tensors that are an input or output of a block.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, ledger: Ledger, cost: Ledger) -> None:
        self._model, self._recipe, self._groups, self._ledger, self._cost = model, recipe, groups, ledger, cost
        self.places = [p for p in sorted(recipe.places.of(groups.rank)) if recipe.places.axis_size(p, "tp") > 1]
        self.activations: list[tuple[int, str, Tensor]] = []
        self._gathered: list[tuple[str, Tensor]] = []  # (parameter, checksum) before and after each forward of its unit

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the forwards and backwards of a step: records inputs and outputs of blocks; the ranks of a tp group
        compare which collective they enter.

        Args:
            step: as errors call it.

        Raises:
            ReplicaError: ranks of a tp group enter different collectives. On all ranks of this group.
        """
        with ExitStack() as stack:
            self._watch_units(stack)
            for place in self.places:
                order = self._ledger.orders[place]
                stack.callback(setattr, order, "meet", None)
                order.meet = self._meeting(step, place)
            # With branches and streams a value may not have arrived yet, and a checksum would wait for it.
            if not self._recipe.streams and not self._recipe.branches:
                for unit in self._recipe.units:
                    if unit.name and unit.place in self.places:
                        module = self._model.get_submodule(unit.name)
                        before, after = self._noting(unit.name, unit.place)
                        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                        stack.callback(module.register_forward_hook(after).remove)
            yield
            for place in reversed(self.places):  # submeshes of branches before the submesh around them
                if (meet := self._ledger.orders[place].meet) is not None:
                    meet("the end of the step")

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

    def _meeting(self, step: int, place: int) -> Callable[[str], None]:
        """A function to call before each collective of a submesh's tp group: compares the collective among these ranks."""
        group, ranks = self._groups.meshes[place]["tp"].get_group(), self._recipe.places.line(place, self._groups.rank)

        def meet(collective: str) -> None:
            with without_modes():
                number = torch.tensor([number_of(collective)], device=self._groups.device)
                numbers = [torch.empty_like(number) for _ in ranks]
                self._cost.moved("all_gather", number)
                dist.all_gather(numbers, number, group=group)
                if len({int(n) for n in numbers}) > 1:
                    self._stop_meeting()
                    texts: list[Any] = [None] * len(ranks)
                    dist.all_gather_object(texts, collective, group=group)
                    entered = [
                        f"{spelled_ranks([rank])} enters {text}" for rank, text in zip(ranks, texts, strict=True)
                    ]
                    raise ReplicaError(
                        step, ["the order of collectives in a tp group: " + ", ".join(entered)], _FIX_ORDER
                    )

        return meet

    def _stop_meeting(self) -> None:
        """Collectives are entered without a comparison from here on."""
        for place in self.places:
            self._ledger.orders[place].meet = None


_FIX_ORDER = (
    "The model takes another path on some ranks. Look for code that asks for its rank, the clock or random numbers that are "
    "not seeded; meshwright check tells what differs from one device"
)


def _items(output: Any) -> Iterable[Any]:
    """The items of a module's output. Nested containers (a cache of all layers) are not opened."""
    if isinstance(output, dict):
        return output.values()
    return output if isinstance(output, (tuple, list)) else [output]


def is_plain(t: Tensor) -> bool:
    """Whether a tensor has strided memory of its own, of which a checksum can be taken."""
    return t.layout is torch.strided and not t.is_meta and not t.is_nested and not t.is_quantized


def number_of(text: str) -> int:
    """A hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def listed(sums: Sequence[Tensor], device: torch.device) -> list[int]:
    """Numbers on a device as integers of the host, in one copy."""
    numbers: list[int] = torch.stack([s.to(device) for s in sums]).tolist() if sums else []
    return numbers
