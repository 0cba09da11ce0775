"""Data parallelism: FSDP2 over the data axes, for every unit; replicated units are HSDP with shards of one rank.

All reductions are sums: the mean is taken once, in the loss (run/step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils import _pytree as pytree

from meshwright.recipe import Recipe, Unit
from meshwright.run.groups import Groups
from meshwright.view.tensor import View


def needs_fsdp(recipe: Recipe) -> bool:
    """Whether there is something for FSDP2 to do: data ranks, or mixed precision, which comes from it."""
    return recipe.mesh.data_size > 1 or recipe.precision in ("bfloat16", "float16")


def shard_units(model: nn.Module, recipe: Recipe, groups: Groups) -> None:
    """``fully_shard`` on every unit, innermost first, the root last."""
    if not needs_fsdp(recipe):
        return
    modules = dict(model.named_modules())
    named = dict(model.named_parameters(remove_duplicate=False))
    loose = {named[p.name] for p in recipe.parameters if p.data == "loose"}
    for unit in recipe.units:
        module = modules[unit.name]
        before = _hooks(module)
        fully_shard(
            module,
            mesh=_mesh(unit, groups),
            reshard_after_forward=recipe.reshard_after_forward and bool(unit.name),
            mp_policy=_policy(recipe, unit),
            ignored_params=loose or None,
        )
        _without_view(module, before)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        if groups.device.type == "cpu":  # gloo has no pre-multiplied sum
            module.set_force_sum_reduction_for_comms(True)


def _mesh(unit: Unit, groups: Groups) -> Any:
    mesh = groups.of(unit.data)
    names = [n for n in ("dp_replicate", "dp_shard") if n == "dp_shard" or mesh[n].size() > 1]
    return mesh[tuple(names)] if len(names) > 1 else mesh["dp_shard"]


def _policy(recipe: Recipe, unit: Unit) -> MixedPrecisionPolicy:
    if recipe.precision not in ("bfloat16", "float16"):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # Inputs are cast at the root alone: tables in float32 that a model hands to its blocks stay float32.
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, recipe.precision), reduce_dtype=torch.float32, cast_forward_inputs=not unit.name
    )


def _hooks(module: nn.Module) -> set[int]:
    return {*module._forward_pre_hooks, *module._forward_hooks}


def _without_view(module: nn.Module, before: set[int]) -> None:
    """FSDP2's own hooks see local tensors, without the view: they build parameters and walk the autograd graph.

    There is no public way to order a hook against a function mode; its hooks are the ones that appeared.
    """
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key in [k for k in table if k not in before]:
            table[key] = _locally(table[key])


def _locally(hook: Callable[..., Any]) -> Callable[..., Any]:
    def run(module: nn.Module, *values: Any) -> Any:
        leaves, spec = pytree.tree_flatten(values)
        plain = [leaf._mw_local if isinstance(leaf, View) else leaf for leaf in leaves]
        with torch._C.DisableTorchFunction():
            result = hook(module, *pytree.tree_unflatten(plain, spec))
        if result is None or not any(isinstance(leaf, View) for leaf in leaves):
            return result
        return _as_before(result, values, leaves, plain)

    return run


def _as_before(result: Any, values: tuple[Any, ...], leaves: list[Any], plain: list[Any]) -> Any:
    """A hook's result with its tensors as Views again, each as the leaf that it came from."""
    # Pre-hooks give (args, kwargs), post-hooks the output, which comes last among the values.
    out, spec = pytree.tree_flatten(result)
    first = len(leaves) - len(out)
    wrapped = []
    for x, view in zip(out, leaves[first:], strict=True):
        if isinstance(view, View) and isinstance(x, Tensor):
            x = View(x, view._mw_layout, view._mw_work) if x is not view._mw_local else view
        wrapped.append(x)
    return pytree.tree_unflatten(wrapped, spec)
