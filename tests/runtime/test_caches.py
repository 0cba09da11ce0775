"""Generation with a cache of keys and values that the caller passes: on every rank it holds afterwards what it holds on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.workers.pool import LocalWorkers

WIDTH, HEADS, LENGTH, VOCABULARY = 8, 2, 7, 11
PLANS: dict[str, dict[str, Any]] = {
    "pp=2": {"mesh": "pp=2"},
    "interleaved": {"mesh": "pp=2", "schedule": "interleaved", "microbatches": 2},
    "pp=2,tp=2": {"mesh": "pp=2,tp=2"},
    "branches": {"mesh": "tp=2", "modules": {"blocks.0": {"on": "tp[0]"}, "blocks.1": {"on": "tp[1]"}}},
    "tp=2": {"mesh": "tp=2"},
    "dp_shard=2": {"mesh": "dp_shard=2"},
}


class Block(nn.Module):
    """Attention over the tokens so far, whose keys and values ``store(cache, position, key, value)`` keeps and returns."""

    def __init__(self, store: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.store, self.norm = store, nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Any, position: int) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = self.store(cache, position, k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Its blocks run one after the other; or, for branches, beside each other."""

    def __init__(self, store: Callable[..., tuple[Tensor, Tensor]], *, beside: bool = False) -> None:
        super().__init__()
        self.beside, self.embedding = beside, nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(store) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, caches: Any = None, position: int = 0) -> Tensor:
        x = self.embedding(ids)
        caches = [[] for _ in self.blocks] if caches is None else caches
        if self.beside:
            x = self.blocks[0](x, caches[0], position) + self.blocks[1](x, caches[1], position)
            blocks, caches = self.blocks[2:], caches[2:]
        else:
            blocks = self.blocks
        for block, cache in zip(blocks, caches, strict=False):
            x = block(x, cache, position)
        return self.head(x)


def written(cache: list[Tensor], position: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keeps keys and values in memory of the caller."""
    if not cache:
        return k, v
    stop = position + k.shape[2]
    cache[0][:, :, position:stop], cache[1][:, :, position:stop] = k, v
    return cache[0][:, :, :stop], cache[1][:, :, :stop]


def memory(rows: int) -> list[list[Tensor]]:
    size = rows, HEADS, LENGTH, WIDTH // HEADS
    return [[torch.zeros(size, dtype=torch.float64) for _ in range(2)] for _ in range(4)]


def generated(run: Callable[..., Any], rows: slice, caches: Any) -> list[Any]:
    """Feeds two tokens, then one at a time. Returns the logits of each call, and each tensor of the caches after it."""
    ids = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))[rows]
    seen, position = [], 0
    for count in (2, 1, 1, 1):
        with torch.no_grad():
            logits = run(ids[:, position : position + count], caches=caches, position=position)
        position += count
        tensors = [t for cache in caches for t in (cache if isinstance(cache, list) else vars(cache).values())]
        seen.append((logits, [t.clone() for t in tensors if isinstance(t, Tensor)]))
    return seen


def on_a_mesh(plan: dict[str, Any], store: Any, make: Any) -> list[Any]:
    build = lambda: Decoder(store, beside="modules" in plan)  # noqa: E731
    sample = torch.zeros((4, LENGTH), dtype=torch.long)
    job = mw.parallelize(build, plan, batch=(sample,), loss=Tensor.mean, dtype=torch.float64)
    rows = slice(job.recipe.mesh.data_index(job.rank) * 2, None) if job.recipe.mesh.data_size > 1 else slice(None)
    rows = slice(rows.start, rows.start + 2) if job.recipe.mesh.data_size > 1 else rows
    seen = generated(job, rows, make(2 if job.recipe.mesh.data_size > 1 else 4))
    job.step((sample,))
    return [rows, seen]


def assert_as_on_one_device(plan: dict[str, Any], store: Any, make: Any, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    model = Decoder(store, beside="modules" in plan).double()
    wanted = generated(model, slice(None), make(4))
    ranks = mw.Plan.parse(plan).mesh.size
    for rows, seen in workers.run(on_a_mesh, plan, store, make, ranks=ranks, timeout=120):
        for (logits, caches), (wanted_logits, wanted_caches) in zip(seen, wanted, strict=True):
            if logits is not None:
                torch.testing.assert_close(logits, wanted_logits[rows])
            torch.testing.assert_close(caches, [t[rows] for t in wanted_caches])


@pytest.mark.parametrize(
    "plan",
    [pytest.param(name, marks=[] if name in ("pp=2", "branches") else [pytest.mark.proof], id=name) for name in PLANS],
)
def test_memory_that_each_stage_or_branch_writes_is_written_on_all_ranks(plan: str, workers: LocalWorkers) -> None:
    assert_as_on_one_device(PLANS[plan], written, memory, workers)


class Cache:
    """An object of the caller's own."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.seen = 0


def replaced(cache: list[Tensor], position: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if cache:
        k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
    cache[:] = [k, v]
    return k, v


def appended(cache: list[Tensor], position: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    cache += [k, v]
    return torch.cat(cache[::2], 2), torch.cat(cache[1::2], 2)


def in_an_object(cache: Any, position: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(cache, list):  # a forward without caches
        return k, v
    if cache.keys is not None:
        k, v = torch.cat([cache.keys, k], 2), torch.cat([cache.values, v], 2)
    cache.keys, cache.values, cache.seen = k, v, cache.seen + k.shape[2]
    return k, v


def lists(rows: int) -> list[list[Tensor]]:
    return [[] for _ in range(4)]


def objects(rows: int) -> list[Cache]:
    return [Cache() for _ in range(4)]


OFTEN = {("pp=2", "replaced"), ("branches", "in an object"), ("pp=2,tp=2", "in an object")}


@pytest.mark.parametrize(
    ("plan", "way"),
    [
        pytest.param(plan, way, marks=[] if (plan, way) in OFTEN else [pytest.mark.proof], id=f"{plan}-{way}")
        for plan in PLANS
        for way in ("replaced", "appended", "in an object")
    ],
)
def test_caches_that_grow_hold_the_same_on_all_ranks(plan: str, way: str, workers: LocalWorkers) -> None:
    store, make = {
        "replaced": (replaced, lists),
        "appended": (appended, lists),
        "in an object": (in_an_object, objects),
    }[way]
    assert_as_on_one_device(PLANS[plan], store, make, workers)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    return LlamaForCausalLM(config)


def continued(run: Callable[..., Any], config: Any, kind: str) -> tuple[list[Any], list[Tensor], int]:
    """Feeds three tokens, then one at a time. Returns the logits, and what transformers' own cache then holds."""
    from transformers import DynamicCache, StaticCache

    cache = DynamicCache() if kind == "dynamic" else StaticCache(config=config, max_cache_len=8)
    ids, position, seen = torch.arange(16).view(2, 8), 0, []
    for count in (3, 1, 1):
        with torch.no_grad():
            output = run(input_ids=ids[:, position : position + count], past_key_values=cache, use_cache=True)
        position += count
        seen.append(None if output is None else output.logits)
    return seen, [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)], int(cache.get_seq_length())


def llama_on_stages(kind: str) -> Any:
    ids = torch.arange(16).view(2, 8)
    job = mw.parallelize(llama, {"mesh": "pp=2"}, batch={"input_ids": ids, "labels": ids}, dtype=torch.float64)
    job.module.eval()
    return continued(job, job.module.config, kind)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_of_transformers_over_stages(kind: str, workers: LocalWorkers) -> None:
    torch.manual_seed(0)
    model = llama().double().eval()
    wanted, wanted_cache, length = continued(model, model.config, kind)
    for seen, cache, count in workers.run(llama_on_stages, kind, ranks=2, timeout=200):
        assert count == length == 5
        torch.testing.assert_close(cache, wanted_cache)
        for logits, expected in zip(seen, wanted, strict=True):
            assert logits is None or torch.equal(logits, expected)


class Remembers(Decoder):
    """Changes something of the caller's that other stages cannot change alike."""

    def forward(self, ids: Tensor, recent: Any = None) -> Tensor:  # type: ignore[override]
        logits = super().forward(ids)
        if recent is not None:
            recent.popleft()
            recent.append(logits)
        return logits


def remembering() -> str:
    sample = torch.zeros((4, LENGTH), dtype=torch.long)
    job = mw.parallelize(lambda: Remembers(written), {"mesh": "pp=2"}, batch=(sample,), loss=Tensor.mean)
    try:
        job(sample, recent=deque([torch.zeros(4)]))
    except mw.PlanError as error:
        job.step((sample,))  # nothing is lost
        return str(error)
    return "no error"


def test_what_other_ranks_cannot_change_alike_is_refused(workers: LocalWorkers) -> None:
    for error in workers.run(remembering, ranks=2, timeout=120):
        assert "in a way that cannot be repeated on other ranks" in error
