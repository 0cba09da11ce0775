"""What goes round torch functions, so that no function mode sees it.

    custom ``autograd.Function`` s     given global tensors, their graph would silently be lost
    the transforms of ``torch.func``    vmap, grad, jvp …
    scripted functions and modules      ``torch.jit.script``, ``torch.jit.trace``
    what a checkpoint keeps             and runs again in a backward

For none of them is there a public hook: for the time of a forward, the functions that they go through are ours
(``patches``).

Compiled functions are the reverse: Dynamo traces what a function mode does as if it were the model's code, and what it
compiled for one function of torch it reuses for another. While a mode of ours is on, nothing is compiled (``FunctionMode``).
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

Handler = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


# FSDP2's, ours, and those of a program of ours that was compiled.
_NOT_OF_A_MODEL = ("torch.distributed.", "meshwright.", "torch._functorch._aot_autograd.")


@contextmanager
def custom_functions(handler: Handler) -> Iterator[None]:
    """While on, ``MyFunction.apply(*args)`` is ``handler(apply, MyFunction, args, kwargs)``, with ``apply(MyFunction, *args)``.

    Contexts nest; the last is asked first.
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
    """While on, ``noted(result, args)`` is called after each of this package's own Functions: a collective of a forward, say,
    whose result follows from its operand, which no function mode sees."""

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
    """While on, a backward that asks for other gradients raises: modules that it runs again would get theirs, as in a step."""

    def refused(asks: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if in_backward():
                raise RuntimeError("a backward that asks for gradients is not tried by itself")
            return asks(*args, **kwargs)

        return checked

    with patches.BACKWARD.on(refused), patches.GRADIENTS.on(refused):
        yield


def giving(function: Any, change: Callable[[Any], Any]) -> Any:
    """The custom Function with ``change`` of all that its forward and backward give. Made once for a Function.

    These may meet parameters that were not handed to them (a closure's, a checkpointed module's): then global tensors come out.
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

# For the time of a block none is: what it computes is, to them, a tensor from outside.
outside_transforms = temporarily_clear_interpreter_stack


@contextmanager
def transforms(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While on, a transform of ``torch.func`` is of ``change`` of the tensors that it is given."""

    def changing(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            return wrap(*(change(x) if isinstance(x, Tensor) else x for x in args), **kwargs)

        return changed

    with patches.VMAP.on(changing), patches.GRAD.on(changing), patches.JVP.on(changing):
        yield


@contextmanager
def transformed_functions(handler: Handler) -> Iterator[None]:
    """While on, a call of what ``torch.func`` made (``vmap(f)(x)``, ``grad(f)(x)``, ``jvp(f, …)``, ``vjp(f, …)``) is
    ``handler(call, name, args, kwargs)``, with ``call(*args, **kwargs)``. Contexts nest; the last is asked first."""

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
    """While on, a call of what ``torch.jit`` made, a function or a module's forward, is ``handler(call, scripted, args,
    kwargs)``, with ``call(scripted, *args)``. Contexts nest; the last is asked first.

    Without it a mode sees what a scripted function does on meta, where torch's kernels are Python, and only there; and that
    is another list once the scripted function has been optimised, after a few calls.
    """

    def handled(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
            return handler(plain, scripted, args, kwargs)

        return call

    with patches.SCRIPTED.on(handled), patches.SCRIPTED_METHOD.on(handled):
        yield


class FunctionMode(TorchFunctionMode):
    """A function mode under which nothing is compiled. All modes of ours are of this kind."""

    def may_be_recorded(self) -> bool:
        """Whether what a block does now is what it does without this mode (replay/)."""
        return self.may_be_passed()

    def may_be_passed(self) -> bool:
        """Whether a block's functions may be called now past this mode, by a program that was recorded under it (replay/)."""
        return False

    def interventions(self) -> int:
        """How often it did something else than to call a function; nothing may be recorded that it had a part in."""
        return 0

    def follows(self, t: Tensor) -> bool:
        """Whether it has noted something of a tensor."""
        return False

    def __enter__(self) -> Any:
        patches.UNCOMPILED.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        patches.UNCOMPILED.leave()


Segment = Callable[..., Any]
Again = Callable[[Segment, tuple[Any, ...]], tuple[Segment, tuple[Any, ...]]]
Plain = Callable[[Any], tuple[Any, Callable[[Any], Any]]]


@contextmanager
def recomputations(handler: Again, plain: Plain | None = None) -> Iterator[None]:
    """While on, for a checkpointed ``function(*args)``, what is kept and run again is ``again(*kept)``.

    ``again, kept = handler(function, args)``, before the function runs first. The reentrant kind is a custom Function: it
    keeps ``args``, unless ``plain`` says what to do with results that a custom Function cannot give. Then it keeps
    ``kept``, also runs ``again`` the first time, and gives ``back(results)``, for ``results, back = plain(again(*kept))``.
    """

    def by_generator(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(function: Segment, *args: Any, **kwargs: Any) -> Any:
            if "args" in patches.CHECKPOINT.positional:  # the arguments of the segment, as one
                again, kept = handler(function, args[0])
                return make(again, kept, *args[1:], **kwargs)
            fixed = len(patches.CHECKPOINT.positional) - 1  # before the arguments of the segment
            again, kept = handler(function, args[fixed:])
            return make(again, *args[:fixed], *kept, **kwargs)

        return made

    def reentrant(apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(function: Segment, preserve: Any, *args: Any) -> Any:
            again, kept = handler(function, args)
            if plain is None:
                runs = iter([function])
                return apply(lambda *arguments: next(runs, again)(*arguments), preserve, *args)
            first: list[Callable[[Any], Any]] = []

            def run(*arguments: Any) -> Any:
                results, back = plain(again(*arguments))
                first.append(back)
                return results

            outputs = apply(run, preserve, *kept)
            back = first[0]
            first.clear()
            return back(outputs)

        return applied

    with patches.CHECKPOINT.on(by_generator), patches.REENTRANT.on(reentrant):
        yield


@contextmanager
def checkpoints_noted(functions: list[Segment]) -> Iterator[None]:
    """While on, ``functions`` gets those that are checkpointed."""

    def noted(function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
        functions.append(function)
        return function, args

    with recomputations(noted):
        yield


class Checkpoints(Protocol):
    """What is told of a model's own checkpoints."""

    def checkpoint_begins(self) -> bool:
        """Whether what a checkpointed function computes may be dropped, and be computed again in a backward."""

    def checkpoint_returns(self) -> None:
        """The function of a reentrant checkpoint has returned; autograd makes of that what the checkpoint gives."""

    def checkpoint_ends(self, before: Any = None, now: Any = None) -> None:
        """The function has returned; if the checkpoint gives other tensors than that, what it returned, and what is given."""


@contextmanager
def followed_checkpoints(told: Checkpoints) -> Iterator[None]:
    """While on, ``told`` decides of each checkpoint whether it is one: if not, its function is called, and nothing else."""

    def by_generator(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Iterator[None]:
            if told.checkpoint_begins():
                yield from make(*args, **kwargs)
            else:
                yield
            told.checkpoint_ends()

        return made

    def reentrant(apply: Callable[..., Any]) -> Callable[..., Any]:
        def applied(function: Segment, preserve: Any, *args: Any) -> Any:
            if told.checkpoint_begins():
                runs = [function]  # left to be told of: it is run again in a backward
                returned: list[Any] = []

                def run(*arguments: Any) -> Any:
                    if not runs:
                        return function(*arguments)
                    returned.append(runs.pop()(*arguments))
                    told.checkpoint_returns()
                    return returned[0]

                result = apply(run, preserve, *args)
                told.checkpoint_ends(returned, result)
                returned.clear()
                return result
            # Of this kind a result has no graph if nothing that is handed over has.
            with torch.set_grad_enabled(
                any(isinstance(x, Tensor) and x.requires_grad for x in args) and torch.is_grad_enabled()
            ):
                result = function(*args)
            told.checkpoint_ends()
            return result

        return applied

    with patches.CHECKPOINT.on(by_generator), patches.REENTRANT.on(reentrant):
        yield
