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

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.names import few
from meshwright.private import any_hooked, awaits_gradient, hooked, take_backward_hooks, without_modes
from meshwright.recipe import Recipe, take_slices
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.gather import whole_on_every_rank
from meshwright.runtime.weights.gradient_sums import OwnSums
from meshwright.runtime.weights.parameters import Standing, local_tensor, zero_gradient

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
        self._sums = OwnSums(model, recipe, groups)
        self._hooks = {name: [of_build] for name, of_build in hooks.items()}
        self._held = [line.name for line in recipe.held_by(groups.rank)]
        self._standing = Standing(model, [line.name for line in recipe.parameters])
        self._note_own()

    def _note_own(self) -> None:
        self._own = [name for name in self._held if name in self._sums.groups or name in self._hooks]

    # --- hooks that a person puts on parameters after the job was made ------------------------------------------------

    def has_new_hooks(self) -> bool:
        """Whether parameters of this rank have got hooks. Nobody calls them if FSDP2 takes a parameter's place; else they
        would get gradients of some rows."""
        with without_modes():
            return any_hooked(self._standing.each(self._held))

    def hooked(self) -> tuple[str, ...]:
        """The parameters that have got hooks, of other ranks too.

        Raises:
            PlanError: one of ``register_post_accumulate_grad_hook``.
        """
        named = [(line.name, self._standing[line.name]) for line in self._recipe.parameters]
        if waiting := [name for name, p in named if awaits_gradient(p)]:
            raise PlanError.of(
                "this step",
                where=few(waiting),
                given="a hook of register_post_accumulate_grad_hook",
                required="none: it would be given a part of the parameter, with a part of its gradient",
                fix="register_hook, which gets the whole gradient; or act after job.step",
            )
        return tuple(name for name, p in named if hooked(p))

    def take_hooks(self, names: Collection[str]) -> None:
        """Hooks of these parameters are called at the end of each step from now on. ``names``: the same on all ranks."""
        for name in names:
            self._hooks.setdefault(name, []).append(take_backward_hooks(self._standing[name]))
        self._note_own()

    # --- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def of_this_step(self, copies: int, microbatches: int) -> Iterator[None]:
        """For the time of a step.

        Collective, unless the step raises; then earlier gradients are put back, with what this rank has added.

        Args:
            copies: how many data ranks run the same rows.
            microbatches: how many backwards this rank runs.
        """
        names = self._held if copies > 1 else self._own
        earlier = {name: grad for name in names if (grad := self._standing[name].grad) is not None}
        for name in earlier:
            self._standing[name].grad = None
        try:
            self._sums.begin(microbatches)
            yield
            self._sums.sum()
            for name in names if copies > 1 else ():
                _divide(self._standing[name], copies)
            self._call_hooks()
        finally:
            self._sums.leave()
            for name, grad in earlier.items():
                _add_to(grad, self._standing[name])

    @torch.no_grad()
    def _call_hooks(self) -> None:
        for name, taken in self._hooks.items():
            line, p = self._recipe.by_name[name], self._standing[name]
            held = self._recipe.holds(line, self._groups.rank)
            local = local_tensor(p.grad) if held and p.grad is not None else None
            whole = whole_on_every_rank(line, local, p.dtype, self._recipe, self._groups)
            if whole is None:
                continue  # no rank has a gradient: neither would one device
            for hook in [hook for hooks in taken for hook in hooks.values()]:
                changed = hook(whole)
                whole = whole if changed is None else changed
            if held:
                mine = take_slices(whole, self._recipe.held(line, self._groups.rank))
                p.grad = zero_gradient(p) if p.grad is None else p.grad
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
