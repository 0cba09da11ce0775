"""Whether rows couple is found whatever the precision and the initial weights, and finding it leaves no trace."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.errors import RowsError
from meshwright.evaluation import StepMode
from meshwright.runtime.coupling.other_integers import Alternating, OutOfRangeError, other_integers

WIDTH, CLASSES = 16, 12


class Tokens(nn.Module):
    """Embeds tokens, mixes them as its subclass does, and predicts labels."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def mixed(self, x):
        return x, 0.0

    def forward(self, ids, labels):
        x, more = self.mixed(self.table(ids))
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + more)


class Normalised(Tokens):
    """With the mean and deviation of all rows, after which little changes but by rounding of a half type."""

    def mixed(self, x):
        return (x - 1e-3 * x.mean((0, 1))) / (1 + 1e-3 * x.std((0, 1))), 0.0


class Balanced(Tokens):
    """Chooses experts by a router that begins at zero; a loss of weight 0.01 balances them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        nn.init.zeros_(self.router.weight)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def mixed(self, x):
        shares = self.router(x).softmax(-1)
        weight, chosen = shares.max(-1)
        used = F.one_hot(chosen, 4).to(x.dtype)
        added = torch.einsum("bti,eio,bte->bto", x, self.experts, used) * weight[..., None]
        return x + added, 0.01 * 4 * (used.mean((0, 1)) * shares.mean((0, 1))).sum()


class Gated(Tokens):
    """What rows make of each other is behind a gate that begins at zero."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def mixed(self, x):
        return x + self.gate * x.mean(0), 0.0


_ANYTHING = itertools.count(1)  # as memory that is not initialised has


class Filled(Tokens):
    """Writes through views to what is empty."""

    def mixed(self, x):
        both = x.new_full((*x.shape[:-1], 2 * WIDTH), 10.0 * next(_ANYTHING))
        both[..., :WIDTH].copy_(x)
        both[..., WIDTH:].copy_(x.tanh())
        return both[..., :WIDTH] * both[..., WIDTH:], 0.0


class Phases(Tokens):
    """Multiplies by a complex weight."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / WIDTH)
        self.real, self.imaginary = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def mixed(self, x):
        return (torch.complex(self.real(x), self.imaginary(x)) @ self.turn).abs(), 0.0


class Bags(Tokens):
    """Adds up rows of a table with weights of its own type."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(CLASSES, WIDTH, mode="sum")

    def mixed(self, x):
        rows, length, _ = x.shape
        ids = torch.arange(length, device=x.device).repeat(rows, 1)
        return x + self.bag(ids, per_sample_weights=torch.full_like(ids, 0.5, dtype=x.dtype))[:, None], 0.0


class FixedRows(Tokens):
    """Has the number of rows as a number."""

    def mixed(self, x):
        return x.view(4, 6, WIDTH).tanh(), 0.0  # the line that a note names


def tokens(rows=8):
    ids = torch.randint(0, CLASSES, (rows, 6), generator=torch.Generator().manual_seed(0))
    labels = (ids * 3 + 1) % CLASSES
    labels[::3, 4:] = -100
    return {"ids": ids, "labels": labels}


def own_rows(job, batch):
    count = len(batch["ids"]) // job.recipe.mesh.data_size
    first = count * job.recipe.mesh.data_index(job.rank)
    return {name: t[first : first + count] for name, t in batch.items()}


def kinds(cases):
    found = []
    for build, plan in cases:
        job = mw.parallelize(build, plan, batch=tokens())
        job.step(own_rows(job, tokens()))
        found.append(job.rows)
    return found


CASES = {
    (Tokens, "float32"): "mean",
    (Tokens, "bfloat16"): "mean",
    (Normalised, "float32"): "coupled",
    (Normalised, "bfloat16"): "coupled",
    (Balanced, "float32"): "coupled",
    (Balanced, "bfloat16"): "coupled",
    (Gated, "float32"): "coupled",
    (Filled, "float32"): "mean",
    (Phases, "float32"): "mean",
    (Bags, "float32"): "mean",
}


FEW = [(Tokens, "float32"), (Normalised, "float32"), (Balanced, "bfloat16"), (Filled, "float32")]


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        pytest.param("dp_shard=2", FEW, id="dp_shard=2, a few"),
        *(pytest.param(mesh, list(CASES), id=mesh, marks=pytest.mark.proof) for mesh in ("dp_shard=2", "pp=2")),
    ],
)
def test_what_couples_rows_is_found_in_any_precision_and_at_initial_weights(mesh, cases, workers):
    plans = [(build, {"mesh": mesh, "precision": precision}) for build, precision in cases]
    assert workers.run(kinds, plans, ranks=2)[0] == [CASES[case] for case in cases]


class Centred(nn.Module):
    """Also returns what it makes of a received activation without a parameter: of a mean of 0 over all rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h), h - h.mean(0)


def of_what_is_trained(outputs):
    return sum(t.square().mean() for t in outputs if t.requires_grad)


def test_what_a_stage_receives_requires_a_gradient_in_the_trial_as_in_the_step(workers):
    plan = {"mesh": "pp=2", "microbatches": 2}
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    report = mw.check(Centred, x, plan, loss=of_what_is_trained, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
def test_rows_that_cannot_be_divided_are_run_together_with_a_note_of_the_line(mesh, workers):
    report = mw.check(FixedRows, tokens(4), {"mesh": mesh}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    note = next(note for note in report.notes if "cannot be run apart" in note)
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "the line that a note names" in text)
    assert f"{__file__}:{line}" in note


class Graph(nn.Module):
    """Nodes take what their neighbours are: edges name nodes by their rows, and some lie outside of any part of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, nodes, edges):
        for layer in (self.first, self.second):
            told = layer(nodes).index_select(0, edges[0])
            nodes = torch.zeros(len(nodes), 6, dtype=told.dtype).index_add(0, edges[1], told).tanh()
        return nodes.square().mean()


@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2"])
def test_rows_that_an_index_of_the_batch_names_are_run_together(mesh, workers):
    """In a stage of a part of the nodes, one rank alone would meet the index, and leave the others waiting."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 4, generator=generator), torch.randint(0, 8, (2, 20), generator=generator)
    report = mw.check(Graph, batch, {"mesh": mesh}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert any("cannot be run apart: IndexError" in note for note in report.notes), report.notes


class Changing(Tokens):
    """Changes whatever a forward can: buffers, attributes, its input, random numbers of every kind."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.kept, self.last = 0, [], None
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, ids, labels):
        labels[labels < 0] = -100
        ids.add_(1).remainder_(CLASSES)
        self.calls, self.last = self.calls + 1, ids
        self.kept.append(random.random() + numpy.random.rand())
        self.noise = float(torch.rand((), generator=self.generator) + torch.rand(()))
        self.seen += 1
        return super().forward(ids, labels)


def traces(mesh):
    job = mw.parallelize(Changing, {"mesh": mesh}, batch=tokens())
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    before = {name: p.detach().clone() for name, p in job.named_parameters()}
    batch = own_rows(job, tokens())
    job._division._trials._how_rows_combine(batch, StepMode(frozenset(), backward=True))
    model = job.module
    changed = [name for name, p in job.named_parameters() if not torch.equal(before[name], p.detach())]
    kept = model.calls, model.kept, model.last, hasattr(model, "noise"), float(model.seen), str(model.seen.dtype)
    same = all(torch.equal(t, own_rows(job, tokens())[name]) for name, t in batch.items())
    numbers = random.random(), numpy.random.rand(), torch.rand(()), torch.rand((), generator=model.generator)
    return changed, kept, same, [float(x) for x in numbers]


def test_finding_it_leaves_no_trace(workers):
    for changed, kept, same, numbers in workers.run(traces, "dp_shard=2", ranks=2):
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        generator = torch.Generator().manual_seed(5)
        expected = random.random(), numpy.random.rand(), torch.rand(()), torch.rand((), generator=generator)
        assert (changed, kept, same) == ([], (0, [], None, False, 0.0, "torch.float32"), True)
        assert numbers == [float(x) for x in expected]


class Typed(Tokens):
    """Asks for the type of a weight that is sharded over tp, as T5 does."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mixed(self, x):
        h = self.up(x).relu()
        if h.dtype != self.down.weight.dtype:
            h = h.to(self.down.weight.dtype)
        return x + self.down(h), 0.0


def gradients_in_float32(build, plan):
    """(loss, gradients) of a first step, which tries rows in float64, and of one device."""
    torch.manual_seed(0)
    ids, labels = torch.randint(CLASSES, (2, 8, 6))
    job = mw.parallelize(build, plan, batch=(ids, labels))
    values = {line.name: value for line, value in job.full_parameters()}
    size, index = job.recipe.mesh.data_size, job.recipe.mesh.data_index(job.rank)
    rows = slice(8 * index // size, 8 * (index + 1) // size)
    found = [job.step((ids[rows], labels[rows])), *(g for _, g in job.full_gradients())]
    if job.rank != 0:
        return None
    model = build()
    model.load_state_dict(values)
    loss = model(ids, labels).loss
    loss.backward()
    return found, [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("plan", ["dp_shard=2,tp=2", pytest.param("pp=2,tp=2", marks=pytest.mark.proof)])
@pytest.mark.parametrize("build", [Tokens, Typed])
def test_what_the_trial_computes_in_is_not_what_the_step_computes_in(build, plan, workers):
    found, expected = workers.run(gradients_in_float32, build, plan, ranks=4)[0]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Placed(Tokens):
    """A linear of which the forward says where its parameters are, and of which type or size."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def mixed(self, x):
        self.place(x)
        return x + self.inner(x).tanh(), 0.0


class MovedToDevice(Placed):
    def place(self, x):
        self.inner.to(x.device)


class MadeFloat(Placed):
    def place(self, x):
        self.inner.float()


class CastToItsType(Placed):
    """As routers do, whatever the type of the model."""

    def place(self, x):
        self.inner = self.inner.to(torch.float32)


class ClippedByData(Placed):
    def place(self, x):
        self.inner.weight.data = self.inner.weight.data.clamp(-0.1, 0.1)


class ClippedInPlace(Placed):
    def place(self, x):
        with torch.no_grad():
            self.inner.weight.copy_(self.inner.weight.clamp(-0.1, 0.1))


def two_steps_in_float32(builds, plan):
    """For each model the largest difference from one device, of losses, gradients and parameters in float32."""
    furthest = []
    for build in builds:
        torch.manual_seed(0)
        ids, labels = torch.randint(CLASSES, (2, 8, 6))
        job = mw.parallelize(build, plan, batch=(ids, labels))
        torch.manual_seed(0)
        model = build()
        rows = own_rows(job, {"ids": ids, "labels": labels})
        optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (job, model)]
        for _ in range(2):
            loss = model(ids, labels).loss
            loss.backward()
            found = [job.step((rows["ids"], rows["labels"])), *(g for _, g in job.full_gradients())]
            expected = [loss.detach(), *(p.grad for p in model.parameters())]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            found += [value for _, value in job.full_parameters()]
            expected += [p.detach() for p in model.parameters()]
            pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]  # wholes are on rank 0
            assert all(a.dtype == b.dtype for a, b in pairs)
            furthest.append(max(float((a - b).abs().max()) for a, b in pairs))
    return furthest


@pytest.mark.parametrize("plan", ["dp_shard=2", "pp=2"])
def test_a_trial_leaves_parameters_that_the_forward_places_or_writes_as_they_were(plan, workers):
    """A trial that computes in float64 made parameters of float64 of them, moved off their values."""
    builds = [MovedToDevice, MadeFloat, CastToItsType, ClippedByData, ClippedInPlace]
    for furthest in workers.run(two_steps_in_float32, builds, plan, ranks=2):
        assert max(furthest) < 1e-5, furthest


class Renormed(Tokens):
    """Looks up rows of a table, which it scales down first. Most rows of the batch have rows of their own in the table."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.Embedding(8 * CLASSES, WIDTH, max_norm=1.0)

    def forward(self, ids, labels):
        x = self.table(ids) + self.pairs(7 * ids + ids.roll(1, 1))
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class WritesThroughAView(Tokens):
    """Moves a parameter by what it sees of the rows, through a view of it without a gradient."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(2, WIDTH))

    def mixed(self, x):
        with torch.no_grad():
            self.centre.detach()[0].mul_(0.5).add_(x.mean((0, 1)))
        return x - self.centre.sum(0), 0.0


class WritesBesideATransform(WritesThroughAView):
    """Takes views within a transform of torch.func too, whose tensors have no memory of their own."""

    def mixed(self, x):
        x, more = super().mixed(x)
        return x + torch.vmap(lambda row: row.detach().view(-1)[:1].expand(WIDTH))(self.centre).sum(0), more


@pytest.mark.parametrize(
    "plan", ["dp_shard=2", {"mesh": "pp=2", "microbatches": 2}, {"mesh": "tp=2", "microbatches": 2}], ids=str
)
def test_a_write_to_a_parameter_that_depends_on_rows_couples_them(plan, workers):
    """In a trial in float64 these writes went to a copy. Microbatches and data ranks each wrote for their own rows: a wrong loss in the
    second step, or replicas that differ."""
    builds = [Renormed, WritesThroughAView, WritesBesideATransform]
    for furthest in workers.run(two_steps_in_float32, builds, plan, ranks=2):
        assert max(furthest) < 1e-5, furthest


class Keeping(Tokens):
    """Keeps something of each forward in plain attributes."""

    def __init__(self):
        super().__init__()
        self.rows, self.steps, self.means, self.last, self.mean = 0, 0, [], None, torch.zeros(WIDTH)
        self.inner = nn.Identity()

    def forward(self, ids, labels):
        self.keep(self.table(ids).detach())
        return super().forward(ids, labels)


class Counts(Keeping):
    """Counts rows, and computes nothing with that."""

    def keep(self, x):
        self.steps += 1
        self.inner.rows = getattr(self.inner, "rows", 0) + len(x)
        self.means.append(x.mean().item())
        self.last = x

    def mixed(self, x):
        return x * (1 + self.steps / 10), 0.0


class Averages(Keeping):
    """Computes with an average of activations of earlier forwards."""

    def keep(self, x):
        self.means.append(0)

    def mixed(self, x):
        before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - before, 0.0


@dataclass(slots=True)
class Mean:
    value: Tensor
    count: int = 0


class AveragesInObject(Averages):
    """The average is an attribute of a plain object, in a list."""

    def __init__(self):
        super().__init__()
        self.averages = [Mean(torch.zeros(WIDTH))]

    def mixed(self, x):
        kept = self.averages[0]
        before, kept.value = kept.value, 0.9 * kept.value + 0.1 * x.detach().mean((0, 1))
        kept.count += len(x)
        return x - before, 0.0


class Remembers(Keeping):
    """Computes with the activations of the forward before."""

    def keep(self, x):
        self.before, self.last = self.last, x

    def mixed(self, x):
        return x if self.before is None else x + self.before.mean((0, 1)), 0.0


class Steady(Keeping):
    """Refuses tokens whose mean is far from that of the forward before."""

    def keep(self, x):
        mean = x.mean((0, 1))
        if self.last is not None and not torch.allclose(mean, self.last):
            raise RuntimeError("the tokens drift")
        self.last = mean


def kept_after_steps(builds, plan):
    """For each model what the trial came to, the notes, and the losses of three steps here and on one device."""
    found = []
    for build in builds:
        job = mw.parallelize(build, plan, batch=tokens(), dtype=torch.float64)
        losses = [job.step(own_rows(job, tokens())).item() for _ in range(3)]
        torch.manual_seed(0)
        one = build().double()
        found.append((job.rows, " ".join(job.notes), losses, [one(**tokens()).loss.item() for _ in range(3)]))
    return found


@pytest.mark.parametrize(
    "plan",
    [{"mesh": "dp_shard=2"}, pytest.param({"mesh": "tp=2", "microbatches": 2}, marks=pytest.mark.proof)],
    ids=str,
)
def test_what_forwards_keep_in_attributes_is_told_or_run_as_on_one_device(plan, workers):
    found = workers.run(kept_after_steps, [Counts, Averages, Remembers, AveragesInObject, Steady], plan, ranks=2)[0]
    assert [kind for kind, *_ in found] == ["mean", "coupled", "coupled", "coupled", "coupled"]
    assert "inner.rows" in found[0][1] and "means" in found[0][1] and "steps" not in found[0][1]
    assert "attributes of its modules (mean)" in found[1][1] and "attributes of its modules" in found[2][1]
    assert "attributes of its modules (averages.0.count, averages.0.value)" in found[3][1]
    assert "attributes of its modules (last)" in found[4][1]
    for _, _, losses, expected in found:
        assert losses == pytest.approx(expected, rel=1e-9)


class FreeBits(Tokens):
    """A penalty on a mean over all rows has a corner, at which no row of the first step is, or acts on gradients alone; or it
    does so on each row's own.

    Args:
        corner: how it is written.
    """

    def __init__(self, corner):
        super().__init__()
        self.corner, self.scale = corner, nn.Parameter(torch.zeros(()))

    def mixed(self, x):
        return x * self.scale.exp().clamp(max=100), self.penalty(x.square().mean((1, 2)), x.mean(1))

    def penalty(self, each, means):
        if self.corner == "clamp":
            return each.mean().clamp(min=0.5)
        if self.corner == "above nothing":
            return F.relu(each.mean() - 50)
        if self.corner == "in place":
            return each.mean().sub(0.5).relu_()
        if self.corner == "in place by keyword":
            return torch.relu_(input=each.mean().sub(0.5))
        if self.corner == "overwritten":
            square = each.mean().square()
            square.data.zero_()
            return square
        if self.corner == "of each feature":
            return means.mean(0).clamp(min=0.3).sum()
        if self.corner == "where":
            of_all = means.mean(0)
            return torch.where(of_all > 0.3, of_all, 0.3 * torch.ones_like(of_all)).sum()
        if self.corner == "maximum":
            return torch.maximum(each.mean(), means.mean().exp())
        if self.corner == "distance":
            return F.l1_loss(means.mean(0), torch.ones(WIDTH, dtype=means.dtype))
        if self.corner == "topk":
            return (1 - means.mean(0)).topk(3).values.sum()
        if self.corner == "compared":
            return each.mean() * (each.mean() > 0.5)
        if self.corner == "where one":
            return torch.where(each.mean() > 0.5, each.mean(), 0.0)
        if self.corner == "stop":
            return each.mean() / each.mean().detach()
        if self.corner == "stop of a large number":
            return 1e8 * each.sum() / (1e8 * each.sum()).detach()
        if self.corner == "stop without gradients":
            with torch.no_grad():
                scale = 1 / each.mean()
            return each.mean() * scale
        if self.corner == "stop by a number":
            return each.mean() / each.mean().item()
        return getattr(self, f"of_rows_{self.corner.removesuffix(' of rows')}")(each, means)

    def of_rows_all(self, each, means):
        """The same functions, of each row's own."""
        of_each = each.clamp(min=0.5) + F.relu(each - 50) + means.abs().amax(1) + torch.maximum(each, means.mean(1))
        return (
            of_each.mean()
            + F.smooth_l1_loss(means, means.roll(1, 1))
            + torch.where(means > 0.3, means, 0.3 * means).mean()
        )

    def of_rows_metric(self, each, means):
        """Numbers of all rows that are told, and not in the loss."""
        self.told = each.mean().clamp(min=0.5).detach(), (means.mean(0) > 0.3).float().mean(), each.mean().item()
        return 0.0

    def of_rows_stopped(self, each, means):
        """What is taken without its gradient is of each row's own, and so is what is compared."""
        kept = means.detach().masked_fill(means < 0, -torch.inf).softmax(-1)
        return (each / each.detach() + each * (each > 0.5)).mean() + (kept * means).sum(1).mean()

    def of_rows_overwritten(self, each, means):
        """What is overwritten without its gradient is of each row's own."""
        square = each.square()
        square.data.clamp_(max=1.0)
        with torch.no_grad():
            square.mul_(0.5)
        return square.mean()

    def of_rows_count(self, each, means):
        """The count follows from the batch alone."""
        kept = torch.ones(len(each), dtype=each.dtype)
        return (each * kept).sum() / kept.sum().clamp(min=1)


HIDDEN = [
    "clamp", "above nothing", "in place", "of each feature", "where", "maximum", "distance", "topk", "compared", "where one",
    "in place by keyword", "overwritten", "stop", "stop of a large number", "stop without gradients", "stop by a number",
]  # fmt: skip
CORNERS = dict.fromkeys(HIDDEN, "coupled") | dict.fromkeys(
    ["all", "metric", "count", "stopped", "overwritten of rows"], "mean"
)


MICROBATCHES = [{"mesh": "pp=2", "microbatches": 2}, {"mesh": "tp=2", "microbatches": 2}]


@pytest.mark.parametrize(
    "plan", [{"mesh": "dp_shard=2"}, *(pytest.param(p, marks=pytest.mark.proof) for p in MICROBATCHES)], ids=str
)
def test_what_a_loss_does_not_show_of_a_number_of_all_rows_couples_them(plan, workers):
    found = workers.run(kinds, [(partial(FreeBits, corner), plan) for corner in CORNERS], ranks=2)[0]
    assert dict(zip(CORNERS, found, strict=True)) == CORNERS


def test_the_line_of_a_corner_is_told(workers):
    plan = {"mesh": "dp_shard=2"}
    note = " ".join(workers.run(kept_after_steps, [partial(FreeBits, "clamp")], plan, ranks=2)[0][0][1])
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "each.mean().clamp(min=0.5)" in text)
    assert f"test_coupling.py:{line}" in note.replace(" ", "")


class Begins(Tokens):
    """After some steps a sum over rows is in the loss, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def mixed(self, x):
        self.steps += 1
        return x, x.square().sum() if self.steps > 5 else 0.0


def kinds_of_steps(plan):
    job = mw.parallelize(Begins, plan, batch=tokens())
    found = []
    for _ in range(12):
        job.step(own_rows(job, tokens()))
        found.append(job.rows)
    return found, " ".join(job.notes)


def test_a_term_that_begins_later_is_found_by_trying_again_and_the_steps_before_are_told(workers):
    found, notes = workers.run(kinds_of_steps, {"mesh": "dp_shard=2"}, ranks=2)[0]
    assert found == ["mean"] * 8 + ["coupled"] * 4
    assert "after 8 steps they combine otherwise" in notes and "of the last 3 steps" in notes


class InTraining(Tokens):
    """Takes statistics of the batch, and adds a sum over rows, when it trains; in evaluation it does something else."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def mixed(self, x):
        x = self.inner(x)
        if not self.training:
            x = x.tanh() + self.inner(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x, x.square().sum() if self.training else 0.0


class WithGradients(Tokens):
    """A mean over rows if gradients are enabled, a sum if not."""

    def forward(self, ids, labels):
        each = self.head(self.table(ids)).square()
        return SimpleNamespace(loss=each.mean() if torch.is_grad_enabled() else each.sum())


def evaluates_and_trains(plan, order, *, build=InTraining, modes=True):
    """The losses, and how rows combine in training. ``modes``: whether an evaluation is in evaluation mode."""
    job = mw.parallelize(build, plan, batch=tokens(), dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(job.parameters(), lr=0.01), []
    for trains in order:
        job.module.train(trains or not modes)
        optimizer.zero_grad()
        losses.append((job.step if trains else job.evaluate)(own_rows(job, tokens())).item())
        if trains:
            optimizer.step()
    return losses, job.rows


@pytest.mark.parametrize(
    "order", [(False, True, True, False), (True, False, True)], ids=["evaluation first", "training first"]
)
@pytest.mark.parametrize(
    "plan", [{"mesh": "dp_shard=2"}, {"mesh": "pp=2", "microbatches": 2}, {"mesh": "tp=2", "microbatches": 2}], ids=str
)
def test_a_model_in_evaluation_mode_is_another(plan, order, workers):
    (losses, rows), *_ = workers.run(evaluates_and_trains, plan, order, ranks=2)
    expected, _ = workers.run(evaluates_and_trains, {"mesh": "dp_shard=1"}, order, ranks=1)[0]
    assert losses == pytest.approx(expected, rel=1e-10) and rows == "coupled"


@pytest.mark.parametrize("modes", [True, False], ids=["evaluation mode", "training mode"])
@pytest.mark.parametrize("plan", [{"mesh": "dp_shard=2"}, {"mesh": "pp=2", "microbatches": 2}], ids=str)
def test_a_forward_without_gradients_is_another(plan, modes, workers):
    order = (True, False, True, False)
    run = partial(evaluates_and_trains, build=WithGradients, modes=modes)
    (losses, _), *_ = workers.run(run, plan, order, ranks=2)
    expected, _ = workers.run(run, {"mesh": "dp_shard=1"}, order, ranks=1)[0]
    assert losses == pytest.approx(expected, rel=1e-10)


class Contrasts(Tokens):
    """Compares rows with each other in some steps, as the batch says."""

    def forward(self, ids, labels, task=None, others=None):
        said = task == "contrast" or (isinstance(task, Tensor) and bool(task[0] > 0))
        if others is None and not said:
            return super().forward(ids, labels)
        each = F.normalize(self.head(self.table(ids)).mean(1), dim=-1)
        return SimpleNamespace(loss=F.cross_entropy(each @ each.T, torch.arange(len(each))))


def tasks(how):
    """Batches of one task, and of another, that tell it in a way."""
    ids, labels = tokens().values()
    told = {"key": ({}, {"others": ids}), "text": ({"task": "predict"}, {"task": "contrast"}),
            "values": ({"task": torch.zeros(len(ids))}, {"task": torch.ones(len(ids))})}[how]  # fmt: skip
    return [{"ids": ids, "labels": labels, **more} for more in told]


def of_several_tasks(plan, how):
    one, other = tasks(how)
    job = mw.parallelize(Contrasts, plan, batch=one)
    done = []
    for batch in (one, one, other):
        rows = {**batch, **own_rows(job, {name: t for name, t in batch.items() if isinstance(t, Tensor)})}
        try:
            job.step(rows)
        except RowsError as error:
            done.append(str(error))
        else:
            done.append("")
    return done


@pytest.mark.parametrize("how", ["key", "text", "values"])
@pytest.mark.parametrize("plan", [{"mesh": "dp_shard=2"}, {"mesh": "pp=2", "microbatches": 2}], ids=str)
def test_a_task_that_was_not_tried_and_couples_rows_is_an_error(plan, how, workers):
    for first, second, error in workers.run(of_several_tasks, plan, how, ranks=2):
        assert not first and not second and "what it has not done before" in error and "rows: whole" in error


class Asks(FreeBits):
    """Asks for a gradient in its forward, so that a trial without gradients begins anew with them; and compares."""

    def mixed(self, x):
        (slope,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
        mixed, penalty = super().mixed(x)
        return mixed, penalty + slope.square().mean()


def test_a_comparison_is_found_beside_a_gradient_that_the_forward_asks_for(workers):
    plan = {"mesh": "dp_shard=2"}
    cases = {"compared": "coupled", "clamp": "coupled", "stopped": "mean"}
    found = workers.run(kinds, [(partial(Asks, corner), plan) for corner in cases], ranks=2)[0]
    assert dict(zip(cases, found, strict=True)) == cases


def after_a_single_row(plan):
    job = mw.parallelize(Normalised, plan, batch=tokens())
    found = []
    for rows in (1, 8):
        job.step({name: t[:rows] for name, t in tokens().items()})
        found.append(job.rows)
    return found


def test_a_first_batch_of_a_single_row_tells_nothing(workers):
    assert workers.run(after_a_single_row, {"mesh": "tp=2", "microbatches": 2}, ranks=2)[0] == ["auto", "coupled"]


class OfNumbers(nn.Module):
    """A term of the loss, or a factor, follows from the batch alone.

    Args:
        term: how it is written.
    """

    def __init__(self, term):
        super().__init__()
        self.term, self.linear = term, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        y = self.linear(x).square().mean((1, 2))
        return SimpleNamespace(loss=getattr(self, f"with_{self.term}")(y, x, mask))

    def with_a_distance(self, y, x, mask):
        return y.mean() + (x.square().mean() - 3).abs()

    def with_a_comparison(self, y, x, mask):
        return y.mean() + 0.1 * (x.square().mean() < 3)

    def with_a_compared_factor(self, y, x, mask):
        return y.mean() * (x.square().mean() < 3)

    def with_distances_of_rows(self, y, x, mask):
        each = x.square().mean((1, 2))
        return (y + (each - 3).abs() * (each < 3)).mean()

    def with_a_mask(self, y, x, mask):
        return (y * mask).sum() / mask.sum().clamp(min=1)

    def with_a_count(self, y, x, mask):
        kept = (x[:, 0, 0] > 0).to(y.dtype)
        return (y * kept).sum() / kept.sum().clamp(min=1)

    def with_weights(self, y, x, mask):
        weights = x[:, 0, 0].abs()
        return (y * weights).sum() / weights.sum()


OF_NUMBERS = dict.fromkeys(["a_distance", "a_comparison"], "coupled") | dict.fromkeys(
    ["distances_of_rows", "a_mask", "a_count", "weights"], "mean"
)
OF_NUMBERS["a_compared_factor"] = "ratio"  # which is computed for all rows


def kinds_of_numbers(plan):
    x = torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "mask": torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 1])}
    found = {}
    for term in OF_NUMBERS:
        job = mw.parallelize(partial(OfNumbers, term), plan, batch=batch)
        first = 4 * job.recipe.mesh.data_index(job.rank)
        job.step({name: t[first : first + 8 // job.recipe.mesh.data_size] for name, t in batch.items()})
        found[term] = job.rows
    return found


@pytest.mark.parametrize("plan", [{"mesh": "dp_shard=2"}, {"mesh": "tp=2", "microbatches": 2}], ids=str)
def test_corners_of_a_number_of_all_rows_of_the_batch_couple_them(plan, workers):
    assert workers.run(kinds_of_numbers, plan, ranks=2)[0] == OF_NUMBERS


class ByNumber(Tokens):
    """Does something else with many rows than with the few of a trial.

    Args:
        what: it does.
    """

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, ids, labels):
        logits = self.head(self.table(ids))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
        return SimpleNamespace(loss=getattr(self, f"with_{self.what}")(each, logits))

    def with_the_hardest(self, each, logits):
        return each.topk(min(12, len(each))).values.mean()

    def with_the_first(self, each, logits):
        return each.mean() + 0.1 * logits[:12].square().mean()

    def with_a_term(self, each, logits):
        return each.mean() + (0.1 * logits.std(0).mean() if len(each) > 8 else 0.0)

    def with_a_divisor(self, each, logits):
        return each.sum() / max(12, len(each))

    def with_blocks(self, each, logits):
        return torch.cat([block * 2 for block in each.split(5)]).mean()

    def with_a_loop(self, each, logits):
        return sum(each[i] for i in range(len(each))) / len(each)


BY_NUMBER = dict.fromkeys(["the_hardest", "the_first", "a_term", "a_divisor"], "coupled") | dict.fromkeys(
    ["blocks", "a_loop"], "mean"
)


def kinds_by_number(plan, whats):
    """How 24 rows combine; and how they are said to after 8 rows, with the error of the step."""
    found = {}
    for what in whats:
        for sizes in ((24,), (8, 24)):
            job = mw.parallelize(partial(ByNumber, what), plan, batch=tokens(sizes[0]))
            error = ""
            for rows in sizes:
                try:
                    job.step(own_rows(job, tokens(rows)))
                except RowsError as raised:
                    error = str(raised)
            found[what, sizes] = (job.rows, "combine otherwise" in error)
    return found


@pytest.mark.parametrize(
    ("plan", "whats"),
    [
        pytest.param({"mesh": "dp_shard=2"}, ["the_first", "a_divisor", "blocks"], id="dp_shard=2, a few"),
        pytest.param({"mesh": "dp_shard=2"}, list(BY_NUMBER), id="dp_shard=2", marks=pytest.mark.proof),
        pytest.param(MICROBATCHES[0], list(BY_NUMBER), id="microbatches", marks=pytest.mark.proof),
    ],
)
def test_what_is_done_with_many_rows_and_not_with_few_couples_them(plan, whats, workers):
    found = workers.run(kinds_by_number, plan, whats, ranks=2, timeout=300)[0]
    for what in whats:
        kind = BY_NUMBER[what]
        assert found[what, (24,)] == (kind, False), what
        if what == "the_hardest":  # a number of rows picks from all of them
            assert found[what, (8, 24)] == ("coupled", False)
        elif what != "a_divisor":  # which is a sum of 8 rows
            assert found[what, (8, 24)] == ("mean", kind == "coupled"), what
    assert found["a_divisor", (8, 24)] == ("sum", True)


class OfIntegers(nn.Module):
    """A term of the loss meets the integers of other rows, or only those of its own.

    Args:
        term: how it is written.
    """

    def __init__(self, term):
        super().__init__()
        self.term, self.table, self.linear = term, nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, classes, mask):
        h = self.linear(self.table(ids))
        return SimpleNamespace(loss=h.square().mean() + getattr(self, f"with_{self.term}")(h, ids, classes, mask))

    def with_a_column(self, h, ids, classes, mask):
        signs = (ids.sum(1, keepdim=True) % 2) * 2 - 1
        return -F.logsigmoid(h.mean((1, 2)) * signs).mean()

    def with_a_column_and_an_order(self, h, ids, classes, mask):
        """Indices of another kind beside it: what checks them must know where they stand."""
        h = h + 0 * h.take_along_dim(h.argsort(2), 2)
        return self.with_a_column(h, ids, classes, mask)

    def with_a_column_of_a_mask(self, h, ids, classes, mask):
        return (mask.all(1) * h.mean(2)[:, :1]).mean()

    def with_triplets(self, h, ids, classes, mask):
        far = torch.cdist(h.mean(1), h.mean(1))
        other = classes[:, None] != classes[None]
        return (F.relu(1 - far) * other).mean()

    def with_the_largest(self, h, ids, classes, mask):
        return (h.square().mean(2) * (torch.arange(ids.shape[1]) < ids.max())).mean()

    def with_a_number(self, h, ids, classes, mask):
        return h.mean() * (ids == 3).sum()

    def with_blocks_of_rows(self, h, ids, classes, mask):
        """Packed rows: a token meets those of its row."""
        packed, row = h.flatten(0, 1), torch.arange(len(h)).repeat_interleave(h.shape[1])
        return (packed @ packed.T).masked_fill(row[:, None] != row[None], -torch.inf).softmax(1).matmul(packed).mean()

    def with_documents(self, h, ids, classes, mask):
        """Each row is of documents; here of one."""
        document = (ids > 99).long()
        same = document[:, :, None] == document[:, None]
        return (h @ h.mT).masked_fill(~same, -torch.inf).softmax(-1).matmul(h).mean()

    def with_a_strict_mask(self, h, ids, classes, mask):
        """A row without any key is NaN."""
        keys = mask[:, None, None].expand(-1, 1, ids.shape[1], -1)
        return F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], attn_mask=keys).mean()

    def with_rows_of_as_many(self, h, ids, classes, mask):
        """Does not accept other ids."""
        if len(set((ids == 2).sum(1).tolist())) > 1:
            raise ValueError("each row needs as many")
        return h.mean()

    def with_a_table_of_sums(self, h, ids, classes, mask):
        """The table ends before the sums of other ids; no forward for shapes alone sees it. In the first stage and in the last."""
        places = ids.sum(1) - 34
        h = h + F.embedding(places, self.table.weight)[:, None]
        return self.linear(h.tanh()).mean() + F.embedding(places, self.linear.weight).mean()

    def with_places(self, h, ids, classes, mask):
        """Each row has a place for what its row in another tensor has."""
        places = (ids == 2)[..., None].expand_as(h)
        return torch.zeros_like(h).masked_scatter(places, h[:, 0]).square().mean()

    def with_a_mean_of_the_mask(self, h, ids, classes, mask):
        return (h.mean(2) * mask).sum() / mask.sum()


class InBranches(nn.Module):
    """The terms beside another branch."""

    def __init__(self, term):
        super().__init__()
        self.terms, self.side = OfIntegers(term), OfIntegers("a_mean_of_the_mask")

    def forward(self, ids, classes, mask):
        return SimpleNamespace(loss=self.terms(ids, classes, mask).loss + self.side(ids, classes, mask).loss)


OF_INTEGERS = dict.fromkeys(["a_column", "a_column_and_an_order", "a_column_of_a_mask", "triplets", "the_largest", "a_number"], "coupled") | dict.fromkeys(
    ["blocks_of_rows", "documents", "a_strict_mask", "rows_of_as_many", "a_table_of_sums", "places", "a_mean_of_the_mask"], "mean"
)  # fmt: skip


def kinds_of_integers(plan, rows, terms):
    """The ids of all rows are alike: of one sum, with one place; and all rows have one class, and no mask."""
    several = torch.tensor([[2, 4, 8, 10, 4, 6], [4, 2, 6, 8, 10, 4], [10, 4, 2, 6, 8, 4], [6, 8, 4, 2, 4, 10]])
    batch = {
        "ids": several.repeat(rows // 4, 1),
        "classes": torch.zeros(rows, dtype=torch.int64),
        "mask": torch.ones(rows, 6, dtype=torch.bool),
    }
    found = {}
    for term in terms:
        build = InBranches if "modules" in plan else OfIntegers
        job = mw.parallelize(partial(build, term), plan, batch=batch)
        job.step(own_rows(job, batch))
        found[term] = job.rows
    return found


MEETING = {
    "dp_shard=2": {"mesh": "dp_shard=2"},
    "pp=2": {"mesh": "pp=2", "microbatches": 2},
    "branches": {
        "mesh": "tp=2", "microbatches": 2, "modules": {"terms": {"on": "tp[0:1]"}, "side": {"on": "tp[1:2]"}}
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "rows", "terms"),
    [
        pytest.param("dp_shard=2", 4, ["a_column", "triplets", "a_number", "documents", "places"], id="a few"),
        *(
            pytest.param(layout, rows, list(OF_INTEGERS), id=f"{layout}-{rows}", marks=pytest.mark.proof)
            for layout in MEETING
            for rows in (4, 8)
        ),
    ],
)
def test_rows_that_meet_only_with_other_integers_than_those_of_the_batch_couple(layout, rows, terms, workers):
    """A stage or branch that refuses other integers is one of the cases: it says nothing, and nobody waits for it."""
    found = workers.run(kinds_of_integers, MEETING[layout], rows, terms, ranks=2)[0]
    assert found == {term: OF_INTEGERS[term] for term in terms}


class LargestOfAMask(nn.Module):
    """Refuses rows of which a mask picks nothing, between blocks that FSDP gathers one by one."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, ids, mask):
        h = self.blocks[1](self.blocks[0](self.table(ids)))
        h = h + 0 * h[mask].amax(0)
        return SimpleNamespace(loss=self.head(self.blocks[3](self.blocks[2](h))).square().mean())


def rows_some_of_which_are_refused(plan):
    """Each data rank has rows that are marked; the second has them where a trial does not reach."""
    mask = torch.zeros(32, 6, dtype=torch.bool)
    mask[:3], mask[31, 0] = True, True
    batch = {"ids": torch.randint(0, CLASSES, (32, 6), generator=torch.Generator().manual_seed(0)), "mask": mask}
    job = mw.parallelize(LargestOfAMask, plan, batch=batch)
    loss = job.step(own_rows(job, batch))
    return float(loss), job.rows, job.notes


@pytest.mark.parametrize(
    "plan",
    [{"mesh": "dp_shard=2"}, {"mesh": "dp_replicate=2"}, {"mesh": "pp=2,dp_shard=2", "microbatches": 1}],
    ids=str,
)
def test_rows_of_one_rank_that_cannot_run_apart_are_no_wait_for_the_others(plan, workers):
    """A rank whose trial fails must not leave the others in a gather of FSDP, or in a receive."""
    loss, rows, (note,) = workers.run(rows_some_of_which_are_refused, plan, ranks=4 if "pp" in plan["mesh"] else 2)[0]
    alone, *_ = workers.run(rows_some_of_which_are_refused, {"mesh": "dp_shard=1"}, ranks=1)[0]
    assert rows == "coupled" and "test_coupling.py" in note and loss == pytest.approx(alone, rel=1e-5)


PAST_THE_END = torch.tensor([[0, 4]])
INDEXED = {
    "embedding": lambda t, i: F.embedding(i, t),
    "getitem": lambda t, i: t[:, None][i],
    "second dim": lambda t, i: t.mT[:, i],
    "setitem": lambda t, i: t.clone().__setitem__(i, 0.0),
    "gather": lambda t, i: t.gather(0, i),
    "take_along_dim": lambda t, i: t[:, :2].take_along_dim(i, 0),
    "scatter": lambda t, i: t.clone().scatter_(dim=0, index=i, value=1.0),
    "index_select": lambda t, i: torch.index_select(t, 0, i[0]),
    "cross entropy": lambda t, i: F.cross_entropy(t.mT, i[0, 1:].expand(3)),
    "one_hot": lambda t, i: F.one_hot(i, 4),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_of_other_integers_that_is_out_of_range_never_reaches_torch(name):
    """On a GPU torch aborts the process at such an index."""
    table = torch.rand(4, 3)
    with Alternating(), pytest.raises(OutOfRangeError):
        INDEXED[name](table, PAST_THE_END)
    with Alternating():
        INDEXED[name](table, PAST_THE_END.clamp(max=3))


def test_a_label_to_ignore_is_in_range():
    with Alternating():
        assert F.cross_entropy(torch.rand(3, 4), torch.tensor([-100, 1, 3])).isfinite()
        assert F.cross_entropy(torch.rand(3, 4), torch.tensor([255, 1, 3]), ignore_index=255).isfinite()


# What picks from the values of each row alone, and what picks from means over rows.
OF_EACH_ROW = {
    "topk": lambda h: h.topk(2, dim=-1).values.sum(-1),
    "topk of another dim": lambda h: h.transpose(0, 1).topk(2, 0).values.sum(0),
    "sort": lambda h: torch.sort(h).values[..., 0],
    "msort": lambda h: h.transpose(0, 2).msort()[0].transpose(0, 1),
    "kthvalue": lambda h: h.kthvalue(2, dim=1).values.sum(-1),
    "quantile": lambda h: h.quantile(torch.tensor([0.25, 0.5], dtype=h.dtype), dim=-1).sum(0),
    "max": lambda h: h.max(dim=1, keepdim=True).values.sum(-1),
    "amax": lambda h: h.amax((1, 2)),
    "aminmax": lambda h: sum(h.aminmax(dim=-1)),
    "median": lambda h: h.median(-1)[0],
}
OF_ALL_ROWS = {
    "topk": lambda h: h.mean((0, 1)).topk(1).values.sum(),
    "max": lambda h: h.mean(0).max(),
    "amax": lambda h: h.mean(0).amax((0, 1)),
    "sort": lambda h: h.mean((0, 1)).sort().values[-1],
    "kthvalue": lambda h: h.mean((0, 1)).kthvalue(3).values,
    "quantile": lambda h: h.mean((0, 1)).quantile(0.9),
    "max along a dim": lambda h: h.mean(0).max(-1).values.sum(),
}


if torch.__version__ < (2, 12):
    del OF_EACH_ROW["aminmax"]  # it has no gradient there


class Picking(nn.Module):
    """Picks among values of which some, the largest, are alike in all rows: whichever rows are taken, they are picked."""

    def __init__(self, pick):
        super().__init__()
        self.linear, self.alike, self.pick = nn.Linear(4, 4), nn.Parameter(torch.tensor([5.0, 6.0])), pick

    def forward(self, x):
        h = self.linear(x)
        return self.pick(torch.cat([self.alike.expand(*h.shape[:-1], 2), h], -1)).mean()


def rows_of_picks(each, all_rows):
    x = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for kinds, names in ((OF_EACH_ROW, each), (OF_ALL_ROWS, all_rows)):
        found.append({})
        for name in names:
            job = mw.parallelize(partial(Picking, kinds[name]), "dp_shard=2", batch={"x": x[:4]}, loss=lambda y: y)
            job.step({"x": x[4 * job.rank : 4 * job.rank + 4]})
            found[-1][name] = job.rows
    return found


@pytest.mark.parametrize(
    ("each", "all_rows"),
    [
        pytest.param(["topk", "sort", "quantile", "amax"], ["topk", "max", "sort"], id="a few"),
        pytest.param(list(OF_EACH_ROW), list(OF_ALL_ROWS), id="all", marks=pytest.mark.proof),
    ],
)
def test_what_picks_from_numbers_of_all_rows_couples_them_whatever_it_picks_now(each, all_rows, workers):
    of_each, of_all = workers.run(rows_of_picks, each, all_rows, ranks=2)[0]
    assert of_each == dict.fromkeys(each, "mean")
    assert of_all == dict.fromkeys(all_rows, "coupled")


class Suspicious(nn.Module):
    """Raises an error where a corner is not as torch has it, and so in a trial whose values are bent there."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        positive = F.relu(h)
        if not torch.equal(positive, h * (h > 0)):
            raise RuntimeError("a relu that is none")
        return positive.mean() + (h.mean() - 100).relu()


def rows_of_suspicious():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    job = mw.parallelize(Suspicious, "dp_shard=2", batch={"x": x[:4]}, loss=lambda y: y)
    job.step({"x": x[4 * job.rank : 4 * job.rank + 4]})
    return job.rows, job.notes


def test_rows_run_together_if_what_acts_on_them_all_could_not_be_tried(workers):
    rows, (note,) = workers.run(rows_of_suspicious, ranks=2)[0]
    assert rows == "coupled" and "could not be tried (RuntimeError: a relu that is none" in note


class FarFromCorner(nn.Module):
    """A corner in a mean of all rows, of which all means are far away, and near to each other."""

    def __init__(self, corner):
        super().__init__()
        self.corner, self.linear = corner, nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return h.square().mean() + (h.mean() - self.corner).relu()


def rows_of_far(corner):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    job = mw.parallelize(partial(FarFromCorner, corner), "dp_shard=2", batch={"x": x[:4]}, loss=lambda y: y)
    job.step({"x": x[4 * job.rank : 4 * job.rank + 4]})
    return job.rows


@pytest.mark.parametrize("corner", [50.0, 5000.0])
def test_a_corner_far_from_all_values_couples_rows(corner, workers):
    assert workers.run(rows_of_far, corner, ranks=2)[0] == "coupled"


SEEN = torch.zeros(8)  # what a model keeps in its module


class WritesThroughASlice(nn.Module):
    """Keeps a mean of its rows in float32, and writes it through a view of what it keeps."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        SEEN.zero_()
        if where == "attribute":
            self.kept = torch.zeros(8)
        elif where == "list":
            self.kept = [torch.zeros(8)]
        elif where == "view of a buffer":
            self.register_buffer("table", torch.zeros(16))
            self.kept = self.table[4:12]

    def forward(self, x: Tensor) -> Tensor:
        kept = getattr(self, "kept", SEEN)
        kept = kept[0] if isinstance(kept, list) else kept
        kept[:6].lerp_(x.detach().mean((0, 1))[:6], 0.5)
        return self.last(torch.tanh(self.first(x + kept))).square().mean()


@pytest.mark.parametrize(
    "plan", [{"mesh": "tp=2", "microbatches": 2}, {"mesh": "pp=2", "microbatches": 2}, "dp_shard=2"], ids=str
)
@pytest.mark.parametrize("where", ["attribute", "list", "view of a buffer", "global"])
def test_writes_through_a_slice_are_seen_by_the_trial_in_float64(where, plan, workers):
    """It computes with copies in float64: a write to a slice of a copy was lost, and the rows did not seem to meet."""
    batch = (torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)),)
    report = mw.check(
        partial(WritesThroughASlice, where),
        batch,
        plan,
        loss=lambda out: out,
        dtype=torch.float32,
        workers=workers,
        steps=3,
    )
    assert report.passed, report
    assert any("every data rank" in note or "rows" in note for note in report.notes), report.notes


@pytest.mark.parametrize("tokens", [2, 3, 5])
@pytest.mark.parametrize("rows", [5, 6, 8])
def test_other_integers_have_other_shares_of_odd_ones_in_parts_of_the_rows(rows, tokens):
    found = []
    for seed in range(20):
        ids = torch.randint(11, (rows, tokens), generator=torch.Generator().manual_seed(seed))
        odd = other_integers({"ids": ids}, rows)["ids"] % 2 == 1
        shares = [(odd[:first].double().mean(), odd[first:].double().mean()) for first in range(1, rows)]
        found.append(min(abs(a - b) for a, b in shares) > 1e-6)
    assert sum(found) >= 18
