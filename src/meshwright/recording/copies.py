"""Copies of a step's tensors on the host. Nothing in this file waits for another rank.

before the first step   every parameter
before a step           every gradient, as the optimizer gets it
after a step            every parameter that the optimizer holds
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import in_one_dim
from meshwright.private import pytree
from meshwright.recording.layout import Layout, layout_of
from meshwright.runtime.weights.parameters import local_tensor

Plain = float | int | bool | str | None


@dataclass(frozen=True)
class TensorCopy:
    """A copy of this rank's part of a tensor, on the host.

    Attributes:
        layout: of the tensor over ranks.
        dtype: of the tensor.
        local: the copy; None if this rank has no such tensor.
        local_shape: of this rank's part of the parameter.
    """

    layout: Layout
    dtype: torch.dtype
    local: Tensor | None
    local_shape: tuple[int, ...]

    @property
    def hollow(self) -> bool:
        """Whether the rank has no tensor and its part has no elements: a rank's shard of a flat parameter may be empty."""
        return self.local is None and 0 in self.local_shape and not self.layout.gathers

    def full_tensor(self) -> Tensor | None:
        """The full tensor. Zeros replace this rank's part if it has no tensor. Collective, if the layout gathers."""
        local = torch.zeros(self.local_shape, dtype=self.dtype) if self.local is None else self.local
        return self.layout.full_tensor(local)


@dataclass(frozen=True)
class Loss:
    """A loss that this rank passed to ``Recording.loss``.

    Attributes:
        value: the loss.
        dtype: of the loss, such as ``float32``.
        rows: number of rows that it is the mean of, if known.
    """

    value: float
    dtype: str
    rows: int | None


@dataclass
class CopiedStep:
    """One step of this rank's optimizers.

    Attributes:
        gradients: name → copy, before the step.
        parameters: name → copy, after the step.
        stepped: names of the parameters that some optimizer holds.
        losses: in the order of the calls.
        rows: digests of the rows of its batches, in order.
        settings: class and groups of each optimizer.
        notes: texts for a reader.
    """

    gradients: dict[str, TensorCopy] = field(default_factory=dict)
    parameters: dict[str, TensorCopy] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)
    losses: list[Loss] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)


def copied(t: Tensor | None, like: Tensor, layout: Layout | None = None, scale: Tensor | None = None) -> TensorCopy:
    """A copy of a parameter or gradient.

    Args:
        t: the tensor; None if the parameter has no gradient.
        like: the parameter, which gives dtype and layout if ``t`` is None.
        layout: of a job's parameter; default: that of the tensor itself.
        scale: of a GradScaler. The copy is divided by it.
    """
    if t is None or (layout is not None and not layout.holds):
        shape = (0,) if layout is not None and not layout.holds else tuple(local_tensor(like).shape)
        return TensorCopy(layout or layout_of(like), like.dtype, None, shape)
    local = local_tensor(t.detach())
    local = (local.to_dense() if local.layout != torch.strided else local).to("cpu", copy=True)
    if scale is not None:
        local = local / scale.cpu().to(local.dtype)
    return TensorCopy(layout or layout_of(t), t.dtype, local.contiguous(), tuple(local.shape))


def loss_value(loss: Tensor | float, rows: int | None) -> Loss:
    """A loss as a number. Of a DTensor, the whole value.

    Raises:
        ValueError: it has more than one element.
    """
    if not isinstance(loss, Tensor):
        return Loss(float(loss), "float64", rows)
    if loss.numel() != 1:
        raise ValueError(f"rec.loss takes one number, given a tensor of {tuple(loss.shape)}")
    full_tensor = getattr(loss, "full_tensor", None)  # of a DTensor
    value = loss.detach() if full_tensor is None else full_tensor().detach()
    return Loss(float(value.double().item()), str(loss.dtype).removeprefix("torch."), rows)


def digests_of_rows(batch: Any) -> list[str]:
    """A short digest of each row of a batch: of everything in it that has rows, by its first dim.

    Raises ValueError where the batch has no tensor with rows.
    """
    tensors = [t.detach().cpu() for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise ValueError("rec.loss(batch=...) takes a tensor with rows, or a dict, list or tuple of such")
    count = tensors[0].shape[0]
    with_rows = [t.contiguous() for t in tensors if t.shape[0] == count]
    return [_digest([t[row] for t in with_rows]) for row in range(count)]


def _digest(parts: Sequence[Tensor]) -> str:
    """A hash of the dtypes, shapes and values of some tensors, as hexadecimal text."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
        digest.update(in_one_dim(part).view(torch.uint8).numpy().tobytes() if part.numel() else b"")
    return digest.hexdigest()


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's class, and the settings of each group that change its result."""
    groups = [dict(_settings(group)) for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


# Entries of a group that are no settings, or do not change the result.
_IGNORED = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


def _settings(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of each setting of a group that is a plain value or a scalar tensor."""
    for key, value in group.items():
        if key in _IGNORED:
            continue
        if isinstance(value, Tensor) and value.numel() == 1:
            value = local_tensor(value.detach()).item()
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, Plain) or (isinstance(value, list) and all(isinstance(v, Plain) for v in value)):
            yield str(key), value
