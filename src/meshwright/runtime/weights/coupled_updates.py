"""``refuse_coupled_updates``: refuses optimizers with coupled updates if each rank holds only some parameters.

Updates are coupled if the update of one parameter depends on the gradients of others. Such an optimizer would compute with the
gradients of one rank alone, and its updates would be wrong:

    class Clipped(torch.optim.Optimizer):      # pp=2: each rank would compute the norm of its own stage's gradients
        def step(self):
            norm = torch.stack([p.grad.norm() for p in ...]).norm()

Whether updates are coupled is tried before the first step of each optimizer. A twin of the optimizer has small tensors in place
of the parameters, and takes some steps. Another twin takes the same steps, but every other tensor has larger gradients, with
another sign in every other step. If the tensors with unchanged gradients get other updates, updates are coupled. Size and sign
both change: some optimizers use only the signs of gradients, or compare their directions over steps (Lion; D-Adaptation).
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright.errors import Finding, PlanError
from meshwright.generators import random_numbers_kept, seed_all
from meshwright.private import DispatchMode
from meshwright.runtime.weights.running_optimizer import is_of_torch, running_optimizer
from meshwright.spmd.uncompiled import UNCOMPILED

_STEPS = 24  # steps of each twin: an optimizer may use what it estimates in one step only in later ones
# Factors of gradients from step to step, each tried by itself: clipping acts only from some size on; learning rates that are
# estimated do not grow while gradients grow much faster.
_GROWTHS = (1.5, 1.1)
_LARGEST_DIM = 8  # largest size of a dim of the small tensors
_SHAPES = 4  # most shapes of each group of parameters that are tried: updates may depend on the shape
_FACTOR = 3.0  # factor of the larger gradients


def refuse_coupled_updates(
    owner: object, parameters: Callable[[Any], Iterable[Tensor]], note: Callable[[str], None]
) -> None:
    """Makes optimizers with coupled updates raise PlanError before their first step, as long as ``owner`` lives.

    Optimizers of ``torch.optim`` are not tried: all but ``LBFGS``, which ``partial_gradients`` refuses, treat each parameter by
    itself. If another optimizer calls them from a method that is not its ``step``, that one is tried.

    Args:
        owner: an object of the job; this does not keep it alive.
        parameters: owner → its parameters on this rank.
        note: called with a sentence if an optimizer could not be tried.
    """
    alive = weakref.ref(owner)
    tried: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model = alive()
        if model is None or optimizer in tried:
            return
        closure = len(args) > 1 or "closure" in kwargs
        if is_of_torch(type(optimizer)):
            # SAM has two methods, each of half a step, that are called in place of `step`. The second calls one of torch.
            outer = running_optimizer(of_torch=False)
            if outer is None or outer in tried:
                tried.add(optimizer)
                return
            optimizer, closure = outer, bool(inspect.signature(outer.step).parameters)
        of_job = set(map(id, parameters(model)))
        if not any(id(p) in of_job for group in optimizer.param_groups for p in group["params"]):
            return
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        try:
            coupled = updates_are_coupled(optimizer, closure=closure)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            note(
                f"{name} was not tried on small tensors ({reason}): if it takes a norm of all parameters, updates are wrong"
            )
            coupled = False
        if coupled:
            raise PlanError([_finding(name)], "this optimizer")
        tried.add(optimizer)

    weakref.finalize(owner, register_optimizer_step_pre_hook(before_step).remove).atexit = False


def updates_are_coupled(optimizer: torch.optim.Optimizer, *, closure: bool = False) -> bool:
    """Whether the update of one parameter changes with the gradients of others.

    False if a step calls collectives: then the optimizer is written for parameters that are on several ranks.

    Args:
        closure: whether ``step`` gets a closure.

    Raises:
        Exception: whatever the optimizer raises if its parameters are small tensors.
    """
    with random_numbers_kept(), torch.enable_grad(), UNCOMPILED.on(), _Collectives() as collectives:
        try:
            coupled = _coupled_in(torch.float64, optimizer, closure)
        except Exception:
            coupled = _coupled_in(None, optimizer, closure)  # written for some types alone
    return coupled and not collectives.entered


def _coupled_in(dtype: torch.dtype | None, optimizer: torch.optim.Optimizer, closure: bool) -> bool:
    """Whether updates of small tensors are coupled.

    Args:
        dtype: of the small tensors; None: those of the parameters. float64 is best: an optimizer that estimates its step size
            may begin with updates that are too small for float32.
    """
    for growth in _GROWTHS:
        plain, odd, even = (_updated(optimizer, dtype, closure, growth, changed) for changed in (None, 1, 0))
        for step in zip(plain, odd, even, strict=True):
            for number, (alone, with_odd, with_even) in enumerate(zip(*step, strict=True)):
                if not _equal(alone, (with_odd, with_even)[number % 2]):
                    return True
    return False


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _updated(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, closure: bool, growth: float, changed: int | None
) -> list[list[Tensor]]:
    """The small tensors of a twin after each of its steps.

    Args:
        dtype: of the small tensors; None: those of the parameters.
        closure: whether ``step`` gets a closure.
        growth: factor of gradients from step to step.
        changed: 1: tensors with odd numbers have other gradients; 0: those with even numbers; None: no tensor.
    """
    seed_all(0)
    twin, tensors = _twin(optimizer, dtype)
    slopes = [torch.randn_like(t) for t in tensors]

    def set_gradients(step: int) -> Tensor:
        for number, (tensor, slope) in enumerate(zip(tensors, slopes, strict=True)):
            factor = _FACTOR * (-1) ** step if number % 2 == changed else 1.0
            # The gradient depends on the tensor: an optimizer may move parameters and call its closure again.
            tensor.grad = (slope + tensor.detach()) * (growth**step * factor)
        return torch.ones(())

    after = []
    for step in range(_STEPS):
        set_gradients(step)
        twin.step(*([partial(set_gradients, step)] if closure else []))
        after.append([t.detach().clone() for t in tensors])
    return after


def _twin(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> tuple[Any, list[Tensor]]:
    """(a copy of an optimizer for small tensors, these tensors). Hooks, and the state of parameters, are not copied."""
    if any(isinstance(value, nn.Module) for value in vars(optimizer).values()):
        raise TypeError("it has a module among its attributes")
    memo: dict[int, Any] = {}  # id of an object → the object that deepcopy puts in its place
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        small = [nn.Parameter(t) for t in _small(group["params"], dtype)]
        tensors += small
        memo[id(group["params"])] = small
        for number, p in enumerate(group["params"]):
            memo[id(p)] = small[number % len(small)]
    twin = object.__new__(type(optimizer))
    attributes = {n: v for n, v in vars(optimizer).items() if n not in ("state", "step") and not n.endswith("_hooks")}
    vars(twin).update(copy.deepcopy(attributes, memo))
    vars(twin).update({n: OrderedDict() for n in vars(optimizer) if n.endswith("_hooks")}, state=defaultdict(dict))
    of_all = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    twin.state.update(copy.deepcopy(of_all, memo))
    for group in twin.param_groups:
        _raise_lr(group)
    return twin, tensors


def _small(parameters: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Two random tensors for each of the first few shapes of a group, in ``dtype``; None: in its own types."""
    shapes = dict.fromkeys((dtype or p.dtype, tuple(min(dim, _LARGEST_DIM) for dim in p.shape)) for p in parameters)
    return [torch.randn(shape, dtype=kind) for kind, shape in list(shapes)[:_SHAPES] for _ in range(2)]


def _raise_lr(group: dict[str, Any]) -> None:
    """Replaces a learning rate of zero by the initial one: a warm-up begins with zero, and no update would be seen."""
    lr = group.get("lr")
    if isinstance(lr, float | int | Tensor) and not float(lr):
        group["lr"] = float(group.get("initial_lr") or 1e-2)


class _Collectives(DispatchMode):
    """Notes whether a collective of torch.distributed was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.entered |= "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def _finding(name: str) -> Finding:
    return Finding(
        where=name,
        given="an optimizer whose update of one parameter changes with the gradients of others, for a model in parts (pipeline "
        "stages, or branches), of which this rank holds some",
        required="an update of each parameter from its own gradient and state",
        fix="an optimizer that treats each parameter by itself, as torch.optim.AdamW; or a mesh without pp and branches, over "
        "which each rank has all parameters",
    )


__all__ = ["refuse_coupled_updates", "updates_are_coupled"]
