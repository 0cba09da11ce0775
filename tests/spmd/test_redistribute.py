"""Moves between layouts: to anywhere and back is the identity, and each gradient is the one-process derivative."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Make
from torch import Tensor

from meshwright.layout import PARTIAL, REPLICATE, Layout, Partial, Shard, even_shard
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Axis, Ledger, PlannedAxis
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.tensor import GlobalTensor
from meshwright.workers.pool import LocalWorkers

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex128,
]

UNSUMMED = (torch.bool, torch.int16)  # gloo knows no sum of these


def make_work() -> Dispatcher:
    ledger = Ledger()
    return Dispatcher(Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD, ledger), ledger)


def layouts(shape: list[int], ranks: int, make: Make) -> Iterator[Layout]:
    yield REPLICATE
    yield PARTIAL
    for dim in range(len(shape)):
        for kind in ("even", "uneven", "fused", "uneven fused"):
            yield make.layout(shape, dim, ranks, kind)


def laid_out(dispatcher: Dispatcher, x: Tensor, layout: Layout) -> Any:
    """``x`` in that layout, as the model sees it."""
    if isinstance(layout, Shard):
        return dispatcher.global_tensor(dispatcher.shard(x, layout), layout)
    return (
        dispatcher.global_tensor(redistribute.keep_first(x, dispatcher.axis), PARTIAL)
        if isinstance(layout, Partial)
        else x
    )


def moved(dispatcher: Dispatcher, x: Any, layout: Layout) -> Any:
    """A tensor in any layout, brought to another."""
    if isinstance(layout, Shard):
        return dispatcher.global_tensor(dispatcher.shard(x, layout), layout)
    whole = dispatcher.full_tensor(x)
    return (
        dispatcher.global_tensor(redistribute.keep_first(whole, dispatcher.axis), PARTIAL)
        if isinstance(layout, Partial)
        else whole
    )


# ---- functions that run in the workers ----


def go_and_come_back() -> tuple[list[str], int]:
    dispatcher, wrong, tried = make_work(), [], 0
    for turn, dtype in enumerate(DTYPES):
        make = Make(f"back {turn}")
        shape = make.sizes(3, 1, 5)
        x = (make(*shape) * 9).to(dtype)
        every = list(layouts(shape, dispatcher.axis.size, make))
        for source in every:
            for target in make.choose.sample(every, 4):
                if Partial in (type(source), type(target)) and dtype in UNSUMMED:
                    continue
                tried += 1
                try:
                    start = laid_out(dispatcher, x, source)
                    there = moved(dispatcher, start, target)
                    back = dispatcher.full_tensor(moved(dispatcher, there, source))
                except Exception as error:
                    wrong.append(f"{dtype} {tuple(shape)} {source} → {target}: {type(error).__name__} {error}"[:300])
                    continue
                if isinstance(there, GlobalTensor):
                    assert there.shape == x.shape and there._mw_layout == target
                if not (
                    torch.equal(back, x)
                    and torch.equal(dispatcher.full_tensor(there), x)
                    and torch.equal(dispatcher.varying(there), x)
                ):
                    wrong.append(f"{dtype} {tuple(shape)} {source} → {target}")
    return wrong, tried


def gradients_of_paths() -> tuple[list[str], int]:
    """Along random paths through layouts, with local work on the way, against the same work on one device."""
    dispatcher, wrong, tried = make_work(), [], 0
    rank = dispatcher.axis.rank
    for turn in range(12):
        make = Make(f"path {turn}")
        shape = make.sizes(3, 2, 5)
        every = list(layouts(shape, dispatcher.axis.size, make))
        path = [make.choose.choice(every) for _ in range(3)]
        weights = [make(*shape) for _ in path]
        leaf, plain = (make_leaf(f"path {turn}", shape) for _ in range(2))
        here, there = leaf, plain
        for layout, weight in zip(path, weights, strict=True):
            here = moved(dispatcher, here, layout)
            local, factor = (here._mw_local, here._mw_layout) if isinstance(here, GlobalTensor) else (here, REPLICATE)
            if isinstance(factor, Shard):
                # The square needs the local values; the weight enters the sharded work.
                here = dispatcher.global_tensor(local**2 * factor.take(dispatcher.varying(weight), rank), factor)
                there = there**2 * weight
            elif isinstance(factor, Partial):
                here, there = dispatcher.global_tensor(local * weight, PARTIAL), there * weight
            else:
                here, there = here.sin() * weight, there.sin() * weight
        tried += 1
        cotangent = make(*shape)
        found = derivatives(dispatcher.full_tensor(here), leaf, cotangent)
        expected = derivatives(there, plain, cotangent)
        for order, (a, b) in enumerate(zip(found, expected, strict=True)):
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-12):
                wrong.append(f"{tuple(shape)} {' → '.join(map(str, path))}: derivative {order + 1}")
    return wrong, tried


def make_leaf(seed: str, shape: list[int]) -> Tensor:
    return Make(f"leaf {seed}")(*shape).requires_grad_()


def derivatives(out: Tensor, leaf: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The first, and one of the second derivatives."""
    (first,) = torch.autograd.grad((out * cotangent).sum(), leaf, create_graph=True)
    if not first.requires_grad:
        return first, torch.zeros_like(first)
    (second,) = torch.autograd.grad((first**3).sum(), leaf, allow_unused=True)
    return first.detach(), torch.zeros_like(first) if second is None else second


def pair(name: str) -> list[tuple[float, float]]:
    """A move and its conjugate in one small computation: (error of the gradient, of the second derivative)."""
    dispatcher, errors = make_work(), []
    axis, rank = dispatcher.axis, dispatcher.axis.rank
    for turn in range(6):
        make = Make(f"{name} {turn}")
        shape = make.sizes(2, 2, 6)
        dims = random.Random(turn).sample([0, 1], 2)
        first, second = (
            make.layout(shape, d, axis.size, make.choose.choice(["even", "uneven", "fused"])) for d in dims
        )
        weight, cotangent = make(*shape), make(*shape)
        each = [make(*shape) for _ in range(axis.size)]
        sharing, plainly = PAIRS[name]
        leaf, plain = make_leaf(name, shape), make_leaf(name, shape)
        mine = sharing(leaf, axis, first, second, weight, each[rank])
        found = derivatives(mine, leaf, cotangent)
        expected = derivatives(plainly(plain, weight, sum(each)), plain, cotangent)
        errors.append(tuple(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))
    return errors


Sharing = Callable[[Tensor, Axis, Shard, Shard, Tensor, Tensor], Tensor]

# name: (whole → whole on every rank, through the move; the same on one device). ``share``: a summand of this rank.
PAIRS: dict[str, tuple[Sharing, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "enter, reduce": (
        lambda x, axis, a, b, w, share: redistribute.all_reduce(redistribute.copy_in(x, axis) ** 2 * share, axis),
        lambda x, w, total: x**2 * total,
    ),
    "enter, reduce_scatter, gather": (
        lambda x, axis, a, b, w, share: redistribute.all_gather(redistribute.reduce_scatter(redistribute.copy_in(x, axis) ** 3 * share, axis, a), axis, a),
        lambda x, w, total: x**3 * total,
    ),
    "take, gather": (
        lambda x, axis, a, b, w, share: redistribute.all_gather(redistribute.keep_slice(x, axis, a) ** 2 * a.take(w, axis.rank), axis, a),
        lambda x, w, total: x**2 * w,
    ),
    "take, gather_enter, reduce": (
        lambda x, axis, a, b, w, share: redistribute.all_reduce(redistribute.all_gather_in(redistribute.keep_slice(x, axis, a) ** 2, axis, a) ** 2 * share, axis),
        lambda x, w, total: x**4 * total,
    ),
    "take, exchange, gather": (
        lambda x, axis, a, b, w, share: redistribute.all_gather(redistribute.all_to_all(redistribute.keep_slice(x, axis, a) ** 2, axis, a, b) ** 2 * b.take(w, axis.rank), axis, b),
        lambda x, w, total: x**4 * w,
    ),
    "hold, reduce": (
        lambda x, axis, a, b, w, share: redistribute.all_reduce(redistribute.keep_first(x**2, axis), axis) ** 2 * w,
        lambda x, w, total: x**4 * w,
    ),
    "hold, reduce_scatter, gather": (
        lambda x, axis, a, b, w, share: redistribute.all_gather(redistribute.reduce_scatter(redistribute.keep_first(x**2, axis), axis, a), axis, a) ** 2 * w,
        lambda x, w, total: x**4 * w,
    ),
}  # fmt: skip


def counts() -> dict[str, tuple[int, int]]:
    dispatcher = make_work()
    axis, layout = dispatcher.axis, even_shard(0, 6, dispatcher.axis.size)
    x = torch.ones(6, 4, dtype=torch.float64)
    piece = layout.take(x, axis.rank)
    axis.all_reduce(x)
    axis.all_reduce(x, "max")
    axis.all_gather(piece, layout)
    axis.reduce_scatter(x, layout)
    axis.all_to_all(piece, layout, even_shard(1, 4, axis.size))
    return {kind: (calls, dispatcher.ledger.bytes[kind]) for kind, calls in dispatcher.ledger.calls.items()}


def moves_made_once() -> dict[str, int]:
    """A value used whole three times and in cut work three times: one collective each, until it is written."""
    dispatcher = make_work()
    x = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
    seen = laid_out(dispatcher, x, even_shard(0, 6, dispatcher.axis.size))
    uses = [dispatcher.full_tensor(seen) for _ in range(3)] + [dispatcher.varying(seen) for _ in range(3)]
    torch.stack(uses).sum().backward()
    plain = [dispatcher.varying(x) for _ in range(3)]
    assert plain[0] is plain[1] is plain[2]
    with torch.no_grad():
        seen._mw_local.mul_(2)
        assert torch.equal(dispatcher.full_tensor(seen), 2 * x)
    return dict(dispatcher.ledger.calls)


def parameter_sums_are_wide() -> tuple[Tensor, Tensor]:
    """Half-precision gradients summed over the axis: in float32, where asked."""
    dispatcher = make_work()
    found = []
    for wide in (True, False):
        x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        share = 1.0 if dispatcher.axis.rank == 0 else 2.0**-9
        (
            redistribute.copy_in(x, dispatcher.axis, wide=wide) * torch.tensor(share, dtype=torch.bfloat16)
        ).sum().backward()
        found.append(x.grad)
    return tuple(found)  # type: ignore[return-value]


def writes_to_what_moved(rows: int, dtype: torch.dtype) -> list[str]:
    """Each move whose result, or a slice of it, cannot be written in place."""
    axis = make_work().axis
    layout, columns = even_shard(0, rows, axis.size), even_shard(1, 6, axis.size)
    whole = torch.ones(rows, 6, dtype=dtype, requires_grad=True)
    piece = layout.take(whole, axis.rank)
    moves: dict[str, Any] = {
        "copy_in": lambda: redistribute.copy_in(whole, axis),
        "all_reduce": lambda: redistribute.all_reduce(whole, axis),
        "reduce_scatter": lambda: redistribute.reduce_scatter(whole, axis, layout),
        "reduce_scatter of columns": lambda: redistribute.reduce_scatter(whole, axis, columns),
        "all_gather": lambda: redistribute.all_gather(piece, axis, layout),
        "all_gather_in": lambda: redistribute.all_gather_in(piece, axis, layout),
        "all_gather of columns": lambda: redistribute.all_gather(columns.take(whole, axis.rank), axis, columns),
        "keep_slice": lambda: redistribute.keep_slice(whole, axis, layout),
        "all_to_all": lambda: redistribute.all_to_all(piece, axis, layout, columns),
        "keep_first": lambda: redistribute.keep_first(whole, axis),
    }
    wrong = []
    for name, move in moves.items():
        try:
            moved = move()
            moved.mul_(2)
            move()[:1].mul_(2)
            moved.abs().sum().backward()
        except RuntimeError as error:
            wrong.append(f"{name}: {error}")
    return wrong


# ---- the tests ----


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_layout_to_any_layout_and_back_is_the_identity(workers: LocalWorkers, ranks: int) -> None:
    for wrong, tried in workers.run(go_and_come_back, ranks=ranks):
        assert tried > 300
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_along_any_path_are_those_of_one_device(workers: LocalWorkers, ranks: int) -> None:
    for wrong, tried in workers.run(gradients_of_paths, ranks=ranks):
        assert tried == 12
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PAIRS)
def test_a_move_and_its_conjugate_give_the_derivatives_of_one_device(workers: LocalWorkers, name: str) -> None:
    for errors in workers.run(pair, name, ranks=3):
        assert max(max(e) for e in errors) < 1e-11, errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("rows", [4, 5])
def test_what_moved_is_written_in_place(workers: LocalWorkers, rows: int, dtype: torch.dtype) -> None:
    for wrong in workers.run(writes_to_what_moved, rows, dtype, ranks=2):
        assert not wrong, "\n".join(wrong)


def test_the_ledger_counts_calls_and_the_bytes_this_rank_puts_in(workers: LocalWorkers) -> None:
    for rank, found in enumerate(workers.run(counts, ranks=2)):
        mine = even_shard(0, 6, 2).local(rank) * 4 * 8
        assert found == {
            "all_reduce": (2, 384),
            "all_gather": (1, mine),
            "reduce_scatter": (1, 192),
            "all_to_all": (1, mine),
        }


def test_a_planned_axis_counts_the_same_and_gives_the_same_shapes() -> None:
    ledger = Ledger()
    axis, layout = PlannedAxis("tp", 2, 1, ledger), even_shard(0, 5, 2)
    x = torch.empty(5, 4, dtype=torch.float64, device="meta")
    piece = layout.take(x, 1)
    shapes = [
        axis.all_reduce(x).shape,
        axis.all_gather(piece, layout).shape,
        axis.reduce_scatter(x, layout).shape,
        axis.all_to_all(piece, layout, even_shard(1, 4, 2)).shape,
    ]
    assert [tuple(s) for s in shapes] == [(5, 4), (5, 4), (2, 4), (5, 2)]
    assert dict(ledger.bytes) == {"all_reduce": 160, "all_gather": 64, "reduce_scatter": 160, "all_to_all": 64}


def test_a_value_moves_once_however_often_it_is_used(workers: LocalWorkers) -> None:
    for calls in workers.run(moves_made_once, ranks=2):
        # all_gather: whole, varying, again after the write, and the gradient of the take. reduce_scatter: of varying.
        assert calls == {"all_gather": 4, "reduce_scatter": 1}


def test_half_precision_gradients_of_parameters_are_summed_wide(workers: LocalWorkers) -> None:
    for wide, narrow in workers.run(parameter_sums_are_wide, ranks=3):
        assert wide.dtype == narrow.dtype == torch.bfloat16
        exact = torch.tensor([1.0 + 2 * 2.0**-9]).bfloat16()
        assert torch.equal(wide, exact)
