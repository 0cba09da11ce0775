"""``LocalProgram``: a recorded block as one function of local tensors. ``Binding``: finds its inputs, and wraps its results."""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph

from meshwright.described import is_sparse
from meshwright.layout import Shard
from meshwright.private import pytree, raw_local, storage_of, unhooked, version
from meshwright.replay.nodes import AUTOCAST_DEVICES, CallUnderMode, InputSource, MoveCall, Node, Value
from meshwright.spmd.alias import Memory
from meshwright.spmd.comm import Fallback
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import LocalPartLookup, SpmdMode
from meshwright.spmd.tensor import GlobalTensor, Spec, local_of, spec_of, wrapping

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Result:
    """A tensor that a block returns.

    Attributes:
        number: the number of its local tensor; None if it is an argument.
        spec: its Spec, if it is a global tensor; ``dispatcher``: its dispatcher.
        argument: if the block returns an argument, the number of the argument.
        memory: results with the same number share memory; ``-1 - i`` is the memory of argument i; None: no shared memory.
    """

    number: int | None
    spec: Spec | None = None
    dispatcher: Dispatcher | None = None
    argument: int | None = None
    memory: int | None = None


@dataclass(frozen=True)
class MemoizedMove:
    """A move of an argument, parameter or result that the call made and whose result is memoized, so that it is made only once.

    Attributes:
        tensor: which tensor was moved: an argument's number, ``("result", its number)``, or ``(kind, module, name)``.
        kind: the name of the move.
        grad: whether it was made with gradients.
        number: the number of the moved tensor.
    """

    tensor: Any
    kind: str
    grad: bool
    number: int


@dataclass(frozen=True)
class Expected:
    """The facts of a parameter, buffer or attribute when the block was recorded. A replay needs the same.

    Attributes:
        source: which one.
        form: its Spec; for a plain tensor (shape, dtype, device, strides).
        trains: whether it requires a gradient.
        moves: the moves of it that had been made.
    """

    source: InputSource
    form: Hashable
    trains: bool
    moves: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalProgram:
    """A block's forward on this rank.

    Attributes:
        nodes: the calls, in order.
        inputs: (number, source), in the order of the function's arguments.
        expected: the facts that parameters, buffers and attributes must have.
        results: the tensors that the block returns.
        returned: (pytree spec, leaves) of the block's result; a leaf is the number of a result, or a ``Constant``. The spec is
            None if the result is one leaf.
        memoized: moves whose results are memoized after the call.
        fallbacks: (fallback, count) of one call, for the ledger.
        uneven: whether ranks hold shares of different sizes of an argument.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[tuple[int, InputSource], ...]
    expected: tuple[Expected, ...]
    results: tuple[Result, ...]
    returned: tuple[Any, tuple[Any, ...]]
    memoized: tuple[MemoizedMove, ...]
    fallbacks: tuple[tuple[Fallback, int], ...]
    uneven: bool = False

    @property
    def structure(self) -> Hashable:
        """A value that is equal for programs that do the same."""
        nodes = tuple(node.structure for node in self.nodes)
        return (
            nodes,
            self.inputs,
            self.expected,
            self.results,
            self.returned,
            self.memoized,
            self.fallbacks,
            self.uneven,
        )

    def wanted(self) -> tuple[int, ...]:
        """The numbers of the tensors that the function returns: results, then memoized moves."""
        numbers = [r.number for r in self.results if r.number is not None and r.argument is None]
        return tuple(dict.fromkeys([*numbers, *(m.number for m in self.memoized)]))

    def graph(self) -> Graph:
        """The program as an ``fx`` graph: one placeholder for each input, one call for each node, a tuple at the end."""
        graph = Graph()
        names = iter(_unique(_name_of(source) for _, source in self.inputs))
        at = {number: graph.placeholder(next(names)) for number, _ in self.inputs}
        for node in self.nodes:
            args, kwargs = pytree.tree_map_only(Value, lambda v: at[v.number], (node.args, node.kwargs))
            called = graph.call_function(_findable(node.target), args, kwargs)
            called.meta["node"] = node
            if not node.several:
                if node.results and node.results[0] is not None:
                    at[node.results[0]] = called
            else:
                for i, number in enumerate(node.results):
                    if number is not None:
                        at[number] = graph.call_function(operator.getitem, (called, i))
        graph.output(tuple(at[n] for n in self.wanted()))
        return graph

    def text(self) -> str:
        """The program as code: each line with the collective's axis and bytes, and the model's source line."""
        return "\n".join(_lines(self))


def _findable(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch under a name by which a graph's code finds it.

    ``torch.tensordot`` is a function of Python that calls one of C of this name, with other arguments. The code would have
    the first for both.
    """
    name = getattr(target, "__name__", "")
    if not isinstance(target, BuiltinFunctionType) or not isinstance(getattr(torch, name, None), FunctionType):
        return target

    def of_c(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    of_c.__name__ = name
    return of_c


def compiled(graph: Graph) -> Function:
    """A graph as a Python function."""
    code = graph.python_code("self")
    space: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<a local program>", "exec"), space)
    forward = space["forward"]
    if any(isinstance(node.target, CallUnderMode) and node.target.autocast for node in graph.nodes):
        return partial(_with_casts, forward)
    return lambda *inputs: forward(None, *inputs)


def _with_casts(forward: Callable[..., Any], *inputs: Any) -> Any:
    """Calls a program whose functions run under autocast. Autocast keeps the casts of parameters until the model's ``with``
    ends, which a program does not have: kept on, they would be those of this step for ever."""
    try:
        return forward(None, *inputs)
    finally:
        if not any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
            torch.clear_autocast_cache()


# --- a call -----------------------------------------------------------------------------------------------------------


def moves_of(t: Any) -> dict[str, Any]:
    """The moves of a tensor that have been made: name → (version of the tensor, with gradients, the moved tensor)."""
    if type(t) is GlobalTensor:
        return t._mw_memo
    attributes = getattr(t, "__dict__", None)
    return {k: v for k, v in attributes.items() if k.startswith("_mw_entered")} if attributes else {}


def valid_moves(t: Any) -> tuple[str, ...]:
    """The names of the moves of a tensor that still hold: the tensor was not written since."""
    moves = moves_of(t)
    if not moves:
        return ()
    state = _written(t)
    return tuple(sorted(kind for kind, memo in moves.items() if type(memo) is tuple and memo[0] == state))


def _written(t: Any) -> int | None:
    written = version(local_of(t))
    if written is not None and type(t) is GlobalTensor and t._mw_memory is not None:
        written += t._mw_memory.written
    return written


def is_uneven(known: Any) -> bool:
    """Whether a layout, or the layout of a Spec, gives ranks shares of different sizes. False for any other value."""
    layout = known.layout if isinstance(known, Spec) else known
    return isinstance(layout, Shard) and len({layout.local(rank) for rank in range(layout.ranks)}) > 1


def form_of(t: Tensor) -> Hashable:
    """The facts of a tensor on which decisions depend, without ``requires_grad``."""
    if type(t) is GlobalTensor:
        return spec_of(t)
    return t.shape, t.dtype, t.device, t.layout, None if is_sparse(t) else t.stride()


class Binding:
    """A program for the modules of one block. Blocks of one kind share the program, and each has a binding.

    Args:
        program: the program.
        function: the program's compiled function.
        block: the block's module.
    """

    def __init__(self, program: LocalProgram, function: Function, block: nn.Module) -> None:
        self.program, self._function = program, function
        wanted = {number: i for i, number in enumerate(program.wanted())}
        self._expected = [(*_table(block, g.source), g) for g in program.expected]
        self._index = {g.source: i for i, g in enumerate(program.expected)}
        self._fetch = [self._fetching(source) for _, source in program.inputs]
        self._known: list[_Known | None] = [None] * len(self._expected)  # what each was when it was looked at last
        self._quiet = all(isinstance(m.tensor, int) or m.tensor[0] == "result" for m in program.memoized)
        self._one = self._single()
        self._make = [self._making(r, wanted) for r in program.results]
        self._memoized = [(m, wanted[m.number]) for m in program.memoized]
        self._cached: _CachedInputs | None = None

    def __call__(self, view: SpmdMode, tensors: Sequence[Tensor]) -> Any:
        """The block's result; ``NotImplemented`` if a parameter, buffer or attribute has changed. Modes must be off.

        Args:
            view: the SPMD mode of the call.
            tensors: the tensors among the call's arguments.
        """
        lookup, cached = view.local, self._cached
        if cached is not None and cached.holds(lookup):
            module_tensors: Sequence[Tensor] = cached.module_tensors
            inputs = cached.inputs(tensors)
        else:
            current = self._look(lookup)
            if current is None:
                return NotImplemented
            module_tensors = current
            inputs = [self._input(kind, at, move, tensors, module_tensors) for kind, at, move in self._fetch]
            self._cached = self._cacheable(lookup, module_tensors, inputs)
        outs = self._function(*inputs)
        if self._one is not None:
            return self._one(outs[0])
        return self._results(view, tensors, module_tensors, outs)

    def _look(self, lookup: LocalPartLookup) -> list[Tensor] | None:
        """The local parts of parameters, buffers and attributes; None if one of them has not the expected facts."""
        module_tensors, known = [], self._known
        for i, (table, name, expected) in enumerate(self._expected):
            p: Any = table.get(name)
            part = known[i].part(p) if known[i] is not None else None  # type: ignore[union-attr]
            if part is None:
                part = p
                if type(p) is not Tensor and p is not None and (local := lookup(p)) is not None:
                    part = local
                if part is None or not _has_facts(part, expected):
                    return None
                known[i] = _Known.of(p, part, expected) if self._quiet else None
            module_tensors.append(part)
        return module_tensors

    def _cacheable(
        self, lookup: LocalPartLookup, module_tensors: list[Tensor], inputs: list[Any]
    ) -> _CachedInputs | None:
        """The inputs of this call as a cache for later calls; None if they may change without notice."""
        places = [
            (table, name, table[name], known, expected)
            for (table, name, expected), known in zip(self._expected, self._known, strict=True)
        ]
        unknown = ((p, expected) for _, _, p, known, expected in places if known is None)
        if lookup.version is None or any(type(p) is not Tensor or expected.moves for p, expected in unknown):
            return None
        tables = [(table, name, p) for table, name, p, _, _ in places]
        others = [(p, expected) for _, _, p, known, expected in places if known is None]
        changing = [(i, at, move) for i, (kind, at, move) in enumerate(self._fetch) if kind]
        return _CachedInputs(lookup.version, tables, others, module_tensors, inputs, changing)

    def _fetching(self, source: InputSource) -> tuple[bool, int, str]:
        if source.kind == "argument" or (source.kind == "move" and isinstance(source.at, int)):
            return True, source.at, source.move
        place = InputSource(source.at[0], source.at[1:]) if source.kind == "move" else source
        return False, self._index[place], source.move

    def _input(
        self, kind: bool, at: int, move: str, tensors: Sequence[Tensor], module_tensors: Sequence[Tensor]
    ) -> Any:
        return _local(tensors[at] if kind else module_tensors[at], move)

    def _single(self) -> Callable[[Tensor], Any] | None:
        """A function that makes the block's result from the program's, if it is one tensor that shares no memory, and no
        moves or fallbacks are to be recorded; else None."""
        program = self.program
        if len(program.results) != 1 or program.memoized or program.fallbacks or program.returned[1] != (0,):
            return None
        result = program.results[0]
        if result.argument is not None or result.memory is not None or program.returned[0] is not None:
            return None
        if result.spec is None:
            return lambda out: out
        wrap, dispatcher = wrapping(result.spec), result.dispatcher
        return lambda out: wrap(out, dispatcher)

    def _results(
        self, view: SpmdMode, tensors: Sequence[Tensor], module_tensors: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Any:
        memories: dict[int, Memory] = {}
        results = [make(tensors, outs, memories) for make in self._make]
        for move, at in self._memoized:
            if isinstance(move.tensor, int):
                moved: Any = tensors[move.tensor]
            elif move.tensor[0] == "result":
                moved = results[move.tensor[1]]
            else:
                moved = module_tensors[self._index[InputSource(move.tensor[0], move.tensor[1:])]]
            memo = (_written(moved), move.grad, outs[at])
            if type(moved) is GlobalTensor:
                moved._mw_memo[move.kind] = memo
            else:
                vars(moved)[move.kind] = memo
        for fallback, count in self.program.fallbacks:
            view.dispatcher.ledger.fallbacks[fallback] += count
        spec, slots = self.program.returned
        leaves = [results[x] if type(x) is int else x.value for x in slots]
        return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)

    def _making(self, result: Result, wanted: Mapping[int, int]) -> Callable[..., Tensor]:
        """A function that makes a result from (the call's tensors, the function's results, memories by number)."""
        if (argument := result.argument) is not None:
            return lambda tensors, outs, memories: tensors[argument]
        assert result.number is not None
        at, spec, dispatcher, number = wanted[result.number], result.spec, result.dispatcher, result.memory
        if spec is None:
            return lambda tensors, outs, memories: outs[at]
        wrap = wrapping(spec)
        if number is None:
            return lambda tensors, outs, memories: wrap(outs[at], dispatcher)

        def sharing(tensors: Sequence[Any], outs: Sequence[Tensor], memories: dict[int, Memory]) -> Tensor:
            memory = memories.get(number)
            if memory is None:
                memory = Memory()
                if number < 0:
                    source = tensors[-1 - number]
                    memory = source._mw_memory = source._mw_memory or memory
                memories[number] = memory
            return wrap(outs[at], dispatcher, memory)

        return sharing


def _local(t: Any, move: str) -> Any:
    """The input of a program for a tensor: its local tensor, or the result of the move of this name."""
    return moves_of(t)[move][2] if move else local_of(t)


class _CachedInputs:
    """The inputs of a program that come from parameters, buffers and attributes. They hold as long as
    ``LocalPartLookup.version`` does.

    Args:
        lookup_version: ``LocalPartLookup.version``.
        tables: (dict of a module, a name in it, the tensor there) for each parameter, buffer and attribute.
        others: the buffers and attributes among them, which are compared in each call, with their expected facts.
        module_tensors: the local parts of all of them.
        inputs: the program's inputs in this call.
        arguments: (index of an input, number of the argument from which it comes, name of the move or ""), for each input that
            comes from an argument.
    """

    __slots__ = ("_arguments", "_ids", "_inputs", "_lookup_version", "_others", "_tables", "module_tensors")

    def __init__(
        self,
        lookup_version: object,
        tables: list[tuple[dict[str, Any], str, Any]],
        others: list[tuple[Tensor, Expected]],
        module_tensors: list[Tensor],
        inputs: list[Any],
        arguments: list[tuple[int, int, str]],
    ) -> None:
        self._lookup_version, self._tables, self._others = lookup_version, tables, others
        self._arguments, self.module_tensors = arguments, module_tensors
        self._ids = frozenset(id(p) for _, _, p in tables)
        self._inputs = inputs.copy()
        for i, _, _ in arguments:
            self._inputs[i] = None  # do not keep the activations of this call alive

    def holds(self, lookup: LocalPartLookup) -> bool:
        """Whether all tensors are the same as before, and no part may have got a memoized move in this forward."""
        if lookup.version is not self._lookup_version or not self._ids.isdisjoint(lookup.requested_ids):
            return False
        for table, name, p in self._tables:
            if table.get(name) is not p:
                return False
        return all(_has_facts(t, expected) for t, expected in self._others)

    def inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The program's inputs for a call with these tensors among its arguments."""
        inputs = self._inputs.copy()
        for i, at, move in self._arguments:
            inputs[i] = _local(tensors[at], move)
        return inputs


@dataclass(frozen=True)
class Constant:
    """A leaf of a block's result that is no tensor."""

    value: Any


class _Known:
    """A parameter and its local part. The part stays the same as long as nothing about the parameter changes."""

    __slots__ = ("_form", "_parameter", "_part", "_storage_tensor", "_trains")

    def __init__(self, p: DTensor, part: Tensor, expected: Expected) -> None:
        self._parameter = p  # no weak reference: torch refuses to swap a tensor that has one, and parametrize swaps
        self._storage_tensor, self._part = weakref.ref(raw_local(p)), weakref.ref(part)
        self._form, self._trains = expected.form, expected.trains

    @classmethod
    def of(cls, p: Any, part: Tensor, expected: Expected) -> _Known | None:
        """The entry for a parameter; None if its part is made anew in each forward."""
        if not isinstance(p, DTensor) or expected.moves or not unhooked(p):
            return None
        local = local_of(part)
        lasts = local.is_leaf and storage_of(local) == storage_of(raw_local(p))
        return cls(p, part, expected) if lasts else None

    def part(self, p: Any) -> Tensor | None:
        """The local part of ``p``; None if it may have changed. Function modes must be off."""
        if p is None or p is not self._parameter or p.requires_grad is not self._trains:
            return None
        if raw_local(p) is not self._storage_tensor():
            return None
        part: Any = self._part()
        if part is None or not unhooked(p):
            return None
        if type(part) is GlobalTensor:
            return part if part._mw_spec is self._form and not part._mw_memo else None
        # A plain part has one attribute, which says that it is a parameter. Others are memoized moves.
        return part if len(vars(part)) == 1 else None


def _table(block: nn.Module, source: InputSource) -> tuple[dict[str, Any], str]:
    """(the module's dict that holds a parameter, buffer or attribute, its name there)."""
    path, name = source.at
    module = block.get_submodule(path)
    table = {"parameter": module._parameters, "buffer": module._buffers, "attribute": vars(module)}[source.kind]
    return table, name  # type: ignore[return-value]


def _has_facts(t: Any, expected: Expected) -> bool:
    """Whether a parameter, buffer or attribute has the facts that it had when the block was recorded."""
    if type(t) is GlobalTensor:
        if spec_of(t) is not expected.form or t._mw_local.requires_grad is not expected.trains:
            return False
    elif isinstance(t, DTensor) or form_of(t) != expected.form or t.requires_grad is not expected.trains:
        return False
    return valid_moves(t) == expected.moves


# --- code to read -----------------------------------------------------------------------------------------------------


def _name_of(source: InputSource) -> str:
    if source.kind == "argument":
        return f"x{source.at}"
    if isinstance(source.at, int):
        return f"x{source.at}_moved"
    *_, path, name = source.at
    words = re.sub(r"\W", "_", f"{path}.{name}" if path else str(name))
    return ("" if words[0].isalpha() else "m") + words + ("_moved" if source.kind == "move" else "")


def _unique(names: Iterator[str]) -> list[str]:
    """The names, with a suffix for each that occurred before."""
    unique: list[str] = []
    for name in names:
        same = [n for n in unique if n == name or n.startswith(f"{name}__")]
        unique.append(f"{name}__{len(same)}" if same else name)
    return unique


def _lines(program: LocalProgram) -> Iterator[str]:
    graph = program.graph()
    nodes = {call.name: call.meta["node"] for call in graph.nodes if "node" in call.meta}
    for line in graph.python_code("self").src.strip().splitlines():
        text = line.split(";")[0].rstrip()
        node = nodes.get(text.strip().partition(" ")[0])  # a statement begins with the name of its graph node
        yield text if node is None else f"{text:<96}  # {_note(node)}"


def _note(node: Node) -> str:
    target = node.target.function if isinstance(node.target, CallUnderMode) else node.target
    moved = f"{node.bytes} bytes over {target.axis.name}; " if isinstance(target, MoveCall) and node.bytes else ""
    return f"{moved}{node.line}"


__all__ = ["Binding", "Expected", "LocalProgram", "MemoizedMove", "Result", "compiled", "is_uneven"]
