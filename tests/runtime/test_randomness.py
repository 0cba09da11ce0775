"""Every generator that a forward draws from: alike where ranks run the same forward, and as on one device."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.generators import Generators, seed_all
from meshwright.workers.pool import LocalWorkers


class Drawing(nn.Module):
    """Python's numbers choose the block, NumPy's scale it, a generator of its own shifts it, torch's drop some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))
        self.scales = random.sample(range(1, 9), 3)  # the model itself depends on Python's numbers
        self.own = np.random.default_rng()  # not seeded: another on each rank, until the ranks agree

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            chosen = random.randrange(3)
            x = x + self.scales[chosen] * np.random.rand() * nn.functional.dropout(self.blocks[chosen](x), 0.3)
        return (x + self.own.random() + torch.rand(())).pow(2).mean()


def rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def drawing(folder: str) -> dict[str, object]:
    """What a tp group of this rank draws, in several ways."""
    random.seed(dist.get_rank()), np.random.seed(dist.get_rank())  # as processes of their own start
    job = mw.parallelize(Drawing, "tp=2", batch=rows(), dtype=torch.float64)
    found: dict[str, object] = {"scales": job.module.scales}
    found["first steps"] = [job.step(rows()).item() for _ in range(2)]
    if job.rank == 0:  # as a person's logging might
        torch.rand(1), random.random(), np.random.rand()
    found["noted before"] = [note for note in job.notes if "some ranks only" in note]
    found["after draws on one rank"] = [job.step(rows()).item() for _ in range(2)]
    found["noted"] = [note for note in job.notes if "some ranks only" in note]
    job.save(folder, step=4)
    found["went on"] = [job.step(rows()).item() for _ in range(2)]
    again = mw.parallelize(Drawing, "tp=2", batch=rows(), dtype=torch.float64)
    again.load(folder)
    found["resumed"] = [again.step(rows()).item() for _ in range(2)]
    seed_all(11)
    again.module.own.bit_generator.state = np.random.default_rng(5).bit_generator.state
    found["seeded"] = again.step(rows()).item()
    return found


def test_ranks_of_a_tp_group_draw_alike_from_every_generator(workers: LocalWorkers, tmp_path: object) -> None:
    first, second = workers.run(drawing, str(tmp_path), ranks=2)
    assert first == second
    assert not first["noted before"] or "before step 1" in first["noted before"][0]  # the generator that was not seeded
    assert first["noted"]
    assert first["went on"] == first["resumed"]
    seed_all(0)
    model = Drawing().double()
    assert model.scales == first["scales"]
    seed_all(11)
    model.own = np.random.default_rng(5)
    assert first["seeded"] == pytest.approx(model(rows()).item(), rel=1e-12)


def test_data_ranks_differ_in_all_and_stages_in_torch_s_numbers_alone() -> None:
    found = {}
    for data in range(2):
        for stage in range(2):
            Generators(torch.device("cpu")).start(3, data, stage)
            found[data, stage] = float(torch.rand(())), random.random(), np.random.rand()
    assert len({torchs for torchs, _, _ in found.values()}) == 4
    assert found[0, 0][1:] == found[0, 1][1:] != found[1, 0][1:] == found[1, 1][1:]
    assert found[0, 0][2] != found[1, 0][2]


def test_states_come_back_as_they_were_through_tensors() -> None:
    module = nn.Module()
    module.own, module.old, module.python = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
    module.torchs = torch.Generator().manual_seed(4)
    generators = Generators(torch.device("cpu"), module)

    def draw() -> list[float]:
        own = [module.own.normal(), module.old.randn(), module.python.gauss(0, 1)]
        return [
            *own,
            float(torch.rand((), generator=module.torchs)),
            float(torch.rand(())),
            random.gauss(0, 1),
            np.random.randn(),
        ]

    for before in range(3):  # also where a second normal number is waiting
        for _ in range(before):
            draw()
        kept, state = generators.tensors(), generators.state()
        expected = draw()
        generators.set_tensors(kept)
        assert draw() == expected
        generators.set(state)
        assert draw() == expected
        with generators.kept():
            draw()
        generators.set(state)


# --- one generator of the model's own, in several stages --------------------------------------------------------------

DRAWS = {
    "randn": lambda h, own: h + torch.randn(h.shape, generator=own, dtype=h.dtype),
    "in place": lambda h, own: h * torch.empty_like(h).uniform_(generator=own),
    "of values": lambda h, own: h * (1 + torch.multinomial(torch.softmax(h.detach(), -1), 1, generator=own)),
    "as values decide": lambda h, own: h * torch.poisson(torch.exp(h.detach()), generator=own),
}


class Noisy(nn.Module):
    def __init__(self, draw: str, own: torch.Generator) -> None:
        super().__init__()
        self.fc, self.draw, self.own = nn.Linear(6, 6), draw, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return DRAWS[self.draw](torch.tanh(self.fc(x)), self.own)


class SharedGenerator(nn.Module):
    """Blocks draw from one generator."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList(Noisy(draw, own) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Options:
    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(3)


class RootsGenerator(nn.Module):
    """The model's own forward draws between its blocks, from a generator that stands in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.options = Options()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = DRAWS["randn"](torch.tanh(block(x)), self.options.own)
        return x.pow(2).mean()


HOST: dict[str, Callable[[], Any]] = {
    "Python's": lambda: random.Random(3),
    "NumPy's": lambda: np.random.default_rng(3),
    "NumPy's old": lambda: np.random.RandomState(3),
}


class Scaled(nn.Module):
    """Scales by a number from a generator of the host's; ``acting``: if a value says so."""

    def __init__(self, own: Any, acting: bool = False) -> None:
        super().__init__()
        self.fc, self.own, self.acting = nn.Linear(6, 6), own, acting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.fc(x))
        if self.acting and (h.sum() > 100).item():
            return h
        return h * (1 + self.own.uniform(0, 1))


class SharedHostGenerator(nn.Module):
    """Blocks and the model's own forward draw from one generator of the host's, which each copy makes anew."""

    def __init__(self, of: str, acting: bool = False) -> None:
        super().__init__()
        self.own = HOST[of]()
        self.blocks = nn.ModuleList(Scaled(self.own, acting and i == 1) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean() * (1 + self.own.uniform(0, 1))


MODELS = {draw: functools.partial(SharedGenerator, draw) for draw in DRAWS} | {"by the root": RootsGenerator}
MODELS |= {of: functools.partial(SharedHostGenerator, of) for of in HOST}
LAYOUTS = [
    {"mesh": "pp=2", "microbatches": 1},
    {"mesh": "pp=2,tp=2", "microbatches": 1},
    {"mesh": "pp=2", "microbatches": 2, "recompute": "blocks"},
    {"mesh": "pp=2", "microbatches": 2, "schedule": "interleaved"},
]


def trained(build: Callable[[], nn.Module], plan: dict[str, Any]) -> list[float]:
    job = mw.parallelize(build, plan, batch=rows(), dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(job.parameters(), 0.1), []
    for _ in range(3):
        losses.append(job.step(rows()).item())
        optimizer.step(), optimizer.zero_grad()
    return losses


def trained_on_one_device(build: Callable[[], nn.Module], pieces: int) -> list[float]:
    seed_all(0)
    model, losses = build().double(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        of_pieces = []
        for piece in rows().chunk(pieces):
            of_pieces.append(model(piece) / pieces)
            of_pieces[-1].backward()
        losses.append(sum(loss.item() for loss in of_pieces))
        optimizer.step(), optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param(m, p, id=f"{m}-{' '.join(map(str, p.values()))}", marks=[pytest.mark.proof] if i and j % 3 else [])
        for j, m in enumerate(MODELS)
        for i, p in enumerate(LAYOUTS)
    ],
)
def test_stages_draw_from_one_generator_what_one_device_draws(model: str, plan: Any, workers: LocalWorkers) -> None:
    ranks = 4 if "tp" in plan["mesh"] else 2
    found = workers.run(trained, MODELS[model], plan, ranks=ranks, timeout=60)
    expected = trained_on_one_device(MODELS[model], plan["microbatches"])
    assert found == [pytest.approx(expected, rel=1e-12)] * ranks


def test_what_draws_as_values_decide_from_one_generator_is_in_one_stage() -> None:
    recipe = mw.make_recipe(MODELS["as values decide"], "pp=2", rows().float())
    assert any({f"blocks.{i}" for i in range(4)} <= set(stage.modules) for stage in recipe.stages)


def test_a_generator_of_the_hosts_is_told_from_which_values_decide_how_often_it_is_drawn() -> None:
    with pytest.raises(mw.PlanError, match=r"how many random numbers blocks\.1 draws may follow from a value"):
        mw.make_recipe(functools.partial(SharedHostGenerator, "Python's", acting=True), "pp=2", rows().float())


class SeveralActs(nn.Module):
    """A block draws from the generator of all, if a value says so."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.first, self.gate, self.last = Noisy("randn", own), Gate(own), Noisy("randn", own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gate(self.first(x))).pow(2).mean()


class Gate(Noisy):
    def __init__(self, own: torch.Generator) -> None:
        super().__init__("randn", own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if (x.sum() > 0).item() else x


def test_a_generator_is_told_that_cannot_be_drawn_from_in_several_stages() -> None:
    with pytest.raises(mw.PlanError, match="how often one generator is drawn from") as raised:
        mw.make_recipe(SeveralActs, "pp=8", rows().float())
    assert len(raised.value.findings) == 1


class DrawsInItsLastBlock(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.own = torch.Generator().manual_seed(3) if own else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x + torch.randn(x.shape, generator=self.own, dtype=x.dtype)).pow(2).mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_check_tells_which_draw_it_cannot_compare(microbatches: int, workers: LocalWorkers) -> None:
    plan = {"mesh": "pp=2", "microbatches": microbatches}
    found = mw.check(
        functools.partial(DrawsInItsLastBlock, own=False),
        (rows(),),
        plan,
        workers=workers,
        dtype=torch.float64,
        loss=itself,
    )
    assert not found
    assert [hint for hint in found.hints if "(randn, test_randomness.py:" in hint], str(found)
    if microbatches == 1:
        assert mw.check(
            functools.partial(DrawsInItsLastBlock, own=True),
            (rows(),),
            plan,
            workers=workers,
            dtype=torch.float64,
            loss=itself,
        )


def itself(output: torch.Tensor) -> torch.Tensor:
    return output


class DrawsInPlace(nn.Module):
    """Every draw in place, of tensors that are like activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        for draw in ("uniform_", "normal_", "exponential_"):
            h = h * (1 + getattr(torch.zeros_like(h), draw)())
        kept = torch.zeros_like(h).bernoulli_(0.7) + torch.zeros_like(h).random_(3)
        return self.down(h * kept).square().mean()


def drawn_in_place(plans: list[Any]) -> list[tuple[list[float], list[float]]]:
    """For each plan three losses, and those of one device from the same state of the generator."""
    found = []
    for plan in plans:
        job = mw.parallelize(DrawsInPlace, plan, batch=rows(), dtype=torch.float64)
        begun = torch.get_rng_state()
        losses = [job.step(rows()).item() for _ in range(3)]
        seed_all(0)
        model = DrawsInPlace().double()
        torch.set_rng_state(begun)
        found.append((losses, [model(rows()).item() for _ in range(3)]))
    return found


class DropsBeforeRowsMeet(nn.Module):
    """Rows meet in a mean, after torch's numbers have changed them; Python's, NumPy's and a buffer's are of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)
        self.own = np.random.default_rng(3)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.inner(x), 0.3, training=True).tanh() * torch.rand(8).to(x.dtype)
        self.last.copy_(torch.randn(8))
        met = hidden - hidden.mean(0)
        return {"loss": (self.outer(met) * (self.own.random() + random.random())).square().mean()}


class DrawsAParameter(nn.Module):
    """Its first forward draws the values that training begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(6, 8), nn.Parameter(torch.zeros(8))
        self.register_buffer("drawn", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.drawn:
            self.mean.data.copy_(torch.randn(8))
            self.drawn.fill_(1)
        return {"loss": (self.linear(x) - self.mean).square().mean()}


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_replicate=2,dp_shard=2"])
@pytest.mark.parametrize("model", [DropsBeforeRowsMeet, DrawsAParameter])
def test_data_ranks_that_each_run_all_rows_draw_what_one_device_draws(
    model: type[nn.Module], mesh: str, workers: LocalWorkers
) -> None:
    report = mw.check(model, {"x": rows(8)}, mesh, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert any(
        "Every data rank runs all rows" in note or "every data rank runs all rows" in note for note in report.notes
    )


def steps_with_draws_between(dtype: torch.dtype) -> tuple[list[float], list[float], list[float]]:
    """Losses of coupled steps, between which a script draws and evaluates; of one device that does the same; what this rank
    drew."""
    all_rows = rows(8).to(dtype)
    own_rows = {"x": all_rows[4 * dist.get_rank() :][:4]}
    job = mw.parallelize(DropsBeforeRowsMeet, "dp_shard=2", batch={"x": all_rows}, dtype=dtype)
    begun = Generators(torch.device("cpu")).state()
    losses, drawn = [], []
    for _ in range(3):
        losses.append(job.step(own_rows).item())
        drawn += [torch.rand(()).item(), random.random(), float(np.random.rand())]
        job.module.eval()
        job.evaluate(own_rows)
        job.module.train()
    seed_all(0)
    model = DropsBeforeRowsMeet().to(dtype)
    Generators(torch.device("cpu")).set(begun)
    alone = []
    for _ in range(3):
        alone.append(model(all_rows)["loss"].item())
        torch.rand(()), random.random(), np.random.rand()
        model.eval()(all_rows)
        model.train()
    return losses, alone, drawn


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_data_rank_goes_on_with_its_own_numbers_after_a_step_of_all_rows(
    dtype: torch.dtype, workers: LocalWorkers
) -> None:
    (losses, alone, drawn), (others, _, drawn_by_other) = workers.run(steps_with_draws_between, dtype, ranks=2)
    assert losses == others and losses == alone
    assert not set(drawn) & set(drawn_by_other), "what a script draws for its own rows differs between data ranks"
    assert len({*drawn, *drawn_by_other}) == 2 * len(drawn)


def test_a_parameter_that_a_forward_draws_is_named(workers: LocalWorkers) -> None:
    report = mw.check(DrawsAParameter, {"x": rows(8)}, "dp_shard=2", workers=workers, dtype=torch.float64)
    assert any("it writes random numbers to what is trained: mean" in note for note in report.notes)


def test_draws_in_place_are_one_device_s_whether_or_not_anything_is_cut(workers: LocalWorkers) -> None:
    whole = {"mesh": "tp=2", "modules": {"up": {"tp": "replicate"}, "down": {"tp": "replicate"}}}
    for found in workers.run(drawn_in_place, [whole, "tp=2"], ranks=2):
        for losses, expected in found:
            assert losses == pytest.approx(expected, rel=1e-12)
