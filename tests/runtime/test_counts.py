"""Means over what counts: the mean over a batch is that of one device, however unevenly its rows are divided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.evaluation import StepMode

SOURCE = Path(__file__).read_text().splitlines()
WIDTH, CLASSES, ROWS, LENGTH = 8, 12, 8, 6


class Model(nn.Module):
    """Predicts the next token; subclasses say what the loss is."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in "ab")

    def logits(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def forward(self, ids, labels, mask, count=None):
        return SimpleNamespace(loss=self.loss(self.logits(ids), labels, mask, count))

    def losses(self, logits, labels):
        """Of each token, of shape (rows, length)."""
        return F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view(labels.shape)


class BySum(Model):
    def loss(self, logits, labels, mask, count):
        return (self.losses(logits, labels) * mask).sum() / mask.sum()


class ByClampedSum(Model):
    """Written as many are: labels are shifted, and the number of them is at least one."""

    def loss(self, logits, labels, mask, count):
        logits, labels = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
        valid = (labels != -100).to(logits.dtype).view(-1)
        return (self.losses(logits, labels).view(-1) * valid).sum() / valid.sum().clamp(min=1)


class ByNormalisedMask(Model):
    def loss(self, logits, labels, mask, count):
        weights = mask.float()
        return (self.losses(logits, labels) * (weights / (weights.sum() + 1e-6))).sum()


class Picked(Model):
    def loss(self, logits, labels, mask, count):
        return self.losses(logits, labels)[mask.bool()].mean()


class PickedFirst(Model):
    """Picks tokens before it compares them, and takes two means of them."""

    def loss(self, logits, labels, mask, count):
        picked = mask.bool()
        x, y = logits[picked], labels.clamp(min=0)[picked]
        return F.cross_entropy(x, y) + 0.1 * F.mse_loss(x.softmax(-1), F.one_hot(y, CLASSES).to(x.dtype))


class PickedOfBatch(Model):
    """A part of the loss is a mean of numbers of the batch itself, which a mask picks."""

    def loss(self, logits, labels, mask, count):
        picked = labels.to(logits.dtype).square()[mask.bool()]
        return (
            logits.square().mean()
            + 0.1 * (picked * 0.5).mean()
            + labels.to(logits.dtype).masked_select(mask > 0).mean()
        )


class BesideMeanOfBatch(Model):
    """A part of the loss is a masked mean of numbers of the batch itself: no gradient shows what it weighs."""

    def loss(self, logits, labels, mask, count):
        own = (labels.to(logits.dtype).square() * mask).sum() / mask.sum().clamp(min=1)
        return (self.losses(logits, labels) * mask).sum() / mask.sum() + 0.5 * own


class BesideSumOfBatch(Model):
    """A sum of numbers of the batch itself is added before it is divided: each piece adds its own."""

    def loss(self, logits, labels, mask, count):
        return ((self.losses(logits, labels) * mask).sum() + 0.1 * (labels.to(logits.dtype) * mask).sum()) / (
            mask.sum() + 1
        )


class ByCountOfBatch(Model):
    """The batch says how many labels all of it has; another part of the loss is a mean over rows."""

    def loss(self, logits, labels, mask, count):
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / count + 0.01 * logits.square().mean()


class PerPlace(Model):
    """A mean over rows at each place, of which there is a mean."""

    def loss(self, logits, labels, mask, count):
        return ((self.losses(logits, labels) * mask).sum(0) / mask.sum(0).clamp(min=1)).mean()


class OfMeans(Model):
    def loss(self, logits, labels, mask, count):
        return (self.losses(logits, labels) * mask).mean() / mask.float().mean()


class OfRows(Model):
    """A mean over the tokens of each row, of which there is a mean: every row counts alike."""

    def loss(self, logits, labels, mask, count):
        return ((self.losses(logits, labels) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


class Many(Model):
    """More means than anyone would number: one for each of twenty tasks."""

    def loss(self, logits, labels, mask, count):
        total = 0.0
        for task in range(20):
            own = torch.where((labels + task) % 3 == 0, labels, -100)
            total = total + F.cross_entropy(logits.flatten(0, 1), own.flatten()) / 20
        return total


class PutBack(Model):
    """What a mask picks is computed on, and put back among all rows, by functions that give all and by one that writes."""

    def loss(self, logits, labels, mask, count):
        picked = mask.bool()
        at = picked.flatten().nonzero()[:, 0]
        out = logits.flatten(0, 1)
        out = out.index_put((at,), logits[picked].sin())
        out = out.masked_scatter(picked.flatten()[:, None], logits[picked].cos())
        out = torch.index_add(input=out, dim=0, index=at, source=logits[picked].tanh())
        out = out.clone().index_put_((at,), out[picked.flatten()].exp())
        return out.square().mean()


class OnAnotherDevice(Model):
    """Makes its mask where its parameters are."""

    def loss(self, logits, labels, mask, count):
        places = torch.arange(labels.shape[1], device=self.head.weight.device)
        late = (places > 2).expand_as(labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.clone().masked_fill_(late, -100).flatten())


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    # Uneven over ranks and microbatches; one row counts nothing.
    counts = torch.tensor([6, 5, 6, 1, 2, 0, 1, 3])
    mask = (torch.arange(LENGTH) < counts[:, None]).long()
    labels = torch.where(mask.bool(), labels, -100)
    return {"ids": ids, "labels": labels, "mask": mask, "count": (labels != -100).sum()}


MODELS = [
    BySum, ByClampedSum, ByNormalisedMask, Picked, PickedFirst, PickedOfBatch, BesideMeanOfBatch, BesideSumOfBatch, ByCountOfBatch, PerPlace, OfMeans, OfRows, Many,
    PutBack, OnAnotherDevice,
]  # fmt: skip
LAYOUTS = {
    "dp_shard=2": {"mesh": "dp_shard=2", "microbatches": 2},
    "dp_replicate=2": {"mesh": "dp_replicate=2"},
    "pp=2": {"mesh": "pp=2", "microbatches": 4},
    "pp=2,tp=2,dp_shard=2": {"mesh": "pp=2,tp=2,dp_shard=2", "microbatches": 2},
    "tp=2": {"mesh": "tp=2", "microbatches": 4},
    "recompute": {"mesh": "dp_shard=2", "microbatches": 2, "recompute": "blocks"},
}
FEW = [BySum, PickedOfBatch, PerPlace, OfMeans, PutBack]  # a sum, a pick, places, a ratio, what is put back


def seen(models, plan):
    """Of each model, how rows combine, the loss, every gradient, and notes."""
    found = []
    for build in models:
        job = mw.parallelize(build, {**plan, "precision": "float64"}, batch=batch())
        data, rank = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
        first, last = (0, ROWS) if data == 1 else [(0, 5), (5, ROWS)][rank]
        own = {name: t[first:last] if t.dim() else t for name, t in batch().items()}
        loss = float(job.step(own))
        gradients = {line.name: g for line, g in job.full_gradients()}
        found.append((job.rows, loss, gradients, job.notes))
    return found


@pytest.mark.parametrize(
    ("layout", "builds"),
    [
        pytest.param("dp_shard=2", FEW, id="dp_shard=2, a few"),
        *(pytest.param(name, MODELS, id=name, marks=pytest.mark.proof) for name in LAYOUTS),
    ],
)
def test_a_mean_is_that_of_one_device_and_rows_stay_divided(layout, builds, workers):
    plan = LAYOUTS[layout]
    found = workers.run(seen, builds, plan, ranks=mw.Plan.parse(plan).mesh.size, timeout=600)[0]  # many models, 8 ranks
    for build, (rows, loss, gradients, notes) in zip(builds, found, strict=True):
        torch.manual_seed(0)
        model = build().double()
        expected = model(**batch()).loss
        expected.backward()
        assert rows == ("ratio" if build is OfMeans else "mean"), f"{build.__name__}: {rows}, {notes}"
        assert loss == pytest.approx(expected.item(), rel=1e-12), build.__name__
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-12, msg=f"{build.__name__}: {name}")


class OwnLabels(Model):
    """Learns what it says itself: its labels follow from its parameters. Those of which it is not sure do not count."""

    sure = 0.0

    def loss(self, logits, labels, mask, count):
        best, says = logits.detach().softmax(-1).max(-1)
        own = torch.where(best >= self.sure, says, -100)
        return F.cross_entropy(logits.flatten(0, 1), own.flatten())  # a line that a note names


class OwnSureLabels(OwnLabels):
    sure = 0.2


def told(build):
    job = mw.parallelize(build, "dp_shard=2", batch=batch())
    job._division.settle("mean")
    job._division._trials.of(StepMode(frozenset(), backward=True)).steps = None  # (it is not tried)
    own = {name: t[: ROWS // 2] if t.dim() else t for name, t in batch().items()}
    try:
        job.step(own)
    except RuntimeError as error:
        return job.notes, str(error)
    return job.notes, ""


def test_labels_that_cannot_be_counted_are_told_of_and_refused_if_some_are_ignored(workers):
    line = 1 + next(i for i, text in enumerate(SOURCE) if text.endswith("# a line that a note names"))
    notes, error = workers.run(told, OwnLabels, ranks=2)[0]
    assert any(f"{__file__}:{line}" in note and "weighted by rows" in note for note in notes), notes
    assert not error
    _, error = workers.run(told, OwnSureLabels, ranks=2)[0]
    assert f"{__file__}:{line}" in error and "rows: whole" in error


class Unfollowed(Model):
    """Cannot run without values."""

    def loss(self, logits, labels, mask, count):
        if logits.is_meta:
            raise RuntimeError("no values")
        return F.cross_entropy(logits.flatten(0, 1), ids_of(labels))


def ids_of(labels):
    return labels.clamp(min=0).flatten()


def test_a_forward_that_cannot_be_followed_is_told_of(workers):
    notes, error = workers.run(told, Unfollowed, ranks=2)[0]
    assert any("RuntimeError: no values" in note for note in notes), notes
    assert not error


class Tempered(Model):
    """Writes what has no name (a parameter) to a number of its batch, in place; others see it under another name."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def loss(self, logits, labels, mask, count):
        counted = mask.to(logits.dtype).mean()
        seen = counted.view(1)
        counted.mul_(self.temperature)
        return (self.losses(logits, labels) * mask).sum(1).mean() + seen[0]


class TemperedBy(Tempered):
    def loss(self, logits, labels, mask, count):
        counted = mask.to(logits.dtype).sum()
        counted.div_(self.temperature.detach())
        return (self.losses(logits, labels) * mask).sum() / counted


class TemperedWeights(Tempered):
    def loss(self, logits, labels, mask, count):
        weights = mask / mask.to(logits.dtype).sum()
        weights *= self.temperature
        return (self.losses(logits, labels) * weights).sum()


WRITTEN = [Tempered, TemperedBy, TemperedWeights]


@pytest.mark.parametrize(
    ("layout", "builds"),
    [
        pytest.param("dp_shard=2", WRITTEN[:1], id="dp_shard=2, one"),
        *(pytest.param(name, WRITTEN, id=name, marks=pytest.mark.proof) for name in ("dp_shard=2", "pp=2")),
    ],
)
def test_a_number_of_the_batch_may_be_written_to_by_what_has_no_name(layout, builds, workers):
    for build, (_, loss, gradients, _) in zip(
        builds, workers.run(seen, builds, LAYOUTS[layout], ranks=2)[0], strict=True
    ):
        torch.manual_seed(0)
        model = build().double()
        expected = model(**batch()).loss
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-12), build.__name__
        for name, p in model.named_parameters():
            if p.grad is None:
                assert gradients[name] is None, f"{build.__name__}: {name}"
            else:
                torch.testing.assert_close(
                    gradients[name], p.grad, rtol=1e-9, atol=1e-12, msg=f"{build.__name__}: {name}"
                )
