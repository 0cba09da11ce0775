"""Batches: the tensors in them, copies of them, and what a forward wrote to them.

A model may write to its inputs. On one device the caller's batch then changes, once a step. So it does here: whatever runs a
forward besides a step (planning, trials, recordings, another stage of the same rank) runs it on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.private import pytree, storage_of, version

_DEPTH = 4  # how far into objects to look


def plain(batch: Any) -> Any:
    """A batch as torch's containers know it: a mapping (a tokenizer's encoding, a ``UserDict``) as a dict."""
    known = type(batch) in pytree.SUPPORTED_NODES
    return dict(batch) if isinstance(batch, Mapping) and not known else batch


def mapped(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """A new batch with ``fn`` of each tensor; an object that has tensors (a dataclass, a mapping) becomes a copy of itself."""
    return pytree.tree_map(lambda leaf: _mapped(fn, leaf, _DEPTH), batch)


def _mapped(fn: Callable[[Tensor], Any], leaf: Any, depth: int) -> Any:
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if not _tensors(leaf, depth):
        return leaf
    made = copy.copy(leaf)
    for name, value in vars(leaf).items():
        object.__setattr__(made, name, pytree.tree_map(lambda x: _mapped(fn, x, depth - 1), value))
    return made


def tensors_in(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in its order."""
    return [t for leaf in pytree.tree_leaves(batch) for t in _tensors(leaf, _DEPTH)]


def _tensors(leaf: Any, depth: int) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [leaf]
    if not depth or isinstance(leaf, (nn.Module, type)) or not isinstance(getattr(leaf, "__dict__", None), dict):
        return []
    return [t for x in pytree.tree_leaves(list(vars(leaf).values())) for t in _tensors(x, depth - 1)]


def form_of(batch: Any) -> Hashable:
    """What a batch is told by but for sizes and values of its tensors: how it nests, types, and what else is in it."""
    leaves, spec = pytree.tree_flatten(batch)
    told = ((x.dtype, x.dim()) if isinstance(x, Tensor) else _constant(x) for x in leaves)
    return str(spec), tuple(told)


def spelled_form(batch: Any) -> str:
    """The names, types and shapes of a batch's tensors, in words."""
    named = zip(names_in(batch), tensors_in(batch), strict=True)
    return ", ".join(f"{name}: {str(t.dtype).removeprefix('torch.')} {_shape(t)}" for name, t in named)


def _shape(t: Tensor) -> str:
    return "nested" if t.is_nested else str(tuple(t.shape))


def _constant(x: Any) -> Any:
    """A constant as it is; of anything else, its type."""
    return x if isinstance(x, (str, bool, int, type(None))) else type(x)


def names_in(batch: Any) -> list[str]:
    """What each tensor of a batch is called: ``x``, ``1``, ``images.0``."""
    names = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        names += [name] if isinstance(leaf, Tensor) else [f"{name}.{i}" for i in range(len(_tensors(leaf, _DEPTH)))]
    return names


def with_shared(batch: Any, names: Collection[str]) -> Any:
    """A batch in which the tensors of these names are known to have no rows: all rows share them. Their memory is the same."""
    if not names:
        return batch
    left = iter(names_in(batch))
    return mapped(lambda t: _shared(_as(t, t.view_as(t))) if next(left) in names else t, batch)


def _as(t: Tensor, same: Tensor) -> Tensor:
    """Another tensor of the same values, which remembers them if ``t`` does."""
    host = host_of(t)
    return same if host is None or host is t else with_host(same, host)


def check_device(batch: Any, device: torch.device) -> None:
    """Raises PlanError if no tensor of a batch is on the device. Some may be elsewhere: torch wants lengths on the CPU."""
    tensors = tensors_in(batch)
    if not tensors or any(t.device == device for t in tensors):
        return
    raise PlanError.of(
        "this batch",
        where=", ".join(names_in(batch)[:4]),
        given=f"on {', '.join(sorted({str(t.device) for t in tensors}))}",
        required=f"on {device}, as the model",
        fix=f"t.to({str(device)!r}) for each tensor; job.batches(...) does it",
    )


def moved(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of a batch on a device, which remembers its values on the host."""
    there = t.to(device, non_blocking=True)
    return t if there is t else with_host(there, t)


def with_host(t: Tensor, host: Tensor) -> Tensor:
    """A tensor of a batch that remembers its values on the host, for as long as nothing writes to either: what is counted of
    them is then counted there, and no device is waited for."""
    t._mw_host = host, version(t), version(host)  # type: ignore[attr-defined]
    return t


def host_of(t: Tensor) -> Tensor | None:
    """The values of a tensor on the host: itself, or what it remembers; None if they are on its device alone."""
    if t.device.type == "cpu":
        return t
    host, *then = getattr(t, "_mw_host", (None,))
    return host if host is not None and then == [version(t), version(host)] else None


def _shared(t: Tensor) -> Tensor:
    t._mw_shared = True  # type: ignore[attr-defined]
    return t


def has_rows(t: Tensor, rows: int) -> bool:
    """Whether a tensor of a batch of so many rows has a slice for each of them (dim 0), and is not shared by all."""
    return t.dim() > 0 and t.shape[0] == rows and not getattr(t, "_mw_shared", False)


def doubled(batch: Any, rows: int) -> Any:
    """A batch of ``rows`` rows with each row twice: all of them, and all of them again."""
    return mapped(lambda t: torch.cat([t, t]) if has_rows(t, rows) else t, batch)


def reversed_rows(batch: Any, rows: int) -> Any:
    """A batch of ``rows`` rows with its rows in the opposite order."""
    return mapped(lambda t: t.flip(0) if has_rows(t, rows) else t, batch)


def rolled_rows(batch: Any, rows: int) -> Any:
    """A batch of ``rows`` rows that begins with its last row."""
    return mapped(lambda t: t.roll(1, 0) if has_rows(t, rows) else t, batch)


@torch.no_grad()
def place_rows(batch: Any, rows: int, places: Sequence[int]) -> Any:
    """Puts into each row of a batch of ``rows`` rows what stands at a place of it, in its memory: tensors that share
    memory go on sharing it. Returns the batch."""
    tensors = [t for t in tensors_in(batch) if has_rows(t, rows) and t.layout is torch.strided and not _repeats(t)]
    for t, rows_to_be in [(t, t[torch.tensor(places, device=t.device)]) for t in tensors]:
        t.copy_(rows_to_be)
    return batch


def _repeats(t: Tensor) -> bool:
    """Whether several elements of a tensor are one in memory, as those of an expanded one are."""
    return any(size > 1 and not stride for size, stride in zip(t.shape, t.stride(), strict=True))


def joined(batches: Sequence[Any]) -> Any:
    """A batch with the rows of several, in turn; of what has no rows, that of the first. None: they are not of one kind."""
    each = [tensors_in(batch) for batch in batches]
    rows = [next((t.shape[0] for t in tensors if t.dim() and has_rows(t, t.shape[0])), 0) for tensors in each]
    if len(set(map(len, each))) > 1:
        return None
    try:
        made = iter([torch.cat(ts) if has_rows(ts[0], rows[0]) else ts[0] for ts in zip(*each, strict=True)])
    except RuntimeError:  # sizes that differ beside the rows
        return None
    return mapped(lambda _: next(made), batches[0])


def copied(batch: Any) -> Any:
    """A batch with memory of its own: what is written to it is not written to the other.

    Tensors that share memory in the one share memory in the other (labels that are another slice of the same tokens).
    """
    together: dict[Any, dict[int, Tensor]] = {}
    for t in tensors_in(batch):
        together.setdefault(_memory(t), {})[id(t)] = t
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for sharing in together.values():
            made |= zip(sharing, _copied(list(sharing.values())), strict=True)
    return mapped(lambda t: made[id(t)], batch)


def _memory(t: Tensor) -> Any:
    return (storage_of(t), t.dtype) if t.layout is torch.strided and type(t) is Tensor and t.numel() else id(t)


def _copied(sharing: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors that share their memory."""
    if len(sharing) == 1:
        made = [sharing[0].detach().clone()]
    else:
        first = min(t.storage_offset() for t in sharing)
        last = max(
            t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in sharing
        )
        memory = sharing[0].detach().as_strided((last - first + 1,), (1,), first).clone()
        made = [memory.as_strided(t.shape, t.stride(), t.storage_offset() - first) for t in sharing]
    made = [_as(t, m.requires_grad_(t.requires_grad)) for m, t in zip(made, sharing, strict=True)]
    return [_shared(m) if getattr(t, "_mw_shared", False) else m for m, t in zip(made, sharing, strict=True)]


def differs(copy: Any, batch: Any, before: Sequence[int | None]) -> frozenset[int]:
    """Which tensors of a copy a forward has written, as ``written``; also past autograd's counting (``.data``)."""
    pairs = zip(tensors_in(copy), tensors_in(batch), strict=True)
    other = {i for i, (a, b) in enumerate(pairs) if not (a.is_meta or b.is_meta or torch.equal(a, b))}
    return frozenset(other.union(written(copy, before)))


def as_given(batch: Any) -> Any:
    """A batch in the same memory, which keeps its shapes whatever a forward does to those of the batch (``unsqueeze_``)."""
    return mapped(torch.Tensor.detach, batch)


def versions(batch: Any) -> list[int | None]:
    """How often each tensor of a batch has been written, to tell later whether one was."""
    return [version(t) for t in tensors_in(batch)]


def written(batch: Any, before: Sequence[int | None]) -> list[int]:
    """Which tensors of a batch have been written since, by their places in it. ``before``: its ``versions`` then."""
    return [i for i, (now, then) in enumerate(zip(versions(batch), before, strict=True)) if now != then]
