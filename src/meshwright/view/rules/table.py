"""Tables looked up by index: cut by rows (the vocabulary), a partial sum comes out; cut by columns, a cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import PARTIAL, Cut
from meshwright.view.rules.registry import named, rule


@rule("embedding")
def embedding(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # torch.embedding(weight, indices, …)
        order = "weight input padding_idx scale_grad_by_freq sparse"
    names = named(order, args, kwargs)
    names["input"] = names.pop("indices", names.get("input"))
    if names.get("max_norm") is not None or names.get("scale_grad_by_freq") or names.get("sparse"):
        return NotImplemented
    index, weight = names["input"], work.table(names["weight"])
    layout, place, padding = work.layout(weight), work.layout(index), names.get("padding_idx")
    if padding is not None and padding < 0:
        padding = padding + weight.shape[0] if func is functional.embedding else None
    if not isinstance(layout, Cut):
        if not isinstance(place, Cut):
            return functional.embedding(work.whole(index), work.whole(weight), padding)
        return work.view(functional.embedding(index._mw_local, work.varying(weight), padding), place)
    index = work.whole(index)
    work.used_as(weight, "column" if layout.dim == 1 else "row")
    if layout.dim == 1:
        return work.view(functional.embedding(index, weight._mw_local, padding), layout.on(index.dim()))
    if layout.parts != 1:
        return NotImplemented
    return work.view(_rows(work, index, weight._mw_local, layout, padding), PARTIAL)


def _rows(work: Any, index: Tensor, weight: Tensor, layout: Cut, padding: int | None) -> Tensor:
    """This rank's rows where the index names one; zeros elsewhere."""
    start = sum(layout.pieces[0][: work.axis.rank])
    local = index - start
    mine = (local >= 0) & (local < weight.size(0))
    if not weight.size(0):  # a row to look at: torch refuses a table without rows
        weight = torch.cat([weight, weight.new_zeros(1, weight.size(1))])
    local = torch.where(mine, local, torch.zeros_like(local))
    found = functional.embedding(local, weight)
    if padding is not None:  # the padding row is read but gets no gradient
        found = torch.where((index == padding).unsqueeze(-1), found.detach(), found)
    return torch.where(mine.unsqueeze(-1), found, torch.zeros_like(found))
