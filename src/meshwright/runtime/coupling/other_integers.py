"""``other_integers``: a batch of a trial with other integers, masks and classes, as a later batch may have.

A trial moves weights, so that floating-point numbers are no special ones. Integers are those of one batch. They may hide that
rows meet: the ids of all rows have an even sum, all rows have one class, the largest length is that of both parts. So one
attempt has other integers, in the range of those of their tensor: an id stays in the vocabulary, an index in its range. If a
forward does not accept them (so many image tokens as there are images), or if they make its loss NaN, nothing follows.

    integers     Each row draws from the values of its tensor and those between, the first rows from the smallest alone. So
                 rows have other sums and maxima; the sums of the first quarter of rows are odd, the others even. (Not in
                 turn: then all parts would have as many odd ones.) Negative integers (ignored labels) stay. Of a few
                 draws that one is taken in which parts of the rows have the most different numbers.
    masks        Some elements are switched off, but no row's first; of a mask without any, some are switched on.
    all equal    They stay, as no other value is known to be one. If they are compared with each other
                 (``labels[:, None] == labels``), the result is that of two alternating values (``Alternating``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.private import storage_of
from meshwright.runtime.rows.batch import has_rows, mapped, tensors_in
from meshwright.spmd.autograd_functions import FunctionMode

_MOST_ELEMENTS = 1 << 20  # of a tensor that gets other integers: pictures in bytes stay
_FEWEST_VALUES = 2  # from which a row draws
_MOST_DRAWS, _MOST_DRAWN = (
    16,
    1 << 15,
)  # of one tensor: draws, and elements in all of them; of many elements one draw is enough
_EQUALITIES = frozenset("eq ne not_equal __eq__ __ne__".split())
_ALONG_A_DIM = frozenset(
    "gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill".split()
)
_PLACE_BY_MASK = frozenset("masked_scatter masked_scatter_".split())


def other_integers(batch: Any, rows: int) -> Any:
    """A batch whose tensors with rows have other integers; None if it has no such tensors."""
    if not any(_has_integers(t, rows) for t in tensors_in(batch)):
        return None
    with torch.no_grad():
        return mapped(lambda t: _others(t).to(t.device) if _has_integers(t, rows) else t, batch)


def _has_integers(t: Tensor, rows: int) -> bool:
    plain = type(t) is Tensor and t.layout is torch.strided and not t.is_nested and not t.is_meta
    fractions = t.is_floating_point() or t.is_complex()
    return plain and not fractions and has_rows(t, rows) and 0 < t.numel() <= _MOST_ELEMENTS


def _others(t: Tensor) -> Tensor:
    t = t.cpu()
    values = t[t >= 0].unique()
    is_mask = t.dtype is torch.bool or (t.dim() > 1 and bool((t >= 0).all()) and values.tolist() in ([0, 1], [1]))
    if is_mask:
        return _other_mask(t.bool()).to(t.dtype)
    return _redrawn(t, values) if len(values) > 1 else t


def _other_mask(mask: Tensor) -> Tensor:
    """``mask``, with about half of its elements switched; every third row stays."""
    stays = (torch.arange(len(mask)) % 3 == 2).view(-1, *[1] * (mask.dim() - 1))
    switched = (_random(mask) < 0.5) & ~stays
    if mask.dim() == 1:
        return mask ^ switched
    if not mask.any():
        return switched & (torch.ones_like(mask).cumsum(-1) > 1)
    return mask & ~(switched & (mask.cumsum(-1) > 1))


def _redrawn(t: Tensor, values: Tensor) -> Tensor:
    """``t``, with a number drawn for each that is not negative: of a few draws that which is the most uneven over rows."""
    draws = min(_MOST_DRAWS, max(1, _MOST_DRAWN // t.numel()))
    return max((_drawn(t, values, seed) for seed in range(draws)), key=_unevenness)


def _drawn(t: Tensor, values: Tensor, seed: int) -> Tensor:
    """Row i of n draws from the smallest (i + 1) / n of the values, or from the range of these. Its first number is the largest
    of these in the first draw, and a large one in others, so that no row has only the smallest (padding, often).
    """
    fractions = _random(t, seed).view(len(t), -1)
    if t.dim() > 1:
        fractions[:, 0] = 1.0 - (fractions[:, 0] / 2 if seed else 0.0)
    among = (torch.arange(1, len(t) + 1) * len(values) // len(t)).clamp(min=_FEWEST_VALUES)[:, None]
    drawn = values[torch.minimum((fractions * among).long(), among - 1)]
    least, most = int(values[0]), values[among - 1]
    between = least + ((most - least) * fractions).round().to(t.dtype)
    of_range = torch.arange(fractions.shape[1]) % 2 == 1
    redrawn = torch.where(t >= 0, torch.where(of_range, between, drawn).view(t.shape), t)
    if fractions.shape[1] > 1 and len(t) > 1:
        _set_parity(redrawn.view(len(t), -1)[:, 1], redrawn.view(len(t), -1).sum(1), least, most[:, 0])
    return redrawn


def _unevenness(t: Tensor) -> tuple[float, ...]:
    """For numbers of some kinds (odd ones, multiples of three, large ones), the smallest distance of their share in the first
    rows from that in the others, wherever rows are divided in two.

    In few rows shares are equal by chance. What depends on a share alone would then seem to be the same for all rows.
    """
    rows = t.view(len(t), -1)
    counted = rows >= 0
    numbers = counted.sum(1).cumsum(0).double()
    distances = []
    for kind in (rows % 2 == 1, rows % 3 == 0, rows > rows[counted].median()):
        of_kind = (kind & counted).sum(1).cumsum(0).double()
        shares, others = of_kind[:-1] / numbers[:-1], (of_kind[-1] - of_kind[:-1]) / (numbers[-1] - numbers[:-1])
        distances.append(float((shares - others).abs().nan_to_num(1.0).min()) if len(rows) > 1 else 0.0)
    return tuple(distances)


def _set_parity(column: Tensor, sums: Tensor, least: int, most: Tensor) -> None:
    """Changes numbers of a column by one, so that the sums of the first quarter of rows are odd, and the others even.

    Args:
        column: a number of each row; one that is negative stays.
        sums: of each row.
        least, most: the range of the numbers, which has two at least.
    """
    is_odd = torch.arange(len(sums)) < (len(sums) + 3) // 4
    wrong = (sums % 2 == 1) != is_odd
    step = torch.where(column < most, 1, -1)
    column.copy_(torch.where(wrong & (column >= 0) & (least < most), column + step, column))


def _random(like: Tensor, seed: int = 0) -> Tensor:
    """Numbers in [0, 1), the same on every rank."""
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")


# --- the forward --------------------------------------------------------------------------------------------------------


class PlacesByMaskError(Exception):
    """A forward places values, one after the other, where a mask is set: another mask would move those of other rows there."""


class OutOfRangeError(Exception):
    """An index lies outside of the tensor that a forward indexes. Raised before torch sees it: on a GPU torch would abort the
    process."""


class Alternating(FunctionMode):
    """If integers that are all equal are compared with each other, they are alternating ones instead.

    Raises:
        PlacesByMaskError, OutOfRangeError: from the forward.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _PLACE_BY_MASK:
            raise PlacesByMaskError
        for indices, size, least in _indices(name, args, kwargs or {}):
            if _has_values(indices) and (int(indices.max()) >= size or int(indices.min()) < least):
                raise OutOfRangeError(f"{name} with an index outside of {least} … {size - 1}")
        result = func(*args, **(kwargs or {}))
        if name in _EQUALITIES and len(args) > 1 and _all_with_each_other(result, *args[:2]):
            a, b = args[:2]
            return result ^ _alternate(result, a, b)
        return result


def _indices(name: str, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, int, int]]:
    """(indices, size of the dim that they index, the least index that is allowed) of a call of a torch function."""
    arguments = dict(enumerate(args)) | kwargs

    def argument(i: int, key: str) -> Any:
        return arguments.get(i, arguments.get(key))

    if name in ("embedding", "embedding_bag"):
        yield argument(0, "input"), len(argument(1, "weight")), 0
    elif name.rstrip("_") in _ALONG_A_DIM:
        yield argument(2, "index"), argument(0, "input").shape[argument(1, "dim")], 0
    elif name == "take_along_dim" and (dim := argument(2, "dim")) is not None:
        yield argument(1, "indices"), argument(0, "input").shape[dim], 0
    elif name in ("__getitem__", "__setitem__"):
        yield from _subscripts(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
    elif name in ("cross_entropy", "nll_loss"):
        scores, classes, ignored = (
            argument(0, "input"),
            argument(1, "target"),
            arguments.get(4, kwargs.get("ignore_index", -100)),
        )
        if _has_values(classes):
            yield classes[classes != ignored], scores.shape[min(1, scores.dim() - 1)], 0
    elif name == "one_hot" and (classes := argument(1, "num_classes")) is not None and classes > 0:
        yield argument(0, "input"), classes, 0


def _subscripts(t: Tensor, subscripts: tuple[Any, ...]) -> Iterator[tuple[Any, int, int]]:
    """``_indices`` for ``t[subscripts]``."""
    if Ellipsis in [x for x in subscripts if not isinstance(x, Tensor)]:
        return
    dim = 0
    for x in subscripts:
        if isinstance(x, Tensor) and x.dtype is not torch.bool and dim < t.dim():
            yield x, t.shape[dim], -t.shape[dim]
        dim += 0 if x is None else x.dim() if isinstance(x, Tensor) and x.dtype is torch.bool else 1


def _has_values(indices: Any) -> bool:
    """Whether this is a tensor of integers whose values can be read."""
    plain = type(indices) is Tensor and not indices.is_meta and indices.numel() > 0
    return plain and not indices.is_floating_point() and indices.dtype is not torch.bool


def _all_with_each_other(result: Any, a: Any, b: Any) -> bool:
    """Whether equal integers are compared, each of a tensor with each of the same tensor."""
    if not all(type(t) is Tensor and not t.is_meta for t in (result, a, b)) or a.is_floating_point():
        return False
    outer = result.numel() > a.numel() == b.numel() > 1 and storage_of(a) == storage_of(b)
    return outer and bool((result == result.flatten()[0]).all())


def _alternate(result: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Where, of all elements of an outer comparison, two alternating values differ."""
    differ = torch.zeros((), dtype=torch.int64, device=result.device)
    for d, size in enumerate(result.shape, -result.dim()):
        if size > 1 and 1 in (*a.shape[d:][:1], *b.shape[d:][:1]):
            shape = [size, *[1] * (-d - 1)]
            differ = differ + torch.arange(size, device=result.device).view(shape)
    return (differ % 2 == 1).expand(result.shape)


__all__ = ["Alternating", "OutOfRangeError", "other_integers"]
