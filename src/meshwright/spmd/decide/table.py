"""Embeddings. If the table is sharded by rows (the vocabulary), the result is a partial sum; if by columns, it is sharded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import PARTIAL, Shard
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decision import GATHER, Answer, Choice, Decision, use_local, use_replicated, use_varying
from meshwright.spmd.signature import Call, Operand, is_undecided, layout_of


@decider("embedding")
def embedding(call: Call) -> Answer:
    """Looks up rows of a table that is whole, or sharded by rows or by columns."""
    order = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    first = call.args[0] if call.args else None
    if isinstance(first, Operand) and first.dtype.is_floating_point:  # torch.embedding(weight, indices, …)
        order = "weight input padding_idx scale_grad_by_freq sparse"
    names = named(order, call.args, call.kwargs)
    names["input"] = names.pop("indices", names.get("input"))
    if names.get("max_norm") is not None or names.get("scale_grad_by_freq") or names.get("sparse"):
        return GATHER
    index, weight, padding = names["input"], names["weight"], names.get("padding_idx")
    layout, run = layout_of(weight), functional.embedding
    if padding is not None and padding < 0:
        padding = padding + weight.shape[0] if call.func is run else None
    choices = (Choice(weight.index, table=True),) if is_undecided(weight) else ()
    if not isinstance(layout, Shard):
        if not isinstance(index.layout, Shard):
            return Decision(run, (use_replicated(index), use_replicated(weight), padding), {}, choices=choices)
        return Decision(run, (use_local(index), use_varying(weight), padding), {}, index.layout, choices=choices)
    if layout.dim == 1:
        roles = ((weight.index, "column"),)
        return Decision(
            run, (use_replicated(index), use_local(weight), padding), {}, layout.on(index.dim()), roles=roles
        )
    if layout.parts != 1:
        return GATHER
    start = sum(layout.pieces[0][: call.rank])
    args = (use_replicated(index), use_local(weight), start, padding)
    return Decision(_rows, args, {}, PARTIAL, roles=((weight.index, "row"),))


def _rows(index: Tensor, weight: Tensor, start: int, padding: int | None) -> Tensor:
    """The rows of the table that ``index`` names, if this rank holds them; zeros for the others.

    Args:
        index: indices into the whole table, of any shape.
        weight: this rank's rows of the table, from row ``start``.
        padding: the row that gets no gradient.
    """
    local = index - start
    mine = (local >= 0) & (local < weight.size(0))
    if not weight.size(0):  # torch refuses a table without rows
        weight = torch.cat([weight, weight.new_zeros(1, weight.size(1))])
    local = torch.where(mine, local, torch.zeros_like(local))
    rows = functional.embedding(local, weight)
    if padding is not None:  # the padding row is read but gets no gradient
        rows = torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)
    return torch.where(mine.unsqueeze(-1), rows, torch.zeros_like(rows))
