"""Can data ranks of a branch each run their own rows? Shown by running it for its shapes, in three ways.

    with the rows cut     by the rules of the view: nothing may have to be gathered, and what comes out is cut as what goes in
    with fewer rows       what comes out has as many
    both compared         the same functions with the same constants, but for sizes of shapes: a result that is divided by
                          the number of rows would be another one

What is not shown is not so: then each rank runs all rows, which is right, and no faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.calls.hook import Forward, following
from meshwright.calls.placeholder import sized
from meshwright.calls.structure import map_tensors, tensors_of
from meshwright.calls.tracer import Tracer, slot_tensors
from meshwright.graph import ROOT, Call, Event, ModelGraph, Path
from meshwright.layout import even_shard
from meshwright.planning.meeting import Meeting
from meshwright.planning.shadow import Shadow
from meshwright.private import pytree
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.comm import Ledger, PlannedAxis
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import is_fact, label_of
from meshwright.submesh import Submesh

# Functions of which a constant may follow from the number of rows: of a shape that they give, whatever row it is.
_SHAPED = frozenset(
    "view reshape expand broadcast_to unflatten zeros ones empty new_zeros new_ones new_empty rand randn".split()
)


def rows_of(batch: Any) -> int | None:
    """Rows of a batch: dim 0 of its first tensor that has dims."""
    sizes = [t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    return sizes[0] if sizes else None


def rows_of_batch(graph: ModelGraph) -> int | None:
    """Of the batch that was recorded."""
    sizes = [t.shape[0] for t in tensors_of(graph.calls[ROOT].given) if t.dim()]
    return sizes[0] if sizes else None


def rows_apart(model: nn.Module, place: Submesh, graph: ModelGraph) -> bool:
    """Whether the data ranks of a place can each run their own rows, in this forward: every call of its modules then gives, of
    some rows, those rows of what it gives of all, and nothing else."""
    modules, rows = dict(model.named_modules()), rows_of_batch(graph)
    calls = [c for c in graph.calls.values() if c.module in place.modules]
    if rows is None or rows < place.data or not calls or any(c.fresh or c.stashed for c in calls):
        return False
    divided = Divided(rows, place.data, model)
    return all(_call_apart(modules[c.module], c, divided) for c in calls)


class Divided:
    """So many rows, in so many shares."""

    def __init__(self, rows: int, shares: int, model: nn.Module) -> None:
        self.rows, self.layout = rows, even_shard(0, rows, shares)
        self._names = {id(m): n for n, m in model.named_modules()}

    @property
    def fewer(self) -> int:
        return self.layout.local(0)

    def has(self, t: Tensor) -> bool:
        return t.dim() > 0 and t.shape[0] == self.rows

    def cut_apart(self, run: Callable[..., Any], inputs: Any) -> bool:
        """Whether ``run`` gives rows cut as those it is given, without moving any. ``inputs``: args and kwargs."""
        ledger = Ledger()
        dispatcher = Dispatcher(PlannedAxis("rows", self.layout.ranks, 0, ledger), ledger, self._names)

        def by_rows(t: Tensor) -> Tensor:
            if not self.has(t) or isinstance(t, nn.Parameter):
                return t
            return GlobalTensor(t.detach().new_empty((self.fewer, *t.shape[1:])), self.layout, dispatcher)

        with SpmdMode(dispatcher, lambda x: None).on():
            args, kwargs = pytree.tree_map_only(Tensor, by_rows, inputs)
            outputs = tensors_of(run(*args, **kwargs))
        cut_as_given = all(isinstance(t, GlobalTensor) and t._mw_layout == self.layout for t in outputs)
        return cut_as_given and not ledger.calls and not ledger.fallbacks

    def some(self, inputs: Any) -> Any:
        """What is given, with fewer rows."""
        return map_tensors(lambda t: t[: self.fewer] if self.has(t) and not isinstance(t, nn.Parameter) else t, inputs)


class _Constants(FunctionMode):
    """What torch functions are called with besides tensors, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_fact(func):
            leaves = [x for x in pytree.tree_leaves((args, kwargs or {})) if not isinstance(x, Tensor)]
            self.found.append((label_of(func), leaves))
        return func(*args, **(kwargs or {}))


def _alike(whole: _Constants, fewer: _Constants) -> bool:
    if len(whole.found) != len(fewer.found):
        return False
    pairs = zip(whole.found, fewer.found, strict=True)
    return all(a == b or (a[0] == b[0] and a[0] in _SHAPED) for a, b in pairs)


def _call_apart(module: nn.Module, call: Call, rows: Divided) -> bool:
    inputs = [t for t in tensors_of(call.given) if rows.has(t)]
    outputs = tensors_of(call.returned)
    if not inputs or not all(map(rows.has, outputs)) or not _plain(call.given):
        return False
    try:
        with torch.no_grad(), Shadow(), Meeting():
            if not rows.cut_apart(module, call.given):
                return False
            args, kwargs = rows.some(call.given)
            with _Constants() as fewer:
                shorter = tensors_of(module(*args, **kwargs))
            args, kwargs = call.given
            with _Constants() as whole:
                module(*args, **kwargs)
    except Exception:  # what a module makes of fewer rows need not make sense to it: then it gets all
        return False
    return len(shorter) == len(outputs) and all(len(t) == rows.fewer for t in shorter) and _alike(whole, fewer)


def _plain(value: Any) -> bool:
    """Whether pytree knows all of it: other containers would be written to."""
    return all(isinstance(x, (Tensor, int, float, str, bool, type(None))) for x in pytree.tree_leaves(value))


class _Finder(Tracer):
    """Tries each plain function of a forward: those that give, of some rows, those rows of what they give of all."""

    def __init__(self, model: nn.Module, graph: ModelGraph, rows: Divided) -> None:
        super().__init__(slot_tensors(model, graph.carried))
        self.graph, self.rows, self.found = graph, rows, set[int]()

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.follow(path, forward.run, args, kwargs)

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        position = self.graph.positions.get((path, index))
        if position is not None and self._apart(self.graph.events[position], func, args, kwargs, tensors):
            self.found.add(position)
        result = func(*args, **kwargs)
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and not any(t is x for x in tensors):
                self.name_value(t, None)
        return result

    def _apart(
        self, event: Event, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> bool:
        if not event.plain or event.written is not None or not all(self.rows.has(t) for t in tensors if self.known(t)):
            return False
        try:
            with torch.no_grad():
                few, named = self.rows.some((args, kwargs))
                fewer = tensors_of(func(*sized(func, few, self.rows.rows, self.rows.fewer), **named))
                return all(len(t) == self.rows.fewer for t in fewer) and self.rows.cut_apart(func, (args, kwargs))
        except Exception:
            return False


def events_by_rows(model: nn.Module, run: Callable[[nn.Module], Any], graph: ModelGraph) -> frozenset[int]:
    """The positions of plain functions of a forward of which data ranks can each run their own rows: those of modules apart.

    Args:
        run: the forward that ``graph`` was recorded of.
    """
    rows = rows_of_batch(graph)
    if rows is None or rows < 2:
        return frozenset()
    finder = _Finder(model, graph, Divided(rows, 2, model))
    with torch.enable_grad(), Shadow(), Meeting(), following(model, finder):
        run(model)
    return frozenset(finder.found)
