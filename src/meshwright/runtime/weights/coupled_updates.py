"""``refuse_coupled_updates``: an optimizer whose update of one parameter follows from the gradients of others raises an error
if each rank holds some parameters alone.

    class Mine(torch.optim.Optimizer):         # pp=2: rank 0 takes the norm of its stage's gradients, rank 1 that of its own
        def step(self):
            norm = torch.stack([p.grad.norm() for p in ...]).norm()

Whether updates are coupled is tried before the first step of each optimizer: a twin of it, with small tensors in place of its
parameters, takes steps with some gradients; another twin takes the same steps with larger gradients of every other tensor. If
the tensors between them get another update, updates are coupled.
"""

from __future__ import annotations

import copy
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
from meshwright.spmd.patches import UNCOMPILED

_STEPS = 24  # of each twin: a distance that is estimated in one step changes the updates of the next
_GROWTH = 1.5  # of gradients from step to step: what clips acts from some size on
_LARGEST_DIM = 8  # of the small tensors
_SHAPES = 4  # of each group of parameters: other shapes may be updated in another way
_FACTOR = 3.0  # by which the other gradients are larger


def refuse_coupled_updates(
    owner: object, parameters: Callable[[Any], Iterable[Tensor]], note: Callable[[str], None]
) -> None:
    """From here on, until ``owner`` has gone, an optimizer with coupled updates raises PlanError before its first step.

    Optimizers of ``torch.optim`` are not tried: all but ``LBFGS``, which ``partial_gradients`` refuses, treat each parameter by
    itself.

    Args:
        owner: what has the parameters of a job; it is not kept alive by this.
        parameters: those of an owner, of which each rank has some.
        note: gets a sentence if an optimizer could not be tried.
    """
    alive = weakref.ref(owner)
    tried: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model = alive()
        if model is None or optimizer in tried or type(optimizer).__module__.startswith("torch.optim."):
            return
        ours = set(map(id, parameters(model)))
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        try:
            coupled = updates_are_coupled(optimizer, closure=len(args) > 1 or "closure" in kwargs)
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

    False if a step communicates: then it is written for parameters that stand on several ranks.

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
    """Whether updates are coupled, of small tensors of a type. It should be float64: a first guess of a distance moves
    parameters by less than float32 can tell.

    Args:
        dtype: None: those of the parameters.
    """
    plain = _updated(optimizer, dtype, closure, lambda number: 1.0)
    odd = _updated(optimizer, dtype, closure, lambda number: _FACTOR if number % 2 else 1.0)
    even = _updated(optimizer, dtype, closure, lambda number: 1.0 if number % 2 else _FACTOR)
    return not all(
        _equal(alone, (with_odd, with_even)[number % 2])
        for step in zip(plain, odd, even, strict=True)
        for number, (alone, with_odd, with_even) in enumerate(zip(*step, strict=True))
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _updated(
    optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, closure: bool, factor: Callable[[int], float]
) -> list[list[Tensor]]:
    """The small tensors of a twin after each of its steps.

    Args:
        dtype: of the small tensors; None: those of the parameters.
        closure: whether ``step`` gets a closure.
        factor: of the gradients of the small tensor with this number.
    """
    seed_all(0)
    twin, tensors = _twin(optimizer, dtype)
    slopes = [torch.randn_like(t) for t in tensors]

    def set_gradients(scale: float) -> Tensor:
        for number, (tensor, slope) in enumerate(zip(tensors, slopes, strict=True)):
            # with the tensor in it: an optimizer that moves parameters and calls its closure again gets another gradient
            tensor.grad = (slope + tensor.detach()) * (scale * factor(number))
        return torch.ones(())

    after = []
    for step in range(_STEPS):
        set_gradients(_GROWTH**step)
        twin.step(*([partial(set_gradients, _GROWTH**step)] if closure else []))
        after.append([t.detach().clone() for t in tensors])
    return after


def _twin(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> tuple[Any, list[Tensor]]:
    """An optimizer with the same options and attributes, without hooks and the state of parameters, for small tensors; and
    these tensors."""
    if any(isinstance(value, nn.Module) for value in vars(optimizer).values()):
        raise TypeError("it has a module among its attributes")
    in_place_of: dict[int, Any] = {}
    tensors: list[Tensor] = []
    for group in optimizer.param_groups:
        small = [nn.Parameter(t) for t in _small(group["params"], dtype)]
        tensors += small
        in_place_of[id(group["params"])] = small
        for number, p in enumerate(group["params"]):
            in_place_of[id(p)] = small[number % len(small)]
    twin = object.__new__(type(optimizer))
    # deepcopy puts what the table has in place of what it finds
    attributes = {n: v for n, v in vars(optimizer).items() if n not in ("state", "step") and not n.endswith("_hooks")}
    vars(twin).update(copy.deepcopy(attributes, in_place_of))
    vars(twin).update({n: OrderedDict() for n in vars(optimizer) if n.endswith("_hooks")}, state=defaultdict(dict))
    of_all = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    twin.state.update(copy.deepcopy(of_all, in_place_of))
    for group in twin.param_groups:
        _raise_lr(group)
    return twin, tensors


def _small(parameters: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Two random tensors for each of the first few shapes of a group, in ``dtype``; None: in its own types."""
    shapes = dict.fromkeys((dtype or p.dtype, tuple(min(dim, _LARGEST_DIM) for dim in p.shape)) for p in parameters)
    return [torch.randn(shape, dtype=kind) for kind, shape in list(shapes)[:_SHAPES] for _ in range(2)]


def _raise_lr(group: dict[str, Any]) -> None:
    """Sets a learning rate of zero, with which a warm-up begins and no update shows, to the one that it rises to."""
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
