"""``Homes``: sends what only some ranks have to the other ranks of a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.calls.structure import is_constant
from meshwright.private import pytree, without_modes
from meshwright.recipe import Recipe
from meshwright.runtime.groups import Groups, as_bytes

_Key = TypeVar("_Key")


class Home(NamedTuple):
    """The ranks that have something: those of a stage, in a place."""

    stage: int
    place: int


class Homes:
    """Sends values from their homes.

    Args:
        recipe: every decision of the plan.
        groups: process groups and device.
    """

    def __init__(self, recipe: Recipe, groups: Groups) -> None:
        self._recipe, self._groups = recipe, groups

    def share(
        self,
        homes: Mapping[_Key, Home],
        value: Callable[[_Key], Any],
        like: Callable[[_Key], Any] | None = None,
    ) -> dict[_Key, Any]:
        """Sends values to all ranks of a copy of the model. Collective over these ranks, if there is anything to send.

        Args:
            homes: a key for each value → the value's home. Equal on these ranks, in the same order.
            value: key → its value on this rank: a tensor, a constant, or a container of both. Others are not sent.
            like: key → the value with other tensors of the same shapes and dtypes, on every rank; None: the home sends these
                first.

        Returns:
            Key → value, of the values that this rank got from another.
        """
        received: dict[_Key, Any] = {}
        ranks = {key: self._recipe.stage_rank[home.stage] for key, home in homes.items()}

        def send(keys: Sequence[_Key], axis: str, source: int) -> None:
            values = (received[key] if key in received else value(key) for key in keys)
            facts = _facts([like(key) for key in keys]) if like is not None else None
            received.update(self._send(keys, values, facts, axis, source))

        with without_modes(), torch.no_grad():
            for home in sorted(set(homes.values())):
                keys = [key for key in homes if homes[key] == home]
                if home.place and ranks[keys[0]] == self._groups.pp_rank:
                    send(keys, "tp", self._first_of(home.place))
            for rank in sorted(set(ranks.values())):
                send([key for key in homes if ranks[key] == rank], "pp", rank)
        return received

    def _first_of(self, place: int) -> int:
        """The first rank, on the tp axis of this rank, that belongs to a place."""
        places, rank = self._recipe.places, self._groups.rank
        return next(i for i, other in enumerate(places.line(0, rank)) if places.at(other, place) is not None)

    def _send(
        self, keys: Sequence[_Key], values: Iterable[Any], facts: Sequence[Any] | None, axis: str, source: int
    ) -> dict[_Key, Any]:
        """Sends values from one rank of an axis to the others. Returns those that this rank got.

        Args:
            values: for each key, on the source. They are made if they are sent.
            facts: the values, with ``_TensorFacts`` in place of tensors; None: only the source knows them.
            axis: ``pp`` or ``tp``.
        """
        if axis not in self._groups.hosts:  # it has one rank
            return {}
        on_pp = axis == "pp"
        group = self._groups.pipeline if on_pp else self._groups.tp
        is_source = source == (self._groups.pp_rank if on_pp else self._groups.tp_rank)
        sent = [_to_send(value) for value in values] if is_source else []
        tensors = [leaf for leaf in pytree.tree_leaves(sent) if isinstance(leaf, Tensor)]
        if facts is None:
            holder = [_facts(sent)]
            dist.broadcast_object_list(holder, group=self._groups.hosts[axis], group_src=source)
            facts = holder[0]
        nbytes = [leaf.nbytes for leaf in pytree.tree_leaves(facts) if isinstance(leaf, _TensorFacts)]
        elements = torch.empty(sum(nbytes), dtype=torch.uint8, device=self._groups.device)
        if tensors:
            torch.cat([as_bytes(t).to(elements.device) for t in tensors], out=elements)
        if len(elements):
            dist.broadcast(elements, group=group, group_src=source)
        if is_source:
            return {}
        parts = iter(elements.split(nbytes))
        received = pytree.tree_map_only(_TensorFacts, lambda tensor: tensor.filled(next(parts)), facts)
        return {key: item for key, item in zip(keys, received, strict=True) if not isinstance(item, _Unsent)}


def _to_send(value: Any) -> Any:
    """A value; ``_Unsent`` in place of one that cannot be sent."""
    leaves = pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = all(type(t) is Tensor and t.layout is torch.strided and not t.is_meta for t in tensors)
    return value if plain and all(isinstance(x, Tensor) or is_constant(x) for x in leaves) else _Unsent()


def _facts(values: Sequence[Any]) -> Any:
    """Values with ``_TensorFacts`` in place of their tensors."""
    return pytree.tree_map_only(Tensor, lambda t: _TensorFacts(t.shape, t.dtype), values)


@dataclass(frozen=True)
class _TensorFacts:
    """A tensor without its elements."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def filled(self, elements: Tensor) -> Tensor:
        """The tensor with these bytes. They are copied, since elements of a dtype must be aligned."""
        return elements.clone().view(self.dtype).view(self.shape)


class _Unsent:
    """In the place of a value that cannot be sent."""
