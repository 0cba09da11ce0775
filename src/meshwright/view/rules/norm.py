"""Normalisation: local where the normalised dims are not cut; scales and shifts enter whole, or are cut alike."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from meshwright.layout import Cut
from meshwright.view.rules.pointwise import Aligner, cut_of_result
from meshwright.view.rules.reduction import after_reduction
from meshwright.view.rules.registry import named, rule


@rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape, *rest = args
    layout = work.layout(x)
    if not isinstance(layout, Cut) or layout.dim >= x.dim() - len(shape) or func.__name__.startswith("native"):
        return NotImplemented
    keep = {k: work.varying(v) for k, v in kwargs.items()}
    return work.view(func(x._mw_local, shape, *map(work.varying, rest), **keep), layout)


@rule("group_norm")
def group_norm(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over channels (dim 1): cut where no group is broken."""
    names = named("input num_groups weight bias eps", args, kwargs)
    x, groups, layout = names["input"], names["num_groups"], work.layout(names["input"])
    if not isinstance(layout, Cut):
        return NotImplemented
    weight, bias, eps = names.get("weight"), names.get("bias"), names.get("eps", 1e-5)
    if layout.dim == 0:
        return work.view(
            functional.group_norm(x._mw_local, groups, work.varying(weight), work.varying(bias), eps), layout
        )
    if layout.dim != 1:
        return NotImplemented
    width = x.shape[1] // groups
    if layout.parts > 1 or any(n % width for n in layout.pieces[0]):
        work.units(x, groups)
        return NotImplemented
    own = layout.on(0)
    weight, bias = (None if p is None else work.cut(work.match(p, own), own) for p in (weight, bias))
    local = functional.group_norm(x._mw_local, layout.local(work.axis.rank) // width, weight, bias, eps)
    return work.view(local, layout)


@rule("normalize")
def normalize(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("input p dim eps", args, kwargs)
    x, dim = names["input"], names.get("dim", 1)
    layout = work.layout(x)
    if not isinstance(layout, Cut) or not isinstance(dim, int) or layout.dim == dim % x.dim() or names.get("out"):
        return NotImplemented
    return work.view(functional.normalize(x._mw_local, names.get("p", 2.0), dim, names.get("eps", 1e-12)), layout)


@rule("cosine_similarity")
def cosine_similarity(work: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = named("x1 x2 dim eps", args, kwargs)
    pair = [names["x1"], names["x2"]]
    rank = max(t.dim() for t in pair)
    dim = names.get("dim", 1) % rank
    target = cut_of_result(pair, [work.layout(t) for t in pair], func)
    if target is None or target.dim == dim:
        return NotImplemented
    one, other = map(Aligner(work, target, rank), pair)
    local = functional.cosine_similarity(one, other, dim, names.get("eps", 1e-8))
    return work.view(local, after_reduction(target, [dim], False))
