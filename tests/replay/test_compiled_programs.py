"""``compile: true``: what the compiler makes of a block's program gives what the program gives."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_replayed import has_program
from torch import Tensor, nn
from torch.fx import Graph

import meshwright as mw
from meshwright.planned import make_recipe
from meshwright.replay import inductor
from meshwright.replay.nodes import MoveCall
from meshwright.spmd import redistribute
from meshwright.spmd.comm import Ledger, PlannedAxis
from meshwright.workers.pool import LocalWorkers

WIDTH, HEADS, LENGTH, ROWS = 16, 4, 8, 4  # shares of two ranks are even: others are not compiled


class Block(nn.Module):
    def __init__(self, does: str) -> None:
        super().__init__()
        self.does = does
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if does == "drops" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (h.view(b, t, HEADS, -1).transpose(1, 2) for h in self.qkv(self.norm1(x)).split(WIDTH, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.drop(self.o(a))
        h = self.down(F.gelu(self.up(self.norm2(x))))
        if self.does == "writes a slice":
            h = h.clone()
            h[..., :6] *= 0.5
        elif self.does == "leaves gradients out":
            with torch.no_grad():
                weight = torch.sigmoid(h)
            h = h * weight
        return x + self.drop(h)


class Model(nn.Module):
    def __init__(self, does: str = "") -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(does) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).square().mean()


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tp": ({"mesh": {"tp": 2}}, ""),
    "sequence": ({"mesh": {"tp": 2}, "sequence_parallel": True}, ""),
    "fsdp": ({"mesh": {"dp_shard": 2, "tp": 2}}, ""),
    "pipeline": ({"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}, ""),
    "half of the MLP replicated": ({"mesh": {"tp": 2}, "modules": {"blocks.0.up": {"tp": "replicate"}}}, ""),
    "dropout": ({"mesh": {"tp": 2}}, "drops"),
    "a slice written to": ({"mesh": {"tp": 2}}, "writes a slice"),
}


def trained(
    does: str, plan: dict[str, Any], steps: int = 5
) -> tuple[list[float], dict[str, Any], list[Any], bool, list[str]]:
    """Runs on every rank: losses, parameters, what was moved, whether blocks have programs, notes of what is not compiled."""
    rows = torch.randn(ROWS, LENGTH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    job = mw.parallelize(lambda: Model(does).double(), plan, batch=rows)
    optimizer = torch.optim.SGD(job.parameters(), lr=1e-2)
    mine = rows.chunk(job.recipe.mesh.data_size)[job.recipe.mesh.data_index(job.rank)]
    losses = []
    for _ in range(steps):
        losses.append(float(job.step(mine)))
        optimizer.step()
        optimizer.zero_grad()
    values = {line.name: value for line, value in job.full_parameters()}
    moved = [dict(job.ledger.calls), dict(job.ledger.bytes)]
    has = any(has_program(job, f"blocks.{i}") for i in (0, 1))
    return losses, values, moved, has, [note for note in job.notes if "not compiled" in note]


def judged(case: str, workers: LocalWorkers, run: Any) -> None:
    """Losses and values are those of the eager forward, and as many collectives of as many bytes are made."""
    plan, does = CASES[case]
    ranks = mw.Plan(plan["mesh"]).mesh.size
    eager = workers.run(trained, does, plan | {"eager": True}, ranks=ranks)
    compiled = workers.run(run, does, plan | {"compile": True}, ranks=ranks, timeout=280)
    for (losses, values, moved, *_), (others, found, told, has, notes) in zip(eager, compiled, strict=True):
        assert has and not notes
        assert others == pytest.approx(losses, rel=1e-12)
        for name, value in values.items():
            if value is not None:
                torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
        assert moved == told


def as_it_stands(*args: Any) -> Any:
    """With the operators that the compiler would get, and without the compiler."""
    with mock.patch.object(torch, "compile", lambda f, **_: f):
        return trained(*args)


@pytest.mark.parametrize("case", ["tp", "sequence", "pipeline"])
def test_collectives_as_operators_of_torch_are_those_of_the_program(case: str, workers: LocalWorkers) -> None:
    judged(case, workers, as_it_stands)


@pytest.mark.proof  # the compiler takes half a minute
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_program_is_the_eager_forward(case: str, workers: LocalWorkers) -> None:
    judged(case, workers, trained)


def resolved(plan: str) -> tuple[str, ...]:
    notes = make_recipe(Model, mw.Plan.parse(plan).replace(compile=True), torch.zeros(ROWS, LENGTH, 6)).notes
    return tuple(note for note in notes if "compile" in note)


def test_a_plan_without_tp_says_that_nothing_is_compiled() -> None:
    (note,) = resolved("dp_shard=2")
    assert note.startswith("compile: true has no effect without tp")
    assert not resolved("tp=2")


def test_moves_are_known_for_as_long_as_something_has_them() -> None:
    axis = PlannedAxis("tp", 2, 0, Ledger())
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(MoveCall(redistribute.AllReduce, axis, ()), (x,)),))
    before = set(inductor._MOVES)
    copied, moves = inductor._with_operators(graph)
    (name,) = (node.args[1] for node in copied.nodes if node.target is torch.ops.meshwright.move.default)
    assert inductor._MOVES[name] is moves[0] and moves[0].conjugate.name in inductor._MOVES
    del moves
    gc.collect()
    assert set(inductor._MOVES) == before


class Cut(nn.Module):
    """Blocks of which no parameter is cut are given a tensor of which one rank has five columns, and the other four."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.blocks = nn.ModuleList([Sums() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return torch.stack([block(h) for block in self.blocks]).mean()


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.by = nn.Tanh(), nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h * self.by).sigmoid().exp().sum(-1).square()


def noted() -> tuple[bool, list[str]]:
    """Runs on every rank: whether a block has a program, and what is not compiled."""
    rows = torch.randn(ROWS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plan = {"mesh": {"tp": 2}, "compile": True, "modules": {"up": {"tp": "column"}}}
    job = mw.parallelize(lambda: Cut().double(), plan, batch=rows)
    for _ in range(3):
        job.step(rows)
    return has_program(job, "blocks.0"), [note for note in job.notes if "not compiled" in note]


def test_uneven_shares_of_an_argument_are_seen(workers: LocalWorkers) -> None:
    for has, notes in workers.run(noted, ranks=2):
        assert has and len(notes) == 1 and "uneven shares" in notes[0]


@pytest.mark.parametrize(
    ("does", "plan", "why"),
    [
        ("leaves gradients out", {"mesh": {"tp": 2}}, "without gradients"),
        ("", {"mesh": {"tp": 3}}, "uneven shares"),
        ("", {"mesh": {"tp": 2}, "recompute": "blocks"}, "recomputes blocks"),
    ],
)
def test_a_program_that_the_compiler_would_not_keep_runs_as_it_is(
    does: str, plan: dict[str, Any], why: str, workers: LocalWorkers
) -> None:
    ranks = mw.Plan(plan["mesh"]).mesh.size
    for *_, has, notes in workers.run(trained, does, plan | {"compile": True}, 3, ranks=ranks):
        assert has and len(notes) == 1 and why in notes[0], notes
