"""Parameters: sharded on meta, before memory is allocated; filled at the end, one slice at a time.

Between steps a parameter is a DTensor over the tp mesh (parameters that are not sharded are replicated, so that all are on one
mesh), which FSDP2 then shards over the data axes. Its local tensor is the slice in the recipe. For fused blocks this is not the
slice of DTensor's ``Shard``: ``redistribution`` makes ``full_tensor()`` right for a person, while a job lives. This package
assembles full tensors by the recipe, one at a time, on rank 0 (``gather``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor

from meshwright.errors import Finding, Findings
from meshwright.layout import Shard
from meshwright.private import replace_tensors
from meshwright.recipe import ParameterRecipe, Recipe, take_slices
from meshwright.runtime.groups import Groups

Values = Callable[[ParameterRecipe], Tensor]
Allocated = Callable[[Tensor, torch.device], Tensor]
"""(tensor, device) → the tensor on that device; for a tensor on meta, uninitialized memory of its shape."""
Attributes = Mapping[str, Mapping[str, Any]]
"""Parameter → its attributes, by name."""
StandIns = dict[int, tuple[Tensor, DTensor]]
"""id of a Parameter that a model also reaches outside its modules → (this object, the parameter that replaces it in
modules)."""


def parameter_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, module, attribute, parameter) for each attribute of a module that holds a parameter. A tied parameter has
    several."""
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, p in module._parameters.items():
            if p is not None:
                yield (f"{prefix}.{name}" if prefix else name), module, name, p


class CurrentParameters:
    """Looks up the current Parameter objects of a model, by name, without a walk over the model.

    FSDP2 replaces the objects while a unit is gathered, so they must be looked up at each use.

    Args:
        names: the names that will be looked up.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        split = ((name, *name.rpartition(".")) for name in names)
        self._slots = {name: (model.get_submodule(path), key) for name, path, _, key in split}

    def __getitem__(self, name: str) -> nn.Parameter:
        module, key = self._slots[name]
        p: nn.Parameter = getattr(module, key)
        return p

    def each(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The parameters of these names, in order.

        Reads the modules' dicts, which is faster than reading attributes: each step looks up all parameters.
        """
        slots = map(self._slots.__getitem__, names)
        candidates = ((module._parameters.get(key), module, key) for module, key in slots)
        return [getattr(module, key) if p is None else p for p, module, key in candidates]


def named_parameters_of(model: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    """Every parameter of a job, by each of its names.

    Raises:
        PlanError: with each that is no longer in the model. Alike on all ranks, which have the same modules.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    findings = Findings("this model")
    findings.extend([removed(line) for line in recipe.parameters if line.name not in named])
    findings.raise_if_any()
    return named


def removed(line: ParameterRecipe) -> Finding:
    """A finding: a parameter that was there when the job was made is gone."""
    return Finding(
        where=line.name,
        given="no such parameter: it, or a module around it, was removed or replaced since the job was made",
        required="the parameters that were planned: they are reduced, compared and saved",
        fix="remove it before parallelize; or keep it, and let the forward pass it by",
    )


def attributes_of(model: nn.Module) -> Attributes:
    """Parameter → its attributes (``p._no_weight_decay = True``), for parameters that have some."""
    of_all = ((name, dict(vars(p))) for name, p in model.named_parameters())
    return {name: attributes for name, attributes in of_all if attributes}


def give_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Sets ``attributes`` on the parameters that are in the model now: optimizers and forwards read them there."""
    for name, p in model.named_parameters():
        vars(p).update(attributes.get(name, {}))


def make_gradients_dense(model: nn.Module) -> None:
    """Turns ``sparse`` off on embeddings, whose gradients are then dense: neither FSDP2 nor DTensor has sparse gradients."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def shard_parameters(model: nn.Module, recipe: Recipe, groups: Groups) -> None:
    """Replaces every parameter (on meta) by a DTensor over the tp mesh with this rank's local shape. Tied ones stay tied.

    (By ``register_parameter``: a class may do more when it is assigned to, and register again those not yet replaced.)
    """
    if recipe.mesh.axis_size("tp") == 1:
        return
    replaced: dict[int, nn.Parameter] = {}
    for name, module, key, p in list(parameter_slots(model)):
        line = recipe.by_name[name]
        if not recipe.holds(line, groups.rank):
            continue
        if id(p) not in replaced:
            replaced[id(p)] = _at_rest(p, line, recipe, groups)
        module.register_parameter(key, replaced[id(p)])


def _at_rest(p: nn.Parameter, line: ParameterRecipe, recipe: Recipe, groups: Groups) -> nn.Parameter:
    """A parameter as it is between steps: a DTensor (on meta) over the tp mesh, with this rank's local shape."""
    placement = dtensor.Shard(line.tp.dim) if isinstance(line.tp, Shard) else dtensor.Replicate()
    # Parameters that several branches use are replicated on all ranks.
    place = line.place if len(line.places) == 1 else 0
    coordinate = recipe.places.at(groups.rank, place)
    assert coordinate is not None
    local = torch.empty(line.local_shape(coordinate.tp), dtype=p.dtype, device="meta")
    mesh = groups.of(line.data, place)["tp"]
    stride = torch.empty(line.shape, device="meta").stride()
    sharded = DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(line.shape), stride=stride)
    return nn.Parameter(sharded, requires_grad=p.requires_grad)


def allocate(model: nn.Module, recipe: Recipe, groups: Groups, allocated: Allocated) -> None:
    """Allocates memory for this rank's parameters, without values, and moves buffers to the device."""
    replaced: dict[int, nn.Parameter] = {}
    elsewhere = {
        id(p) for name, _, _, p in parameter_slots(model) if not recipe.holds(recipe.by_name[name], groups.rank)
    }
    # ``replace_tensors`` would untie plain parameters, as it makes a new one for each attribute.
    plain = {id(p) for _, _, _, p in parameter_slots(model) if p.is_meta and not isinstance(p, DTensor)}
    replace_tensors(model, lambda t: t if id(t) in plain or id(t) in elsewhere else allocated(t, groups.device))
    for _, module, key, p in list(parameter_slots(model)):
        if id(p) in plain and id(p) not in elsewhere:
            if id(p) not in replaced:
                replaced[id(p)] = nn.Parameter(allocated(p.detach(), groups.device), requires_grad=p.requires_grad)
            module.register_parameter(key, replaced[id(p)])


def fill(model: nn.Module, recipe: Recipe, groups: Groups, values: Values | None) -> None:
    """Fills this rank's parameters, one at a time. ``values``: line → the full tensor; None: fill with nan, as values are
    loaded later."""
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for line in recipe.held_by(groups.rank):
            local = local_tensor(named[line.name])
            if values is None:
                local.fill_(torch.nan if local.is_floating_point() or local.is_complex() else 0)
            else:
                local.copy_(take_slices(values(line), recipe.held(line, groups.rank)).to(groups.device))


def put_back(model: nn.Module, objects: Mapping[str, nn.Parameter]) -> StandIns:
    """Puts the original Parameter objects back into modules, because the model also reaches them outside its modules.

    Args:
        objects: parameter's name → the original object.

    Returns:
        The objects that cannot be put back, because the parameter is a DTensor now, with these DTensors.
    """
    named, slots = dict(model.named_parameters(remove_duplicate=False)), list(parameter_slots(model))
    stand_ins: StandIns = {}
    for name, before in objects.items():
        now = named[name]
        if isinstance(now, DTensor):
            stand_ins[id(before)] = before, now
        elif now is not before:
            torch.utils.swap_tensors(before, now)
            for _, module, key, p in slots:
                if p is now:
                    module.register_parameter(key, before)
    return stand_ins


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; for a tensor on meta, uninitialized memory of its shape."""
    return torch.empty_like(t, device=device) if t.is_meta else t.to(device)


def zero_gradient(p: Tensor) -> Tensor:
    """A gradient of zeros for a parameter, in the dtype of its gradients: ``Tensor.grad_dtype`` if it is set (torch has it from
    2.13 on at the latest), else the parameter's."""
    return torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None))


def dtensor_like(p: DTensor, local: Tensor) -> DTensor:
    """A local tensor as a DTensor with a parameter's shape, strides and mesh.

    ``DTensor.to_local`` guesses the global strides from even shares; with uneven ones the gradient's strides then differ
    from the parameter's, and autograd copies it into a tensor of the wrong local shape.
    """
    return DTensor.from_local(
        local.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def own_gradient(p: Tensor) -> Tensor | None:
    """The gradient of a parameter, divided as the parameter is. Collective, if it was not.

    A backward of DTensors outside of a step (of a penalty, say) may leave it whole, or a summand of it on each rank.
    """
    grad = p.grad
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        grad = p.grad = dtensor_like(p, grad.redistribute(placements=p.placements).to_local())
    return grad


def local_tensor(p: Tensor) -> Tensor:
    """The local tensor of a parameter or gradient."""
    return p.to_local() if isinstance(p, DTensor) else p
