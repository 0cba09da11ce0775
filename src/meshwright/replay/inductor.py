"""A local program compiled by ``torch.compile``: one graph of torch's own operators, in which each collective is a custom op.

    move in the program      in the compiled graph
    copy_in                  an autograd function: nothing forward, ``meshwright::move`` of its conjugate backward
    any other                ``meshwright::move``, whose backward is ``meshwright::move`` of the conjugate, or nothing

An operator takes no Python objects. So a move is passed by its name: ``_MOVES`` has one entry for each move of each axis, as
long as a compiled program uses it. The op is opaque to the compiler, which neither runs it twice nor drops it. Ranks with equal
graphs call their collectives in the same order. A program for which ranks hold uneven shares is not compiled: the ranks' graphs
differ, so the compiler may order them differently.

Source: torch.library's custom operators (https://docs.pytorch.org/docs/stable/library.html).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function as AutogradFunction
from torch.fx import Graph, GraphModule, Node

from meshwright.replay.nodes import CallUnderMode, MoveCall
from meshwright.replay.program import LocalProgram, is_uneven
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis, Ledger, PlannedAxis
from meshwright.spmd.uncompiled import compiling

Function = Callable[..., tuple[Tensor, ...]]
_NOTHING = (redistribute.CopyIn, redistribute.Release)  # their forward returns its input


class NotCompiled(Exception):
    """A program cannot be compiled; the text says why."""


@dataclass(frozen=True, eq=False)
class _Kind:
    """A move as the operator finds it by name: a function of ``spmd/redistribute.py``, the axis, and further arguments."""

    function: type[redistribute.Move]
    axis: Axis
    options: tuple[Any, ...]
    name: str

    @classmethod
    def of(cls, function: type[redistribute.Move], axis: Axis, options: tuple[Any, ...]) -> _Kind:
        """The entry for a move; equal moves share one. It exists as long as the caller keeps it."""
        name = f"{function.__name__} {axis.name} {id(axis)} {options}"
        entry = _MOVES.get(name)
        if entry is None:
            entry = _MOVES[name] = cls(function, axis, options, name)
        return entry

    @cached_property
    def conjugate(self) -> _Kind:
        function, options = self.function.conjugate(*self.options)
        return _Kind.of(function, self.axis, options)


_MOVES: WeakValueDictionary[str, _Kind] = WeakValueDictionary()


def by_inductor(program: LocalProgram) -> Function:
    """A program as a function that ``torch.compile`` compiles at its first call.

    Raises:
        NotCompiled: the program has something that the compiler would change (see the head of this file).
    """
    layouts = (*(e.form for e in program.expected), *(r.spec for r in program.results))
    if program.uneven or any(map(is_uneven, layouts)):
        raise NotCompiled("ranks hold uneven shares")
    graph, moves = _with_operators(program.graph())
    run = torch.compile(GraphModule({}, graph), fullgraph=True, dynamic=False, options={"fallback_random": True})

    def called(*inputs: Tensor, moves: tuple[_Kind, ...] = moves) -> tuple[Tensor, ...]:  # ``moves``: keeps them alive
        with compiling():
            out: tuple[Tensor, ...] = run(*inputs)
        return out

    return called


def _with_operators(graph: Graph) -> tuple[Graph, tuple[_Kind, ...]]:
    """(a copy of the graph with the operator in place of each move; these moves)."""
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    moves = []
    for node in list(copied.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, CallUnderMode):
            raise NotCompiled("a part of it is without gradients, or in another autocast")
        if isinstance(node.target, MoveCall):
            moves.append(_replace(copied, node, node.target))
    copied.lint()
    return copied, tuple(moves)


def _replace(graph: Graph, node: Node, move: MoveCall) -> _Kind:
    if any(is_uneven(option) for option in move.options):
        raise NotCompiled("ranks hold uneven shares")
    kind = _Kind.of(move.function, move.axis, move.options)
    with graph.inserting_before(node):
        if kind.function in _NOTHING:
            operator = graph.call_function(begin, (*node.args, kind.conjugate.name))
        else:
            operator = graph.call_function(torch.ops.meshwright.move.default, (*node.args, kind.name))
    node.replace_all_uses_with(operator)
    graph.erase_node(node)
    return kind


@torch.library.custom_op("meshwright::move", mutates_args=())
def move(x: Tensor, name: str) -> Tensor:
    """Runs the forward of the move of this name. Its backward is registered below."""
    kind = _MOVES[name]
    return kind.function.compute(x, kind.axis, *kind.options)


@move.register_fake
def _(x: Tensor, name: str) -> Tensor:
    kind = _MOVES[name]
    axis = PlannedAxis(kind.axis.name, kind.axis.size, kind.axis.rank, Ledger())
    return kind.function.compute(x, axis, *kind.options)


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.name = _MOVES[inputs[1]].conjugate.name


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return (g if _MOVES[ctx.name].function in _NOTHING else torch.ops.meshwright.move(g, ctx.name)), None


move.register_autograd(_backward, setup_context=_setup)


class _Beginning(AutogradFunction):
    """Does nothing in the forward; runs the move of this name in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return torch.ops.meshwright.move(g, ctx.name), None


def begin(x: Tensor, name: str) -> Tensor:
    """``_Beginning`` as a function that a graph can call."""
    begun: Tensor = _Beginning.apply(x, name)
    return begun


__all__ = ["NotCompiled", "by_inductor"]
