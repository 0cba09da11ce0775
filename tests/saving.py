"""What tests of checkpoints share: a model that is awkward to save, layouts, and a run that is saved and resumed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.runtime.weights.gather import full_tensors

WIDTH, HEADS, INNER, WORDS = 12, 3, 21, 37


class Attention(nn.Module):
    """Queries, keys and values in one weight."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=-1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP side by side, so that they can stand on different ranks; counts its calls."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Inner()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        h = self.norm(x)
        return x + self.scale * self.dropout(self.attention(h) + self.mlp(h))


class Tied(nn.Module):
    """Odd sizes, a fused weight, a parameter without dims, one head that is the embedding."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())}


class Dropping(Tied):
    def __init__(self):
        super().__init__(dropout=0.3)


def rows(count: int = 12) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, WORDS, (count, 7), generator=torch.Generator().manual_seed(3))}


BRANCHED = {f"blocks.{i}.{m}": {"on": on} for i in range(2) for m, on in (("attention", "tp[0:1]"), ("mlp", "tp[1:4]"))}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"mesh": {"tp": 1}},
    "tp2": {"mesh": {"tp": 2}},
    "tp4": {"mesh": {"tp": 4}},
    "dp_shard2": {"mesh": {"dp_shard": 2}},
    "dp_shard3": {"mesh": {"dp_shard": 3}},
    "pp2": {"mesh": {"pp": 2}, "microbatches": 2},
    "pp2-tp2": {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2},
    "pp2-dp_shard2-tp2": {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "microbatches": 2},
    "branches 1+3": {"mesh": {"tp": 4}, "modules": BRANCHED},
    "hsdp": {"mesh": {"dp_replicate": 2, "dp_shard": 2}},
}


def ranks(plan: dict[str, Any]) -> int:
    return mw.Mesh.parse(plan["mesh"]).size


def state(job: mw.Job, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """On rank 0 everything there is, whole: gathered by the recipe, not by what saves."""
    found = job.full_state_dict()
    aliases = {a for line in job.recipe for a in line.aliases}
    found = {k: v for k, v in found.items() if k not in aliases}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        pick = {id(p): optimizer.state[p][key] for p in job.parameters() if p in optimizer.state}
        if key == "step":
            steps = {float(v) for v in pick.values()}
            assert len(steps) <= 1
            found["step"] = torch.tensor(steps.pop() if steps else -1.0)
            continue
        for line, value in full_tensors(job.module, job.recipe, job.groups, lambda p: pick.get(id(p))):  # noqa: B023
            if value is not None:
                found[f"{line.name}.{key}"] = value
    return found


def start(plan: dict[str, Any], build: Any = Tied) -> tuple[mw.Job, torch.optim.Optimizer, Any]:
    plan = {"precision": "float64", **plan}
    job = mw.parallelize(build, plan, batch=rows())
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2, weight_decay=0.1)
    return job, optimizer, job.batches(rows(60), 12, epochs=None, seed=5)


def steps(job: mw.Job, optimizer: torch.optim.Optimizer, data: Any, count: int) -> list[float]:
    losses = []
    for _, batch in zip(range(count), data, strict=False):
        losses.append(job.step(batch).item())
        job.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(
    plan: dict[str, Any], folder: str, build: Any = Tied, wait: bool = True
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Two steps, saved; the state then; two more: their losses, the state after them."""
    job, optimizer, data = start(plan, build)
    steps(job, optimizer, data, 2)
    job.save(folder, optimizer, step=2, data=data, extra={"note": "odd"}, wait=wait)
    before = state(job, optimizer)
    data.start = data.batches_taken
    losses = steps(job, optimizer, data, 2)
    job.saved()
    return before, losses, state(job, optimizer)


def load(
    plan: dict[str, Any], folder: str, build: Any = Tied
) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """Loaded, and two steps more: as ``save``."""
    job, optimizer, data = start(plan, build)
    loaded = job.load(folder, optimizer, data=data)
    assert loaded.step == 2 and loaded.extra == {"note": "odd"}
    before = state(job, optimizer)
    return before, steps(job, optimizer, data, 2), state(job, optimizer)
