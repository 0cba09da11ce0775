"""Paths that follow from values of rows: those of the whole batch, or an error; and no harm done to models that may differ."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import RowsError
from meshwright.workers.pool import WorkerError

WIDTH, CLASSES = 16, 12


class Tokens(nn.Module):
    """Embeds tokens, acts on their values as its subclass does, and predicts labels."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.more = nn.Parameter(torch.ones(WIDTH))

    def acted(self, x, ids):
        return x

    def forward(self, ids, labels):
        x = self.acted(self.table(ids), ids)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class AnyRow(Tokens):
    def acted(self, x, ids):
        return x + self.more if (ids > 10).any() else x


class HighestNumber(Tokens):
    def acted(self, x, ids):
        return x + self.more if ids.max().item() > 10 else x


class Emptiness(Tokens):
    def acted(self, x, ids):
        return x + self.more if len((ids > 10).nonzero()) else x


class Picked(Tokens):
    def acted(self, x, ids):
        return x + self.more if len(ids[ids > 10]) else x


class Counted(Tokens):
    """Acts on how many there are, not on whether there are any."""

    def acted(self, x, ids):
        return x + self.more if len(ids[ids > 6]) > 8 else x


class Listed(Tokens):
    """Rows that Python picks by their values, and divides by their number."""

    def forward(self, ids, labels):
        x = self.table(ids)
        kept = x[[i for i, row in enumerate(ids.tolist()) if 11 not in row]]
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss + kept.square().sum() / len(kept))


class Selected(Tokens):
    def acted(self, x, ids):
        return torch.where((ids > 10).any(), x + self.more, x)


class Norm(Tokens):
    """All rows are longer than those of any part."""

    def acted(self, x, ids):
        return x / 2 if x.norm() > 1.5 else x


class SumAsNumber(Tokens):
    def acted(self, x, ids):
        total = x.square().sum().item()
        return x / 2 if total > 1.5 else x


class Flagged(Tokens):
    """Acts on a small number of its own, which a trial at other weights would not see."""

    def __init__(self):
        super().__init__()
        self.flags = nn.Parameter(torch.zeros(CLASSES), requires_grad=False)
        self.flags[11] = 1e-3

    def acted(self, x, ids):
        flagged = (F.one_hot(ids, CLASSES).to(x.dtype) @ self.flags > 5e-4).any()
        return x + self.more if flagged else x


class Harmless(Tokens):
    """A mask of ones is left out; experts that no row was sent to are not called; a number is taken for a report."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def acted(self, x, ids):
        mask = ids <= 10
        if not mask.all():
            x = x * mask[..., None]
        chosen, flat = ids.flatten() % 4, x.flatten(0, 1)
        out = torch.zeros_like(flat)
        for e in chosen.unique().tolist():
            at = (chosen == e).nonzero().squeeze(-1)
            out = out.index_add(0, at, self.experts[e](flat[at]))
        if ids.max() > 10 or mask.sum() != mask.numel() or (chosen == 1).sum() > 0:
            out = out + 0.0
        self.highest = ids.max().item()
        return out.view_as(x)


def tokens(rows=8, special=None):
    ids = torch.randint(0, 8, (rows, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 5] = 4  # so that routes differ from row to row
    if special is not None:
        ids[special, 2] = 11
    return {"ids": ids, "labels": (ids * 3 + 1) % CLASSES}


def own_rows(job, batch):
    count = len(batch["ids"]) // job.recipe.mesh.data_size
    first = count * job.recipe.mesh.data_index(job.rank)
    return {name: t[first : first + count] for name, t in batch.items()}


def steps(build, plan, batches):
    """The losses of steps, and how rows combine."""
    torch.manual_seed(0)
    job = mw.parallelize(build, plan, batch=batches[0])
    return [float(job.step(own_rows(job, batch))) for batch in batches], job.rows, job.notes


def one_device(build, batch):
    torch.manual_seed(0)
    job = mw.parallelize(build, "dp_shard=1", batch=batch)
    return float(job.step(batch))


PLANS = {
    "dp_shard=2": {"mesh": {"dp_shard": 2}},
    "microbatches": {"mesh": {"tp": 2}, "microbatches": 2},
    "pp=2": {"mesh": {"pp": 2}, "microbatches": 2},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("build", [AnyRow, HighestNumber, Emptiness, Picked, Listed, Selected, Flagged])
def test_what_some_rows_decide_for_all_is_an_error_and_no_wrong_number(build, plan, workers):
    # Until some row is special, all go the same way, and no trial can tell. Then the step ends, before an optimizer's.
    with pytest.raises(WorkerError, match=r"test_paths.py:\d+ the model acts on values of its rows.*rows: whole"):
        workers.run(steps, build, PLANS[plan], [tokens(), tokens(special=1)], ranks=2)
    # What the error says to do is right.
    found, _, _ = workers.run(steps, build, {**PLANS[plan], "rows": "whole"}, [tokens(special=1)], ranks=2)[0]
    assert found == pytest.approx([workers.run(one_device, build, tokens(special=1), ranks=1)[0]], rel=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_how_many_are_picked_may_decide_too(plan, workers):
    with pytest.raises(WorkerError, match=r"test_paths.py:\d+ the model acts on values of its rows.*rows: whole"):
        workers.run(steps, Counted, PLANS[plan], [tokens(), tokens(special=slice(4))], ranks=2)


@pytest.mark.parametrize("plan", PLANS)
def test_a_note_says_where_the_model_asks_how_many_are_picked(plan, workers):
    _, rows, notes = workers.run(steps, Counted, PLANS[plan], [tokens()], ranks=2)[0]
    assert rows == "mean"
    assert any(re.match(r"test_paths.py:\d+: the model asks how many elements a mask picked", note) for note in notes)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("build", [Norm, SumAsNumber])
def test_a_number_of_all_rows_that_is_none_of_their_parts_couples_them(build, plan, workers):
    _, rows, notes = workers.run(steps, build, PLANS[plan], [tokens()], ranks=2)[0]
    assert rows == "coupled"
    assert plan == "pp=2" or any("acts on a number of all rows at test_paths.py:" in note for note in notes)


@pytest.mark.parametrize("plan", PLANS)
def test_paths_that_do_no_harm_may_differ(plan, workers):
    batches = [tokens(), tokens(special=1), tokens(special=6), tokens()]
    found, rows, _ = workers.run(steps, Harmless, PLANS[plan], batches, ranks=2)[0]
    assert rows == "mean"
    expected = [workers.run(one_device, Harmless, batch, ranks=1)[0] for batch in batches]
    assert found == pytest.approx(expected, rel=1e-5)


class RowsWithout(Tokens):
    """A mean over the rows that have one; ``nowhere``: no batch has a finite loss."""

    nowhere = False

    def forward(self, ids, labels):
        x, kept = self.table(ids).square().mean(-1), (ids[:, :1] < 9).to(torch.float32)
        of_rows = (x * kept).sum(1) / (kept.sum(1) * 6)  # 0/0 for a row without any
        loss = torch.nanmean(of_rows)
        return SimpleNamespace(loss=loss / kept.amin() if self.nowhere else loss)


class Nowhere(RowsWithout):
    nowhere = True


def without(rows):
    batch = tokens()
    batch["ids"][rows, 0] = 10
    return batch


@pytest.mark.parametrize("plan", PLANS)
def test_a_part_without_a_finite_loss_is_an_error_if_all_rows_have_one(plan, workers):
    with pytest.raises(WorkerError, match=r"is not finite, and that of its rows and others at once is.*rows: whole"):
        workers.run(steps, RowsWithout, PLANS[plan], [tokens(), without(slice(4, 8))], ranks=2)
    found, _, _ = workers.run(steps, RowsWithout, {**PLANS[plan], "rows": "whole"}, [without(slice(4, 8))], ranks=2)[0]
    assert found == pytest.approx([workers.run(one_device, RowsWithout, without(slice(4, 8)), ranks=1)[0]], rel=1e-6)


def looked_at_later(when):
    """What is said of a step whose pieces have no finite loss, if the loss is read a step later, as beside a GPU."""
    torch.manual_seed(0)
    job = mw.parallelize(RowsWithout, "dp_shard=2", batch=tokens())
    optimizer = torch.optim.SGD(job.parameters(), lr=0.1)
    job._division.defers_check = True
    assert job.step(own_rows(job, tokens())).isfinite()
    optimizer.zero_grad()
    assert not job.step(own_rows(job, without(slice(4, 8)))).isfinite()
    with pytest.raises(RowsError) as said:
        if when == "finish_step":
            job.finish_step()
        elif when == "save":
            job.save("nowhere", step=2)
        else:
            if when == "optimizer":
                optimizer.step()
            optimizer.zero_grad()
            job.step(own_rows(job, tokens()))
    return str(said.value)


@pytest.mark.parametrize("when", ["finish_step", "save", "step", "optimizer"])
def test_a_part_without_a_finite_loss_is_an_error_a_step_later(when, workers):
    told = "the optimizer has stepped" if when == "optimizer" else "that of its rows and others at once is"
    assert all(told in said for said in workers.run(looked_at_later, when, ranks=2))


def test_a_loss_that_is_no_number_anywhere_is_given(workers):
    found, _, _ = workers.run(steps, Nowhere, PLANS["dp_shard=2"], [tokens(), without(slice(4, 8))], ranks=2)[0]
    assert not torch.tensor(found[1]).isfinite()


def one_row(plan, batch):
    """The loss of one row, which the first data rank has, after a loss of ordinary rows."""
    torch.manual_seed(0)
    job = mw.parallelize(AnyRow, plan, batch=tokens())
    job.evaluate(own_rows(job, tokens()))
    rows = 1 if job.rank == 0 else 0
    return float(job.evaluate({name: t[:rows] for name, t in batch.items()}))


def test_a_rank_without_rows_goes_where_it_likes(workers):
    alone = {name: t[:1] for name, t in tokens(special=0).items()}
    expected = workers.run(one_device, AnyRow, alone, ranks=1)[0]
    assert workers.run(one_row, "dp_shard=2", alone, ranks=2)[0] == pytest.approx(expected, rel=1e-6)


class Strict(nn.Module):
    """Takes no lengths."""

    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.lin(self.norm(x)).tanh()


class Picky(nn.Module):
    """Computes, and then does not want what it was given."""

    def __init__(self):
        super().__init__()
        self.lin, self.tries = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x, wide=True):
        h = self.lin(x)
        self.seen.add_(h.detach().mean((0, 1)))
        self.tries += 1
        if wide:
            raise ValueError("too wide")
        return x + h * self.tries


class TriesBoth(Tokens):
    """As some packages do: a call that raises, and another one in its place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Strict(), Picky(), Strict(), Picky(), Strict()])

    def acted(self, x, ids):
        for block in self.blocks:
            try:
                x = block(x, lengths=ids) if isinstance(block, Strict) else block(x)
            except TypeError:
                x = block(x)
            except ValueError:
                x = block(x, wide=False)
        return x


@pytest.mark.parametrize("plan", ["pp=2", "pp=3", "dp_shard=2", "tp=2", "pp=2,tp=2"])
def test_what_a_call_raises_is_caught_on_every_rank(plan, workers):
    ids = torch.randint(0, CLASSES, (6, 5), generator=torch.Generator().manual_seed(1))
    report = mw.check(TriesBoth, {"ids": ids, "labels": ids}, plan, workers=workers, dtype=torch.float64)
    assert report, report
