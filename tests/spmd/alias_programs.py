"""Random programs about aliases: views and copies of one tensor and of each other, with writes in place between them.

A program runs first on one device. There each step is drawn, of what the tensors at hand allow; a step at which one device
raises an error is left out. Then every rank runs the same steps under the view, from a tensor that is cut: as a thread, over
an axis whose collectives hand tensors from thread to thread.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import PARTIAL, Layout, Shard
from meshwright.spmd.comm import Axis, Ledger, without_function_modes
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor

TIMEOUT = 20  # seconds, of a rank that waits for another
Choose = Callable[[int], int]  # a number below the given one
Step = tuple[str, int, tuple[Any, ...]]  # function, which member, constants


# --- ranks as threads -------------------------------------------------------------------------------------------------


class Meeting:
    """Where the threads of an axis hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.given = size, threading.Barrier(size), [torch.empty(0)] * size

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        self.given[rank] = value.detach().clone()
        self.barrier.wait(TIMEOUT)
        found = list(self.given)
        self.barrier.wait(TIMEOUT)
        return found


class ThreadAxis(Axis):
    """An axis of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__("tp", meeting.size, rank, None, Ledger())
        self.meeting = meeting

    @without_function_modes
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        found = torch.stack(self.meeting.exchange(self.rank, x))
        return found.sum(0).to(x.dtype) if op == "sum" else found.amax(0)

    @without_function_modes
    def all_gather(self, x: Tensor, layout: Shard) -> Tensor:
        return layout.merge(self.meeting.exchange(self.rank, x))

    @without_function_modes
    def reduce_scatter(self, x: Tensor, layout: Shard) -> Tensor:
        return layout.take(torch.stack(self.meeting.exchange(self.rank, x)).sum(0), self.rank).clone()

    @without_function_modes
    def all_to_all(self, x: Tensor, source: Shard, target: Shard) -> Tensor:
        return target.take(source.merge(self.meeting.exchange(self.rank, x)), self.rank).clone()


_THREADS = ThreadPoolExecutor(3)


def on_ranks(size: int, run: Callable[[Dispatcher], Any]) -> list[Any]:
    """What ``run`` gives on each rank, or raises the first cause of a failure."""
    meeting, failures, broken, refused = Meeting(size), [], [], []

    def one(rank: int) -> Any:
        axis = ThreadAxis(meeting, rank)
        try:
            return run(Dispatcher(axis, axis.ledger))
        except threading.BrokenBarrierError:
            if not failures and not broken:
                broken.append(traceback.format_exc())
            return None
        except NotImplementedError as error:
            if "elements that are not its own" not in str(error):
                failures.append((rank, error, traceback.format_exc()))
            refused.append(rank)
            meeting.barrier.abort()
            return None  # as_strided beyond a tensor is refused, on every rank
        except BaseException as error:
            failures.append((rank, error, traceback.format_exc()))
            meeting.barrier.abort()  # the others need not wait
            return None

    found = list(_THREADS.map(one, range(size)))
    assert failures or refused or not broken, f"a rank waits for one that does not come: {broken[0]}"
    if failures:
        rank, error, trace = failures[0]
        raise AssertionError(f"rank {rank}: {error!r}\n{trace}") from error
    return found


# --- steps ------------------------------------------------------------------------------------------------------------


def _dim(choose: Choose, x: Tensor) -> int:
    return choose(x.dim())


def _range(choose: Choose, n: int) -> tuple[int, int]:
    a, b = sorted((choose(n + 1), choose(n + 1)))
    return a, b


def _factors(choose: Choose, shape: Sequence[int]) -> tuple[int, ...]:
    """Another shape of as many elements: dims joined, split, and some of size 1."""
    joined = [1]
    for n in shape:
        if choose(2):
            joined[-1] *= n
        else:
            joined.append(n)
    found: list[int] = []
    for n in joined:
        options = [k for k in range(2, n) if n % k == 0]
        if options and choose(2):
            k = options[choose(len(options))]
            found += [k, n // k]
        elif n != 1 or not choose(3):
            found.append(n)
    return tuple(found)


def _permutation(choose: Choose, n: int) -> tuple[int, ...]:
    left, found = list(range(n)), []
    while left:
        found.append(left.pop(choose(len(left))))
    return tuple(found)


def _index(choose: Choose, x: Tensor) -> tuple[Any, ...]:
    items: list[Any] = []
    for n in x.shape:
        kind = choose(5)
        if kind == 0 and n:
            items.append(choose(n))
        elif kind == 1:
            a, b = _range(choose, n)
            items.append(("slice", a, b, 1 + choose(2)))
        else:
            items.append(("slice", None, None, None))
    if not choose(3):
        items.insert(choose(len(items) + 1), None)
    return tuple(items)


def _indexed(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(slice(*i[1:]) if isinstance(i, tuple) else i for i in items)


def _flat_range(choose: Choose, x: Tensor) -> tuple[int, int]:
    a, b = sorted((_dim(choose, x), _dim(choose, x)))
    return a, b


# name → (constants for a tensor, by chance; the function of the tensor and the constants)
MAKE: dict[str, tuple[Callable[[Choose, Tensor], tuple[Any, ...]], Callable[..., Any]]] = {
    "transpose": (lambda c, x: (_dim(c, x), _dim(c, x)), lambda x, a, b: x.transpose(a, b)),
    "swapaxes": (lambda c, x: (_dim(c, x), _dim(c, x)), lambda x, a, b: x.swapaxes(a, b)),
    "permute": (lambda c, x: (_permutation(c, x.dim()),), lambda x, dims: x.permute(dims)),
    "movedim": (lambda c, x: (_dim(c, x), _dim(c, x)), lambda x, a, b: x.movedim(a, b)),
    "mT": (lambda c, x: (), lambda x: x.mT),
    "mH": (lambda c, x: (), lambda x: x.mH),
    "adjoint": (lambda c, x: (), lambda x: x.adjoint()),
    "H": (lambda c, x: (), lambda x: x.H),
    "t": (lambda c, x: (), lambda x: x.t()),
    "unsqueeze": (lambda c, x: (c(x.dim() + 1),), lambda x, d: x.unsqueeze(d)),
    "squeeze": (lambda c, x: (), lambda x: x.squeeze()),
    "squeeze dim": (lambda c, x: (_dim(c, x),), lambda x, d: x.squeeze(d)),
    "view": (lambda c, x: (_factors(c, x.shape),), lambda x, shape: x.view(shape)),
    "reshape": (lambda c, x: (_factors(c, x.shape),), lambda x, shape: x.reshape(shape)),
    "view_as": (lambda c, x: (_factors(c, x.shape),), lambda x, shape: x.view_as(torch.empty(shape))),
    "reshape_as": (lambda c, x: (_factors(c, x.shape),), lambda x, shape: x.reshape_as(torch.empty(shape))),
    "flatten": (_flat_range, lambda x, a, b: x.flatten(a, b)),
    "ravel": (lambda c, x: (), lambda x: x.ravel()),
    "contiguous": (lambda c, x: (), lambda x: x.contiguous()),
    "to": (lambda c, x: (), lambda x: x.to(torch.float64)),
    "to device": (lambda c, x: (), lambda x: x.to("cpu")),
    "double": (lambda c, x: (), lambda x: x.double()),
    "type_as": (lambda c, x: (), lambda x: x.type_as(x)),
    "clone": (lambda c, x: (), lambda x: x.clone()),
    "times": (lambda c, x: (), lambda x: x * 1.5),
    "plus its sum": (lambda c, x: (_dim(c, x),), lambda x, d: x + x.sum(d, keepdim=True)),
    "softmax": (lambda c, x: (_dim(c, x),), lambda x, d: x.softmax(d)),
    "cumsum": (lambda c, x: (_dim(c, x),), lambda x, d: x.cumsum(d)),
    "matmul": (lambda c, x: (), lambda x: x @ x.mT),
    "einsum": (
        lambda c, x: (_permutation(c, x.dim()),),
        lambda x, dims: torch.einsum(f"{'abcdef'[: x.dim()]}->{''.join('abcdef'[d] for d in dims)}", x),
    ),
    "narrow": (lambda c, x: ((d := _dim(c, x)), *_range(c, x.shape[d])), lambda x, d, a, b: x.narrow(d, a, b - a)),
    "select": (lambda c, x: ((d := _dim(c, x)), c(x.shape[d])), lambda x, d, i: x.select(d, i)),
    "index": (lambda c, x: (_index(c, x),), lambda x, items: x[_indexed(items)]),
    "index by array": (lambda c, x: (c(x.shape[0]),), lambda x, i: x[torch.tensor([i, 0])]),
    "index by number": (lambda c, x: (c(x.shape[0]),), lambda x, i: x[torch.tensor(i)]),
    "split": (lambda c, x: (1 + c(3), _dim(c, x)), lambda x, n, d: x.split(n, d)),
    "chunk": (lambda c, x: (1 + c(3), _dim(c, x)), lambda x, n, d: x.chunk(n, d)),
    "tensor_split": (lambda c, x: (1 + c(3), _dim(c, x)), lambda x, n, d: x.tensor_split(n, d)),
    "hsplit": (lambda c, x: (1 + c(3),), lambda x, n: x.hsplit([n])),
    "vsplit": (lambda c, x: (1 + c(3),), lambda x, n: x.vsplit([n])),
    "dsplit": (lambda c, x: (1 + c(3),), lambda x, n: x.dsplit([n])),
    "unbind": (lambda c, x: (_dim(c, x),), lambda x, d: x.unbind(d)),
    "expand": (lambda c, x: (1 + c(2),), lambda x, n: x.expand(n, *x.shape)),
    "broadcast_tensors": (lambda c, x: (), lambda x: torch.broadcast_tensors(x, x[..., :1])),
    "diagonal": (lambda c, x: (), lambda x: x.diagonal(0, 0, -1)),
    "unfold": (lambda c, x: ((d := _dim(c, x)), 1 + c(x.shape[d])), lambda x, d, n: x.unfold(d, n, 1)),
    "as_strided": (lambda c, x: (), lambda x: x.as_strided(x.shape, x.stride())),
    "as_strided more": (lambda c, x: (), lambda x: x.as_strided((prod(x.shape) // 2,), (2,))),
    "atleast_3d": (lambda c, x: (), torch.atleast_3d),
    "real": (lambda c, x: (), lambda x: x.real),
    "positive": (lambda c, x: (), torch.positive),
    "detach": (lambda c, x: (), lambda x: x.detach()),
    "data": (lambda c, x: (), lambda x: x.data),
    "dropout in eval": (lambda c, x: (), lambda x: functional.dropout(x, 0.5, False)),
    "complex": (lambda c, x: (), lambda x: torch.view_as_complex(torch.stack([x, x], -1)).mH.imag),
}


def _row(x: Tensor, n: int) -> Tensor:
    return torch.linspace(-1, 1, n, dtype=x.dtype)


def _shared_size(choose: Choose, x: Tensor) -> tuple[Any, ...]:
    return (x.shape[-1] if x.dim() else 1,)


def _set(x: Tensor, items: tuple[Any, ...], value: Any) -> None:
    x[_indexed(items)] = value


def _set_first(x: Tensor) -> None:
    x[:] = x[:1] * 0.5


def _minus(x: Tensor) -> None:
    x -= 0.25


def _out(x: Tensor) -> None:
    torch.mul(x.detach(), 2.0, out=x)


def _out_two(x: Tensor, d: int) -> None:
    torch.max(x.detach().clone().unsqueeze(d), d, out=(x, torch.empty(x.shape, dtype=torch.int64)))


def _replace_data(x: Tensor) -> None:
    x.data = x.detach() * 2


WRITE: dict[str, tuple[Callable[[Choose, Tensor], tuple[Any, ...]], Callable[..., Any]]] = {
    "mul_": (lambda c, x: (), lambda x: x.mul_(0.5)),
    "isub": (lambda c, x: (), _minus),
    "add_ a row": (_shared_size, lambda x, n: x.add_(_row(x, n))),
    "zero_": (lambda c, x: (), lambda x: x.zero_()),
    "copy_": (_shared_size, lambda x, n: x.copy_(_row(x, n))),
    "cumsum_": (lambda c, x: (_dim(c, x),), lambda x, d: x.cumsum_(d)),
    "set item": (lambda c, x: (_index(c, x),), lambda x, items: _set(x, items, 2.0)),
    "set all": (lambda c, x: (), _set_first),
    "set by array": (lambda c, x: (), lambda x: x.__setitem__(torch.tensor([0]), 3.0)),
    "masked_fill_": (lambda c, x: (), lambda x: x.masked_fill_(x.detach() > 0.5, 0.25)),
    "data.mul_": (lambda c, x: (), lambda x: x.data.mul_(0.5)),
    "data slice": (lambda c, x: (), lambda x: x.data[:1].fill_(0.75)),
    "detach().add_": (lambda c, x: (), lambda x: x.detach().add_(0.125)),
    "relu_": (lambda c, x: (), lambda x: functional.relu(x, inplace=True)),
    "out=": (lambda c, x: (), _out),
    "out=(a, b)": (lambda c, x: (_dim(c, x),), _out_two),
    "foreach": (lambda c, x: (), lambda x: torch._foreach_mul_([x], 0.5)),
    "transpose_": (lambda c, x: (_dim(c, x), _dim(c, x)), lambda x, a, b: x.transpose_(a, b)),
    "swapaxes_": (lambda c, x: (_dim(c, x), _dim(c, x)), lambda x, a, b: x.swapaxes_(a, b)),
    "unsqueeze_": (lambda c, x: (_dim(c, x),), lambda x, d: x.unsqueeze_(d)),
    "squeeze_": (lambda c, x: (_dim(c, x),), lambda x, d: x.squeeze_(d)),
    "t_": (lambda c, x: (), lambda x: x.t_()),
    "data =": (lambda c, x: (), _replace_data),
}


def apply(step: Step, members: list[Tensor]) -> None:
    """Runs a step; what it makes joins the members."""
    name, at, constants = step
    x = members[at]
    if name in WRITE:
        WRITE[name][1](x, *constants)
    else:
        found = MAKE[name][1](x, *constants)
        members += found if isinstance(found, (tuple, list)) else [found]


# --- programs ---------------------------------------------------------------------------------------------------------


class Program:
    """A start and steps, as they ran on one device."""

    def __init__(self, choose: Choose, ranks: int, length: int, only: Sequence[str] | None = None) -> None:
        self.ranks, self.grad = ranks, choose(3) > 0
        shape = [(1, 2, 3, 4, 2, 3, 6)[choose(7)] for _ in range(1 + choose(4))]
        generator = torch.Generator().manual_seed(choose(1000))
        self.start = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.3
        self.layout = self._layout(choose, shape)
        self.steps: list[Step] = []
        self.leaf = self.start.clone().requires_grad_(self.grad)
        with torch.set_grad_enabled(self.grad):
            self.members: list[Tensor] = [self.leaf * 1]
            for _ in range(length):
                self._step(choose, only)
        self.loss, self.gradient = _backward(self.leaf, self.members, lambda x: x)

    def _layout(self, choose: Choose, shape: Sequence[int]) -> Layout:
        if not choose(8):
            return PARTIAL
        dim = choose(len(shape))
        blocks, n = [shape[dim]], shape[dim]
        if n > 1 and not choose(3):
            first = 1 + choose(n - 1)
            blocks = [first, n - first]
        pieces = []
        for block in blocks:
            borders = sorted(choose(block + 1) for _ in range(self.ranks - 1))
            if choose(2) and block >= self.ranks:
                borders = [block * (r + 1) // self.ranks for r in range(self.ranks - 1)]
            pieces.append(tuple(b - a for a, b in zip([0, *borders], [*borders, block], strict=True)))
        return Shard(dim, tuple(pieces))

    def _step(self, choose: Choose, only: Sequence[str] | None) -> None:
        table = WRITE if choose(5) < 2 else MAKE
        names = [n for n in table if only is None or n in only] or list(table)
        name = names[choose(len(names))]
        at = choose(len(self.members))
        # The program as it would be, on a copy: a step that one device refuses may have written half.
        try:
            if table is WRITE and _overlaps(self.members[at]):
                return  # what it then holds depends on the order in which a kernel goes through it
            constants = table[name][0](choose, self.members[at])
            step = (name, at, constants)
            before = len(self.members)
            apply(step, self.members)
        except Exception:
            return
        if len(self.members) > 40:
            del self.members[before:]
            return
        self.steps.append(step)

    def __repr__(self) -> str:
        lines = [f"{self.ranks} ranks, {tuple(self.start.shape)} {self.layout}, grad {self.grad}"]
        lines += [f"  {name} of {at} {constants}" for name, at, constants in self.steps]
        if isinstance(self.layout, Shard):
            lines[0] += f" {self.layout.pieces}"
        return "\n".join(lines)


def _backward(leaf: Tensor, members: list[Tensor], whole: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """(the loss, or the class of the error of its backward; the gradient of the start)."""
    terms = []
    try:
        for i, x in enumerate(members):
            if x.requires_grad and x.dtype == torch.float64:
                weights = torch.linspace(0.5, 1.5 + i, x.numel(), dtype=torch.float64).reshape(x.shape)
                terms.append((whole(x) * weights).sum())
        if not terms:
            return None, None
        loss = sum(terms[1:], terms[0])
        loss.backward()
    except threading.BrokenBarrierError:
        raise
    except RuntimeError as error:
        return str(error), None
    return loss.detach(), leaf.grad


def _overlaps(x: Tensor) -> bool:
    """Whether two elements of a tensor are one in memory."""
    reach = 1 + x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (
        x.numel() > 0
        and torch.arange(reach).as_strided(x.shape, x.stride(), x.storage_offset()).unique().numel() < x.numel()
    )


def compare(program: Program) -> None:
    """Raises AssertionError if the ranks' members are not those of one device."""
    if isinstance(program.loss, str):
        return  # one device has no gradient: what is computed is not asked
    on_ranks(program.ranks, lambda dispatcher: _one_rank(program, dispatcher))


def _one_rank(program: Program, dispatcher: Dispatcher) -> None:
    torch.set_num_threads(1)
    leaf = program.start.clone().requires_grad_(program.grad)
    with torch.set_grad_enabled(program.grad), SpmdMode(dispatcher, lambda p: None):
        if isinstance(program.layout, Shard):
            x = dispatcher.global_tensor(dispatcher.shard(leaf * 1, program.layout).clone(), program.layout)
        else:
            share = leaf / dispatcher.axis.size
            x = dispatcher.global_tensor(share if dispatcher.axis.rank else share + 0, PARTIAL)
        members: list[Tensor] = [x]
        for step in program.steps:
            apply(step, members)
    for i, (a, b) in enumerate(zip(program.members, members, strict=True)):
        what = f"member {i}, {b!r:.120}"
        assert a.shape == b.shape, f"{what}: shape {tuple(b.shape)}, not {tuple(a.shape)}"
        found = dispatcher.full_tensor(b)
        assert torch.allclose(found, a, rtol=1e-9, atol=1e-11), f"{what}: {found.tolist()}, not {a.tolist()}"
        assert b.is_contiguous() == a.is_contiguous(), f"{what}: is_contiguous() is {b.is_contiguous()}"
        if a.numel():
            strides = [(s, t) for s, t, n in zip(a.stride(), b.stride(), a.shape, strict=True) if n != 1]
            assert all(s == t for s, t in strides), f"{what}: strides {b.stride()}, not {a.stride()}"
    # A gradient as each rank has it, of the slice or summand that it began with.
    with torch.set_grad_enabled(program.grad):
        loss, gradient = _backward(leaf, members, dispatcher.full_tensor)
    assert (loss is None) == (program.loss is None), f"loss {loss}, not {program.loss}"
    if loss is None or any("data" in name for name, _, _ in program.steps):
        return  # what autograd has saved of a tensor may be a copy here: a write to .data, which it allows, changes neither
    if isinstance(loss, str) and "modified by an inplace operation" in loss:
        return  # what is copied for a backward on one device may be kept as it is here: an error, and no wrong number
    assert not isinstance(loss, str), f"backward: {loss}"
    assert torch.allclose(loss, program.loss, rtol=1e-9), f"loss {loss}, not {program.loss}"
    expected = torch.zeros_like(leaf) if program.gradient is None else program.gradient
    found = torch.zeros_like(leaf) if gradient is None else gradient
    if isinstance(program.layout, Shard):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11), (
            f"gradient {found.tolist()}, not {expected.tolist()}"
        )
    else:
        scaled = found * dispatcher.axis.size
        assert torch.allclose(scaled, expected, rtol=1e-9, atol=1e-11), (
            f"gradient {scaled.tolist()}, not {expected.tolist()}"
        )


def members_of(program: Program) -> list[type]:
    """For debugging: what kind of tensor each member is."""
    return [GlobalTensor if isinstance(x, GlobalTensor) else type(x) for x in program.members]
