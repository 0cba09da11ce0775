"""Normalisation: runs on local tensors if the normalised dims are not sharded. Weight and bias are whole, or sharded alike."""

from __future__ import annotations

from torch.nn import functional

from meshwright.layout import Shard
from meshwright.spmd.decide.pointwise import Aligner, of_each, rank_of, shard_of_result
from meshwright.spmd.decide.reduction import after_reduction
from meshwright.spmd.decide.registry import decider, named
from meshwright.spmd.decision import GATHER, Answer, Decision, Gather, Units, matching, use_as, use_local, use_varying
from meshwright.spmd.signature import Call, layout_of


@decider("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(call: Call) -> Answer:
    x, shape = call.args[:2]
    layout = layout_of(x)
    if not isinstance(layout, Shard) or layout.dim >= x.dim() - len(shape) or call.name.startswith("native"):
        return GATHER
    return of_each(call, lambda y: use_local(y) if y is x else use_varying(y), layout)


@decider("group_norm")
def group_norm(call: Call) -> Answer:
    """Group norm: runs on local tensors if rows are sharded, or channels (dim 1) at borders of groups."""
    names = named("input num_groups weight bias eps", call.args, call.kwargs)
    x, groups, layout = names["input"], names["num_groups"], layout_of(names["input"])
    if not isinstance(layout, Shard):
        return GATHER
    weight, bias, eps = names.get("weight"), names.get("bias"), names.get("eps", 1e-5)
    if layout.dim == 0:
        args = (use_local(x), groups, use_varying(weight), use_varying(bias), eps)
        return Decision(functional.group_norm, args, {}, layout)
    if layout.dim != 1:
        return GATHER
    width = x.shape[1] // groups
    if layout.parts > 1 or any(n % width for n in layout.pieces[0]):
        return Gather(Units(x.index, groups))
    channels = layout.on(0)
    args = (use_local(x), layout.local(call.rank) // width, use_as(weight, channels), use_as(bias, channels), eps)
    return Decision(
        functional.group_norm, args, {}, layout, choices=(*matching(weight, channels), *matching(bias, channels))
    )


@decider("normalize")
def normalize(call: Call) -> Answer:
    names = named("input p dim eps", call.args, call.kwargs)
    x, dim = names["input"], names.get("dim", 1)
    layout = layout_of(x)
    if not isinstance(layout, Shard) or not isinstance(dim, int) or layout.dim == dim % x.dim() or names.get("out"):
        return GATHER
    args = (use_local(x), names.get("p", 2.0), dim, names.get("eps", 1e-12))
    return Decision(functional.normalize, args, {}, layout)


@decider("cosine_similarity")
def cosine_similarity(call: Call) -> Answer:
    """Runs on local tensors if another dim is sharded than the one that is reduced."""
    names = named("x1 x2 dim eps", call.args, call.kwargs)
    pair = [names["x1"], names["x2"]]
    rank = rank_of(pair)
    dim = names.get("dim", 1) % rank
    target = shard_of_result(pair, call.func)
    if target is None or target.dim == dim:
        return GATHER
    align = Aligner(target, rank)
    args = (*map(align, pair), dim, names.get("eps", 1e-8))
    out = after_reduction(target, [dim], False)
    return Decision(functional.cosine_similarity, args, {}, out, choices=tuple(align.choices))
