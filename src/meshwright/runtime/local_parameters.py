"""``LocalParameters``: the local tensor that takes a parameter's place in a forward under the SPMD mode."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.layout import Shard
from meshwright.private import hooked, raw_local, storage_of
from meshwright.recipe import ParameterRecipe, Recipe
from meshwright.runtime.branches.exchange import Branching
from meshwright.runtime.weights.halves import as_computed, half_type
from meshwright.runtime.weights.local_part import HandOver, local_part, note_parts
from meshwright.runtime.weights.parameters import StandIns, parameter_slots
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import LocalPartLookup
from meshwright.spmd.tensor import GlobalTensor, local_of


class _Counted(torch.autograd.Function):
    """The identity, for a parameter that submeshes share. Backward keeps the gradient on one rank of each submesh, and
    gives zeros on the others, as gradients are summed over all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        ctx.set_materialize_grads(False)  # no gradient stays None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return g if g is None or ctx.counts else torch.zeros_like(g), None


def _state(p: DTensor) -> tuple[int, int, bool]:
    """(memory of a parameter, its place there, whether it requires a gradient): if one changes, it needs a new local tensor."""
    local = raw_local(p)
    return storage_of(local), int(local.storage_offset()), p.requires_grad


def _is_sharded_as(p: Tensor, line: ParameterRecipe) -> bool:
    """Whether a parameter is sharded over tp as its line says."""
    if not isinstance(p, DTensor) or p.device_mesh.ndim != 1:
        return True
    (placement,) = p.placements
    sharded = placement.is_shard(line.tp.dim) if isinstance(line.tp, Shard) else placement.is_replicate()
    return sharded and tuple(p.shape) == line.shape


def _forget_moves(part: Tensor) -> None:
    """Deletes what the dispatcher stored on a local part. Other attributes stay: those of a ``FakeTensor`` are torch's."""
    if isinstance(part, GlobalTensor):
        part._mw_memo, part._mw_memory = {}, None
        return
    attributes = vars(part)
    for name in [name for name in attributes if name.startswith("_mw_")]:
        del attributes[name]
    part._mw_is_parameter = True  # type: ignore[attr-defined]


@dataclass(slots=True)
class _Part:
    """A cached local tensor of a parameter.

    Attributes:
        parameter: the parameter; ``local``: its local tensor when ``part`` was made.
        part: the tensor that the forward sees.
        lasts: whether ``part`` is a leaf of autograd on the parameter's own memory: then the next forward can use it too.
        forward: the number of the last forward that used it.
    """

    parameter: Tensor
    local: Tensor
    part: Tensor
    lasts: bool
    forward: int


class LocalParameters(LocalPartLookup):
    """Maps a parameter to its local tensor, for the SPMD mode.

    FSDP2 replaces Parameter objects while a unit is gathered; each is identified once, by its module and name. During a forward
    a parameter has only one local tensor, so that ``torch.autograd.grad`` by the parameter works.

    Args:
        dispatchers: submesh → the dispatcher of its tp group.
        branching: of this rank, if there are branches.
        stand_ins: see ``StandIns``.

    Attributes:
        gradients: moves the gradients of local tensors to the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        dispatchers: Mapping[int, Dispatcher],
        branching: Branching | None,
        stand_ins: StandIns,
    ) -> None:
        super().__init__(None)
        self.gradients = HandOver()
        self._model, self._recipe, self._dispatchers, self._branching = model, recipe, dispatchers, branching
        self._stand_ins, self._half = stand_ins, half_type(recipe)
        self._any_shared = any(len(line.places) > 1 for line in recipe.parameters)
        # id of a parameter → (parameter, …): the parameter shows whether the id still belongs to it
        self._lines: dict[int, tuple[Tensor, ParameterRecipe]] = {}
        self._leaves: dict[int, tuple[Tensor, tuple[int, int, bool], Tensor]] = {}
        self._parts: dict[Any, _Part] = {}
        self._used: list[tuple[Any, _Part]] = []  # in this forward
        # id of a parameter that this forward has cast → (the parameter, its type in this forward)
        self._types: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._forward = 0  # the number of the running forward

    def end_forward(self) -> None:
        """The forward has ended: drops local tensors that are not leaves of autograd, with their graph, and what the dispatcher
        stored on the others. These stay for the next forward."""
        for key, cached in self._used:
            part = cached.part
            if not cached.lasts:
                self._parts.pop(key, None)
            if isinstance(part, GlobalTensor) and (part._mw_silent or part._mw_apart):  # true only in this forward
                self._parts.pop(key, None)
                self.invalidate()
            else:
                _forget_moves(part)
        self._used.clear()
        self._types.clear()
        self.requested_ids.clear()
        self._forward += 1

    def end_trial(self) -> None:
        """Drops all local tensors, after a trial: some properties of them (their dtype) differ in a step."""
        self._parts.clear()
        self.invalidate()

    def around_backward(self) -> AbstractContextManager[None]:
        """See ``LocalPartLookup``."""
        return nullcontext() if self.gradients_observed else self.gradients.together()

    def set_data(self, x: Tensor, part: Tensor, value: Tensor) -> None:
        """See ``LocalPartLookup``. The parameter and its local parts get the value's memory together.

        A parameter that FSDP2 gathers stays in its memory, which FSDP2 fills; planning keeps those that a forward writes to out
        of its units.
        """
        p, leaf = self._dtensor(x), local_of(part)
        line = self._line(p)
        by_fsdp = line is None or (line.data != "loose" and self._recipe.mesh.data_size > 1)
        if by_fsdp or not leaf.is_leaf or storage_of(leaf) != storage_of(raw_local(p)):
            super().set_data(x, part, value)
            return
        if value.is_inference():
            with torch.inference_mode(mode=False):
                value = value.clone()  # a later step may save it for a backward
        note_parts(p, self)
        self.set_memory(p, value)

    def set_memory(self, p: DTensor, memory: Tensor) -> None:
        """See ``LocalParts``."""
        before, known = storage_of(raw_local(p)), self._leaves.get(id(p))
        parts = [cached.part for key, cached in self._parts.items() if key[0] == id(p)]
        leaf = known[2] if known is not None and known[0] is p else None
        locals_of_parts = [local_of(part) for part in parts] + ([] if leaf is None else [leaf])
        raw_local(p).data = memory
        # Not ``memory`` itself: a trial in float64 casts it to the parameter's dtype in each assignment, as a copy.
        shared = raw_local(p).data
        for t in locals_of_parts:
            if storage_of(t) == before:
                t.data = shared
        if leaf is not None:
            self._leaves[id(p)] = p, _state(p), leaf
        for part in parts:
            _forget_moves(part)
        self.invalidate()

    def set_type(self, x: Tensor, dtype: torch.dtype) -> None:
        """See ``LocalPartLookup``."""
        p = self._dtensor(x)
        self._types[id(p)] = p, dtype
        for key in [key for key in self._parts if key[0] == id(p)]:
            del self._parts[key]
        self.invalidate()

    def _dtensor(self, x: Tensor) -> DTensor:
        """The parameter itself, of which ``x`` may be a stand-in."""
        p = x if isinstance(x, DTensor) else self._stand_ins[id(x)][1]
        assert isinstance(p, DTensor)
        return p

    def __call__(self, x: Tensor) -> Tensor | None:
        if not isinstance(x, DTensor):
            if not self._stand_ins or (stand_in := self._stand_ins.get(id(x))) is None or stand_in[0] is not x:
                return None
            x = stand_in[1]
        running = self._branching.running[-1] if self._branching is not None and self._any_shared else 0
        trains = x.requires_grad
        key = id(x), trains, trains and torch.is_grad_enabled(), torch.is_inference_mode_enabled(), running
        cached = self._parts.get(key)
        if cached is not None and cached.parameter is x:
            if cached.forward == self._forward:
                return cached.part
            if raw_local(x) is cached.local and not hooked(x):
                cached.forward = self._forward
                self._note_use(key, cached)
                return cached.part
        if x.device_mesh.ndim != 1 or (line := self._line(x)) is None:
            return None  # with more axes than tp it is a shard of FSDP2's, which is not gathered
        local, part = raw_local(x), self._part(x, line)
        part_local = local_of(part)
        lasts = (
            part_local.is_leaf and storage_of(part_local) == storage_of(local) and not torch.is_inference_mode_enabled()
        )
        cached = self._parts[key] = _Part(x, local, part, lasts, self._forward)
        self._note_use(key, cached)
        if lasts:
            self.invalidate()  # there may have been another part, which lasted
        return part

    def _note_use(self, key: Any, cached: _Part) -> None:
        """Notes that this forward uses a local tensor."""
        self._used.append((key, cached))
        self.requested_ids.add(id(cached.parameter))

    def _part(self, x: DTensor, line: ParameterRecipe) -> Tensor:
        """The tensor that a forward sees for a parameter: a global tensor if it is sharded over tp."""
        local = self._leaf(x)
        if len(line.places) > 1 and self._branching is not None:
            local = _Counted.apply(local, self._branching.counts(line.places))
        known = self._types.get(id(x))
        local = local.to(known[1]) if known is not None and known[0] is x else as_computed(local, line, self._half)
        local._mw_is_parameter = True  # type: ignore[attr-defined]
        if isinstance(line.tp, Shard):
            return GlobalTensor(
                local, line.tp, self._dispatchers[line.place], parameter=(line.name, tuple(range(x.dim())))
            )
        return local

    def _leaf(self, x: DTensor) -> Tensor:
        """The parameter's local tensor; the same object until its memory, or whether it requires a gradient, changes."""
        if torch.is_inference_mode_enabled() or hooked(x):
            return local_part(x, self.gradients)
        state = _state(x)
        leaf = self._leaves.get(id(x))
        if leaf is None or leaf[0] is not x or leaf[1] != state:
            leaf = self._leaves[id(x)] = x, state, local_part(x, self.gradients)
        return leaf[2]

    def _line(self, x: Tensor) -> ParameterRecipe | None:
        """The recipe's line of a parameter; None if it is not one of the model."""
        parameter_and_line = self._lines.get(id(x))
        if parameter_and_line is None or parameter_and_line[0] is not x:
            found: dict[int, tuple[Tensor, ParameterRecipe]] = {}
            for name, _, _, p in parameter_slots(self._model):
                # The model may have another parameter in this place for now (``torch.func.functional_call``).
                if _is_sharded_as(p, line := self._recipe.by_name[name]):
                    found.setdefault(id(p), (p, line))
            self._lines |= found
            parameter_and_line = self._lines.get(id(x))
        if parameter_and_line is None or parameter_and_line[0] is not x:
            return None
        return parameter_and_line[1]
