"""What a forward leaves on its modules is, after a step, what one device has: also for whoever saves it."""

from __future__ import annotations

import logging
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.generators import seed_all
from meshwright.workers.pool import LocalWorkers


class Keeping(nn.Module):
    """Buffers and lists that are assigned from activations which tp cuts, or of which it has summands; and read later."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4)
        self.register_buffer("mean", torch.zeros(9))
        self.register_buffer("sums", torch.zeros(4))
        self.recent, self.last = [torch.zeros(9)], {"pair": (torch.zeros(9), 0)}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x)) + self.mean + self.recent[-1] + self.last["pair"][0]
        out = self.down(h) + self.sums
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        self.sums = nn.functional.linear(h.detach(), self.down.weight.detach()).sum(0) * 0.1
        self.recent.append(h.detach().amax(0))
        self.last["pair"] = h.detach().amin(0), len(self.recent)
        return out.pow(2).mean()


class Growing(nn.Module):
    """Each block puts a buffer of another shape, or type, in a buffer's place; one registers a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for block in self.blocks:
            block.register_buffer("positions", torch.zeros(1))
            block.register_forward_hook(self.grow)

    @staticmethod
    def grow(block: nn.Module, inputs: Any, out: Tensor) -> None:
        block.register_buffer("positions", torch.arange(7))
        block.register_buffer("late", torch.ones(2, 3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).mean()


def rows() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def kept(build: Any, plan: Any, folder: str) -> dict[str, Any]:
    job = mw.parallelize(build, plan, batch=rows(), dtype=torch.float64)
    losses = [job.step(rows()).item() for _ in range(3)]
    whole = dict(job.full_buffers())
    found = {"losses": losses, "buffers": whole, "states": torch.get_rng_state()}
    if build is Keeping:
        if job.rank == 0:  # one rank alone reads them
            found["recent"] = [t.tolist() for t in job.module.recent]
            found["pair"] = job.module.last["pair"][0].tolist(), job.module.last["pair"][1]
        job.save(folder, step=3)
        job.load(folder)
        found["loaded"] = dict(job.full_buffers())
    return found


def by_hand(build: Any) -> tuple[nn.Module, list[float]]:
    seed_all(0)
    model, losses = build().double(), []
    for _ in range(3):
        loss = model(rows())
        loss.backward()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_assigned_from_a_cut_activation_is_whole(ranks: int, workers: LocalWorkers, tmp_path: object) -> None:
    found = workers.run(kept, Keeping, f"tp={ranks}", str(tmp_path), ranks=ranks)[0]
    model, losses = by_hand(Keeping)
    assert found["losses"] == pytest.approx(losses, rel=1e-12)
    for read in ("buffers", "loaded"):
        torch.testing.assert_close(found[read], dict(model.named_buffers()))
    assert found["recent"] == [pytest.approx(t.tolist(), rel=1e-12) for t in model.recent]
    assert found["pair"][0] == pytest.approx(model.last["pair"][0].tolist()) and found["pair"][1] == 4


def test_a_buffer_of_another_shape_comes_from_the_stage_that_has_it(workers: LocalWorkers, tmp_path: object) -> None:
    first, second = workers.run(kept, Growing, {"mesh": "pp=2"}, str(tmp_path), ranks=2)
    model, losses = by_hand(Growing)
    assert first["losses"] == pytest.approx(losses, rel=1e-12)
    expected = dict(model.named_buffers())
    for name in ("blocks.0.positions", "blocks.1.positions", "blocks.0.late"):
        assert torch.equal(first["buffers"][name], expected[name]), name
    assert not torch.equal(first["states"], second["states"]), "stages draw different numbers"


# --- what the next forward begins with, over stages -------------------------------------------------------------------


class Remembering(nn.Module):
    """Adds its last activation to the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x))
        if self.last is not None:
            h = h + self.last
        self.last = h.detach()
        return h


class RemembersWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() if i % 2 else nn.Linear(4, 4) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.pow(2).mean()


class RemembersItself(nn.Module):
    """The model's own forward begins with what the last one ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            x = x + self.last
        for block in self.blocks:
            x = torch.tanh(block(x))
        self.last = x.detach()
        return x.pow(2).mean()


class HooksInItsFirstForward(nn.Module):
    """Collects what blocks give by hooks that it registers when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.seen: list[Tensor] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            for i in (0, 2):
                self.blocks[i].register_forward_hook(lambda module, given, out: self.seen.append(out))
            self.hooked = True
        self.seen.clear()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x + self.seen[0] * 2 + self.seen[1] * 3).pow(2).mean()


class Stats:
    """The mean of activations, and how many there were."""

    def __init__(self) -> None:
        self.mean, self.seen = torch.zeros(4, dtype=torch.float64), 0

    def take(self, x: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen += len(x)


class Measuring(nn.Module):
    def __init__(self, stats: Any) -> None:
        super().__init__()
        self.fc, self.stats = nn.Linear(4, 4), stats

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x + self.stats.mean)
        self.stats.take(h)
        return torch.tanh(h)


class Measures(nn.Module):
    """Blocks with a plain object each, or one for all, which is read at the end too."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        every = Stats()
        self.blocks = nn.ModuleList(Measuring(every if shared else Stats()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class MeasuresAll(Measures):
    def __init__(self) -> None:
        super().__init__(shared=True)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = super().forward(x)
        self.blocks[0].stats.take(loss.expand(1, 4))
        return loss


class Strange:
    """An object that must not be asked anything; it is in itself."""

    def __init__(self) -> None:
        self.me, self.lock, self.log = self, threading.Lock(), logging.getLogger("strange")
        self.table, self.numbers = {str(i): i for i in range(1000)}, list(range(1000))

    @property
    def told(self) -> Any:
        raise AssertionError("a property was read")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def _never(self, *args: Any) -> Any:
        raise AssertionError("a method was called")

    __eq__ = __bool__ = __len__ = __iter__ = __copy__ = _never  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Holding(nn.Module):
    """An object that cannot be of another class for a while, and one that is not to be touched."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.strange = nn.Linear(4, 4), Strange()
        self.plain = SimpleNamespace(mean=torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        plain = self.plain
        h = self.fc(x) + plain.mean
        plain.mean = plain.mean + h.detach().mean(0)
        return torch.tanh(h)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Holding() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def trained(build: Any, plan: Any) -> list[float]:
    job, losses = mw.parallelize(build, plan, batch=rows(), dtype=torch.float64), []
    optimizer = torch.optim.SGD(job.parameters(), 0.1)
    for _ in range(4):
        losses.append(job.step(rows()).item())
        optimizer.step(), optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("build", "microbatches"),
    [(RemembersWithin, 1), (HooksInItsFirstForward, 1), (partial(Measures, False), 2), (partial(Measures, True), 1),
     (Holds, 1)],
)  # fmt: skip
def test_a_module_begins_with_what_its_last_forward_left_in_its_own_stage(
    build: Any, microbatches: int, workers: LocalWorkers
) -> None:
    found = workers.run(trained, build, {"mesh": "pp=2", "microbatches": microbatches}, ranks=2, timeout=60)
    seed_all(0)
    model, expected = build().double(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        loss = model(rows())
        loss.backward()
        expected.append(loss.item())
        optimizer.step(), optimizer.zero_grad()
    assert found == [pytest.approx(expected, rel=1e-12)] * 2


def test_a_model_whose_next_forward_goes_another_way_is_one_error_before_anything_starts() -> None:
    with pytest.raises(mw.PlanError, match=r"test_modulestate.py:\d+, in the model(.|\n)*left in last") as raised:
        mw.make_recipe(RemembersItself, "pp=2", rows().float())
    assert len(raised.value.findings) == 1


def test_an_object_that_all_stages_would_change_is_one_error_before_anything_starts() -> None:
    made: list[Any] = []

    def build() -> nn.Module:
        made.append(MeasuresAll())
        return made[-1]

    with pytest.raises(
        mw.PlanError, match=r"blocks.0.stats.mean is kept for the next forward \(.*test_modulestate.py:\d+"
    ):
        mw.make_recipe(build, "pp=2", rows().float())
    kept = made[-1].blocks[0].stats
    assert type(kept) is Stats and kept.seen == 0 and not kept.mean.is_meta and not kept.mean.any()


def test_planning_leaves_no_hooks() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(HooksInItsFirstForward())
        return made[-1]

    mw.make_recipe(build, "pp=2", rows().float())
    assert all(not model.blocks[0]._forward_hooks for model in made)


# --- what is told -----------------------------------------------------------------------------------------------------


class Noting(nn.Module):
    """A block of the last stage notes the largest number that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), NotingBlock()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).pow(2).mean()


class NotingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.largest = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.largest = x.detach().abs().amax()
        return self.fc(x)


def notes_of(build: Any, plan: Any) -> tuple[str, ...]:
    job = mw.parallelize(build, plan, batch=rows(), dtype=torch.float64)
    job.step(rows())
    return job.notes


def test_notes_are_alike_on_all_ranks(workers: LocalWorkers) -> None:
    first, second = workers.run(notes_of, Noting, {"mesh": "pp=2", "microbatches": 2}, ranks=2, timeout=60)
    assert first == second
    assert any("last.largest" in note for note in first)
