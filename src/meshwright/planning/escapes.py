"""Tensors that a unit passes on without returning them. FSDP2 sees only a module's arguments and its result.

forward of a unit   ─ returns y ──────────────► FSDP2 gathers the unit again when the gradient of y comes
                    ─ self.aux = h, out.append(h), lambda: h ─► the gradient of h may come before that, or alone
                    ─ x[:, 0] = h, for an argument x ─► autograd refuses: FSDP2 has passed x through its own autograd.Function
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshwright.blame import model_line
from meshwright.calls.structure import tensors_of
from meshwright.private import storage_of
from meshwright.spmd.tensor import local_of


@dataclass(frozen=True)
class _Unreturned:
    """Memory that units wrote in their forwards and have not returned.

    Attributes:
        kept: a tensor that keeps the memory alive: memory is identified by its address, which could be used again.
        units: the units that wrote it.
    """

    keeps_alive: Tensor
    units: set[str] = field(default_factory=set)


class Escapes:
    """Finds, during a forward on meta, what units pass on besides their results, and which units write to their arguments.

    A tensor computed only from tensors with values is not followed, since it does not depend on parameters. This class does not
    know which tensors have gradients, so it also reports some that have none.

    Attributes:
        handed: unit → a source line that uses a tensor that the unit made and did not return.
        entered: units that write to an argument through a view of it.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self.handed: dict[str, str] = {}
        self.entered: set[str] = set()
        self._units = units
        self._active: list[str] = []
        self._unreturned: dict[int, _Unreturned] = {}  # by storage
        self._arguments: dict[str, list[Tensor]] = {}  # unit → the tensors among its arguments

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows which units run."""
        with ExitStack() as stack:
            for name, module in self._units.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            yield
        self._unreturned.clear()
        self._active.clear()

    def op(self, tensors: Sequence[Tensor], written: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Follows an op of the forward.

        Args:
            tensors: its inputs.
            written: the inputs that it writes in place.
            outputs: its results.
        """
        for t in tensors if self._unreturned else ():
            unreturned = self._unreturned.get(storage_of(t))
            for unit in unreturned.units.difference(self._active) if unreturned is not None else ():
                self.handed.setdefault(unit, model_line())
        if self._active and any(t.is_meta for t in tensors):
            for t in written:
                self.entered |= {unit for unit in self._active if _is_view(t, self._arguments.get(unit, ()))}
            input_memory = set(map(storage_of, tensors))  # a view of an input is no new memory
            for t in (*written, *(t for t in outputs if storage_of(t) not in input_memory)):
                if t.is_floating_point() or t.is_complex():
                    self._unreturned.setdefault(storage_of(t), _Unreturned(t)).units.update(self._active)

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._active.append(name)
            self._arguments[name] = [local_of(t) for t in tensors_of((args, kwargs))]

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if name in self._active:
                self._active.remove(name)
            for t in tensors_of(output):
                if (unreturned := self._unreturned.get(storage_of(local_of(t)))) is not None:
                    unreturned.units.discard(name)

        return leave


def _is_view(t: Tensor, arguments: Sequence[Tensor]) -> bool:
    """Whether ``t`` is a view of one of the arguments with another shape, stride or offset than each of them."""
    geometries = [(a.shape, a.stride(), a.storage_offset()) for a in arguments if storage_of(a) == storage_of(t)]
    return bool(geometries) and (t.shape, t.stride(), t.storage_offset()) not in geometries
