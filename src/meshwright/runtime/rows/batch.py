"""Batches: the tensors in them, their rows, copies, and writes of a forward to them.

A model may write to its inputs. On one device the caller's batch then changes once a step. It must change once here, too. So
every other forward (planning, trials, recordings, another stage of the same rank) runs on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.structure import copied_together, snapshot
from meshwright.described import dense, is_sparse
from meshwright.errors import PlanError
from meshwright.private import pytree, version

_DEPTH = 4  # how many objects to look into, one within the other


def plain(batch: Any) -> Any:
    """A batch in containers that pytree knows: another mapping (a tokenizer's encoding, a ``UserDict``) becomes a dict."""
    is_known = type(batch) in pytree.SUPPORTED_NODES
    return dict(batch) if isinstance(batch, Mapping) and not is_known else batch


def mapped(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """A new batch with ``fn(t)`` for each tensor t. An object with tensors (a dataclass, a mapping) becomes a copy."""
    return pytree.tree_map(lambda leaf: _mapped(fn, leaf, _DEPTH), batch)


def _mapped(fn: Callable[[Tensor], Any], leaf: Any, depth: int) -> Any:
    """``mapped`` for a leaf of pytree: a tensor, an object with tensors, or anything else."""
    if isinstance(leaf, Tensor):
        return fn(leaf)
    if not _tensors(leaf, depth):
        return snapshot(leaf, fn)  # a forward may put tensors into an object of the model's that has none yet
    result = copy.copy(leaf)
    for name, value in vars(leaf).items():
        object.__setattr__(result, name, pytree.tree_map(lambda x: _mapped(fn, x, depth - 1), value))
    return result


def tensors_in(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in its order."""
    return [t for leaf in pytree.tree_leaves(batch) for t in _tensors(leaf, _DEPTH)]


def _tensors(leaf: Any, depth: int) -> list[Tensor]:
    """``tensors_in`` for a leaf of pytree. ``depth``: how many objects to look into, one within the other."""
    if isinstance(leaf, Tensor):
        return [leaf]
    if not depth or isinstance(leaf, (nn.Module, type)) or not isinstance(getattr(leaf, "__dict__", None), dict):
        return []
    return [t for x in pytree.tree_leaves(list(vars(leaf).values())) for t in _tensors(x, depth - 1)]


def form_of(batch: Any) -> Hashable:
    """The structure, dtypes, numbers of dims and constants of a batch, as a key; sizes and values of tensors are no part."""
    leaves, spec = pytree.tree_flatten(batch)
    facts = ((x.dtype, x.dim()) if isinstance(x, Tensor) else _constant(x) for x in leaves)
    return str(spec), tuple(facts)


def spelled_form(batch: Any) -> str:
    """The names, types and shapes of a batch's tensors, in words."""
    named = zip(names_in(batch), tensors_in(batch), strict=True)
    return ", ".join(f"{name}: {_type_text(t)} {_shape_text(t)}" for name, t in named)


def _type_text(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.") + (" with a gradient" if t.requires_grad else "")


def _shape_text(t: Tensor) -> str:
    return "nested" if t.is_nested else str(tuple(t.shape))


def _constant(x: Any) -> Any:
    """A constant; of anything else, its type."""
    return x if isinstance(x, (str, bool, int, type(None))) else type(x)


def names_in(batch: Any) -> list[str]:
    """The name of each tensor of a batch: ``x``, ``1``, ``images.0``."""
    names = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        names += [name] if isinstance(leaf, Tensor) else [f"{name}.{i}" for i in range(len(_tensors(leaf, _DEPTH)))]
    return names


def with_shared(batch: Any, names: Collection[str]) -> Any:
    """A batch in the same memory whose tensors with these names are marked as shared by all rows: they have no rows."""
    if not names:
        return batch
    all_names = iter(names_in(batch))

    def marked(t: Tensor) -> Tensor:
        # A sparse tensor cannot be viewed, and needs no mark: it never has rows.
        is_named = next(all_names) in names
        return _marked_shared(_with_host_of(t, t.view_as(t))) if is_named and not is_sparse(t) else t

    return mapped(marked, batch)


def _with_host_of(t: Tensor, equal: Tensor) -> Tensor:
    """``equal``, a tensor with the values of ``t``, which now remembers the host copy of ``t`` if there is one."""
    host = host_of(t)
    return equal if host is None or host is t else with_host(equal, host)


def check_device(batch: Any, device: torch.device) -> None:
    """Raises PlanError if no tensor of a batch is on the device. Some may be elsewhere: torch needs lengths on the CPU."""
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
    """A tensor of a batch, copied to a device, which remembers its host copy."""
    device_copy = t.to(device, non_blocking=True)
    return t if device_copy is t else with_host(device_copy, t)


def with_host(t: Tensor, host: Tensor) -> Tensor:
    """The tensor, which now remembers its host copy, as long as nothing writes to either. Labels are then counted on the host,
    without waiting for the device."""
    t._mw_host = host, version(t), version(host)  # type: ignore[attr-defined]
    return t


def host_of(t: Tensor) -> Tensor | None:
    """The host copy of a tensor, or the tensor itself if it is on the CPU; None if its values are only on its device."""
    if t.device.type == "cpu":
        return t
    host, *versions_then = getattr(t, "_mw_host", (None,))
    return host if host is not None and versions_then == [version(t), version(host)] else None


def as_leaf(t: Tensor) -> Tensor:
    """A leaf of autograd in the memory of a tensor of a batch, which requires a gradient."""
    return _marked_like(t, t.detach().requires_grad_())


def _marked_shared(t: Tensor) -> Tensor:
    t._mw_shared = True  # type: ignore[attr-defined]
    return t


def has_rows(t: Tensor, rows: int) -> bool:
    """Whether a tensor of a batch with so many rows has a slice for each row (dim 0), and is not shared by all rows. A sparse
    one is shared (the edges of a graph): it cannot be sliced."""
    return t.dim() > 0 and t.shape[0] == rows and not is_sparse(t) and not getattr(t, "_mw_shared", False)


def rows_in_another_dim(batch: Any, rows: int) -> list[str]:
    """The names of tensors without rows (dim 0), of which another dim is as large as the number of rows: the hidden states of
    ``nn.LSTM``, for example."""
    named = zip(names_in(batch), tensors_in(batch), strict=True)
    return [name for name, t in named if not has_rows(t, rows) and rows > 1 and rows in t.shape[1:]]


def doubled(batch: Any, rows: int) -> Any:
    """A batch with ``2 * rows`` rows: all rows, then all rows again."""
    return mapped(lambda t: torch.cat([t, t]) if has_rows(t, rows) else t, batch)


def reversed_rows(batch: Any, rows: int) -> Any:
    """A batch with its rows in reversed order."""
    return mapped(lambda t: t.flip(0) if has_rows(t, rows) else t, batch)


def rolled_rows(batch: Any, rows: int) -> Any:
    """A batch whose last row is moved to the front."""
    return mapped(lambda t: t.roll(1, 0) if has_rows(t, rows) else t, batch)


@torch.no_grad()
def place_rows(batch: Any, rows: int, sources: Sequence[int]) -> Any:
    """Overwrites row i of a batch by row ``sources[i]``, in place: tensors that share memory still share it. Returns the
    batch."""
    tensors = [t for t in tensors_in(batch) if has_rows(t, rows) and t.layout is torch.strided and not _repeats(t)]
    for t, new_rows in [(t, t[torch.tensor(sources, device=t.device)]) for t in tensors]:
        t.copy_(new_rows)
    return batch


def _repeats(t: Tensor) -> bool:
    """Whether several elements of a tensor have one address, as in an expanded tensor."""
    return any(size > 1 and not stride for size, stride in zip(t.shape, t.stride(), strict=True))


def joined(batches: Sequence[Any]) -> Any:
    """A batch with the rows of several batches, in order; tensors without rows are those of the first. None if the batches do
    not fit together."""
    tensor_lists = [tensors_in(batch) for batch in batches]
    rows = [next((t.shape[0] for t in tensors if t.dim() and has_rows(t, t.shape[0])), 0) for tensors in tensor_lists]
    if len(set(map(len, tensor_lists))) > 1:
        return None
    results: list[Tensor] = []
    try:
        for tensors in zip(*tensor_lists, strict=True):
            results.append(torch.cat(tensors) if has_rows(tensors[0], rows[0]) else tensors[0])
    except RuntimeError:  # sizes of other dims differ
        return None
    return with_tensors(batches[0], results)


def with_tensors(batch: Any, tensors: Sequence[Tensor]) -> Any:
    """A batch of this form with other tensors, in order."""
    remaining = iter(tensors)
    return mapped(lambda _: next(remaining), batch)


@dataclass(frozen=True)
class HostTensor:
    """A tensor of a batch, copied to the host, to send to other ranks.

    Attributes:
        values: on the host.
        on_device: whether the tensor was on a device.
        requires_grad: whether the tensor required gradients.
        is_shared: whether all rows share the tensor.
    """

    values: Tensor
    on_device: bool
    requires_grad: bool
    is_shared: bool

    @classmethod
    def of(cls, t: Tensor) -> HostTensor:
        """A copy of a tensor."""
        is_shared = getattr(t, "_mw_shared", False)
        return cls(t.detach().cpu().clone(), t.device.type != "cpu", t.requires_grad, is_shared)

    def on(self, device: torch.device) -> Tensor:
        """The tensor on the device of another rank; on the host, if it was there. Remembers its host copy."""
        t = moved(self.values, device if self.on_device else self.values.device).requires_grad_(self.requires_grad)
        return _marked_shared(t) if self.is_shared else t


def copied(batch: Any) -> Any:
    """A copy of a batch in new memory.

    Tensors that share memory in the batch share memory in the copy (labels that are another slice of the same tokens).
    """
    tensors = {id(t): t for t in tensors_in(batch)}
    with torch.no_grad():
        copies = dict(zip(tensors, copied_together(list(tensors.values())), strict=True))
    return mapped(lambda t: _marked_like(t, copies[id(t)].requires_grad_(t.requires_grad)), batch)


def _marked_like(t: Tensor, equal: Tensor) -> Tensor:
    """``equal``, a tensor with the values of ``t``, with all that is noted of ``t``."""
    equal = _with_host_of(t, equal)
    return _marked_shared(equal) if getattr(t, "_mw_shared", False) else equal


def changed_tensors(copy: Any, batch: Any, before: Sequence[int | None]) -> frozenset[int]:
    """The positions of the tensors of a copy that a forward has written, including writes that autograd does not count
    (``.data``).

    Args:
        batch: the batch that was copied, which the forward has not written.
        before: the ``versions`` of the copy before the forward.
    """
    pairs = zip(tensors_in(copy), tensors_in(batch), strict=True)
    unequal = {i for i, (a, b) in enumerate(pairs) if not (a.is_meta or b.is_meta or torch.equal(dense(a), dense(b)))}
    return frozenset(unequal.union(written_tensors(copy, before)))


def with_new_tensors(batch: Any) -> Any:
    """A batch in the same memory with new tensor objects, whose shapes stay if a forward changes those of the batch
    (``unsqueeze_``)."""
    return mapped(torch.Tensor.detach, batch)


def versions(batch: Any) -> list[int | None]:
    """The version counter of each tensor of a batch."""
    return [version(t) for t in tensors_in(batch)]


def written_tensors(batch: Any, before: Sequence[int | None]) -> list[int]:
    """The positions of the tensors of a batch that have been written since it had the ``versions`` ``before``."""
    return [i for i, (now, then) in enumerate(zip(versions(batch), before, strict=True)) if now != then]
