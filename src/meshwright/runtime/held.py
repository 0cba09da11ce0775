"""``ShardedModel``: what this rank holds of a model; and whole values, put together from what all ranks hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.gather import whole_buffers, whole_tensors


class ShardedModel:
    """A model, its parameters laid out as the recipe says.

    Attributes:
        module: the model; its names are its own.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, groups: Groups) -> None:
        self.module, self.recipe, self.groups = module, recipe, groups
        self._units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._nothing = nn.Parameter(torch.empty(0, device=groups.device))

    @property
    def rank(self) -> int:
        """This process's rank, as the plan's mesh counts them."""
        return self.groups.rank

    def reshard(self) -> None:
        """Parameters back to rest. FSDP2 leaves the root gathered after a forward, for a backward that may not come."""
        for unit in self._units:
            unit.reshard()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank holds, by the model's own names."""
        held = {line.name for line in self.recipe.held_by(self.rank)}
        return ((name, p) for name, p in self.module.named_parameters() if self.recipe.by_name[name].name in held)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those that this rank holds; if it holds none, one of no elements, as optimizers refuse an empty list."""
        return iter([p for _, p in self.named_parameters()] or [self._nothing])

    # --- whole values: on rank 0, on CPU; None on other ranks. Collective -----------------------------------------------

    def whole_buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each buffer in turn, as the rank has it whose forward changes it."""
        return whole_buffers(self.module, self.recipe, self.groups)

    def whole_parameters(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter in turn."""
        self.reshard()
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p)

    def whole_gradients(self) -> Iterator[tuple[ParameterRecipe, Tensor | None]]:
        """Each parameter's gradient in turn; None if there is none."""
        return whole_tensors(self.module, self.recipe, self.groups, lambda p: p.grad)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer; empty on other ranks."""
        whole: dict[str, Tensor] = {}
        for line, value in self.whole_parameters():
            if value is not None:
                for name in (line.name, *line.aliases):
                    whole[name] = value
        if self.rank == 0:
            parameters = set(self.recipe.by_name)
            state = {k: v for k, v in self.module.state_dict().items() if k not in parameters}
            whole |= {k: v.detach().cpu() if isinstance(v, Tensor) else v for k, v in state.items()}
        persistent = set(whole)
        for name, value in self.whole_buffers():
            if value is not None and name in persistent:
                whole[name] = value
        return whole
