"""``Style``: what is known about how to shard one parameter over ``tp``. ``ParameterShards``: the shards of all parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from torch import nn

from meshwright.layout import Shard, even_shard
from meshwright.spmd.comm import Ledger

AS_SAID = "as the plan says"


@dataclass(frozen=True)
class Style:
    """What is known about how to shard a parameter.

    Attributes:
        kind: ``auto``, ``column``, ``row``, ``shard`` (of ``dim``) or ``replicate``.
        dim: the parameter's dim to shard, if kind is ``shard``.
        blocks: sizes of the fused blocks along that dim, or the number of equal blocks.
        units: the number of indivisible pieces in each block (attention heads, for example).
        forced: whether the plan says so, rather than the planner.
        reason: why, as text for a person.
    """

    kind: str = "auto"
    dim: int | None = None
    blocks: tuple[int, ...] | int | None = None
    units: int | None = None
    forced: bool = False
    reason: str = ""


@dataclass(frozen=True)
class ParameterShards:
    """The shards of a model's parameters.

    Attributes:
        layouts: parameter → its layout; replicated parameters have no entry.
        reasons: parameter → why it is sharded so, or replicated.
        ledger: the collectives of the last forward.
        reads: how many values the last forward read.
        refused: parameter → why it cannot be sharded as the plan says.
        selects: how many sizes in the last forward depended on values (of tensors that masks select, for example).
    """

    layouts: Mapping[str, Shard]
    reasons: Mapping[str, str]
    ledger: Ledger
    reads: int
    refused: Mapping[str, str]
    selects: int


def dims_of_style(kind: str, rank: int) -> list[int]:
    """The dims that ``column`` or ``row`` may shard, best first. Torch's weights have dims (output, input, …)."""
    dims = list(range(rank))
    return dims if kind == "column" else [*dims[1:2], *dims[:1], *dims[2:]]


def shard_in_style(style: Style, dim: int, size: int, ranks: int) -> Shard | str:
    """The layout of a dim of ``size`` elements that respects a style's blocks and indivisible pieces; or why there is none."""
    blocks = style.blocks or (size,)
    if isinstance(blocks, int):
        if size % blocks:
            return f"dim {dim} ({size}) is not {blocks} equal parts"
        blocks = (size // blocks,) * blocks
    blocks = blocks if sum(blocks) == size else (size,)
    units = min((gcd(style.units, b) if style.units else b for b in blocks), default=0)
    if units < ranks:
        pieces = f"{units} piece{'s' * (units != 1)} that may not be broken"
        return f"{pieces} in dim {dim} ({size}) for {ranks} ranks of tp"
    return even_shard(dim, blocks, ranks, style.units)


def shards_as_said(
    model: nn.Module, *, size: int, styles: Mapping[str, Style], names: Mapping[int, str]
) -> ParameterShards:
    """The shards that the plan names, and no others. For a forward that cannot be followed without values."""
    layouts: dict[str, Shard] = {}
    refused: dict[str, str] = {}
    for p in model.parameters():
        name = names[id(p)]
        style = styles[name]
        if not style.forced or (dim := _dim_of_style(style, p.dim())) is None:
            continue
        layout = shard_in_style(style, dim, p.shape[dim], size)
        if isinstance(layout, Shard):
            layouts[name] = layout
        else:
            refused[name] = layout
    reasons = {
        n: AS_SAID if n in layouts or (s.forced and s.kind == "replicate") else s.reason for n, s in styles.items()
    }
    return ParameterShards(layouts, reasons, Ledger(), 1, refused, 1)


def _dim_of_style(style: Style, rank: int) -> int | None:
    """The dim that a style shards, of a parameter with ``rank`` dims; None for a vector (a bias) in style column or row."""
    if style.kind == "shard":
        return style.dim if style.dim is not None and style.dim < rank else None
    return dims_of_style(style.kind, rank)[0] if style.kind in ("column", "row") and rank > 1 else None
