"""``OrderCheck``: ranks compare which collective of tensor parallelism they enter, and which unit FSDP2 gathers, before that.

Ranks that enter different collectives may deadlock, or add up different tensors; and FSDP2 gathers the shards of different
blocks into one parameter without an error, if they have the same size. The order differs if the model acts on what differs
between processes: the order of a set of strings, the clock, its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import ReplicaError
from meshwright.private import without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.checksum import number_of
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.fsdp import gathered, unit_mesh
from meshwright.spmd.comm import Ledger
from meshwright.watch.report import spelled_ranks

_FIX = (
    "The model takes another path on some ranks. Look for code that asks for its rank, the clock, the order of a set or random "
    "numbers that are not seeded; meshwright check tells what differs from one device"
)


class OrderCheck:
    """Compares the order of collectives within a step, or within the trial of its rows.

    Args:
        places: the submeshes of this rank that have a tp group.
        ledger: counts the collectives of tensor parallelism.
        cost: counts the collectives of the comparison itself.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        groups: Groups,
        places: Sequence[int],
        ledger: Ledger,
        cost: Ledger,
    ) -> None:
        self._model, self._recipe, self._groups, self._places = model, recipe, groups, places
        self._ledger, self._cost = ledger, cost
        self._step = 0  # the step that is compared, as errors call it; 0: none is

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """A context for the forwards and backwards of a step, or of a trial. It puts hooks on modules.

        Args:
            step: as errors call it.

        Raises:
            ReplicaError: ranks enter different collectives. On all ranks of the group.
        """
        with ExitStack() as stack:
            self._step = step
            stack.callback(self._stop)
            for place in self._places:
                group = self._groups.meshes[place]["tp"].get_group()
                self._ledger.orders[place].meet = partial(self._meet, group, "collectives in a tp group")
            self._watch_units(stack)
            yield
            for place in reversed(self._places):  # submeshes of branches before the submesh around them
                if (meet := self._ledger.orders[place].meet) is not None:
                    meet("the end")

    def _watch_units(self, stack: ExitStack) -> None:
        """Compares, before FSDP2 gathers a unit for a forward, that the other data ranks gather the same one."""
        meets: list[Callable[[str], None]] = []
        for unit in self._recipe.units:
            module = self._model.get_submodule(unit.name)
            if not isinstance(module, FSDPModule):
                continue
            mesh = unit_mesh(unit, self._groups)
            groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
            meets = [partial(self._meet, group, "units that FSDP2 gathers") for group in groups]
            before = partial(self._before_unit, meets, unit.name)
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)  # before FSDP2's own
        if meets:  # those of the root, which is the last unit
            stack.callback(self._model.register_forward_hook(partial(self._after_forward, meets)).remove)

    def _before_unit(self, meets: list[Callable[[str], None]], name: str, module: FSDPModule, *_: Any) -> None:
        with without_modes(), torch.no_grad():
            is_gathered = any(True for _ in gathered(module))
        if not is_gathered:
            for meet in meets:
                meet(name or "the model's own parameters")

    def _after_forward(self, meets: list[Callable[[str], None]], *_: Any) -> None:
        for meet in meets:
            meet("the end of the forward")

    def _meet(self, group: dist.ProcessGroup, subject: str, entered: str) -> None:
        """Compares what the ranks of a group enter next. Collective over them.

        Args:
            subject: the kind of what they enter; ``entered``: what this rank enters.
        """
        if not self._step:
            return
        ranks = dist.get_process_group_ranks(group)
        with without_modes(), torch.no_grad():
            number = torch.tensor([number_of(entered)], device=self._groups.device)
            numbers = [torch.empty_like(number) for _ in ranks]
            self._cost.moved("all_gather", number)
            dist.all_gather(numbers, number, group=group)
            if len({int(n) for n in numbers}) == 1:
                return
            step = self._step
            self._stop()
            texts: list[Any] = [None] * len(ranks)
            dist.all_gather_object(texts, entered, group=group)
        each = ", ".join(f"{spelled_ranks([rank])} enters {text}" for rank, text in zip(ranks, texts, strict=True))
        raise ReplicaError(step, [f"the order of {subject}: {each}"], _FIX)

    def _stop(self) -> None:
        """Collectives are entered without a comparison from here on."""
        self._step = 0
        for place in self._places:
            self._ledger.orders[place].meet = None
