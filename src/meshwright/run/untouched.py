"""``untouched``: forwards that leave no trace: what they change of a model, and of random numbers, is put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.parameters import local_tensor

Slot = tuple[nn.Module, str]  # where a module keeps a tensor, as a forward may put another in its place

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"} | {"forward"}


@contextmanager
def untouched(model: nn.Module, slots: Sequence[Slot], left: list[list[Tensor]], *, wide: bool) -> Iterator[None]:
    """Forwards within leave slots, plain attributes of modules and random numbers as they were.

    Args:
        slots: what a forward may change: buffers, parameters that it writes.
        left: gets what the forwards made of the slots.
        wide: buffers are of float64 meanwhile.
    """
    tensors = [getattr(module, name) for module, name in slots]
    values = [local_tensor(t).detach().clone() for t in tensors]
    attributes = _Attributes(model)
    try:
        if wide:
            for (module, name), t in zip(slots, tensors, strict=True):
                if not isinstance(t, nn.Parameter) and t.is_floating_point():
                    setattr(module, name, t.double())
        with random_numbers_kept():
            yield
    finally:
        with torch.no_grad():
            left.append([local_tensor(getattr(module, name)).detach().clone() for module, name in slots])
            for (module, name), t, value in zip(slots, tensors, values, strict=True):
                setattr(module, name, t)
                local_tensor(t).copy_(value)
        attributes.put_back()


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Torch's, Python's and, if it is loaded, NumPy's random numbers go on after it as before."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


class _Attributes:
    """Plain attributes of modules (counters, caches, lists of states, generators), as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(m, {k: v for k, v in vars(m).items() if k not in _TORCHS_OWN}) for m in model.modules()]
        self._contents = [
            (v, v.copy()) for _, own in self._before for v in own.values()
            if isinstance(v, (list, dict, set)) and not _of_parameters(v)
        ]  # fmt: skip
        kept = [v for _, own in self._before for v in own.values() if isinstance(v, torch.Generator)]
        self._generators = [(g, g.get_state()) for g in kept]
        self._gradients: list[tuple[Any, Any]] = [(p, p.grad) for p in model.parameters()]

    def put_back(self) -> None:
        for module, own in self._before:
            now = vars(module)
            for key in [k for k in now if k not in own and k not in _TORCHS_OWN]:
                del now[key]
            now.update(own)
        for container, contents in self._contents:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        for generator, state in self._generators:
            generator.set_state(state)
        for p, gradient in self._gradients:
            p.grad = gradient


def _of_parameters(container: Any) -> bool:
    """Whether it holds parameters, as recurrent modules do: FSDP2 puts others in their place while they are gathered."""
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(x, nn.Parameter) for x in values)
