"""Parameters: cut on meta, before anything holds them; filled at the end, slice by slice.

At rest a parameter is a DTensor over the tp mesh (whole ones replicated, so that all stand on one mesh), which FSDP2 then
shards over the data axes. Its local tensor is the recipe's slice: for a cut of fused blocks that is not what DTensor's
``Shard`` means by a slice, so whole values are always put together from the recipe (runtime/weights/gather.py), never by
``full_tensor()`` (which is right for every parameter of one block in even shares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor

from meshwright.layout import Shard
from meshwright.private import replace_tensors
from meshwright.recipe import ParameterRecipe, Recipe, take_slices
from meshwright.runtime.groups import Groups

Values = Callable[[ParameterRecipe], Tensor]
Allocated = Callable[[Tensor, torch.device], Tensor]
"""A tensor, and a device → the same there; of one on meta, memory of its shape."""
Attributes = Mapping[str, Mapping[str, Any]]
"""Parameter → its attributes, by name."""
StandIns = dict[int, tuple[Tensor, DTensor]]
"""Identity of an object that a model has elsewhere than in its modules → that object, the parameter that stands there."""


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place a parameter stands at: (full name, module, name in it, parameter); tied ones at each place."""
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, p in module._parameters.items():
            if p is not None:
                yield (f"{prefix}.{name}" if prefix else name), module, name, p


class Standing:
    """Parameters of a model by their names, as they stand in it now: FSDP2 puts other objects in their places while a unit is
    gathered. Each is one look-up; a walk over the model is not.

    Args:
        names: of those that are asked for.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        split = ((name, *name.rpartition(".")) for name in names)
        self._at = {name: (model.get_submodule(path), key) for name, path, _, key in split}

    def __getitem__(self, name: str) -> nn.Parameter:
        module, key = self._at[name]
        p: nn.Parameter = getattr(module, key)
        return p

    def each(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Those of some names, in this order. Every step asks, so they are looked up in the tables of modules."""
        at = map(self._at.__getitem__, names)
        found = ((module._parameters.get(key), module, key) for module, key in at)
        return [getattr(module, key) if p is None else p for p, module, key in found]


def attributes_of(model: nn.Module) -> Attributes:
    """The attributes that a model has put on its parameters (``p._no_weight_decay = True``), of those that have some."""
    own = ((name, dict(vars(p))) for name, p in model.named_parameters())
    return {name: attributes for name, attributes in own if attributes}


def give_attributes(model: nn.Module, attributes: Attributes) -> None:
    """Puts them on the parameters that have been put in the place of those: optimizers and forwards look for them there."""
    for name, p in model.named_parameters():
        vars(p).update(attributes.get(name, {}))


def make_gradients_dense(model: nn.Module) -> None:
    """Tables whose gradients would be sparse give the same as dense ones: neither FSDP2 nor DTensor knows sparse gradients."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False


def cut_parameters(model: nn.Module, recipe: Recipe, groups: Groups) -> None:
    """Replaces every parameter (on meta) by a DTensor over the tp mesh, of this rank's shape; ties are kept."""
    if recipe.mesh.axis_size("tp") == 1:
        return
    made: dict[int, nn.Parameter] = {}
    for name, module, key, p in list(places(model)):
        line = recipe.by_name[name]
        if not recipe.holds(line, groups.rank):
            continue
        if id(p) not in made:
            made[id(p)] = _at_rest(p, line, recipe, groups)
        setattr(module, key, made[id(p)])


def _at_rest(p: nn.Parameter, line: ParameterRecipe, recipe: Recipe, groups: Groups) -> nn.Parameter:
    placement = dtensor.Shard(line.tp.dim) if isinstance(line.tp, Shard) else dtensor.Replicate()
    # What several places share, some of which this rank may not be of, stands whole on the trunk's ranks.
    place = line.place if len(line.places) == 1 else 0
    at = recipe.places.at(groups.rank, place)
    assert at is not None
    local = torch.empty(line.local_shape(at.tp), dtype=p.dtype, device="meta")
    mesh = groups.of(line.data, place)["tp"]
    stride = torch.empty(line.shape, device="meta").stride()
    whole = DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(line.shape), stride=stride)
    return nn.Parameter(whole, requires_grad=p.requires_grad)


def allocate(model: nn.Module, recipe: Recipe, groups: Groups, allocated: Allocated) -> None:
    """Gives what this rank holds memory, and no values yet; buffers move to the device.

    ``allocated``: (tensor, device) → the same on the device; of one on meta, memory of its shape.
    """
    made: dict[int, nn.Parameter] = {}
    elsewhere = {id(p) for name, _, _, p in places(model) if not recipe.holds(recipe.by_name[name], groups.rank)}
    # replace_tensors would untie plain parameters: it makes each place anew.
    plain = {id(p) for _, _, _, p in places(model) if p.is_meta and not isinstance(p, DTensor)}
    replace_tensors(model, lambda t: t if id(t) in plain or id(t) in elsewhere else allocated(t, groups.device))
    for _, module, key, p in list(places(model)):
        if id(p) in plain and id(p) not in elsewhere:
            if id(p) not in made:
                made[id(p)] = nn.Parameter(allocated(p.detach(), groups.device), requires_grad=p.requires_grad)
            setattr(module, key, made[id(p)])


def fill(model: nn.Module, recipe: Recipe, groups: Groups, values: Values | None) -> None:
    """Fills what this rank holds, one parameter at a time; with no numbers (nan), where values come later."""
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for line in recipe.held_by(groups.rank):
            local = local_tensor(named[line.name])
            if values is None:
                local.fill_(torch.nan if local.is_floating_point() or local.is_complex() else 0)
            else:
                local.copy_(take_slices(values(line), recipe.held(line, groups.rank)).to(groups.device))


def put_back(model: nn.Module, objects: Mapping[str, nn.Parameter]) -> StandIns:
    """Makes parameters the objects again that they were before, as the model has these elsewhere, too.

    Returns what stands in the place of those that cannot be (a DTensor is of another kind).
    """
    named, every = dict(model.named_parameters(remove_duplicate=False)), list(places(model))
    stand_ins: StandIns = {}
    for name, before in objects.items():
        now = named[name]
        if isinstance(now, DTensor):
            stand_ins[id(before)] = before, now
        elif now is not before:
            torch.utils.swap_tensors(before, now)
            for _, module, key, p in every:
                if p is now:
                    setattr(module, key, before)
    return stand_ins


def on_device(t: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; of one on meta, memory of its shape."""
    return torch.empty_like(t, device=device) if t.is_meta else t.to(device)


def zero_gradient(p: Tensor) -> Tensor:
    """A gradient of zeros of a parameter, of the type that its gradients have: another than its own, if FSDP2 or whoever made
    it said so (``Tensor.grad_dtype``, which torch has from 2.13 on at the latest)."""
    return torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None))


def like(p: DTensor, local: Tensor) -> DTensor:
    """A local tensor as a DTensor of a parameter's own shape, strides and mesh.

    ``DTensor.to_local`` guesses the global strides from even shares; with uneven ones the gradient's strides then differ
    from the parameter's, and autograd copies it into a tensor of the wrong local shape.
    """
    return DTensor.from_local(
        local.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def local_tensor(p: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient."""
    return p.to_local() if isinstance(p, DTensor) else p
