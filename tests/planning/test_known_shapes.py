"""What functions give on meta is asked once, if it follows from the description of their arguments; and decided once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.planning.known_shapes import KnownShapes
from meshwright.planning.planner import Planner
from meshwright.planning.shadow import Shadow
from meshwright.private import storage_of
from meshwright.spmd.decide import DECIDERS


class CountedShadow(Shadow):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def ops_of_the_second(run: Callable[..., Any], *args: Any) -> int:
    """How many ops a function comes to when it is called again, in planning; its results are alike."""
    with torch.no_grad(), CountedShadow() as shadow, KnownShapes(shadow):
        first = run(*args)
        before = shadow.ops
        second = run(*args)
        ops = shadow.ops - before
    assert type(first) is type(second)
    if isinstance(first, Tensor):
        assert (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
        assert first is second or storage_of(first) != storage_of(second) or storage_of(first) == storage_of(args[0])
    return ops


x, w = torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta")
q = torch.empty(2, 3, 4, 5, device="meta")


@pytest.mark.parametrize(
    "run,args",
    [
        (F.linear, (x, w)),
        (torch.Tensor.mul, (x, 2.0)),
        (F.silu, (x,)),
        (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (q,)),
        (lambda x: torch.cat([x, x], 1), (x,)),
        (lambda x: x.to(torch.float64), (x,)),
    ],
)
def test_what_gives_new_memory_is_asked_once(run: Callable[..., Any], args: Any) -> None:
    assert ops_of_the_second(run, *args) == 0


def test_a_mask_with_values_is_not_computed_on_in_each_block() -> None:
    """A mask of the batch has an element for each pair of positions: gigabytes, if the sample is long."""
    allowed = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    added = torch.zeros(2, 1, 4, 4)
    assert ops_of_the_second(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=allowed), q) == 0
    assert ops_of_the_second(lambda q: F.scaled_dot_product_attention(q, q, q, added), q) == 0


@pytest.mark.parametrize(
    "run,args",
    [
        (lambda x: x.view(4, 3), (x,)),  # a view
        (lambda x: x.add_(1), (x,)),  # a write
        (lambda x: x[:, 0].clone().fill_(1), (x,)),
        (lambda x: x.nonzero(), (x,)),  # a size that follows from values
        (lambda x: x[x > 0], (x,)),
        (lambda x: bool(x.sum()), (x,)),  # a read
        (lambda x: F.dropout(x, 0.5), (x,)),  # random numbers
        (torch.rand_like, (x,)),
        (lambda x: x.chunk(2), (x,)),  # several
        (torch.Tensor.mul, (torch.ones(3), 2.0)),  # values of the batch
    ],
)
def test_what_does_anything_else_is_asked_again(run: Callable[..., Any], args: Any) -> None:
    assert ops_of_the_second(run, *args) > 0


def test_who_watches_is_told_of_a_function_that_is_not_asked_again() -> None:
    told: list[tuple[int, int, int]] = []
    shadow = Shadow(watch=lambda *of: told.append(tuple(map(len, of))))
    with torch.no_grad(), shadow, KnownShapes(shadow):
        F.linear(x, w)
        assert told
        told.clear()
        F.linear(x, w)
    assert told == [(2, 0, 1)]


def test_another_default_type_or_a_graph_is_another_question() -> None:
    with CountedShadow() as shadow, KnownShapes(shadow):
        with torch.no_grad():
            numbers = torch.empty(3, dtype=torch.int64, device="meta")
            assert (numbers / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert (numbers / 2).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
            assert F.linear(x, w).grad_fn is None
        assert F.linear(x, nn.Parameter(w)).grad_fn is not None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, count: int, odd: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i != self.odd else x + block.up(x).sort(-1).values[..., :8] + block.down(x.repeat(1, 2))
        return x.square().mean()


def recipe(count: int, odd: int | None = None) -> mw.Recipe:
    return mw.make_recipe(lambda: Blocks(count, odd), {"mesh": {"tp": 2}}, (torch.randn(4, 8),), lambda loss: loss)


def test_equal_blocks_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: Counter[str] = Counter()

    def counting(name: str, decider: Callable[..., Any]) -> Callable[..., Any]:
        def count(call: Any) -> Any:
            decided[name] += 1
            return decider(call)

        return count

    for func in (F.linear, F.gelu):
        monkeypatch.setitem(DECIDERS, func, counting(func.__name__, DECIDERS[func]))
    recipe(2)
    of_two = Counter(decided)
    decided.clear()
    recipe(9)
    assert decided == of_two and of_two.total() > 0


def test_a_block_that_is_used_in_another_way_is_seen() -> None:
    equal, other = (
        {line.name: str(line.tp) for line in recipe(5, odd).parameters if line.name.endswith("up.weight")}
        for odd in (None, 4)
    )
    assert all("Shard" in layout for layout in equal.values())
    assert all("Shard" not in layout for layout in other.values()), "a family is decided as one"


class Fused(nn.Module):
    """Blocks of other widths, so that each is a family of its own; the forward is followed again for each that is fused."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.fused = nn.ModuleList(nn.Linear(8, 3 * width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        total = F.gelu(self.first(x)).mean()
        for linear in self.fused:
            a, b, c = linear(x).chunk(3, -1)
            total = total + (a * b * c).square().mean()
        return total


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a forward is followed, and how often a call of gelu is decided in all of these."""
    seen: Counter[str] = Counter()
    init, decider = Planner.__init__, DECIDERS[F.gelu]

    def counted(planner: Planner, *args: Any) -> None:
        seen["passes"] += 1
        init(planner, *args)

    def decided(call: Any) -> Any:
        seen["gelu"] += 1
        return decider(call)

    monkeypatch.setattr(Planner, "__init__", counted)
    monkeypatch.setitem(DECIDERS, F.gelu, decided)
    return seen


def test_what_is_learnt_of_several_parameters_at_once_restarts_the_forward_once(passes: Counter[str]) -> None:
    made = mw.make_recipe(lambda: Fused(4, 8, 12), {"mesh": {"tp": 2}}, (torch.randn(4, 8),), lambda loss: loss)
    assert {str(line.tp) for line in made.parameters if "fused" in line.name} == {"Shard(0, parts=3)"}
    assert passes["passes"] == 3 + 1, "once for each weight with its bias"
    assert passes["gelu"] == 2, "once to be read, once to be executed: what was decided in one pass holds in the next"
