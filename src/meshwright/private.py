"""Torch's private interfaces that several files use: each once, with the reason.

An interface that a single file uses is in that file, in one function. ``tests/test_private_torch.py`` has a test for each,
which fails if a new version of torch changes it.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from operator import attrgetter
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

# While on, torch functions run without subclasses and function modes. For FSDP2's hooks, and the recorder.
without_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction

# While on, torch functions run without subclasses, but with function modes: facts of a global tensor are its wrapper's.
without_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


# While on, ops bypass dispatch modes. The public way is to leave each mode and to enter it again, which takes longer than the
# work in between.
without_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch

# Whether autocast is on for any device. The public function asks for one device, and takes twice the time of a call.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


# What C++ asks of a tensor without memory, and every dispatch mode then hears of: where it would be.
DEVICE = torch.ops.prim.device.default


class DispatchMode(TorchDispatchMode):
    """A dispatch mode for thousands of ops. Around each call of a mode torch turns Dynamo off and on, which can take as long as
    the call. Our modes are on only while nothing is compiled (``FunctionMode``); there is no public way to tell torch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def unprofiled() -> Iterator[None]:
    """Inside the ``with``, ``torch.profiler`` records no operation of this thread.

    It keeps weak references to the tensors that it records (with ``record_shapes``), and torch changes the implementation of no
    tensor that has some. There is no public switch.
    """
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():
        yield
        return
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


def without_any_mode() -> AbstractContextManager[Any]:
    """While on, torch functions run without subclasses and modes of any kind: for calls of our own that no mode may see."""
    stack = ExitStack()
    stack.enter_context(without_modes())
    stack.enter_context(_disable_current_modes())
    return stack


def schemas(name: str) -> list[Any]:
    """The schemas of the operator ``name``, one for each overload; none if there is no such operator.

    There is no public way to the alias annotations of all operators; composite ones (``reshape``, ``to``) have no
    ``OpOverload`` that a dispatch mode would see.
    """
    overloads: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return overloads


def schema_of(op: Any) -> Any:
    """The schema of an ``OpOverload``: there is no public way to ask what it aliases and writes."""
    return op._schema


# ``wrapper`` without the function call around it: in a steady state this takes half of the time of a call.
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def wrapper(cls: type[T], like: Any, shape: Any, **options: Any) -> T:
    """An instance of a tensor subclass with a shape and no data, with the dtype and device of ``like``."""
    options = {"dtype": like.dtype, "device": like.device, "requires_grad": False, **options}
    result: T = torch.Tensor._make_wrapper_subclass(cls, shape, **options)
    return result


def version(local: Tensor) -> int | None:
    """How often a tensor, or one that shares its memory, has been written; None in inference mode, which does not count.

    There is no public way to ask whether a tensor has been written since a result was computed from it.
    """
    return None if local.is_inference() else local._version


def set_version(local: Tensor, number: int | None) -> None:
    """Resets the version counter of a tensor, after its values of that time have been restored.

    There is no public way to restore the values of a tensor that autograd has saved.
    """
    if number is not None:
        torch._C._autograd._unsafe_set_version_counter((local,), (number,))


def memory_facts(t: Tensor) -> tuple[Any, ...] | None:
    """Where a plain tensor lies in memory, how often that was written, and whether it requires a gradient: all that can change
    while it stays the same object. None if it is a wrapper, or may lie there in another way (negated, conjugated).

    There is no public way to ask how often a tensor was written, nor whether a transform of ``torch.func`` has wrapped it.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(t) or t.is_inference():
        return None
    if t.layout is not torch.strided or t.is_complex() or t.is_neg():
        return None
    return t._version, t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad


def tensor_to_hook(t: Tensor) -> Tensor:
    """The tensor whose hooks run in the backward of ``t`` even if ``t`` is written in place: ``t`` itself, or its base if ``t``
    is a view to autograd and the FSDP2 unit that returns ``t`` made the base.

    There is no public way to a base. A write in place to a view gives its base another ``grad_fn``, whose history contains the
    old one; the old ``grad_fn`` of the view is dropped, with all hooks on it. An input of the unit that it returns is, to
    autograd, a view of a tensor from before the unit: a hook on that base would run after the unit's backward.
    """
    base = t._base
    if base is None or not (t.requires_grad and base.requires_grad) or _is_input(t.grad_fn, base.grad_fn):
        return t
    return base


def _is_input(node: Any, end: Any) -> bool:
    """Whether FSDP2's node for the end of a unit's backward is between the node of a view and that of its base: then the view
    is an input of the unit."""
    while node is not None and node is not end:
        if node.name() == "RegisterPostBackwardFunctionBackward":
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for its backward. There is no public way to ask."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def any_backward_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether any module has hooks for its backward. Every step asks of all; there is no public way."""
    global_hooks: bool = nn.modules.module._has_any_global_hook()
    return global_hooks or any(map(_AFTER, modules)) or any(map(_BEFORE, modules))


_AFTER, _BEFORE = attrgetter("_backward_hooks"), attrgetter("_backward_pre_hooks")


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Each module within a module once, itself first. Faster than ``module.modules()``, which spends most of its time on names;
    for code that runs in every step."""
    seen: set[nn.Module] = set()
    pending: list[nn.Module | None] = [module]
    while pending:
        current = pending.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        yield current
        pending += reversed(current._modules.values())


BACKWARD_HOOK_TABLES = "_backward_pre_hooks", "_backward_hooks"
HOOK_TABLES = (
    "_forward_pre_hooks", "_forward_hooks", *BACKWARD_HOOK_TABLES,
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
"""The attributes in which a module keeps its hooks and how they are called. There is no public way to ask."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for its forward or its backward. There is no public way to ask."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


# The function modes that are on in this thread: their number, and each, outermost first. There is no public way to ask.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at

# Whether function modes are called; false within ``without_modes``. There is no public way to ask.
modes_are_asked: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def backward_hooks(module: nn.Module) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """(hooks before a module's backward, hooks after it). There is no public way to ask."""
    return list(module._backward_pre_hooks.values()), list(module._backward_hooks.values())


def in_backward() -> bool:
    """Whether this thread is running a node of autograd. There is no public way to ask."""
    return bool(torch._C._current_graph_task_id() != -1)


def saved_tensors_are_hooked() -> bool:
    """Whether hooks get what autograd saves: those of a checkpoint, say. There is no public way to ask."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def new_fake_tensor(
    mode: FakeTensorMode,
    size: Iterable[int],
    stride: Iterable[int],
    dtype: torch.dtype,
    memory: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """A tensor without values, on the CPU. A function under the mode would infer this shape, which takes ten times as long.

    Args:
        memory: that it is a view of, ``offset`` elements from its start. None: its memory is new.
    """
    with without_dispatch():
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")  # type: ignore[arg-type]
        if memory is not None:
            meta.set_(memory, offset, size, stride)  # type: ignore[call-overload]
    return FakeTensor(mode, meta, _CPU)


_CPU = torch.device("cpu")


def storage_of(t: Tensor) -> int:
    """A number for the memory of a tensor, equal for tensors that share it; on meta too, where there is no real memory."""
    return storage_within(t)._cdata


def storage_within(t: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor, or of the tensor that it wraps.

    Within a transform of ``torch.func`` a tensor is a wrapper without memory, and what a model keeps of it stays a wrapper when
    the transform has ended. There is no public way to the wrapped tensor.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t.untyped_storage()


def in_conversion() -> bool:
    """Whether ``Module.to`` or its like is running. What it does to parameters are functions like others; there is no public
    way to tell them apart."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._apply.__code__:
        frame = frame.f_back
    return frame is not None


def replace_tensors(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Replaces the value of every parameter and buffer of a module, and of every gradient, by ``fn(value)``.

    Parameters stay the same objects unless they change device. ``Module.to`` takes no function, and makes complex values real.
    """
    module._apply(fn)


def dtensor_handlers() -> dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]:
    """What DTensor calls for some functions of ATen in place of its own rules; changes take effect at once.

    ``register_sharding``, the public way, has no effect on ``_local_scalar_dense``.
    """
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def dtensor_redistribution() -> list[Any]:
    """The modules whose global ``redistribute_local_tensor`` gathers and divides DTensors: for its methods, for functions of
    ATen, for gradients. There is no public way to a layout of parts other than that of ``Shard``."""
    from torch.distributed.tensor import _api, _dispatch, _redistribute

    return [_api, _dispatch, _redistribute]


def all_gathered(t: Tensor, group: Any) -> Tensor:
    """The tensors of all ranks of a group, one after another.

    These are the functions that DTensor itself calls. Below DTensor a compiler does not see ``torch.distributed.all_gather``.
    """
    c10d = torch.ops._c10d_functional
    gathered: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(t, group.size(), group.group_name))
    return gathered


def dtensor_placements() -> tuple[type, type]:
    """``Shard``, and the class of a placement along a dim that a later axis shards, too, which has no public name.

    ``_make_shard_tensor`` of them takes a part for ``distribute_tensor``, which scripts import by its name.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return Shard, _StridedShard


def placements_replaced(spec: Any, placements: Iterable[Any]) -> Any:
    """The description that a DTensor has of itself, with other placements. ``redistribute`` takes DTensors alone."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def description_of(t: Any) -> Any:
    """What a DTensor knows of itself (``DTensorSpec``): mesh, placements, shape. There is no public attribute for all of it."""
    return t._spec


def set_description(t: Any, spec: Any) -> None:
    """Changes what a DTensor knows of itself, as DTensor does for functions that write to their argument."""
    t._spec = spec


def raw_local(p: Any) -> Tensor:
    """This rank's local tensor of a DTensor, without a graph. ``to_local`` takes ten times as long."""
    local: Tensor = p._local_tensor
    return local


def set_raw_local(p: Any, local: Tensor) -> None:
    """Gives a DTensor another local tensor. An assignment to its ``data`` does nothing in torch."""
    p._local_tensor = local


def raw_locals(parameters: Iterable[Any]) -> list[Tensor]:
    """``raw_local`` of each. Called for all parameters in every step."""
    return list(map(_RAW_LOCAL, parameters))


_RAW_LOCAL = attrgetter("_local_tensor")


def has_gradient(t: Tensor) -> bool:
    """Whether a gradient flows through a tensor. Within transforms of ``torch.func`` a tensor knows only of the innermost one,
    and there is no public way to the wrapped tensor."""
    functorch = torch._C._functorch
    while not t.requires_grad and functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t.requires_grad


def hooked(p: Tensor) -> bool:
    """Whether a tensor itself has autograd hooks; without modes, as a mode might answer for another tensor. There is no public
    way to ask."""
    with without_modes():
        return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def unhooked(p: Tensor) -> bool:
    """The negation of ``hooked``, for callers for which function modes are off."""
    return not (p._backward_hooks or p._post_accumulate_grad_hooks)


def any_hooked(parameters: Sequence[Tensor]) -> bool:
    """Whether any of them has hooks of autograd's, for a moment in which function modes are off. Every step asks of all."""
    return any(map(_BACKWARD_HOOKS, parameters)) or any(map(_GRADIENT_HOOKS, parameters))


_BACKWARD_HOOKS, _GRADIENT_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def take_backward_hooks(p: Tensor) -> Mapping[int, Callable[[Tensor], Tensor | None]]:
    """Removes the hooks of ``register_hook`` from a leaf and returns them. There is no public way."""
    hooks: Mapping[int, Callable[[Tensor], Tensor | None]] = p._backward_hooks or {}
    p._backward_hooks = None
    return hooks


def awaits_gradient(p: Tensor) -> bool:
    """Whether a parameter has hooks of ``register_post_accumulate_grad_hook``. There is no public way to ask."""
    return bool(p._post_accumulate_grad_hooks)


def compiles(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module, its call, or a function that is an attribute of it or of its class.

    There is no public way to ask. (Compiled functions that a forward calls by a global name are not detected.)
    """
    if module._compiled_call_impl is not None:  # module.compile()
        return True
    kinds = (vars(kind) for kind in type(module).__mro__ if kind is not nn.Module)
    values = [value for names in (vars(module), *kinds) for value in names.values()]
    # A compiled function has a reference to the original, and so has the forward of an OptimizedModule.
    return any(callable(value) and hasattr(value, "_torchdynamo_orig_callable") for value in values)


def autograd_local(key: str) -> Any:
    """This thread's object for a key, or None. Autograd's threads have the objects of the thread that began the backward.

    Python's ``threading.local`` and context variables do not reach autograd's threads, in which, on a GPU, checkpoints
    recompute a model's forward.
    """
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_autograd_local(key: str, value: Any) -> None:
    """See ``autograd_local``."""
    if _stash_owns_what_it_borrows():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _stash_owns_what_it_borrows() -> bool:
    """Whether torch stores the object without taking a reference, but later drops one, as 2.11 does. The object would be freed
    while it is in use, and the interpreter would crash at the next garbage collection.
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
    """The function that makes a DTensor like the DTensor ``p`` from a local tensor without a graph.

    ``DTensor.from_local``, the public way, takes 50 µs instead of 5, for every gradient in every step. FSDP2 does the same
    (``_from_local_no_grad``). ``DTensor.__init__``, three calls that do nothing, is skipped.
    """
    kind, spec = type(p.data), copy.copy(p._spec)
    make: Any = kind.__new__
    return lambda local: make(kind, local, spec, requires_grad=False)


def python_body(func: Any) -> Callable[..., Any] | None:
    """The body of a torch function that is written in Python, as a function; it calls simpler torch functions. Else None.

    Such functions begin with ``if has_torch_function(…): return handle_torch_function(…)``, which would call us again. The copy
    has globals in which ``has_torch_function`` returns False. There is no public way to skip that line.
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
    """A new connection to the store of the default group; see ``dist.Store``.

    The address of the store is not always in the environment. The existing connection has a lock, which a waiting thread
    holds. There is no public way to the store of an existing group.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()  # type: ignore[attr-defined]


def collectives_entered() -> int:
    """The number of collectives that this process has entered, in all its groups; 0 if torch's flight recorder is off."""
    status = [s for dump in _flight_records(entries=False) for s in dump.get("pg_status", {}).values()]
    return sum(max(0, int(s["last_enqueued_collective"])) for s in status)


def last_collective() -> dict[str, Any]:
    """The entry of torch's flight recorder for the collective entered last; empty if it is off, or has none.

    Its fields include profiling_name, collective_seq_id, p2p_seq_id, process_group, input_sizes, state and retired.
    """
    entries = [entry for dump in _flight_records(entries=True) for entry in dump.get("entries", ())]
    return max(entries, key=lambda entry: int(entry["time_created_ns"]), default={})


def _flight_records(*, entries: bool) -> list[dict[str, Any]]:
    """The records of each backend: of gloo, and in builds with CUDA of NCCL. Torch has no public way to read them."""
    parts = torch._C._distributed_c10d
    dumps = [getattr(parts, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [json.loads(dump(includeCollectives=entries)) for dump in dumps if dump is not None]


def norms_of(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor, computed in ``dtype``, by one call for all.

    The public ``torch.nn.utils.get_total_norm``, which calls the same function, computes in the tensors' own dtype.
    """
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies tensors of one dtype by a number of that dtype, in place, by one call for all.

    The public ``torch.nn.utils.clip_grads_with_norm_``, which calls the same function, takes parameters of one kind.
    """
    torch._foreach_mul_(tensors, factor)


def copy_all(into: list[Tensor], values: list[Tensor]) -> None:
    """Copies tensors into others of the same shapes, in one call. The public way is a call for each of them."""
    torch._foreach_copy_(into, values)


def timeout_of(group: Any) -> timedelta | None:
    """How long CPU collectives of a group wait for other ranks; None if its backend has no timeout. There is no public way to
    ask."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def is_done(work: Any) -> bool:
    """Whether a collective has ended. Those of torch's backend ``fake`` end at once, but not every version of torch says so.
    Private: there is no public name for their class."""
    return bool(work.is_completed()) or type(work).__name__ == "FakeWork"


__all__ = [
    "DEVICE",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "any_backward_hooks",
    "any_hooked",
    "autocast_is_on",
    "autograd_local",
    "collectives_entered",
    "compiles",
    "copy_all",
    "function_mode_at",
    "function_modes",
    "has_hooks",
    "hooked",
    "is_done",
    "job_store",
    "last_collective",
    "make_wrapper",
    "modes_are_asked",
    "modules_of",
    "new_fake_tensor",
    "norms_of",
    "python_body",
    "pytree",
    "raw_local",
    "raw_locals",
    "replace_tensors",
    "saved_tensors_are_hooked",
    "scale_all",
    "schema_of",
    "schemas",
    "set_autograd_local",
    "set_description",
    "set_raw_local",
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
