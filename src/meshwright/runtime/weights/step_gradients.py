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
from meshwright.runtime.weights.parameters import Standing, local_tensor

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
        self._recipe, self._groups = recipe, groups
        self._sums, self._hooks = OwnSums(model, recipe, groups), hooks
        self._held = [line.name for line in recipe.held_by(groups.rank)]
        self._own = [name for name in self._held if name in self._sums.groups or name in hooks]
        self._standing = Standing(model, {*self._held, *hooks})

    @contextmanager
    def of_this_step(self, copies: int) -> Iterator[None]:
        """For the time of a step.

        Collective, unless the step raises; then earlier gradients are put back, with what this rank has added.

        Args:
            copies: how many data ranks run the same rows.
        """
        names = self._held if copies > 1 else self._own
        earlier = {name: grad for name in names if (grad := self._standing[name].grad) is not None}
        for name in earlier:
            self._standing[name].grad = None
        try:
            yield
            self._sums.sum()
            for name in names if copies > 1 else ():
                _divide(self._standing[name], copies)
            self._call_hooks()
        finally:
            for name, grad in earlier.items():
                _add_to(grad, self._standing[name])

    @torch.no_grad()
    def _call_hooks(self) -> None:
        for name, hooks in self._hooks.items():
            line, p = self._recipe.by_name[name], self._standing[name]
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
