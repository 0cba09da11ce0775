"""Branches beside each other: against tensor and data parallelism of the same ranks, and one process.

    python bench/concurrent_branches.py [--quick] [--keep]

Local processes, gloo on CPU, one thread each; a step is forward and backward, without an optimizer. All ways of a model
alternate within each round, in the same processes: for those of one process, rank 0 runs and the others wait. A round counts
the slowest rank's seconds; medians are over rounds, ratios are of pairs within a round. Calls and bytes are what a rank
puts in, by the job's ledger. Where ranks wait for a core, times vary: the quartiles say how much. CPU time, of the rank that
took most in a round, all its threads together, does not count such waits, nor those for another rank: it is the least that a
step could take with a core for each rank.

1  balanced   two deep branches, batch 1: beside each other, by tensor, one process with two threads
2  sweep      batches and imbalances: is what ``mw.compare_branches`` says the fastest?
3  bytes      of parameters that a rank gathers and reduces, against FSDP of the whole: exact
4  tracks     two tracks that exchange after each block, as in the Evoformer: efficiency per device at degree 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median, quantiles
from typing import Any

import raw
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.cli.calibrate import measured_profile
from meshwright.hardware import Profile
from meshwright.prediction.branches.ways import BEST, DATA, ONE, PLANNED, TENSOR

WIDTH, HEAD = 256, 16
SMALL, LARGE = (16, 32, 64, 32), (32, 64, 64, 32)  # sequences, their length, widths of both tracks
WALL, BUSY = 0, 1
CLOCKS = {WALL: "time", BUSY: "CPU time"}
WITH, WITHOUT = "with what a job adds", "without (what a layout is worth by itself)"
SIDES: dict[str, Any] = {DATA: {"mesh": {"dp_replicate": 2}}, TENSOR: {"mesh": {"tp": 2}}}
BESIDE = {"mesh": {"tp": 2}, "modules": {"block_a": {"on": "tp[0]"}, "block_b": {"on": "tp[1]"}}}
TRACKS = {
    "mesh": {"tp": 2},
    "modules": {"sequences.*": {"on": "tp[0]"}, "outer.*": {"on": "tp[0]"}, "pairs.*": {"on": "tp[1]"}},
}


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Two(nn.Module):
    """Two branches of so many blocks each, of one input; their sum."""

    def __init__(self, first: int, second: int, *, stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH) if stem else nn.Identity()
        self.block_a, self.block_b = (nn.Sequential(*(MLP(2 * WIDTH) for _ in range(n))) for n in (first, second))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        return {"loss": (self.block_a(x) + self.block_b(x)).square().mean()}


class Attention(nn.Module):
    """Gated attention over the last dim but one of ``x``, with a bias of pairs where there is one."""

    def __init__(self, dim: int, heads: int, pair: int = 0) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.gate, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.bias = nn.Sequential(nn.LayerNorm(pair), nn.Linear(pair, heads, bias=False)) if pair else None

    def forward(self, x: Tensor, pair: Tensor | None = None) -> Tensor:
        n = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.qkv(n).chunk(3, -1))
        bias = None if self.bias is None else self.bias(pair).movedim(-1, -3).unsqueeze(-4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(-3, -2).flatten(-2)
        return self.out(self.gate(n).sigmoid() * mixed)


class Transition(nn.Sequential):
    def __init__(self, dim: int) -> None:
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))


class Triangle(nn.Module):
    """Triangle multiplication, along outgoing or incoming edges."""

    def __init__(self, dim: int, sums: str) -> None:
        super().__init__()
        self.sums, self.norm, self.after = sums, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.sides, self.gates = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.gate, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, z: Tensor) -> Tensor:
        n = self.norm(z)
        a, b = (self.sides(n) * self.gates(n).sigmoid()).chunk(2, -1)
        return self.gate(n).sigmoid() * self.out(self.after(torch.einsum(self.sums, a, b)))


class Sequences(nn.Module):
    """The first track of an Evoformer block: attention along rows and columns of the alignment, a transition."""

    def __init__(self, dim: int, pair: int) -> None:
        super().__init__()
        self.rows, self.columns = Attention(dim, dim // HEAD, pair), Attention(dim, dim // HEAD)
        self.transition = Transition(dim)

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        m = m + self.rows(m, z)
        m = m + self.columns(m.transpose(-3, -2)).transpose(-3, -2)
        return m + self.transition(m)


class Outer(nn.Module):
    """Outer product mean: what the pairs get of the sequences."""

    def __init__(self, dim: int, pair: int, hidden: int = 16) -> None:
        super().__init__()
        self.norm, self.sides, self.out = nn.LayerNorm(dim), nn.Linear(dim, 2 * hidden), nn.Linear(hidden**2, pair)

    def forward(self, m: Tensor) -> Tensor:
        a, b = self.sides(self.norm(m)).chunk(2, -1)
        return self.out(torch.einsum("bsic,bsjd->bijcd", a, b).flatten(-2) / m.shape[1])


class Pairs(nn.Module):
    """The second track: triangle multiplications and attentions, a transition."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.outgoing, self.incoming = Triangle(dim, "bikc,bjkc->bijc"), Triangle(dim, "bkic,bkjc->bijc")
        self.starting, self.ending = Attention(dim, dim // HEAD), Attention(dim, dim // HEAD)
        self.transition = Transition(dim)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.outgoing(z)
        z = z + self.incoming(z)
        z = z + self.starting(z)
        z = z + self.ending(z.transpose(-3, -2)).transpose(-3, -2)
        return z + self.transition(z)


class Tracks(nn.Module):
    """A stack of Evoformer blocks, with the outer product mean at the end of a block, so that both tracks of it run at the
    same time (HelixFold, arXiv 2207.05477 and 2211.00235; without dropout and extra sequences)."""

    def __init__(self, depth: int, dim: int, pair: int) -> None:
        super().__init__()
        self.sequences = nn.ModuleList(Sequences(dim, pair) for _ in range(depth))
        self.outer = nn.ModuleList(Outer(dim, pair) for _ in range(depth))
        self.pairs = nn.ModuleList(Pairs(pair) for _ in range(depth))

    def forward(self, m: Tensor, z: Tensor) -> dict[str, Tensor]:
        for sequences, outer, pairs in zip(self.sequences, self.outer, self.pairs, strict=True):
            m = sequences(m, z)
            z = pairs(z) + outer(m)
        return {"loss": m.square().mean() + z.square().mean()}


# --- measuring --------------------------------------------------------------------------------------------------------

Step = Callable[[], Any]


def job_step(build: Any, plan: Any, batch: dict[str, Tensor]) -> tuple[Step, Any]:
    job = mw.parallelize(build, {**plan, "rows": "split"}, batch=batch)
    mesh = job.recipe.mesh
    mine = {k: t.chunk(mesh.data_size)[mesh.data_index(job.rank)] for k, t in batch.items()}
    parameters = list(job.parameters())

    def step() -> None:
        job.step(mine)
        for p in parameters:
            p.grad = None

    return step, job


def plain_step(build: Any, batch: dict[str, Tensor], threads: int) -> Step:
    """A step in one process: rank 0 does it."""
    torch.manual_seed(0)
    model = build() if dist.get_rank() == 0 else None

    def step() -> None:
        if model is None:
            return
        torch.set_num_threads(threads)
        model(**batch)["loss"].backward()
        model.zero_grad()
        torch.set_num_threads(1)

    return step


Times = dict[str, list[tuple[float, ...]]]
"""Of each side, for each round: seconds of the slowest rank, and CPU seconds of the one that took most."""


def alternate(sides: dict[str, Step], rounds: int) -> Times:
    """The first round warms up."""
    found: Times = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            dist.barrier()
            started, busy = time.perf_counter(), time.process_time()
            side()
            seconds = torch.tensor([time.perf_counter() - started, time.process_time() - busy])
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found[name].append(tuple(seconds.tolist()))
    return {name: times[1:] for name, times in found.items()}


def counted(job: Any, step: Step) -> tuple[int, int]:
    """Calls and bytes of a step on this rank, by the job's ledger."""
    calls, size = sum(job.ledger.calls.values()), sum(job.ledger.bytes.values())
    step()
    return sum(job.ledger.calls.values()) - calls, sum(job.ledger.bytes.values()) - size


def measure(
    build: Any, plans: dict[str, Any], threads: tuple[int, ...], batch: dict[str, Tensor], rounds: int
) -> tuple[Times, dict[str, tuple[int, int]]]:
    """Runs on every rank: each plan's job, and one process with each number of threads."""
    sides: dict[str, Step] = {_process(n): plain_step(build, batch, n) for n in threads}
    moved = {}
    for name, plan in plans.items():
        sides[name], job = job_step(build, plan, batch)
        sides[name]()
        moved[name] = counted(job, sides[name])
    return alternate(sides, rounds), moved


def _process(threads: int) -> str:
    return f"one process, {threads} thread{'s' * (threads != 1)}"


class Gathered(TorchDispatchMode):
    """Bytes that FSDP's collectives give whole (all-gathers) and take whole (reduce-scatters)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        whole = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}.get(name)
        if whole is not None:
            self.bytes += args[whole].numel() * args[whole].element_size()
        return func(*args, **(kwargs or {}))


def gathered(plan: Any, batch: dict[str, Tensor], depth: int) -> int:
    """Runs on every rank: bytes of parameters and gradients in the collectives of a step."""
    step, _job = job_step(partial(Two, depth, depth, stem=False), plan, batch)
    step()
    with Gathered() as found:
        step()
    return found.bytes


def added(rounds: int) -> tuple[float, float]:
    """Runs on every rank: CPU seconds that a job adds to an operation of the forward, and to a step: of branches of one
    token, more and less deep."""
    found = []
    for depth in (4, 16):
        build, batch = partial(Two, depth, depth), sample(1, 1)
        sides = {"plain": plain_step(build, batch, 1), "job": job_step(build, BESIDE, batch)[0]}
        times = alternate(sides, rounds)
        operations = 5 * depth + 4  # of one branch, and of the trunk: stem, sum, square, mean
        own = of(times, "plain", BUSY) * operations / (10 * depth + 4)
        found.append((operations, of(times, "job", BUSY) - own))
    (few, less), (many, more) = found
    view = (more - less) / (many - few)
    return view, less - view * few


# --- the parts, each gives its samples ------------------------------------------------------------------------------


def sample(rows: int, tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(1))}


def balanced(workers: Any, hardware: Profile, depth: int, tokens: int, rounds: int) -> dict[str, Any]:
    build, batch = partial(Two, depth, depth), sample(1, tokens)
    plans = {PLANNED: BESIDE, TENSOR: SIDES[TENSOR]}
    times, moved = workers.run(measure, build, plans, (1, 2), batch, rounds, ranks=2, timeout=900)[0]
    print(
        f"balanced, {tokens} tokens: {mw.compare_branches(build, batch, BESIDE, hardware=hardware).verdict}", flush=True
    )
    return {"depth": depth, "tokens": tokens, "times": times, "moved": moved}


def sweep(
    workers: Any, hardware: Profile, batches: tuple[int, ...], depths: Any, tokens: int, rounds: int
) -> list[dict[str, Any]]:
    bare = replace(hardware, job_call=0.0, job_step=0.0)
    samples = []
    for rows, (first, second) in product(batches, depths):
        build, batch = partial(Two, first, second), sample(rows, tokens)
        plans = {name: SIDES[name] for name in (DATA, TENSOR) if rows > 1 or name != DATA} | {PLANNED: BESIDE}
        times, _ = workers.run(measure, build, plans, (1,), batch, rounds, ranks=2, timeout=900)[0]
        times[ONE] = times.pop(_process(1))
        predicted = {}
        for name, profile in ((WITHOUT, bare), (WITH, hardware)):
            compared = mw.compare_branches(build, batch, BESIDE, hardware=profile)
            fastest = PLANNED if compared.fastest == BEST else compared.fastest
            predicted[name] = {"fastest": fastest, "seconds": dict(compared.seconds)}
        samples.append({"rows": rows, "blocks": [first, second], "times": times, "predicted": predicted})
        print(f"sweep, {rows} rows, {first}:{second} blocks: done", flush=True)
    return samples


def parameter_bytes(workers: Any, depth: int) -> dict[str, int]:
    batch = sample(4, 8)
    once = {"reshard_after_forward": False}  # gathered once a step, on both sides
    branches, fsdp = {**BESIDE, "mesh": {"dp_shard": 2, "tp": 2}, **once}, {"mesh": {"dp_shard": 4}, **once}
    counts = [max(workers.run(gathered, plan, batch, depth, ranks=4, timeout=300)) for plan in (branches, fsdp)]
    compared = mw.compare_branches(partial(Two, depth, depth, stem=False), batch, branches)
    predicted = compared.regions[0].parameter_bytes
    return {
        "depth": depth, "branches": counts[0], "fsdp": counts[1],
        "branches_predicted": predicted[0], "fsdp_predicted": predicted[1],
    }  # fmt: skip


def tracks(
    workers: Any, hardware: Profile, depth: int, sizes: tuple[int, int, int, int], rounds: int
) -> dict[str, Any]:
    deep, residues, dim, pair = sizes
    build, draw = partial(Tracks, depth, dim, pair), torch.Generator().manual_seed(1)
    batch = {
        "m": torch.randn(1, deep, residues, dim, generator=draw),
        "z": torch.randn(1, residues, residues, pair, generator=draw),
    }
    plans = {PLANNED: TRACKS, TENSOR: SIDES[TENSOR]}
    times, moved = workers.run(measure, build, plans, (1, 2), batch, rounds, ranks=2, timeout=900)[0]
    verdict = mw.compare_branches(build, batch, TRACKS, hardware=hardware).verdict
    print(f"tracks, {deep} sequences of {residues}: {verdict}", flush=True)
    return {"depth": depth, "sizes": list(sizes), "times": times, "moved": moved}


# --- tables -----------------------------------------------------------------------------------------------------------


def of(times: Times, name: str, clock: int) -> float:
    return median(seconds[clock] for seconds in times[name])


def _quartiles(ratios: list[float]) -> str:
    low, _, high = quantiles(ratios, n=4)
    return f"{low:.2f} to {high:.2f}"


def _ratio(a: list[Any], b: list[Any], clock: int) -> str:
    """Of medians, with the quartiles of the ratios of pairs."""
    of_medians = median(x[clock] for x in a) / median(y[clock] for y in b)
    return f"{of_medians:.2f} ({_quartiles([x[clock] / y[clock] for x, y in zip(a, b, strict=True)])})"


def tables(samples: dict[str, Any]) -> dict[str, raw.Table]:
    """By name: ``rates`` of this machine, and a table or two for each part of this benchmark."""
    return {
        "balanced": _balanced_table(samples["balanced"]),
        "sweep": _sweep_table(samples["sweep"]),
        "scores": _scores_table(samples["sweep"]),
        "bytes": _bytes_table(samples["bytes"]),
        "tracks": _tracks_table(samples["tracks"]),
        "rates": _rates_table(samples["rates"]),
    }


def _balanced_table(samples: list[dict[str, Any]]) -> raw.Table:
    rows = [["tokens", "", "ms", "CPU ms", "of the branches' ms", "of their CPU ms", "calls", "KiB a rank"]]
    for one in samples:
        times = one["times"]
        for name in times:
            calls, size = one["moved"].get(name, (0, 0))
            rows.append([
                f"{one['tokens']}", name, f"{1e3 * of(times, name, WALL):.1f}", f"{1e3 * of(times, name, BUSY):.1f}",
                *(_ratio(times[name], times[PLANNED], clock) for clock in CLOCKS), f"{calls}", f"{size / 1024:.0f}",
            ])  # fmt: skip
    return rows


def _sweep_table(samples: list[dict[str, Any]]) -> raw.Table:
    """A cell: milliseconds that were measured and, after the arrow, predicted with what a job adds."""
    names = (ONE, DATA, TENSOR, PLANNED)
    rows = [["rows", "blocks", *(f"{name}: measured, predicted ms" for name in names), "said", "fastest"]]
    for one in samples:
        times, predicted = one["times"], one["predicted"][WITH]
        cells = [
            f"{1e3 * of(times, name, WALL):.1f}, {1e3 * predicted['seconds'][name]:.1f}" if name in times else "–"
            for name in names
        ]
        first, second = one["blocks"]
        rows.append([f"{one['rows']}", f"{first}:{second}", *cells, predicted["fastest"], _fastest(times, WALL)])
    return rows


def _scores_table(samples: list[dict[str, Any]]) -> raw.Table:
    """How often ``compare_branches`` names the fastest way, and one within 10 % of it."""
    rows = [["", *(text for clock in CLOCKS.values() for text in (f"fastest, by {clock}", "within 10 % of it"))]]
    for side in (WITH, WITHOUT):
        cells = []
        for clock in CLOCKS:
            said = [(one["times"], one["predicted"][side]["fastest"]) for one in samples]
            right = sum(name == _fastest(times, clock) for times, name in said)
            near = sum(
                name in times and of(times, name, clock) <= 1.1 * of(times, _fastest(times, clock), clock)
                for times, name in said
            )
            cells += [f"{right} of {len(said)}", f"{near} of {len(said)}"]
        rows.append([side, *cells])
    return rows


def _fastest(times: Times, clock: int) -> str:
    return min(times, key=lambda name: of(times, name, clock))


def _bytes_table(sample: dict[str, int]) -> raw.Table:
    rows = [["", "bytes, counted", "by `compare_branches`"]]
    rows.append(["`dp_shard=2` × branches 1+1", f"{sample['branches']:,}", f"{sample['branches_predicted']:,}"])
    rows.append(["FSDP of the model, `dp_shard=4`", f"{sample['fsdp']:,}", f"{sample['fsdp_predicted']:,}"])
    return rows


def _tracks_table(samples: list[dict[str, Any]]) -> raw.Table:
    """t₁ of one process with one thread, t₂ of the branches; the efficiency is t₁ / (2 · t₂)."""
    rows = [["", "t₁", "t₂, branches 1+1", "`tp=2`", "calls of branches, of tp",
             "efficiency (quartiles of pairs)", "by CPU time"]]  # fmt: skip
    for one in samples:
        times, (deep, residues, *_), alone = one["times"], one["sizes"], _process(1)
        efficiencies = []
        for clock in CLOCKS:
            ratios = [a[clock] / (2 * b[clock]) for a, b in zip(times[alone], times[PLANNED], strict=True)]
            efficiencies.append(
                f"{of(times, alone, clock) / (2 * of(times, PLANNED, clock)):.2f} ({_quartiles(ratios)})"
            )
        milliseconds = [f"{1e3 * of(times, name, WALL):.1f} ms" for name in (alone, PLANNED, TENSOR)]
        calls = f"{one['moved'][PLANNED][0]}, {one['moved'][TENSOR][0]}"
        rows.append([f"{deep} sequences of {residues}", *milliseconds, calls, *efficiencies])
    return rows


def _rates_table(rates: dict[str, float]) -> raw.Table:
    """What was measured first of this machine, a core, and what a job adds (CPU time, branches of one token)."""
    titles = [
        "Gflop/s",
        "GB/s",
        "GB/s of links",
        "µs a small all-reduce",
        "µs a function",
        "µs a job adds to one",
        "ms to a step",
    ]
    row = [
        f"{rates['flops'] / 1e9:.0f}", f"{rates['bandwidth'] / 1e9:.1f}", f"{rates['link'] / 1e9:.2f}",
        f"{2e6 * rates['latency']:.0f}", f"{1e6 * rates['function']:.1f}",
        f"{1e6 * rates['job_call']:.0f}", f"{1e3 * rates['job_step']:.1f}",
    ]  # fmt: skip
    return [titles, row]


def measured_samples(quick: bool) -> dict[str, Any]:
    rounds, depth = (4, 4) if quick else (10, 8)
    profile = measured_profile(1, print)
    with mw.local_workers(4) as workers:
        call, step = workers.run(added, 2 * rounds, ranks=2, timeout=300)[0]
        hardware = replace(profile, job_call=max(0.0, call), job_step=max(0.0, step))
        rates = {
            "flops": profile.peak["float32"], "bandwidth": profile.bandwidth, "link": profile.node.bandwidth,
            "latency": profile.node.latency, "function": profile.host, "job_call": call, "job_step": step,
        }  # fmt: skip
        depths = ((2, 2), (1, 4)) if quick else ((2, 2), (1, 2), (1, 4))
        sizes = ((2, SMALL),) if quick else ((4, SMALL), (4, LARGE))
        return {
            "rates": rates,
            "balanced": [
                balanced(workers, hardware, depth, tokens, rounds) for tokens in ((128,) if quick else (128, 1024))
            ],
            "sweep": sweep(workers, hardware, (1, 16) if quick else (1, 4, 16), depths, 32, rounds),
            "bytes": parameter_bytes(workers, 2),
            "tracks": [tracks(workers, hardware, blocks, size, rounds) for blocks, size in sizes],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: about a minute")
    parser.add_argument("--keep", action="store_true", help="write docs/bench/concurrent_branches.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = measured_samples(options.quick)
    for name, table in tables(samples).items():
        print(f"\n{name}")
        raw.show(table)
    if options.keep:
        print(raw.keep("concurrent_branches", samples))


if __name__ == "__main__":
    main()
