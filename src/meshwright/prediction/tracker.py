"""``Tracker``: records what a rank does, function by function, as a ``Trace``. It works in rehearsals and in runs."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.blame import model_line
from meshwright.described import nbytes_of, tensors_among
from meshwright.hardware.functions import OWN_RATE
from meshwright.hardware.profile import CallKind
from meshwright.prediction.accumulation import holders_of_a_lone_tensor, in_place_without_mode
from meshwright.prediction.allocations import workspace
from meshwright.prediction.movement import moved_by
from meshwright.prediction.trace import Allocated, Began, Collective, Freed, Op, Resized, Trace
from meshwright.private import DEVICE, FakeTensor, TorchDispatchMode, pytree
from meshwright.schedule import Action
from meshwright.spmd.patches import RESIZE, changed_on
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import flops_of, op_facts, takes_batch_statistics

_REHEARSAL = os.path.join(os.path.dirname(__file__), "rehearsal.py")
Now = Callable[[], Action | None]
"""Returns the action that this rank runs; None between steps."""


class Tracker(TorchDispatchMode):
    """A dispatch mode that records each ATen function, each collective and each storage in ``trace``.

    Args:
        model: the model whose modules the trace names.
        now: returns the action that this rank runs.
    """

    def __init__(self, model: nn.Module, now: Now) -> None:
        super().__init__()
        self._paused = False
        self.trace = Trace()
        self._now, self._forward = now, False
        self._action: Action | None = None
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules: list[str] = [""]
        self._count, self._sharing = count(), Counter[int]()
        self._numbers: dict[int, int] = {}  # address of a living storage → its number
        self._hooks: list[Any] = []

    def __enter__(self) -> Tracker:
        holders_of_a_lone_tensor()
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> Trace:
        """Returns the trace so far, and starts an empty one: later events are not in the returned trace."""
        trace, self.trace = self.trace, Trace()
        return trace

    def mark_persistent(self, tensors: Mapping[str, Iterable[Tensor]]) -> None:
        """Marks tensors as persistent. ``tensors``: kind → tensors. A storage not seen before is recorded as allocated."""
        for kind, tensors_of_kind in tensors.items():
            for t in tensors_of_kind:
                self.trace.persistent[self._number(_local(t), kind)] = kind

    def begin(self, phase: str) -> None:
        """Records that a phase of the step begins."""
        self._action, self._forward = None, False
        self.trace.events.append(Began(phase))

    # --- modules ----------------------------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(self._names.get(id(module), self._modules[-1]))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        if len(self._modules) > 1:
            self._modules.pop()

    # --- functions --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # a fast path: half of all calls ask for the device
        if any(issubclass(t, (DTensor, GlobalTensor)) for t in types):
            return NotImplemented  # the functions on local tensors are dispatched here again
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim" or self._paused:
            return out
        self._follow_actions()
        if func.namespace == "c10d":
            self._exchange(func, args, kwargs)
        elif not op_facts(func).is_view:
            self._run(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Records a function that computes or allocates, and the storages of its outputs."""
        inputs, outputs = tensors_among((*args, *kwargs.values())), tensors_among(_listed(out))
        if not self._forward and (_name(func) in _OUT_OF_PLACE or in_place_without_mode(func, args)):
            self._share(outputs[0], inputs[0])
        # A mutable function writes into storages that exist already.
        for t in () if func._schema.is_mutable else outputs:
            self._number(t, _name(func))
        self.trace.batch_statistics |= takes_batch_statistics(func, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        moved = moved_by(_name(func), args, kwargs, outputs)
        taken = workspace(_name(func), args, out)
        self.trace.events.append(Op(_name(func), _kind(func, flops), flops, moved, _dtype(inputs, outputs), taken))

    def _follow_actions(self) -> None:
        """Records that an action begins, if it is not the one of the previous function."""
        action = self._now()
        if action is not self._action and action is not None:
            self._action, self._forward = action, action.kind == "F"
            self.trace.events.append(Began(action))

    def _exchange(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Records a collective, and the storages that it reads and writes."""
        storages = [self._number(_local(t), _name(func)) for t in _tensors((args, kwargs))]
        kind = _COLLECTIVES.get(_name(func))
        self.trace.exchanged.update(storages)
        if kind == "send":
            self.trace.sent.update(storages)
        groups = [ranks for value in args if (ranks := _ranks(value)) is not None]
        if kind is not None and groups:
            # The full tensor is the larger of input and output, which may be a tensor or a list of tensors.
            nbytes = max(nbytes_of(_tensors(value)) for value in args)
            self.trace.events.append(Collective(kind, nbytes, groups[0], self._modules[-1] if self._forward else ""))

    # --- memory -----------------------------------------------------------------------------------------------------

    def _number(self, t: Tensor, function: str) -> int:
        """The number of a tensor's storage. A storage not seen before gets the next number, and an ``Allocated`` event."""
        storage = t.untyped_storage()
        at = storage._cdata
        if (known := self._numbers.get(at)) is not None:
            return known
        number = self._numbers[at] = next(self._count)
        module, line = (self._modules[-1], model_line(_REHEARSAL)) if self._forward else ("", "")
        self.trace.events.append(Allocated(number, storage.nbytes(), function, module, line))
        self._register_finalizer(storage, number)
        return number

    def _share(self, result: Tensor, source: Tensor) -> None:
        """Counts a result as part of its source's storage: without a dispatch mode, the function writes in place."""
        storage = result.untyped_storage()
        number = self._number(source, "")
        self._numbers[storage._cdata], self._sharing[number] = number, self._sharing[number] + 1
        self._register_finalizer(storage, number)

    def _register_finalizer(self, storage: Any, number: int) -> None:
        """Calls ``freed`` when a storage is freed.

        The finalizer lives as long as the storage, so it holds the tracker weakly: the tracker refers to the model.
        """
        weakref.finalize(storage, _freed, weakref.ref(self), storage._cdata, number).atexit = False

    def freed(self, at: int, number: int) -> None:
        """Records that a storage was freed, unless another storage still has its number. ``at``: its address."""
        self._numbers.pop(at, None)
        if self._sharing[number]:
            self._sharing[number] -= 1
        else:
            self.trace.events.append(Freed(number))

    def resized(self, storage: Any, nbytes: int) -> None:
        """Records that a storage was resized to ``nbytes`` bytes."""
        if (number := self._numbers.get(storage._cdata)) is not None:
            self.trace.events.append(Resized(number, nbytes))


@contextmanager
def followed(tracker: Tracker) -> Iterator[None]:
    """A context in which a tracker records.

    It records resizes of storages too, which no dispatch mode sees, and ignores the functions by which DTensor infers shapes:
    a dispatch mode sees them, but they are no work of the step.
    """

    def with_recording(resize: Any) -> Any:
        def resized(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            tracker.resized(storage, nbytes)
            return result

        return resized

    def while_paused(shapes_of: Any) -> Any:
        def paused(*args: Any) -> Any:
            with tracker.paused():
                return shapes_of(*args)

        return paused

    with (
        RESIZE.on(with_recording),
        changed_on(sharding_propagator(), "_propagate_tensor_meta_non_cached", while_paused),
        tracker,
    ):
        yield


def sharding_propagator() -> Any:
    """DTensor's sharding propagator. Private: torch has no public way to it."""
    return DTensor._op_dispatcher.sharding_propagator


_COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
# In a backward, torch writes into zeros in place with these functions. Under a dispatch mode it makes a new tensor instead
# (``gather_backward``).
_OUT_OF_PLACE = frozenset(["scatter_add", "scatter", "index_add", "index_put", "index_fill", "index_copy"])


def _freed(tracker: weakref.ref[Tracker], at: int, number: int) -> None:
    if (living := tracker()) is not None:
        living.freed(at, number)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _listed(out: Any) -> Any:
    return out if isinstance(out, (tuple, list)) else (out,)


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def _kind(func: Any, flops: int) -> CallKind:
    name = _name(func)
    if "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    if name in OWN_RATE:
        return name
    return "matmul" if flops else "other"


def _dtype(inputs: list[Tensor], outputs: list[Tensor]) -> str:
    floating = [t for t in (*inputs, *outputs) if t.is_floating_point()] or [*inputs, *outputs]
    return str(floating[0].dtype).removeprefix("torch.") if floating else ""


def _ranks(value: Any) -> tuple[int, ...] | None:
    """The ranks of a process group, if an argument of a ``c10d`` op is one; else None.

    Private: the argument is a script object, which only ``ProcessGroup.unbox`` can convert.
    """
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    except (RuntimeError, TypeError, ValueError):
        return None  # a reduce operation
