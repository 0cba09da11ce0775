"""What values alias under the view is what they alias on one device: random chains of views, copies and writes in place."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from alias_programs import MAKE, WRITE, Choose, Meeting, Program, ThreadAxis, compare, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright.layout import PARTIAL, Layout, Shard, even_shard
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a matrix's transpose where there is no matrix
        yield


# ---- random programs ----


def chosen_by(seed: int) -> Choose:
    return random.Random(seed).randrange


# Programs that were once wrong.
SEEDS = [
    (269, 4),
    (501, 4),
    (25, 4),
    (88, 4),
    (118, 4),
    (1115, 4),
    (658, 4),
    (751, 4),
    (819, 4),
    (1980, 5),
    (2435, 5),
    (565, 5),
]
SEEDS += [(4459, 6), (4655, 6), (3552, 6), (3978, 6), (4983, 6), (5578, 6), (20906, 6), (20620, 6), (6368, 9)]


@pytest.mark.parametrize(("seed", "length"), SEEDS)
def test_programs_that_were_once_wrong(seed: int, length: int) -> None:
    compare(Program(chosen_by(seed), 2 + seed % 2, length))


@given(st.integers(0, 2**32), st.integers(2, 3), st.integers(1, 8))
@settings(max_examples=200)
def test_random_views_copies_and_writes_are_those_of_one_device(seed: int, ranks: int, length: int) -> None:
    compare(Program(chosen_by(seed), ranks, length))


@pytest.mark.proof
@given(st.integers(0, 2**32), st.integers(2, 3), st.integers(1, 12))
@settings(max_examples=6000)
def test_many_random_views_copies_and_writes_are_those_of_one_device(seed: int, ranks: int, length: int) -> None:
    compare(Program(chosen_by(seed), ranks, length))


def test_random_programs_use_every_function() -> None:
    used = {name for seed in range(300) for name, _, _ in Program(chosen_by(seed), 2, 6).steps}
    assert used == {*MAKE, *WRITE}


# ---- programs that people write ----


def both(function: Callable[[Tensor], Any], shape: tuple[int, ...], layout: Layout, ranks: int = 2) -> None:
    """Compares results and the gradient of the first one with those of one device."""
    start = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = start.clone().requires_grad_()
    expected = function(leaf * 1)
    expected = expected if isinstance(expected, tuple) else (expected,)
    expected[0].sin().sum().backward()
    base = ThreadAxis(Meeting(1), 0)

    def on_one(dispatcher: Dispatcher) -> None:
        mine = start.clone().requires_grad_()
        with SpmdMode(dispatcher, lambda p: None):
            if isinstance(layout, Shard):
                x = dispatcher.global_tensor(dispatcher.shard(mine * 1, layout).clone(), layout)
            else:
                x = dispatcher.global_tensor(mine / ranks, PARTIAL)
            results = function(x)
            results = results if isinstance(results, tuple) else (results,)
            for a, b in zip(expected, results, strict=True):
                torch.testing.assert_close(dispatcher.full_tensor(b) if isinstance(b, Tensor) else b, a)
            dispatcher.full_tensor(results[0]).sin().sum().backward()
        assert mine.grad is not None and leaf.grad is not None
        torch.testing.assert_close(mine.grad if isinstance(layout, Shard) else mine.grad * ranks, leaf.grad)

    # The patches of code that bypasses torch functions are on for all threads.
    with SpmdMode(Dispatcher(base, base.ledger), lambda p: None).on():
        on_ranks(ranks, on_one)


CUTS = [even_shard(1, 3, 2), even_shard(2, 4, 2), Shard(1, ((3, 0),)), PARTIAL]


def a_copy_of_heads(x: Tensor) -> Tensor:
    """Heads are joined, which one device copies for: with one head a rank, the local tensors need no copy."""
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    joined = heads.transpose(1, 2).transpose(1, 2).contiguous()
    joined.mul_(3.0)
    return heads.sum() + joined


def a_reshape_that_copies(x: Tensor) -> Tensor:
    flat = x.transpose(1, 2).reshape(x.shape[0], -1)
    flat.zero_()
    return x + flat.sum()


def conversions(x: Tensor) -> tuple[Any, ...]:
    """``to`` copies another type and, if asked, the same one; with a memory format it copies what has another one, and a
    transposed tensor has none."""
    heads = (x * 1).transpose(1, 2)
    heads.to(memory_format=torch.contiguous_format).mul_(3.0)
    heads.to(x.dtype).add_(1.0)
    heads.to("cpu", memory_format=torch.preserve_format).sub_(0.5)
    for copied in (heads.to(x.dtype, copy=True), heads.to(torch.complex128, memory_format=torch.contiguous_format)):
        copied.zero_()
    images = torch.stack([x, x * 2], -1)
    last = images.to(memory_format=torch.channels_last)
    last.mul_(2.0)
    last.to(memory_format=torch.contiguous_format).add_(1.0)
    last.to(memory_format=torch.channels_last).add_(2.0)
    return heads, images, last, last.stride()


def a_view_of_a_sum(x: Tensor) -> Tensor:
    y = (x.transpose(1, 2) * 2).transpose(1, 2)
    y.view(-1).mul_(2.0)
    return y


def writes_to_pieces(x: Tensor) -> Tensor:
    y = x * 1
    y.tensor_split(2, -1)[0].mul_(2.0)
    y.hsplit(y.shape[1])[-1].add_(1.0)
    y.vsplit([1])[-1].mul_(1.5)
    y.dsplit([1, 3])[1].sub_(0.5)
    y.mH[0].mul_(0.5)
    y.adjoint()[1:].mul_(3.0)
    y[0].H[1].add_(2.0)
    torch.broadcast_tensors(y, torch.ones(1, dtype=y.dtype))[0].sub_(0.25)
    return y


def a_write_to_data(x: Tensor) -> Tensor:
    y = x * 1
    before = y.sort(1).values.sum()  # gathers it
    y.data.mul_(0.5)
    return y.sort(1).values + before


def strides_of_one_device(x: Tensor) -> tuple[Any, ...]:
    y = x.transpose(1, 2) * 1.0
    strided = y.as_strided(y.shape, y.stride())
    strided[0].mul_(2.0)
    return y, y.stride(), y.is_contiguous(), y.storage_offset(), y[:, 1:].data_ptr() == y[:, 1:].mT.data_ptr()


def several_outs(x: Tensor) -> tuple[Any, ...]:
    values, places = x.detach() * 0, torch.zeros(x.shape, dtype=torch.int64)
    torch.sort(x.detach(), 1, out=(values, places))
    return x + values, places


def values_set(x: Tensor) -> Tensor:
    y = x * 1
    y[:] = x.mean((0, 1))[None, None, None, :]
    y[0] = x.mean((0, 2))[None, :, None]
    y[:, :, 1:3] = x.mean(1, keepdim=True)[None][..., :2]
    return y


def shapes_changed_in_place(x: Tensor) -> tuple[Any, ...]:
    y = x * 1
    y.unsqueeze_(1)
    y.transpose_(0, -1)
    kept = y.squeeze(1)
    y.squeeze_(1)
    y.swapaxes_(0, 1)
    first = y[0]
    y.transpose_(0, 2)
    first.mul_(2.0)
    return y, kept, first, len(y), torch.numel(y), torch.Tensor.size(y, 0)


def filled(x: Tensor) -> Tensor:
    plain = torch.zeros(2, dtype=x.dtype)
    return x * plain.new_full((x.shape[-1],), x.detach().sum()) + x.new_full((1,), x.detach().max())


PEOPLE = [
    a_copy_of_heads, a_reshape_that_copies, conversions, a_view_of_a_sum, writes_to_pieces, a_write_to_data, strides_of_one_device,
    several_outs, values_set, shapes_changed_in_place, filled,
]  # fmt: skip


@pytest.mark.parametrize("layout", CUTS, ids=str)
@pytest.mark.parametrize("function", PEOPLE)
def test_what_is_written_and_aliased_is_that_of_one_device(function: Callable[[Tensor], Any], layout: Layout) -> None:
    both(function, (2, 3, 4), layout)


def test_attention_of_one_head_a_rank_lies_as_that_of_all_heads() -> None:
    def attend(x: Tensor) -> Tensor:
        found = functional.scaled_dot_product_attention(x, x, x)
        joined = found.transpose(1, 2).reshape(2, 5, -1)
        assert found.is_contiguous() or joined.is_contiguous()
        return joined

    both(attend, (2, 2, 5, 4), even_shard(1, 2, 2))


def test_attention_by_another_kernel_lies_as_that_kernel_lays_it() -> None:
    """A mask with a gradient takes another kernel, whose result has other strides: a copy on one device, or a view."""

    def attend(x: Tensor) -> tuple[Tensor, ...]:
        q = x.transpose(1, 2)
        k, mask = q.contiguous(), torch.zeros(1, 1, 5, 5, dtype=x.dtype)
        results = [
            functional.scaled_dot_product_attention(q, k, k, mask.clone().requires_grad_(learnt)).transpose(1, 2)
            for learnt in (True, False, True)
        ]
        assert [r.is_contiguous() for r in results] == [False, True, False]
        joined = results[1].view(2, 5, -1)
        joined.mul_(2.0)
        return *results, joined

    both(attend, (2, 5, 4, 4), even_shard(2, 4, 2))


@pytest.mark.parametrize("layout", CUTS, ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_a_value_that_is_cut(reentrant: bool, layout: Layout) -> None:
    def segment(x: Tensor, scale: float, y: Tensor) -> tuple[Any, ...]:
        return (x * scale).softmax(1) * y, None, y.sum()

    def run(x: Tensor) -> tuple[Any, ...]:
        given, _, total = checkpoint(segment, x, 2.0, x.transpose(1, 2).tanh().mT, use_reentrant=reentrant)
        return given + total, given

    both(run, (2, 3, 4), layout)


@pytest.mark.parametrize("move", [lambda plain, x: plain.to(x), lambda plain, x: plain.type_as(x)])
def test_a_tensor_goes_to_the_device_and_the_type_of_one_that_is_cut(move: Callable[[Tensor, Tensor], Tensor]) -> None:
    def run(dispatcher: Dispatcher) -> None:
        x = GlobalTensor(torch.empty(2, 2, dtype=torch.bfloat16, device="meta"), even_shard(1, 4, 2), dispatcher)
        with SpmdMode(dispatcher, lambda p: None):
            found = move(torch.ones(3), x)
        assert (found.device.type, found.dtype) == ("meta", torch.bfloat16)

    on_ranks(1, run)


def test_a_value_that_is_already_so_is_handed_back_itself() -> None:
    def run(dispatcher: Dispatcher) -> None:
        x = GlobalTensor(torch.rand(2, 2), even_shard(1, 4, 2), dispatcher)
        with SpmdMode(dispatcher, lambda p: None):
            for same in (x.contiguous(), x.to(torch.float32), x.float(), x.cpu(), x.type_as(x), x.real, x.positive()):
                assert same is x
            assert nn.Dropout().eval()(x) is x
            assert x.transpose(0, 1).contiguous() is not x

    on_ranks(1, run)


def test_as_strided_to_elements_that_are_not_its_own_is_refused() -> None:
    def run(dispatcher: Dispatcher) -> None:
        x = GlobalTensor(torch.rand(2, 2), even_shard(1, 4, 2), dispatcher)
        with SpmdMode(dispatcher, lambda p: None), pytest.raises(NotImplementedError, match="not its own"):
            x.as_strided((3, 4), (4, 1))

    on_ranks(1, run)
