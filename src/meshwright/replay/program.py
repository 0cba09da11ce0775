"""``LocalProgram``: a recorded block as one function of local tensors, and how its inputs are found and its results wrapped."""

from __future__ import annotations

import operator
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph

from meshwright.layout import Shard
from meshwright.private import held_of, pytree, storage_of, unhooked, version
from meshwright.replay.nodes import Move, Node, Source, Under, Value
from meshwright.spmd.alias import Memory
from meshwright.spmd.comm import Fallback
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import Parts, SpmdMode
from meshwright.spmd.tensor import GlobalTensor, Spec, local_of, spec_of, wrapping

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Result:
    """A tensor that a block returns.

    Attributes:
        number: of its local tensor.
        known: its Spec, if it is a global tensor.
        dispatcher: of it.
        itself: the argument that it is, if the block hands one on.
        memory: results of one number share a memory; that of an argument is ``-1 - its number``; None: its own.
    """

    number: int | None
    known: Spec | None = None
    dispatcher: Dispatcher | None = None
    itself: int | None = None
    memory: int | None = None


@dataclass(frozen=True)
class MoveLeft:
    """A collective of a tensor from outside, or of a result, that is to be known after the call: it is made once.

    Attributes:
        of: the argument's number, ``("result", its number)``, or a parameter's place.
        kind: the name of the move.
        grad: whether it was made with gradients.
        number: of what it gave.
    """

    of: Any
    kind: str
    grad: bool
    number: int


@dataclass(frozen=True)
class Given:
    """What a parameter or buffer was when the block was recorded.

    Attributes:
        source: where it stands.
        form: Spec, or shape, type and strides, of its local tensor.
        trains: whether it has a gradient.
        moves: which moves of it had been made.
    """

    source: Source
    form: Hashable
    trains: bool
    moves: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalProgram:
    """A block's forward on this rank.

    Attributes:
        nodes: in order.
        inputs: (number, where from), in the order of the function's arguments.
        kept: what parameters, buffers and attributes have to be.
        results: the tensors that come out.
        returned: how they stand in what the block returns, with its constants.
        left: moves that are known afterwards.
        fallbacks: of one call, for the ledger.
        uneven: whether ranks hold shares of different sizes of an argument.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[tuple[int, Source], ...]
    kept: tuple[Given, ...]
    results: tuple[Result, ...]
    returned: tuple[Any, tuple[Any, ...]]
    left: tuple[MoveLeft, ...]
    fallbacks: tuple[tuple[Fallback, int], ...]
    uneven: bool = False

    @property
    def structure(self) -> Hashable:
        """Equal for programs that do the same."""
        nodes = tuple(node.structure for node in self.nodes)
        return nodes, self.inputs, self.kept, self.results, self.returned, self.left, self.fallbacks, self.uneven

    def wanted(self) -> tuple[int, ...]:
        """The numbers that the function gives: results, then moves that are left."""
        numbers = [r.number for r in self.results if r.number is not None and r.itself is None]
        return tuple(dict.fromkeys([*numbers, *(m.number for m in self.left)]))

    def graph(self) -> Graph:
        """The program as an ``fx`` graph: one placeholder for each input, one call for each node, a tuple at the end."""
        graph = Graph()
        names = iter(_unique(_name_of(source) for _, source in self.inputs))
        at = {number: graph.placeholder(next(names)) for number, _ in self.inputs}
        for node in self.nodes:
            args, kwargs = pytree.tree_map_only(Value, lambda v: at[v.number], (node.args, node.kwargs))
            made = graph.call_function(node.target, args, kwargs)
            made.meta["node"] = node
            if not node.several:
                if node.results and node.results[0] is not None:
                    at[node.results[0]] = made
            else:
                for i, number in enumerate(node.results):
                    if number is not None:
                        at[number] = graph.call_function(operator.getitem, (made, i))
        graph.output(tuple(at[n] for n in self.wanted()))
        return graph

    def text(self) -> str:
        """The program as code: each line with the collective's axis and bytes, and the model's source line."""
        return "\n".join(_lines(self))


def compiled(graph: Graph) -> Function:
    """A graph as a Python function."""
    code = graph.python_code("self")
    space: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<a local program>", "exec"), space)
    forward = space["forward"]
    return lambda *inputs: forward(None, *inputs)


# --- a call -----------------------------------------------------------------------------------------------------------


def moves_of(t: Any) -> dict[str, Any]:
    """Kind → (version, with gradients, what it gave) of the moves of a tensor that have been made."""
    if type(t) is GlobalTensor:
        return t._mw_memo
    noted = getattr(t, "__dict__", None)
    return {k: v for k, v in noted.items() if k.startswith("_mw_entered")} if noted else {}


def valid_moves(t: Any) -> tuple[str, ...]:
    """The kinds of moves of a tensor that still hold."""
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
    """Whether a layout, or that of a Spec, gives ranks shares of different sizes."""
    layout = known.layout if isinstance(known, Spec) else known
    return isinstance(layout, Shard) and len({layout.local(rank) for rank in range(layout.ranks)}) > 1


def form_of(t: Tensor) -> Hashable:
    """All of a tensor that decisions depend on, but its gradient."""
    if type(t) is GlobalTensor:
        return spec_of(t)
    return t.shape, t.dtype, t.device, t.stride()


class Binding:
    """A program on the modules of one block.

    Args:
        program: that of its kind.
        function: the program's, compiled.
        block: the module.
    """

    def __init__(self, program: LocalProgram, function: Function, block: nn.Module) -> None:
        self.program, self._function = program, function
        wanted = {number: i for i, number in enumerate(program.wanted())}
        self._kept = [(*_table(block, g.source), g) for g in program.kept]
        self._index = {g.source: i for i, g in enumerate(program.kept)}
        self._fetch = [self._fetching(source) for _, source in program.inputs]
        self._known: list[_Known | None] = [None] * len(self._kept)  # what each was when it was looked at last
        self._quiet = all(isinstance(m.of, int) or m.of[0] == "result" for m in program.left)
        self._one = self._single()
        self._make = [self._making(r, wanted) for r in program.results]
        self._left = [(m, wanted[m.number]) for m in program.left]
        self._settled: _Settled | None = None

    def __call__(self, view: SpmdMode, tensors: Sequence[Tensor]) -> Any:
        """What the block returns; ``NotImplemented`` if a parameter is not what it was. Modes are off."""
        parts, settled = view.local, self._settled
        if settled is not None and settled.holds(parts):
            kept: Sequence[Tensor] = settled.kept
            inputs = settled.inputs(tensors)
        else:
            looked = self._look(parts)
            if looked is None:
                return NotImplemented
            kept = looked
            inputs = [self._input(kind, at, move, tensors, kept) for kind, at, move in self._fetch]
            self._settled = self._settling(parts, kept, inputs)
        outs = self._function(*inputs)
        if self._one is not None:
            return self._one(outs[0])
        return self._results(view, tensors, kept, outs)

    def _look(self, parts: Parts) -> list[Tensor] | None:
        """Parameters, buffers and attributes as the program takes them; None if one of them is not what it was."""
        kept, known = [], self._known
        for i, (table, name, given) in enumerate(self._kept):
            p: Any = table.get(name)
            part = known[i].part(p) if known[i] is not None else None  # type: ignore[union-attr]
            if part is None:
                part = p
                if type(p) is not Tensor and p is not None and (local := parts(p)) is not None:
                    part = local
                if part is None or not _is_so(part, given):
                    return None
                known[i] = _Known.of(p, part, given) if self._quiet else None
            kept.append(part)
        return kept

    def _settling(self, parts: Parts, kept: list[Tensor], inputs: list[Any]) -> _Settled | None:
        """What was found, if it holds until somebody says otherwise."""
        places = [
            (table, name, table[name], known, given)
            for (table, name, given), known in zip(self._kept, self._known, strict=True)
        ]
        if parts.settled is None or any(
            known is None and (type(p) is not Tensor or given.moves) for _, _, p, known, given in places
        ):
            return None
        tables = [(table, name, p) for table, name, p, _, _ in places]
        others = [(p, given) for _, _, p, known, given in places if known is None]
        changing = [(i, at, move) for i, (kind, at, move) in enumerate(self._fetch) if kind]
        return _Settled(parts.settled, tables, others, kept, inputs, changing)

    def _fetching(self, source: Source) -> tuple[bool, int, str]:
        if source.kind == "argument" or (source.kind == "move" and isinstance(source.at, int)):
            return True, source.at, source.move
        place = Source(source.at[0], source.at[1:]) if source.kind == "move" else source
        return False, self._index[place], source.move

    def _input(self, kind: bool, at: int, move: str, tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> Any:
        return _local(tensors[at] if kind else kept[at], move)

    def _single(self) -> Callable[[Tensor], Any] | None:
        """What makes the result, if it is one tensor of its own memory and nothing else is left."""
        program = self.program
        if len(program.results) != 1 or program.left or program.fallbacks or program.returned[1] != (0,):
            return None
        result = program.results[0]
        if result.itself is not None or result.memory is not None or program.returned[0] is not None:
            return None
        if result.known is None:
            return lambda out: out
        wrap, dispatcher = wrapping(result.known), result.dispatcher
        return lambda out: wrap(out, dispatcher)

    def _results(
        self, view: SpmdMode, tensors: Sequence[Tensor], kept: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Any:
        memories: dict[int, Memory] = {}
        made = [make(tensors, outs, memories) for make in self._make]
        for move, at in self._left:
            if isinstance(move.of, int):
                of: Any = tensors[move.of]
            elif move.of[0] == "result":
                of = made[move.of[1]]
            else:
                of = kept[self._index[Source(move.of[0], move.of[1:])]]
            memo = (_written(of), move.grad, outs[at])
            if type(of) is GlobalTensor:
                of._mw_memo[move.kind] = memo
            else:
                vars(of)[move.kind] = memo
        for fallback, count in self.program.fallbacks:
            view.dispatcher.ledger.fallbacks[fallback] += count
        spec, slots = self.program.returned
        leaves = [made[x] if type(x) is int else x.value for x in slots]
        return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)

    def _making(self, result: Result, wanted: Mapping[int, int]) -> Callable[..., Tensor]:
        """(the tensors of a call, what the function gave, memories by number) → the result."""
        if (itself := result.itself) is not None:
            return lambda tensors, outs, memories: tensors[itself]
        assert result.number is not None
        at, known, dispatcher, number = wanted[result.number], result.known, result.dispatcher, result.memory
        if known is None:
            return lambda tensors, outs, memories: outs[at]
        wrap = wrapping(known)
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
    """What a program takes of a tensor: its local tensor, or what a move made of it."""
    return moves_of(t)[move][2] if move else local_of(t)


class _Settled:
    """Parameters as they were found, and the inputs that they are: they hold while ``Parts.settled`` does.

    Args:
        settled: ``Parts.settled``.
        tables: (a table of a module, a name in it, the parameter that stands there), for each.
        others: buffers and attributes among them, which are looked at in each call, with what they have to be.
        kept: their local parts.
        inputs: of the program.
        given: (the number of an input, of the argument that it is made of, of which move), for each that is no parameter.
    """

    __slots__ = ("_given", "_ids", "_inputs", "_others", "_settled", "_tables", "kept")

    def __init__(
        self,
        settled: object,
        tables: list[tuple[dict[str, Any], str, Any]],
        others: list[tuple[Tensor, Given]],
        kept: list[Tensor],
        inputs: list[Any],
        given: list[tuple[int, int, str]],
    ) -> None:
        self._settled, self._tables, self._others, self.kept, self._given = settled, tables, others, kept, given
        self._ids = frozenset(id(p) for _, _, p in tables)
        self._inputs = inputs.copy()
        for i, _, _ in given:
            self._inputs[i] = None  # else the activations of this call would live on

    def holds(self, parts: Parts) -> bool:
        """Whether all is as it was, and nothing may have been noted on a part in this forward."""
        if parts.settled is not self._settled or not self._ids.isdisjoint(parts.touched):
            return False
        for table, name, p in self._tables:
            if table.get(name) is not p:
                return False
        return all(_is_so(t, given) for t, given in self._others)

    def inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Of a call, given its tensors."""
        inputs = self._inputs.copy()
        for i, at, move in self._given:
            inputs[i] = _local(tensors[at], move)
        return inputs


@dataclass(frozen=True)
class Constant:
    """Something in what a block returns that is no tensor."""

    value: Any


class _Known:
    """A parameter and its local part, which is the same for as long as nothing about the parameter changes."""

    __slots__ = ("_form", "_held", "_of", "_part", "_trains")

    def __init__(self, p: DTensor, part: Tensor, given: Given) -> None:
        self._of = p  # not weakly: torch swaps no tensor that is weakly held, and parametrize swaps
        self._held, self._part = weakref.ref(held_of(p)), weakref.ref(part)
        self._form, self._trains = given.form, given.trains

    @classmethod
    def of(cls, p: Any, part: Tensor, given: Given) -> _Known | None:
        """None if the part is made anew in each forward."""
        if not isinstance(p, DTensor) or given.moves or not unhooked(p):
            return None
        local = local_of(part)
        lasts = local.is_leaf and storage_of(local) == storage_of(held_of(p))
        return cls(p, part, given) if lasts else None

    def part(self, p: Any) -> Tensor | None:
        """The local part; None if it may be another. Function modes are off."""
        if p is None or p is not self._of or held_of(p) is not self._held() or p.requires_grad is not self._trains:
            return None
        part: Any = self._part()
        if part is None or not unhooked(p):
            return None
        if type(part) is GlobalTensor:
            return part if part._mw_spec is self._form and not part._mw_memo else None
        return part if len(vars(part)) == 1 else None  # that it is a parameter, and nothing else, has been noted


def _table(block: nn.Module, source: Source) -> tuple[dict[str, Any], str]:
    """Where a parameter, a buffer or an attribute stands."""
    path, name = source.at
    module = block.get_submodule(path)
    table = {"parameter": module._parameters, "buffer": module._buffers, "attribute": vars(module)}[source.kind]
    return table, name  # type: ignore[return-value]


def _is_so(t: Any, given: Given) -> bool:
    """Whether a parameter, buffer or attribute is what it was when the block was recorded."""
    if type(t) is GlobalTensor:
        if spec_of(t) is not given.form or t._mw_local.requires_grad is not given.trains:
            return False
    elif isinstance(t, DTensor) or form_of(t) != given.form or t.requires_grad is not given.trains:
        return False
    return valid_moves(t) == given.moves


# --- code to read -----------------------------------------------------------------------------------------------------


def _name_of(source: Source) -> str:
    if source.kind == "argument":
        return f"x{source.at}"
    if isinstance(source.at, int):
        return f"x{source.at}_moved"
    *_, path, name = source.at
    words = re.sub(r"\W", "_", f"{path}.{name}" if path else str(name))
    return ("" if words[0].isalpha() else "m") + words + ("_moved" if source.kind == "move" else "")


def _unique(names: Iterator[str]) -> list[str]:
    """Names, of which none comes twice."""
    given: list[str] = []
    for name in names:
        same = [n for n in given if n == name or n.startswith(f"{name}__")]
        given.append(f"{name}__{len(same)}" if same else name)
    return given


def _lines(program: LocalProgram) -> Iterator[str]:
    graph = program.graph()
    known = {made.name: made.meta["node"] for made in graph.nodes if "node" in made.meta}
    for line in graph.python_code("self").src.strip().splitlines():
        text = line.split(";")[0].rstrip()
        node = known.get(text.strip().partition(" ")[0])  # a statement begins with the name of its graph node
        yield text if node is None else f"{text:<96}  # {_note(node)}"


def _note(node: Node) -> str:
    target = node.target.function if isinstance(node.target, Under) else node.target
    moved = f"{node.bytes} bytes over {target.axis.name}; " if isinstance(target, Move) and node.bytes else ""
    return f"{moved}{node.line}"


__all__ = ["Binding", "Given", "LocalProgram", "MoveLeft", "Result", "compiled", "is_uneven"]
