"""``ModuleCalls``: what is done around the calls of a model's modules. Each module's forward is wrapped once, on the instance.

    module(x)
      │  torch's hooks: the model's own, and FSDP2's, which gathers     (outside: they see what the model is to see)
      ├─ 1  cut        what enters a block is cut over the sequence (calls/sequence.py)
      ├─ 2  walk       what follows the forward (calls/tracer.py), if something does, says what becomes of the call:
      │                  run    all of it runs, unseen: 3, 4 and 5
      │                  open   it runs, looked into: 4 and 5, as what is looked into cannot be computed again
      │                  stub   nothing of it runs: what it returned when it was recorded stands in
      ├─ 3  recompute  its activations are dropped, and made again in the backward (runtime/weights/recompute.py)
      ├─ 4  within     a context is on: a wider type, in a check (parity/widened.py)
      ├─ 5  replay     on local tensors, by its recorded program (replay/)
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
"""A forward → the forward that is called in its place."""

Cut = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""A block's name, and what it is called with → what its forward gets."""


class Walk(Protocol):
    """What follows the calls of one forward.

    Attributes:
        thread: the only one whose calls are followed: a block in a thread of its own is not looked into.
    """

    thread: int

    def on(self) -> AbstractContextManager[None]:
        """For the time of the forward."""

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives."""


class Forward:
    """The forward of one module, and what is done around it.

    Attributes:
        name: the module's.
        run: the forward, with recompute if there is any.
        open: the forward without recompute.
        called: what stands on the instance: the steps that this module needs.
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
        own = module.forward
        self._calls, self._within = calls, within
        self._own = own if replay is None else replay(own)
        self.open: Callable[..., Any] = self._own if within is None else self._run_within
        self.run = self.open if recompute is None else recompute(self.open)
        called = self._cut if block else self._follow if followed else self.run
        self.called = functools.wraps(own)(functools.partial(called))  # a model may ask for its signature

    def _cut(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.cut is not None:
            args, kwargs = self._calls.cut(self.name, args, kwargs)
        return self._follow(*args, **kwargs)

    def _follow(self, *args: Any, **kwargs: Any) -> Any:
        walk = self._calls.walk
        if walk is None or walk.thread != get_ident():
            return self.run(*args, **kwargs)
        return walk.call(self, args, kwargs)

    def _run_within(self, *args: Any, **kwargs: Any) -> Any:
        assert self._within is not None
        with self._within():
            return self._own(*args, **kwargs)


class ModuleCalls:
    """The calls of a model's modules. A module around which nothing is ever done keeps its forward.

    Args:
        followed: whether walks may follow forwards: every module asks for one.
        blocks: the modules whose input ``cut`` cuts.
        recomputed: module → its forward with recompute around it.
        replayed: module → its forward, or in its place a recorded program.
        within: module → what makes the context that its forward runs in.

    Attributes:
        walk: what follows the forward that runs, if something does.
        cut: cuts what enters a block, if something does.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        followed: bool = False,
        blocks: Collection[str] = (),
        cut: Cut | None = None,
        recomputed: Mapping[str, Around] | None = None,
        replayed: Mapping[str, Around] | None = None,
        within: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    ) -> None:
        self.walk: Walk | None = None
        self.cut = cut
        recomputed, replayed, within = recomputed or {}, replayed or {}, within or {}
        modules = dict(model.named_modules())
        asking = {n for n, m in modules.items() if followed and not isinstance(m, torch.jit.ScriptModule)}
        for name in {*blocks, *recomputed, *replayed, *within, *asking}:
            forward = Forward(
                self,
                name,
                modules[name],
                followed=name in asking,
                block=name in blocks,
                recompute=recomputed.get(name),
                replay=replayed.get(name),
                within=within.get(name),
            )
            modules[name].forward = forward.called

    @contextmanager
    def following(self, walk: Walk) -> Iterator[None]:
        """For the time of a forward, ``walk`` follows it."""
        before, self.walk = self.walk, walk
        try:
            with walk.on():
                yield
        finally:
            self.walk = before

    @contextmanager
    def cutting(self, cut: Cut) -> Iterator[None]:
        """For the time of a forward, ``cut`` cuts what enters blocks."""
        before, self.cut = self.cut, cut
        try:
            yield
        finally:
            self.cut = before


@contextmanager
def wrapped(model: nn.Module, *, followed: bool = False, blocks: Collection[str] = ()) -> Iterator[ModuleCalls]:
    """For the time of some forwards, a model's module calls. Then the model is as it was."""
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
def following(model: nn.Module, walk: Walk) -> Iterator[None]:
    """For the time of one forward, ``walk`` follows it. Then the model is as it was."""
    with wrapped(model, followed=True) as calls, calls.following(walk):
        yield
