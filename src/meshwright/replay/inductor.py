"""A local program compiled by ``torch.compile``: one graph of torch's own operators, in which each collective is a custom op.

    move in the program      in the compiled graph
    copy_in                  an autograd function: nothing forward, ``meshwright::move`` of its conjugate backward
    any other                ``meshwright::move``, whose backward is ``meshwright::move`` of the conjugate, or nothing

An operator takes no Python objects. So a move is named by a text, by which this process finds it: ``_MOVES`` has one entry for
each move of each axis, and only grows with the axes that there are. To the compiler the op is opaque: it is neither computed
twice nor left out. Ranks whose graphs are the same call their collectives in the same order; a program of which ranks hold
uneven shares is not compiled, as the compiler may order such graphs otherwise on each rank.

Source: torch.library's custom operators (https://docs.pytorch.org/docs/stable/library.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function as AutogradFunction
from torch.fx import Graph, GraphModule, Node

from meshwright.layout import Shard
from meshwright.replay.nodes import Move, Under
from meshwright.replay.program import LocalProgram
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis, Ledger, PlannedAxis
from meshwright.spmd.patches import compiling
from meshwright.spmd.tensor import Spec

Function = Callable[..., tuple[Tensor, ...]]
_Kind = tuple[type[redistribute.Move], Axis, tuple[Any, ...]]
_MOVES: dict[str, _Kind] = {}
_NOTHING = (redistribute.CopyIn, redistribute.Release)  # forward, they give what they were given


class NotCompiled(Exception):
    """Why a program is not handed to the compiler."""


def by_inductor(program: LocalProgram) -> Function:
    """A program as a function that ``torch.compile`` makes with its first call.

    Raises:
        NotCompiled: it has what the compiler would not keep as it is.
    """
    if any(_is_uneven(known) for known in (*(g.form for g in program.kept), *(r.known for r in program.results))):
        raise NotCompiled("ranks hold uneven shares")
    graph = _with_operators(program.graph())
    run = torch.compile(GraphModule({}, graph), fullgraph=True, dynamic=False, options={"fallback_random": True})

    def called(*inputs: Tensor) -> tuple[Tensor, ...]:
        with compiling():
            out: tuple[Tensor, ...] = run(*inputs)
        return out

    return called


def _with_operators(graph: Graph) -> Graph:
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    for node in list(copied.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, Under):
            raise NotCompiled("a part of it is without gradients, or in another autocast")
        if isinstance(node.target, Move):
            _replace(copied, node, node.target)
    copied.lint()
    return copied


def _replace(graph: Graph, node: Node, move: Move) -> None:
    kind = move.function, move.axis, move.options
    if any(_is_uneven(option) for option in kind[2]):
        raise NotCompiled("ranks hold uneven shares")
    with graph.inserting_before(node):
        if move.function in _NOTHING:
            made = graph.call_function(begin, (*node.args, _name(_conjugate(kind))))
        else:
            made = graph.call_function(torch.ops.meshwright.move.default, (*node.args, _name(kind)))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_uneven(known: Any) -> bool:
    """Whether a layout, or that of a Spec, gives ranks shares of different sizes."""
    layout = known.layout if isinstance(known, Spec) else known
    return isinstance(layout, Shard) and len({layout.local(rank) for rank in range(layout.ranks)}) > 1


def _name(kind: _Kind) -> str:
    function, axis, options = kind
    name = f"{function.__name__} {axis.name} {id(axis)} {options}"
    _MOVES[name] = kind
    return name


def _conjugate(kind: _Kind) -> _Kind:
    function, options = kind[0].conjugate(*kind[2])
    return function, kind[1], options


@torch.library.custom_op("meshwright::move", mutates_args=())
def move(x: Tensor, name: str) -> Tensor:
    """A move of ``spmd/redistribute.py``, without its gradient."""
    function, axis, options = _MOVES[name]
    return function.compute(x, axis, *options)


@move.register_fake
def _(x: Tensor, name: str) -> Tensor:
    function, axis, options = _MOVES[name]
    return function.compute(x, PlannedAxis(axis.name, axis.size, axis.rank, Ledger()), *options)


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.name = _name(_conjugate(_MOVES[inputs[1]]))


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return (g if _MOVES[ctx.name][0] in _NOTHING else torch.ops.meshwright.move(g, ctx.name)), None


move.register_autograd(_backward, setup_context=_setup)


class _Beginning(AutogradFunction):
    """Nothing forward; backward, a move."""

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
