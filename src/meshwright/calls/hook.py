"""``ModuleCalls``: wraps the forward of each module of a model once, on the instance. The steps of a call:

    module(x)
      │  torch's hooks: the model's own, and FSDP2's, which gather      (outside: they see what the model sees)
      ├─ 1  shard      the input of a block is sharded over the sequence (calls/sequence.py)
      ├─ 2  trace      the tracer of the forward (calls/tracer.py), if there is one, decides:
      │                  run    all of the call runs, and its functions are not traced: 3, 4 and 5
      │                  open   the call runs, and its functions are traced: 4 and 5, as they cannot be recomputed
      │                  stub   nothing of the call runs: its recorded result stands in
      ├─ 3  recompute  activations are dropped, and computed again in the backward (runtime/weights/recompute.py)
      ├─ 4  within     a context is on: a wider dtype, in a check (parity/widening.py)
      ├─ 5  replay     the block's recorded program runs on local tensors (replay/)
      └─ 6  the module's own forward

Names of modules and parameters, state dicts and types of modules stay as they are. A copy of a model (``copy.deepcopy``) has
forwards of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A forward → the forward that is called instead."""

ShardInputs = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""(name of a block, args, kwargs of a call) → the args and kwargs for its forward."""


class CallTracer(Protocol):
    """Follows the module calls of one forward (``calls/tracer.Tracer``).

    Attributes:
        thread: the thread whose calls are followed: a block that runs in another thread is not traced.
    """

    thread: int

    def on(self) -> AbstractContextManager[None]:
        """A context for the forward."""

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of a module."""


class Forward:
    """The forward of one module with the steps around it.

    Attributes:
        name: the name of the module.
        run: the forward with steps 3 to 6.
        open: the forward with steps 4 to 6.
        called: the function that replaces ``forward`` on the instance, with the steps that this module needs.
    """

    def __init__(
        self,
        calls: ModuleCalls,
        name: str,
        module: nn.Module,
        *,
        followed: bool,
        block: bool,
        recompute: Around | None,
        replay: Around | None,
        within: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        self.name, self.module = name, module
        original = module.forward
        self._calls, self._within = calls, within
        self._innermost = original if replay is None else replay(original)
        self.open: Callable[..., Any] = self._innermost if within is None else self._run_within
        self.run = self.open if recompute is None else recompute(self.open)
        called = self._shard if block else self._follow if followed else self.run
        self.called = functools.wraps(original)(functools.partial(called))  # a model may read its signature

    def _shard(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.shard_inputs is not None:
            args, kwargs = self._calls.shard_inputs(self.name, args, kwargs)
        return self._follow(*args, **kwargs)

    def _follow(self, *args: Any, **kwargs: Any) -> Any:
        tracer = self._calls.tracer
        if tracer is None or tracer.thread != get_ident():
            return self.run(*args, **kwargs)
        return tracer.call(self, args, kwargs)

    def _run_within(self, *args: Any, **kwargs: Any) -> Any:
        assert self._within is not None
        with self._within():
            return self._innermost(*args, **kwargs)


class ModuleCalls:
    """The wrapped module calls of a model. A module that needs no step keeps its forward.

    Args:
        followed: whether tracers may follow forwards; then every module is wrapped.
        blocks: the modules whose inputs ``shard_inputs`` shards.
        shard_inputs: see the attribute.
        recomputed: module → wraps its forward with recompute.
        replayed: module → wraps its forward with the replay of a recorded program.
        within: module → makes the context in which its forward runs.

    Attributes:
        tracer: follows the forward that is running, if not None.
        shard_inputs: shards the inputs of blocks, if not None.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        followed: bool = False,
        blocks: Collection[str] = (),
        shard_inputs: ShardInputs | None = None,
        recomputed: Mapping[str, Around] | None = None,
        replayed: Mapping[str, Around] | None = None,
        within: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    ) -> None:
        self.tracer: CallTracer | None = None
        self.shard_inputs = shard_inputs
        recomputed, replayed, within = recomputed or {}, replayed or {}, within or {}
        modules = dict(model.named_modules())
        traced = {n for n, m in modules.items() if followed and not isinstance(m, torch.jit.ScriptModule)}
        for name in {*blocks, *recomputed, *replayed, *within, *traced}:
            forward = Forward(
                self,
                name,
                modules[name],
                followed=name in traced,
                block=name in blocks,
                recompute=recomputed.get(name),
                replay=replayed.get(name),
                within=within.get(name),
            )
            modules[name].forward = forward.called

    @contextmanager
    def following(self, tracer: CallTracer) -> Iterator[None]:
        """A context in which ``tracer`` follows the forward that runs."""
        before, self.tracer = self.tracer, tracer
        try:
            with tracer.on():
                yield
        finally:
            self.tracer = before

    @contextmanager
    def sharding_inputs(self, shard_inputs: ShardInputs) -> Iterator[None]:
        """A context in which ``shard_inputs`` shards the inputs of blocks."""
        before, self.shard_inputs = self.shard_inputs, shard_inputs
        try:
            yield
        finally:
            self.shard_inputs = before


@contextmanager
def wrapped(model: nn.Module, *, followed: bool = False, blocks: Collection[str] = ()) -> Iterator[ModuleCalls]:
    """A context in which a model's module calls are wrapped. Afterwards the model is as before."""
    before = {m: vars(m).get("forward") for m in model.modules()}
    try:
        yield ModuleCalls(model, followed=followed, blocks=blocks)
    finally:
        for module, forward in before.items():
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


@contextmanager
def following(model: nn.Module, tracer: CallTracer) -> Iterator[None]:
    """A context in which ``tracer`` follows one forward. Afterwards the model is as before."""
    with wrapped(model, followed=True) as calls, calls.following(tracer):
        yield
