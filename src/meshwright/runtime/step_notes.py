"""``StepNotes``: what a rank notes in a step that is compared: what its blocks take and give, what FSDP2 has gathered, and in
which order collectives of tensor parallelism come.

Ranks that enter different collectives may wait for each other for ever, or add up different tensors. So the ranks of a tp group
say which one they enter, before they do.
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
    """What one rank notes in one step.

    Args:
        ledger: whose collectives are ordered.
        cost: where what ranks tell each other is counted.

    Attributes:
        places: those of this rank with a tp group.
        activations: (place, name, checksum) of what enters and leaves blocks as a whole tensor.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, ledger: Ledger, cost: Ledger) -> None:
        self._model, self._recipe, self._groups, self._ledger, self._cost = model, recipe, groups, ledger, cost
        self.places = [p for p in sorted(recipe.places.of(groups.rank)) if recipe.places.axis_size(p, "tp") > 1]
        self.activations: list[tuple[int, str, Tensor]] = []
        self._gathered: list[tuple[str, Tensor]] = []  # (parameter, checksum) before and after each forward of its unit

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """For the time of a step's forwards and backwards: notes what enters and leaves blocks; ranks of a tp group tell
        each other which collective they enter.

        Raises:
            ReplicaError: ranks of a tp group enter different ones. On all of this group.
        """
        with ExitStack() as stack:
            self._watch_units(stack)
            for place in self.places:
                order = self._ledger.orders[place]
                stack.callback(setattr, order, "meet", None)
                order.meet = self._meeting(step, place)
            # Beside branches and streams a value may still be on its way, and a look at it would wait for it.
            if not self._recipe.streams and not self._recipe.branches:
                for unit in self._recipe.units:
                    if unit.name and unit.place in self.places:
                        module = self._model.get_submodule(unit.name)
                        before, after = self._noting(unit.name, unit.place)
                        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                        stack.callback(module.register_forward_hook(after).remove)
            yield
            for place in reversed(self.places):  # branches before what is around them
                if (meet := self._ledger.orders[place].meet) is not None:
                    meet("the end of the step")

    def _watch_units(self, stack: ExitStack) -> None:
        """Notes what FSDP2 has gathered of each unit, before its forward and after."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                noting = partial(self._note_gathered, names)
                stack.callback(module.register_forward_pre_hook(noting).remove)  # behind FSDP2's own, which gathers
                stack.callback(module.register_forward_hook(noting, prepend=True).remove)

    def _note_gathered(self, names: Mapping[int, str], module: FSDPModule, *_: Any) -> None:
        with without_modes(), torch.no_grad():
            for p, value in gathered(module):
                if id(p) in names:  # the others would all be taken for one
                    self._gathered.append((names[id(p)], checksum(value)))

    def written(self) -> list[str]:
        """The parameters that forwards have written while they were gathered: what is written is gone with that."""
        seen: dict[str, set[int]] = {}
        for (name, _), number in zip(
            self._gathered, listed([s for _, s in self._gathered], self._groups.device), strict=True
        ):
            seen.setdefault(name, set()).add(number)
        return sorted(name for name, numbers in seen.items() if len(numbers) > 1)

    def _noting(self, name: str, place: int) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks of a block."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._note(f"what enters {name}", place, [*args, *kwargs.values()])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._note(f"what leaves {name}", place, _items(output))

        return before, after

    def _note(self, name: str, place: int, values: Iterable[Any]) -> None:
        """Checksums of the tensors that this rank has whole."""
        with without_modes():  # none of this is the model's
            for t in values:
                is_whole = isinstance(t, Tensor) and not isinstance(t, (GlobalTensor, Placeholder, nn.Parameter))
                if is_whole and t.device == self._groups.device and is_plain(t):
                    self.activations.append((place, name, checksum(t)))

    def _meeting(self, step: int, place: int) -> Callable[[str], None]:
        group, ranks = self._groups.meshes[place]["tp"].get_group(), self._recipe.places.line(place, self._groups.rank)

        def meet(collective: str) -> None:
            with without_modes():
                number = torch.tensor([number_of(collective)], device=self._groups.device)
                numbers = [torch.empty_like(number) for _ in ranks]
                self._cost.moved("all_gather", number)
                dist.all_gather(numbers, number, group=group)
                if len({int(n) for n in numbers}) > 1:
                    self._meet_no_more()
                    told: list[Any] = [None] * len(ranks)
                    dist.all_gather_object(told, collective, group=group)
                    differs = [f"{spelled_ranks([rank])} enters {text}" for rank, text in zip(ranks, told, strict=True)]
                    raise ReplicaError(
                        step, ["the order of collectives in a tp group: " + ", ".join(differs)], _FIX_ORDER
                    )

        return meet

    def _meet_no_more(self) -> None:
        for place in self.places:
            self._ledger.orders[place].meet = None


_FIX_ORDER = (
    "The model takes another path on some ranks. Look for code that asks for its rank, the clock or random numbers that are "
    "not seeded; meshwright check tells what differs from one device"
)


def _items(output: Any) -> Iterable[Any]:
    """What a module returns, one by one; containers in it (a cache of all layers) are not looked into."""
    if isinstance(output, dict):
        return output.values()
    return output if isinstance(output, (tuple, list)) else [output]


def is_plain(t: Tensor) -> bool:
    return t.layout is torch.strided and not t.is_meta and not t.is_nested and not t.is_quantized


def number_of(text: str) -> int:
    """A number that follows from a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def listed(sums: Sequence[Tensor], device: torch.device) -> list[int]:
    """Numbers on a device as integers, by one copy."""
    numbers: list[int] = torch.stack([s.to(device) for s in sums]).tolist() if sums else []
    return numbers
