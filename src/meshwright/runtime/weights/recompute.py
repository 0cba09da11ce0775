"""Recompute: a module's activations are dropped after its forward and computed again in its backward.

    forward      save the state of modules and generators, then run
    recompute    set this state, run on copies of the inputs, then set the state back to what it was before the recompute

The state is everything that a forward may change on its modules (runtime/module_state.py). So a forward that reads and updates
a running mean reads the same mean in the recompute, and updates it once. The random state is that of all generators, also of
Python, which ``torch.utils.checkpoint`` does not restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.calls.hook import Around
from meshwright.calls.placeholder import Placeholder
from meshwright.calls.structure import snapshot, tensors_of
from meshwright.generators import Generators, State
from meshwright.private import version
from meshwright.runtime.module_state import ModuleState
from meshwright.spmd.tensor import local_of


def recomputed(model: nn.Module, names: Iterable[str], random: Generators) -> dict[str, Around]:
    """Module's name → a wrapper that runs its forward under ``torch.utils.checkpoint`` (calls/hook.py)."""
    modules = dict(model.named_modules())
    return {name: partial(RecomputedForward, name, modules[name], random) for name in names}


class RecomputedForward:
    """A module's forward whose activations are computed again in the backward.

    Attributes:
        written: number of tensors among the arguments → indices of those to which forwards have written so far.
    """

    def __init__(self, name: str, module: nn.Module, random: Generators, forward: Callable[..., Any]) -> None:
        self.name, self.module, self.forward, self.random = name, module, forward, random
        self.written: dict[int, set[int]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # ``_Run`` keeps the arguments, not ``checkpoint``, which refuses arguments that the forward writes to.
        return checkpoint(_Run(self, args, kwargs), use_reentrant=False, preserve_rng_state=False)

    def error(self, why: str) -> RuntimeError:
        fix = f"modules: {{{self.name}: {{recompute: none}}}}" if self.name else "recompute: none"
        return RuntimeError(
            f"the activations of {self.name or 'the model'} cannot be made again: {why}. In the plan: {fix}"
        )


class _Run:
    """One forward of a module, and its recompute."""

    def __init__(self, recomputed: RecomputedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._recomputed, self._first = recomputed, (args, kwargs)
        self._kept: Any = None  # the arguments for the recompute, as they were before the forward
        self._inputs: list[Tensor]  # the tensors among them
        self._state: ModuleState
        self._random: State
        self._versions: list[int | None]

    def __call__(self) -> Any:
        return self._begin() if self._kept is None else self._again()

    def _begin(self) -> Any:
        recomputed = self._recomputed
        (args, kwargs), self._first = self._first, ((), {})
        self._state, self._random = ModuleState(recomputed.module), recomputed.random.state()
        tensors = list({id(t): t for t in tensors_of((args, kwargs))}.values())
        versions = [_version(t) for t in tensors]
        # The first forward shows which inputs it writes to. Until then, all are copied.
        written_before = recomputed.written.get(len(tensors))
        copied = set(range(len(tensors))) if written_before is None else written_before
        inputs = [_as_input(t, i in copied) for i, t in enumerate(tensors)]
        # (Kept before the forward runs: if it asks for gradients itself, the recompute runs before the forward ends.)
        self._keep((args, kwargs), tensors, inputs)
        try:
            result = recomputed.forward(*args, **kwargs)
        except RuntimeError as error:  # torch.func refuses to run where activations are dropped
            if "saved tensor hooks" in str(error):
                raise recomputed.error("it differentiates within its forward, by a function of torch.func") from error
            raise
        written = {i for i, (t, before) in enumerate(zip(tensors, versions, strict=True)) if _version(t) != before}
        if not written <= copied:
            raise recomputed.error("it writes to its input in this forward, and did not in its first one")
        if spare := copied - written:
            again = [_as_input(t, False) if i in spare else inputs[i] for i, t in enumerate(tensors)]
            self._keep(self._kept, inputs, again)
        recomputed.written[len(tensors)] = written | (written_before or set())
        return result

    def _keep(self, arguments: Any, tensors: Sequence[Tensor], inputs: list[Tensor]) -> None:
        """Keeps arguments for the recompute, with ``inputs`` in place of their tensors."""
        self._kept, self._inputs = _with(arguments, tensors, inputs), inputs
        self._versions = [_version(x) for x in inputs]

    def _again(self) -> Any:
        if [_version(x) for x in self._inputs] != self._versions:
            raise self._recomputed.error("its input was written to after its forward")
        written = self._recomputed.written.get(len(self._inputs), range(len(self._inputs)))
        inputs = [_as_input(x, i in written) for i, x in enumerate(self._inputs)]
        args, kwargs = _with(self._kept, self._inputs, inputs)
        with self._recomputed.random.kept(), self._state.restored():
            self._recomputed.random.set(self._random)
            return self._recomputed.forward(*args, **kwargs)


def _with(value: Any, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """A snapshot of arguments in which ``others`` replace ``tensors``."""
    replacement = {id(t): other for t, other in zip(tensors, others, strict=True)}
    return snapshot(value, lambda t: replacement.get(id(t), t))


def _version(t: Tensor) -> int | None:
    return version(local_of(t))


def _as_input(t: Tensor, copied: bool) -> Tensor:
    """A tensor detached from its graph, for a recompute. ``copied``: whether to copy it, so that the recompute may write
    to it."""
    if isinstance(t, (nn.Parameter, Placeholder)):  # a placeholder has no values: the block only passes it on
        return t
    value = t.detach().requires_grad_(t.requires_grad)
    return value.clone() if copied else value  # (a clone is no leaf; autograd refuses writes to a leaf)
