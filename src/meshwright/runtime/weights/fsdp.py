"""Applies FSDP2 to every unit of a model, over the data axes. A replicated unit is HSDP with shards of one rank.

If a plan does not need FSDP2 (``dp_replicate`` alone, say), the job sums gradients itself (``gradient_sums``).

All reductions are sums: the loss is divided by the number of rows (runtime/rows/microbatches.py).
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
from meshwright.private import raw_local, storage_of, tensor_to_hook, without_modes
from meshwright.recipe import Recipe, Unit
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.parameters import Attributes, local_tensor
from meshwright.spmd.patches import class_name_kept, set_on
from meshwright.spmd.tensor import GlobalTensor, local_of


def needs_fsdp(recipe: Recipe) -> bool:
    """Whether a plan needs FSDP2: for shards over data ranks; for mixed precision; or to sum over data ranks while the backward
    runs, if tp communicates in the backward, too. (Without tp ``buckets`` does this.)"""
    replicas, shards, tp = (_largest(recipe, axis) for axis in ("dp_replicate", "dp_shard", "tp"))
    return recipe.precision in ("bfloat16", "float16") or shards > 1 or (replicas > 1 and tp > 1)


def holds_dtensors(recipe: Recipe) -> bool:
    """Whether the parameters of a plan are DTensors: FSDP2 and tp hold them so."""
    return needs_fsdp(recipe) or _largest(recipe, "tp") > 1


def _largest(recipe: Recipe, axis: str) -> int:
    """The size of an axis in the submesh in which it is largest."""
    return max(recipe.places.axis_size(place, axis) for place in range(1 + len(recipe.branches)))


def shard_units(model: nn.Module, recipe: Recipe, groups: Groups) -> None:
    """Calls ``fully_shard`` on every unit with parameters on this rank, innermost first, the root last."""
    if not needs_fsdp(recipe):
        return
    modules = dict(model.named_modules())
    named = dict(model.named_parameters(remove_duplicate=False))
    sharded = [line for line in recipe.held_by(groups.rank) if line.data != "loose"]
    others = {named[p.name] for p in recipe.parameters} - {named[p.name] for p in sharded}
    for line in sharded:  # FSDP2 takes no others (a matrix of ``torch.linalg.qr``, a model in channels_last)
        named[line.name].data = named[line.name].data.contiguous()
    for unit in recipe.units:
        if unit.name and not any(p.unit == unit.name for p in sharded):
            continue  # it runs on other stages, or in other branches
        module = modules[unit.name]
        policy = _policy(recipe, unit)
        with _hooks_without_modes(module, unit, policy), class_name_kept(module):
            fully_shard(
                module,
                mesh=unit_mesh(unit, groups),
                reshard_after_forward=recipe.reshard_after_forward and bool(unit.name) and unit.follows_outputs,
                mp_policy=policy,
                ignored_params=others or None,
            )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # Plain sums, which every backend has. Else FSDP2 asks for a sum multiplied by 1/1, which gloo refuses on any device.
        module.set_force_sum_reduction_for_comms(True)
        for group in parameter_groups(module):
            _keep_gathered_in_forward(group)


def _keep_gathered_in_forward(group: Any) -> None:
    """Lets a forward call ``state_dict`` or ``load_state_dict`` of its own modules, of which it gets the gathered parameters.

    FSDP2 shards a unit's parameters again before these two functions, so that they have what is at rest. Within the unit's
    forward (a mean teacher that follows the student by its state, for example) the forward would go on with shards.

    Private: FSDP2 registers the hooks that do this when it first runs, and has no option to leave them out.
    """
    register = group._register_state_dict_hooks

    def between_forwards(hook: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: hook(*args, **kwargs) if group._training_state.name == "IDLE" else None

    def register_and_wrap() -> None:
        register()
        for module, handle in group._module_to_pre_save_state_dict_hook_handle.items():
            hooks = module._state_dict_pre_hooks
            hooks[handle.id] = between_forwards(hooks[handle.id])
        for module, handle in group._module_to_pre_load_state_dict_hook_handle.items():
            hooks = module._load_state_dict_pre_hooks
            hooks[handle.id] = between_forwards(hooks[handle.id])

    set_on(group, "_register_state_dict_hooks", register_and_wrap)


def keep_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Gives each gathered parameter the attributes of its sharded one, when FSDP2 first gathers it and makes its object.

    Private: a gathered parameter is public only within the forward of its unit.
    """
    names = {id(p): name for name, p in model.named_parameters() if name in attributes}
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for fsdp_param in group.fsdp_params:
                if (name := names.get(id(fsdp_param.sharded_param))) is not None:
                    _give_when_gathered(fsdp_param, attributes[name])


def _give_when_gathered(fsdp_param: Any, attributes: Mapping[str, Any]) -> None:
    make = fsdp_param.init_unsharded_param

    def make_with_attributes() -> None:
        make()
        vars(fsdp_param._unsharded_param).update(attributes)
        del fsdp_param.init_unsharded_param  # back to the class's own method: the object stays the same from now on

    set_on(fsdp_param, "init_unsharded_param", make_with_attributes)


def reduce_gradients(model: nn.Module) -> None:
    """Reduces the gradients that backwards without reduction have accumulated, and frees gathered parameters. Called at the end
    of a pipeline's step.

    Private: FSDP2 reduces at the end of a unit's backward, and a stage's last backward need not be the last one of every unit.
    Torch's own pipeline runtime does the same.
    """
    if not isinstance(model, FSDPModule):
        return
    state = model._get_fsdp_state()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                group.post_backward()
    context: Any = state._state_ctx
    # Torch 2.15 sets this flag in the first backward of a unit, and asserts below that it is set. None may have run in this
    # step.
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def add_up_unreduced(model: nn.Module) -> None:
    """Adds a backward's gradients to those of earlier microbatches, in the dtype in which FSDP2 reduces.

    FSDP2 does this at the end of a unit's backward. A backward of weights alone runs no hook of a unit, so it is done here.

    Private: FSDP2 has no public function for it.
    """
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            if hasattr(group, "_set_unsharded_grad_dtypes"):  # newer torch: autograd itself accumulates in that dtype
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
    """(sharded parameter, gathered local tensor) for each parameter of a unit that is gathered now."""
    for group in parameter_groups(module):
        for fsdp_param in group.fsdp_params:
            p = getattr(fsdp_param, "_unsharded_param", None)
            if p is not None and local_tensor(p).untyped_storage().size():
                yield fsdp_param.sharded_param, local_tensor(p)


def follow_memory(model: nn.Module) -> None:
    """Makes FSDP2 gather each parameter from the memory that it has now: ``p.data = …`` gave it other memory between steps.

    What shares that memory still does: if there is no room for the padding of uneven shares, it grows in its place.

    Private: ``reset_sharded_param``, which FSDP2 calls once, makes a copy in that case.
    """
    for module in model.modules():
        for group in parameter_groups(module) if isinstance(module, FSDPModule) else ():
            for fsdp_param in group.fsdp_params:
                local, gathered_from = raw_local(fsdp_param.sharded_param), fsdp_param._sharded_param_data
                if local.numel() and _begin(local) != _begin(gathered_from):
                    fsdp_param._sharded_param_data = _padded(local, gathered_from.numel())


def _begin(t: Tensor) -> tuple[int, int]:
    """Where a tensor begins: its memory, and the element in it. (A fake tensor has no address.)"""
    return storage_of(t), int(t.storage_offset())


def _padded(local: Tensor, size: int) -> Tensor:
    """``size`` elements of memory, of which a contiguous tensor is the first ones. The others are padding: FSDP2 gathers them
    and does not use them, so they may belong to another tensor."""
    memory, begin = local.untyped_storage(), int(local.storage_offset())
    end = (begin + size) * local.element_size()
    if int(memory.nbytes()) < end:
        memory.resize_(end)
    return local.detach().as_strided((size,), (1,), begin)


def before_reduction(group: Any, act: Callable[[Any], None]) -> None:
    """Makes a group call ``act`` on each of its parameters after the backward of its unit, before it reduces gradients."""
    reduce = group.post_backward

    def post_backward(*args: Any) -> Any:
        if group.reduce_grads:
            for fsdp_param in group.fsdp_params:
                act(fsdp_param)
            if not hasattr(group, "_set_unsharded_grad_dtypes"):  # (newer torch reduces several dtypes at once)
                _put_in_one_type(group.fsdp_params)
        return reduce(*args)

    set_on(group, "post_backward", post_backward)


def _put_in_one_type(fsdp_params: Sequence[Any]) -> None:
    """Converts a group's gradients to the dtype of the reduction, if some were accumulated over microbatches.

    Parameters that only the last microbatch used have gradients in the dtype of the backward, and FSDP2 reduces one dtype at
    once.

    Private: FSDP2 has no public function for accumulated gradients.
    """
    if any(fsdp_param.unsharded_accumulated_grad is not None for fsdp_param in fsdp_params):
        for fsdp_param in fsdp_params:
            if hasattr(fsdp_param, "_unsharded_param") and fsdp_param.unsharded_accumulated_grad is None:
                fsdp_param.to_accumulated_grad_if_needed()


def without_gradient(fsdp_param: Any) -> Tensor | None:
    """The gathered parameter, if it requires a gradient and has none; else None."""
    p: Tensor | None = getattr(fsdp_param, "_unsharded_param", None)
    if p is None or not p.requires_grad or p.grad is not None or fsdp_param.unsharded_accumulated_grad is not None:
        return None
    return p


def unit_mesh(unit: Unit, groups: Groups) -> Any:
    """The mesh of a unit: the data axes, without ``dp_replicate`` if it has one rank."""
    mesh = groups.of(unit.data, unit.place)
    names = [n for n in ("dp_replicate", "dp_shard") if n == "dp_shard" or mesh[n].size() > 1]
    return mesh[tuple(names)] if len(names) > 1 else mesh["dp_shard"]


def _policy(recipe: Recipe, unit: Unit) -> MixedPrecisionPolicy:
    if recipe.precision not in ("bfloat16", "float16"):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # Only the root casts its inputs: tables in float32 that a model passes to its blocks stay float32.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.precision), reduce_dtype=torch.float32, cast_forward_inputs=not unit.name
    )


@contextmanager
def _hooks_without_modes(module: nn.Module, unit: Unit, policy: MixedPrecisionPolicy) -> Iterator[None]:
    """A context in which FSDP2 registers its hooks. Afterwards the hooks are wrapped to run on local tensors, with modes off:
    they make parameters and walk the autograd graph.

    There is no public way to order a hook against a function mode. FSDP2's hooks are those that are new after the ``with``.
    """
    tables = module._forward_pre_hooks, module._forward_hooks
    before = [set(table) for table in tables]
    yield
    for table, registered in zip(tables, before, strict=True):
        for key in [k for k in table if k not in registered]:
            is_pre_hook = table is tables[0]
            if is_pre_hook:
                table[key] = _locally(table[key], with_inputs=unit.follows_inputs, low=_type_of_inputs(policy))
            else:
                table[key] = _locally(table[key], after=True)


_SKIPPED = (RemoteTensor, nn.Parameter)  # skipped: values on other ranks, and Parameters, whose identity matters


def _type_of_inputs(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype to which FSDP2 casts a unit's inputs; None if it does not cast them."""
    return policy.param_dtype if policy.cast_forward_inputs else None


def _locally(
    hook: Callable[..., Any], *, after: bool = False, with_inputs: bool = True, low: torch.dtype | None = None
) -> Callable[..., Any]:
    """Wraps an FSDP2 hook so that it gets a flat list of local tensors, with modes off.

    FSDP2 looks for tensors in the containers that pytree knows. In any other container (a dataclass, a plain object) it would
    find none, run no backward hook and leave gradients unreduced.

    The hook after a forward registers hooks on the unit's results, to gather parameters again in the backward. If a result is a
    view (a linear over three dims returns one) and the model writes to it in place, autograd drops the view's node and makes a
    node for the write on the base. So the hooks are registered on the bases of views.

    Args:
        after: whether the hook runs after the forward; else before it.
        with_inputs: whether a hook before the forward gets the inputs. If not, inputs are cast here, to ``low``.
        low: the dtype to which FSDP2 casts inputs; None if it does not.
    """

    def run(module: nn.Module, *values: Any) -> Any:
        *leading, last = values
        # Pre-hooks have (args, kwargs), and give both back; post-hooks (args, output), and give the output.
        subject = last if after else (*leading, last)
        tensors = [t for t in tensors_of(subject) if not isinstance(t, _SKIPPED)]
        plain = [local_of(local_rows(t)) for t in tensors]
        with without_modes():
            if after:
                hooked = [tensor_to_hook(t) for t in plain]
                results = hook(module, (), hooked)
                new = [t if now is base else now for t, base, now in zip(plain, hooked, results, strict=True)]
            elif with_inputs:
                (new,), _ = hook(module, (plain,), {})
            else:
                hook(module, ([],), {})
                new = [t.to(low) if low is not None and t.is_floating_point() else t for t in plain]
        if all(a is b for a, b in zip(plain, new, strict=True)):
            return None if after else subject
        before_and_now = iter(zip(tensors, new, strict=True))
        note = note_replaced if after else note_replaced_within
        return put_tensors(lambda t: t if isinstance(t, _SKIPPED) else _as_before(*next(before_and_now), note), subject)

    return run


def _as_before(before: Tensor, now: Tensor, note: Callable[[Tensor, Tensor], None]) -> Tensor:
    """The tensor that the model sees after the hook: ``before`` if the hook did not change it, else ``now``, wrapped as
    ``before`` was. ``note`` is called with both if it changed."""
    subject = local_rows(before)
    if now is local_of(subject):
        return before
    shown = GlobalTensor(now, subject._mw_layout, subject._mw_dispatcher) if isinstance(subject, GlobalTensor) else now
    note(before, shown)
    return shown
