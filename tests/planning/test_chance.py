"""Random numbers that decide what a forward calls: one error under a pipeline, no unit that a data rank could skip."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.chance import LARGEST, SMALLEST, drawing
from meshwright.workers.pool import LocalWorkers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


HELD = {
    "held python": random.Random,
    "held numpy": np.random.default_rng,
    "held old numpy": np.random.RandomState,
    "held torch": lambda seed: torch.Generator().manual_seed(seed),
}


class Skipping(nn.Module):
    """Skips blocks by chance; ``by``: whose numbers, those of a generator that it holds, perhaps; ``share``: how often."""

    def __init__(self, by: str, share: float = 0.05) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.by, self.share = by, share
        self.generator = HELD[by](3) if by in HELD else None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i % 2 or self.draw() >= self.share:
                x = block(x)
        return x.square().mean()

    def draw(self) -> float:
        if self.by == "held torch":
            return torch.rand((), generator=self.generator).item()
        if self.by in HELD:
            return float(self.generator.random() if hasattr(self.generator, "random") else self.generator.rand())
        return {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[self.by]()


class Noisy(nn.Module):
    """Values that follow from Python's and NumPy's numbers, drawn in the model and in its blocks; no path."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + random.random()
        keep = torch.from_numpy(np.random.rand(x.shape[-1]) < 0.7)
        x = x * scale * keep
        for block in self.blocks:
            x = block(x)
        last = 1 + random.random()
        x = self.blocks[0](x * last) / last
        return ((x / scale) * keep).square().mean() + last


class NoisyBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Held(nn.Module):
    """The last block draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(3)), HeldBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class HeldBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=self.generator)


class Refusing(Block):
    """An error if a value is not what it always is."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x).any()):
            return super().forward(x)
        return self.refuse()

    def refuse(self) -> Tensor:
        raise ValueError("nothing is equal to itself")


class Guarded(Block):
    """An error, too, which planning sees coming: with any other value, this is the path."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x).any()):
            return super().forward(x)
        raise ValueError("nothing is equal to itself")


class Refuses(nn.Module):
    def __init__(self, block: type[Block] = Refusing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), block(), block()])
        self.last = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.last):
            x = block(x)
        return x.square().mean()


def rows() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def units(recipe: mw.Recipe) -> set[str]:
    return {unit.name for unit in recipe.units} - {""}


@pytest.mark.parametrize("by", ["python", "numpy", "held python", "held numpy", "held old numpy"])
@pytest.mark.parametrize("plan", [{"mesh": "pp=2"}, {"mesh": "pp=2,dp_shard=2"}])
def test_a_path_by_chance_is_one_error_before_anything_starts(by: str, plan: dict[str, str]) -> None:
    with pytest.raises(mw.PlanError, match=r"Python's or NumPy's decide what it computes.*test_chance.py") as raised:
        mw.make_recipe(lambda: Skipping(by), plan, rows())
    assert len(raised.value.findings) == 1


@pytest.mark.parametrize("by", ["python", "numpy", "torch", *HELD])
def test_a_block_that_chance_may_skip_is_no_unit_of_fsdp(by: str) -> None:
    recipe = mw.make_recipe(lambda: Skipping(by, 0.01), "dp_shard=2", rows())
    assert units(recipe) == {"blocks.1", "blocks.3"}
    assert recipe.routed


class Pairs(Skipping):
    """Skips all but every other block, unless the largest numbers are drawn."""

    def __init__(self) -> None:
        super().__init__("torch", share=0.9999)
        for block in self.blocks:
            block.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def test_what_chance_skips_is_cut_too() -> None:
    recipe = mw.make_recipe(Pairs, "tp=2", rows())
    assert {line.name for line in recipe if isinstance(line.tp, mw.Shard)} >= {
        f"blocks.{i}.inner.{k}.weight" for i in range(4) for k in (0, 2)
    }
    assert not any("not used" in note for note in recipe.notes)


@pytest.mark.parametrize("by", HELD)
@pytest.mark.parametrize("mesh", ["pp=2", "dp_shard=2", "tp=2"])
def test_planning_draws_no_numbers_of_a_generator_that_a_module_holds(by: str, mesh: str) -> None:
    made: list[Skipping] = []

    def build() -> nn.Module:
        made.append(Skipping(by, 0.0))
        return made[-1]

    if (by, mesh) == ("held torch", "pp=2"):  # values decide what is called between its draws
        with pytest.raises(mw.PlanError, match="how often one generator is drawn from follows from more than shapes"):
            mw.make_recipe(build, mesh, rows())
    else:
        mw.make_recipe(build, mesh, rows())
    assert [model.draw() for model in made] == [Skipping(by).draw()] * len(made)


class Rejecting(nn.Module):
    """Draws until a number fits, with each generator and in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        while torch.rand(()) < 0.5:
            pass
        while (torch.rand(4) > 0.1).all():
            pass
        while len({int(torch.randint(0, 9, (1,))) for _ in range(5)}) < 3:
            pass
        while torch.zeros(()).bernoulli_(0.5) or random.random() < 0.5:
            pass
        while np.random.rand() > 0.5:
            pass
        return self.block(x).square().mean()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2"])
def test_a_model_that_draws_until_a_number_fits_is_planned(mesh: str) -> None:
    assert not any("block" in note for note in mw.make_recipe(Rejecting, mesh, rows()).notes)


def test_numbers_that_decide_no_path_leave_plans_as_they_are() -> None:
    recipe = mw.make_recipe(Noisy, "pp=2", rows())
    assert len(recipe.stages) == 2
    assert units(mw.make_recipe(Noisy, "dp_shard=2", rows())) == {f"blocks.{i}" for i in range(4)}


def test_units_that_another_answer_does_not_come_to_are_taken_to_be_skipped() -> None:
    recipe = mw.make_recipe(Refuses, "dp_shard=2", rows())
    assert units(recipe) == {"blocks.0", "blocks.1", "blocks.2"}
    recipe = mw.make_recipe(lambda: Refuses(Guarded), "dp_shard=2", rows())
    assert units(recipe) == {*(f"blocks.{i}" for i in range(4)), "last.0", "last.1"}


def test_smallest_and_largest_numbers_and_then_as_before() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.getstate(), np.random.get_state()[1].tolist()
    with drawing(SMALLEST):
        assert [random.random(), np.random.rand(), random.choice("abc")] == [0.0, 0.0, "a"]
        np.random.randn(3)  # draws until a pair fits
    with drawing(LARGEST):
        assert min(random.random(), np.random.rand()) > 0.999999
        random.randrange(5)  # draws until a number fits
        assert torch.rand(2).min() > 0.999999 and torch.randint(2, 9, (3,)).tolist() == [8, 8, 8]
        assert torch.zeros(2).uniform_(3, 4).min() > 3.999 and torch.zeros(2).bernoulli_(0.01).tolist() == [1, 1]
    with drawing(7):
        torch.rand(3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected


def stepped(build: type[nn.Module], plan: dict[str, object], steps: int) -> tuple[list[float], list[float]]:
    job = mw.parallelize(build, plan, batch=rows())
    own = rows().chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    return [job.step(own).item() for _ in range(steps)], [random.random(), float(np.random.rand())]


def skipping() -> nn.Module:
    return Skipping("python", 0.5)


def test_data_ranks_that_skip_different_blocks_do_not_wait_for_each_other(workers: LocalWorkers) -> None:
    first, second = workers.run(stepped, skipping, {"mesh": "dp_shard=2"}, 8, ranks=2, timeout=60)
    assert first[0] == second[0]
    assert first[1] != second[1], "data ranks draw different numbers"


def test_stages_draw_the_same_numbers_of_the_host_s(workers: LocalWorkers) -> None:
    first, second = workers.run(stepped, Noisy, {"mesh": "pp=2", "microbatches": 2}, 3, ranks=2, timeout=60)
    assert first == second
    # x·s/s and x·l/l are x if all stages have the same s and l; blocks multiply by 1 to 2.
    assert all(1 < loss < 3000 for loss in first[0]) and len(set(first[0])) == 3


def test_a_generator_of_a_later_stage_goes_on_from_step_to_step(workers: LocalWorkers) -> None:
    losses, _ = workers.run(stepped, Held, {"mesh": "pp=2", "microbatches": 1}, 3, ranks=2, timeout=60)[0]
    torch.manual_seed(0)
    model = Held()
    assert losses == pytest.approx([model(rows()).item() for _ in range(3)], rel=1e-5)
