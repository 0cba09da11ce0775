"""Where a recorded program multiplies what enters sharded work, the gradient of that is reduced beside the gradients of the
weights; values, collectives and their order stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product as all_of
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.layout import even_shard
from meshwright.replay.nodes import InputSource, MoveCall, Node, Value
from meshwright.replay.overlap import Product, Products, overlapping
from meshwright.replay.program import Expected, LocalProgram, Result
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis, Ledger, PlannedAxis
from meshwright.spmd.one_process import hearing
from meshwright.workers.pool import LocalWorkers

WIDTH, HEADS, INNER, ROWS, LENGTH = 8, 4, 12, 2, 4


class Fused(nn.Module):
    """A linear layer whose matrix is (inputs, outputs), as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 3), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Bare(nn.Module):
    """A product with ``@``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Block(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (layer(WIDTH, WIDTH) for _ in range(3))
        self.o, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(INNER, WIDTH)
        self.gate, self.up = layer(WIDTH, INNER), layer(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = (q @ k.transpose(2, 3)).softmax(-1) @ v  # (not by torch's function, which is not differentiated twice)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(layer) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, LENGTH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


# ---- what happens while a collective is under way ----

Event = tuple[str, tuple[int, ...]]


class Heard(TorchDispatchMode):
    """Notes products, collectives that begin, and waits for them, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.events.append(("product", tuple(out.shape)))
        return out

    def __call__(self, name: str, group: Any, call: Callable[[], Any], arguments: Any) -> Any:
        self.events.append(("begin", ()))
        return Waited(call(), self.events)

    def beside(self) -> list[list[tuple[int, ...]]]:
        """The products between the begin of a collective and the wait for it, of each collective that has some."""
        found, under_way = list[list[tuple[int, ...]]](), False
        for what, shape in self.events:
            assert (what == "begin") <= (not under_way), "one at a time: the order is that without the overlap"
            if what == "product" and under_way:
                found[-1].append(shape)
            elif what != "product":
                under_way = what == "begin"
                found += [[]] if under_way else []
        return [shapes for shapes in found if shapes]


class Waited:
    def __init__(self, work: Any, events: list[Event]) -> None:
        self._work, self._events = work, events

    def wait(self, *args: Any) -> Any:
        self._events.append(("wait", ()))
        return self._work.wait(*args)


def heard(layer: Callable[[int, int], nn.Module], plan: dict[str, Any]) -> tuple[Any, ...]:
    """Runs on every rank: products beside collectives, and collectives with their bytes, of an eager and of a replayed step."""
    seen = []
    for eager in (True, False):
        job = mw.parallelize(lambda: Model(layer).double(), plan | {"eager": eager}, batch=batch())
        for _ in range(3):
            job.step(batch())
        before, listening = (job.ledger.calls.copy(), job.ledger.bytes.copy()), Heard()
        job.ledger.heard = listening
        with hearing(listening), listening:
            job.step(batch())
        seen.append((listening.beside(), job.ledger.calls - before[0], job.ledger.bytes - before[1]))
    return tuple(seen)


@pytest.mark.parametrize("layer", [nn.Linear, Fused, Bare])
@pytest.mark.parametrize("sequence", [False, True])
def test_weights_get_their_gradients_while_that_of_the_input_is_reduced(
    layer: Callable[[int, int], nn.Module], sequence: bool, workers: LocalWorkers
) -> None:
    """Of q, k and v together, and of both matrices of the gated MLP: the collectives are those of the eager forward."""
    plan = {"mesh": {"tp": 2}, "verify": 0} | ({"sequence_parallel": True} if sequence else {})
    turn = (lambda *shape: shape) if layer is nn.Linear else (lambda *shape: shape[::-1])
    for eager, replayed in workers.run(heard, layer, plan, ranks=2):
        assert eager[0] == []
        mlp, attention = [turn(INNER // 2, WIDTH)] * 2, [turn(WIDTH // 2, WIDTH)] * 3
        of_block = (
            [mlp, attention] if layer is not Fused else [[shape] for shape in mlp + attention]
        )  # each has its own view
        assert replayed[0] == of_block * 2
        assert replayed[1:] == eager[1:]


# ---- values ----


def cases(axis: Axis) -> Iterator[tuple[str, Tensor, Products, list[Tensor]]]:
    """(name, the tensor, the products, their operands)."""
    draw = torch.Generator().manual_seed(1)
    linear, biased = Product(F.linear, True, False), Product(F.linear, True, True)
    sets = {
        "linears": ([biased, linear, biased], (ROWS, LENGTH, WIDTH)),
        "of rows": ([Product(torch.addmm, False, True), Product(torch.mm, False, False), linear], (LENGTH, WIDTH)),
        "matmuls": ([Product(torch.matmul, False, False), biased], (ROWS, LENGTH, WIDTH)),
    }
    for (name, (products, shape)), dtype in all_of(sets.items(), (torch.float64, torch.bfloat16)):
        for kind in (redistribute.CopyIn, redistribute.AllGatherIn):
            whole = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
            cut = even_shard(len(shape) - 2, shape[-2], axis.size)
            x = whole if kind is redistribute.CopyIn else cut.take(whole, axis.rank).clone()
            own = torch.Generator().manual_seed(axis.rank)
            operands = []
            for p in products:
                operands.append(torch.randn((5, WIDTH) if p.turned else (WIDTH, 5), generator=own).to(dtype))
                operands += [torch.randn(5, generator=own).to(dtype)] if p.biased else []
            options: tuple[Any, ...] = (False,) if kind is redistribute.CopyIn else (cut,)
            yield f"{name} {kind.__name__} {dtype}", x, Products(MoveCall(kind, axis, options), products), operands


def recorded(products: Products, x: Tensor, operands: list[Tensor]) -> tuple[Tensor, ...]:
    """The calls of which ``Products`` makes one."""
    moved = products.move(x)
    return moved, *(p(moved, *of_product) for p, of_product in products.pairs(operands))


def gradients(outs: tuple[Tensor, ...], used: tuple[int, ...], of: list[Tensor], again: bool) -> list[Any]:
    """The gradients of a number that follows from these results; or (``again``) of the sum of their squares."""
    value = torch.stack([outs[i].sin().sum() for i in used]).sum()
    first = torch.autograd.grad(value, of, create_graph=again, retain_graph=True, allow_unused=True)
    if not again:
        return [*first, *torch.autograd.grad(value, of, allow_unused=True)]
    squares = torch.stack([g.square().sum() for g in first if g is not None]).sum()
    return list(torch.autograd.grad(squares, of, allow_unused=True))


def different() -> tuple[list[str], int]:
    """Runs on every rank: where gradients are not those of the recorded calls, and how often they were compared."""
    wrong, count = [], 0
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, Ledger())
    for name, x, products, operands in cases(axis):
        everything = tuple(range(1, 1 + len(products.products)))
        for used, frozen, again in all_of(
            (everything, (0, *everything), (2,), (0,)), ((), (0,), (1, 2)), (False, True)
        ):
            if again and x.dtype is torch.bfloat16:  # too coarse to be differentiated twice in another order
                continue
            sides = []
            for together in (True, False):
                given = [t.clone().requires_grad_(i - 1 not in frozen) for i, t in enumerate((x, *operands))]
                outs = products(*given) if together else recorded(products, given[0], given[1:])
                of = [t for t in given if t.requires_grad]
                sides.append([*outs, *gradients(outs, used, of, again)])
            exact = len(used) - (0 in used) < 3 or 0 not in used  # else the order of a sum is another one
            count += 1
            if not all(map(alike if again or not exact else same, *sides)):
                wrong.append(f"{name}, used {used}, frozen {frozen}, again {again}")
    return wrong, count


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))  # type: ignore[arg-type]


def alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=0.05 if a.dtype is torch.bfloat16 else 1e-12, atol=1e-12)


def test_gradients_are_those_of_the_recorded_calls_to_the_last_bit(workers: LocalWorkers) -> None:
    """Of all products or of some, of frozen weights, with other uses of the tensor, twice, and differentiated again."""
    for wrong, count in workers.run(different, ranks=2):
        assert wrong == [] and count == 3 * 2 * 4 * 3 * (2 + 1)


def a_program(axis: Axis, trains: bool = True) -> LocalProgram:
    """The program ``linear(copy_in(x), weight)``."""
    weight = InputSource("parameter", ("", "weight"))
    nodes = (
        Node(MoveCall(redistribute.CopyIn, axis, (False,)), (Value(0),), {}, (2,), False, ""),
        Node(F.linear, (Value(2), Value(1)), {}, (3,), False, ""),
    )
    form = (torch.Size([5, WIDTH]), torch.float32, torch.device("cpu"), (WIDTH, 1))
    inputs = ((0, InputSource("argument", 0)), (1, weight))
    return LocalProgram(nodes, inputs, (Expected(weight, form, trains),), (Result(3),), (None, (0,)), (), ())


def test_under_autocast_and_hooks_for_saved_tensors_calls_run_as_they_were_recorded() -> None:
    axis = Axis("tp", 2, 0, None, Ledger())
    x, weight = torch.randn(LENGTH, WIDTH, requires_grad=True), torch.randn(5, WIDTH, requires_grad=True)

    def node(program: LocalProgram) -> str:
        return type(overlapping(program)(x, weight)[0].grad_fn).__name__

    assert node(a_program(axis)) == "_ProductsBackward"
    with torch.no_grad():
        assert node(a_program(axis)) == "NoneType"
    for around in (torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.save_on_cpu()):
        with around:
            assert "Products" not in node(a_program(axis))
    assert "Products" not in node(a_program(axis, trains=False)), "a frozen weight has no gradient to compute meanwhile"


def test_a_product_is_no_view_and_may_be_written_to() -> None:
    axis = PlannedAxis("tp", 2, 0, Ledger())
    products = Products(MoveCall(redistribute.CopyIn, axis, (False,)), [Product(F.linear, True, True)])
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((2, 3, WIDTH), (5, WIDTH), (5,)))
    if torch.__version__ >= (2, 15):
        pytest.skip("from torch 2.15 on a linear returns no view")
    assert F.linear(x, weight, bias)._is_view(), "else the test tells nothing"
    _, y = products(x, weight, bias)
    (gradient,) = torch.autograd.grad(y.mul_(2).sum(), [bias])
    assert torch.equal(gradient, torch.full((5,), 12.0))


# ---- a recompute ----


class Twice(Model):
    """Its only block runs twice, and its activations are computed again: of an eager call by a replay."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for _ in range(2):
            h = checkpoint(self.blocks[0], h, use_reentrant=False)
        return self.head(h).square().mean()


def losses(eager: bool) -> list[float]:
    job = mw.parallelize(lambda: Twice().double(), {"mesh": {"tp": 2}, "eager": eager}, batch=batch())
    optimizer, found = torch.optim.SGD(job.parameters(), lr=0.01), []
    for _ in range(4):
        found.append(float(job.step(batch())))
        optimizer.step()
        optimizer.zero_grad()
    assert eager or job.program("blocks.0").nodes
    return found


def test_a_recompute_saves_what_its_forward_saved(workers: LocalWorkers) -> None:
    eager, replayed = (workers.run(losses, e, ranks=2) for e in (True, False))
    assert eager == replayed


# ---- a gradient of a gradient ----


class Penalized(Model):
    """The loss has the gradient of what the blocks give in it."""

    def forward(self, x: Tensor) -> Tensor:
        h = start = self.inner(x)
        for block in self.blocks:
            h = block(h)
        (slope,) = torch.autograd.grad(h.square().sum(), [start], create_graph=True)
        return self.head(h).square().mean() + slope.square().mean()


def trained(eager: bool) -> tuple[list[float], dict[str, Tensor]]:
    job = mw.parallelize(lambda: Penalized().double(), {"mesh": {"tp": 2}, "eager": eager}, batch=batch())
    optimizer, found = torch.optim.SGD(job.parameters(), lr=0.01), []
    for _ in range(4):
        found.append(float(job.step(batch())))
        optimizer.step()
        optimizer.zero_grad()
    assert eager or job.program("blocks.0").nodes
    return found, {line.name: value for line, value in job.full_parameters() if value is not None}


def test_a_loss_with_a_gradient_in_it_is_that_of_eager_steps(workers: LocalWorkers) -> None:
    for (losses, values), (others, found) in zip(
        *(workers.run(trained, eager, ranks=2) for eager in (True, False)), strict=True
    ):
        assert losses == pytest.approx(others, rel=1e-12)
        for name, value in values.items():
            assert torch.allclose(value, found[name], rtol=1e-12, atol=1e-14)
