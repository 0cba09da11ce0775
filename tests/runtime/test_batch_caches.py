"""Batches of many lengths, and of values that decide what runs: what was recorded for one holds for others, and no more is
kept than a few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.runtime.batch_caches import LengthCache, LruCache, sizes_of

WIDTH, CLASSES, ROWS, HEADS = 16, 12, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rotation, causal):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q * rotation) @ (k * rotation).transpose(-1, -2)
        mixed = scores.masked_fill(causal, -1e9).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Model(nn.Module):
    """Attention with positions that are computed from the length, and a masked mean."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, labels):
        x, t = self.table(ids), ids.shape[1]
        rotation = torch.arange(t, dtype=x.dtype)[:, None].cos()
        causal = torch.ones(t, t, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, rotation, causal)
        valid = labels != -100
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
        return SimpleNamespace(loss=(losses * valid.flatten()).sum() / valid.sum())


class LongerAreFolded(Model):
    """Does other things with long rows than with short ones."""

    def forward(self, ids, labels):
        if ids.shape[1] > 9:
            self.table.weight.mul(1.0)
            ids = (ids + 1) % CLASSES
        return super().forward(ids, labels)


def batch(length):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, CLASSES, (ROWS, length), generator=generator)
    kept = torch.tensor([length, 2, length - 1, 3])
    return {"ids": ids, "labels": torch.where(torch.arange(length) < kept[:, None], ids, -100)}


LENGTHS = [6, 14, 10, 7, 8, 9, 11, 12, 13, 20, 16, 17, 18, 5, 19, 15]


def losses_of(build, mesh):
    job = mw.parallelize(build, {"mesh": mesh, "microbatches": 2, "precision": "float64"}, batch=batch(6))
    recorded = {"stages": 0, "counts": 0}

    def counting(name, make):
        def made(*args, **named):
            recorded[name] += 1
            return make(*args, **named)

        return made

    counter = job._division._counter
    counter._record = counting("counts", counter._record)
    if job.pipeline is not None:
        replanner = job.pipeline.programs.replanner
        replanner.graph = counting("stages", replanner.graph)
    before = dict.fromkeys(recorded, 0)
    losses = []
    for length in LENGTHS:
        rank, ranks = job.recipe.mesh.data_index(job.rank), job.recipe.mesh.data_size
        own = {name: t[rank * ROWS // ranks : (rank + 1) * ROWS // ranks] for name, t in batch(length).items()}
        losses.append(float(job.step(own)))
        if len(losses) == 1:
            before = dict(recorded)  # the trial's are among them
    return losses, {name: recorded[name] - before[name] for name in recorded}


@pytest.mark.parametrize("mesh", ["pp=2", "dp_shard=2"])
@pytest.mark.parametrize("build", [Model, pytest.param(LongerAreFolded, marks=pytest.mark.proof)])
def test_a_new_length_is_not_recorded_if_it_follows_from_others(build, mesh, workers):
    losses, recorded = workers.run(losses_of, build, mesh, ranks=2)[-1]
    torch.manual_seed(0)
    model = build().double()
    assert losses == pytest.approx([float(model(**batch(length)).loss) for length in LENGTHS], rel=1e-10)
    if build is Model:
        assert sum(recorded.values()) <= 8, recorded  # 14 and 10, then what is longer or shorter than all before


def kept_programs(mesh):
    job = mw.parallelize(Model, {"mesh": mesh, "microbatches": 2}, batch=batch(6))
    job.step(batch(6))
    return job.rows, len(job.pipeline.programs._by_sizes)


def test_a_trial_leaves_no_programs(workers):
    """They are of as many rows as its pieces have, and hold masks and tables of positions of these."""
    assert workers.run(kept_programs, "pp=2", ranks=2) == [("mean", 1)] * 2


class ReadsItsMask(Model):
    """Goes another way if some of a mask is false. Other values are read by no one, and neither is a constant's origin."""

    def forward(self, ids, labels, mask):
        some = not bool((mask & torch.tensor(True)).all())
        even = (ids + torch.ones(1, dtype=torch.int64)) % 2 == 0
        x = self.table(ids) + even[..., None] * (0.5 if bool((torch.arange(3) > 0).any()) else 1.0)
        for block in self.blocks[: 3 if some else 4]:
            x = block(x, torch.ones(ids.shape[1], 1, dtype=x.dtype), torch.zeros(1, dtype=torch.bool))
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Throws(ReadsItsMask):
    """Goes a way that random numbers decide as well."""

    def forward(self, ids, labels, mask):
        torch.rand(1).item()
        return super().forward(ids, labels, mask)


def masked(seed, length):
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, CLASSES, (ROWS, 8), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels, "mask": (torch.arange(8) < length).expand(ROWS, 8).clone()}


MASKS = [8, 8, 6, 5, 8, 5, 6]


def losses_of_masks(build):
    plan = {"mesh": {"pp": 2}, "microbatches": 2, "precision": "float64", "rows": "split"}
    job = mw.parallelize(build, plan, batch=masked(0, 8))
    replanner, recorded = job.pipeline.programs.replanner, []
    make = replanner.graph
    replanner.graph = lambda *args, **named: recorded.append(1) or make(*args, **named)
    losses, counts = [], []
    for seed, length in enumerate(MASKS):
        losses.append(float(job.step(masked(seed, length))))
        counts.append(len(recorded))
    return losses, counts


@pytest.mark.parametrize(
    ("build", "counts"), [(ReadsItsMask, [1, 1, 2, 3, 3, 3, 3]), (Throws, [2, 4, 6, 8, 10, 12, 14])]
)
def test_a_forward_is_recorded_again_if_values_that_decide_its_path_differ(build, counts, workers):
    losses, recorded = workers.run(losses_of_masks, build, ranks=2)[-1]
    torch.manual_seed(0)
    model = build().double()
    expected = [float(model(**masked(seed, length)).loss) for seed, length in enumerate(MASKS)]
    assert losses == pytest.approx(expected, rel=1e-10)
    assert recorded == counts


def test_what_was_used_last_is_kept():
    kept = LruCache[int](2)
    assert [kept.get_or_make(key, lambda key=key: key) for key in (1, 2, 1, 3)] == [1, 2, 1, 3]
    assert (kept.get(1), kept.get(2), kept.get(3), len(kept)) == (1, None, 3, 2)


def test_lengths_between_follow_and_others_are_recorded():
    made = []

    def record(length):
        made.append(length)
        return 10 * length

    lengths = LengthCache[int](
        lambda points: (lambda n: 10 * n) if all(v == 10 * n for n, v in points) else None, most=4
    )
    for n in (3, 9, 5, 4, 8, 12, 11, 2, 9):
        assert (
            lengths.get_or_make(sizes_of({"x": torch.zeros(2, n), "y": torch.zeros(2, n + 1)}), lambda n=n: record(n))
            == 10 * n
        )
    assert made == [3, 9, 5, 12, 2]
    assert len(lengths) == 4


def test_batches_are_told_apart_by_constants_and_rows_and_not_by_values():
    def kind(**batch):
        return sizes_of(batch).kind

    x = torch.zeros(2, 5)
    assert kind(x=x, n=1) == kind(x=torch.ones(2, 7), n=1)
    assert len({kind(x=x, n=1), kind(x=x, n=2), kind(x=x, n=1.0), kind(x=x[:1], n=1), kind(x=x.int(), n=1)}) == 5
    assert sizes_of({"x": x, "n": bytearray(b"no")}) is None


def circle(rows: int, length: int, weight: float = 1.0) -> SimpleNamespace:
    """An object with tensors that refers to another, which refers back to it and to itself."""
    first, second = SimpleNamespace(ids=torch.zeros(rows, length)), SimpleNamespace(mask=torch.ones(rows, length))
    first.weight, first.other, second.other, second.own = weight, second, first, [second]
    return first


def test_objects_that_refer_back_to_each_other_are_told_apart_by_what_they_hold():
    assert sizes_of({"x": circle(2, 5)}) == sizes_of({"x": circle(2, 5)})
    assert len({sizes_of({"x": circle(*facts)}) for facts in ((2, 5), (3, 5), (2, 6), (2, 5, 0.5))}) == 4
    assert sizes_of({"x": circle(2, 5)}).kind == sizes_of({"x": circle(2, 6)}).kind  # but for the length
