"""While on, a model's own code sees one process: ``torch.distributed`` answers it as a process that is alone.

A model computes as on one device, and Meshwright communicates. But a model's own code may use ``torch.distributed``:
``if dist.is_initialized(): dist.all_reduce(statistics)``, or split its experts over the ranks. Under ``one_process`` such code
gets these answers:

    is_initialized()    False
    get_world_size()    1
    get_rank()          0
    any collective, any function that makes or reads a process group    PlanError, with the model's line
    dist.group.WORLD    None
    a group that was passed to the model    its size is 1, its rank 0, a collective of it a PlanError
    os.environ, os.getenv    RANK, GROUP_RANK and ROLE_RANK are "0", WORLD_SIZE and the like "1", if they are set

LOCAL_RANK keeps its value: it names the device of this process, not what the model computes. Not covered: questions of C++ code
to a group or to the environment, a ``DeviceMesh`` that was passed to the model, private parts of ``torch.distributed``, and
whatever the model has read before (when its file was imported).

Callers in ``torch.distributed`` and in Meshwright still reach the real functions: FSDP2 works as usual. Only the thread that
entered is affected, and the threads in which autograd runs its backward.

A model may have imported a function by name (``from torch.distributed import get_rank``). So the function objects themselves
are changed while a forward runs: each gets the code of a stand-in.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.overrides import handle_torch_function

import meshwright
from meshwright.errors import Finding, PlanError, source_place
from meshwright.private import autograd_local, set_autograd_local
from meshwright.spmd import patches
from meshwright.spmd.comm import Heard
from meshwright.spmd.patches import CodePatch, MethodPatch

_ANSWERS: dict[str, Any] = {
    "is_initialized": False,
    "is_torchelastic_launched": False,
    "get_world_size": 1,
    "get_rank": 0,
}

# Environment variables by which a launcher tells a process of the others, with the answer if they are set.
_ENVIRONMENT = {
    **dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1"),
}

# Methods of a process group that have an answer, and those that are collectives.
_GROUP_ANSWERS = {"size": 1, "rank": 0}
_COLLECTIVES = frozenset(
    "broadcast allreduce allreduce_coalesced reduce allgather all_gather_single _allgather_base allgather_coalesced \
    all_gather_single_coalesced allgather_into_tensor_coalesced gather scatter reduce_scatter reduce_scatter_single \
    _reduce_scatter_base reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced all_to_all_single alltoall_base \
    alltoall send recv recv_anysource barrier monitored_barrier split_group merge_remote_group".split()
)

# The results of these do not depend on other processes.
_INDEPENDENT = frozenset(
    "is_backend_available is_gloo_available is_mpi_available is_nccl_available is_ucc_available is_xccl_available \
    get_node_local_rank get_default_backend_for_device supports_complex".split()
)

# Modules whose functions are collectives. The last two are patched only if they have been imported.
_MODULES = (
    distributed_c10d.__name__,
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
)

# Files whose frames are skipped when the caller is looked up: a default device (``torch.set_default_device``) is a function
# mode, which calls the function.
_TORCH = os.path.dirname(torch.__file__)
_PASSES_ON = (os.path.join(_TORCH, "utils", "_device.py"), os.path.join(_TORCH, "overrides.py"))
_SEES_WORLD = tuple(os.path.dirname(p.__file__ or "") + os.sep for p in (dist, meshwright))


@functools.cache
def _sees_world(file: str) -> bool:
    """Whether the code in a file sees the real world of processes. Cached, as it is asked twice for each collective."""
    return file.startswith(_SEES_WORLD)


_KEY = "meshwright.one_process"
_LOCK = threading.Lock()
_StandIn = CodePatch | MethodPatch


@dataclass
class _Alone:
    """The state of one ``with one_process()`` block.

    Attributes:
        refused: the errors that the model's code got within the block.
        heard: calls the collectives of torch and Meshwright; None: they run directly.
    """

    refused: list[PlanError] = field(default_factory=list)
    heard: Heard | None = None


@contextmanager
def one_process() -> Iterator[None]:
    """While on, the model's own code sees one process. Blocks may nest; the outermost counts.

    Raises:
        PlanError: the model's code called a collective, or made a process group. If other code caught that error, it is
            raised again at the end of the block.
    """
    if autograd_local(_KEY) is not None:
        yield
        return
    alone = _Alone()
    with _LOCK:
        _PATCHES.enter(_new_stand_ins())
    set_autograd_local(_KEY, alone)
    try:
        yield
    except Exception as error:
        if alone.refused and not isinstance(error, PlanError):
            raise alone.refused[0] from error
        raise
    finally:
        set_autograd_local(_KEY, None)
        _PATCHES.leave()
    if alone.refused:
        raise alone.refused[0]


@contextmanager
def hearing(heard: Heard) -> Iterator[None]:
    """While on, ``heard`` calls every collective of torch and of this library, except those that C++ code calls (functional
    collectives). Includes ``one_process()``."""
    with one_process():
        alone: _Alone = autograd_local(_KEY)
        before, alone.heard = alone.heard, heard
        try:
            yield
        finally:
            alone.heard = before


_PATCHES = patches.SharedPatches()  # one for the process, as torch's functions are
_KNOWN: set[str] = set()  # modules whose functions have stand-ins


def _new_stand_ins() -> list[_StandIn]:
    """Stand-ins for the functions of modules that have been imported since the last call."""
    new: list[_StandIn] = []
    for module in _MODULES:
        if module in sys.modules and module not in _KNOWN:
            _KNOWN.add(module)
            new += [_stand_in(f, answer) for f, answer in _functions(module)]
            if module == distributed_c10d.__name__:
                new += [*_methods(), _environment()]
    return new


def _functions(module: str) -> Iterator[tuple[Any, Callable[[FrameType], Any]]]:
    """(function, its answer to a caller) for each function of a module of torch that gets a stand-in."""
    if module == distributed_c10d.__name__:
        yield vars(type(dist.group))["WORLD"].fget, lambda caller: None
        yield device_mesh.init_device_mesh, _refusal("torch.distributed.init_device_mesh")
        yield device_mesh.DeviceMesh.__init__, _refusal("DeviceMesh")
        yield torch.nn.parallel.DistributedDataParallel.__init__, _refusal("DistributedDataParallel")
    names = distributed_c10d.__all__ if module == distributed_c10d.__name__ else sorted(vars(sys.modules[module]))
    for name in names:
        function = getattr(sys.modules[module], name)
        if (
            type(function) is not FunctionType
            or function.__module__ != module
            or name[0] == "_"
            or name in _INDEPENDENT
        ):
            continue
        shown = f"{module.removesuffix('.distributed_c10d')}.{name}"
        yield function, partial(_answer, name) if name in _ANSWERS else _refusal(shown)


def _methods() -> Iterator[MethodPatch]:
    """The patches of methods of process groups."""
    for name in (*_GROUP_ANSWERS, *sorted(_COLLECTIVES)):
        method = vars(dist.ProcessGroup).get(name)
        if method is not None:
            answer = (
                partial(_group_answer, name)
                if name in _GROUP_ANSWERS
                else _refusal(f"torch.distributed.ProcessGroup.{name}")
            )
            stand_in = _method(getattr(dist.ProcessGroup, name), answer, name if name in _COLLECTIVES else "")
            yield MethodPatch(dist.ProcessGroup, name, (method, stand_in))


def _group_answer(name: str, caller: FrameType) -> int:
    return _GROUP_ANSWERS[name]


def _method(original: Callable[..., Any], answer: Callable[[FrameType], Any], heard_as: str) -> Callable[..., Any]:
    """The stand-in for a method of process groups.

    Args:
        original: the method.
        answer: a frame of the model's code → what the method returns to it, or raises.
        heard_as: the name under which ``heard`` gets the collective; empty: the method is no collective.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller, alone = sys._getframe(1), autograd_local(_KEY)
        if alone is not None and not _sees_world(caller.f_code.co_filename):
            return answer(caller)
        if alone is None or alone.heard is None or not heard_as:
            return original(self, *args, **kwargs)
        return alone.heard(heard_as, self, partial(original, self, *args, **kwargs), (*args, *kwargs.values()))

    return method


def _environment() -> CodePatch:
    """The patch of the look-up in ``os.environ``, which ``os.getenv`` and ``os.environ.get`` call too."""
    function: Any = type(os.environ).__getitem__
    original = FunctionType(function.__code__, function.__globals__)
    of_the_mapping = {f.__code__.co_filename for f in (function, os.getenv, Mapping.get)}

    def looked_up(environ: Any, key: str) -> str:
        value: str = original(environ, key)
        if key not in _ENVIRONMENT or autograd_local(_KEY) is None:
            return value
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and caller.f_code.co_filename in of_the_mapping:
            caller = caller.f_back
        if caller is None or _sees_world(caller.f_code.co_filename):
            return value
        return _ENVIRONMENT[key]

    return _standing_in(function, looked_up)


def _answer(name: str, caller: FrameType) -> Any:
    return _ANSWERS[name]


@functools.cache
def _refusal(name: str) -> Callable[[FrameType], Any]:
    """The answer of a function that a model may not call: a PlanError with the model's line."""

    def refuse(caller: FrameType) -> Any:
        line = source_place(caller.f_code.co_filename, caller.f_lineno)
        finding = Finding(
            where=f"the model's {line}",
            given=f"{name}(…), called by the model's own code",
            required="a model that computes as one process does: Meshwright does all communication, and the model sees "
            "all rows and full tensors",
            fix=f"if dist.is_initialized() and dist.get_world_size() > 1:  # False for the model's code\n    {name}(…)",
        )
        error = PlanError([finding], "this model")
        autograd_local(_KEY).refused.append(error)
        raise error

    return refuse


def _stand_in(function: FunctionType, answer: Callable[[FrameType], Any]) -> CodePatch:
    """The patch of a function: the model's code gets ``answer``, other callers get the result of the function itself."""
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__

    def called(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # the frame that called the patched function
        while caller.f_code.co_filename in _PASSES_ON and caller.f_back is not None:
            caller = caller.f_back
        if autograd_local(_KEY) is None or _sees_world(caller.f_code.co_filename) or _by_a_mode(caller):
            return original(*args, **kwargs)
        return answer(caller)

    return _standing_in(function, called)


def _by_a_mode(caller: FrameType) -> bool:
    """Whether a frame is of a function mode of the script, which makes the call of a collective that was given to it.

    A collective itself calls the modes: a call of the model's own code has its answer before.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is not handle_torch_function.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_back is not None and _sees_world(frame.f_back.f_code.co_filename)


def _standing_in(function: FunctionType, stand_in: Callable[..., Any]) -> CodePatch:
    """The patch by which ``function`` calls ``asked`` with its arguments."""
    code = _open.__code__ if function.__closure__ is None else _closed(None).__code__
    keywords = {**(function.__kwdefaults__ or {}), "_mw_asked": stand_in}
    return CodePatch(function, (function.__code__, code), (function.__kwdefaults__, keywords))


# The new code of a function must have as many free variables as its own: none, or one (torch's logged functions).


def _open(*args: Any, _mw_asked: Callable[..., Any], **kwargs: Any) -> Any:
    return _mw_asked(*args, **kwargs)


def _closed(func: Any) -> Any:
    def closed(*args: Any, _mw_asked: Callable[..., Any], **kwargs: Any) -> Any:
        return _mw_asked(*args, **kwargs) if func else None

    return closed


__all__ = ["hearing", "one_process"]
