"""``CAUSES``: a table of what a difference usually means. ``meaning`` has the rules that choose a line.

Placeholders in a sentence: {factor} is the factor on the right value, {axis} the axis of that size, {size} its size, {ranks}
the ranks that are wrong, {blocks} the factor of each block, {dim} the dim along which blocks lie, {order} the numbers of the
expected blocks in their actual order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAGE = "docs/check_your_own.md"


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        says: the observation and its usual meaning, as a sentence.
        look: places to look at, each a sentence.
    """

    says: str
    look: tuple[str, ...]


_SAMPLER = (
    "a sampler without the rank (DistributedSampler, set_epoch), drop_last, a slice of the batch that is off by one"
)
_PREFIX = "another prefix: --map 'REGEX=REPLACEMENT' changes the names of the second recording"
_STAGES = "stages that count their layers anew: mw.record(..., names=...)"
_BEFORE_WRAPPING = "an optimizer made before the model was wrapped: it holds parameters that the model no longer has"
_RIGHT = "the gradient is right"

BEFORE: Mapping[str, Cause] = {
    "names_missing": Cause(
        "parameters of one process that no rank has under this name",
        (_PREFIX, "a stage that is not recorded: every rank calls mw.record with its own part of the model"),
    ),
    "names_extra": Cause("parameters that one process does not have under this name", (_PREFIX, _STAGES)),
    "weights_differ": Cause(
        "the two runs did not start from the same weights: what follows cannot be the same",
        (
            "a seed that depends on the rank, or weights made after ranks drew different numbers",
            "weights made shard by shard under one seed: make them whole, or load one checkpoint in both",
        ),
    ),
    "weights_cast": Cause(
        "the weights are the same but for rounding: one of both runs holds, or held, them in another type",
        ("model.to(torch.bfloat16), or dtype of from_pretrained, in one of both",),
    ),
    "weights_order": Cause(
        "the right blocks along dim {dim} in another order: {order}",
        (
            "ranks that load each other's shards: the mesh's order of ranks is not that of the shards",
            "a fused weight (q, k, v) that was cut as one block",
        ),
    ),
    "weights_blocks": Cause(
        "blocks along dim {dim} of the weights are {blocks} × what they should be (?: no factor fits), the others are right",
        (
            "the ranks of the wrong blocks: a shard that was not loaded, or is of an earlier checkpoint",
            "a write to the weights that runs on some ranks alone",
        ),
    ),
    "weights_replicas": Cause(
        "the two runs did not start from the same weights: {ranks} differ from one process",
        ("weights that are neither broadcast nor made under one seed", "a checkpoint that is loaded on rank 0 alone"),
    ),
    "rows_missing": Cause("rows of one process that no rank saw", (_SAMPLER,)),
    "rows_extra": Cause("rows that one process did not see", (_SAMPLER,)),
    "rows_twice": Cause("rows that more ranks saw than others", (_SAMPLER, "a sampler that pads by repeating rows")),
    "rows_split": Cause(
        "ranks of one tensor-parallel group saw different rows: these ranks compute one forward together, of the same rows",
        ("a sampler over all ranks: num_replicas and rank are those of the data axis",),
    ),
    "rows_counts": Cause("the runs did not see the same number of rows", (_SAMPLER,)),
    "rows_other": Cause(
        "the two runs did not see the same rows: none is on both sides",
        ("another seed or order of the data", "padding to another length: the padded row is what is compared"),
    ),
    "settings": Cause(
        "an optimizer has other settings", ("a rate scaled by the number of ranks, a scheduler, groups",)
    ),
    "loss_scaled": Cause(
        "the mean of the ranks' losses is {factor} × that of one process: {axis}",
        ("a loss that is divided or multiplied before it is told",),
    ),
    "loss_differs": Cause(
        "the mean of the ranks' losses, each weighed by its rows, is not that of one process",
        (
            "a forward that differs: dropout, BatchNorm over a rank's rows, a cut layer that is not put together",
            "a mean over labels: rec.loss(..., rows=number of labels)",
        ),
    ),
}

BY_FACTOR: Mapping[str, Cause] = {
    "summed_over_data": Cause(
        "{factor} × is the size of {axis}: the sum over ranks, where one process has the mean",
        (
            "a loss multiplied by the number of ranks, or a sum of losses that nothing divides",
            "gradients summed by hand (ReduceOp.SUM), a communication hook, set_gradient_divide_factor(1)",
        ),
    ),
    "averaged_twice": Cause(
        "{factor} × is one part in {size}, the size of {axis}: averaged once too often",
        (
            "loss / world_size before backward: DDP and FSDP average on their own",
            "an all-reduced mean by hand after DDP or FSDP has averaged",
        ),
    ),
    "counted_over_tensor": Cause(
        "{factor} × is the size of {axis}: counted once for each of these ranks, or summed where it is whole already",
        (
            "a gradient that all these ranks hold whole, and that is all-reduced once more",
            "a forward all-reduce whose backward is an all-reduce too: its conjugate is the identity",
            "a loss that all these ranks compute alike, each sending its gradient back into what they share",
        ),
    ),
    "divided_over_tensor": Cause(
        "{factor} × is one part in {size}, the size of {axis}: divided among ranks that all have it whole, or averaged where "
        "each has a summand",
        (
            "DDP or FSDP over all ranks, tensor-parallel ones too: give it the mesh of the data axis alone",
            "ReduceOp.AVG for the gradient of a parameter of which each of these ranks has a summand",
        ),
    ),
    "accumulated": Cause(
        "{factor} × is the number of forwards in a step: their gradients are summed, where one process has the mean",
        ("loss / accumulation_steps before backward",),
    ),
    "accumulation_divided": Cause(
        "{factor} × is one part in {size}, the number of forwards in a step: divided by them once too often",
        ("loss / accumulation_steps, and a trainer that divides as well",),
    ),
    "scaled_alike": Cause(
        "every gradient is {factor} × that of one process, and no axis has that size",
        (
            "clipping by another norm: that of a rank's shards is not that of the whole gradient",
            "another weight of the loss: means over unequal numbers of labels",
            "a GradScaler whose scale was not taken out",
        ),
    ),
    "scaled": Cause(
        "{factor} × that of one process, and no axis has that size; other gradients are not scaled so",
        ("a sum taken twice, or left out, on the way to these parameters", "a loss of their own, weighed otherwise"),
    ),
    "negated": Cause("the gradient has the other sign", ("a custom backward", "maximize=True handled twice")),
    "zeros": Cause(
        "the gradient is all zeros",
        ("a detach, or torch.no_grad, on the way", "a share that is overwritten or never reduced"),
    ),
}

BY_RANK: Mapping[str, Cause] = {
    "summands": Cause(
        "{ranks} each hold a summand: their sum is right, and nobody summed them",
        (
            "a parameter replicated over an axis, of which each rank meets a part of the values (a norm under sequence "
            "parallel, a bias after a row-sharded layer): all-reduce its gradient over that axis",
            "a DTensor that was made local: to_local(grad_placements=[Partial()])",
        ),
    ),
    "unaveraged": Cause(
        "each of {ranks} holds the gradient of its own rows: their mean is right, and nobody averaged them",
        (
            "DDP's no_sync() around the last backward of a step",
            "a parameter outside of what DDP or FSDP wraps",
            "the module called in place of its wrapper",
            'fully_shard over one axis of a mesh of two: for copies (HSDP) it takes both, mesh["replicate", "shard"]',
        ),
    ),
    "some_ranks": Cause(
        "{ranks} hold another value, and the others are right",
        ("code that runs on some ranks alone", "a broadcast or a reduction that is left out"),
    ),
    "replicas": Cause(
        "ranks hold different values, of which neither one nor their sum or mean is right",
        ("a parameter that nobody synchronizes", _STAGES),
    ),
    "none_on_ranks": Cause(
        "{ranks} have no gradient, and the others are right: the copies part in the update",
        (
            "a module that runs on some ranks alone (experts, a condition on the data)",
            "DDP(find_unused_parameters=True)",
        ),
    ),
    "one_share": Cause(
        "what all ranks hold is block {share}: one rank's share, not the whole",
        ("a gather or an all-reduce that is left out",),
    ),
    "shape": Cause("another shape than in one process", ("a parameter padded or cut by hand", "another configuration")),
}

BY_PART: Mapping[str, Cause] = {
    "block_scaled": Cause(
        "blocks along dim {dim} are {blocks} × what they should be",
        (
            "clipping by the norm of a rank's own shards: each rank then has a factor of its own",
            "ranks that scale their shard by their own rows or labels",
            "a shard that is reduced over the wrong group",
        ),
    ),
    "block_zeros": Cause(
        "blocks along dim {dim} are {blocks} × what they should be: a shard without its gradient",
        ("a rank that does not come to its backward", "a reduce-scatter whose result is dropped"),
    ),
    "block_wrong": Cause(
        "blocks along dim {dim} are {blocks} × what they should be (?: no factor fits)",
        ("the ranks of the wrong blocks: their rows, their weights, the group that they reduce over",),
    ),
    "block_sums": Cause(
        "each block along dim {dim} is {factor} × the sum of all right blocks: shards were added up as if they were copies",
        ("an all-reduce by hand of gradients that FSDP has reduced, and of which each rank holds another shard",),
    ),
    "order": Cause(
        "the right blocks along dim {dim} in another order: {order}",
        (
            "the order of ranks in the mesh is not that of the shards: rank and coordinate mixed up",
            "a fused weight (q, k, v) that was cut as one block",
        ),
    ),
    "transposed": Cause("the transpose of the right one", ("a custom backward or kernel: x.T @ g for g.T @ x",)),
}

OTHERWISE: Mapping[str, Cause] = {
    "none": Cause(
        "one process has a gradient, and no rank has",
        (
            "a detach, a to_local() or a collective that autograd does not follow",
            "a module that is frozen, or not called, on the ranks",
            "FSDP2's set_requires_gradient_sync(False) or set_requires_all_reduce(False) in the last backward of a step",
        ),
    ),
    "extra": Cause(
        "ranks have a gradient, and one process has none", ("a module that one process freezes or leaves out",)
    ),
    "not_finite": Cause(
        "nan or infinity on one side",
        ("an overflow in half precision", "a mean over no labels: a rank that has none"),
    ),
    "rounding": Cause(
        "no pattern, and as large as rounding to bfloat16: one of both runs computes in half precision",
        (
            "autocast, MixedPrecisionPolicy, the model's type",
            "both runs in float32 or float64; or --again, --tolerance",
        ),
    ),
    "mean_of_means": Cause(
        "no factor fits, and ranks have unequal numbers of rows ({counts}): the mean of their means is not that of all rows",
        ("loss × rows of this rank × number of ranks / rows of all ranks, before backward",),
    ),
    "carried": Cause(
        "the gradient of the step before is still in it",
        ("no zero_grad() before this backward", "an optimizer that does not hold the parameter: model.zero_grad()"),
    ),
    "block_carried": Cause(
        "blocks along dim {dim} have the gradient of the step before in them, too: {blocks} ×",
        ("zero_grad() that some ranks leave out, by a condition or an exception",),
    ),
    "other_weights": Cause(
        "no factor fits, and the weights were not those of one process", ("the weights first: they are above",)
    ),
    "other_rows": Cause("no factor fits, and the rows were not those of one process", (_SAMPLER,)),
    "other": Cause(
        "no pattern that is known; the best factor is {factor}",
        (
            "of these, the last one in the forward: its input, its weights or what comes after it is another",
            "a pipeline: a microbatch whose backward did not run, ran twice, or got the gradient of another one",
            "dropout, BatchNorm, and what else depends on a rank's rows or random numbers",
        ),
    ),
}

UPDATES: Mapping[str, Cause] = {
    "not_stepped": Cause(f"{_RIGHT}, and no optimizer holds the parameter", (_BEFORE_WRAPPING,)),
    "not_updated": Cause(f"{_RIGHT}, and the parameter did not move", (_BEFORE_WRAPPING, "a rate of 0 in this group")),
    "stale_shard": Cause(
        f"{_RIGHT}; blocks along dim {{dim}} moved {{blocks}} × as far as they should: a shard was not updated",
        ("a rank whose optimizer does not step, or steps a copy",),
    ),
    "update_scaled": Cause(f"{_RIGHT}, and the update is {{factor}} × that of one process", ("the learning rate",)),
    "update_replicas": Cause(
        f"{_RIGHT}, and {{ranks}} hold other values after the step",
        ("state or settings of optimizers that differ by rank",),
    ),
    "update_order": Cause(
        f"{_RIGHT}, and blocks along dim {{dim}} of the update changed places: {{order}}",
        ("the optimizer's state, loaded in another order of ranks",),
    ),
    "none_zeros": Cause(
        "one process has no gradient, ranks have zeros: an optimizer leaves the first alone and moves the second, by decay or "
        "momentum",
        ("FSDP fills in zeros where a module was not used on any rank: keep such parameters out of weight decay",),
    ),
    "update_other": Cause(
        f"{_RIGHT}, and the update is another",
        ("settings or state of the optimizer: weight decay, moments of earlier steps",),
    ),
}

CAUSES: Mapping[str, Cause] = {**BEFORE, **BY_FACTOR, **BY_RANK, **BY_PART, **OTHERWISE, **UPDATES}
