"""Every patch of torch that this package makes: what, why, until when. No other file replaces a part of torch.

    Patch      an attribute of one of torch's modules or classes; ``on`` for as long as somebody needs it. It is replaced when
               the first one begins to need it and put back when the last one has ended; between these two, whoever begins
               or ends changes what the replacement does, and not torch.
    CodePatch  the code of a Python function: whoever took the function by its name before gets the replacement as well
    MethodPatch  a method of a class in C++
    Stance     the compiler's stance, which is a setting and no part of torch
    set_on     an attribute of one object of torch's, which goes with the object; ``changed_on``: for the time of a ``with``

``TABLE`` has a line for each. ``tests/spmd/test_patches.py`` looks at all of torch before, during and after a forward: what
differs during it stands in the table, and nothing differs after it.
"""

from __future__ import annotations

import functools
import sys
import threading
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
"""A function → what is called in its place."""

_LOCK = threading.RLock()

# Whether a transform of torch.func is running.
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


class Line(NamedTuple):
    """One line of the table: what is replaced, why, and until when."""

    what: str
    why: str
    until: str


TABLE: list[Line] = []

FORWARD = "the end of a forward, or of a backward that runs parts of it again"
FOLLOWED = "the end of the steps that a trace is made of"


class Patch:
    """An attribute of torch's that is ours while somebody needs it.

    Args:
        place: the module or class.
        name: the attribute: a function; of a class a method, which gets its object, or a class method (``of_class``).
    """

    def __init__(self, place: Any, name: str, why: str, until: str = FORWARD, *, of_class: bool = False) -> None:
        self.place, self.name, self._of_class = place, name, of_class
        where = f"{place.__module__}.{place.__qualname__}" if isinstance(place, type) else place.__name__
        TABLE.append(Line(f"{where}.{name}", why, until))
        self._own: Any = None
        self._changes: list[Change] = []
        self._plain: Callable[..., Any] = getattr(place, name)
        self._now = self._plain

    @contextmanager
    def on(self, change: Change, *, first: bool = False) -> Iterator[None]:
        """While on, the attribute is ``change`` of what it was. Contexts nest; the last is asked first, unless it is to stand
        below all others (``first``)."""
        with _LOCK:
            if not self._changes:
                self._begin()
            self._changes.insert(0 if first else len(self._changes), change)
            self._compose()
        try:
            yield
        finally:
            with _LOCK:
                last = max(i for i, other in enumerate(self._changes) if other is change)
                del self._changes[last]
                self._compose()
                if not self._changes:
                    self._end()

    @functools.cached_property
    def positional(self) -> list[str]:
        """The arguments of the function that may be given by place."""
        parameters = signature(self._plain).parameters
        return [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def _begin(self) -> None:
        self._own = vars(self.place).get(self.name)
        self._plain = self._inherited() if self._of_class else getattr(self.place, self.name)

        def patched(*args: Any, **kwargs: Any) -> Any:
            return self._now(*args, **kwargs)

        setattr(self.place, self.name, classmethod(patched) if self._of_class else patched)

    def _end(self) -> None:
        if self._own is None:
            delattr(self.place, self.name)
        else:
            setattr(self.place, self.name, self._own)

    def _compose(self) -> None:
        now = self._plain
        for change in self._changes:
            now = change(now)
        self._now = now

    def _inherited(self) -> Callable[..., Any]:
        """A class method as a function of the class."""
        if self._own is not None:
            function: Callable[..., Any] = self._own.__func__
            return function
        place, name = self.place, self.name
        return lambda cls, *args, **kwargs: getattr(super(place, cls), name)(*args, **kwargs)


_AS_ONE = "to a walk, what torch.func transforms is one event; it runs without hooks on what autograd saves"


def _in_c(function: Any) -> Callable[..., Any]:
    """``function.apply`` of the class of C below all of Python."""
    apply: Callable[..., Any] = super(torch.autograd.function._SingleLevelFunction, function).apply
    return apply


class _Applied(threading.local):
    """Of one thread: the Function that is applied past all that is put around it, until C has asked for its context; and
    whether a transform was begun for C to ask for a result."""

    past: Any = None
    begun: bool = False


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any) -> None:
        """Nothing is computed."""


def _no_context(*_: Any) -> Any:
    raise NotImplementedError("setup_context is not implemented.")


def _refused(function: Any, value: Any) -> None:
    raise RuntimeError(f"{function.__name__}.setup_context is set within a forward, where it is looked at")


class AppliedInC(Patch):
    """``Function.apply`` of a torch in which it is a method of C, which a model may have kept, bound to its class.

    Each apply asks the class for ``setup_context`` first. If the class has one, it has ``_bind_default_args`` make its
    arguments, and if a transform of ``torch.func`` runs by then, ``_call_custom_function_call`` gives the result. So while
    somebody needs it, every class seems to have one, a transform begins where arguments are made, and ends where the result
    is asked for.
    """

    def __init__(self, why: str, until: str = FORWARD) -> None:
        self._place = torch.autograd.function
        TABLE.append(Line(f"{self._place.__name__}.FunctionMeta.setup_context", why, until))
        self._changes, self._within = [], ExitStack()
        self._plain = self._now = self.past
        self._arguments = Patch(self._place, "_bind_default_args", why, until)
        self._result = Patch(self._place, "_call_custom_function_call", why, until)
        self._base = vars(torch.autograd.function._SingleLevelFunction)["setup_context"].__func__
        self._thread = _Applied()
        with temporarily_clear_interpreter_stack():
            _Nothing.apply()  # C keeps what a class without one has, once it has asked

    def past(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """``function.apply`` as it is without this."""
        apply = _in_c(function)
        before, self._thread.past = self._thread.past, function
        try:
            return apply(*args, **kwargs)
        finally:
            self._thread.past = before

    def _begin(self) -> None:
        for patch, change in ((self._arguments, self._beginning), (self._result, self._given)):
            self._within.enter_context(patch.on(change))
        self._place.FunctionMeta.setup_context = property(self._asked, _refused)  # type: ignore[attr-defined]

    def _end(self) -> None:
        del self._place.FunctionMeta.setup_context  # type: ignore[attr-defined]
        self._within.close()

    def _asked(self, function: Any) -> Any:
        """``function.setup_context``."""
        own = next(vars(c)["setup_context"] for c in function.__mro__ if "setup_context" in vars(c)).__get__(
            None, function
        )
        if own is not self._base:
            return own
        if self._thread.past is function or transforming():
            self._thread.past = None
            return own
        return _no_context

    def _beginning(self, bind: Callable[..., Any]) -> Callable[..., Any]:
        def arguments(forward: Any, args: Any, kwargs: Any) -> Any:
            past = self._thread.past
            if transforming() or (past is not None and past.forward == forward):
                self._thread.past = None
                return bind(forward, args, kwargs)
            _grad_increment_nesting()
            self._thread.begun = True
            return args, kwargs or {}

        return arguments

    def _given(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def result(function: Any, args: Any, kwargs: Any) -> Any:
            if not self._thread.begun:
                return call(function, args, kwargs)
            self._thread.begun = False
            _grad_decrement_nesting()
            return self._now(function, *args, **(kwargs or {}))

        return result


def _custom_function() -> Patch:
    """Where ``Function.apply``, kept by a model, ends up. There is no public hook for what goes round torch functions, so
    that no function mode sees it."""
    why = "custom autograd functions get whole tensors; to a walk, one is one event"
    if isinstance(vars(torch.autograd.Function)["apply"], classmethod):
        return Patch(torch.autograd.function._SingleLevelFunction, "apply", why, of_class=True)
    return AppliedInC(why)


CUSTOM_FUNCTION = _custom_function()
BACKWARD = Patch(torch.autograd, "backward", "a backward that runs another is not tried by itself")
GRADIENTS = Patch(torch.autograd, "grad", "a backward that asks for other gradients is not tried by itself")


def apply_of(function: Any) -> Callable[..., Any]:
    """``function.apply`` of a custom Function, past all that is put around it and, where torch asks it in Python, past the
    question whether a transform of ``torch.func`` runs, which takes half of its time."""
    if isinstance(CUSTOM_FUNCTION, AppliedInC):
        return functools.partial(CUSTOM_FUNCTION.past, function)
    return _in_c(function)


VMAP = Patch(vmap, "_add_batch_dim", "a vmap gets whole tensors")
GRAD = Patch(eager_transforms, "_wrap_tensor_for_grad", "torch.func.grad, vjp … get whole tensors")
JVP = Patch(forward_ad, "make_dual", "torch.func.jvp gets whole tensors")
TRANSFORMS = {  # what ``torch.func.vmap(f)`` and the others made is called
    "vmap": Patch(apis, "vmap_impl", _AS_ONE),
    "grad": Patch(eager_transforms, "grad_and_value_impl", _AS_ONE),
    "jvp": Patch(eager_transforms, "_jvp_with_argnums", _AS_ONE),
    "vjp": Patch(eager_transforms, "_vjp_with_argnums", _AS_ONE),
}
_SCRIPTED = "what torch.jit made gets whole tensors; to a walk, it is one event"
SCRIPTED = Patch(torch.jit.ScriptFunction, "__call__", _SCRIPTED)
SCRIPTED_METHOD = Patch(torch.ScriptMethod, "__call__", _SCRIPTED)
CHECKPOINT = Patch(
    checkpoint,
    # In some torch the first is there for others only, and what is checkpointed goes to the second, arguments as a tuple.
    next(
        f"_checkpoint_without_reentrant_generator{end}"
        for end in ("_impl", "")
        if hasattr(checkpoint, f"_checkpoint_without_reentrant_generator{end}")
    ),
    "what a checkpoint keeps and runs again is ours to say: local tensors, names, events",
)
REENTRANT = Patch(checkpoint.CheckpointFunction, "apply", "the same of checkpoints of the reentrant kind")
_IN_PARTS = "a model in parts has some gradients on each rank: what takes one number of all of them is refused"
_JOB = "the job has gone"
CLIPPED_NORM = Patch(
    clip_grad, "_get_total_norm", f"clip_grad_norm_: {_IN_PARTS}", _JOB
)  # asked by clip_grad_norm_ alone
TOTAL_NORM = Patch(torch.nn.utils, "get_total_norm", f"the same function under its public name: {_IN_PARTS}", _JOB)
UNSCALED = Patch(
    torch.amp.GradScaler,
    "_unscale_grads_",
    "a model in parts has some gradients on each rank: whether one of them is not finite is asked of all ranks",
    _JOB,
)
FLAT_GRADIENT = Patch(torch.optim.LBFGS, "_gather_flat_grad", _IN_PARTS, _JOB)
RESIZE = Patch(
    torch.UntypedStorage,
    "resize_",
    "FSDP2 frees and allocates gathered parameters by it, which is no function of ATen (prediction/tracker.py)",
    FOLLOWED,
)


# --- what a model sees of torch.distributed ---------------------------------------------------------------------------

TABLE.append(
    Line(
        "functions of torch.distributed (code), methods of ProcessGroup, os.environ's look-up (code)",
        "a model's own code sees one process (one_process.py)",
        "no thread builds, plans or runs a model any more",
    )
)


@dataclass(frozen=True)
class CodePatch:
    """A function, with its own code and the code that it has in between.

    Attributes:
        keywords: the defaults of its keyword-only arguments, without and with what the other code needs.
    """

    function: FunctionType
    codes: tuple[CodeType, CodeType]
    keywords: tuple[dict[str, Any] | None, dict[str, Any]]

    def put(self, which: int) -> None:
        """0: the function itself; 1: the other. In another thread the function may begin at any moment: the keyword
        that the other code needs is there before it, and goes after it."""
        if which:
            self.function.__kwdefaults__ = self.keywords[1]
        self.function.__code__ = self.codes[which]
        if not which:
            self.function.__kwdefaults__ = self.keywords[0]


@dataclass(frozen=True)
class MethodPatch:
    """A method of a class in C++, which has no Python code: the method itself, and what stands in for it."""

    place: Any
    name: str
    methods: tuple[Any, Any]

    def put(self, which: int) -> None:
        """0: the method itself; 1: the stand-in."""
        setattr(self.place, self.name, self.methods[which])


class Stance:
    """The compiler's stance, which is one of the process: while somebody needs it, what ``torch.compile`` made runs as the
    plain function that it was made of. Modes of several threads begin and end in any order: the first begins it and the
    last ends it.

    The compiler takes seconds to import. If it is not there yet, nothing has been compiled; a forward that compiles a part
    of itself has been run by planning before it runs here.
    """

    def __init__(self) -> None:
        self._users = 0
        self._stance: AbstractContextManager[None] | None = None

    def enter(self) -> None:
        with _LOCK:
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._users += 1

    def leave(self) -> None:
        with _LOCK:
            self._users -= 1
            if self._users == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    @contextmanager
    def on(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()


UNCOMPILED = Stance()


def compiling() -> AbstractContextManager[None]:
    """For the time of a block, what ``torch.compile`` made runs compiled, also where ``UNCOMPILED`` is on."""
    return torch.compiler.set_stance("default")


class Together:
    """Patches that are in place while at least one thread needs them."""

    def __init__(self) -> None:
        self._within, self._made = 0, list[CodePatch | MethodPatch]()

    def enter(self, more: Iterable[CodePatch | MethodPatch] = ()) -> None:
        """``more``: patches that have been made since."""
        with _LOCK:
            new = list(more)
            self._made += new
            self._within += 1
            for patch in self._made if self._within == 1 else new:
                patch.put(1)

    def leave(self) -> None:
        with _LOCK:
            self._within -= 1
            if not self._within:
                for patch in self._made:
                    patch.put(0)


# --- objects of torch's -----------------------------------------------------------------------------------------------

TABLE += [
    Line(
        "FSDP2's parameter groups: post_backward",
        "gradients that no row of a rank asked for are filled in before a unit is reduced (runtime/weights/fsdp.py)",
        "the job has gone",
    ),
    Line(
        "the class that FSDP2 gives a module: its name",
        "models look up what is known of a class by its name (runtime/weights/fsdp.py)",
        "the job has gone",
    ),
    Line(
        "what knows how DTensor's functions shard: _propagate_tensor_meta_non_cached",
        "it asks for shapes with tensors of the whole size, which are none of a run's (prediction/tracker.py)",
        FOLLOWED,
    ),
]


def set_on(owner: Any, name: str, value: Any) -> None:
    """Gives one object of torch's another attribute."""
    setattr(owner, name, value)


@contextmanager
def changed_on(owner: Any, name: str, change: Change) -> Iterator[None]:
    """For its time a method of one object of torch's is ``change`` of what it was. Contexts nest."""
    own = vars(owner).get(name)
    set_on(owner, name, change(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            set_on(owner, name, own)


@contextmanager
def class_name_kept(module: nn.Module) -> Iterator[None]:
    """FSDP2 gives a module another class. By its name it is the one before: models look up what is known of a class so
    (transformers, which of its outputs to collect)."""
    before = type(module)
    yield
    for name in ("__name__", "__qualname__", "__module__"):
        set_on(type(module), name, getattr(before, name))
