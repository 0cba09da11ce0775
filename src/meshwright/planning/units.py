"""Repeated blocks, and which modules are wrapped as a unit: gathered, recomputed and sequence-cut together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.calls.structure import tensors_of
from meshwright.planning.escapes import Escapes
from meshwright.private import in_conversion, version, without_any_mode
from meshwright.spmd.tensor import local_of


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """The layers of a model: the outermost modules that stand at least twice, with one type, in one container.

    A layer that has no forward of its own (a ``ModuleList`` of norm, attention and residual) is never called, so nothing
    can be gathered or recomputed with it. The modules in it that are called take its place.
    """
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name == block or name.startswith(block + ".") for block in blocks):
            continue
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        by_type: dict[Any, list[str]] = {}
        for child_name, child in module.named_children():
            if _is_block(child):
                by_type.setdefault(type(child), []).append(f"{name}.{child_name}" if name else child_name)
        for names in by_type.values():
            if len(names) > 1:
                blocks += [n for block in names for n in _layers_in(block, model.get_submodule(block))]
    return tuple(blocks)


def called_modules(name: str, module: nn.Module) -> tuple[str, ...]:
    """The name of a module; if it has no forward, the names of the outermost modules in it that have one."""
    if _has_forward(module):
        return (name,)
    return tuple(
        n for child, m in module.named_children() for n in called_modules(f"{name}.{child}" if name else child, m)
    )


def _layers_in(name: str, module: nn.Module) -> tuple[str, ...]:
    if _has_forward(module):
        return (name,)
    return tuple(
        n for n in called_modules(name, module) if _is_block(module.get_submodule(n[len(name) + 1 :]))
    )  # a single norm or linear is too small for a unit


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@dataclass(frozen=True)
class _Gathered:
    """A Parameter that stands in a module while units run, in the place of the model's own.

    Attributes:
        of: the model's own.
        units: those that were running when it was put there.
    """

    parameter: nn.Parameter
    of: nn.Parameter
    units: frozenset[str]


@dataclass(frozen=True)
class _Place:
    """Where a parameter stands, what stood there, and what stands there now."""

    module: nn.Module
    key: str
    before: nn.Parameter
    now: nn.Parameter

    def put_back(self) -> None:
        if dict(self.module.named_parameters(recurse=False, remove_duplicate=False)).get(self.key) is self.now:
            setattr(self.module, self.key, self.before)  # (unless the model has put another there)


class Cast(NamedTuple):
    """The model's line that casts a parameter, and the type that it has from there on."""

    line: str
    dtype: torch.dtype


class Uses:
    """During a forward: for each parameter, whether every use of it was inside the forward of its own unit.

    While FSDP2 has a unit gathered, other Parameter objects stand in its modules. One that was taken from there before
    (``state = self.block.state``, then ``self.block(state)``) is a shard, and within the unit no use of what is gathered. So
    other objects are put there here, too.

    Attributes:
        outside: (unit, parameter) where it was not.
        again: (unit, parameter) where the unit ran within a custom ``autograd.Function`` that was not handed the parameter.
            The backward of that function computes with the parameter again, when the unit may have freed it.
        kept: parameters of which the model has the very object elsewhere than in its modules (in a list, in a function's
            closure), and that it used from there.
        seen: parameters that were used.
        written: parameters that were written.
        cast: parameters that the forward has cast to another type than they were built in, when they were used or at its end.
        called: units that ran, in the order in which they first did.
        swapped: unit → a parameter in whose place the forward had put another tensor when the unit ran.
        rewritten: modules that are to be recomputed, and whose input was written to after their forward.
        differentiates: whether the forward asked for gradients itself.
        escapes: what units hand on past FSDP2.
    """

    def __init__(
        self,
        model: nn.Module,
        candidates: Mapping[str, nn.Module],
        recomputed: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self.active: list[str] = []
        self.outside: set[tuple[str, str]] = set()
        self.again: set[tuple[str, str]] = set()
        self._around: tuple[str, ...] | None = None  # units that were running when a custom function began
        self.seen: set[str] = set()
        self.kept: set[str] = set()
        self._model = model
        self.called: dict[str, None] = {}
        self.written: set[str] = set()
        self.cast: dict[str, Cast] = {}
        self._casts: dict[str, Cast] = {}  # as they are now
        self.differentiates = False
        self.candidates, self.recomputed = candidates, recomputed
        self.rewritten: set[str] = set()
        self._inputs: list[tuple[str, Tensor, int | None]] = []  # of modules that are recomputed, with their versions
        self.escapes = Escapes(candidates)
        self.swapped: dict[str, str] = {}
        self.owners: dict[int, list[str]] = {id(p): [] for p in model.parameters()}
        for name, module in candidates.items():
            for p in module.parameters():
                self.owners[id(p)].append(name)
        self._places: list[list[_Place]] = []  # of each running unit, as ``active``
        self._made: dict[tuple[int, frozenset[str]], _Gathered] = {}
        self._gathered: dict[int, _Gathered] = {}  # by the identity of its parameter

    def own(self, x: Any) -> Any:
        """The model's own parameter, for one that stands in its place while a unit runs."""
        gathered = self._gathered.get(id(x))
        return x if gathered is None else gathered.of

    def note(self, x: Any, name: str) -> None:
        """A use of a parameter, as the model has it, by a torch function."""
        self.seen.add(name)
        if name in self._casts and not in_conversion():
            self.cast[name] = self._casts[name]
        gathered = self._gathered.get(id(x))
        if gathered is None and "" in self.active:
            self.kept.add(name)
            return
        taken_in = frozenset[str]() if gathered is None else gathered.units
        for unit in self.owners.get(id(self.own(x)), ()):
            if unit not in self.active or unit not in taken_in:
                self.outside.add((unit, name))
            elif self._around is not None and unit not in self._around:
                self.again.add((unit, name))

    def assigned(self, name: str, has: torch.dtype, dtype: torch.dtype) -> None:
        """A parameter gets data of a type. While it is followed, the parameter itself keeps the type that it has."""
        self._casts.pop(name, None)
        if dtype != has:
            self._casts[name] = Cast(model_line(), dtype)

    def custom(self, apply: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an ``autograd.Function`` of the model. Those of torch (a reentrant checkpoint) call modules, whose hooks
        gather them again."""
        if function.__module__.startswith("torch.") or self._around is not None:
            return apply(function, *args, **kwargs)
        self._around = tuple(self.active)
        try:
            return apply(function, *args, **kwargs)
        finally:
            self._around = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows which units' forwards are running."""
        with ExitStack() as stack:
            stack.callback(self._end)
            for name, module in {"": self._model, **self.candidates}.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            for name, module in self.recomputed.items():
                stack.callback(module.register_forward_hook(self._keep_input(name), with_kwargs=True).remove)
            yield
            self.rewritten |= {name for name, t, before in self._inputs if version(t) != before}

    def _end(self) -> None:
        """No unit runs any more, even if the forward was given up by what torch calls no hooks for."""
        while self.active:
            self._end_unit(len(self.active) - 1)
        self._inputs.clear()
        self.cast |= self._casts

    def _keep_input(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = map(local_of, tensors_of((args, kwargs)))
            self._inputs += [(name, t, version(t)) for t in tensors]

        return keep

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.active.append(name)
            self.called[name] = None
            with without_any_mode():
                self._places.append(self._gather(module))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if name in self.active:
                self._end_unit(max(i for i, other in enumerate(self.active) if other == name))

        return leave

    def _end_unit(self, i: int) -> None:
        del self.active[i]
        with without_any_mode():
            for place in self._places.pop(i):
                place.put_back()

    def _gather(self, unit: nn.Module) -> list[_Place]:
        """Puts others in the place of a unit's parameters."""
        there = [
            (module, key, p)
            for module in unit.modules() for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
        ]  # fmt: skip
        places = [_Place(*place, self._stand_in(place[2])) for place in there if id(self.own(place[2])) in self.owners]
        if others := [key for _, key, p in there if id(self.own(p)) not in self.owners]:
            self.swapped[self.active[-1]] = others[0]
        for place in places:
            setattr(place.module, place.key, place.now)
        return places

    def _stand_in(self, p: nn.Parameter) -> nn.Parameter:
        parameter, units = self.own(p), frozenset(self.active)
        gathered = self._made.get((id(parameter), units))
        if gathered is None:
            made = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            gathered = self._made[id(parameter), units] = _Gathered(made, parameter, units)
            self._gathered[id(made)] = gathered
        return gathered.parameter
