"""Decisions as values: what a decider says, and that a call of a known signature is not decided again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.layout import PARTIAL, REPLICATE, Shard, even_shard
from meshwright.planning.planner import Planner
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.decide import DECIDERS
from meshwright.spmd.decision import Blocks, Choice, Decision, Gather, Need, Units, Use
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.signature import UNDECIDED, Call, Operand
from meshwright.spmd.tensor import GlobalTensor, spec


def make_work(rank: int = 0) -> Dispatcher:
    """A rank of two, without processes: what is tried here moves nothing."""
    ledger = Ledger()
    return Dispatcher(Axis("tp", 2, rank, None, ledger), ledger)


def operand(index: int, shape: tuple[int, ...], layout: Any = REPLICATE, parameter: bool = False) -> Operand:
    strides = torch.empty(shape, device="meta").stride()
    kind = spec(layout, torch.Size(shape), torch.float32, torch.device("cpu"), None, 0, strides, parameter)
    return Operand(index, kind)


def decide(func: Any, *args: Any, **kwargs: Any) -> Any:
    return DECIDERS[func](Call(func, args, kwargs, rank=1, ranks=2))


def test_a_linear_says_what_its_operands_must_be_and_what_comes_out() -> None:
    x, weight, bias = (
        operand(0, (4, 6)),
        operand(1, (8, 6), even_shard(0, 8, 2), True),
        operand(2, (8,), even_shard(0, 8, 2), True),
    )
    said = decide(functional.linear, x, weight, bias)
    assert isinstance(said, Decision) and said.out == even_shard(1, 8, 2) and said.roles == ((1, "column"),)
    assert said.args == (Use(0, Need.VARYING), Use(1, even_shard(0, 8, 2)), Use(2, even_shard(0, 8, 2)))
    by_row = decide(functional.linear, operand(0, (4, 6), even_shard(1, 6, 2)), operand(1, (8, 6)), operand(2, (8,)))
    assert by_row.out == PARTIAL and by_row.args[2] == Use(2, Need.SUMMAND)


def test_an_undecided_parameter_is_offered_what_fits() -> None:
    weight = operand(1, (8, 6), parameter=True)
    assert weight.layout is UNDECIDED
    met_whole = decide(functional.linear, operand(0, (4, 6)), weight)
    assert met_whole.choices == (Choice(1, column=0, row=1),) and met_whole.out == REPLICATE
    met_cut = decide(functional.linear, operand(0, (4, 6), even_shard(1, 6, 2)), weight)
    assert met_cut.choices == (Choice(1, column=0, match=even_shard(1, 6, 2), row=1),)


def test_what_does_not_fit_says_how_it_would() -> None:
    heads = decide(Tensor.view, operand(0, (4, 6), even_shard(1, 6, 2)), 4, 3, 2)
    assert heads == Gather(Units(0, 3))
    thirds = decide(Tensor.chunk, operand(0, (4, 6), even_shard(1, 6, 2)), 3, 1)
    assert thirds == Gather(Blocks(0, (2, 2, 2)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """The calls of ``mul`` and ``add`` that were decided."""
    found: list[Call] = []

    def watched(decider: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def watch(call: Call) -> Any:
            found.append(call)
            return decider(call)

        return watch

    for func in (Tensor.mul, Tensor.add, Tensor.add_, torch.cat):
        monkeypatch.setitem(DECIDERS, func, watched(DECIDERS[func]))
    yield found


def views(dispatcher: Dispatcher, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[GlobalTensor]:
    return [GlobalTensor(torch.ones(s, dtype=dtype), Shard(0, ((s[0], s[0]),)), dispatcher) for s in shapes]


def test_a_call_of_a_known_signature_is_not_decided_again(asked: list[Call]) -> None:
    dispatcher = make_work()
    with SpmdMode(dispatcher, lambda t: None).on():
        for _ in range(3):
            x, y = views(dispatcher, (2, 3), (2, 3))
            z = torch.cat([x + y, y * 2], 1)
    assert len(asked) == 3 and z._mw_local.tolist() == [[2.0] * 6] * 2  # type: ignore[attr-defined]
    with SpmdMode(dispatcher, lambda t: None).on():
        x, y = views(dispatcher, (3, 3), (3, 3))
        assert (x + y).shape == (6, 3) and len(asked) == 4, "another shape"


def test_what_is_decided_anew_is_forgotten_and_what_was_known_before_is_known_again(asked: list[Call]) -> None:
    dispatcher = make_work()
    x, y = views(dispatcher, (2, 3), (2, 3))
    for _ in range(2):
        x + y
    assert len(asked) == 1
    with pytest.raises(KeyError), dispatcher.deciding_anew():
        for _ in range(2):
            x + y
        assert len(asked) == 2
        x * y
        raise KeyError
    x + y
    assert len(asked) == 3
    x * y
    assert len(asked) == 4, "decided in the block alone"


def test_constants_that_are_equal_and_mean_another_thing_are_told_apart(asked: list[Call]) -> None:
    dispatcher = make_work()
    with SpmdMode(dispatcher, lambda t: None).on():
        (x,) = views(dispatcher, (2,), dtype=torch.int64)
        results = [x * factor for factor in (1, 1.0, True, 1, 0.0, -0.0)]
    assert [r.dtype for r in results] == [torch.int64, torch.float32, torch.int64, torch.int64] + [torch.float32] * 2
    assert torch.signbit(results[-1]._mw_local).all() and len(asked) == 5  # type: ignore[attr-defined]


def test_decisions_depend_on_autocast_and_not_on_torchs_default_type(asked: list[Call]) -> None:
    dispatcher = make_work()
    x, w = views(dispatcher, (2, 4), (4, 4))
    w = GlobalTensor(w._mw_local, REPLICATE, dispatcher)
    found = []
    with SpmdMode(dispatcher, lambda t: None).on():
        for _ in range(2):
            found.append(functional.linear(x, w._mw_local).dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found.append(functional.linear(x, w._mw_local).dtype)
        (n,) = views(dispatcher, (2,), dtype=torch.int64)
        before = (n * 0.5).dtype
        torch.set_default_dtype(torch.float64)
        try:
            after = n * 0.5
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.bfloat16] * 2
    assert (before, after.dtype, after._mw_local.dtype) == (torch.float32, torch.float64, torch.float64)  # type: ignore[attr-defined]


def test_a_write_that_is_not_decided_again_is_seen_by_what_shares_the_memory(asked: list[Call]) -> None:
    dispatcher = make_work()
    with SpmdMode(dispatcher, lambda t: None).on():
        for _ in range(3):
            x, y = views(dispatcher, (2, 3), (2, 3))
            first = x[:, :1]
            x.add_(y)
            assert first._mw_local.flatten().tolist() == [2.0, 2.0]  # type: ignore[attr-defined]
            assert first._mw_memory.written == 1  # type: ignore[attr-defined]
    assert len(asked) == 1


def test_planning_is_no_kind_of_what_runs() -> None:
    assert not issubclass(Planner, Dispatcher) and not hasattr(Dispatcher, "column")
