"""Parameters: cut on meta, before anything holds them; filled at the end, slice by slice.

At rest a parameter is a DTensor over the tp mesh (whole ones replicated, so that all stand on one mesh), which FSDP2 then
shards over the data axes. Its local tensor is the recipe's slice: for a cut of fused blocks that is not what DTensor's
``Shard`` means by a slice, so whole values are always put together from the recipe (run/state.py), never by
``full_tensor()`` (which is right for every parameter of one block in even shares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.layout import Cut
from meshwright.recipe import ParameterRecipe, Recipe, take_slices
from meshwright.run.groups import Groups

Values = Callable[[ParameterRecipe], Tensor]


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place a parameter stands at: (full name, module, name in it, parameter); tied ones at each place."""
    for prefix, module in model.named_modules(remove_duplicate=True):
        for name, p in module._parameters.items():
            if p is not None:
                yield (f"{prefix}.{name}" if prefix else name), module, name, p


def cut_parameters(model: nn.Module, recipe: Recipe, groups: Groups) -> None:
    """Replaces every parameter (on meta) by a DTensor over the tp mesh, of this rank's shape; ties are kept."""
    if recipe.mesh.axis_size("tp") == 1:
        return
    made: dict[int, nn.Parameter] = {}
    for name, module, key, p in list(places(model)):
        if id(p) not in made:
            made[id(p)] = _at_rest(p, recipe.by_name[name], groups)
        setattr(module, key, made[id(p)])


def _at_rest(p: nn.Parameter, line: ParameterRecipe, groups: Groups) -> nn.Parameter:
    placement = Shard(line.tp.dim) if isinstance(line.tp, Cut) else Replicate()
    local = torch.empty(line.local_shape(groups.tp_rank), dtype=p.dtype, device="meta")
    mesh = groups.of(line.data)["tp"]
    stride = torch.empty(line.shape, device="meta").stride()
    whole = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(line.shape), stride=stride
    )
    made = nn.Parameter(whole, requires_grad=p.requires_grad)
    made.__dict__.update({k: v for k, v in p.__dict__.items() if not k.startswith("__")})
    return made


def fill(model: nn.Module, recipe: Recipe, groups: Groups, values: Values) -> None:
    """Allocates what this rank holds and fills it, one parameter at a time; buffers move to the device."""
    model._apply(lambda t: torch.empty_like(t, device=groups.device) if t.is_meta else t.to(groups.device))
    named = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for line in recipe.parameters:
            p = named[line.name]
            held = take_slices(values(line), recipe.held(line, groups.rank))
            local_tensor(p).copy_(held.to(groups.device))


def local_tensor(p: Tensor) -> Tensor:
    """What this rank holds of a parameter or gradient."""
    return p.to_local() if isinstance(p, DTensor) else p
