"""Functions that move dims about and compute nothing: local, with the cut dim followed to its new place."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, WHOLE, Cut, Partial, regroup, reshape_group
from meshwright.view.alias import order
from meshwright.view.rules.registry import RULES, named, rule
from meshwright.view.tensor import View


def moved(work: Any, x: View, local: Tensor, dims: Sequence[int | None]) -> Any:
    """The result of a function that permutes, adds or drops dims: ``dims[i]`` is the dim of ``x`` that dim i was."""
    layout = x._mw_layout
    if isinstance(layout, Cut):
        if layout.dim not in dims:  # a cut dim of size 1 is dropped: the ranks that hold nothing of it need the rest
            return NotImplemented
        return work.view(local, layout.on(list(dims).index(layout.dim)))
    if isinstance(layout, Partial):
        return work.view(local, PARTIAL)
    if x._mw_parameter is not None and None not in dims:
        name, places = x._mw_parameter
        return View(local, WHOLE, work, parameter=(name, tuple(places[d] for d in dims if d is not None)))
    return local


@rule("transpose", "swapaxes", "swapdims")
def transpose(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    a, b = [*rest, *kwargs.values()]
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return moved(work, x, x._mw_local.transpose(a, b), dims)


@rule("permute")
def permute(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dims = _sizes(args[1:] or (kwargs["dims"],))
    dims = [d % x.dim() for d in dims]
    return moved(work, x, x._mw_local.permute(dims), dims)


@rule("movedim", "moveaxis")
def movedim(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, n = args[0], args[0].dim()
    source, target = ([d % n for d in _sizes((v,))] for v in [*args[1:], *kwargs.values()])
    dims: list[int | None] = [None] * n
    for s, t in zip(source, target, strict=True):
        dims[t] = s
    rest = iter([d for d in range(n) if d not in source])
    order = [next(rest) if d is None else d for d in dims]
    return moved(work, x, x._mw_local.permute(order), order)


@rule("t", "numpy_T")
def t(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    order = list(range(x.dim()))[::-1]
    return moved(work, x, x._mw_local.permute(order), order)


def _matrix_t(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return transpose(work, func, (args[0], -2, -1), {}) if args[0].dim() > 1 else NotImplemented


@rule("adjoint")
def adjoint(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if x.dim() < 2:
        return NotImplemented
    return transpose(work, func, (x, -2, -1), {}).conj()  # of real numbers, conj is the tensor itself


RULES[Tensor.T.__get__] = t  # type: ignore[attr-defined]
RULES[Tensor.mT.__get__] = _matrix_t  # type: ignore[attr-defined]
RULES[Tensor.H.__get__] = adjoint  # type: ignore[attr-defined]
RULES[Tensor.mH.__get__] = adjoint  # type: ignore[attr-defined]


@rule("unsqueeze")
def unsqueeze(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    dim %= x.dim() + 1
    dims: list[int | None] = list(range(x.dim()))
    dims.insert(dim, None)
    return moved(work, x, x._mw_local.unsqueeze(dim), dims)


@rule("squeeze")
def squeeze(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    given = [*args[1:], *kwargs.values()]
    chosen = [d % x.dim() for d in _sizes((given[0],))] if given else list(range(x.dim()))
    gone = [d for d in chosen if x.shape[d] == 1]  # of the whole shape: a slice of size 1 stays
    if isinstance(x._mw_layout, Cut) and x._mw_layout.dim in gone:
        return NotImplemented  # one rank has it all
    return moved(work, x, x._mw_local.squeeze(gone), [d for d in range(x.dim()) if d not in gone])


@rule("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as", "ravel")
def reshape(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape = args[0], _target_shape(func, args, kwargs)
    if shape is None or not isinstance(x, View):
        return NotImplemented
    layout = x._mw_layout
    if not isinstance(layout, Cut):
        local = x._mw_local.reshape(shape)
        if not isinstance(layout, Partial) and x._mw_parameter is not None:
            return _same_dims(work, x, local)
        return moved(work, x, local, [None] * len(shape))
    found = regroup(layout, tuple(x.shape), shape)
    if found is None:
        _suggest(work, x, layout, shape)
        return NotImplemented
    shape[found.dim] = found.local(work.axis.rank)
    return work.view(x._mw_local.reshape(shape), found)


def _same_dims(work: Any, x: View, local: Tensor) -> Any:
    """A parameter reshaped: still that parameter where only dims of size 1 came or went."""
    assert x._mw_parameter is not None
    name, places = x._mw_parameter
    kept = [p for p, n in zip(places, x.shape, strict=True) if n != 1]
    if [n for n in x.shape if n != 1] != [n for n in local.shape if n != 1]:
        return local
    left = iter(kept)
    return View(local, WHOLE, work, parameter=(name, tuple(-1 if n == 1 else next(left) for n in local.shape)))


def _target_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """The global shape a reshape asks for; None where it is a view of another dtype."""
    x, rest = args[0], [*args[1:], *kwargs.values()]
    name = func.__name__
    if name in ("view_as", "reshape_as"):
        return list(rest[0].shape)
    if name == "flatten" or name == "ravel":
        bounds = [*rest, *(0, -1)[len(rest) :]]
        start, end = bounds[0], bounds[1]
        start, end = start % max(x.dim(), 1), end % max(x.dim(), 1)
        return [*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]]
    if name == "unflatten":
        dim = rest[0] % x.dim()
        return [*x.shape[:dim], *_filled(_sizes((rest[1],)), x.shape[dim]), *x.shape[dim + 1 :]]
    if rest and isinstance(rest[0], torch.dtype):
        return None
    return _filled(_sizes(rest), x.numel())


def _filled(sizes: list[int], total: int) -> list[int]:
    if -1 in sizes:
        known = prod(s for s in sizes if s != -1)
        sizes = [total // max(known, 1) if s == -1 else s for s in sizes]
    return sizes


def _suggest(work: Any, x: View, layout: Cut, shape: list[int]) -> None:
    """Why a reshape did not fit: pieces that may not be broken, or fused blocks (planning cuts accordingly)."""
    group = reshape_group(layout.dim, tuple(x.shape), shape)
    if group is None:
        return
    after = [n for n in shape[group[1][0] : group[1][1]] if n != 1]
    if len(after) < 2:
        return
    if layout.parts == 1 and after[0] >= layout.ranks:
        work.units(x, after[0])
    elif layout.parts == after[0]:
        work.units(x, after[1])
    else:
        work.blocks(x, (layout.size // after[0],) * after[0])


@rule("expand", "expand_as", "broadcast_to")
def expand(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rest = args[0], [*args[1:], *kwargs.values()]
    if not isinstance(x, View):  # expand_as a cut tensor: only its shape counts
        return x.expand(rest[0].shape)
    sizes = list(rest[0].shape) if func.__name__ == "expand_as" else _sizes(rest)
    layout, added = x._mw_layout, len(sizes) - x.dim()
    if not isinstance(layout, Cut):
        return moved(work, x, x._mw_local.expand(sizes), [None] * len(sizes))
    if layout.size == 1 and sizes[layout.dim + added] != 1:
        return NotImplemented
    sizes[layout.dim + added] = -1
    return work.view(x._mw_local.expand(sizes), layout.on(layout.dim + added))


@rule("broadcast_tensors")
def broadcast_tensors(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    return tuple(t if t.shape == shape else t.expand(shape) for t in tensors)


@rule("as_strided")
def as_strided(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the strides of one device: of the whole tensor, whose own elements are all that there is."""
    names = named("input size stride storage_offset", args, kwargs)
    x, size, stride, first = names["input"], names["size"], names["stride"], names.get("storage_offset")
    if not isinstance(x, View):
        return NotImplemented
    if isinstance(x._mw_layout, Partial):
        return work.view(x._mw_local.as_strided(size, stride, first), PARTIAL)
    first = 0 if first is None else first - x.storage_offset()
    last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    dense = order(tuple(x.shape), x.stride()) is not None and last < x.numel()
    itself = first == 0 and (tuple(size), tuple(stride)) == (tuple(x.shape), x.stride())
    if first < 0 or not (dense or itself or 0 in size):
        raise NotImplementedError("as_strided of a tensor that is cut, to elements that are not its own")
    return work.fallback(_strided_from, (x, size, stride, first), {})


def _strided_from(x: Tensor, size: Sequence[int], stride: Sequence[int], first: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + first)


_strided_from.__name__ = "as_strided"  # as a fallback is counted


@rule("repeat", "tile")
def repeat(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, times = args[0], _sizes([*args[1:], *kwargs.values()])
    times = [1] * (x.dim() - len(times)) + times
    local = x._mw_local.repeat(times)
    layout, added = x._mw_layout, len(times) - x.dim()
    if not isinstance(layout, Cut):
        return moved(work, x, local, [None] * len(times))
    dim = layout.dim + added
    return work.view(local, Cut(dim, layout.pieces * times[dim]))


@rule("repeat_interleave")
def repeat_interleave(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("input repeats dim", args, kwargs)
    x, times, dim = names["input"], names.get("repeats"), names.get("dim")
    if not isinstance(x, View) or not isinstance(times, int) or dim is None:
        return NotImplemented
    local, layout, dim = x._mw_local.repeat_interleave(times, dim), x._mw_layout, dim % x.dim()
    if not isinstance(layout, Cut):
        return moved(work, x, local, [None] * x.dim())
    if layout.dim != dim:
        return work.view(local, layout)
    return work.view(local, Cut(dim, tuple(tuple(n * times for n in piece) for piece in layout.pieces)))


@rule("cat", "concat", "concatenate")
def cat(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    # Torch skips empty vectors, whatever the rank of the others; their type counts.
    kept = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)]
    skipped = [work.whole(t) for t in tensors if t.dim() == 1 and t.shape[0] == 0]
    if isinstance(dim, str) or not kept or kwargs.get("out") is not None:
        return NotImplemented
    dim %= kept[0].dim()
    layouts = [work.layout(t) for t in kept]
    if all(isinstance(layout, Partial) for layout in layouts):
        return work.view(torch.cat([*skipped, *(t._mw_local for t in kept)], dim), PARTIAL)
    cuts = [(layout, t.numel()) for t, layout in zip(kept, layouts, strict=True) if isinstance(layout, Cut)]
    if not cuts:
        return torch.cat([*skipped, *map(work.whole, kept)], dim)
    target = max(cuts, key=lambda pair: pair[1])[0]
    if target.dim != dim:
        return work.view(torch.cat([*skipped, *(work.cut(t, target) for t in kept)], dim), target)
    if all(isinstance(layout, Cut) and layout.dim == dim for layout in layouts):
        pieces = tuple(piece for layout in layouts for piece in layout.pieces)
        return work.view(torch.cat([*skipped, *(t._mw_local for t in kept)], dim), Cut(dim, pieces))
    return NotImplemented


@rule("stack")
def stack(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if kwargs.get("out") is not None:
        return NotImplemented
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


@rule("flip", "roll", "tril", "triu")
def along_dims(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Local where the cut dim is not among the dims these work on."""
    x, layout, name = args[0], work.layout(args[0]), func.__name__
    if isinstance(layout, Partial):
        return work.view(func(x._mw_local, *args[1:], **kwargs), PARTIAL)
    if not isinstance(layout, Cut):
        return NotImplemented
    if name == "flip":
        dims = _sizes(args[1:] or (kwargs["dims"],))
    elif name == "roll":
        given = args[2] if len(args) > 2 else kwargs.get("dims")
        dims = list(range(x.dim())) if given is None else _sizes(given if isinstance(given, tuple) else (given,))
    else:
        dims = [-2, -1]
    if layout.dim in [d % x.dim() for d in dims]:
        return NotImplemented
    return work.view(func(x._mw_local, *args[1:], **kwargs), layout)


def _sizes(given: Sequence[Any]) -> list[int]:
    """Sizes given as separate arguments or as one sequence."""
    if len(given) == 1 and isinstance(given[0], (tuple, list, torch.Size)):
        return [int(s) for s in given[0]]
    return [int(s) for s in given]
