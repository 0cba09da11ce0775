"""Branches beside each other: against tensor and data parallelism of the same ranks, and one process.

    python bench/branches.py [--quick]

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
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median, quantiles
from typing import Any

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


# --- printing ---------------------------------------------------------------------------------------------------------


def sample(rows: int, tokens: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(1))}


WALL, BUSY = 0, 1


def of(times: Times, name: str, which: int) -> float:
    return median(t[which] for t in times[name])


def ratio(a: list[tuple[float, ...]], b: list[tuple[float, ...]], which: int) -> str:
    pairs = [x[which] / y[which] for x, y in zip(a, b, strict=True)]
    low, _, high = quantiles(pairs, n=4)
    return f"{median(x[which] for x in a) / median(y[which] for y in b):5.2f} (pairs {low:.2f} to {high:.2f})"


def lines(times: Times, moved: dict[str, tuple[int, int]], against: str) -> None:
    print(f"  {'':24} {'ms':>8} {'CPU ms':>8}  calls  KiB a rank   of {against}: ms; CPU ms")
    for name, found in times.items():
        calls, size = moved.get(name, (0, 0))
        ms = f"{1e3 * of(times, name, WALL):8.1f} {1e3 * of(times, name, BUSY):8.1f}"
        print(f"  {name:24} {ms}  {calls:5}  {size / 1024:10.0f}"
              f"   {ratio(found, times[against], WALL)}; {ratio(found, times[against], BUSY)}")  # fmt: skip


def balanced(workers: Any, hardware: Profile, depth: int, tokens: int, rounds: int) -> None:
    build, batch = partial(Two, depth, depth), sample(1, tokens)
    plans = {PLANNED: BESIDE, TENSOR: SIDES[TENSOR]}
    times, moved = workers.run(measure, build, plans, (1, 2), batch, rounds, ranks=2, timeout=900)[0]
    print(f"\n1  balanced: 2 branches of {depth} blocks of width {WIDTH}, 1 row of {tokens} tokens; {rounds} rounds")
    lines(times, moved, PLANNED)
    print(f"  compare_branches: {mw.compare_branches(build, batch, BESIDE, hardware=hardware).verdict}")


def sweep(workers: Any, hardware: Profile, batches: tuple[int, ...], depths: Any, tokens: int, rounds: int) -> None:
    print(
        f"\n2  sweep: rows of {tokens} tokens; a step's ms / CPU ms (predicted, for the region, without and with "
        f"what a job adds); {rounds} rounds"
    )
    print(
        "  rows  blocks "
        + "".join(f"{name:27}" for name in (ONE, DATA, TENSOR, PLANNED))
        + "said; fastest; by CPU time"
    )
    bare = replace(hardware, job_call=0.0, job_step=0.0)
    sides = {"without": bare, "with": hardware}
    scores = {key: [0, 0] for key in product(sides, (WALL, BUSY))}  # right, within 10 %
    for rows in batches:
        for first, second in depths:
            build, batch = partial(Two, first, second), sample(rows, tokens)
            plans = {name: SIDES[name] for name in (DATA, TENSOR) if rows > 1 or name != DATA} | {PLANNED: BESIDE}
            times, _ = workers.run(measure, build, plans, (1,), batch, rounds, ranks=2, timeout=900)[0]
            times[ONE] = times.pop(_process(1))
            found = {h: mw.compare_branches(build, batch, BESIDE, hardware=of) for h, of in sides.items()}
            said = {h: PLANNED if c.fastest == BEST else c.fastest for h, c in found.items()}
            fastest = [min(times, key=lambda name: of(times, name, which)) for which in (WALL, BUSY)]
            for (h, which), score in scores.items():
                score[0] += said[h] == fastest[which]
                score[1] += said[h] in times and of(times, said[h], which) <= 1.1 * of(times, fastest[which], which)
            bare_s, job_s = (found[side].seconds for side in sides)
            cells = "".join(
                f"{1e3 * of(times, name, WALL):6.1f}/{1e3 * of(times, name, BUSY):6.1f} ({1e3 * bare_s[name]:.1f}/"
                f"{1e3 * job_s[name]:.1f})".ljust(14) + " "
                if name in times else f"{'–':>12}{'':15}" for name in (ONE, DATA, TENSOR, PLANNED)
            )  # fmt: skip
            print(f"  {rows:4}  {first}:{second:<4} {cells} {' / '.join(said.values())}; {'; '.join(fastest)}")
    total = len(batches) * len(depths)
    for (h, which), (right, near) in scores.items():
        what = f"{h} what a job adds, by {('time', 'CPU time')[which]}"
        print(
            f"  {what}: what compare_branches said was the fastest in {right} of {total}, within 10 % of it in {near}"
        )


def parameter_bytes(workers: Any, depth: int) -> None:
    batch = sample(4, 8)
    once = {"reshard_after_forward": False}  # gathered once a step, on both sides
    places, whole = {**BESIDE, "mesh": {"dp_shard": 2, "tp": 2}, **once}, {"mesh": {"dp_shard": 4}, **once}
    own, all_ = (max(workers.run(gathered, plan, batch, depth, ranks=4, timeout=300)) for plan in (places, whole))
    said = mw.compare_branches(partial(Two, depth, depth, stem=False), batch, places).regions[0].parameter_bytes
    print(
        f"\n3  bytes: 2 equal branches of {depth} blocks over 4 ranks, all-gathers and reduce-scatters of a step, whole sizes"
    )
    print(f"  dp_shard=2 × branches 1+1: {own}   FSDP of the whole, dp_shard=4: {all_}   {all_ / own:.4f} times fewer")
    print(f"  compare_branches: {said[0]} and {said[1]}")


def tracks(workers: Any, hardware: Profile, depth: int, sizes: tuple[int, int, int, int], rounds: int) -> None:
    deep, residues, dim, pair = sizes
    build, draw = partial(Tracks, depth, dim, pair), torch.Generator().manual_seed(1)
    batch = {
        "m": torch.randn(1, deep, residues, dim, generator=draw),
        "z": torch.randn(1, residues, residues, pair, generator=draw),
    }
    plans = {PLANNED: TRACKS, TENSOR: SIDES[TENSOR]}
    times, moved = workers.run(measure, build, plans, (1, 2), batch, rounds, ranks=2, timeout=900)[0]
    print(
        f"\n4  tracks: {depth} Evoformer blocks, {deep} sequences of {residues}, widths {dim} and {pair}; {rounds} rounds"
    )
    lines(times, moved, PLANNED)
    for which, clock in ((WALL, "time"), (BUSY, "CPU time")):
        pairs = zip(times[_process(1)], times[PLANNED], strict=True)
        low, _, high = quantiles([a[which] / (2 * b[which]) for a, b in pairs], n=4)
        found = of(times, _process(1), which) / (2 * of(times, PLANNED, which))
        print(
            f"  efficiency per device at degree 2, t1/(2·t2), by {clock}: {found:.2f} (pairs {low:.2f} to {high:.2f})"
        )
    print("  published: 0.69, HelixFold's branch parallelism on GPUs (arXiv 2211.00235)")
    print(f"  compare_branches: {mw.compare_branches(build, batch, TRACKS, hardware=hardware).verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: about a minute")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, gloo on CPU, 1 thread a process"
    )
    rounds = 4 if quick else 10
    here = measured_profile(1, print)
    with mw.local_workers(4) as workers:
        call, step = workers.run(added, 2 * rounds, ranks=2, timeout=300)[0]
        hardware = replace(here, job_call=max(0.0, call), job_step=max(0.0, step))
        print(f"{here.peak['float32'] / 1e9:.0f} Gflop/s and {here.bandwidth / 1e9:.1f} GB/s a core, links of "
              f"{here.node.bandwidth / 1e9:.2f} GB/s, {2e6 * here.node.latency:.0f} µs a small all-reduce, "
              f"{1e6 * here.host:.1f} µs a function; a job adds {1e6 * call:.0f} µs to one, and {1e3 * step:.1f} ms to a step "
              "(CPU time, branches of one token)")  # fmt: skip
        for tokens in (128,) if quick else (128, 1024):
            balanced(workers, hardware, 4 if quick else 8, tokens, rounds)
        depths = ((2, 2), (1, 4)) if quick else ((2, 2), (1, 2), (1, 4))
        sweep(workers, hardware, (1, 16) if quick else (1, 4, 16), depths, 32, rounds)
        parameter_bytes(workers, 2)
        for depth, sizes in ((2, SMALL),) if quick else ((4, SMALL), (4, LARGE)):
            tracks(workers, hardware, depth, sizes, rounds)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
