"""Repeated blocks, and which modules are wrapped as a unit: gathered, recomputed and sequence-cut together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


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


class Uses:
    """During a forward: for each parameter, whether every use of it was inside the forward of its own unit.

    Attributes:
        outside: (unit, parameter) where it was not.
        again: (unit, parameter) where the unit ran within a custom ``autograd.Function`` that was not handed the parameter.
            The backward of that function computes with the parameter again, when the unit may have freed it.
        seen: parameters that were used.
        written: parameters that were written.
        called: units that ran.
        differentiates: whether the forward asked for gradients itself.
    """

    def __init__(self, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
        self.active: list[str] = []
        self.outside: set[tuple[str, str]] = set()
        self.again: set[tuple[str, str]] = set()
        self._around: tuple[str, ...] | None = None  # units that were running when a custom function began
        self.seen: set[str] = set()
        self.called: set[str] = set()
        self.written: set[str] = set()
        self.differentiates = False
        self.candidates = candidates
        self.owners: dict[int, list[str]] = {id(p): [] for p in model.parameters()}
        for name, module in candidates.items():
            for p in module.parameters():
                self.owners[id(p)].append(name)

    def note(self, parameter: Any, name: str) -> None:
        """A use of a parameter by a torch function."""
        self.seen.add(name)
        for unit in self.owners.get(id(parameter), ()):
            if unit not in self.active:
                self.outside.add((unit, name))
            elif self._around is not None and unit not in self._around:
                self.again.add((unit, name))

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
            for name, module in self.candidates.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            yield

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self.active.append(name)
            self.called.add(name)

        return enter

    def _leave(self, name: str) -> Any:
        return lambda module, args, output: self.active.remove(name) if name in self.active else None
