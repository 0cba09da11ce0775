"""``LocalParameters``: what stands for a parameter in a forward under the SPMD mode: its local part, made once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.layout import Shard
from meshwright.private import held_of, hooked, storage_of
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.branches.exchange import Branching
from meshwright.runtime.weights.halves import as_computed, half_type
from meshwright.runtime.weights.local_part import HandOver, local_part
from meshwright.runtime.weights.parameters import StandIns, places
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import Parts
from meshwright.spmd.tensor import GlobalTensor, local_of


class _Counted(torch.autograd.Function):
    """A parameter that several places share: its gradient is counted on one rank of each, and zeros on the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        ctx.set_materialize_grads(False)  # none stays none
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return g if g is None or ctx.counts else torch.zeros_like(g), None


def _state(p: DTensor) -> tuple[int, bool]:
    """What a part of a parameter rests on: its memory, and whether it has a gradient."""
    return storage_of(held_of(p)), p.requires_grad


def _forget_moves(part: Tensor) -> None:
    """Drops what the dispatcher noted on a tensor. A tensor without values (``FakeTensor``) has attributes of torch's."""
    noted = vars(part)
    for name in [name for name in noted if name.startswith("_mw_")]:
        del noted[name]


@dataclass(slots=True)
class _Part:
    """A parameter's local part, as it was made.

    Attributes:
        of: the parameter.
        held: what this rank held of it then.
        lasts: whether it begins no graph: it is as good in the next forward.
        forward: the last forward that used it.
    """

    of: Tensor
    held: Tensor
    part: Tensor
    lasts: bool
    forward: int


class LocalParameters(Parts):
    """A parameter → its local part, for the view.

    FSDP2 puts other Parameter objects in place while a unit is gathered; they are found by where they stand, once each.
    While the view is on, a parameter has one local part, so that a gradient by the parameter can be asked for.

    Args:
        stand_ins: what stands in modules in the place of objects that the model has elsewhere.

    Attributes:
        gradients: gives parameters those that come to their local parts.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        works: Mapping[int, Dispatcher],
        branching: Branching | None,
        stand_ins: StandIns,
    ) -> None:
        super().__init__(None)
        self.gradients = HandOver()
        self._model, self._recipe, self._works, self._branching = model, recipe, works, branching
        self._stand_ins, self._low = stand_ins, half_type(recipe)
        self._several = any(len(line.places) > 1 for line in recipe.parameters)
        self._lines: dict[int, tuple[Tensor, ParameterRecipe]] = {}
        self._leaves: dict[int, tuple[Tensor, tuple[int, bool], Tensor]] = {}
        self._parts: dict[Any, _Part] = {}
        self._used: list[tuple[Any, _Part]] = []  # in this forward
        self._forward = 0

    def forget(self) -> None:
        """The view goes off: the graph that parts are the beginning of, and what moves remember of them, are not needed any
        more. What begins no graph stays for the next forward."""
        for key, known in self._used:
            part = known.part
            if not known.lasts:
                self._parts.pop(key, None)
            if not isinstance(part, GlobalTensor):
                _forget_moves(part)  # a leaf stays; what moves remember of it does not
                part._mw_is_parameter = True  # type: ignore[attr-defined]
            elif part._mw_silent or part._mw_apart:  # this forward noted something that is not true of the parameter
                self._parts.pop(key, None)
                self.unsettle()
            else:
                part._mw_memo, part._mw_memory = {}, None
        self._used.clear()
        self.touched.clear()
        self._forward += 1

    def renew(self) -> None:
        """Parts are made anew in the next forward: what was noted on those of a trial, as their type, is not true of a step."""
        self._parts.clear()
        self.unsettle()

    def backward(self) -> AbstractContextManager[None]:
        """See ``Parts``."""
        return nullcontext() if self.listened else self.gradients.together()

    def __call__(self, x: Tensor) -> Tensor | None:
        if not isinstance(x, DTensor):
            if not self._stand_ins or (stand_in := self._stand_ins.get(id(x))) is None or stand_in[0] is not x:
                return None
            x = stand_in[1]
        running = self._branching.running[-1] if self._branching is not None and self._several else 0
        trains = x.requires_grad
        key = id(x), trains, trains and torch.is_grad_enabled(), torch.is_inference_mode_enabled(), running
        known = self._parts.get(key)
        if known is not None and known.of is x:
            if known.forward == self._forward:
                return known.part
            if held_of(x) is known.held and not hooked(x):
                known.forward = self._forward
                self._note_use(key, known)
                return known.part
        if x.device_mesh.ndim != 1 or (line := self._line(x)) is None:
            return None  # with more axes it is FSDP2's, at rest
        held, part = held_of(x), self._part(x, line)
        local = local_of(part)
        lasts = local.is_leaf and storage_of(local) == storage_of(held) and not torch.is_inference_mode_enabled()
        known = self._parts[key] = _Part(x, held, part, lasts, self._forward)
        self._note_use(key, known)
        if lasts:
            self.unsettle()  # there may have been another part, which lasted
        return part

    def _note_use(self, key: Any, known: _Part) -> None:
        self._used.append((key, known))
        self.touched.add(id(known.of))

    def _part(self, x: DTensor, line: ParameterRecipe) -> Tensor:
        local = self._leaf(x)
        if len(line.places) > 1 and self._branching is not None:
            local = _Counted.apply(local, self._branching.counts(line.places))
        local = as_computed(local, line, self._low)
        local._mw_is_parameter = True  # type: ignore[attr-defined]
        if isinstance(line.tp, Shard):
            return GlobalTensor(local, line.tp, self._works[line.place], parameter=(line.name, tuple(range(x.dim()))))
        return local

    def _leaf(self, x: DTensor) -> Tensor:
        """The parameter's local part, the same for as long as nothing about it changes that autograd cares for."""
        if torch.is_inference_mode_enabled() or hooked(x):
            return local_part(x, self.gradients)
        state = _state(x)
        leaf = self._leaves.get(id(x))
        if leaf is None or leaf[0] is not x or leaf[1] != state:
            leaf = self._leaves[id(x)] = x, state, local_part(x, self.gradients)
        return leaf[2]

    def _line(self, x: Tensor) -> ParameterRecipe | None:
        known = self._lines.get(id(x))
        if known is None or known[0] is not x:
            for name, _, _, p in places(self._model):
                self._lines[id(p)] = (p, self._recipe.by_name[name])
            known = self._lines.get(id(x))
        return known[1] if known is not None and known[0] is x else None
