"""Repeated blocks of a model (a unit is gathered, recomputed and sharded over the sequence as one), and ``ParameterUses``:
where a forward uses each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.calls.structure import tensors_of
from meshwright.described import tensors_within
from meshwright.planning.escapes import Escapes
from meshwright.private import in_conversion, version, without_any_mode
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.tensor import local_of
from meshwright.spmd.torch_functions import is_fact


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's layers: the outermost modules of which a container has at least two of the same type.

    A layer without a forward of its own (a ``ModuleList`` of norm, attention and residual) is never called, so it cannot be
    gathered or recomputed. The modules within it that are called take its place.
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
    """The name of a module; if it has no forward, the names of the outermost modules within it that have one."""
    if _has_forward(module):
        return (name,)
    return tuple(
        n for child, m in module.named_children() for n in called_modules(f"{name}.{child}" if name else child, m)
    )


def _layers_in(name: str, module: nn.Module) -> tuple[str, ...]:
    if _has_forward(module):
        return (name,)
    # A single norm or linear is too small for a unit.
    return tuple(n for n in called_modules(name, module) if _is_block(module.get_submodule(n[len(name) + 1 :])))


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


@dataclass(frozen=True)
class _Gathered:
    """A Parameter that replaces the model's own in a module while units run.

    Attributes:
        parameter: the replacement; ``original``: the model's own.
        units: the units that were running when the replacement was set.
    """

    parameter: nn.Parameter
    original: nn.Parameter
    units: frozenset[str]


@dataclass(frozen=True)
class _Place:
    """An attribute of a module that holds a parameter, the parameter before, and the one that replaces it now."""

    module: nn.Module
    key: str
    before: nn.Parameter
    now: nn.Parameter

    def put_back(self) -> None:
        if dict(self.module.named_parameters(recurse=False, remove_duplicate=False)).get(self.key) is self.now:
            setattr(self.module, self.key, self.before)  # (unless the model has assigned another one)


class Cast(NamedTuple):
    """A cast of a parameter: the model's line, and the dtype after it."""

    line: str
    dtype: torch.dtype


class ParameterUses:
    """Records, during a forward, whether every use of a parameter is within the forward of its own unit.

    While FSDP2 has gathered a unit, its modules hold other Parameter objects. A Parameter that the model read from the module
    before (``state = self.block.state``, then ``self.block(state)``) is a shard: using it within the unit is no use of the
    gathered one. So this class also replaces the Parameter objects of a unit while the unit runs.

    Args:
        candidates: name → module, of the modules that may become units.
        recomputed: name → module, of the modules that are to be run again in the backward.

    Attributes:
        outside: (unit, parameter) if a use was outside the unit's forward.
        again: (unit, parameter) if the unit ran within a custom ``autograd.Function`` that did not get the parameter as an
            argument. The Function's backward computes with the parameter again, when the unit may have freed it.
        referenced_outside: parameters that the model also reaches by a reference outside its modules (in a list, in a closure),
            and that were used so.
        seen: parameters that were used.
        written: parameters that were written.
        cast: parameters that the forward has cast to another dtype when they were used, or at its end.
        joined: (parameter, another) if the forward gave it the other's memory → the model's line.
        called: units that ran, in the order of their first call.
        swapped: unit → a parameter that the forward had replaced by another tensor when the unit ran.
        rewritten: modules of ``recomputed`` whose input was written in place after their forward.
        swapped_when_recomputed: module of ``recomputed`` → a parameter that the forward had replaced by another tensor.
        writing: modules of ``recomputed`` whose forward wrote to parameters.
        differentiates: whether the forward asked for gradients itself.
        escapes: tensors that units pass on without FSDP2 seeing them.
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
        self.referenced_outside: set[str] = set()
        self._model = model
        self.called: dict[str, None] = {}
        self.written: set[str] = set()
        self.cast: dict[str, Cast] = {}
        self.joined: dict[tuple[str, str], str] = {}
        self._casts: dict[str, Cast] = {}  # parameter → its cast, if its dtype differs now
        self.differentiates = False
        self.candidates, self.recomputed = candidates, recomputed
        self.rewritten: set[str] = set()
        self.swapped_when_recomputed: dict[str, str] = {}
        self.writing: set[str] = set()
        self._assigned = 0  # how many times the data of a parameter was assigned
        # (Module of ``recomputed``, an input, its version counter.)
        self._inputs: list[tuple[str, Tensor, int | None]] = []
        self.escapes = Escapes(candidates)
        self.swapped: dict[str, str] = {}
        self.owners: dict[int, list[str]] = {id(p): [] for p in model.parameters()}
        for name, module in candidates.items():
            for p in module.parameters():
                self.owners[id(p)].append(name)
        # (id of a module, name of a parameter in it) → id of the parameter that belongs there.
        self._belongs = {(id(module), key): id(p) for module, key, p in _parameters_of(model)}
        self._places: list[list[_Place]] = []  # for each unit in ``active`` its replaced parameters
        self._replacements: dict[tuple[int, frozenset[str]], _Gathered] = {}
        self._gathered: dict[int, _Gathered] = {}  # id of a replacement → its facts

    def own(self, x: Any) -> Any:
        """The model's own parameter for its replacement; another object unchanged."""
        gathered = self._gathered.get(id(x))
        return x if gathered is None else gathered.original

    def _belongs_there(self, module: nn.Module, key: str, p: nn.Parameter) -> bool:
        """Whether a parameter is the module's own, and not one that the forward has put in its place."""
        return self._belongs.get((id(module), key)) == id(self.own(p))

    def note(self, x: Any, name: str) -> None:
        """Records that a torch function uses a parameter. ``x``: the Parameter object that the function got; ``name``: its
        name."""
        self.seen.add(name)
        if name in self._casts and not in_conversion():
            self.cast[name] = self._casts[name]
        gathered = self._gathered.get(id(x))
        if gathered is None and "" in self.active:
            self.referenced_outside.add(name)
            return
        gathered_in = frozenset[str]() if gathered is None else gathered.units
        for unit in self.owners.get(id(self.own(x)), ()):
            if unit not in self.active or unit not in gathered_in:
                self.outside.add((unit, name))
            elif self._around is not None and unit not in self._around:
                self.again.add((unit, name))

    def assigned(self, name: str, own: torch.dtype, dtype: torch.dtype, memory_of: str) -> None:
        """Records ``parameter.data = value``. While planning, the parameter itself keeps its dtype.

        Args:
            own: the parameter's dtype; ``dtype``: the dtype of the value.
            memory_of: the parameter in whose memory the value is; ``name`` if it is in no other's.
        """
        self._assigned += 1
        if memory_of != name:
            self.joined.setdefault((name, memory_of), model_line())
        self._casts.pop(name, None)
        if dtype != own:
            self._casts[name] = Cast(model_line(), dtype)

    def custom(self, apply: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an ``autograd.Function``. For the model's own, records which units run outside of it. (Torch's own, such as a
        reentrant checkpoint, call modules again in the backward, and hooks of FSDP2 gather these.)"""
        if function.__module__.startswith("torch.") or self._around is not None:
            return apply(function, *args, **kwargs)
        self._around = tuple(self.active)
        try:
            return apply(function, *args, **kwargs)
        finally:
            self._around = None

    @contextmanager
    def watching(self, writes: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Inside the ``with``, follows which units' forwards are running, and replaces their parameters meanwhile.

        Args:
            writes: returns how many times parameters have been written so far.
        """
        with ExitStack() as stack:
            stack.callback(self._end)
            for name, module in {"": self._model, **self.candidates}.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            for name, module in self.recomputed.items():
                before, after = self._watch_recomputed(name, writes)
                stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            yield
            self.rewritten |= {name for name, t, before in self._inputs if version(t) != before}

    def _end(self) -> None:
        """Ends all running units. Some may still run: torch calls no hooks if a BaseException ends the forward."""
        while self.active:
            self._end_unit(len(self.active) - 1)
        self._inputs.clear()
        self.cast |= self._casts

    def _watch_recomputed(self, name: str, writes: Callable[[], int]) -> tuple[Any, Any]:
        """The hooks before and after the forward of a module of ``recomputed``. ``writes``: see ``watching``."""
        begun: list[int] = []

        def begin(module: nn.Module, args: Any) -> None:
            begun.append(self._assigned + writes())

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if begun and self._assigned + writes() > begun.pop():
                self.writing.add(name)
            tensors = map(local_of, tensors_of((args, kwargs)))
            self._inputs += [(name, t, version(t)) for t in tensors]
            foreign = (key for part, key, p in _parameters_of(module) if not self._belongs_there(part, key, p))
            if (swapped := next(foreign, None)) is not None:
                self.swapped_when_recomputed[name] = swapped

        return begin, keep

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
        """Replaces a unit's parameters by other Parameter objects. Returns the places, to put the parameters back."""
        places, foreign = [], []
        for module, key, p in _parameters_of(unit):
            if self._belongs_there(module, key, p):
                places.append(_Place(module, key, p, self._stand_in(p)))
            else:
                foreign.append(key)
        if foreign:
            self.swapped[self.active[-1]] = foreign[0]
        for place in places:
            setattr(place.module, place.key, place.now)
        return places

    def _stand_in(self, p: nn.Parameter) -> nn.Parameter:
        parameter, units = self.own(p), frozenset(self.active)
        gathered = self._replacements.get((id(parameter), units))
        if gathered is None:
            replacement = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            replacement.__dict__.update(parameter.__dict__)
            gathered = self._replacements[id(parameter), units] = _Gathered(replacement, parameter, units)
            self._gathered[id(replacement)] = gathered
        return gathered.parameter


class UsesNoted(FunctionMode):
    """Notes the parameters that torch functions get, in a forward for which no shards are chosen."""

    def __init__(self, model: nn.Module, uses: ParameterUses) -> None:
        super().__init__()
        self._uses, self._names = uses, {id(p): name for name, p in model.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for t in () if is_fact(func) else tensors_within((args, kwargs)):
            if (name := self._names.get(id(self._uses.own(t)))) is not None:
                self._uses.note(t, name)
        return func(*args, **kwargs)


def _parameters_of(root: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name in it, parameter) for each place of a parameter."""
    return [
        (module, key, p)
        for module in root.modules() for key, p in module.named_parameters(recurse=False, remove_duplicate=False)
    ]  # fmt: skip
