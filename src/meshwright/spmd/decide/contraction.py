"""Products that sum over shared dims: linear, matmul, bmm, addmm, einsum … by one rule, ``contract``.

Every operand's dims have labels, as in einsum. The product is sharded along one label:

    the label is in the result     the result is sharded along it; operands without the label are used whole
    the label is summed over       the result is a partial sum

So a weight sharded by column (its output dim) needs a whole input and gives a sharded output. A weight sharded by row (its
input dim) needs an input that is sharded the same way and gives a partial sum (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import PARTIAL, REPLICATE, Layout, Partial, Shard
from meshwright.spmd.decide.pointwise import Aligner
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decision import (
    GATHER,
    Answer,
    Body,
    Choice,
    Decision,
    Need,
    Use,
    matching,
    use_as,
    use_original,
    use_replicated,
    use_varying,
)
from meshwright.spmd.signature import Call, Operand, is_undecided

Labels = Sequence[Any]


@dataclass(frozen=True)
class Product:
    """How a product is computed on local tensors.

    Attributes:
        uses: the Use of each operand.
        out: the layout of the result; ``REPLICATE`` if no operand is sharded.
        choices, roles: as in ``Decision``.
    """

    uses: list[Any]
    out: Layout
    choices: tuple[Choice, ...] = ()
    roles: tuple[tuple[int, str], ...] = ()

    def decision(
        self, run: Callable[..., Any], *more: Any, choices: tuple[Choice, ...] = (), **kwargs: Any
    ) -> Decision:
        """The Decision to call ``run`` with the operands, then ``more`` arguments."""
        return Decision(run, (*self.uses, *more), kwargs, self.out, choices=self.choices + choices, roles=self.roles)


def contract(operands: Sequence[Operand], labels: Sequence[Labels], out: Labels) -> Product:
    """A product, sharded along one label. ``labels``: the labels of each operand's dims; ``out``: those of the result."""
    choices = tuple(c for i in range(len(operands)) if (c := _choice(i, operands, labels, out)) is not None)
    label, pieces = _sharded_label(operands, labels, out)
    if label is None:
        return Product([use_replicated(x) for x in operands], REPLICATE, choices)
    uses = [
        use_as(x, Shard(list(names).index(label), pieces)) if label in names else use_varying(x)
        for x, names in zip(operands, labels, strict=True)
    ]
    roles = [
        (x.index, "row" if label not in out else "batch" if sum(label in other for other in labels) > 1 else "column")
        for x, names in zip(operands, labels, strict=True)
        if isinstance(x.layout, Shard) and names[x.layout.dim] == label
    ]
    return Product(uses, Shard(list(out).index(label), pieces) if label in out else PARTIAL, choices, tuple(roles))


def _choice(i: int, operands: Sequence[Operand], labels: Sequence[Labels], out: Labels) -> Choice | None:
    """How operand ``i`` may be sharded to fit the others, if it is an undecided parameter; else None."""
    p, mine = operands[i], list(labels[i])
    if not is_undecided(p):
        return None
    summed = [label for label in mine if label not in out]
    others = [(x, names) for j, (x, names) in enumerate(zip(operands, labels, strict=True)) if j != i]
    free = [label for label in mine if label in out and not any(label in names for _, names in others)]
    matches = (
        x.layout.on(mine.index(names[x.layout.dim]))
        for x, names in others
        if isinstance(x.layout, Shard) and names[x.layout.dim] in mine
    )
    return Choice(
        p.index,
        column=mine.index(free[0]) if free and len(mine) > 1 else None,
        match=next(matches, None),
        row=mine.index(summed[0]) if summed else None,
    )


def _sharded_label(operands: Sequence[Operand], labels: Sequence[Labels], out: Labels) -> tuple[Any, Any]:
    """(the label to shard along, its pieces), or (None, None).

    First comes the label along which a parameter is sharded (weights do not move), then a summed label along which all its
    operands are sharded alike, then that of the largest operand.
    """
    candidates = []
    for x, names in zip(operands, labels, strict=True):
        layout = x.layout
        if not isinstance(layout, Shard):
            continue
        label = names[layout.dim]
        holders = [y.layout for y, other in zip(operands, labels, strict=True) if label in other and y is not x]
        agreed = label not in out and all(isinstance(h, Shard) and h.pieces == layout.pieces for h in holders)
        candidates.append(((x.parameter, agreed, x.numel()), label, layout.pieces))
    return max(candidates, key=lambda candidate: candidate[0])[1:] if candidates else (None, None)


@decider("linear")
def linear(call: Call) -> Answer:
    """``x @ weight.T + bias``, as a product; the bias is added in the same kernel."""
    names = named("input weight bias", call.args, call.kwargs)
    x, weight, bias = names["input"], names["weight"], names.get("bias")
    lead = list(range(x.dim() - 1))
    ends = ["o", "i"] if weight.dim() == 2 else ["i"]
    out = [*lead, *ends[:-1]]
    product = contract([x, weight], [[*lead, "i"], ends], out)
    bias_use, choices = local_bias(bias, product.out, len(out) - 1)  # in one kernel with the product, as on one device
    return product.decision(torch.nn.functional.linear, bias_use, choices=choices)


def local_bias(bias: Any, layout: Layout, dim: int) -> tuple[Any, tuple[Choice, ...]]:
    """(Use, choices) of a bias over dim ``dim`` of a product with this layout, which is added to the local product.

    The bias is sharded like that dim. To a partial sum, one rank alone adds it.
    """
    if isinstance(layout, Partial):
        return use_as(bias, Need.SUMMAND), ()
    if not isinstance(layout, Shard):
        return use_replicated(bias), ()
    if layout.dim != dim:
        return use_varying(bias), ()
    return use_as(bias, layout.on(0)), matching(bias, layout.on(0))


@decider("addmm", "baddbmm", "addbmm", "addmv")
def addmm(call: Call) -> Answer:
    """A product plus a tensor that broadcasts over it."""
    if len(call.args) > 3 or call.name in ("addbmm", "addmv"):
        return GATHER
    first, second = ("mat1", "mat2") if call.name == "addmm" else ("batch1", "batch2")
    names = named(f"input {first} {second}", call.args, call.kwargs)
    base, x, weight = names.pop("input"), names.pop(first), names.pop(second)
    lead = ["b"] if first == "batch1" else []
    product = contract([x, weight], [[*lead, 0, "i"], [*lead, "i", "o"]], [*lead, 0, "o"])
    base_use, choices = _local_base(base, product.out, len(lead) + 2)
    decision = product.decision(call.func, choices=choices, **names)
    return replace(decision, args=(base_use, *decision.args))


def _local_base(base: Any, layout: Layout, rank: int) -> tuple[Any, tuple[Choice, ...]]:
    """``local_bias`` for a tensor of any shape that is added to a product of ``rank`` dims."""
    if not isinstance(layout, Shard):
        return local_bias(base, layout, rank - 1)
    align = Aligner(layout, rank)
    return align(base), tuple(align.choices)


@decider("matmul", "mm", "bmm", "mv", "dot", "__matmul__", "__rmatmul__", "inner")
def matmul(call: Call) -> Answer:
    """Products of matrices, vectors, and batches of matrices whose batch dims broadcast."""
    if call.kwargs or len(call.args) != 2 or call.name == "inner":
        return GATHER
    a, b = call.args if call.name != "__rmatmul__" else call.args[::-1]
    left = [*_batch(a, b), "m", "i"][-a.dim() :] if a.dim() > 1 else ["i"]
    right = [*_batch(b, a), "i", "o"][-b.dim() :] if b.dim() > 1 else ["i"]
    if any(isinstance(x.layout, Shard) and _spread(names[x.layout.dim]) for x, names in ((a, left), (b, right))):
        return GATHER
    lead = max(_batch(a, b), _batch(b, a), key=len)
    merged = [n if (n := _named(left, right, k)) is not None else k for k in lead]
    out = [*merged, *(["m"] if a.dim() > 1 else []), *(["o"] if b.dim() > 1 else [])]
    # The function that was called: autocast casts the operands of a matmul, and not those of a dot.
    run = torch.matmul if call.name == "__rmatmul__" else call.func
    product = contract([a, b], [left, right], out)
    copied = [_is_copied(x, use, call.rank) for x, use in zip((a, b), product.uses, strict=True)]
    return product.decision(_of_copies(run, copied) if any(copied) else run)


def _is_copied(x: Operand, use: Any, rank: int) -> bool:
    """Whether torch copies this operand on one device, and would not copy its local tensor.

    To merge several batch dims into one, torch copies an operand whose strides do not allow it. A permuted operand of which
    this rank has a single head needs no copy. But backward saves the copy, and the model may write to the operand later.
    """
    if x.dim() < 4 or not isinstance(use, Use) or not isinstance(use.need, Shard):
        return False
    strides = x.spec.strides if isinstance(x.layout, Shard) else x.spec.local_strides
    sizes = list(x.shape)
    sizes[use.need.dim] = use.need.locals[rank]
    return strides is not None and not _is_one(x.shape[:-2], strides) and _is_one(sizes[:-2], strides)


def _is_one(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether dims can be merged into one without a copy."""
    dims = [(size, step) for size, step in zip(sizes, strides, strict=False) if size > 1]
    return all(outer == inner * size for (_, outer), (size, inner) in pairwise(dims))


def _of_copies(run: Callable[..., Any], copied: Sequence[bool]) -> Callable[..., Any]:
    """``run``, called with copies of those operands for which ``copied`` is true."""

    def of_copies(*operands: Tensor) -> Any:
        return run(*(x.clone() if copy else x for x, copy in zip(operands, copied, strict=True)))

    return of_copies


def _batch(x: Operand, other: Operand) -> list[Any]:
    """Labels of the batch dims of ``x``, numbered from the right; a dim of size 1 that broadcasts has a label of its own."""
    count = max(x.dim() - 2, 0)
    labels: list[Any] = []
    for number in range(count, 0, -1):
        size = x.shape[x.dim() - 2 - number]
        other_size = other.shape[other.dim() - 2 - number] if other.dim() - 2 >= number else size
        labels.append(("one", id(x), number) if size == 1 != other_size else ("batch", number))
    return labels


def _spread(label: Any) -> bool:
    """Whether a label belongs to a batch dim of size 1 that broadcasts."""
    return isinstance(label, tuple) and label[0] == "one"


def _named(left: Labels, right: Labels, label: Any) -> Any:
    """The label in the result for the label of a batch dim, which may broadcast; None for another label."""
    return ("batch", label[-1]) if isinstance(label, tuple) else None


@decider("einsum")
def einsum(call: Call) -> Answer:
    """A product whose labels are those of the equation; with one operand, a permutation."""
    equation, *operands = call.args
    if not isinstance(equation, str):
        return GATHER
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    equation = equation.replace(" ", "")
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return GATHER
    labels = [_terms(term, x.dim()) for term, x in zip(terms, operands, strict=True)]
    if any(names is None or len(set(names)) != len(names) for names in labels):
        return GATHER
    every = [n for names in labels if names for n in names]
    dots = max(([n for n in names or [] if isinstance(n, tuple)] for names in labels), key=len)
    if arrow:
        target = [n for part in out.replace("...", ".") for n in (dots if part == "." else [part])]
    else:
        target = [*dots, *sorted(n for n in set(every) - set(dots) if every.count(n) == 1)]
    if len(operands) == 1 and len(target) == len(labels[0] or ()):
        return Body(Tensor.permute, (use_original(operands[0]), [(labels[0] or []).index(name) for name in target]), {})
    if _sizes_differ(labels, operands) or _another_way(labels, operands, target):
        return GATHER
    product = contract(operands, labels, target)  # type: ignore[arg-type]
    return replace(product.decision(_in_order(equation, operands)), args=(equation, *product.uses))


def _in_order(equation: str, operands: Sequence[Operand]) -> Callable[..., Tensor]:
    """``torch.einsum`` that contracts pairs of operands in the same order as one device.

    Torch picks the cheapest order for the sizes that it sees, and local sizes may lead to another order. Then rounding would
    differ, and backward would save other tensors, to which the model may write.
    """
    settings = torch.backends.opt_einsum
    if len(operands) <= 2 or not settings.enabled or not settings.is_available():
        return torch.einsum
    shapes = [tuple(x.shape) for x in operands]
    pairs = settings.get_opt_einsum().contract_path(equation, *shapes, shapes=True, optimize=settings.strategy)[0]
    path = [operand for pair in pairs for operand in pair]

    def contracted(equation: str, *local: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.einsum.default(equation, local, path=path)
        return result

    return contracted


def _terms(term: str, rank: int) -> list[Any] | None:
    """The labels of an operand with ``rank`` dims, by its term of an equation (``"...ij"``); None if it has other signs."""
    named = term.replace("...", "")
    if not named.isalpha() and named:
        return None
    dots = [("dot", i) for i in range(rank - len(named), 0, -1)]
    at = term.find("...")
    return list(named) if at < 0 else [*term[:at], *dots, *term[at + 3 :]]


def _another_way(labels: list[Any], operands: list[Any], out: Labels) -> bool:
    """Whether einsum on some rank may compute by another function than on one device, and so in another dtype.

    If a summed dim has size 1, torch multiplies and adds up; else it calls ``bmm``, whose operands autocast casts.
    """
    if not any(x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) for x in operands):
        return False
    layouts = [(x.layout, names) for x, names in zip(operands, labels, strict=True)]
    summed = [layout for layout, names in layouts if isinstance(layout, Shard) and names[layout.dim] not in out]
    return any(1 in (layout.size, *layout.locals) for layout in summed)


def _sizes_differ(labels: list[Any], operands: list[Any]) -> bool:
    """Whether a label stands for dims of different sizes, because they broadcast."""
    sizes: dict[Any, int] = {}
    for names, x in zip(labels, operands, strict=True):
        for name, size in zip(names, x.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                return True
    return False
