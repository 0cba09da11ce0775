"""``ShardedModel``: the shards of a model on this rank; and full tensors, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.gather import full_buffers, full_tensors
from meshwright.runtime.weights.parameters import own_gradient


class ShardedModel:
    """A model whose parameters are sharded as the recipe says.

    Attributes:
        module: the model; its parameters have the names of the model on one device.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, groups: Groups) -> None:
        self.module, self.recipe, self.groups = module, recipe, groups
        self._units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._empty = nn.Parameter(torch.empty(0, device=groups.device))

    @property
    def rank(self) -> int:
        """This process's rank, as the plan's mesh counts them."""
        return self.groups.rank

    def reshard(self) -> None:
        """Frees gathered parameters. FSDP2 leaves the root gathered after a forward, for a backward that may not come."""
        for unit in self._units:
            unit.reshard()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank, by the names of the model on one device."""
        held = {line.name for line in self.recipe.held_by(self.rank)}
        return ((name, p) for name, p in self.module.named_parameters() if self.recipe.by_name[name].name in held)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank; if it has none, one without elements, as optimizers refuse an empty list."""
        return iter([p for _, p in self.named_parameters()] or [self._empty])

    # --- full tensors: on rank 0, on CPU; None on other ranks. Collective -----------------------------------------------

    def full_buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each buffer in turn, from the rank whose forward changes it."""
        return full_buffers(self.module, self.recipe, self.groups)

    def full_parameters(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter in turn."""
        self.reshard()
        return full_tensors(self.module, self.recipe, self.groups, lambda p: p)

    def full_gradients(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter's gradient in turn; None if there is none."""
        return full_tensors(self.module, self.recipe, self.groups, own_gradient)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer; empty on other ranks."""
        full: dict[str, Tensor] = {}
        for line, value in self.full_parameters():
            if value is not None:
                for name in (line.name, *line.aliases):
                    full[name] = value
        if self.rank == 0:
            parameters = set(self.recipe.by_name)
            state = {k: v for k, v in self.module.state_dict().items() if k not in parameters}
            full |= {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        persistent = set(full)
        for name, value in self.full_buffers():
            if value is not None and name in persistent:
                full[name] = value
        return full
