"""Products that sum over shared dims: linear, matmul, bmm, addmm, einsum … by one rule, ``contract``.

Every operand's dims have labels, as in einsum. Work is cut along one label:

    the label is in the result            the result is cut there; operands without it enter the cut work whole
    the label is summed over              the result is a partial sum

So a weight cut by column (its output dim) wants a whole input and gives a cut output; one cut by row (its input dim)
wants an input cut the same way and gives a partial sum (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, Cut
from meshwright.view import moves
from meshwright.view.rules.pointwise import Aligner
from meshwright.view.rules.registry import named, rule
from meshwright.view.tensor import View

Labels = Sequence[Any]


def contract(
    work: Any, operands: list[Any], labels: list[Labels], out: Labels, run: Callable[..., Tensor]
) -> tuple[Tensor, Any]:
    """``run`` on local operands, cut along one label: (local result, its layout or None for whole)."""
    locals_, layout = cut_operands(work, operands, labels, out)
    return run(*locals_), layout


def cut_operands(work: Any, operands: list[Any], labels: list[Labels], out: Labels) -> tuple[list[Tensor], Any]:
    """Local operands, cut along one label; the layout of what comes out, None for whole."""
    operands = [_decided(work, i, operands, labels, out) for i in range(len(operands))]
    label, pieces = _cut_label(work, operands, labels, out)
    if label is None:
        return [work.whole(x) for x in operands], None
    locals_ = [
        work.cut(x, Cut(list(names).index(label), pieces)) if label in names else work.varying(x)
        for x, names in zip(operands, labels, strict=True)
    ]
    return locals_, Cut(list(out).index(label), pieces) if label in out else PARTIAL


def _decided(work: Any, i: int, operands: list[Any], labels: list[Labels], out: Labels) -> Any:
    """An undecided parameter among the operands, cut to fit the others: by row, else by column (planning only)."""
    p, mine = operands[i], list(labels[i])
    if not isinstance(p, View) or p._mw_parameter is None or isinstance(p._mw_layout, Cut):
        return p
    summed = [label for label in mine if label not in out]
    others = [(x, names) for j, (x, names) in enumerate(zip(operands, labels, strict=True)) if j != i]
    own = [label for label in mine if label in out and not any(label in names for _, names in others)]
    wanted = work.wanted(p)
    if wanted == "row" and summed:
        return work.row(p, mine.index(summed[0]))
    for x, names in others:
        layout = work.layout(x)
        if wanted != "column" and isinstance(layout, Cut) and names[layout.dim] in mine:
            return work.match(p, layout.on(mine.index(names[layout.dim])))
    return work.column(p, mine.index(own[0])) if own and len(mine) > 1 else p


def _cut_label(work: Any, operands: list[Any], labels: list[Labels], out: Labels) -> tuple[Any, Any]:
    """The label to cut along: a parameter's cut first (weights do not move), then a summed label that all operands
    are cut along, then the largest operand's."""
    found = []
    for x, names in zip(operands, labels, strict=True):
        layout = work.layout(x)
        if not isinstance(layout, Cut):
            continue
        label = names[layout.dim]
        holders = [work.layout(y) for y, other in zip(operands, labels, strict=True) if label in other and y is not x]
        agreed = label not in out and all(isinstance(h, Cut) and h.pieces == layout.pieces for h in holders)
        found.append(((x._mw_parameter is not None, agreed, x.numel()), label, layout.pieces))
    if not found:
        return None, None
    _, label, pieces = max(found, key=lambda entry: entry[0])
    for x, names in zip(operands, labels, strict=True):
        if isinstance(layout := work.layout(x), Cut) and names[layout.dim] == label:
            shared = sum(label in other for other in labels) > 1
            work.used_as(x, "row" if label not in out else "batch" if shared else "column")
    return label, pieces


def finish(work: Any, local: Tensor, layout: Any) -> Tensor:
    return local if layout is None else work.view(local, layout)


@rule("linear")
def linear(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("input weight bias", args, kwargs)
    x, weight, bias = names["input"], names["weight"], names.get("bias")
    lead = list(range(x.dim() - 1))
    ends = ["o", "i"] if weight.dim() == 2 else ["i"]
    out = [*lead, *ends[:-1]]
    locals_, layout = cut_operands(work, [x, weight], [[*lead, "i"], ends], out)
    if bias is not None:  # in one kernel with the product, as on one device
        locals_.append(local_bias(work, bias, layout, len(out) - 1))
    return finish(work, torch.nn.functional.linear(*locals_), layout)


def local_bias(work: Any, bias: Any, layout: Any, dim: int) -> Tensor:
    """A bias over one dim of a product, to be added to a local one: cut like it; to a partial sum by one rank only."""
    if layout is None:
        found = work.whole(bias)
    elif not isinstance(layout, Cut):
        found = moves.hold(work.whole(bias), work.axis)
    elif layout.dim != dim:
        found = work.varying(bias)
    else:
        own = layout.on(0)
        found = work.cut(work.match(bias, own), own)
    local: Tensor = found
    return local


@rule("addmm", "baddbmm", "addbmm", "addmv")
def addmm(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 3 or func.__name__ in ("addbmm", "addmv"):
        return NotImplemented
    first, second = ("mat1", "mat2") if func.__name__ == "addmm" else ("batch1", "batch2")
    names = named(f"input {first} {second}", args, kwargs)
    base, x, weight = names.pop("input"), names.pop(first), names.pop(second)
    lead = ["b"] if first == "batch1" else []
    locals_, layout = cut_operands(work, [x, weight], [[*lead, 0, "i"], [*lead, "i", "o"]], [*lead, 0, "o"])
    if layout is None and isinstance(work.layout(base), Cut):
        return NotImplemented
    run = torch.addmm if first == "mat1" else torch.baddbmm
    return finish(work, run(_local_base(work, base, layout, len(lead) + 2), *locals_, **names), layout)


def _local_base(work: Any, base: Any, layout: Any, rank: int) -> Tensor:
    """What is added to a product of ``rank`` dims, to be added to a local one: as ``local_bias``, of any shape."""
    local: Tensor = (
        Aligner(work, layout, rank)(base) if isinstance(layout, Cut) else local_bias(work, base, layout, rank - 1)
    )
    return local


@rule("matmul", "mm", "bmm", "mv", "dot", "__matmul__", "__rmatmul__", "inner")
def matmul(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2 or func.__name__ == "inner":
        return NotImplemented
    a, b = args if func.__name__ != "__rmatmul__" else args[::-1]
    left = [*_batch(a, b), "m", "i"][-a.dim() :] if a.dim() > 1 else ["i"]
    right = [*_batch(b, a), "i", "o"][-b.dim() :] if b.dim() > 1 else ["i"]
    if any(
        isinstance(layout := work.layout(x), Cut) and _spread(names[layout.dim]) for x, names in ((a, left), (b, right))
    ):
        return NotImplemented
    lead = max(_batch(a, b), _batch(b, a), key=len)
    merged = [n if (n := _named(left, right, k)) is not None else k for k in lead]
    out = [*merged, *(["m"] if a.dim() > 1 else []), *(["o"] if b.dim() > 1 else [])]
    # The very function: autocast casts a matmul, and leaves a dot as it is.
    run = torch.matmul if func.__name__ == "__rmatmul__" else func
    return finish(work, *contract(work, [a, b], [left, right], out, run))


def _batch(x: Tensor, other: Tensor) -> list[Any]:
    """Labels of batch dims, counted from the right; a dim of size 1 that broadcasts has a label of its own."""
    count = max(x.dim() - 2, 0)
    labels: list[Any] = []
    for place in range(count, 0, -1):
        mine = x.shape[x.dim() - 2 - place]
        theirs = other.shape[other.dim() - 2 - place] if other.dim() - 2 >= place else mine
        labels.append(("one", id(x), place) if mine == 1 != theirs else ("batch", place))
    return labels


def _spread(label: Any) -> bool:
    """Whether a label is that of a batch dim of size 1 that broadcasts."""
    return isinstance(label, tuple) and label[0] == "one"


def _named(left: Labels, right: Labels, label: Any) -> Any:
    """The label that a batch dim has in the result: the one that does not broadcast."""
    return ("batch", label[-1]) if isinstance(label, tuple) else None


@rule("einsum")
def einsum(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, *operands = args
    if not isinstance(equation, str):
        return NotImplemented
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    equation = equation.replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return NotImplemented
    labels = [_terms(term, x.dim()) for term, x in zip(terms, operands, strict=True)]
    if any(names is None or len(set(names)) != len(names) for names in labels):
        return NotImplemented
    every = [n for names in labels if names for n in names]
    dots = max(([n for n in names or [] if isinstance(n, tuple)] for names in labels), key=len)
    if arrow:
        target = [n for part in out.replace("...", ".") for n in (dots if part == "." else [part])]
    else:
        target = [*dots, *sorted(n for n in set(every) - set(dots) if every.count(n) == 1)]
    if len(operands) == 1 and len(target) == len(labels[0] or ()):
        return operands[0].permute([(labels[0] or []).index(name) for name in target])
    if _sizes_differ(labels, operands) or _another_way(work, labels, operands, target):
        return NotImplemented
    run = lambda *locals_: torch.einsum(equation, *locals_)  # noqa: E731
    return finish(work, *contract(work, operands, labels, target, run))  # type: ignore[arg-type]


def _terms(term: str, rank: int) -> list[Any] | None:
    named = term.replace("...", "")
    if not named.isalpha() and named:
        return None
    dots = [("dot", i) for i in range(rank - len(named), 0, -1)]
    at = term.find("...")
    return list(named) if at < 0 else [*term[:at], *dots, *term[at + 3 :]]


def _another_way(work: Any, labels: list[Any], operands: list[Any], out: Labels) -> bool:
    """Whether some rank's einsum might take another way than the whole one, which ends in another type.

    Torch multiplies and adds up where a summed dim has size 1, and calls ``bmm`` elsewhere: autocast casts the second.
    """
    if not any(x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) for x in operands):
        return False
    cuts = [(work.layout(x), names) for x, names in zip(operands, labels, strict=True)]
    summed = [cut for cut, names in cuts if isinstance(cut, Cut) and names[cut.dim] not in out]
    return any(1 in (cut.size, *cut.locals) for cut in summed)


def _sizes_differ(labels: list[Any], operands: list[Any]) -> bool:
    """Whether a label stands for dims that broadcast: then it is not one dim."""
    sizes: dict[Any, int] = {}
    for names, x in zip(labels, operands, strict=True):
        for name, size in zip(names, x.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                return True
    return False
