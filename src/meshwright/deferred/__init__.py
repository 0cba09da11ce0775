"""Runs `build()` without memory for its weights. The ops are logged, and the value of each weight is computed on demand.

`build()` runs once, under a dispatch mode. Tensors of at least `small` elements become *deferred*: ordinary CPU tensors
(`.device` is cpu, `is_meta` is False) over reserved address space that nobody touches, and so without memory. As they are
ordinary tensors, views, `.data =`, `Parameter()`, `set_` and deep copies share storages as usual. Bookkeeping is by storage,
identified by its address: a *cell*. For a deferred tensor

    1. a view op runs: it moves no data;
    2. any other op is logged, not run: its function, and for each tensor a `Ref` (cell, size, stride, offset), or a copy of a
       real tensor. Its outputs are deferred too; a run on meta tensors gives their shapes;
    3. a random op is logged with the state of its generator; then it runs once on scratch memory, to advance the generator;
    4. an op that reads a value, or that has no meta kernel, gets its values by replay.

A replay (`Log.evaluate`) goes backwards through the log from the wanted cells, stops at full overwrites, and runs the ops that
it needs forwards, each random op from its logged generator state. So `RecordedModule.value(name)` is bit for bit the value of
plain `build()`. At the end, parameters move to the meta device, in place, so that ties and aliases stay. Every other deferred
tensor that is still alive (buffers, attributes, caches elsewhere) is filled in place.

Limits: torch, machine and number of threads must be the same, as reductions may round differently. Values from outside torch
(numpy, lists, files), or written through `.numpy()`, cannot be recomputed: they are kept. Not seen: memory that is read without
torch (`data_ptr()`), and other threads. A plain attribute that is computed from parameters loses its graph, as the parameters
are on meta now. Parameters that share memory with other tensors do not share it afterwards (``RecordedModule.shared``).

    memory       address space, and storages
    operation    facts of an op before it runs
    shared       what shares memory with parameters in the end
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
from meshwright.deferred.recorder import InitRecorder, Readers
from meshwright.deferred.shared import SharedMemory
from meshwright.generators import seed_all

__all__ = ["Build", "RecordedModule", "record"]

Build: TypeAlias = Callable[[], nn.Module]
"""Makes a model."""

_Value = Ref | Tensor | None  # by replay of the log; kept; there is none


class RecordedModule:
    """A module whose parameters are on the meta device, and the log from which each value is computed.

    Attributes:
        by_chance: names of buffers and attributes that depend on random numbers: without ``draw`` their values are wrong.
        shared: what shared memory with the parameters, and does not any more.
    """

    def __init__(
        self,
        module: nn.Module,
        log: Log,
        values: Mapping[str, _Value],
        drawn: bool,
        by_chance: tuple[str, ...],
        shared: SharedMemory,
    ) -> None:
        self.module, self.by_chance, self.shared = module, by_chance, shared
        self._log, self._values, self._drawn = log, values, drawn

    def value(self, name: str) -> Tensor:
        """The whole value of a parameter, by any of its names; a new CPU tensor at each call.

        Raises:
            KeyError: there is no such parameter.
            RuntimeError: it has no value: recorded with ``draw=False``, or left on meta or lazy by ``build()``.
        """
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


def record(build: Build, *, seed: int | None = None, draw: bool = True, small: int = 4096) -> RecordedModule:
    """Runs `build` without memory for its parameters.

    Args:
        seed: seeds torch's, Python's and NumPy's generators first; None leaves them as they are. Afterwards they are in the
            state in which plain `build()` would leave them.
        draw: False does not draw random numbers of deferred tensors. This is fast, but `value` raises, and buffers that depend
            on these numbers have only the right shape.
        small: tensors with fewer elements are real while build runs, unless they are computed from deferred ones.
    """
    if seed is not None:
        seed_all(seed)
    recorder = InitRecorder(draw, small)
    with Readers(recorder), recorder:
        module = build()
    shared = SharedMemory.of(module, _drop_graphs(module))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    value_by_id: dict[int, _Value] = {}
    for parameter in parameters.values():
        if id(parameter) not in value_by_id:
            value_by_id[id(parameter)] = _value(parameter, recorder)
    values = {name: value_by_id[id(parameter)] for name, parameter in parameters.items()}
    for parameter in {id(parameter): parameter for parameter in parameters.values()}.values():
        _to_meta(parameter)
    # Tensors in unreachable cycles need not be filled. But a garbage collection looks at every object of the process, half a
    # second if large packages are imported; and mostly only buffers are deferred now.
    if recorder.cells.keys() - {address_of(buffer) for buffer in module.buffers()}:
        gc.collect()
    by_chance = _by_chance(module, recorder)
    recorder.fill_all()
    recorder.log.keep(value.cell for value in values.values() if isinstance(value, Ref))
    return RecordedModule(module, recorder.log, values, draw, by_chance, shared)


def _by_chance(module: nn.Module, recorder: InitRecorder) -> tuple[str, ...]:
    """The names of buffers and attributes that depend on random numbers, as far as torch functions made them."""
    names: list[str] = []
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in ("_parameters", "_modules"):
                continue
            for key, item in value.items() if name == "_buffers" else [(name, value)]:
                if any(recorder.is_by_chance(t) for t in _tensors_within(item, set())):
                    names.append(f"{path}.{key}".lstrip("."))
    return (*names, *(["what cannot be told of tensors"] if recorder.told_by_chance else []))


def _value(parameter: Tensor, recorder: InitRecorder) -> _Value:
    """How to compute a parameter's value: by replay of the log, or a copy if the log does not make it."""
    if nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return None
    ref = recorder.ref(parameter)
    if ref is not None:
        return ref
    cell = recorder.filled.get(address_of(parameter))
    if cell is not None:  # `.numpy()` shared its memory, through which it may have been written since
        ref = ref_of(parameter, cell)
        if torch.equal(bits_of(recorder.log.tensor(ref)), bits_of(parameter)):
            return ref
    return copied(parameter.detach().cpu())


def _to_meta(parameter: Tensor) -> None:
    """Moves a parameter to the meta device in place: it stays the same object, for all references to it."""
    if nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return
    with torch.no_grad():
        meta = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
    meta.requires_grad_(parameter.requires_grad)
    # The public `torch.utils.swap_tensors` refuses tensors with weak references, which an LSTM has.
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(parameter, meta)
    for name, hook in zip(("_backward_hooks", "_post_accumulate_grad_hooks"), hooks, strict=True):
        if hook:  # set again, so that the new implementation knows of the hooks; first None, else nothing happens
            setattr(parameter, name, None)
            setattr(parameter, name, hook)


def _drop_graphs(module: nn.Module) -> dict[str, Tensor]:
    """Detaches plain attributes that were computed from parameters (old weight norm): their graph would hold the parameters.

    Returns:
        name → such a tensor.
    """
    computed: dict[str, Tensor] = {}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in ("_parameters", "_modules"):
                continue
            for tensor in _tensors_within(value, set()):
                if tensor.grad_fn is not None:
                    computed[f"{path}.{name}".lstrip(".")] = tensor
                    with contextlib.suppress(RuntimeError):  # a view cannot be detached in place: it keeps its graph
                        tensor.detach_()
    return computed


def _tensors_within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in nested containers and dataclasses, each container once. ``seen``: ids of those looked into."""
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
