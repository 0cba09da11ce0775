"""Recompute: a module's activations are dropped after its forward and computed again in its backward.

    forward      save the state of modules and generators, then run
    recompute    set this state, run on the arguments as they were, then set the state back to what it was before the recompute

The state is everything that a forward may change on its modules (runtime/module_state.py). So a forward that reads and updates
a running mean reads the same mean in the recompute, and updates it once. The random state is that of all generators, also of
Python, which ``torch.utils.checkpoint`` does not restore.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.calls.hook import Around
from meshwright.generators import Generators, State
from meshwright.private import version, without_modes
from meshwright.runtime.module_state import ModuleState, ModuleStates
from meshwright.runtime.weights.kept_arguments import KeptArguments
from meshwright.spmd.autograd_functions import transforming
from meshwright.spmd.tensor import local_of


def recomputed(model: nn.Module, names: Iterable[str], random: Generators) -> dict[str, Around]:
    """Module's name → a wrapper that runs its forward under ``torch.utils.checkpoint`` (calls/hook.py)."""
    modules, latest = dict(model.named_modules()), _Latest()
    return {name: partial(RecomputedForward, name, modules[name], random, latest) for name in names}


class _Latest:
    """The arguments of the latest call that was recorded for a recompute, while its graph lives."""

    def __init__(self) -> None:
        self._kept: Callable[[], KeptArguments | None] = _none

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": _none}  # a copy of the model has calls of its own

    def keep(self, arguments: Any, copied: Callable[[int], Collection[int]]) -> tuple[KeptArguments, list[Tensor]]:
        """``KeptArguments.of``. Unchanged parts are shared with the latest call, whichever module that was of."""
        kept, tensors = KeptArguments.of(arguments, self._kept(), copied)
        self._kept = ref(kept)
        return kept, tensors


def _none() -> None:
    return None


class RecomputedForward:
    """A module's forward whose activations are computed again in the backward.

    Attributes:
        written: number of tensors among the arguments → indices of those to which forwards have written so far.
    """

    def __init__(
        self, name: str, module: nn.Module, random: Generators, latest: _Latest, forward: Callable[..., Any]
    ) -> None:
        self.name, self.forward, self.random, self.latest = name, forward, random, latest
        self.states = ModuleStates(module)
        self.written: dict[int, set[int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or transforming():  # (torch.func drops and makes again what it pleases)
            return self.forward(*args, **kwargs)
        # ``_Run`` keeps the arguments, not ``checkpoint``, which refuses arguments that the forward writes to.
        run = _Run(self, args, kwargs)
        result = checkpoint(run, use_reentrant=False, preserve_rng_state=False)
        run.raise_error()
        return result

    def may_write(self, count: int) -> Collection[int]:
        """Indices of the tensors, ``count`` in all, to which a forward may write: in the first forward it is unknown."""
        return self.written.get(count, range(count))

    def error(self, why: str) -> RuntimeError:
        fix = f"modules: {{{self.name}: {{recompute: none}}}}" if self.name else "recompute: none"
        return RuntimeError(
            f"the activations of {self.name or 'the model'} cannot be made again: {why}. In the plan: {fix}"
        )


class _Run:
    """One forward of a module, and its recompute.

    ``checkpoint`` is to return, also if the forward fails: before torch 2.13, an error that passes through it leaves its hooks
    for saved tensors on for as long as the traceback lives, and other forwards would save their tensors to this checkpoint.
    """

    def __init__(self, recomputed: RecomputedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recomputed, self._first = recomputed, (args, kwargs)
        self._kept: KeptArguments | None = None
        self._state: ModuleState
        self._random: State
        self._error: BaseException | None = None  # of the forward

    def __call__(self) -> Any:
        if self._kept is not None:
            return self._again(self._kept)
        try:
            return self._begin()
        except BaseException as error:
            self._error = error
            return None

    def raise_error(self) -> None:
        """Raises the error of the forward, if there was one."""
        if self._error is None:
            return
        try:
            raise self._error
        finally:
            self._error = None  # its traceback has this frame

    def _begin(self) -> Any:
        recomputed = self._recomputed
        arguments, self._first = self._first, ((), {})
        self._state, self._random = recomputed.states.now(), recomputed.random.state()
        # (Kept before the forward runs: if it asks for gradients itself, the recompute runs before the forward ends.)
        self._kept, tensors = recomputed.latest.keep(arguments, recomputed.may_write)
        copied, versions = set(recomputed.may_write(len(tensors))), _versions(tensors)
        args, kwargs = arguments
        try:
            result = recomputed.forward(*args, **kwargs)
        except RuntimeError as error:  # torch.func refuses to run where activations are dropped
            if "saved tensor hooks" in str(error):
                raise recomputed.error("it differentiates within its forward, by a function of torch.func") from error
            raise
        written = {i for i, (now, then) in enumerate(zip(_versions(tensors), versions, strict=True)) if now != then}
        if not written <= copied:
            raise recomputed.error("it writes to its input in this forward, and did not in its first one")
        self._kept.drop_copies(copied - written, tensors)
        recomputed.written[len(tensors)] = written | recomputed.written.get(len(tensors), set())
        return result

    def _again(self, kept: KeptArguments) -> Any:
        recomputed = self._recomputed
        if not kept.is_unwritten():
            raise recomputed.error("its input was written to after its forward")
        args, kwargs = kept.again(recomputed.may_write(len(kept.leaves)))
        with recomputed.random.kept(), self._state.restored():
            recomputed.random.set(self._random)
            return recomputed.forward(*args, **kwargs)


def _versions(tensors: Iterable[Tensor]) -> list[int | None]:
    with without_modes():
        return [version(local_of(t)) for t in tensors]
