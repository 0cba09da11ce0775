"""Torch's private parts that more than one file uses: each here once, with what rests on it.

What a single file uses stands there, in one function. ``tests/test_private_torch.py`` has a test for every one, here and
there, which fails where a new torch means something else by it.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (  # tensors with shapes and no values have no public name
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree  # batches and arguments nest; torch.utils has no public name for it
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # forwards without values, and builds without memory
    _disable_current_modes,
)

T = TypeVar("T", bound=Tensor)

# Torch functions run plainly: neither subclasses nor modes are asked. FSDP2's hooks and the recorder run so.
without_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction

# Subclasses are not asked, modes still are: facts of a global tensor are those of its wrapper.
without_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


# For the time of a ``with``, ops pass dispatch modes by. The public way is to leave each mode and to enter it again, which
# takes longer than what is done in between.
without_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch

# Whether autocast is on for any device. The public question asks for one device at a time, in twice the time of a call.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


# What C++ asks of a tensor without memory, and every dispatch mode then hears of: where it would be.
DEVICE = torch.ops.prim.device.default


class DispatchMode(TorchDispatchMode):
    """A mode that thousands of ops meet. Around each call of a mode torch turns Dynamo off and on, which takes as long as many
    a call does. These modes are on where nothing is compiled (``FunctionMode``), and there is no public way to say so."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_any_mode() -> AbstractContextManager[Any]:
    """Torch functions run plainly, and no dispatch mode sees their operations: what is asked of torch on the side."""
    stack = ExitStack()
    stack.enter_context(without_modes())
    stack.enter_context(_disable_current_modes())
    return stack


def schemas(name: str) -> list[Any]:
    """The schemas of the operator ``name``, one for each overload; none if there is no such operator.

    There is no public way to the alias annotations of all operators; composite ones (``reshape``, ``to``) have no
    ``OpOverload`` that a dispatch mode would meet.
    """
    overloads: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return overloads


def schema_of(op: Any) -> Any:
    """The schema of an ``OpOverload``. There is no public way to what an overload aliases and writes."""
    return op._schema


# As ``wrapper``, without its call: in a steady state this is half of what a call costs.
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def wrapper(cls: type[T], like: Any, shape: Any, **options: Any) -> T:
    """A tensor subclass's instance with a shape and no data, of the type and device of ``like``."""
    options = {"dtype": like.dtype, "device": like.device, "requires_grad": False, **options}
    made: T = torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    return made


def version(local: Tensor) -> int | None:
    """How often a tensor, or one that shares its memory, has been written; None in inference mode, which does not count.

    There is no public way to ask whether what was computed from a value still holds.
    """
    return None if local.is_inference() else local._version


def set_version(local: Tensor, number: int | None) -> None:
    """Makes a tensor as often written as ``version`` said, with the values that it had then.

    There is no public way to put a value back where autograd has saved it.
    """
    if number is not None:
        torch._C._autograd._unsafe_set_version_counter((local,), (number,))


def bases_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of those that are views to autograd and have a gradient, what they are views of, if the FSDP2 unit made it.

    There is no public way to it. A write in place to a view gives its base another ``grad_fn``, behind which the one before
    still stands; that of the view itself is dropped, and hooks on it with that. What the unit was given, and hands on, is to
    autograd a view of what was there before: a hook on that would run after the unit's backward.
    """
    pairs = ((t, t._base) for t in tensors if t._base is not None and t.requires_grad)
    return [base for t, base in pairs if base.requires_grad and not _was_given(t.grad_fn, base.grad_fn)]


def _was_given(node: Any, end: Any) -> bool:
    """Whether the node by which FSDP2 learns that a unit's backward is over is on the way from a view's node to its base's."""
    while node is not None and node is not end:
        if node.name() == "RegisterPostBackwardFunctionBackward":
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for its backward. There is no public way to ask."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Each module within a module once, itself first: as ``module.modules()``, whose names, which nobody asks for, take most
    of its time. For what is asked in every step."""
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        within = waiting.pop()
        if within is None or within in seen:
            continue
        seen.add(within)
        yield within
        waiting += reversed(within._modules.values())


BACKWARD_HOOK_TABLES = "_backward_pre_hooks", "_backward_hooks"
HOOK_TABLES = (
    "_forward_pre_hooks", "_forward_hooks", *BACKWARD_HOOK_TABLES,
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
"""The attributes in which a module keeps its hooks, and which of them are called how. There is no public way to ask."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for its forward or its backward. There is no public way to ask."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


# The function modes that are on in this thread, outermost first: how many, and which. The public context managers say of a
# mode neither that it is on nor what is above it.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at

# Whether function modes are asked; not within ``without_modes``. There is no public way to ask.
modes_are_asked: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def backward_hooks(module: nn.Module) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """A module's hooks before its backward, and after it. There is no public way to ask."""
    return list(module._backward_pre_hooks.values()), list(module._backward_hooks.values())


def in_backward() -> bool:
    """Whether a node of autograd's is being run in this thread. There is no public way to ask."""
    return bool(torch._C._current_graph_task_id() != -1)


def storage_of(t: Tensor) -> int:
    """Which memory a tensor is of, also on meta, where there is none: the same number for tensors that share it.

    Within a transform of ``torch.func`` a tensor is a wrapper without memory: there is no public way to what it wraps.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t.untyped_storage()._cdata


def replace_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Gives every parameter and buffer of a module, and its gradient, the value ``fn`` makes of it.

    Parameters stay the same objects unless they change device; ``Module.to`` takes no function, and makes complex real.
    """
    module._apply(fn)


def held_of(p: Any) -> Tensor:
    """What this rank holds of a DTensor, outside of any graph. ``to_local`` takes ten times as long to say it."""
    held: Tensor = p._local_tensor
    return held


def has_gradient(t: Tensor) -> bool:
    """Whether a gradient goes through a tensor. Within transforms of ``torch.func`` a tensor tells only of the innermost, and
    there is no public way to what it wraps."""
    functorch = torch._C._functorch
    while not t.requires_grad and functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t.requires_grad


def hooked(p: Tensor) -> bool:
    """Whether a tensor has hooks of autograd's, which there is no public way to ask. Itself: a mode may have what stands for
    it in its place."""
    with without_modes():
        return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def unhooked(p: Tensor) -> bool:
    """The reverse of ``hooked``, for a moment in which function modes are off."""
    return not (p._backward_hooks or p._post_accumulate_grad_hooks)


def take_backward_hooks(p: Tensor) -> Mapping[int, Callable[[Tensor], Tensor | None]]:
    """The hooks of ``register_hook`` on a leaf, which it has no more. There is no public way to ask."""
    hooks: Mapping[int, Callable[[Tensor], Tensor | None]] = p._backward_hooks or {}
    p._backward_hooks = None
    return hooks


def awaits_gradient(p: Tensor) -> bool:
    """Whether a parameter has hooks of ``register_post_accumulate_grad_hook``. There is no public way to ask."""
    return bool(p._post_accumulate_grad_hooks)


def compiles(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module itself, its call, or a function that it or its class has as an attribute.

    There is no public way to ask. (Functions compiled elsewhere, which a forward calls by a global name, are not found.)
    """
    if module._compiled_call_impl is not None:  # module.compile()
        return True
    kinds = (vars(kind) for kind in type(module).__mro__ if kind is not nn.Module)
    values = [value for names in (vars(module), *kinds) for value in names.values()]
    # A compiled function knows what it was made of, and so does the forward of an OptimizedModule.
    return any(callable(value) and hasattr(value, "_torchdynamo_orig_callable") for value in values)


def autograd_local(key: str) -> Any:
    """What this thread has under a key, or None. Autograd's own threads have what the thread had that began the backward.

    Python's ``threading.local`` and context variables do not reach those threads, in which, on a GPU, checkpoints run a
    model's forward again.
    """
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_autograd_local(key: str, value: Any) -> None:
    """See ``autograd_local``."""
    if _stash_owns_what_it_borrows():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _stash_owns_what_it_borrows() -> bool:
    """Whether torch keeps an object in this place without a reference of its own, and drops one afterwards, as 2.11 does: the
    object is freed while others use it, and the interpreter crashes when it next collects garbage.
    """
    probe, key = object(), "meshwright.probe"
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    owns = sys.getrefcount(probe) == before
    for value in (probe, None) if owns else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, None)
    return owns


def wrapping(p: Any) -> Callable[[Tensor], Any]:
    """What makes local tensors, without a graph, DTensors that are in all else like the DTensor ``p``.

    ``DTensor.from_local``, the public way, takes 50 µs where this takes 5, and every gradient of every step goes through it.
    FSDP2 does the same (``_from_local_no_grad``); that DTensor's ``__init__`` does nothing, in three layers, is left out.
    """
    kind, spec = type(p.data), copy.copy(p._spec)
    make: Any = kind.__new__
    return lambda local: make(kind, local, spec, requires_grad=False)


def python_body(func: Any) -> Callable[..., Any] | None:
    """A torch function written in Python, without its own hand-over to us: run, it calls simpler torch functions.

    Those functions open with ``if has_torch_function(…): return handle_torch_function(…)``; the copy made here has
    globals in which the question is answered with no. There is no public way past that line.
    """
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return None
    return _body(func)


@functools.cache
def _body(func: types.FunctionType) -> Callable[..., Any] | None:
    no = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    if not no:
        return None
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **no}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: Any) -> bool:
    return False


def job_store() -> Any:
    """A connection of one's own to the store through which the ranks of the default group met; see ``dist.Store``.

    Its address is not always in the environment, and a second connection to the same one shares a lock that a waiting
    thread holds. There is no public way to the store of a group that is up.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()  # type: ignore[attr-defined]


def collectives_entered() -> int:
    """Collectives that this process has entered, in all its groups; 0 where torch's flight recorder is off."""
    status = [s for dump in _flight_records(entries=False) for s in dump.get("pg_status", {}).values()]
    return sum(max(0, int(s["last_enqueued_collective"])) for s in status)


def last_collective() -> dict[str, Any]:
    """What torch's flight recorder has of the collective entered last; empty where it is off, or has none.

    Fields that are told: profiling_name, collective_seq_id, p2p_seq_id, process_group, input_sizes, state, retired.
    """
    entries = [entry for dump in _flight_records(entries=True) for entry in dump.get("entries", ())]
    return max(entries, key=lambda entry: int(entry["time_created_ns"]), default={})


def _flight_records(*, entries: bool) -> list[dict[str, Any]]:
    """The recorder of each backend: gloo's, and in builds with CUDA that of NCCL. Torch has no public way to read them."""
    parts = torch._C._distributed_c10d
    dumps = [getattr(parts, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [json.loads(dump(includeCollectives=entries)) for dump in dumps if dump is not None]


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor, taken in a type, by one call for all.

    Private by its name alone: ``torch.nn.utils.get_total_norm``, which is made of it, takes norms in the tensors' own type.
    """
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies tensors of one type by a number of that type, in place, by one call for all.

    Private by its name alone: ``torch.nn.utils.clip_grads_with_norm_``, which is made of it, takes parameters, of one kind.
    """
    torch._foreach_mul_(tensors, factor)


def timeout_of(group: Any) -> timedelta | None:
    """How long collectives between hosts of a group wait for other ranks; None if its backend knows no such time. There is no
    public way to ask."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def is_done(work: Any) -> bool:
    """Whether a collective has ended. One of a world without other ranks, which ends at once, does not say so in each torch.
    Private: torch's backend ``fake`` has no public name for its work."""
    return bool(work.is_completed()) or type(work).__name__ == "FakeWork"


__all__ = [
    "DEVICE",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "autocast_is_on",
    "autograd_local",
    "collectives_entered",
    "compiles",
    "function_mode_at",
    "function_modes",
    "has_hooks",
    "held_of",
    "hooked",
    "is_done",
    "job_store",
    "last_collective",
    "make_wrapper",
    "modes_are_asked",
    "modules_of",
    "norms_of",
    "python_body",
    "pytree",
    "replace_tensors",
    "scale_all",
    "schema_of",
    "schemas",
    "set_autograd_local",
    "storage_of",
    "timeout_of",
    "unhooked",
    "unset_fake_temporarily",
    "version",
    "without_any_mode",
    "without_dispatch",
    "without_modes",
    "without_subclasses",
    "wrapper",
    "wrapping",
]
