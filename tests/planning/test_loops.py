"""Loops that go on until a value says so: a forward without values comes to their end, and a job runs as many turns as one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.planning.loops import IN_FOR, IN_WHILE
from meshwright.planning.shadow import Shadow
from meshwright.spmd.uncompiled import UNCOMPILED
from meshwright.workers.pool import LocalWorkers


def _while(t: Tensor) -> None:
    while t.norm() > 1:
        t = t * 0.5


def _while_not(t: Tensor) -> None:
    while not (t > 0).all():
        t = t + 1


def _number_falls(t: Tensor) -> None:
    error = t.norm().item()
    while error > 1e-3:
        error = (t * 0.5).norm().item()


def _number_grows(t: Tensor) -> None:
    while t.sum().item() < 50:
        t = t * 2


def _whole_number_grows(t: Tensor) -> None:
    n = (t > 0).sum()
    while int(n) < 10_000:
        n = n * 2


def _break(t: Tensor) -> None:
    while True:
        t = t * 0.5
        if t.norm() < 1:
            break


def _counted(t: Tensor) -> int:
    for i in itertools.count():
        t = t * 0.5
        if t.norm() < 1 and not t.norm() > 1:
            return i
    raise AssertionError


def _in_a_function(t: Tensor) -> None:
    def converged(t: Tensor) -> bool:
        return not bool(t.norm() > 1)

    while not converged(t):
        t = t * 0.5


def _in_a_generator(t: Tensor) -> None:
    def halves(t: Tensor) -> Any:
        while t.norm() > 1:
            t = t * 0.5
            yield t

    for _ in halves(t):
        pass


def _in_a_comprehension(t: Tensor) -> None:
    while any([bool(row.norm() > 1) for row in t]):  # noqa: C419 all are read
        t = t * 0.5


def _one_within_other(t: Tensor) -> None:
    while t.norm() > 1:
        while t.max() > 1:
            t = t - 1
        t = t * 0.5


def _either(t: Tensor) -> None:
    while t.norm() > 1 or t.max() > 1 or not t.isfinite().all():
        t = t * 0.5


def _close(t: Tensor) -> None:
    before = t
    zeros = torch.zeros(3, 4)  # has values
    while not torch.allclose(zeros, t, atol=1e-3) or not torch.equal(t, before):
        before, t = t, t * 0.5


def _positions(t: Tensor) -> None:
    while len((t > 1).nonzero()):
        t = t * 0.5


def _selected(t: Tensor) -> None:
    rows = t[:, 0]
    while rows.numel():
        rows = rows[rows > 0]


def _selected_by_function(t: Tensor) -> None:
    while len(torch.masked_select(t, t > 0)):
        t = t - 1


def _guarded(t: Tensor) -> None:
    while t.norm() > 1:
        t = t * 0.5
        for _ in range(2 * IN_WHILE):
            if t.isnan().any():
                raise FloatingPointError
            if not t.isfinite().all():
                raise FloatingPointError


def _of_torch(t: Tensor) -> None:
    torch._higher_order_ops.while_loop(lambda t: t.norm() > 1, lambda t: (t * 0.5,), (t,))


READERS: list[Callable[[Tensor], Any]] = [
    _while, _while_not, _number_falls, _number_grows, _whole_number_grows, _break, _counted, _in_a_function, _in_a_generator,
    _in_a_comprehension, _one_within_other, _either, _close, _positions, _selected, _selected_by_function, _guarded, _of_torch,
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("contrary", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_loop_ends_without_values(reader: Callable[[Tensor], Any], contrary: bool) -> None:
    with UNCOMPILED.on(), Shadow(contrary=contrary) as shadow:
        reader(torch.empty(3, 4, device="meta"))
    assert shadow.reads


@pytest.mark.timeout(60)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_loop_over_the_batch_ends_with_the_opposite_answers(steps: int) -> None:
    """Whether it runs at all on one device or not."""

    def run(i: Tensor) -> None:
        while i < 3:
            i = i + 1

    with Shadow(contrary=True):
        run(torch.tensor(3 - steps))


def test_a_read_that_is_in_no_loop_of_the_model_gets_the_usual_answer() -> None:
    """Also if the model's caller is in a loop; and so do the reads of a long loop that ends by itself."""
    flag = torch.empty((), device="meta", dtype=torch.bool)
    answers = []
    while len(answers) < 3 * IN_WHILE:
        with Shadow():
            answers.append(bool(flag))
    with Shadow():
        answers += [bool(flag) for _ in range(IN_FOR - 1)]
    assert all(answers)


def test_a_bool_stays_in_a_loop_at_first() -> None:
    """So that planning sees more than its first turn."""

    def left_early(t: Tensor) -> int:
        for i in range(5):
            if t.max() < 0.5:
                return i
        return 5

    def broken_off(t: Tensor) -> int:
        turns = []
        for _ in range(5):
            if not t.max() < 0.5:
                break
            turns.append(t)
        return len(turns)

    def until(t: Tensor) -> int:
        count = 0
        while not (t > 0).all():
            count += 1
        return count

    def skipped(t: Tensor) -> int:
        """Stays in the loop in both cases: the usual answer."""
        count = 0
        for _ in range(5):
            if t.max() < 0.5:
                count += 1
        return count

    with Shadow():
        t = torch.empty(3, device="meta")
        assert [left_early(t), broken_off(t), skipped(t)] == [5, 5, 5]
        assert until(t) >= IN_WHILE
    with Shadow(contrary=True):
        assert [left_early(t), broken_off(t), skipped(t), until(t)] == [0, 0, 0, 0]


def test_each_layer_that_runs_the_loop_begins_anew() -> None:
    """Also where its frame lies in the memory of the frame before."""
    turns = []

    def layer(t: Tensor) -> None:
        count = 0
        while t.norm() > 1:
            t, count = t * 0.5, count + 1
        turns.append(count)

    def two_generators(t: Tensor) -> Iterator[int]:
        count = 0
        while t.norm() > 1:
            yield (count := count + 1)

    with Shadow():
        for _ in range(20):
            layer(torch.empty(3, device="meta"))
        assert len(turns) == 20 and len(set(turns)) == 1 and turns[0] >= IN_WHILE
        pairs = list(zip(*(two_generators(torch.empty(3, device="meta")) for _ in range(2)), strict=True))
    assert len(pairs) == turns[0]


# --- jobs ---------------------------------------------------------------------------------------------------------------


def _normed(model: Any, h: Tensor) -> Tensor:
    h = model.a(h)
    while h.norm() > 1:
        h = h * 0.5
    return h


def _equilibrium(model: Any, h: Tensor) -> Tensor:
    """A deep equilibrium model: its layer runs until it changes little."""
    z, error = torch.zeros_like(h), 1.0
    while error > 1e-2:
        now = torch.tanh(model.a(z) * 0.3 + h)
        z, error = now, (now - z).norm().item()
    return z


def _adaptive(model: Any, h: Tensor) -> Tensor:
    """Adaptive computation time: a layer runs until it halts at each position."""
    halted = torch.zeros(h.shape[:-1], dtype=h.dtype)
    while (halted < 0.9).any():
        h = model.a(h).tanh()
        halted = halted + model.b(h).sigmoid().mean(-1)
    return h


def _counted_turns(model: Any, h: Tensor) -> Tensor:
    z = torch.zeros_like(h)
    for _ in itertools.count():
        z, before = torch.tanh(model.a(z) * 0.3 + h), z
        if (z - before).norm() < 1e-2:
            return z
    raise AssertionError


def _not_at_all(model: Any, h: Tensor) -> Tensor:
    steps = torch.tensor(0)
    while steps > 0:
        h = model.b(h)
    return model.a(h)


class Model(nn.Module):
    def __init__(self, mid: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.a, self.b, self.end = (nn.Linear(8, 8) for _ in range(4))
        self.mid = mid

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.mid(self, self.begin(x))).square().mean()


PLANS: dict[str, Any] = {
    "tp": "tp=2",
    "pp": {"mesh": "pp=2", "microbatches": 2},
    "dp_shard": "dp_shard=2",
    "dp_replicate": "dp_replicate=2",
}
QUICK = {(_normed, "tp"), (_equilibrium, "dp_shard"), (_adaptive, "pp"), (_not_at_all, "dp_replicate")}


@pytest.mark.parametrize(
    "mid,plan",
    [
        pytest.param(mid, plan, marks=() if (mid, plan) in QUICK else pytest.mark.proof)
        for mid in (_normed, _equilibrium, _adaptive, _counted_turns, _not_at_all)
        for plan in PLANS
    ],
)
def test_a_job_runs_as_many_turns_as_one_device(mid: Any, plan: str, workers: LocalWorkers) -> None:
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = mw.check(
        partial(Model, mid), (x,), PLANS[plan], loss=lambda out: out, dtype=torch.float64, workers=workers, timeout=60
    )
    assert report, report


@pytest.mark.parametrize("mid", [_normed, _equilibrium, pytest.param(_counted_turns, marks=pytest.mark.proof)])
def test_what_it_costs_is_predicted(mid: Any) -> None:
    x = torch.randn(4, 5, 8)
    prediction = mw.predict(partial(Model, mid), (x,), "tp=2", loss=lambda out: out, hardware="a100-80")
    assert float(prediction.seconds) > 0
