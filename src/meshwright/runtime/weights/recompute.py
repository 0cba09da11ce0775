"""Recompute: a module's activations are dropped after its forward and made again in its backward.

    forward      remember what the modules and the generators were before; run
    recompute    from that state, in tensors of its own; afterwards everything is again what it was

State is what a forward may leave on its modules (runtime/module_state.py). So a forward that updates a running mean, and reads
it, reads the same mean in the recompute, and updates it once. The random state is that of all generators, Python's too,
which ``torch.utils.checkpoint`` leaves out.
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
    """What makes each named module run under ``torch.utils.checkpoint`` (calls/hook.py)."""
    modules = dict(model.named_modules())
    return {name: partial(Recomputed, name, modules[name], random) for name in names}


class Recomputed:
    """A forward of a module, whose activations are made again in the backward."""

    def __init__(self, name: str, module: nn.Module, random: Generators, forward: Callable[..., Any]) -> None:
        self.name, self.module, self.forward, self.random = name, module, forward, random
        self.written: dict[
            int, set[int]
        ] = {}  # by how many tensors it is given: which of them forwards wrote to so far

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # The arguments are kept by the run: of its own, ``checkpoint`` takes none that the forward writes to.
        return checkpoint(_Run(self, args, kwargs), use_reentrant=False, preserve_rng_state=False)

    def error(self, why: str) -> RuntimeError:
        fix = f"modules: {{{self.name}: {{recompute: none}}}}" if self.name else "recompute: none"
        return RuntimeError(
            f"the activations of {self.name or 'the model'} cannot be made again: {why}. In the plan: {fix}"
        )


class _Run:
    """One forward of a module, and its recompute."""

    def __init__(self, of: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._of, self._first = of, (args, kwargs)
        self._kept: Any = None  # the arguments of the recompute, as they were before the forward
        self._inputs: list[Tensor]  # the tensors in them
        self._state: ModuleState
        self._random: State
        self._versions: list[int | None]

    def __call__(self) -> Any:
        return self._begin() if self._kept is None else self._again()

    def _begin(self) -> Any:
        of = self._of
        (args, kwargs), self._first = self._first, ((), {})
        self._state, self._random = ModuleState(of.module), of.random.state()
        tensors = list({id(t): t for t in tensors_of((args, kwargs))}.values())
        versions = [_version(t) for t in tensors]
        # The first forward shows which inputs are written to; until then any of them may be.
        known = of.written.get(len(tensors))
        copied = set(range(len(tensors))) if known is None else known
        inputs = [_as_input(t, i in copied) for i, t in enumerate(tensors)]
        # (A forward that asks for a gradient within has what it asks for made again before it ends.)
        self._keep((args, kwargs), tensors, inputs)
        try:
            result = of.forward(*args, **kwargs)
        except RuntimeError as error:  # torch.func refuses to run where activations are dropped
            if "saved tensor hooks" in str(error):
                raise of.error("it differentiates within its forward, by a function of torch.func") from error
            raise
        written = {i for i, (t, before) in enumerate(zip(tensors, versions, strict=True)) if _version(t) != before}
        if not written <= copied:
            raise of.error("it writes to its input in this forward, and did not in its first one")
        if spare := copied - written:
            again = [_as_input(t, False) if i in spare else inputs[i] for i, t in enumerate(tensors)]
            self._keep(self._kept, inputs, again)
        of.written[len(tensors)] = written | (known or set())
        return result

    def _keep(self, arguments: Any, tensors: Sequence[Tensor], inputs: list[Tensor]) -> None:
        """Keeps arguments for the recompute, with ``inputs`` in place of their tensors."""
        self._kept, self._inputs = _with(arguments, tensors, inputs), inputs
        self._versions = [_version(x) for x in inputs]

    def _again(self) -> Any:
        if [_version(x) for x in self._inputs] != self._versions:
            raise self._of.error("its input was written to after its forward")
        written = self._of.written.get(len(self._inputs), range(len(self._inputs)))
        inputs = [_as_input(x, i in written) for i, x in enumerate(self._inputs)]
        args, kwargs = _with(self._kept, self._inputs, inputs)
        with self._of.random.kept(), self._state.restored():
            self._of.random.set(self._random)
            return self._of.forward(*args, **kwargs)


def _with(value: Any, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """A snapshot of arguments, in which others stand for some tensors."""
    of = {id(t): other for t, other in zip(tensors, others, strict=True)}
    return snapshot(value, lambda t: of.get(id(t), t))


def _version(t: Tensor) -> int | None:
    return version(local_of(t))


def _as_input(t: Tensor, copied: bool) -> Tensor:
    """A tensor without its graph, for a recompute; ``copied``: one that this may write to."""
    if isinstance(t, (nn.Parameter, Placeholder)):  # the block hands on what is on other ranks
        return t
    value = t.detach().requires_grad_(t.requires_grad)
    return value.clone() if copied else value  # (a clone is no leaf, to which autograd lets nobody write)
