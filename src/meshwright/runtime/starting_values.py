"""``make_equal``: gives replicas the same starting values, where construction has given them others.

    each rank      builds the model from the same seed, and takes a checksum of each value
    all ranks      gather the sums of checksums by ``Column``; where they differ, the checksums
    lowest rank    of each set that must be equal sends a value that differs to the others of its set

Construction may not repeat itself: LAPACK (``torch.linalg.lstsq``) rounds by where its tensors lie in memory, and code may draw
numbers that no seed reaches. DDP sends every value of rank 0; here nothing is sent but what differs.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.recipe import Recipe
from meshwright.runtime.checksum import checksum
from meshwright.runtime.groups import Groups, as_bytes
from meshwright.runtime.replicas import add_by_column, buffers_of, columns_of, key_of, parameters_of
from meshwright.runtime.step_notes import listed
from meshwright.runtime.weights.parameters import local_tensor

_Place = tuple[int, str]  # the number of a column, and the name of a value


@torch.no_grad()
def make_equal(model: nn.Module, recipe: Recipe, groups: Groups) -> tuple[str, ...]:
    """Makes the parameters and buffers of replicas bitwise equal. Collective over all ranks.

    Returns:
        The names of those that were not; the same on every rank.
    """
    if recipe.mesh.size == 1:
        return ()
    by_key = columns_of(recipe)
    columns, values = [*by_key.values()], _values(model, recipe, groups.rank, {key: i for i, key in enumerate(by_key)})
    numbers = dict(zip(values, listed([checksum(t) for t in values.values()], groups.device), strict=True))
    totals = torch.zeros(len(columns), dtype=torch.int64)
    add_by_column(
        totals, [i for i, _ in numbers], [name for _, name in numbers], [*map(torch.tensor, numbers.values())]
    )
    gathered = [torch.empty_like(totals) for _ in range(recipe.mesh.size)]
    dist.all_gather(gathered, totals, group=groups.hosts[""])
    of_ranks = torch.stack(gathered).tolist()
    differing = {i for i, c in enumerate(columns) if c.differing([of_rank[i] for of_rank in of_ranks])}
    if not differing:
        return ()
    everywhere: list[dict[_Place, int]] = [{}] * recipe.mesh.size
    dist.all_gather_object(everywhere, {p: n for p, n in numbers.items() if p[0] in differing}, group=groups.hosts[""])
    names: dict[str, None] = {}
    for place in dict.fromkeys(place for of_rank in everywhere for place in of_rank):
        sums = [of_rank.get(place) for of_rank in everywhere]
        without = [rank for rank, number in enumerate(sums) if number is None]
        for ranks in columns[place[0]].differing(sums, without):
            names[place[1]] = None
            _send_to_all(values.get(place), sorted(chain.from_iterable(ranks)), groups)
    return tuple(names)


def _values(model: nn.Module, recipe: Recipe, rank: int, index: dict[Any, int]) -> dict[_Place, Tensor]:
    """The local tensors of a rank. ``index``: key of a column → its number."""
    parameters = {
        (index[key_of(line, recipe)], name): local_tensor(p) for name, line, p in parameters_of(model, recipe, rank)
    }
    buffers = buffers_of(model, recipe, rank)
    return parameters | {(index["buffer", recipe.buffer_place(name)], name): b for name, b in buffers}


def _send_to_all(value: Tensor | None, ranks: list[int], groups: Groups) -> None:
    """Sends the value of the first of these ranks to the others, on the host, as bytes. The value is None on other ranks."""
    first, *others = ranks
    if value is None or groups.rank not in ranks:
        return
    local = as_bytes(value).cpu()
    if groups.rank == first:
        for rank in others:
            dist.send(local, rank, group=groups.hosts[""])
    else:
        received = torch.empty_like(local)
        dist.recv(received, first, group=groups.hosts[""])
        value.copy_(received.view(value.dtype).view_as(value))
