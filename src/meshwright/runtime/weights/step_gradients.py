"""``StepGradients``: the gradients that a step adds, made to be those of one device.

    before the step   .grad of earlier steps is put aside      so .grad is what this step adds, on this rank
    after the step    .grad is summed over ranks               if nothing else does that (gradient_sums.py)
                      it is divided                            if every data rank has run all rows
                      hooks of the parameter are called        with the whole gradient, as on one device
                      and added to what was put aside

So calls of ``Job.step`` add up, as backwards do on one device. Putting aside costs memory between two such calls only, and
only for the parameters of which something is done; after ``zero_grad()`` there is nothing to put aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.private import take_backward_hooks
from meshwright.recipe import Recipe, take_slices
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.gather import whole_on_every_rank
from meshwright.runtime.weights.gradient_sums import OwnSums
from meshwright.runtime.weights.parameters import local_tensor

Hooks = Mapping[int, Callable[[Tensor], Tensor | None]]
"""The hooks of a parameter, in the order in which they are called."""


def take_hooks(model: nn.Module) -> dict[str, Hooks]:
    """The hooks that a model has put on its parameters (``p.register_hook``), by the first name; the parameters have them no
    more. The handles that the model may keep still remove them."""
    taken = ((name, take_backward_hooks(p)) for name, p in model.named_parameters())
    return {name: hooks for name, hooks in taken if hooks}


class StepGradients:
    """What is done with the gradients of a step, at its end.

    Args:
        hooks: of parameters, by name; alike on every rank.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, hooks: Mapping[str, Hooks]) -> None:
        self._model, self._recipe, self._groups = model, recipe, groups
        self._sums, self._hooks = OwnSums(model, recipe, groups), hooks

    @contextmanager
    def of_this_step(self, copies: int) -> Iterator[None]:
        """For the time of a step.

        Collective, unless the step raises; then earlier gradients are put back, with what this rank has added.

        Args:
            copies: how many data ranks run the same rows.
        """
        every = {line.name for line in self._recipe.parameters if self._recipe.holds(line, self._groups.rank)}
        names = every if copies > 1 else every & {*self._sums.groups, *self._hooks}
        earlier = {name: p.grad for name, p in self._named(names) if p.grad is not None}
        for name, p in self._named(names):
            if name in earlier:
                p.grad = None
        try:
            yield
            self._sums.sum()
            if copies > 1:
                for _, p in self._named(names):
                    _divide(p, copies)
            self._call_hooks()
        finally:
            for name, p in self._named(names):
                if name in earlier:
                    _add_to(earlier[name], p)

    def _named(self, names: set[str]) -> list[tuple[str, nn.Parameter]]:
        # Asked for anew each time: FSDP2 puts other objects in place while a unit is gathered.
        return [(name, p) for name, p in self._model.named_parameters() if name in names] if names else []

    @torch.no_grad()
    def _call_hooks(self) -> None:
        named = dict(self._model.named_parameters(remove_duplicate=False)) if self._hooks else {}
        for name, hooks in self._hooks.items():
            line, p = self._recipe.by_name[name], named[name]
            held = self._recipe.holds(line, self._groups.rank)
            local = local_tensor(p.grad) if held and p.grad is not None else None
            whole = whole_on_every_rank(line, local, p.dtype, self._recipe, self._groups)
            if whole is None:
                continue  # no rank has a gradient: neither would one device
            for hook in list(hooks.values()):
                changed = hook(whole)
                whole = whole if changed is None else changed
            if held:
                mine = take_slices(whole, self._recipe.held(line, self._groups.rank))
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                local_tensor(p.grad).copy_(mine)


@torch.no_grad()
def _divide(p: nn.Parameter, copies: int) -> None:
    if p.grad is not None:
        local_tensor(p.grad).div_(copies)


@torch.no_grad()
def _add_to(earlier: Tensor, p: nn.Parameter) -> None:
    """Adds a parameter's gradient to an earlier one, which is its gradient from then on: the same tensor as before."""
    if p.grad is not None:
        local_tensor(earlier).add_(local_tensor(p.grad))
    p.grad = earlier


__all__ = ["Hooks", "StepGradients", "take_hooks"]
