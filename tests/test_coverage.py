"""A part of the coverage table (bench/coverage.py, docs/coverage.md), and what it taught, as small models."""

from __future__ import annotations

import pytest
import torch
from architectures import MODELS
from torch import nn

import meshwright as mw
from zoo import DIM, Output, features

LAYOUTS = {
    "pp2": {"mesh": {"pp": 2}},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}},
    "pp2-dp_shard2": {"mesh": {"pp": 2, "dp_shard": 2}},
}
UNLIKE = ("gpt_neox", "gemma2", "qwen2_moe", "albert", "bart", "swin", "llava", "wav2vec2")
# What continuous integration runs: kinds of models, each in one layout.
QUICK = {"bart": "pp2"}


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(n, k, marks=() if QUICK.get(n) == k else pytest.mark.proof) for n in UNLIKE for k in LAYOUTS],
)
def test_architectures(name, layout, workers):
    model = MODELS[name]
    report = mw.check(model.build, model.batch(), LAYOUTS[layout], workers=workers, dtype=torch.float64)
    assert report.passed, str(report)
    assert report.dtype == "float64"


# --- what it taught -----------------------------------------------------------------------------------------


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x):
        return {"features": self.inner(x).tanh()}


class WritesToWhatItGot(nn.Module):
    """Puts another tensor into what a module returned, as LLaVA does with the features of images."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Features(), Features()
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, y):
        found = self.first(x)
        found["pooled"] = found["features"] * 2
        found = self.second(found["pooled"])
        found["pooled"] = found["features"] + 1
        prediction = self.head(found["pooled"])
        return Output(nn.functional.mse_loss(prediction, y), prediction)


class NamedByANumber(nn.Module):
    """Finds a module by a name with a value in it, as Switch Transformers find their experts."""

    def __init__(self):
        super().__init__()
        self.chosen = nn.ModuleDict({f"expert_{i}": nn.Linear(DIM, DIM) for i in range(3)})

    def forward(self, x):
        x = x.clone()
        with torch.no_grad():
            experts = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
        for i in experts.unique():
            rows = experts == i
            x[rows] = x[rows] + self.chosen[f"expert_{i}"](x[rows])
        return x


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NamedByANumber() for _ in range(2))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        prediction = self.head(x)
        return Output(nn.functional.mse_loss(prediction, y), prediction)


class Extreme(nn.Module):
    """Puts the largest value so far in place of a buffer; the output does not follow from it, as I-BERT trains."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        x = self.inner(x)
        self.largest = 0.9 * self.largest + 0.1 * x.detach().max()
        return x.tanh()


class Extremes(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Extreme() for _ in range(4))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        prediction = self.head(x)
        return Output(nn.functional.mse_loss(prediction, y), prediction)


class OneGradientForTwo(nn.Module):
    """The gradient of a sum is that of both its terms: the very same tensor, as autograd has it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh())
        self.first, self.second = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(DIM, 10)

    def forward(self, x, y):
        prediction = self.head(self.inner(x + (self.first + self.second)))
        return Output(nn.functional.mse_loss(prediction, y), prediction)


class CastsItsOwnModule(nn.Module):
    """Casts a module of its own whenever it uses it, as Switch Transformers do with their router."""

    def __init__(self):
        super().__init__()
        self.gate, self.inner, self.head = nn.Linear(DIM, 3), nn.Linear(DIM, DIM), nn.Linear(DIM, 10)

    def forward(self, x, y):
        for _ in range(2):
            self.gate = self.gate.to(x.dtype)
            x = x + self.gate(x).softmax(-1).amax(-1, keepdim=True) * self.inner(x).tanh()
        prediction = self.head(x)
        return Output(nn.functional.mse_loss(prediction, y), prediction)


class Noisy(nn.Module):
    """Draws noise for its rows, and which of them has how much, as diffusion is trained; dropout in torch's attention."""

    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(DIM, 4, dim_feedforward=DIM, dropout=0.1, batch_first=True)
        self.recurrent = nn.LSTM(DIM, DIM, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x, y):
        steps = torch.randint(0, 10, (len(x),))
        noise = torch.empty_like(x).normal_() * (steps / 10)[:, None]
        found, _ = self.recurrent(self.inner((x + noise)[:, None]))
        prediction = self.head(found[:, 0] * torch.bernoulli(torch.full((len(x), 1), 0.9)))
        return Output(nn.functional.mse_loss(prediction, noise), prediction)


def how_rows_combine(build, plan):
    job = mw.parallelize(build, {"mesh": plan, "precision": "float64"}, batch=features())
    job.step({k: v.double() for k, v in features().items()})
    return job.rows


@pytest.mark.parametrize("plan", ["dp_shard=2", "pp=2", "pp=2,tp=2"])
def test_random_numbers_do_not_look_like_coupled_rows(plan, workers):
    assert set(workers.run(how_rows_combine, Noisy, plan, ranks=mw.Plan.parse(plan).mesh.size)) == {"mean"}


def test_a_check_says_that_random_numbers_make_the_difference(workers):
    report = mw.check(Noisy, features(), {"mesh": {"dp_shard": 2}}, workers=workers, dtype=torch.float64)
    assert not report.passed
    assert [hint.split(" in its forward")[0] for hint in report.hints] == ["the model draws random numbers"]


class Largest(nn.Module):
    """The rows meet in a maximum of all of them, and matter by little, as in a Nyströmformer's inverse."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 10)

    def forward(self, x, y):
        x = self.inner(x).tanh()
        prediction = self.head(x + 1e-9 * x.abs().max())
        return Output(nn.functional.mse_loss(prediction, y), prediction)


def test_rows_that_are_coupled_by_little_are_found_in_float64(workers):
    assert set(workers.run(how_rows_combine, Largest, "dp_shard=2", ranks=2)) == {"coupled"}
    assert mw.check(
        Largest, features(), {"mesh": {"pp": 2, "dp_shard": 2}}, workers=workers, dtype=torch.float64
    ).passed


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("build", [OneGradientForTwo, CastsItsOwnModule])
def test_ways_of_parameters(build, plan, workers):
    report = mw.check(build, features(), {"mesh": plan}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


@pytest.mark.parametrize("plan", ["pp=2", "dp_shard=2", "pp=2,tp=2"])
@pytest.mark.parametrize("build", [WritesToWhatItGot, Routed, Extremes])
def test_ways_of_models(build, plan, workers):
    report = mw.check(build, features(), {"mesh": plan}, workers=workers, dtype=torch.float64)
    assert report.passed, str(report)


def test_a_running_value_of_the_rows_couples_them(workers):
    report = mw.check(Extremes, features(), {"mesh": {"dp_shard": 2}}, workers=workers, dtype=torch.float64)
    assert any("couples the rows" in note for note in report.notes)


def pieces():
    job = mw.parallelize(WritesToWhatItGot, {"mesh": {"pp": 2}}, batch=features())
    return job.recipe.microbatches


def test_a_pipeline_has_microbatches_though_its_plan_names_none(workers):
    assert workers.run(pieces, ranks=2) == [4, 4]
