"""Hooks for what bypasses torch functions, so that no function mode sees it.

    custom ``autograd.Function`` s      with global tensors, their graph would silently be lost
    the transforms of ``torch.func``    vmap, grad, jvp …
    scripted functions and modules      ``torch.jit.script``, ``torch.jit.trace``
    checkpoints                         what they keep, and run again in a backward

None of them has a public hook. So while a forward runs, the functions through which they go are patched (``patches``).

Compiled functions have the opposite problem: Dynamo traces the code of a function mode as if it were the model's, and reuses
for one torch function what it compiled for another. While a mode of ours is on, nothing runs compiled (``uncompiled``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from meshwright.private import in_backward, pytree
from meshwright.spmd import patches
from meshwright.spmd.uncompiled import UNCOMPILED

Handler = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""(the original call, what is called, args, kwargs) → the result in its place"""

# Modules of Functions that are no model's: FSDP2's, ours, and those of a compiled program.
_NOT_OF_A_MODEL = ("torch.distributed.", "meshwright.", "torch._functorch._aot_autograd.")


@contextmanager
def custom_functions(handler: Handler) -> Iterator[None]:
    """While on, ``MyFunction.apply(*args)`` calls ``handler(apply, MyFunction, args, kwargs)``, which may call
    ``apply(MyFunction, *args)``.

    Contexts nest; the innermost handler is called first.
    """

    def handled(plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if function.__module__.startswith(_NOT_OF_A_MODEL):
                return plain(function, *args, **kwargs)
            return handler(plain, function, args, kwargs)

        return apply

    with patches.CUSTOM_FUNCTION.on(handled):
        yield


@contextmanager
def own_functions_noted(noted: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """While on, ``noted(result, args)`` is called after each of this package's own Functions: a collective in a forward, say.
    No function mode sees that its result depends on its operand."""

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(function, *args, **kwargs)
            if function.__module__.startswith("meshwright."):
                noted(result, args)
            return result

        return apply

    with patches.CUSTOM_FUNCTION.on(noting):
        yield


@contextmanager
def no_backward_within() -> Iterator[None]:
    """While on, a backward that itself calls ``grad`` or ``backward`` raises RuntimeError: modules that it recomputes would
    get gradients as in a step."""

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                raise RuntimeError("a backward that itself calls grad or backward is not tried separately")
            return call(*args, **kwargs)

        return checked

    with patches.BACKWARD.on(refused), patches.GRADIENTS.on(refused):
        yield


def with_changed_tensors(function: Any, change: Callable[[Any], Any]) -> Any:
    """A subclass of the custom Function that applies ``change`` to all tensors which its forward and backward return.

    Both may use parameters that are no arguments (of a closure, of a checkpointed module). Then global tensors result, which
    ``change`` makes whole. The subclass is made once for each Function.
    """
    if "_mw_giving" not in vars(function):
        names = [n for n in ("forward", "backward", "vjp", "jvp") if getattr(function, n) is not getattr(Function, n)]
        methods = {name: staticmethod(_changing(getattr(function, name), change)) for name in names}
        function._mw_giving = type(function)(
            function.__name__, (function,), {**methods, "__module__": function.__module__}
        )
    return function._mw_giving


def _changing(method: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    def changed(*args: Any) -> Any:
        return pytree.tree_map_only(Tensor, change, method(*args))

    return changed


transforming = patches.transforming

# Within the block no transform is on: to a transform, a tensor that is computed there is a constant.
outside_transforms = temporarily_clear_interpreter_stack


@contextmanager
def transforms(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While on, a transform of ``torch.func`` wraps ``change(x)`` for each tensor x among its arguments."""

    def changing(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            return wrap(*(change(x) if isinstance(x, Tensor) else x for x in args), **kwargs)

        return changed

    def of_vmap(plain: Callable[..., Any]) -> Callable[..., Any]:
        # Here too, as a package may have replaced the function that calls ``_add_batch_dim`` (tensordict does).
        def changed(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map_only(Tensor, change, (args, kwargs))
            return plain(*args, **kwargs)

        return changed

    with (
        patches.VMAP.on(changing),
        patches.GRAD.on(changing),
        patches.JVP.on(changing),
        patches.TRANSFORMS["vmap"].on(of_vmap),
    ):
        yield


@contextmanager
def transformed_functions(handler: Handler) -> Iterator[None]:
    """While on, a call of a transformed function (``vmap(f)(x)``, ``grad(f)(x)``, ``jvp(f, …)``, ``vjp(f, …)``) calls
    ``handler(call, name, args, kwargs)``, which may call ``call(*args, **kwargs)``.

    Contexts nest; the innermost handler is called first.
    """

    def handling(name: str) -> patches.Change:
        def handled(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return handler(plain, name, args, kwargs)

            return call

        return handled

    with ExitStack() as stack:
        for name, patch in patches.TRANSFORMS.items():
            stack.enter_context(patch.on(handling(name)))
        yield


@contextmanager
def scripted_functions(handler: Handler) -> Iterator[None]:
    """While on, a call of a scripted function, or of a scripted module's forward, calls ``handler(call, scripted, args,
    kwargs)``, which may call ``call(scripted, *args)``. Contexts nest; the innermost handler is called first.

    Otherwise a mode would see the inner functions of a scripted function on meta alone, where torch's kernels are Python. And
    these would be others after a few calls, when the function has been optimised.
    """

    def handled(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
            return handler(plain, scripted, args, kwargs)

        return call

    with patches.SCRIPTED.on(handled), patches.SCRIPTED_METHOD.on(handled):
        yield


class FunctionMode(TorchFunctionMode):
    """A function mode under which no compiled code runs. All modes of this package are subclasses."""

    def may_be_recorded(self) -> bool:
        """Whether a block does under this mode exactly what it does without, so that it may be recorded (replay/)."""
        return self.may_be_passed()

    def may_be_passed(self) -> bool:
        """Whether a program that was recorded under this mode may now run without the mode seeing its functions (replay/)."""
        return False

    def interventions(self) -> int:
        """How often the mode did anything but call the function. A block in which it did so may not be recorded."""
        return 0

    def follows(self, t: Tensor) -> bool:
        """Whether the mode keeps notes on this tensor."""
        return False

    def __enter__(self) -> Any:
        UNCOMPILED.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        UNCOMPILED.leave()


Segment = Callable[..., Any]
Again = Callable[[Segment, tuple[Any, ...]], tuple[Segment, tuple[Any, ...]]]
Plain = Callable[[Any], tuple[Any, Callable[[Any], Any]]]


@contextmanager
def recomputations(handler: Again, plain: Plain | None = None) -> Iterator[None]:
    """While on, a checkpoint of ``function(*args)`` keeps and recomputes ``again(*kept)`` instead.

    ``again, kept = handler(function, args)`` is called before the function runs. A reentrant checkpoint is a custom Function,
    which cannot return every kind of result. Without ``plain`` it keeps ``args``. With ``plain`` it keeps ``kept``, runs
    ``again`` the first time too, and returns ``back(results)``, where ``results, back = plain(again(*kept))``.
    """

    def by_generator(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(function: Segment, *args: Any, **kwargs: Any) -> Any:
            if "args" in patches.CHECKPOINT.positional:  # the arguments of the segment, as one tuple
                again, kept = handler(function, args[0])
                return make(again, kept, *args[1:], **kwargs)
            fixed = len(patches.CHECKPOINT.positional) - 1  # so many arguments precede those of the segment
            again, kept = handler(function, args[fixed:])
            return make(again, *args[:fixed], *kept, **kwargs)

        return made

    def reentrant(apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(function: Segment, preserve: Any, *args: Any) -> Any:
            again, kept_args = handler(function, args)
            if plain is None:
                runs = iter([function])
                return apply(lambda *arguments: next(runs, again)(*arguments), preserve, *args)
            first: list[Callable[[Any], Any]] = []

            def run(*arguments: Any) -> Any:
                results, back = plain(again(*arguments))
                first.append(back)
                return results

            outputs = apply(run, preserve, *kept_args)
            back = first[0]
            first.clear()
            return back(outputs)

        return applied

    with patches.CHECKPOINT.on(by_generator), patches.REENTRANT.on(reentrant):
        yield


@contextmanager
def checkpoints_noted(functions: list[Segment]) -> Iterator[None]:
    """While on, each function that is checkpointed is appended to ``functions``."""

    def noted(function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
        functions.append(function)
        return function, args

    with recomputations(noted):
        yield


class Checkpoints(Protocol):
    """Receives the events of a model's own checkpoints."""

    def checkpoint_begins(self, *, reentrant: bool) -> bool:
        """A checkpointed function begins. Returns whether its activations may be dropped and recomputed in a backward."""

    def checkpoint_runs(self, before: Any, now: Any) -> None:
        """The function of a reentrant checkpoint is called with ``now``, which stand for the arguments ``before``."""

    def checkpoint_returns(self) -> None:
        """The function of a reentrant checkpoint has returned. Autograd makes the checkpoint's results from its results."""

    def checkpoint_ends(self, before: Any = None, now: Any = None) -> None:
        """The checkpoint has returned. ``before``: what the function returned; ``now``: what the checkpoint returns, if these
        are other tensors."""


@contextmanager
def followed_checkpoints(told: Checkpoints) -> Iterator[None]:
    """While on, ``told`` decides for each checkpoint whether it recomputes. If not, its function is just called."""

    def by_generator(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Iterator[None]:
            if told.checkpoint_begins(reentrant=False):
                yield from make(*args, **kwargs)
            else:
                yield
            told.checkpoint_ends()

        return made

    def reentrant(apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(function: Segment, preserve: Any, *args: Any) -> Any:
            if told.checkpoint_begins(reentrant=True):
                runs = [function]  # emptied by the first run; later runs are recomputations in a backward
                returned: list[Any] = []

                def run(*arguments: Any) -> Any:
                    if not runs:
                        return function(*arguments)
                    told.checkpoint_runs(args, arguments)
                    returned.append(runs.pop()(*arguments))
                    told.checkpoint_returns()
                    return returned[0]

                result = apply(run, preserve, *args)
                told.checkpoint_ends(returned, result)
                returned.clear()
                return result
            # The results of a reentrant checkpoint have no graph if none of its arguments requires a gradient.
            with torch.set_grad_enabled(
                any(isinstance(x, Tensor) and x.requires_grad for x in args) and torch.is_grad_enabled()
            ):
                result = function(*args)
            told.checkpoint_ends()
            return result

        return applied

    with patches.CHECKPOINT.on(by_generator), patches.REENTRANT.on(reentrant):
        yield
