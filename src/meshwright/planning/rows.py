"""Whether each data rank of a branch can run only its own rows. Three runs of the branch on meta must all agree:

    with sharded rows     under the SPMD mode: nothing is gathered, and results are sharded by rows as the inputs are
    with fewer rows       the results have as many rows as the inputs
    both compared         the same functions with the same constants, except sizes in shapes: a result that is divided by the
                          number of rows would have another constant

If one of them fails, each rank runs all rows: this is right as well, but not faster.
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
from meshwright.graph import ROOT, Call, Event, ModelGraph, Path, Segment
from meshwright.layout import even_shard
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.shadow import Shadow
from meshwright.private import pytree
from meshwright.spmd.autograd_functions import FunctionMode
from meshwright.spmd.comm import Ledger, PlannedAxis
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor
from meshwright.spmd.torch_functions import is_fact, label_of
from meshwright.submesh import Submesh

# Functions whose constants may depend on the number of rows: the constants are sizes of the result's shape.
_SHAPED = frozenset(
    "view reshape expand broadcast_to unflatten zeros ones empty new_zeros new_ones new_empty rand randn".split()
)


def rows_of(batch: Any) -> int | None:
    """The number of rows of a batch: the size of dim 0 of its first tensor that has dims; None without such a tensor."""
    sizes = [t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    return sizes[0] if sizes else None


def rows_of_batch(graph: ModelGraph) -> int | None:
    """The number of rows of the batch with which ``graph`` was recorded; None if unknown."""
    sizes = [t.shape[0] for t in tensors_of(graph.calls[ROOT].arguments) if t.dim()]
    return sizes[0] if sizes else None


def rows_apart(model: nn.Module, place: Submesh, graph: ModelGraph) -> bool:
    """Whether each data rank of a place can run only its own rows in this forward: for every call of its modules, the result
    for some rows is the same as these rows of the result for all rows, and the call has no other effect."""
    modules, rows = dict(model.named_modules()), rows_of_batch(graph)
    calls = [c for c in graph.calls.values() if c.module in place.modules]
    if rows is None or rows < place.data or not calls or any(c.fresh or c.stashed for c in calls):
        return False
    divided = DividedRows(rows, place.data, model)
    return all(_call_apart(modules[c.module], c, divided) for c in calls)


class DividedRows:
    """``rows`` rows, divided into ``shares`` shares."""

    def __init__(self, rows: int, shares: int, model: nn.Module) -> None:
        self.rows, self.layout = rows, even_shard(0, rows, shares)
        self._names = {id(m): n for n, m in model.named_modules()}

    @property
    def fewer(self) -> int:
        return self.layout.local(0)

    def has(self, t: Tensor) -> bool:
        return t.dim() > 0 and t.shape[0] == self.rows

    def keeps_rows_apart(self, run: Callable[..., Any], inputs: Any) -> bool:
        """Whether ``run`` returns tensors sharded by rows as its inputs are, without a collective. ``inputs``: (args,
        kwargs)."""
        ledger = Ledger()
        dispatcher = Dispatcher(PlannedAxis("rows", self.layout.ranks, 0, ledger), ledger, self._names)

        def by_rows(t: Tensor) -> Tensor:
            if not self.has(t) or isinstance(t, nn.Parameter):
                return t
            return GlobalTensor(t.detach().new_empty((self.fewer, *t.shape[1:])), self.layout, dispatcher)

        with SpmdMode(dispatcher, lambda x: None).on():
            args, kwargs = pytree.tree_map_only(Tensor, by_rows, inputs)
            outputs = tensors_of(run(*args, **kwargs))
        sharded_by_rows = all(isinstance(t, GlobalTensor) and t._mw_layout == self.layout for t in outputs)
        return sharded_by_rows and not ledger.calls and not ledger.fallbacks

    def some(self, inputs: Any) -> Any:
        """The inputs with the rows of the first share only."""
        return map_tensors(lambda t: t[: self.fewer] if self.has(t) and not isinstance(t, nn.Parameter) else t, inputs)


class _Constants(FunctionMode):
    """Records the arguments of torch functions that are no tensors.

    Attributes:
        calls: (function, its constants) of each call, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_fact(func):
            leaves = [x for x in pytree.tree_leaves((args, kwargs or {})) if not isinstance(x, Tensor)]
            self.calls.append((label_of(func), leaves))
        return func(*args, **(kwargs or {}))


def _alike(all_rows: _Constants, some_rows: _Constants) -> bool:
    if len(all_rows.calls) != len(some_rows.calls):
        return False
    pairs = zip(all_rows.calls, some_rows.calls, strict=True)
    return all(a == b or (a[0] == b[0] and a[0] in _SHAPED) for a, b in pairs)


def _call_apart(module: nn.Module, call: Call, rows: DividedRows) -> bool:
    inputs = [t for t in tensors_of(call.arguments) if rows.has(t)]
    outputs = tensors_of(call.returned)
    if not inputs or not all(map(rows.has, outputs)) or not _plain(call.arguments):
        return False
    try:
        with torch.no_grad(), Shadow(), MetaFunctions():
            if not rows.keeps_rows_apart(module, call.arguments):
                return False
            args, kwargs = rows.some(call.arguments)
            with _Constants() as some_rows:
                some_outputs = tensors_of(module(*args, **kwargs))
            args, kwargs = call.arguments
            with _Constants() as all_rows:
                module(*args, **kwargs)
    except Exception:  # a module may fail on fewer rows: then it gets all
        return False
    return (
        len(some_outputs) == len(outputs)
        and all(len(t) == rows.fewer for t in some_outputs)
        and _alike(all_rows, some_rows)
    )


def _plain(value: Any) -> bool:
    """Whether every leaf is a tensor or a constant. The runs here could change an unknown container."""
    return all(isinstance(x, (Tensor, int, float, str, bool, type(None))) for x in pytree.tree_leaves(value))


class _Finder(Tracer):
    """Tests each plain function of a forward: whether its result for some rows is these rows of its result for all rows.

    Attributes:
        by_rows: positions of the events for which this is so.
    """

    def __init__(self, model: nn.Module, graph: ModelGraph, rows: DividedRows) -> None:
        super().__init__(slot_tensors(model, graph.carried))
        self.graph, self.rows, self.by_rows = graph, rows, set[int]()

    def is_hiding(
        self, code_call: Segment, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """See ``Tracer``."""
        return code_call in self.graph.hiding

    def entered(self, path: Path, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.follow(path, forward.run, args, kwargs)

    def event(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], path: Path, index: int
    ) -> Any:
        position = self.graph.positions.get((path, index))
        if position is not None and self._apart(self.graph.events[position], func, args, kwargs, tensors):
            self.by_rows.add(position)
        result = func(*args, **kwargs)
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) and not any(t is x for x in tensors):
                self.name_value(t, None)
        return result

    def _apart(
        self, event: Event, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> bool:
        if not event.plain or event.written is not None:
            return False
        if not all(self.rows.has(t) for t in tensors if self.is_value(t)):
            return False
        try:
            with torch.no_grad():
                some_args, some_kwargs = self.rows.some((args, kwargs))
                some_args = sized(func, some_args, self.rows.rows, self.rows.fewer)
                outputs = tensors_of(func(*some_args, **some_kwargs))
                return all(len(t) == self.rows.fewer for t in outputs) and self.rows.keeps_rows_apart(
                    func, (args, kwargs)
                )
        except Exception:
            return False


def events_by_rows(model: nn.Module, run: Callable[[nn.Module], Any], graph: ModelGraph) -> frozenset[int]:
    """The positions of plain functions in a forward for which each data rank can run only its own rows. (Modules: see
    ``rows_apart``.)

    Args:
        run: the forward of which ``graph`` is the record.
    """
    rows = rows_of_batch(graph)
    if rows is None or rows < 2:
        return frozenset()
    finder = _Finder(model, graph, DividedRows(rows, 2, model))
    with torch.enable_grad(), Shadow(), MetaFunctions(), following(model, finder):
        run(model)
    return frozenset(finder.by_rows)
