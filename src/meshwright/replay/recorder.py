"""``BlockRecorder``: records the functions and collectives on local tensors that a block runs under the SPMD mode.

It is a function mode below the SPMD mode. So it sees the functions that the SPMD mode calls on local tensors, and the block's
functions without a global tensor. A collective is no torch function: a patch reports it. A dispatch mode sees ATen ops, whose
tags and schemas show what no program can hold.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.blame import model_line
from meshwright.chance import drawn_from, host_drawn, host_generators
from meshwright.private import TorchDispatchMode, pytree, storage_of, without_dispatch
from meshwright.replay.nodes import AUTOCAST_DEVICES, CallUnderMode, InputSource, MoveCall, Node, Value
from meshwright.replay.state import code_of_model
from meshwright.spmd import patches, redistribute
from meshwright.spmd.autograd_functions import FunctionMode, scripted_functions
from meshwright.spmd.tensor import GlobalTensor, first_global_tensor
from meshwright.spmd.torch_functions import (
    LISTENING,
    NUMBERS,
    SET_DATA,
    SHARES_MEMORY,
    YES_OR_NO,
    is_fact,
    name_of,
    written_by,
)

CONSTANTS = (
    bool, int, float, complex, str, type(None), type(...), slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_CHANGES_AUTOGRAD = frozenset(
    "requires_grad_ requires_grad= grad= backward share_memory_ set_ resize_ resize_as_".split()
)
_QUIET = (redistribute.CopyIn, redistribute.KeepSlice, redistribute.KeepFirst)  # their forward sends nothing


def can_profile() -> bool:
    """Whether a recorder may take the place of the profiler that is on in this thread: whether it can be put back. One that is
    written in C cannot (``torch.profiler`` with stacks), except for cProfile's, which can be enabled again."""
    profiler = sys.getprofile()
    return profiler is None or callable(profiler) or hasattr(profiler, "enable")


@contextmanager
def _profiled(function: Callable[[types.FrameType, str, Any], None]) -> Iterator[None]:
    """Has Python call ``function`` inside the ``with``, in place of the profiler that is on (see ``can_profile``)."""
    profiler: Any = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(profiler if callable(profiler) else None)
        if profiler is not None and not callable(profiler):
            profiler.enable()


class Refused(Exception):
    """A block can have no program; the text says why."""


class BlockRecorder(FunctionMode):
    """Records one call of a block.

    Args:
        inputs: (tensor, source) for each tensor that exists before the call.
        read_only: the tensors among them to which the block may not write: its arguments and parameters.

    Attributes:
        nodes: the calls, in order.
        refusal: the first reason why there can be no program; "" if there is none.
        codes: the model's code that ran → its globals.
        free: such code → the values of its free variables at its first call.
        used: number of a tensor from outside that the block uses → its source.
    """

    def __init__(self, inputs: Sequence[tuple[Tensor, InputSource]], read_only: Sequence[Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.refusal = ""
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        self.free: dict[types.CodeType, tuple[Any, ...]] = {}
        self.used: dict[int, InputSource] = {}
        self._alive: list[Tensor] = []  # the tensors with numbers; kept alive so that their ids are not used again
        self._numbers: dict[int, int] = {}
        self._sources: dict[int, tuple[Tensor, InputSource]] = {id(t): (t, s) for t, s in reversed(inputs)}
        self._read_only = {storage_of(t) for t in read_only if t.layout is torch.strided}
        self._inside = 0  # how many functions are running whose inner calls are not recorded
        self._grad, self._autocast = torch.is_grad_enabled(), _autocast()

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Records inside the ``with``. ``model``: the whole model, whose generators are watched."""
        generators = host_generators(model)
        of_host, of_model = host_drawn(generators), drawn_from(generators)
        scripted = scripted_functions(self._scripted)
        custom, profiled = patches.CUSTOM_FUNCTION.on(self._custom, first=True), _profiled(self._profile)
        with custom, scripted, _Operations(self), self, profiled:
            yield
        if host_drawn(generators) != of_host or drawn_from(generators) != of_model:
            self.refuse("it draws random numbers of the host")

    def refuse(self, why: str) -> None:
        """Records that there can be no program, with the model's line. Only the first reason is kept."""
        if not self.refusal:
            self.refusal = f"{why}{f' at {line}' if (line := model_line()) else ''}"

    def number(self, t: Tensor) -> int | None:
        """The number of a tensor; None if its source is unknown."""
        number = self._numbers.get(id(t))
        if number is None and (entry := self._sources.get(id(t))) is not None:
            number = self._new(t)
            self.used[number] = entry[1]
        return number

    # --- functions, and what they do ----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.refusal or (is_fact(func) and func not in LISTENING and func != SET_DATA):
            if name_of(func) in _CHANGES_AUTOGRAD:
                self.refuse(f"{name_of(func)} changes what autograd knows of a tensor")
            return func(*args, **kwargs)
        if (view := first_global_tensor((args, kwargs))) is not None:  # within a function's Python body
            with self:
                return view._mw_dispatcher.call(func, args, kwargs)
        name = name_of(func)
        if name == "__iter__":
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if why := self._why_not(func, name, args, kwargs):
            self.refuse(why)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _why_not(self, func: Any, name: str, args: Any, kwargs: Any) -> str:
        """Why a function cannot be in a program; "" if it can."""
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if tensors and (name in NUMBERS or name in YES_OR_NO or func in SHARES_MEMORY):
            return f"Python reads a value by {name}"
        if func in LISTENING or func == SET_DATA or name in _CHANGES_AUTOGRAD:
            return f"{name} changes what autograd knows of a tensor"
        if any(isinstance(t, DTensor) for t in tensors):
            return f"{name} takes a parameter at rest"
        return ""

    def _scripted(self, call: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The executor of torch.jit runs other code after some calls, which the recording would not have.
        self.refuse("it calls what torch.jit made")
        return call(function, *args, **kwargs)

    def _custom(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                result = plain(function, *args, **kwargs)
            finally:
                self._inside -= 1
            if self._inside or self.refusal:
                return result
            if issubclass(function, redistribute.Move) and not kwargs:
                x, axis, *options = args
                size = 0 if function in _QUIET else x.numel() * x.element_size()
                with self._unseen():
                    self._record(MoveCall(function, axis, tuple(options)), (x,), {}, result, size)
            else:
                self.refuse(f"the autograd function {function.__name__} is used")
            return result

        return apply

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _profile(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code in _FORBIDDEN:
                self.refuse(f"{_FORBIDDEN[code]} is used")
            elif code not in self.codes and code_of_model(code):
                self.codes[code] = frame.f_globals
                if code.co_freevars:
                    variables = frame.f_locals
                    self.free[code] = tuple(variables[name] for name in code.co_freevars if name in variables)
        elif event == "c_call" and _has_effect(arg) and code_of_model(code):
            self.refuse(f"it calls {getattr(arg, '__qualname__', arg)}")

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, size: int = 0) -> None:
        args, kwargs = pytree.tree_map(self._operand, (args, kwargs))
        if self.refusal:
            return
        pieces = pytree.tree_leaves(result)
        tensors = [x for x in pieces if isinstance(x, Tensor)]
        if not tensors and result is not None:
            self.refuse(f"{name_of(func)} gives Python what is no tensor")
            return
        if any(isinstance(t, (GlobalTensor, DTensor)) or t.layout is not torch.strided for t in tensors):
            self.refuse(f"{name_of(func)} gives a tensor that is not a plain one")
            return
        several = isinstance(result, (tuple, list))
        if several and len(tensors) != len(result):
            self.refuse(f"{name_of(func)} gives a nested result")
            return
        numbers = tuple(None if id(t) in self._numbers else self._new(t) for t in tensors)
        target = _getter(func)
        if (autocast := _autocast()) != self._autocast or torch.is_grad_enabled() != self._grad:
            target = CallUnderMode(target, torch.is_grad_enabled(), _differing(autocast, self._autocast))
        self.nodes.append(Node(target, args, kwargs, numbers, several, model_line(), size))

    def _operand(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            number = self.number(x)
            if number is None:
                self.refuse("it takes a tensor that is neither given nor kept by its modules")
                return x
            return Value(number)
        if not isinstance(x, CONSTANTS):
            self.refuse(f"it hands torch an object of the type {type(x).__name__}")
        return x

    def _new(self, t: Tensor) -> int:
        number = len(self._alive)
        self._alive.append(t)
        self._numbers[id(t)] = number
        return number

    @property
    def watches_ops(self) -> bool:
        """Whether ATen ops now belong to the block: those within a collective do not, nor those that compare ranks in it."""
        return not self._inside and not self.refusal

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Checks an ATen op. Refuses if it reads a value, returns a size that depends on values, or writes to a tensor to which
        the block may not write."""
        tags = func.tags
        if torch.Tag.data_dependent_output in tags:
            self.refuse("Python reads a value")
        elif torch.Tag.dynamic_output_shape in tags:
            self.refuse(f"the size that {func.overloadpacket.__name__} gives follows from values")
        for _, written in written_by(func, args, kwargs):
            for t in pytree.tree_leaves(written):
                if isinstance(t, Tensor) and t.layout is torch.strided and storage_of(t) in self._read_only:
                    self.refuse("it writes to what it is given")


class _Operations(TorchDispatchMode):
    """Calls ``BlockRecorder.operation`` for each ATen op."""

    def __init__(self, recorder: BlockRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recorder.watches_ops and DTensor not in types:
            with without_dispatch():
                self._recorder.operation(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _getter(func: Any) -> Callable[..., Any]:
    """A function that a program can call for ``func``: ``Property`` for a tensor's property, ``UnnamedFunction`` for a function
    that its name does not lead to."""
    if getattr(func, "__name__", "") == "__get__":
        return Property(name_of(func))
    target: Callable[..., Any] = func
    return target if _is_spelled(func) else UnnamedFunction(func)


def _is_spelled(func: Any) -> bool:
    """Whether a function is found under its module and name. ``fx`` writes torch's functions by name; others it keeps as
    objects."""
    module, name = getattr(func, "__module__", None) or "", getattr(func, "__name__", "")
    if not module.startswith("torch."):
        return True
    return func in (getattr(sys.modules.get(module), name, None), getattr(Tensor, name, None))


class UnnamedFunction:
    """A function of torch that its ``__name__`` does not lead to: the function of ``x ** 2`` has the name ``pow``, but is not
    ``torch.pow``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnnamedFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


class Property:
    """A property of a tensor (``x.T``) as a function."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, x: Tensor) -> Any:
        return getattr(x, self.__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Property) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


Autocast = tuple[tuple[str, "torch.dtype | None"], ...]


def _autocast() -> Autocast:
    return tuple((d, torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None) for d in AUTOCAST_DEVICES)


def _differing(now: Autocast, before: Autocast) -> Autocast:
    return tuple(a for a, b in zip(now, before, strict=True) if a != b)


def _forbidden() -> dict[types.CodeType, str]:
    """Code of functions that change a forward in a way that nodes do not show → text for a person."""
    from torch.autograd import forward_ad, graph
    from torch.utils import checkpoint

    functions: dict[str, Any] = {
        "a checkpoint": checkpoint.checkpoint,
        "torch.autograd.grad": torch.autograd.grad,
        "torch.autograd.backward": torch.autograd.backward,
        "saved_tensors_hooks": graph.saved_tensors_hooks.__enter__,
        "a generator of random numbers": torch.random.fork_rng,
        "torch.manual_seed": torch.manual_seed,
        "forward-mode AD": forward_ad.dual_level.__enter__,
    }
    transforms = dict.fromkeys((patch.plain for patch in patches.TRANSFORMS.values()), "a transform of torch.func")
    names = {f: name for name, f in functions.items()} | transforms
    return {inspect.unwrap(f).__code__: name for f, name in names.items()}


_FORBIDDEN = _forbidden()
_EFFECTS = frozenset(["time", "_random", "random", "_io", "posix", "nt", "_socket", "_contextvars", "contextvars"])


def _has_effect(function: Any) -> bool:
    """Whether a function in C has a side effect, or returns another result each time."""
    if function is print or function is input or function is open:
        return True
    return (
        getattr(function, "__module__", None) in _EFFECTS
        or type(getattr(function, "__self__", None)).__module__ in _EFFECTS
    )


__all__ = ["CONSTANTS", "BlockRecorder", "Refused"]
