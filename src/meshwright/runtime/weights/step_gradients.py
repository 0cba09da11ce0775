"""``StepGradients``: makes the gradients that a step adds equal to those of one device.

    before the step   .grad of earlier steps is put aside      so .grad holds only this step's gradient, on this rank
    after the step    .grad is summed over ranks               if FSDP2 does not do it (gradient_sums.py)
                      .grad is divided                         if every data rank has run all rows
                      hooks of the parameter are called        with the full gradient, as on one device
                      .grad is added to the earlier gradient

Hooks are also called for gradients that the forward itself takes (``torch.autograd.grad``), as autograd would.

So gradients of several calls of ``Job.step`` add up, as those of several backwards do on one device. The earlier gradients take
extra memory only during a step, and only for parameters that need one of the actions above; after ``zero_grad()`` there are
none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.names import few
from meshwright.private import any_hooked, awaits_gradient, hooked, take_backward_hooks, without_modes
from meshwright.recipe import Recipe, take_slices
from meshwright.runtime.groups import Groups
from meshwright.runtime.weights.gather import full_on_every_rank
from meshwright.runtime.weights.gradient_sums import GradientSums
from meshwright.runtime.weights.parameters import CurrentParameters, local_tensor, zero_gradient
from meshwright.spmd.autograd_functions import FunctionMode

Hook = Callable[[Tensor], Tensor | None]
Hooks = Mapping[int, Hook]
"""The hooks of a parameter, in the order of their calls."""

_GRAD = torch.autograd.grad


def take_hooks(model: nn.Module) -> dict[str, Hooks]:
    """Removes the hooks that a model has registered on its parameters (``p.register_hook``) and returns them: parameter →
    hooks.

    Handles that the model keeps can still remove a hook.
    """
    of_all = ((name, take_backward_hooks(p)) for name, p in model.named_parameters())
    return {name: hooks for name, hooks in of_all if hooks}


class _HooksWithin(FunctionMode):
    """Calls hooks of parameters for gradients that a forward takes. Each function that it does not know it just calls.

    Args:
        hooks_of: a parameter → its hooks.
        in_parts: whether ranks run parts of forwards, where these gradients are values that hooks must not replace.
    """

    def __init__(self, hooks_of: Callable[[Any], tuple[str, list[Hook]]], *, in_parts: bool) -> None:
        super().__init__()
        self._hooks_of, self._in_parts, self._called = hooks_of, in_parts, 0

    def may_be_passed(self) -> bool:
        """See ``FunctionMode``: a block that takes gradients is not recorded."""
        return True

    def interventions(self) -> int:
        """See ``FunctionMode``."""
        return self._called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _GRAD:
            return result
        _, inputs = args  # torch passes both as tuples
        return tuple(self._changed(x, gradient) for x, gradient in zip(inputs, result, strict=True))

    def _changed(self, x: Any, gradient: Tensor | None) -> Tensor | None:
        name, hooks = self._hooks_of(x)
        if not hooks or gradient is None:
            return gradient
        if self._in_parts:
            raise PlanError.of(
                "this step",
                where=name,
                given="a hook, and a forward that takes a gradient with respect to the parameter",
                required="over pp or branches, one of both",
                fix="call the hook's function on the gradient that the forward takes, and remove the hook",
            )
        self._called += 1
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient


class StepGradients:
    """Sums, divides and accumulates the gradients of a step, and calls hooks of parameters.

    Args:
        hooks: parameter → its hooks; the same parameters on every rank.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: Groups, hooks: Mapping[str, Hooks]) -> None:
        self._recipe, self._groups = recipe, groups
        self._sums = GradientSums(model, recipe, groups)
        self._hooks = {name: [of_build] for name, of_build in hooks.items()}
        self._names_here = [line.name for line in recipe.held_by(groups.rank)]
        self._current = CurrentParameters(model, [line.name for line in recipe.parameters])
        self._update_needs_action()

    def _update_needs_action(self) -> None:
        self._needs_action = [name for name in self._names_here if name in self._sums.groups or name in self._hooks]

    # --- hooks that a person puts on parameters after the job was made ------------------------------------------------

    def has_new_hooks(self) -> bool:
        """Whether a person has registered hooks on this rank's parameters. Torch would call them with gradients of some rows
        only, or not at all if FSDP2 replaces the parameter."""
        with without_modes():
            return any_hooked(self._current.each(self._names_here))

    def hooked(self) -> tuple[str, ...]:
        """The names of all parameters with new hooks, also of parameters on other ranks.

        Raises:
            PlanError: a hook was registered by ``register_post_accumulate_grad_hook``.
        """
        named = [(line.name, self._current[line.name]) for line in self._recipe.parameters]
        if waiting := [name for name, p in named if awaits_gradient(p)]:
            raise PlanError.of(
                "this step",
                where=few(waiting),
                given="a hook of register_post_accumulate_grad_hook",
                required="none: it would get a part of the parameter, with a part of its gradient",
                fix="register_hook, which gets the whole gradient; or act after job.step",
            )
        return tuple(name for name, p in named if hooked(p))

    def take_hooks(self, names: Collection[str]) -> None:
        """Moves the hooks of these parameters here; they are called at the end of each step. ``names``: equal on all ranks."""
        for name in names:
            self._hooks.setdefault(name, []).append(take_backward_hooks(self._current[name]))
        self._update_needs_action()

    # --- a step -------------------------------------------------------------------------------------------------------

    def hooks_within(self) -> AbstractContextManager[Any]:
        """A context for a forward, in which hooks of parameters are called for gradients that the forward takes."""
        return _HooksWithin(self._hooks_of, in_parts=self._recipe.in_parts) if self._hooks else nullcontext()

    def _hooks_of(self, x: Any) -> tuple[str, list[Hook]]:
        """(name, hooks) of a parameter; no hooks for another tensor."""
        name = next((name for name in self._hooks if self._current[name] is x), "")
        return name, self._registered(name) if name else []

    def _registered(self, name: str) -> list[Hook]:
        return [hook for hooks in self._hooks[name] for hook in hooks.values()]

    @contextmanager
    def of_this_step(self, copies: int, microbatches: int) -> Iterator[None]:
        """A context for a step. Collective at its end, unless the step raises: then this rank's gradients are added to the
        earlier ones as they are.

        Args:
            copies: how many data ranks run the same rows.
            microbatches: how many backwards this rank runs.
        """
        names = self._names_here if copies > 1 else self._needs_action
        earlier = {name: grad for name in names if (grad := self._current[name].grad) is not None}
        for name in earlier:
            self._current[name].grad = None
        try:
            self._sums.begin(microbatches)
            yield
            self._sums.sum()
            for name in names if copies > 1 else ():
                _divide(self._current[name], copies)
            self._call_hooks()
        finally:
            self._sums.leave()
            for name, grad in earlier.items():
                _add_to(grad, self._current[name])

    @torch.no_grad()
    def _call_hooks(self) -> None:
        """Calls the hooks of each parameter with its full gradient. Collective."""
        for name in self._hooks:
            line, p = self._recipe.by_name[name], self._current[name]
            is_here = self._recipe.holds(line, self._groups.rank)
            local = local_tensor(p.grad) if is_here and p.grad is not None else None
            full = full_on_every_rank(line, local, p.dtype, self._recipe, self._groups)
            if full is None:
                continue  # no rank has a gradient, so one device would have none
            for hook in self._registered(name):
                changed = hook(full)
                full = full if changed is None else changed
            if is_here:
                slices = take_slices(full, self._recipe.held(line, self._groups.rank))
                p.grad = zero_gradient(p) if p.grad is None else p.grad
                local_tensor(p.grad).copy_(slices)


@torch.no_grad()
def _divide(p: nn.Parameter, copies: int) -> None:
    if p.grad is not None:
        local_tensor(p.grad).div_(copies)


@torch.no_grad()
def _add_to(earlier: Tensor, p: nn.Parameter) -> None:
    """Adds a parameter's gradient to ``earlier`` in place, and makes ``earlier`` its gradient again."""
    if p.grad is not None:
        local_tensor(earlier).add_(local_tensor(p.grad))
    p.grad = earlier


__all__ = ["Hooks", "StepGradients", "take_hooks"]
