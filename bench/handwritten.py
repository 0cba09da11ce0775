"""A step over tp against handwritten local code: plain modules of a rank's own sizes, with explicit all-reduces.

    python bench/handwritten.py [--blocks 24] [--width 64] [--rows 4] [--tokens 16] [--rounds 40] [--alone] [--compile]

The judge of what generality costs. The same decoder runs three ways in the same processes, in turns: by ``mw.parallelize``
with recorded programs, by ``mw.parallelize`` with ``eager: true``, and by hand as Megatron-LM does it (arXiv 1909.08053,
section 3: f and g around column and row cuts, the vocabulary cut in embedding, head and loss). A step is forward and
backward. Told are ratios of medians, of CPU time and of wall time, and of the fastest tenth of CPU times; calls and bytes
of collectives stand beside them.

``--alone``: one process in a world without other ranks (torch's backend ``fake``): what is left is the host's own work.
Its values are no results.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import raw
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

HEADS, VOCAB = 4, 128


class Block(nn.Module):
    """A block of a decoder, on one device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(rows, tokens, HEADS, width // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# --- by hand ----------------------------------------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """Megatron's f: nothing; backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class Sum(torch.autograd.Function):
    """Megatron's g: all-reduce; backward: nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class LocalBlock(nn.Module):
    """The block of one of ``ranks`` ranks."""

    def __init__(self, width: int, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width // ranks) for _ in range(3))
        self.o, self.up, self.down = nn.Linear(width // ranks, width), nn.Linear(width, 4 * width // ranks), nn.Linear(
            4 * width // ranks, width
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        h = Enter.apply(self.norm1(x))
        heads = rows, tokens, HEADS // self.ranks, width // HEADS
        q, k, v = (f(h).view(heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, tokens, -1)
        x = x + (Sum.apply(F.linear(a, self.o.weight)) + self.o.bias)
        h = F.gelu(self.up(Enter.apply(self.norm2(x))))
        return x + (Sum.apply(F.linear(h, self.down.weight)) + self.down.bias)


class CutLoss(torch.autograd.Function):
    """The mean cross entropy of logits of which each rank has the columns ``first`` to ``last``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, last: int) -> Tensor:
        largest = logits.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[:, None]
        exponentials, elsewhere = logits.exp(), (labels < first) | (labels >= last)
        at = (labels - first).masked_fill(elsewhere, 0)
        mine = logits.gather(1, at[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        sums = torch.stack([exponentials.sum(-1), mine])
        dist.all_reduce(sums)
        ctx.save_for_backward(exponentials / sums[0][:, None], at, elsewhere)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, at, elsewhere = ctx.saved_tensors
        rows = len(probabilities)
        d = probabilities.clone()
        d[torch.arange(rows), at] -= (~elsewhere).to(d.dtype)
        return d * (g / rows), None, None, None


class LocalDecoder(nn.Module):
    """The decoder of one rank."""

    def __init__(self, blocks: int, width: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.first, self.last = VOCAB // ranks * rank, VOCAB // ranks * (rank + 1)
        self.embed = nn.Embedding(VOCAB // ranks, width)
        self.blocks = nn.ModuleList(LocalBlock(width, ranks) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB // ranks, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        elsewhere = (ids < self.first) | (ids >= self.last)
        x = self.embed((ids - self.first).masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0.0)
        x = Sum.apply(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(Enter.apply(self.norm(x))).flatten(0, 1)
        return CutLoss.apply(logits, labels.flatten(), self.first, self.last)


def filled(local: LocalDecoder, job: Any) -> None:
    """Gives the handwritten rank the values of the job's rank."""
    named = dict(job.named_parameters())
    with torch.no_grad():
        for name, p in local.named_parameters():
            p.copy_(named[name].to_local())


# --- measuring --------------------------------------------------------------------------------------------------------

_SIDES: dict[str, dict[str, bool]] = {"recorded": {}, "eager": {"eager": True}, "compiled": {"compile": True}}
Times = dict[str, tuple[list[float], list[float]]]


def measured(given: argparse.Namespace) -> tuple[Times, dict[str, float], str]:
    """Runs on every rank: (CPU and wall seconds of each step, the first losses, collectives of a replayed step)."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (given.rows, given.tokens), generator=draw)
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    jobs = {
        name: mw.parallelize(
            lambda: Decoder(given.blocks, given.width),
            {"mesh": {"tp": 2}, "modules": {"embed": {"tp": "row"}}, "verify": 0, **options},
            batch=batch,
        )
        for name, options in _SIDES.items()
        if name != "compiled" or given.compile
    }
    local = LocalDecoder(given.blocks, given.width, dist.get_rank(), 2)
    filled(local, jobs["eager"])

    def by_hand() -> Tensor:
        loss = local(**batch)
        loss.backward()
        return loss.detach()

    sides: dict[str, Callable[[], Tensor]] = {
        "by hand": by_hand,
        **{name: lambda job=job: job.step(batch) for name, job in jobs.items()},
    }
    models = [local, *(job.module for job in jobs.values())]
    losses = {name: float(side()) for name, side in sides.items()}
    for side in sides.values():  # recorded twice, then replayed
        for _ in range(4):
            side()
    ledger = jobs["recorded"].ledger
    before = dict(ledger.calls), dict(ledger.bytes)
    sides["recorded"]()
    moved = ", ".join(
        f"{kind} {n - before[0].get(kind, 0)}× {(ledger.bytes[kind] - before[1].get(kind, 0)) / 1024:.0f} KiB"
        for kind, n in sorted(ledger.calls.items())
    )
    times: Times = {name: ([], []) for name in sides}
    for _ in range(given.rounds):
        for name, side in sides.items():
            for model in models:
                model.zero_grad()
            if not given.alone:
                dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            side()
            times[name][0].append(time.process_time() - cpu)
            times[name][1].append(time.perf_counter() - wall)
    return times, losses, moved


def told(times: Times, losses: dict[str, float], moved: str) -> None:
    hand = times["by hand"]
    print(f"{'':10}{'CPU ms':>9}{'wall ms':>9}{'CPU':>7}{'fast CPU':>10}{'wall':>7}   first loss")
    for name, (cpu, wall) in times.items():
        ratios = [median(cpu) / median(hand[0]), _fast(cpu) / _fast(hand[0]), median(wall) / median(hand[1])]
        print(
            f"{name:10}{1e3 * median(cpu):9.2f}{1e3 * median(wall):9.2f}{ratios[0]:7.2f}{ratios[1]:10.2f}{ratios[2]:7.2f}"
            f"   {losses[name]:.6f}"
        )
    print(f"collectives of a recorded step: {moved}\n")


def tables(samples: list[dict[str, Any]]) -> dict[str, raw.Table]:
    """``steps``: milliseconds of each side, and its ratios to code by hand, on each rank."""
    rows = [["rank", "", "CPU ms", "wall ms", "ratio of CPU", "of the fastest tenth", "of wall time"]]
    for rank, one in enumerate(samples):
        hand = one["times"]["by hand"]
        for name, (cpu, wall) in one["times"].items():
            ratios = [median(cpu) / median(hand[0]), _fast(cpu) / _fast(hand[0]), median(wall) / median(hand[1])]
            times = [f"{1e3 * median(seconds):.1f}" for seconds in (cpu, wall)]
            rows.append([str(rank), name, *times, *(f"{ratio:.2f}" for ratio in ratios)])
    return {"steps": rows}


def _kept(name: str, found: list[tuple[Times, dict[str, float], str]]) -> None:
    samples = [{"times": times, "losses": losses, "collectives": moved} for times, losses, moved in found]
    print(raw.keep(name, samples, script="handwritten"))


def _fast(seconds: list[float]) -> float:
    """The tenth of the steps that took least: what others on the machine have taken least part in."""
    return sorted(seconds)[len(seconds) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("blocks", 24), ("width", 64), ("rows", 4), ("tokens", 16), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true", help="with compile: true as well")
    parser.add_argument("--keep", action="store_true", help="write the samples to docs/bench")
    parser.add_argument("--alone", action="store_true", help="one process, without other ranks")
    options = parser.parse_args()
    sizes = f"{options.blocks} blocks of width {options.width}, {options.rows} rows × {options.tokens} tokens"
    print(f"{sizes}, tp=2; {options.rounds} steps")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, 1 thread a process\n")
    if options.alone:
        torch.set_num_threads(1)
        dist.init_process_group("fake", rank=0, world_size=2)
        found = [measured(options)]
        told(*found[0])
        if options.keep:
            _kept("handwritten-alone", found)
        return
    with mw.local_workers(2) as workers:
        found = workers.run(measured, options, timeout=900)
    for rank, of_rank in enumerate(found):
        print(f"rank {rank}")
        told(*of_rank)
    if options.keep:
        _kept("handwritten", found)


if __name__ == "__main__":
    main()
