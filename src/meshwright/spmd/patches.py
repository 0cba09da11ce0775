"""Every patch of torch that this package makes: what, why, until when. Those of DTensor stand in ``dtensor_patches``. No other
file replaces a part of torch.

    Patch        an attribute of a module or class of torch, patched while at least one ``on`` block runs. The first block
                 replaces it, the last one puts it back. Blocks between them change what the replacement does, not torch.
    CodePatch    the code of a Python function: it also reaches callers that imported the function by its name before
    MethodPatch  a method of a class in C++
    set_on       an attribute of one object of torch, for as long as the object lives; ``changed_on``: within a ``with``

``TABLE`` has a line for each patch. ``tests/spmd/test_patches.py`` compares all of torch before, during and after a forward:
what differs during the forward must be in the table, and nothing may differ after it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._functorch import _grad_decrement_nesting, _grad_increment_nesting
from torch._functorch import apis, eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.utils import clip_grad
from torch.utils import checkpoint

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function → the function that is called instead."""

LOCK = threading.RLock()

# Whether a transform of torch.func is running.
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


class PatchEntry(NamedTuple):
    """One line of the table: what is replaced, why, and until when."""

    what: str
    why: str
    until: str


TABLE: list[PatchEntry] = []

FORWARD = "the end of a forward, or of a backward that runs parts of it again"
FOLLOWED = "the end of the steps that a trace is made of"


def lasting(owner: object, contexts: Iterable[AbstractContextManager[Any]]) -> None:
    """Enters contexts, and leaves them when ``owner`` is gone, which this does not keep alive."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    weakref.finalize(owner, stack.close).atexit = False


class Patch:
    """An attribute of torch that is replaced while at least one ``on`` block runs.

    Args:
        owner: the module or class.
        name: the attribute: a function of a module, or a method or class method (``of_class``) of a class.
        why, until: for the line in ``TABLE``.
    """

    def __init__(self, owner: Any, name: str, why: str, until: str = FORWARD, *, of_class: bool = False) -> None:
        self.owner, self.name, self._of_class = owner, name, of_class
        where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        TABLE.append(PatchEntry(f"{where}.{name}", why, until))
        self._original: Any = None
        self._changes: list[Change] = []
        self._plain: Callable[..., Any] = getattr(owner, name)
        self._now = self._plain

        def patched(*args: Any, **kwargs: Any) -> Any:
            return self._now(*args, **kwargs)

        # The same function in each block: a recorded program compares what its code names with what it was at the recording.
        self._patched = classmethod(patched) if of_class else patched

    @property
    def plain(self) -> Callable[..., Any]:
        """The attribute as torch has it."""
        return self._plain

    @property
    def active(self) -> bool:
        """Whether a block runs."""
        return bool(self._changes)

    @property
    def now(self) -> Callable[..., Any]:
        """What the attribute is now; outside of all blocks that of torch."""
        return self._now

    @contextmanager
    def on(self, change: Change, *, first: bool = False) -> Iterator[None]:
        """While on, the attribute is ``change(what it was)``. Contexts nest; the innermost change is called first, or last if
        ``first`` is set."""
        with LOCK:
            if not self._changes:
                self._begin()
            self._changes.insert(0 if first else len(self._changes), change)
            self._compose()
        try:
            yield
        finally:
            with LOCK:
                last = max(i for i, other in enumerate(self._changes) if other is change)
                del self._changes[last]
                self._compose()
                if not self._changes:
                    self._end()

    @functools.cached_property
    def positional(self) -> list[str]:
        """The names of the function's positional arguments."""
        parameters = signature(self._plain).parameters
        return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def _begin(self) -> None:
        self._original = vars(self.owner).get(self.name)
        self._plain = self._inherited() if self._of_class else getattr(self.owner, self.name)
        setattr(self.owner, self.name, self._patched)

    def _end(self) -> None:
        if self._original is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._original)

    def _compose(self) -> None:
        now = self._plain
        for change in self._changes:
            now = change(now)
        self._now = now

    def _inherited(self) -> Callable[..., Any]:
        """The class method as a plain function, which takes the class first."""
        if self._original is not None:
            function: Callable[..., Any] = self._original.__func__
            return function
        owner, name = self.owner, self.name
        return lambda cls, *args, **kwargs: getattr(super(owner, cls), name)(*args, **kwargs)


_AS_ONE = "to a tracer, a function that torch.func transforms is one event; it runs without saved-tensor hooks"


def _in_c(function: Any) -> Callable[..., Any]:
    """``function.apply`` of the base class in C, below all methods in Python."""
    apply: Callable[..., Any] = super(torch.autograd.function._SingleLevelFunction, function).apply
    return apply


class _Applied(threading.local):
    """State of one thread.

    Attributes:
        past: the Function that is being applied without its patch, until C has looked up its ``setup_context``.
        begun: whether a transform was begun so that C calls ``_call_custom_function_call``.
    """

    past: Any = None
    begun: bool = False


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any) -> None:
        """Nothing is computed."""


def _no_context(*_: Any) -> Any:
    raise NotImplementedError("setup_context is not implemented.")


def _refused(function: Any, value: Any) -> None:
    raise RuntimeError(f"{function.__name__}.setup_context may not be set within a forward, where it is patched")


class AppliedInC(Patch):
    """The patch of ``Function.apply`` for a torch in which it is a method in C. A model may hold it, bound to its class.

    Each apply looks up ``setup_context`` of the class first. If the class has one, apply calls ``_bind_default_args`` to make
    the arguments; and if a transform of ``torch.func`` runs then, it calls ``_call_custom_function_call`` for the result. So
    while the patch is on, every class seems to have ``setup_context``; a transform begins in ``_bind_default_args``, and ends
    in ``_call_custom_function_call``, which calls the replacement.
    """

    def __init__(self, why: str, until: str = FORWARD) -> None:
        self._module = torch.autograd.function
        TABLE.append(PatchEntry(f"{self._module.__name__}.FunctionMeta.setup_context", why, until))
        self._changes, self._within = [], ExitStack()
        self._plain = self._now = self.past
        self._arguments = Patch(self._module, "_bind_default_args", why, until)
        self._result = Patch(self._module, "_call_custom_function_call", why, until)
        self._base = vars(torch.autograd.function._SingleLevelFunction)["setup_context"].__func__
        self._thread = _Applied()
        with temporarily_clear_interpreter_stack():
            _Nothing.apply()  # at its first look-up, C remembers the ``setup_context`` of a class that defines none

    def past(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function.apply`` without this patch."""
        apply = _in_c(function)
        before, self._thread.past = self._thread.past, function
        try:
            return apply(*args, **kwargs)
        finally:
            self._thread.past = before

    def _begin(self) -> None:
        for patch, change in ((self._arguments, self._begin_transform), (self._result, self._result_of_patch)):
            self._within.enter_context(patch.on(change))
        self._module.FunctionMeta.setup_context = property(self._setup_context, _refused)  # type: ignore[attr-defined]

    def _end(self) -> None:
        del self._module.FunctionMeta.setup_context  # type: ignore[attr-defined]
        self._within.close()

    def _setup_context(self, function: Any) -> Any:
        """The value of ``function.setup_context`` while the patch is on."""
        definition = next(vars(c)["setup_context"] for c in function.__mro__ if "setup_context" in vars(c))
        original = definition.__get__(None, function)
        if original is not self._base:
            return original
        if self._thread.past is function or transforming():
            self._thread.past = None
            return original
        return _no_context

    def _begin_transform(self, bind: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for ``_bind_default_args``: begins a transform, unless apply runs without the patch."""

        def arguments(forward: Any, args: Any, kwargs: Any) -> Any:
            past = self._thread.past
            if transforming() or (past is not None and past.forward == forward):
                self._thread.past = None
                return bind(forward, args, kwargs)
            _grad_increment_nesting()
            self._thread.begun = True
            return args, kwargs or {}

        return arguments

    def _result_of_patch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The replacement for ``_call_custom_function_call``: ends the transform, and calls the changed apply."""

        def result(function: Any, args: Any, kwargs: Any) -> Any:
            if not self._thread.begun:
                return call(function, args, kwargs)
            self._thread.begun = False
            _grad_decrement_nesting()
            return self._now(function, *args, **(kwargs or {}))

        return result


def _custom_function() -> Patch:
    """The patch of ``Function.apply``, which also works if a model holds the method. No function mode sees it, and there is no
    public hook."""
    why = "custom autograd functions get full tensors; to a tracer, one is one event"
    if isinstance(vars(torch.autograd.Function)["apply"], classmethod):
        return Patch(torch.autograd.function._SingleLevelFunction, "apply", why, of_class=True)
    return AppliedInC(why)


CUSTOM_FUNCTION = _custom_function()
BACKWARD = Patch(torch.autograd, "backward", "a backward that calls another is not tried separately")
GRADIENTS = Patch(torch.autograd, "grad", "a backward that computes other gradients is not tried separately")


def apply_of(function: Any) -> Callable[..., Any]:
    """``function.apply`` of a custom Function without its patch; and, if torch checks this in Python, without the check for
    transforms of ``torch.func``, which takes half of the time."""
    if isinstance(CUSTOM_FUNCTION, AppliedInC):
        return functools.partial(CUSTOM_FUNCTION.past, function)
    return _in_c(function)


VMAP = Patch(vmap, "_add_batch_dim", "a vmap gets full tensors")
GRAD = Patch(eager_transforms, "_wrap_tensor_for_grad", "torch.func.grad, vjp … get full tensors")
JVP = Patch(forward_ad, "make_dual", "torch.func.jvp gets full tensors")
TRANSFORMS = {  # the functions that run ``torch.func.vmap(f)`` and the others
    "vmap": Patch(apis, "vmap_impl", _AS_ONE),
    "grad": Patch(eager_transforms, "grad_and_value_impl", _AS_ONE),
    "jvp": Patch(eager_transforms, "_jvp_with_argnums", _AS_ONE),
    "vjp": Patch(eager_transforms, "_vjp_with_argnums", _AS_ONE),
}
_SCRIPTED = "what torch.jit made gets full tensors; to a tracer, it is one event"
SCRIPTED = Patch(torch.jit.ScriptFunction, "__call__", _SCRIPTED)
SCRIPTED_METHOD = Patch(torch.ScriptMethod, "__call__", _SCRIPTED)
CHECKPOINT = Patch(
    checkpoint,
    # Some versions of torch have both. Then checkpoints use ``_impl``, which takes the arguments of the segment as a tuple.
    next(
        f"_checkpoint_without_reentrant_generator{end}"
        for end in ("_impl", "")
        if hasattr(checkpoint, f"_checkpoint_without_reentrant_generator{end}")
    ),
    "we decide what a checkpoint keeps and recomputes: local tensors, names, events",
)
REENTRANT = Patch(checkpoint.CheckpointFunction, "apply", "the same for reentrant checkpoints")
_IN_PARTS = (
    "a model in parts has some gradients on each rank: a function that computes one number of all of them is refused"
)
JOB = "the job has gone"
# Only clip_grad_norm_ calls it.
CLIPPED_NORM = Patch(clip_grad, "_get_total_norm", f"clip_grad_norm_: {_IN_PARTS}", JOB)
TOTAL_NORM = Patch(torch.nn.utils, "get_total_norm", f"the same function under its public name: {_IN_PARTS}", JOB)
UNSCALED = Patch(
    torch.amp.GradScaler,
    "_unscale_grads_",
    "a model in parts has some gradients on each rank: all ranks are asked whether one of them is not finite",
    JOB,
)
FLAT_GRADIENT = Patch(torch.optim.LBFGS, "_gather_flat_grad", _IN_PARTS, JOB)
CONTROL_FLOW = Patch(
    torch._ops.HigherOrderOperator,
    "__call__",
    "torch.cond and others run as the Python that they stand for (uncompiled.py)",
    "the end of such a call",
)
COMPILE = Patch(
    torch, "compile", "the compiler is told that nothing runs compiled, once it is imported (uncompiled.py)"
)
RESIZE = Patch(
    torch.UntypedStorage,
    "resize_",
    "FSDP2 frees and allocates gathered parameters with it, and it is no function of ATen (prediction/tracker.py)",
    FOLLOWED,
)
ATTENTION = Patch(
    nn.functional,
    "scaled_dot_product_attention",
    "with dropout or a trained mask it is one kernel on an accelerator, but not on a CPU (prediction/attention.py)",
    FOLLOWED,
)


# --- what a model sees of torch.distributed ---------------------------------------------------------------------------

TABLE.append(
    PatchEntry(
        "functions of torch.distributed (code), methods of ProcessGroup, os.environ's look-up (code)",
        "a model's own code sees one process (one_process.py)",
        "no thread builds, plans or runs a model any more",
    )
)


@dataclass(frozen=True)
class CodePatch:
    """A function with its own code and its replacement.

    Attributes:
        codes: its own code, the replacement.
        keywords: the defaults of its keyword-only arguments, for each of the two.
    """

    function: FunctionType
    codes: tuple[CodeType, CodeType]
    keywords: tuple[dict[str, Any] | None, dict[str, Any]]

    def put(self, which: int) -> None:
        """Puts code number ``which`` in place: 0 its own, 1 the replacement.

        Another thread may call the function at any moment. So the keyword that the replacement needs is set before the code,
        and removed after it.
        """
        if which:
            self.function.__kwdefaults__ = self.keywords[1]
        self.function.__code__ = self.codes[which]
        if not which:
            self.function.__kwdefaults__ = self.keywords[0]


@dataclass(frozen=True)
class MethodPatch:
    """A method of a class in C++, which has no Python code. ``methods``: the method itself, its replacement."""

    owner: Any
    name: str
    methods: tuple[Any, Any]

    def put(self, which: int) -> None:
        """Puts method number ``which`` in place: 0 the method itself, 1 the replacement."""
        setattr(self.owner, self.name, self.methods[which])


class SharedPatches:
    """Patches that are in place while at least one thread needs them."""

    def __init__(self) -> None:
        self._users, self._patches = 0, list[CodePatch | MethodPatch]()

    def enter(self, more: Iterable[CodePatch | MethodPatch] = ()) -> None:
        """``more``: patches that are new since the last call."""
        with LOCK:
            new = list(more)
            self._patches += new
            self._users += 1
            for patch in self._patches if self._users == 1 else new:
                patch.put(1)

    def leave(self) -> None:
        with LOCK:
            self._users -= 1
            if not self._users:
                for patch in self._patches:
                    patch.put(0)


# --- objects of torch's -----------------------------------------------------------------------------------------------

TABLE += [
    PatchEntry(
        "FSDP2's parameter groups: post_backward",
        "gradients of parameters that no row of a rank used are filled in before a unit is reduced (runtime/weights/fsdp.py)",
        "the job has gone",
    ),
    PatchEntry(
        "the class that FSDP2 gives a module: its name",
        "models look up facts of a class by its name (runtime/weights/fsdp.py)",
        "the job has gone",
    ),
    PatchEntry(
        "what knows how DTensor's functions shard: _propagate_tensor_meta_non_cached",
        "it computes shapes with tensors of the whole size, which no run allocates (prediction/tracker.py)",
        FOLLOWED,
    ),
]


def set_on(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute of one object of torch."""
    setattr(owner, name, value)


@contextmanager
def changed_on(owner: Any, name: str, change: Change) -> Iterator[None]:
    """While on, a method of one object of torch is ``change(what it was)``. Contexts nest."""
    original = vars(owner).get(name)
    set_on(owner, name, change(getattr(owner, name)))
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            set_on(owner, name, original)


@contextmanager
def class_name_kept(module: nn.Module) -> Iterator[None]:
    """FSDP2 gives a module another class within the block. The new class keeps the old name, because models look up facts by
    it (transformers: which outputs to collect)."""
    before = type(module)
    yield
    for name in ("__name__", "__qualname__", "__module__"):
        set_on(type(module), name, getattr(before, name))
