"""Ranks that should hold the same bits are compared: a difference is one error on all ranks, and no difference is silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.runtime.checksum import checksum
from meshwright.runtime.weights.parameters import local_tensor
from meshwright.spmd.comm import Ledger
from meshwright.workers.pool import LocalWorkers

VOCAB, DIM = 11, 8


class Block(nn.Module):
    """With a buffer that no forward changes, and one that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 16), nn.Linear(16, DIM)
        self.register_buffer("table", torch.arange(6))
        self.register_buffer("seen", torch.zeros(()))
        self.offset = torch.zeros(())  # another one on one rank, in some tests

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.relu(self.up(self.norm(x))))
        self.seen += 1
        return x + self.offset


class Net(nn.Module):
    """Tied at both ends, so that two stages hold the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.offset = torch.zeros(())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss + self.offset


class TwoSums(nn.Module):
    """Two sums over tp of as many elements, in another order on ranks that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 16)
        self.a, self.b = nn.Linear(16, DIM), nn.Linear(16, DIM)
        self.other_way = self.leaves_out = False

    def forward(self, ids: Tensor) -> Tensor:
        h = F.relu(self.up(F.one_hot(ids, DIM).float()))
        ways = [lambda: F.relu(self.a(h)).sum(), lambda: F.relu(self.b(h.flatten(0, 1))).sum()]
        if self.other_way:  # once
            ways.reverse()
            self.other_way = False
        if self.leaves_out:
            ways.pop()
        return sum(way() for way in ways) / 100


class TwoUnits(nn.Module):
    """Two units of FSDP2 of one size, in another order on ranks that say so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.other_way = self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[1 if self.leaves_out else 0 :][:: -1 if self.other_way else 1]:
            x = block(x)
        return x.square().mean()


class Odd(nn.Module):
    """NaN, -0.0, bfloat16, no elements, complex numbers, integers, a generator of its own; dropout before statistics of
    rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 1)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.tensor([float("nan"), -0.0, 1.0]))
        self.register_buffer("low", torch.tensor([float("nan"), -0.0, 1.0], dtype=torch.bfloat16))
        self.register_buffer("waves", torch.tensor([1j, float("nan")]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("noise", torch.zeros(3))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.noise.normal_()
            x = x + torch.randn(DIM, generator=self.generator)
        return self.last(self.norm(F.dropout(self.first(x), 0.3, self.training))).square().mean()


class OwnRows(nn.Module):
    """Buffers of which each data rank makes something else: written in place, past autograd, assigned, some times only."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(DIM, 1)
        for name in ("in_place", "past", "assigned", "at_times"):
            self.register_buffer(name, torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.in_place.lerp_(mean, 0.1)
        self.past.data.add_(mean)
        self.assigned = self.assigned * 0.5 + mean
        if mean[1] > 0:  # of one rank
            self.at_times += 1
        return self.last(x).square().mean()


class Towers(nn.Module):
    """Two blocks side by side, which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.a, self.b = Block(), Block()
        self.b.up.weight = self.a.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a = self.a(x)
        b = self.b(x)
        return self.head(a + b).square().mean()


class Experts(nn.Module):
    """Rows choose an expert; no row of data rank 1 ever takes expert 0, and nobody takes expert 2."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return out.square().mean()


def tokens() -> dict[str, Tensor]:
    return {"ids": torch.randint(0, DIM, (8, 6), generator=torch.Generator().manual_seed(0))}


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))}


def chosen() -> dict[str, Tensor]:
    return vectors() | {"chosen": torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])}


# --- what is done to a rank -------------------------------------------------------------------------------------------

Deed = Callable[[mw.Job], None]


@dataclass(frozen=True)
class Flip:
    """One bit of a parameter or buffer."""

    name: str
    byte: int = 0

    def __call__(self, job: mw.Job) -> None:
        values = dict(job.module.named_parameters(remove_duplicate=False)) | dict(job.module.named_buffers())
        data = local_tensor(values[self.name]).data.view(-1).view(torch.uint8)  # autograd does not count it as a write
        data[self.byte] ^= 1


@dataclass(frozen=True)
class Set:
    """An attribute of a module."""

    module: str
    name: str
    value: Any

    def __call__(self, job: mw.Job) -> None:
        setattr(job.module.get_submodule(self.module), self.name, self.value)


def no_step(job: mw.Job) -> None:
    """An optimizer that has counted a step less."""
    assert isinstance(job.guard.optimizers, torch.optim.Optimizer)
    state = next(iter(job.guard.optimizers.state.values()))
    state["step"] -= 1


@dataclass(frozen=True)
class Case:
    """A job of some steps, to whose last rank something is done before step ``at``; and what the error is to say."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    plan: dict[str, Any]
    deed: Deed | None = None
    says: str = ""
    step: int = 5  # at which it is seen
    at: int = 4
    ranks: int = 2
    proof: bool = False  # tried in the proof alone


NOT_SEEN = ""
TOWERS = {"mesh": "tp=2", "modules": {"a": {"on": "tp[0]"}, "b": {"on": "tp[1]"}}}
CASES = {
    "dp: a parameter": Case(
        Net, tokens, {"mesh": "dp_replicate=2"}, Flip("blocks.0.up.weight"), "parameter blocks.0.up.weight: rank 1 differs"
    ),
    "hsdp: a shard": Case(
        Net, tokens, {"mesh": "dp_replicate=2,dp_shard=2"}, Flip("blocks.1.up.weight", byte=2),
        "parameter blocks.1.up.weight: rank 3 differs from rank 1", ranks=4, proof=True
    ),
    "dp × tp: a parameter that all ranks have": Case(
        Net, tokens, {"mesh": "dp_replicate=2,tp=2"}, Flip("blocks.1.norm.bias", byte=2),
        "parameter blocks.1.norm.bias: rank 3 differs from ranks 0–2", ranks=4,
    ),
    "tp: a parameter": Case(
        Net, tokens, {"mesh": "tp=2"}, Flip("blocks.1.norm.weight"), "parameter blocks.1.norm.weight: rank 1 differs"
    ),
    "tp: a share is no copy": Case(Net, tokens, {"mesh": "tp=2"}, Flip("blocks.1.up.weight"), NOT_SEEN, proof=True),
    "fsdp: a shard is no copy": Case(Net, tokens, {"mesh": "dp_shard=2"}, Flip("blocks.1.up.weight"), NOT_SEEN, proof=True),
    "pp: a table of two stages": Case(
        Net, tokens, {"mesh": "pp=2"}, Flip("table.weight"), "parameter table.weight: rank 1 differs from rank 0"
    ),
    "pp: another stage's buffer": Case(Net, tokens, {"mesh": "pp=2"}, Flip("blocks.0.table"), NOT_SEEN, proof=True),
    "fsdp: a buffer": Case(
        Net, tokens, {"mesh": "dp_shard=2"}, Flip("blocks.0.table"), "buffer blocks.0.table: rank 1 differs from rank 0", proof=True
    ),
    "tp: a buffer that forwards change": Case(
        Net, tokens, {"mesh": "tp=2"}, Flip("blocks.0.seen", byte=2), "buffer blocks.0.seen: rank 1 differs from rank 0"
    ),
    "tp: an activation": Case(
        Net, tokens, {"mesh": "tp=2", "recompute": "blocks", "microbatches": 2},
        Set("blocks.0", "offset", torch.tensor(1e-3)), "what leaves blocks.0 (tensor 1 of the step): rank 1 differs",
    ),
    "tp: a loss": Case(
        Net, tokens, {"mesh": "tp=2"}, Set("", "offset", torch.tensor(1e-6)), "loss of microbatch 1: rank 1 differs"
    ),
    "dp: the optimizer's steps": Case(
        Net, tokens, {"mesh": "dp_replicate=2"}, no_step, "steps of the optimizer, of parameter", proof=True
    ),
    "tp: sums in another order, in a step that compares": Case(
        TwoSums, tokens, {"mesh": "tp=2"}, Set("", "other_way", True),
        "rank 0 enters all_reduce of (8, 6, 8) float32, rank 1 enters all_reduce of (48, 8) float32", at=5,
    ),
    "tp: sums in another order, in a step that does not": Case(
        TwoSums, tokens, {"mesh": "tp=2"}, Set("", "other_way", True), "the order of collectives since the start: rank 1 differs"
    ),
    "tp: a sum that a rank leaves out": Case(
        TwoSums, tokens, {"mesh": "tp=2"}, Set("", "leaves_out", True), "the order of collectives in a tp group: rank 0 enters all_reduce of", at=5, proof=True
    ),
    "fsdp: units in another order": Case(
        TwoUnits, vectors, {"mesh": "dp_shard=2"}, Set("", "other_way", True),
        "the order of units that FSDP2 gathers: rank 0 enters blocks.0, rank 1 enters blocks.1", at=5,
    ),
    "fsdp: units in another order, in the trial of rows": Case(
        TwoUnits, vectors, {"mesh": "dp_shard=2"}, Set("", "other_way", True), "rank 0 enters blocks.0, rank 1 enters blocks.1",
        step=1, at=1,
    ),
    "fsdp: a unit that a rank leaves out": Case(
        TwoUnits, vectors, {"mesh": "dp_shard=2"}, Set("", "leaves_out", True), "rank 0 enters blocks.0, rank 1 enters blocks.1",
        step=1, at=1, proof=True,
    ),
    "tp: sums in another order, in the trial of rows": Case(
        TwoSums, tokens, {"mesh": "tp=2", "microbatches": 2}, Set("", "other_way", True),
        "rank 0 enters all_reduce of", step=1, at=1, proof=True,
    ),
    "odd values, tp": Case(Odd, vectors, {"mesh": "tp=2"}),
    "odd values, dp": Case(Odd, vectors, {"mesh": "dp_replicate=2"}),
    "odd values, fsdp": Case(Odd, vectors, {"mesh": "dp_shard=2"}, proof=True),
    "odd values, changed": Case(Odd, vectors, {"mesh": "dp_replicate=2"}, Flip("unused"), "parameter unused: rank 1 differs", proof=True),
    "branches: a parameter of the trunk": Case(
        Towers, vectors, TOWERS, Flip("stem.weight"), "parameter stem.weight: rank 1 differs from rank 0"
    ),
    "branches: a weight of two": Case(
        Towers, vectors, TOWERS, Flip("a.up.weight"), "parameter a.up.weight: rank 1 differs from rank 0", proof=True
    ),
    "branches: a block's own": Case(Towers, vectors, TOWERS, Flip("b.up.bias"), NOT_SEEN, proof=True),
    "buffers of a rank's own rows": Case(OwnRows, vectors, {"mesh": "dp_shard=2", "rows": "split"}),
    "experts": Case(Experts, chosen, {"mesh": "dp_replicate=2"}),
    "sequence parallel": Case(Net, tokens, {"mesh": "tp=2", "sequence_parallel": True}, proof=True),
    "pp, microbatches": Case(Net, tokens, {"mesh": "pp=2", "microbatches": 4}, proof=True),
}  # fmt: skip


def steps(case: Case) -> tuple[int, str]:
    """The steps done, and the error."""
    batch = case.batch()
    job = mw.parallelize(case.build, {"verify": 2, **case.plan}, batch=batch)
    optimizer = job.guard.optimizers = torch.optim.AdamW(job.parameters(), lr=0.01)
    mesh = job.recipe.mesh
    rows = 8 // mesh.data_size
    first = mesh.data_index(job.rank) * rows
    try:
        for step in range(1, 6):
            if step == case.at and case.deed is not None and job.rank == mesh.size - 1:
                case.deed(job)
            job.step({name: t[first : first + rows] for name, t in batch.items()})
            optimizer.step()
            optimizer.zero_grad()
    except mw.ReplicaError as error:
        assert job.steps in (error.step, error.step - 1)  # the trial of rows is before the step
        return error.step, str(error)
    return job.steps, ""


@pytest.mark.parametrize(
    ("ranks", "proof"),
    [(4, False), *(pytest.param(n, p, marks=pytest.mark.proof) for n, p in ((2, False), (2, True), (4, True)))],
)
def test_a_difference_is_one_error_that_names_it_on_all_ranks_and_none_is_silent(
    workers: LocalWorkers, ranks: int, proof: bool
) -> None:
    cases = {name: case for name, case in CASES.items() if (case.ranks, case.proof) == (ranks, proof)}
    for name, case in cases.items():
        # a run for each: an error within a forward closes the connections of its ranks
        of_ranks = workers.run(steps, case, ranks=ranks, timeout=100)
        assert len(set(of_ranks)) == 1, name
        done, told = of_ranks[0]
        if case.says:
            assert case.says in told, (name, told)
            assert done == case.step and f"step {case.step}: " in told, (name, told)
        else:
            assert (done, told) == (5, ""), name


def error_of_a_rank(case: Case) -> str:
    """The error of a job whose ranks find a difference in several groups, at different times."""
    try:
        return steps(case)[1]
    except mw.RankError as error:
        return str(error)


@pytest.mark.parametrize("at", [1, 5])
def test_a_difference_in_one_group_ends_the_job_on_the_ranks_of_all(at: int, workers: LocalWorkers) -> None:
    case = Case(TwoUnits, vectors, {"mesh": "dp_replicate=2,dp_shard=2"}, Set("", "other_way", True), at=at)
    for said in workers.run(error_of_a_rank, case, ranks=4, timeout=100):
        assert "the order of units that FSDP2 gathers: rank" in said


def resumed(folder: Path) -> tuple[list[int], str]:
    """Steps 1 to 4, then a new job that goes on; what the guard takes for the step's number, and what it says of a load."""
    batch, compared = tokens(), []
    plan = {"mesh": "dp_replicate=2", "verify": 3}
    job = mw.parallelize(Net, plan, batch=batch)
    own = {"ids": batch["ids"].chunk(2)[job.rank]}
    for _ in range(4):
        job.step(own)
    if job.rank == 1:
        Flip("blocks.0.up.weight")(job)  # a checkpoint has each value once
    Set("blocks.0", "table", torch.arange(6) + 5)(job)
    job.save(folder, step=4)
    again = mw.parallelize(Net, plan, batch=batch)
    again.load(folder)
    compare = again.guard.compare
    again.guard.compare = lambda step, losses: compared.append(step) or compare(step, losses)  # type: ignore[method-assign]
    for _ in range(4):
        again.step(own)
    Flip("blocks.1.table")(again) if job.rank else None
    try:
        for _ in range(4):
            again.step(own)
    except mw.ReplicaError as error:
        return compared, error.differences[0]
    return compared, ""


def test_a_resumed_run_compares_at_once_and_counts_on(workers: LocalWorkers, tmp_path: Path) -> None:
    for found in workers.run(resumed, tmp_path, ranks=2):
        assert found == ([5, 8, 11], "buffer blocks.1.table: rank 1 differs from rank 0")


def costs(plans: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """For each plan, of each of four steps: all-gathers of the guard, and bytes that this rank puts in."""
    found = []
    for plan in plans:
        batch = tokens()
        job = mw.parallelize(Net, plan, batch=batch)
        mesh, of_steps = job.recipe.mesh, []
        for _ in range(4):
            job.guard.cost = Ledger()
            job.step({"ids": batch["ids"].chunk(mesh.data_size)[mesh.data_index(job.rank)]})
            of_steps.append((job.guard.cost.calls["all_gather"], job.guard.cost.bytes["all_gather"]))
        found.append(of_steps)
    return found


def test_what_it_costs_is_a_few_numbers_in_the_steps_that_compare(workers: LocalWorkers) -> None:
    data, never, tensor = workers.run(
        costs,
        [
            {"mesh": "dp_shard=2", "verify": 3},
            {"mesh": "dp_shard=2", "verify": 0},
            {"mesh": "tp=2", "verify": 3},
        ],
        ranks=2,
    )[0]
    assert data == [(1, 24), (0, 0), (0, 0), (1, 24)]  # parameters are shards; buffers; what was written
    assert never == [(0, 0)] * 4
    # Parameters that are whole, shares, buffers, the tp group, what was written; and a number before each collective and at the end.
    assert tensor[1:3] == [(0, 0)] * 2
    calls, size = tensor[0]
    assert tensor[3] == (calls, size)
    assert size == 5 * 8 + (calls - 1) * 8


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
def test_a_checksum_sees_every_bit_and_the_order_of_blocks(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for size in (0, 1, 3, 8, 1023, 5000, 20_011):
        data = torch.randint(0, 2, (size,), generator=draw).to(dtype)
        found = int(checksum(data))
        assert int(checksum(data.clone())) == found
        assert int(checksum(torch.stack([data, data], 1)[:, 0])) == found  # not contiguous
        if size:
            for at in {0, size // 2, size - 1}:
                other = data.clone()
                other.view(torch.uint8)[(at * data.element_size())] ^= 1
                assert int(checksum(other)) != found
    blocks = torch.arange(16384, dtype=torch.float64)
    assert int(checksum(blocks)) != int(checksum(blocks.view(4, -1).flip(0).flatten()))
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))
    assert int(checksum(torch.tensor([float("nan")]))) == int(checksum(torch.tensor([float("nan")])))


def test_a_plan_says_how_often() -> None:
    assert mw.Plan("tp=2").verify == 100
    assert mw.Plan.from_command(mesh="tp=2", settings=["verify=0"]).verify == 0
    with pytest.raises(mw.PlanError, match="whole number of at least 0"):
        mw.Plan("tp=2", verify=-1)


class WritesUnseen(nn.Module):
    """Cannot be followed without values, as it raises at the number that planning assumes; and writes a parameter in its
    first forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.start = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x):
        if self.inner.weight.sum().item() == 1.0:
            raise ValueError("one")
        if not self.begun.item():
            self.start.data.copy_(self.start.data * 2)
            self.begun.fill_(True)
        return {"loss": (self.inner(x) * self.start).square().mean()}


def first_step(plan):
    batch = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    job = mw.parallelize(WritesUnseen, plan, batch=batch)
    try:
        job.step(batch)
    except mw.ReplicaError as error:
        return str(error)
    return "no error"


def test_a_write_to_what_is_gathered_is_an_error(workers):
    told = workers.run(first_step, "dp_shard=2", ranks=2)
    assert all("the forward writes to start" in text and "what it writes is lost" in text for text in told), told


@pytest.mark.parametrize("count", [3, 1000, 1024, 2048, 5000])
def test_a_checksum_sees_the_order_of_integers_and_small_ones_of_the_same_sum(count: int) -> None:
    numbers = torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(0))
    found = {int(checksum(numbers))}
    tried = [numbers]
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        i, j, k = torch.randperm(count, generator=draw)[:3].tolist()
        moved, swapped = numbers.clone(), numbers.clone()
        moved[[i, j, k]] += torch.tensor([1, -2, 1])
        swapped[[i, j]] = numbers[[j, i]]
        apart = numbers.clone()
        apart[i] += 1
        apart[(i + count // 2) % count] -= 1
        for other in (moved, swapped, apart, numbers.roll(seed + 1), numbers[torch.randperm(count, generator=draw)]):
            if not any(torch.equal(other, one) for one in tried):
                tried.append(other)
                found.add(int(checksum(other)))
    assert len(found) == len(tried) > 4


def test_a_checksum_sees_steps_across_blocks_of_one_column() -> None:
    numbers = torch.zeros(8 * 1024, dtype=torch.int64)
    other = numbers.clone()
    other[[5, 1024 + 5, 2 * 1024 + 5]] = torch.tensor([1, -2, 1])
    assert int(checksum(other)) != int(checksum(numbers))
    other[:] = 0
    other[[5, 9, 1024 + 5, 1024 + 9]] = torch.tensor([1, -1, -1, 1])
    assert int(checksum(other)) != int(checksum(numbers))
