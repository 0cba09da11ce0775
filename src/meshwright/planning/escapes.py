"""What a unit hands on past FSDP2, which sees a module's arguments and its result, and nothing else.

forward of a unit   ─ returns y ──────────────► FSDP2 gathers the unit again when the gradient of y comes
                    ─ self.aux = h, out.append(h), lambda: h ─► the gradient of h may come before that, or alone
                    ─ x[:, 0] = h, of a given x ─► autograd refuses, as FSDP2 has made x the result of a function of its own
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
class _Made:
    """Memory that units wrote in their forwards and have not returned.

    Attributes:
        kept: a tensor that keeps it, as memory is told by its address.
    """

    kept: Tensor
    units: set[str] = field(default_factory=set)


class Escapes:
    """During a forward on meta: what units give besides their results, and what they write into.

    What is computed of tensors with values alone is not followed: it does not follow from parameters. Whether a tensor has a
    gradient is not known here, so that some that have none are among those that are found.

    Attributes:
        handed: unit → a line that uses what the unit made and did not return.
        entered: units that write to what they are given, through a view of it.
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self.handed: dict[str, str] = {}
        self.entered: set[str] = set()
        self._units = units
        self._active: list[str] = []
        self._made: dict[int, _Made] = {}  # by storage
        self._given: dict[str, list[Tensor]] = {}  # of the units that run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows which units run."""
        with ExitStack() as stack:
            for name, module in self._units.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            yield
        self._made.clear()
        self._active.clear()

    def op(self, tensors: Sequence[Tensor], written: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """An op of the forward: what it takes, what of that it writes, and what it gives."""
        for t in tensors if self._made else ():
            made = self._made.get(storage_of(t))
            for unit in made.units.difference(self._active) if made is not None else ():
                self.handed.setdefault(unit, model_line())
        if self._active and any(t.is_meta for t in tensors):
            for t in written:
                self.entered |= {unit for unit in self._active if _is_view(t, self._given.get(unit, ()))}
            there = set(map(storage_of, tensors))  # a view of it is not made anew
            for t in (*written, *(t for t in outputs if storage_of(t) not in there)):
                if t.is_floating_point() or t.is_complex():
                    self._made.setdefault(storage_of(t), _Made(t)).units.update(self._active)

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._active.append(name)
            self._given[name] = [local_of(t) for t in tensors_of((args, kwargs))]

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if name in self._active:
                self._active.remove(name)
            for t in tensors_of(output):
                if (made := self._made.get(storage_of(local_of(t)))) is not None:
                    made.units.discard(name)

        return leave


def _is_view(t: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether a tensor is a view of one of several, and the same as none of them."""
    laid = [(g.shape, g.stride(), g.storage_offset()) for g in given if storage_of(g) == storage_of(t)]
    return bool(laid) and (t.shape, t.stride(), t.storage_offset()) not in laid
