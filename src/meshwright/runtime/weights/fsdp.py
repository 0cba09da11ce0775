"""Data parallelism with shards: FSDP2 over the data axes, for every unit; replicated units are HSDP with shards of one rank.
Without shards (``dp_replicate`` alone) the job sums gradients itself (``gradient_sums``).

All reductions are sums: the mean is taken once, in the loss (runtime/rows/microbatches.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.calls.placeholder import RemoteTensor, local_rows, note_replaced, note_replaced_within
from meshwright.calls.structure import put_tensors, tensors_of
from meshwright.private import bases_of, without_modes
from meshwright.recipe import Recipe, Unit
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.parameters import Attributes, local_tensor
from meshwright.spmd.patches import class_name_kept, set_on
from meshwright.spmd.tensor import GlobalTensor, local_of


def needs_fsdp(recipe: Recipe) -> bool:
    """Whether FSDP2 has something to do: shards over data ranks; mixed precision, which comes from it; or sums over data ranks
    beside the backward if tp, too, communicates in it (else ``buckets`` does that)."""
    replicas, shards, tp = (_largest(recipe, axis) for axis in ("dp_replicate", "dp_shard", "tp"))
    return recipe.precision in ("bfloat16", "float16") or shards > 1 or (replicas > 1 and tp > 1)


def _largest(recipe: Recipe, axis: str) -> int:
    """The size of an axis in the submesh in which it is largest."""
    return max(recipe.places.axis_size(place, axis) for place in range(1 + len(recipe.branches)))


def shard_units(model: nn.Module, recipe: Recipe, groups: Groups) -> None:
    """``fully_shard`` on every unit, innermost first, the root last."""
    if not needs_fsdp(recipe):
        return
    modules = dict(model.named_modules())
    named = dict(model.named_parameters(remove_duplicate=False))
    sharded = [line for line in recipe.held_by(groups.rank) if line.data != "loose"]
    others = {named[p.name] for p in recipe.parameters} - {named[p.name] for p in sharded}
    for unit in recipe.units:
        if unit.name and not any(p.unit == unit.name for p in sharded):
            continue  # it runs on other stages, or in other branches
        module = modules[unit.name]
        policy = _policy(recipe, unit)
        with _hooks_without_view(module, unit, policy), class_name_kept(module):
            fully_shard(
                module,
                mesh=_mesh(unit, groups),
                reshard_after_forward=recipe.reshard_after_forward and bool(unit.name) and unit.follows_outputs,
                mp_policy=policy,
                ignored_params=others or None,
            )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # Plain sums, which every backend has: FSDP2 would ask for one multiplied by 1/1, which gloo refuses on any device.
        module.set_force_sum_reduction_for_comms(True)


def keep_attributes(model: nn.Module, attributes: Attributes) -> None:
    """A parameter that FSDP2 has gathered has the attributes of the one at rest. It makes it when it first gathers it.

    Private: there is no public way to a gathered parameter but in the forward of its unit.
    """
    names = {id(p): name for name, p in model.named_parameters() if name in attributes}
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for fsdp_param in group.fsdp_params:
                if (name := names.get(id(fsdp_param.sharded_param))) is not None:
                    _give_when_gathered(fsdp_param, attributes[name])


def _give_when_gathered(fsdp_param: Any, attributes: Mapping[str, Any]) -> None:
    make = fsdp_param.init_unsharded_param

    def made_first() -> None:
        make()
        vars(fsdp_param._unsharded_param).update(attributes)
        del fsdp_param.init_unsharded_param  # the class's own from then on: the parameter stays the same

    set_on(fsdp_param, "init_unsharded_param", made_first)


def reduce_gradients(model: nn.Module) -> None:
    """Reduces what backwards without reduction have added up, and frees gathered parameters: the end of a pipeline's step.

    Private: FSDP2 reduces at the end of a backward, and the last backward of a stage is not that of every unit. Torch's own
    pipeline runtime does the same.
    """
    if not isinstance(model, FSDPModule):
        return
    state = model._get_fsdp_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                group.post_backward()
    state._root_post_backward_final_callback()


def add_up_unreduced(model: nn.Module) -> None:
    """Adds the gradients of a backward to those of earlier ones in the type that they are reduced in, as FSDP2 does at the end
    of a unit's backward: for a backward of weights alone, which no unit sees.

    Private: what FSDP2 does there has no public name.
    """
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            if hasattr(group, "_set_unsharded_grad_dtypes"):  # gradients that autograd adds up in that type
                group._set_unsharded_grad_dtypes(defer_upcast=False)
                continue
            for fsdp_param in group.fsdp_params:
                if fsdp_param.reduce_dtype is not None and hasattr(fsdp_param, "_unsharded_param"):
                    fsdp_param.accumulate_unsharded_grad_if_needed()
                    fsdp_param.to_accumulated_grad_if_needed()


def parameter_groups(module: FSDPModule) -> Iterator[Any]:
    """FSDP2's parameter groups of a module.

    Private: there is no public way to act between the backward of a unit and its reduction
    (``set_reduce_scatter_unused_params`` of torch 2.13 fills zeros too, but does not say where, and 2.11 lacks it).
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return (group for group in groups if group is not None)


def gathered(module: FSDPModule) -> Iterator[tuple[Tensor, Tensor]]:
    """(a parameter at rest, what FSDP2 has gathered of it) of a unit, in its forward."""
    for group in parameter_groups(module):
        for fsdp_param in group.fsdp_params:
            p = getattr(fsdp_param, "_unsharded_param", None)
            if p is not None and local_tensor(p).untyped_storage().size():
                yield fsdp_param.sharded_param, local_tensor(p)


def before_reduction(group: Any, act: Callable[[Any], None]) -> None:
    """``act`` on each parameter of a group, after the backward of its unit and before its gradients are reduced."""
    reduce = group.post_backward

    def post_backward(*args: Any) -> Any:
        if group.reduce_grads:
            for fsdp_param in group.fsdp_params:
                act(fsdp_param)
            if not hasattr(group, "_set_unsharded_grad_dtypes"):  # it reduces several types at once
                _put_in_one_type(group.fsdp_params)
        return reduce(*args)

    set_on(group, "post_backward", post_backward)


def _put_in_one_type(fsdp_params: Sequence[Any]) -> None:
    """Gradients of a group that is to be reduced, if some were added up over microbatches, in the type of the reduction.

    Those of parameters that the last microbatch was the first to use are in the type of the backward, and FSDP2 reduces one
    type at once.

    Private: what FSDP2 does with accumulated gradients has no public name.
    """
    if any(fsdp_param.unsharded_accumulated_grad is not None for fsdp_param in fsdp_params):
        for fsdp_param in fsdp_params:
            if hasattr(fsdp_param, "_unsharded_param") and fsdp_param.unsharded_accumulated_grad is None:
                fsdp_param.to_accumulated_grad_if_needed()


def without_gradient(fsdp_param: Any) -> Tensor | None:
    """The gathered parameter, where it should have a gradient by now and has none."""
    p: Tensor | None = getattr(fsdp_param, "_unsharded_param", None)
    if p is None or not p.requires_grad or p.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
        return None
    return p


def _mesh(unit: Unit, groups: Groups) -> Any:
    mesh = groups.of(unit.data, unit.place)
    names = [n for n in ("dp_replicate", "dp_shard") if n == "dp_shard" or mesh[n].size() > 1]
    return mesh[tuple(names)] if len(names) > 1 else mesh["dp_shard"]


def _policy(recipe: Recipe, unit: Unit) -> MixedPrecisionPolicy:
    if recipe.precision not in ("bfloat16", "float16"):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # Inputs are cast at the root alone: tables in float32 that a model hands to its blocks stay float32.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.precision), reduce_dtype=torch.float32, cast_forward_inputs=not unit.name
    )


@contextmanager
def _hooks_without_view(module: nn.Module, unit: Unit, policy: MixedPrecisionPolicy) -> Iterator[None]:
    """FSDP2's own hooks see local tensors, without the view: they build parameters and walk the autograd graph.

    There is no public way to order a hook against a function mode; its hooks are the ones that appear meanwhile.
    """
    tables = module._forward_pre_hooks, module._forward_hooks
    before = [set(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        for key in [k for k in table if k not in known]:
            before_it = table is tables[0]
            if before_it:
                table[key] = _locally(table[key], given=unit.follows_inputs, low=_type_of_inputs(policy))
            else:
                table[key] = _locally(table[key], after=True)


_KEPT = (RemoteTensor, nn.Parameter)  # not here; or known by being what it is, which nothing may stand in for


def _type_of_inputs(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """What FSDP2 casts the inputs of a unit to; None: to nothing."""
    return policy.param_dtype if policy.cast_forward_inputs else None


def _locally(
    hook: Callable[..., Any], *, after: bool = False, given: bool = True, low: torch.dtype | None = None
) -> Callable[..., Any]:
    """An FSDP2 hook that is given local tensors, wherever in a structure they are, and no view; none, unless ``given``: then
    what it would have cast to ``low`` is cast here.

    FSDP2 looks for tensors in the containers that pytree knows. In any other (a dataclass, a plain object) it would find
    none, run no backward hook and leave gradients unreduced; so it is given a flat list.

    After a forward it gathers parameters again in the backward, by hooks on the tensors that the unit gave. If such a tensor
    is a view (a linear over three dims gives one) and the model writes to it in place, autograd drops the node that the hook
    is of: the write is then a node of what it is a view of. So FSDP2 is given that tensor too.
    """

    def run(module: nn.Module, *values: Any) -> Any:
        *leading, last = values
        # Pre-hooks have (args, kwargs), and give both back; post-hooks (args, output), and give the output.
        subject = last if after else (*leading, last)
        tensors = [t for t in tensors_of(subject) if not isinstance(t, _KEPT)]
        plain = [local_of(local_rows(t)) for t in tensors]
        with without_modes():
            if after:
                new = hook(module, (), [*plain, *bases_of(plain)])[: len(plain)]
            elif given:
                (new,), _ = hook(module, (plain,), {})
            else:
                hook(module, ([],), {})
                new = [t.to(low) if low is not None and t.is_floating_point() else t for t in plain]
        if all(a is b for a, b in zip(plain, new, strict=True)):
            return None if after else subject
        back = iter(zip(tensors, new, strict=True))
        told = note_replaced if after else note_replaced_within
        return put_tensors(lambda t: t if isinstance(t, _KEPT) else _as_before(*next(back), told), subject)

    return run


def _as_before(before: Tensor, now: Tensor, told: Callable[[Tensor, Tensor], None]) -> Tensor:
    """What the hook gave in place of a tensor, as the model is to see it; ``told``: is told of it."""
    subject = local_rows(before)
    if now is local_of(subject):
        return before
    shown = GlobalTensor(now, subject._mw_layout, subject._mw_dispatcher) if isinstance(subject, GlobalTensor) else now
    told(before, shown)
    return shown
