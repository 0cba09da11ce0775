"""How many labels each mean is over: so that the mean over a batch that is divided unevenly is the mean over all of it.

A model that takes the mean of its own loss takes it over the rows it sees. With rows divided over data ranks and
microbatches, and labels ignored here and there, the mean of those means is not the mean over the batch; weighing them by
rows is not enough. So, before a step, the *label program* runs: the part of the forward that makes the targets of
``cross_entropy`` and ``nll_loss`` from the batch alone (shifts, views, casts). It is recorded from a forward in which
parameters have shapes only, and gives each mean's count without any of the model's work. One all-reduce gives the global
counts; each such loss is then scaled by its own share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.private import pytree
from meshwright.run.batch import copied, tensors_in, versions, written
from meshwright.run.untouched import random_numbers_kept
from meshwright.view.functions import FunctionMode, Segment, recomputations
from meshwright.view.losses import mean_target

SLOTS = 16  # how many losses of a forward can be counted: the same number on every rank, whatever its path


def count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    valid = target != ignore_index
    if weight is None or weight.is_meta:
        return valid.sum().double()
    return (weight[target.clamp(min=0)] * valid).sum().double()


@dataclass
class Tape:
    """Torch functions run on values that came from the batch, in order, to be run again on another batch."""

    steps: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)  # func, arguments, spec, names of results
    losses: list[tuple[Any, Any, int] | None] = field(default_factory=list)  # target, weight, ignored label
    writes: bool = False  # whether the forward writes to the batch

    def counts(self, leaves: list[Any]) -> list[float]:
        """What each mean of the forward divides by, for a batch with these leaves."""
        values: dict[Any, Any] = {_Name(i): leaf for i, leaf in enumerate(leaves)}
        values[_DEVICE] = next(x.device for x in leaves if isinstance(x, Tensor))
        look = lambda x: values[x] if isinstance(x, _Name) else x  # noqa: E731
        for func, flat, spec, results in self.steps:
            args, kwargs = pytree.tree_unflatten([look(x) for x in flat], spec)
            out = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if x is not None]
            values.update({name: x for name, x in zip(results, out, strict=True) if name is not None})
        found = [nan] * SLOTS
        for i, loss in enumerate(self.losses[:SLOTS]):
            if loss is not None:
                found[i] = float(count(look(loss[0]), look(loss[1]), loss[2]))
        return found


@dataclass(frozen=True)
class _Name:
    number: int


_DEVICE = _Name(-1)  # the batch's: a label moved to the logits' device was moved to meta when it was recorded


class Recorder(FunctionMode):
    """Records a tape while a forward runs for its shapes. What has no value (meta) is not recorded."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self.tape = Tape()
        self._names: dict[int, _Name] = {id(x): _Name(i) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        self._alive: list[Any] = list(leaves)  # an id stays taken while its tensor lives
        self._next = len(leaves)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (found := mean_target(func, args, kwargs)) is not None:
            target, weight, ignored = found
            known = not target.is_meta
            self.tape.losses.append((self._name(target), self._name(weight), ignored) if known else None)
        before = versions((args, kwargs))
        result = func(*args, **kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(x, Tensor) and id(x) in self._names for x in flat):
            out = [x for x in pytree.tree_leaves(result) if x is not None]  # `x[i] = v` returns nothing
            if (out or written((args, kwargs), before)) and all(isinstance(x, Tensor) and not x.is_meta for x in out):
                self.tape.steps.append((func, [self._name(x) for x in flat], spec, [self._new(x) for x in out]))
        return result

    def _name(self, x: Any) -> Any:
        if isinstance(x, torch.device) and x.type == "meta":
            return _DEVICE
        return self._names.get(id(x), x) if isinstance(x, Tensor) else x

    def _new(self, x: Tensor) -> _Name:
        if id(x) not in self._names:
            self._names[id(x)] = _Name(self._next)
            self._alive.append(x)
            self._next += 1
        return self._names[id(x)]


class LabelCounter:
    """Counts labels of a batch; records one tape for each set of shapes.

    Args:
        record: runs the forward for its shapes on a batch, under the mode that it is given.
    """

    def __init__(self, record: Callable[[Any, TorchFunctionMode], None]) -> None:
        self._record = record
        self._tapes: dict[Any, Tape | None] = {}

    def counts(self, batch: Any) -> list[float]:
        """What each mean is over; NaN where it is not known (then weighing by rows is what is done)."""
        leaves, spec = pytree.tree_flatten(batch)
        key = (spec, tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves))
        tensors = tensors_in(batch)
        if key not in self._tapes:
            self._tapes[key] = self._new_tape(batch)
        tape = self._tapes[key]
        if tape is None or not any(tape.losses):
            return [nan] * SLOTS
        return tape.counts(copied(tensors) if tape.writes else tensors)

    def _new_tape(self, batch: Any) -> Tape | None:
        batch = copied(batch)
        recorder, before = Recorder(tensors_in(batch)), versions(batch)
        try:
            with torch.no_grad(), random_numbers_kept():
                self._record(batch, recorder)
        except Exception:  # a forward that cannot run without values: `check` shows what follows from that
            return None
        recorder.tape.writes = bool(written(batch, before))
        return recorder.tape


class Shares(FunctionMode):
    """While on, the i-th mean loss of the forward is multiplied by ``shares[i]``; without shares, by nothing."""

    def __init__(self, shares: list[float] | None) -> None:
        super().__init__()
        self._shares, self._i = shares, 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """For the time of a forward. What a checkpoint runs again has the shares that it had."""
        if self._shares is None:
            yield
            return
        with self, recomputations(self._again):
            yield

    def _again(self, function: Segment, args: tuple[Any, ...]) -> tuple[Segment, tuple[Any, ...]]:
        first = self._i

        def again(*given: Any, **named: Any) -> Any:
            before, self._i = self._i, first
            try:
                with self:
                    return function(*given, **named)
            finally:
                self._i = before

        return again, args

    def at(self, count: int) -> None:
        """``count`` mean losses of the forward came before what runs next, here or on other ranks."""
        self._i = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._shares is None or mean_target(func, args, kwargs) is None:
            return func(*args, **kwargs)
        i, self._i = self._i, self._i + 1
        loss = func(*args, **kwargs)
        share = self._shares[i] if i < len(self._shares) else 1.0
        # A mean over no label is 0/0; its share is zero.
        return loss * share if share else torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss)) * 0.0
