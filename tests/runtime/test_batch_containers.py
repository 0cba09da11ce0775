"""What a forward leaves in lists, dicts and objects of the batch, for the next step: on each rank that of one device."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.runtime.rows.microbatches import rows_of_rank
from meshwright.workers.pool import LocalWorkers

WIDTH, ROWS, DEPTH = 6, 8, 3
PLANS: dict[str, dict[str, Any]] = {
    "dp_shard=2": {"mesh": "dp_shard=2"},
    "microbatches": {"mesh": "dp_replicate=2", "microbatches": 2},
    "whole": {"mesh": "dp_shard=2", "rows": "whole"},
    "tp=2": {"mesh": "tp=2"},
    "pp=2": {"mesh": "pp=2", "microbatches": 2},
}


class State:
    """Hidden states in an object of the caller's own."""


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.input(x) + self.hidden(h))
        return x + self.out(h), h


class Recurrent(nn.Module):
    """Reads and replaces the hidden state of each cell, in the way of ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.turn, self.cells = getattr(self, kind), nn.ModuleList(Cell() for _ in range(DEPTH))

    def forward(self, x: Tensor, y: Tensor, state: Any) -> dict[str, Tensor]:
        for i, cell in enumerate(self.cells):
            x = self.turn(cell, x, state, i)
        return {"loss": functional.mse_loss(x, y)}

    def items(self, cell: Any, x: Tensor, state: dict[int, Tensor], i: int) -> Tensor:
        x, h = cell(x, state[i])
        state[i] = h.detach()
        return x

    def popped(self, cell: Any, x: Tensor, state: list[Tensor], i: int) -> Tensor:
        x, h = cell(x, state.pop(0))
        state.append(h.detach())
        return x

    def written(self, cell: Any, x: Tensor, state: list[Tensor], i: int) -> Tensor:
        x, h = cell(x, state[i].clone())
        state[i].copy_(h.detach())
        return x

    def grows(self, cell: Any, x: Tensor, state: list[Tensor], i: int) -> Tensor:
        x, h = cell(x, state[-1] if state else torch.zeros_like(x))
        state.append(h.detach())
        return x

    def counts(self, cell: Any, x: Tensor, state: dict[str, Any], i: int) -> Tensor:
        x, h = cell(x, state["h"] * 0.1 ** state["n"])
        state["h"], state["n"] = h.detach(), state["n"] + 1
        return x

    def attributes(self, cell: Any, x: Tensor, state: State, i: int) -> Tensor:
        """The object has none at first."""
        x, h = cell(x, getattr(state, f"h{i}", torch.zeros_like(x)))
        setattr(state, f"h{i}", h.detach())
        return x

    def means(self, cell: Any, x: Tensor, state: dict[str, Tensor], i: int) -> Tensor:
        """Of all rows, so that rows are run together."""
        x, h = cell(x, state["mean"].expand_as(x))
        state["mean"] = h.detach().mean(0)
        return x

    def averages(self, cell: Any, x: Tensor, state: dict[str, Any], i: int) -> Tensor:
        """Of all rows, which only the next step shows."""
        x, h = cell(x, state[f"mean{i}"].expand_as(x) / state["rows"])
        state[f"mean{i}"] = h.detach().mean(0)
        state["rows"] = len(x) if i == DEPTH - 1 else state["rows"]
        return x

    def sums(self, cell: Any, x: Tensor, state: list[Tensor], i: int) -> Tensor:
        """Of all rows, in place."""
        x, h = cell(x, state[i].expand_as(x).clone())
        state[i].mul_(0.5).add_(h.detach().sum(0))
        return x

    def beside(self, cell: Any, x: Tensor, state: dict[str, Any], i: int) -> Tensor:
        """A list that grows, before a tensor that is written in place."""
        x, h = cell(x, state["sum"].expand_as(x).clone())
        state["grown"].append(h.detach().mean(0))
        state["sum"].mul_(0.5).add_(h.detach().sum(0))
        return x


KINDS = ("items", "popped", "written", "grows", "counts", "attributes", "means", "averages", "sums", "beside")


def first_state(kind: str, rows: int) -> Any:
    zeros = [torch.zeros(rows, WIDTH, dtype=torch.float64) for _ in range(DEPTH)]
    return {
        "items": dict(enumerate(zeros)), "popped": zeros, "written": zeros, "grows": [], "attributes": State(),
        "counts": {"h": zeros[0], "n": 0}, "means": {"mean": torch.zeros(WIDTH, dtype=torch.float64)},
        "averages": {"rows": 1, **{f"mean{i}": torch.zeros(WIDTH, dtype=torch.float64) for i in range(DEPTH)}},
        "sums": [torch.zeros(WIDTH, dtype=torch.float64) for i in range(DEPTH)],
        "beside": {"grown": [], "sum": torch.zeros(WIDTH, dtype=torch.float64)},
    }[kind]  # fmt: skip


def contents(state: Any) -> list[Any]:
    if isinstance(state, list):
        return list(state)
    if isinstance(state, dict) and "grown" in state:
        return [*state["grown"], state["sum"]]
    return list(state.values()) if isinstance(state, dict) else [vars(state)[f"h{i}"] for i in range(DEPTH)]


def batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{key: torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64) for key in "xy"} for _ in range(3)]


def on_a_mesh(kind: str, plan: dict[str, Any]) -> Any:
    sample = {**batches()[0], "state": first_state(kind, ROWS)}
    job = mw.parallelize(lambda: Recurrent(kind), plan, batch=sample, dtype=torch.float64)
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    shares = [rows_of_rank(batch, job.recipe, job.rank) for batch in batches()]
    rows, losses = len(shares[0]["x"]), []
    state = first_state(kind, rows)
    for share in shares:
        losses.append(job.step({**share, "state": state}).item())
        optimizer.step()
        optimizer.zero_grad()
    losses.append(job.evaluate({**shares[0], "state": state}).item())
    first = job.recipe.mesh.data_index(job.rank) * rows
    return losses, contents(state), slice(first, first + rows)


OFTEN = {
    ("items", "microbatches"),
    ("grows", "pp=2"),
    ("attributes", "dp_shard=2"),
    ("means", "whole"),
    ("averages", "dp_shard=2"),
    ("averages", "pp=2"),
    ("sums", "microbatches"),
    ("items", "tp=2"),
    ("beside", "pp=2"),
}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param(kind, plan, marks=[] if (kind, plan) in OFTEN else [pytest.mark.proof], id=f"{kind}-{plan}")
        for kind in KINDS
        for plan in PLANS
    ],
)
def test_what_a_forward_leaves_for_the_next_is_that_of_one_device(kind: str, plan: str, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    model, state, wanted = Recurrent(kind).double(), first_state(kind, ROWS), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        loss = model(**batch, state=state)["loss"]
        loss.backward()
        wanted.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    wanted.append(model(**batches()[0], state=state)["loss"].item())
    for losses, left, rows in workers.run(on_a_mesh, kind, PLANS[plan], ranks=2, timeout=120):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for here, there in zip(left, contents(state), strict=True):
            is_tensor = isinstance(there, Tensor)
            expected = there.detach()[rows] if is_tensor and there.shape[0] == ROWS else there
            torch.testing.assert_close(here, expected) if is_tensor else None
            assert is_tensor or here == expected


def test_a_microbatch_without_rows_leaves_none() -> None:
    """Three rows in four microbatches: one of them runs a row in place of its own."""
    torch.manual_seed(0)
    model, batch = Recurrent("items"), {name: t[:3].float() for name, t in batches()[0].items()}
    sample = {name: t.float() for name, t in batches()[0].items()}
    states = [{i: torch.zeros(rows, WIDTH) for i in range(DEPTH)} for rows in (ROWS, 3, 3)]
    plan = {"mesh": "dp_shard=1", "microbatches": 4}
    job = mw.parallelize(lambda: Recurrent("items"), plan, batch={**sample, "state": states[0]})
    for _ in range(2):
        assert job.step({**batch, "state": states[1]}).item() == pytest.approx(
            model(**batch, state=states[2])["loss"].item(), rel=1e-5
        )
    for here, there in zip(states[1].values(), states[2].values(), strict=True):
        torch.testing.assert_close(here, there)


@pytest.mark.parametrize("kind", ["items", "written"])
def test_a_step_that_leaves_something_is_predicted_over_stages(kind: str) -> None:
    batch = {**batches()[0], "state": first_state(kind, ROWS)}
    prediction = mw.predict(lambda: Recurrent(kind).double(), batch, {"mesh": "pp=2"}, hardware="h100")
    assert prediction.seconds.seconds > 0


class LeavesTheMean(nn.Module):
    """Leaves a mean over its rows, with which it does not compute: rows are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, log: dict[str, Tensor]) -> dict[str, Tensor]:
        h = self.linear(x)
        log["mean"] = h.detach().mean(0)
        return {"loss": functional.mse_loss(h, y)}


def test_what_microbatches_leave_otherwise_is_told() -> None:
    batch = {name: t.float() for name, t in batches()[0].items()}
    plan = {"mesh": "dp_shard=1", "microbatches": 2}
    job, log = mw.parallelize(LeavesTheMean, plan, batch={**batch, "log": {}}), dict[str, Tensor]()
    job.step({**batch, "log": log})
    assert log["mean"].shape == (WIDTH,)
    assert any("what it leaves in the batch" in note for note in job.notes), job.notes
    job = mw.parallelize(LeavesTheMean, {**plan, "rows": "split"}, batch={**batch, "log": {}})
    with pytest.raises(RuntimeError, match="a tensor without rows"):
        job.step({**batch, "log": {}})


class Forgets(LeavesTheMean):
    def forward(self, x: Tensor, y: Tensor, recent: Any) -> dict[str, Tensor]:  # type: ignore[override]
        recent.popleft()
        return super().forward(x, y, {})


def test_a_change_that_is_not_repeated_has_a_note() -> None:
    batch = {name: t.float() for name, t in batches()[0].items()}
    job = mw.parallelize(Forgets, {"mesh": "dp_shard=1", "microbatches": 2}, batch={**batch, "recent": deque([1, 2])})
    recent = deque([1, 2])
    job.step({**batch, "recent": recent})
    assert recent == deque([1, 2])
    assert any("the caller's own object is as it was" in note for note in job.notes), job.notes


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("counts", "microbatches"),
        pytest.param("attributes", "pp=2", marks=pytest.mark.proof),
        pytest.param("items", "dp_shard=2", marks=pytest.mark.proof),
    ],
)
def test_a_check_gives_both_sides_what_a_forward_left(kind: str, plan: str, workers: LocalWorkers) -> None:
    """Its first two forwards get one batch."""
    batch = {**batches()[0], "state": first_state(kind, ROWS)}
    report = mw.check(lambda: Recurrent(kind), batch, PLANS[plan], steps=2, workers=workers)
    assert report.passed, str(report)


def test_a_batch_has_its_gradients_beside_a_list_that_grows() -> None:
    torch.manual_seed(0)
    model, states = Recurrent("grows"), list[list[Tensor]]([[], []])
    given = [{name: t.float().requires_grad_(name == "x") for name, t in batches()[0].items()} for _ in range(2)]
    model(**given[0], state=states[0])["loss"].backward()
    plan = {"mesh": "dp_shard=1", "microbatches": 2}
    job = mw.parallelize(
        lambda: Recurrent("grows"),
        plan,
        batch={**given[1], "state": []},
        transform=lambda name, p: model.get_parameter(name),
    )
    job.step({**given[1], "state": states[1]})
    torch.testing.assert_close(given[1]["x"].grad, given[0]["x"].grad)
    for here, there in zip(states[1], states[0], strict=True):
        torch.testing.assert_close(here, there)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": self.lstm(x[:, None], state)[0].square().mean()}


def test_states_whose_rows_are_not_dim_0_are_named_in_the_error() -> None:
    batch = {"x": batches()[0]["x"].float(), "state": (torch.zeros(1, ROWS, WIDTH), torch.zeros(1, ROWS, WIDTH))}
    job = mw.parallelize(Lstm, {"mesh": "dp_shard=1", "microbatches": 2}, batch=batch)
    job.step(batch)  # rows that cannot be divided are run together: this is right
    job = mw.parallelize(Lstm, {"mesh": "dp_shard=1", "microbatches": 2, "rows": "split"}, batch=batch)
    with pytest.raises(RuntimeError) as told:
        job.step(batch)
    assert "state.0" in told.value.__notes__[0]
    assert "with rows first" in told.value.__notes__[0]
