"""Init: what `build()` would give, recorded without its memory; each weight is made when it is wanted.

`build()` runs once, under a dispatch mode. Tensors of at least `small` elements become *deferred*: ordinary
CPU tensors (`.device` says cpu, `is_meta` is False) over reserved address space that nobody touches, and so
without memory. As they are ordinary tensors, views, `.data =`, `Parameter()`, `set_` and deep copies share
storages as ever; a storage, known by its address, is the unit of bookkeeping: a *cell*. For a deferred tensor

    1. a view runs as it is: it moves no data;
    2. any other op is logged, not run: its function, and for each tensor a `Ref` (cell, size, stride, offset)
       or, of a real tensor, a copy. Its outputs, whose shapes a run on meta tensors tells, are deferred too;
    3. a random op's generator state is logged; then it runs once on scratch, to move the generator on;
    4. an op that reads a value, or that meta tensors cannot run, gets the values it asks for, by replay.

A replay (`Log.evaluate`) walks the log backwards from what is wanted, stops at full overwrites, and runs what
it found forwards, each random op from its own generator state: `Recorded.value(name)` is bitwise what plain
`build()` gives. At the end parameters move to the meta device, in place, so that ties and aliases hold, and
every other deferred tensor that is still alive (buffers, attributes, caches elsewhere) is filled in place.

Limits. Same torch, machine and thread count, or reductions may round otherwise. Values from outside torch
(numpy, lists, files), or written through `.numpy()`, cannot be made anew: they are held. Not seen: memory
read behind torch's back (`data_ptr()`), other threads. A plain attribute computed from parameters loses its
graph, as those are on meta now; distinct parameters that share a storage no longer do.

    memory       address space, and storages
    operation    what is known of an op before it runs
    log          ops in order, and their replay
    recorder     the modes under which ``build()`` runs

Start with ``record``, below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwright.deferred.log import Log, Ref, copied, ref_of
from meshwright.deferred.memory import address_of, bits_of
from meshwright.deferred.recorder import Readers, Recorder
from meshwright.generators import seed_all

__all__ = ["Build", "Recorded", "record"]

Build: TypeAlias = Callable[[], nn.Module]
"""Makes a model."""

_Value = Ref | Tensor | None  # in the log; held; there is none


class Recorded:
    """A module whose parameters are on the meta device, and the means to make the value of each.

    Attributes:
        by_chance: buffers and attributes that follow from random numbers: without ``draw`` their values are wrong.
    """

    def __init__(
        self, module: nn.Module, log: Log, values: Mapping[str, _Value], drawn: bool, by_chance: tuple[str, ...]
    ) -> None:
        self.module, self.by_chance = module, by_chance
        self._log, self._values, self._drawn = log, values, drawn

    def value(self, name: str) -> Tensor:
        """The whole value of a parameter, by any of its names, on CPU, made anew at each call."""
        if not self._drawn:
            raise RuntimeError(
                f"no value of {name!r}: this model was recorded for planning, with draw=False, so its random "
                "numbers were not drawn; record it with draw=True"
            )
        if name not in self._values:
            raise KeyError(f"no parameter {name!r}; there are {', '.join(self._values) or 'none'}")
        value = self._values[name]
        if value is None:
            raise RuntimeError(f"no value of {name!r}: build() itself left it without one (on meta, or lazy)")
        return self._log.tensor(value) if isinstance(value, Ref) else copied(value)


def record(build: Build, *, seed: int | None = None, draw: bool = True, small: int = 4096) -> Recorded:
    """Run `build` without memory for its parameters.

    `seed` is given to `torch.manual_seed`, Python's and NumPy's `random` first; None leaves the generators as they are.
    Afterwards they are where plain `build()` would leave them. With `draw=False` random numbers of deferred tensors are
    not drawn: fast, but then `value` raises, and buffers that come from them are right in shape only. Tensors of fewer
    than `small` elements are real while build runs, unless they come from deferred ones.
    """
    if seed is not None:
        seed_all(seed)
    recorder = Recorder(draw, small)
    with Readers(recorder), recorder:
        module = build()
    _drop_graphs(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    made: dict[int, _Value] = {}
    for parameter in parameters.values():
        if id(parameter) not in made:
            made[id(parameter)] = _value(parameter, recorder)
    values = {name: made[id(parameter)] for name, parameter in parameters.items()}
    for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
        _to_meta(parameter)
    # What only cycles hold need not be filled. A collection looks through every object of the process, half a second
    # where large packages are imported; and mostly nothing is left but buffers.
    if recorder.cells.keys() - {address_of(buffer) for buffer in module.buffers()}:
        gc.collect()
    by_chance = _by_chance(module, recorder)
    recorder.fill_all()
    recorder.log.keep(value.cell for value in values.values() if isinstance(value, Ref))
    return Recorded(module, recorder.log, values, draw, by_chance)


def _by_chance(module: nn.Module, recorder: Recorder) -> tuple[str, ...]:
    """The names of buffers and attributes that follow from random numbers, as far as torch functions made them."""
    found: list[str] = []
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            named = value.items() if name == "_buffers" else [(name, value)]
            if name not in ("_parameters", "_modules"):
                found += [
                    f"{path}.{key}".lstrip(".") for key, held in named
                    if any(recorder.is_by_chance(t) for t in _tensors_within(held, set()))
                ]  # fmt: skip
    return (*found, *(["what cannot be told of tensors"] if recorder.told_by_chance else []))


def _value(parameter: Tensor, recorder: Recorder) -> _Value:
    """How to make the parameter's value: from the log, or as it is if it does not come from there."""
    if nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return None
    ref = recorder.ref(parameter)
    if ref is not None:
        return ref
    cell = recorder.filled.get(address_of(parameter))
    if cell is not None:  # `.numpy()` gave its memory away: has it been written since?
        ref = ref_of(parameter, cell)
        if torch.equal(bits_of(recorder.log.tensor(ref)), bits_of(parameter)):
            return ref
    return copied(parameter.detach().cpu())


def _to_meta(parameter: Tensor) -> None:
    """Move a parameter to the meta device in place: the same object, wherever it is referred to."""
    if nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return
    with torch.no_grad():
        meta = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
    meta.requires_grad_(parameter.requires_grad)
    # The public `torch.utils.swap_tensors` refuses tensors with weak references, which an LSTM has.
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, meta)
    for name, kept in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
        if kept:  # setting them anew tells the new implementation of them; None first, or nothing happens
            setattr(parameter, name, None)
            setattr(parameter, name, kept)


def _drop_graphs(module: nn.Module) -> None:
    """Plain attributes computed from parameters (old weight norm) hold them through their graph."""
    for owner in module.modules():
        attributes = [value for name, value in vars(owner).items() if name not in ("_parameters", "_modules")]
        for tensor in _tensors_within(attributes, set()):
            if tensor.grad_fn is not None:
                with contextlib.suppress(RuntimeError):  # a view cannot be detached: it keeps its graph
                    tensor.detach_()


def _tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for item in items:
        yield from _tensors_within(item, seen)
