"""Products of one tensor that enters sharded work: its gradient is reduced beside the gradients of their weights.

    recorded      x' = copy_in(x)     q = linear(x', wq, bq)     k = linear(x', wk)     v = linear(x', wv)
    runs as       x', q, k, v = one autograd Function
    its backward  dv·wv + dk·wk + dq·wq ─ all-reduce begins ─ dvᵀ·x', dkᵀ·x', dqᵀ·x', sums for biases ─ wait

With ``sequence_parallel`` the move is ``all_gather_in``, and a reduce-scatter takes the place of the all-reduce.

The collective begins where the backward of the move alone would run, and is waited for before this Function returns. So the
collectives of a backward, their order and their bytes stay, and autograd sees no gradient that is still on its way. Sums are
added up in the order of autograd, the last product first: gradients stay the same to the last bit.

A recompute must save what its forward saved, in the same order, and one of both may have been eager. So under hooks for saved
tensors the recorded calls run as they are. So they do under autocast, whose casts belong to each of them.

Source: Megatron-LM, ``LinearWithGradAccumulationAndAsyncCommunication``; Korthikanti et al., arXiv 2205.05198, section 4.2.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function as AutogradFunction
from torch.fx import Graph
from torch.fx import Node as Call
from torch.nn import functional

from meshwright.private import autocast_is_on, saved_tensors_are_hooked, storage_of, without_modes
from meshwright.replay.nodes import MoveCall
from meshwright.replay.program import Expected, Function, LocalProgram, compiled
from meshwright.replay.recorder import UnnamedFunction
from meshwright.spmd import patches, redistribute
from meshwright.spmd.comm import Finish, finished
from meshwright.spmd.tensor import Spec
from meshwright.spmd.torch_functions import ADDMMS, MATMULS

_ENTERING = (redistribute.CopyIn, redistribute.AllGatherIn)  # their backward is a collective that sums


@dataclass(frozen=True)
class Product:
    """A product of the moved tensor with a matrix.

    Attributes:
        function: the torch function.
        turned: whether the matrix is (outputs, inputs), as that of a linear layer; else (inputs, outputs).
        biased: whether a vector is added.
    """

    function: Callable[..., Tensor]
    turned: bool
    biased: bool

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return self.function(x, weight)
        return self.function(x, weight, bias) if self.turned else self.function(bias, x, weight)

    def input_gradient(self, g: Tensor, weight: Tensor) -> Tensor:
        return g.mm(weight if self.turned else weight.t())

    def weight_gradient(self, g: Tensor, x: Tensor) -> Tensor:
        return g.t().mm(x) if self.turned else x.t().mm(g)


class Products:
    """A move and the products of its result, as a function of (the tensor, each product's weight, and its bias if it has one).

    It returns the moved tensor and the products.
    """

    def __init__(self, move: MoveCall, products: Sequence[Product]) -> None:
        self.move, self.products = move, tuple(products)
        self.__name__ = f"{move.name}_and_products"
        self._apply = patches.apply_of(_Products)

    def __call__(self, x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        if x.requires_grad and torch.is_grad_enabled():
            moved, _, *results = self._apply(x, self, *operands)
            return moved, *results
        moved = self.move(x)
        return moved, *(product(moved, *of_product) for product, of_product in self.pairs(operands))

    def pairs(self, operands: Sequence[Any]) -> list[tuple[Product, tuple[Any, Any]]]:
        """Each product with what stands among the operands for its weight and its bias (None if it has none)."""
        left = iter(operands)
        return [(product, (next(left), next(left) if product.biased else None)) for product in self.products]


class _Products(AutogradFunction):
    # The arguments of forward and backward are fixed by torch; the context is untyped there.

    @staticmethod
    def forward(ctx: Any, x: Tensor, products: Products, *operands: Tensor) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.products, move = products, products.move
        moved = move.function.compute(x, move.axis, *move.options)
        ctx.shape = moved.shape
        # If rows are not contiguous, torch multiplies a copy of them and saves it: the model may write to the tensor itself.
        # The copy is a result, as only inputs and results can be differentiated twice.
        rows = moved.reshape(-1, moved.shape[-1])
        copy = None if storage_of(rows) == storage_of(moved) else rows
        pairs = products.pairs(operands)
        ctx.save_for_backward(moved if copy is None else copy, *(weight for _, (weight, _) in pairs))
        results = [product(moved, *of_product) for product, of_product in pairs]
        # Not views, which a model could not write to.
        return moved, copy, *(y.detach() if y._is_view() else y for y in results)

    @staticmethod
    def backward(
        ctx: Any, g_moved: Tensor | None, g_copy: Tensor | None, *gs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        saved, *weights = ctx.saved_tensors
        products = ctx.products
        with without_modes():
            if g_copy is not None:
                g_copy = g_copy.view(ctx.shape)
                g_moved = g_copy if g_moved is None else g_moved + g_copy
            flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gs]
            total = _summed(products.products, ctx.shape, weights, g_moved, flat)
            if total is None:
                return (None,) * len(ctx.needs_input_grad)
            finish = _begun(products.move, total)
            rows, of_operands = saved.reshape(-1, saved.shape[-1]), list[Tensor | None]()
            wanted = iter(ctx.needs_input_grad[2:])
            for product, g in zip(products.products, flat, strict=True):
                of_operands.append(product.weight_gradient(g, rows) if next(wanted) and g is not None else None)
                if product.biased:
                    of_operands.append(g.sum(0) if next(wanted) and g is not None else None)
            return finish(), None, *of_operands


def _summed(
    products: Sequence[Product], shape: torch.Size, weights: Sequence[Tensor], others: Tensor | None, gs: Sequence[Any]
) -> Tensor | None:
    """The sum of the gradients of the moved tensor on this rank, in memory of its own; None if there are none.

    Args:
        shape: of the moved tensor.
        others: the gradient from other uses of the moved tensor.
        gs: the gradient of each product, in two dims.
    """
    total: Tensor | None = None
    for product, weight, g in reversed(list(zip(products, weights, gs, strict=True))):
        if g is None:
            continue
        part = product.input_gradient(g, weight)
        if total is None:
            total = part if others is None else part + others.reshape(part.shape)
        else:
            total = total + part if torch.is_grad_enabled() else total.add_(part)
    if total is None:
        return None if others is None else others.clone()
    return total.view(shape)


def _begun(move: MoveCall, total: Tensor) -> Finish:
    """Begins the backward of a move. If it is differentiated again, it is done at once, as a part of the graph."""
    back, options = move.function.conjugate(*move.options)
    if torch.is_grad_enabled():
        return finished(back.apply(total, move.axis, *options))
    finish: Finish = back.begin(total, move.axis, *options)
    return finish


# --- which calls of a program -----------------------------------------------------------------------------------------


def overlapping(program: LocalProgram) -> Function:
    """A program as a Python function, with the overlap where it can be."""
    recorded, graph = compiled(program.graph()), overlapped(program)
    if graph is None:
        return recorded
    together = compiled(graph)

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return (recorded if autocast_is_on() or saved_tensors_are_hooked() else together)(*inputs)

    return function


def overlapped(program: LocalProgram) -> Graph | None:
    """The program's graph, in which each move that enters sharded work is one call with the products of its result; None if
    there is no such move.

    A product counts if its weight and bias are parameters, which nothing writes to while the program runs; so it may run as
    soon as the moved tensor is there. A move stays as it is if no such weight is trained.
    """
    graph = program.graph()
    expected = {e.source: e for e in program.expected if e.source.kind == "parameter"}
    inputs = [call for call in graph.nodes if call.op == "placeholder"]
    parameters = {
        call: expected[source] for call, (_, source) in zip(inputs, program.inputs, strict=True) if source in expected
    }
    joined = False
    for call in list(graph.nodes):
        if isinstance(call.target, MoveCall) and call.target.function in _ENTERING:
            products = {user: p for user in call.users if (p := _product(user, call, parameters)) is not None}
            if any(parameters[weight].trains for _, (weight, *_) in products.values()):
                _join(graph, call, products)
                joined = True
    graph.lint()
    return graph if joined else None


def _join(graph: Graph, call: Call, products: Mapping[Call, tuple[Product, tuple[Call, ...]]]) -> None:
    """Puts one call in the place of a move and products of its result."""
    together = Products(call.target, [product for product, _ in products.values()])  # type: ignore[arg-type]
    operands = [operand for _, of_product in products.values() for operand in of_product]
    with graph.inserting_before(call):
        results = graph.call_function(together, (*call.args, *operands))
        pieces = [graph.call_function(operator.getitem, (results, i)) for i in range(1 + len(products))]
    for old, piece in zip((*products, call), (*pieces[1:], pieces[0]), strict=True):
        old.replace_all_uses_with(piece)
        graph.erase_node(old)
    for piece in pieces:
        if not piece.users:
            graph.erase_node(piece)


def _product(call: Call, moved: Call, parameters: Mapping[Call, Expected]) -> tuple[Product, tuple[Call, ...]] | None:
    """(the product that a call is, its weight and its bias, if it has one); None if it is none with parameters."""
    if call.op != "call_function" or call.kwargs:
        return None
    function: Any = call.target.function if isinstance(call.target, UnnamedFunction) else call.target
    turned, args = function is functional.linear, [arg for arg in call.args if arg is not None]
    if function in ADDMMS and len(args) == 3:
        args = [args[1], args[2], args[0]]
    elif not turned and not (function in MATMULS and len(args) == 2):
        return None
    x, *operands = args
    if x is not moved or not all(operand in parameters for operand in operands):
        return None
    (shape, dtype), *of_bias = (_form(parameters[operand]) for operand in operands)  # type: ignore[index]
    outputs = shape[:1] if turned else shape[1:]
    if len(shape) != 2 or not dtype.is_floating_point or any(bias != (outputs, dtype) for bias in of_bias):
        return None
    return Product(function, turned, bool(of_bias)), tuple(operands)  # type: ignore[arg-type]


def _form(known: Expected) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of a parameter, as one device has it."""
    form: Any = known.form
    shape, dtype = (form.shape, form.dtype) if isinstance(form, Spec) else form[:2]
    return tuple(shape), dtype


__all__ = ["overlapped", "overlapping"]
