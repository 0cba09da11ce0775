"""Recompute: a module's activations are dropped after its forward and made again in its backward.

    forward      remember what the modules and the generators were before; run
    recompute    from that state, in tensors of its own; afterwards everything is again what it was

State is what a forward may leave on its modules (runtime/module_state.py). So a forward that updates a running mean, and reads
it, reads the same mean in the recompute, and updates it once. The random state is that of all generators, Python's too,
which ``torch.utils.checkpoint`` leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.calls.hook import Around
from meshwright.generators import Generators, State
from meshwright.private import pytree, version
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
        self.written: set[int] | None = None  # which of the tensors in its arguments forwards wrote to so far

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
        self._kept: tuple[list[Any], Any] | None = None  # the arguments of the recompute, flat, and their structure
        self._state: ModuleState
        self._random: State
        self._versions: list[int | None]

    def __call__(self) -> Any:
        return self._begin() if self._kept is None else self._again(*self._kept)

    def _begin(self) -> Any:
        of = self._of
        (args, kwargs), self._first = self._first, ((), {})
        self._state, self._random = ModuleState(of.module), of.random.state()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        versions = [_version(leaves[i]) for i in places]
        # The first forward shows which inputs are written to; until then any of them may be.
        copied = set(places) if of.written is None else of.written
        self._kept = [_as_input(x, i in copied) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)], spec
        result = of.forward(*args, **kwargs)
        written = {i for i, before in zip(places, versions, strict=True) if _version(leaves[i]) != before}
        if not written <= copied:
            raise of.error("it writes to its input in this forward, and did not in its first one")
        for i in copied - written:
            self._kept[0][i] = _as_input(leaves[i], False)
        self._versions = [_version(x) for x in self._kept[0]]
        of.written = written | (of.written or set())
        return result

    def _again(self, kept: list[Any], spec: Any) -> Any:
        if [_version(x) for x in kept] != self._versions:
            raise self._of.error("its input was written to after its forward")
        written = self._of.written or set()
        leaves = [_as_input(x, i in written) if isinstance(x, Tensor) else x for i, x in enumerate(kept)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with self._of.random.kept(), self._state.restored():
            self._of.random.set(self._random)
            return self._of.forward(*args, **kwargs)


def _version(x: Any) -> int | None:
    return version(local_of(x)) if isinstance(x, Tensor) else None


def _as_input(t: Tensor, copied: bool) -> Tensor:
    """A tensor without its graph, for a recompute; ``copied``: one that this may write to."""
    if isinstance(t, nn.Parameter):
        return t
    value = t.detach().requires_grad_(t.requires_grad)
    return value.clone() if copied else value  # (a clone is no leaf, to which autograd lets nobody write)
