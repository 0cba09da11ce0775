"""What the view costs: a step of Meshwright against handwritten PyTorch of the same layout; and µs a call.

    python bench/overhead.py [--quick] [--keep]

The same small Llama-like model, with the same weights, is laid out twice in the same processes: by ``mw.parallelize``,
and by hand with ``parallelize_module`` (vocabulary-parallel embedding, head and loss; one gradient all-reduce for the
layers that share an input) and ``fully_shard``. Steps alternate, one of each, so that both meet the same machine;
medians are over steps, of which the slowest rank's time counts. A step is forward, backward and AdamW. Collectives are
those of one step on rank 0, as torch's dispatcher sees them on both sides alike; bytes are what the rank puts in.
Processes are local, with gloo on CPU: where they wait for a core, times vary; see the spread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median, quantiles
from typing import Any

import raw
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright.layout import even_shard
from meshwright.spmd.comm import Axis, Ledger
from meshwright.spmd.dispatcher import Dispatcher
from meshwright.spmd.mode import SpmdMode
from meshwright.spmd.tensor import GlobalTensor

MESHES = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2})
VOCAB, WIDTH, HEAD, LENGTH = 512, 256, 32, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# --- both sides -------------------------------------------------------------------------------------------------------

Step = Callable[[], Tensor]


def ours(mesh: dict[str, int], blocks: int, batch: dict[str, Tensor]) -> tuple[Step, Any]:
    job = mw.parallelize(lambda: Decoder(blocks), {"mesh": mesh, "rows": "split"}, batch=batch)
    return _stepping(job.parameters(), lambda: job.step(_mine(batch, job.recipe.mesh, dist.get_rank()))), job


def by_hand(mesh: dict[str, int], blocks: int, batch: dict[str, Tensor]) -> Step:
    torch.manual_seed(0)
    model = Decoder(blocks)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    as_dtensor = partial(
        PrepareModuleOutput, output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
    )
    if "tp" in mesh:
        parallelize_module(model, devices["tp"], {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            # so that layers which share an input share its gradient's all-reduce, too
            **{name: as_dtensor() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")},
            **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")},
            **{f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")},
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        })  # fmt: skip
    if "dp_shard" in mesh:
        for block in model.blocks:
            fully_shard(block, mesh=devices["dp_shard"])
        fully_shard(model, mesh=devices["dp_shard"])
    rows = _mine(batch, mw.Mesh.parse(mesh), dist.get_rank())

    def step() -> Tensor:
        with loss_parallel() if "tp" in mesh else nullcontext():
            loss = model(**rows)
            loss.backward()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        mean = loss.detach().clone()
        if "dp_shard" in mesh:  # the mean over the global batch, which a person wants to see
            dist.all_reduce(mean, group=devices["dp_shard"].get_group())
            mean /= mesh["dp_shard"]
        return mean

    return _stepping(model.parameters(), step)


def _stepping(parameters: Any, forward_backward: Step) -> Step:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False)

    def step() -> Tensor:
        loss = forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _mine(batch: dict[str, Tensor], mesh: mw.Mesh, rank: int) -> dict[str, Tensor]:
    return {name: rows.chunk(mesh.data_size)[mesh.data_index(rank)] for name, rows in batch.items()}


# --- measuring --------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Collectives that reach torch's dispatcher: calls and bytes that this rank puts in, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # first DTensor's own work, whose collectives then come here
        space, _, name = func.name().partition("::")
        if space in ("c10d", "_c10d_functional") and (kind := _kind(name)):
            first = args[1] if space == "c10d" and kind != "all_reduce" else args[0]
            tensors = [t for t in torch.utils._pytree.tree_leaves(first) if isinstance(t, Tensor)]
            self.calls[kind] += 1
            self.bytes[kind] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(f"{kind} {n}× {self.bytes[kind] / 1024:.0f} KiB" for kind, n in sorted(self.calls.items()))


def _kind(name: str) -> str:
    plain = name.replace("_", "").lower()
    return next((k for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
                 if plain.startswith(k.replace("_", ""))), "")  # fmt: skip


def step_times(
    mesh: dict[str, int], blocks: int, rows: int, rounds: int
) -> tuple[list[str], list[list[float]], list[float]]:
    """Runs on every rank: collectives of a step, seconds of each step, and the first losses; each (ours, by hand)."""
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    mine, _job = ours(mesh, blocks, batch)
    sides = [mine, by_hand(mesh, blocks, batch)]
    losses = [float(side()) for side in sides]  # warms up, too
    counted = []
    for side in sides:
        with Collectives() as moved:
            side()
        counted.append(str(moved))
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, found in zip(sides, times, strict=True):
            dist.barrier()
            started = time.perf_counter()
            side()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found.append(float(seconds))
    return counted, times, losses


def call_times(calls: int) -> dict[str, tuple[float, ...]]:
    """Runs on every rank: µs of calls with small tensors: plain, as views, as DTensors. No collectives."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank, ledger = mesh.get_local_rank(), Ledger()
    dispatcher = Dispatcher(Axis("tp", 2, rank, mesh.get_group(), ledger), ledger)
    x, w = torch.randn(4, 16), torch.randn(32, 16)
    h, q = torch.randn(4, 16), torch.randn(2, 4, 8)
    views = (
        x,
        GlobalTensor(w[:16], even_shard(0, 32, 2), dispatcher),
        GlobalTensor(h, even_shard(1, 32, 2), dispatcher),
        GlobalTensor(q, even_shard(0, 4, 2), dispatcher),
    )
    dtensors = (
        DTensor.from_local(x, mesh, [Replicate()]), DTensor.from_local(w[:16], mesh, [Shard(0)]),
        DTensor.from_local(h, mesh, [Shard(1)]), DTensor.from_local(q, mesh, [Shard(0)]),
    )  # fmt: skip
    found: dict[str, list[float]] = {"add": [], "linear": [], "view": [], "matmul, .T": []}
    plain = (x, w[:16], h, q)
    sides = ((plain, nullcontext()), (views, SpmdMode(dispatcher, lambda t: None).on()), (dtensors, nullcontext()))
    for (a, b, c, d), view in sides:
        heads = (4, c.shape[1] // 8, 8)
        with view, torch.no_grad():
            found["add"].append(_micro(lambda c=c: c + c, calls))
            found["linear"].append(_micro(lambda a=a, b=b: F.linear(a, b), calls))
            found["view"].append(_micro(lambda c=c, heads=heads: c.view(heads), calls))
            found["matmul, .T"].append(_micro(lambda d=d: d @ d.transpose(1, 2), calls))
    return {name: tuple(times) for name, times in found.items()}


def _micro(run: Callable[[], Any], calls: int) -> float:
    """µs of a call: the median of batches of calls."""
    batches = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(calls // 20):
            run()
        batches.append((time.perf_counter() - started) / (calls // 20))
    return 1e6 * median(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and a smaller model")
    parser.add_argument("--keep", action="store_true", help="write docs/bench/overhead.json")
    given = parser.parse_args()
    quick = given.quick
    blocks, rows, rounds = (2, 4, 6) if quick else (4, 8, 30)
    here = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
    print(f"{here}, gloo on CPU, 1 thread a process")
    print(f"{blocks} blocks of width {WIDTH}, {rows} rows × {LENGTH} tokens; {rounds} steps of each, alternating\n")
    samples: dict[str, Any] = {"meshes": {}}
    with mw.local_workers(4) as workers:
        for mesh in MESHES:
            size = mw.Mesh.parse(mesh).size
            counted, (a, b), losses = workers.run(step_times, mesh, blocks, rows, rounds, ranks=size, timeout=300)[0]
            low, high = _quartiles(a, b)
            name = ",".join(f"{axis}={size}" for axis, size in mesh.items())
            samples["meshes"][name] = {"meshwright": a, "by hand": b, "collectives": counted, "losses": losses}
            print(f"{mw.Mesh.parse(mesh)}   first loss {losses[0]:.5f}, by hand {losses[1]:.5f}")
            print(f"  meshwright  {1e3 * median(a):7.1f} ms   {counted[0]}")
            print(f"  by hand     {1e3 * median(b):7.1f} ms   {counted[1]}")
            print(f"  ratio {median(a) / median(b):.2f} of medians; pairs {low:.2f} to {high:.2f} (quartiles)\n")
        print("µs a call         plain    view  DTensor")
        samples["calls"] = workers.run(call_times, 400 if quick else 4000, ranks=2)[0]
        for name, times in samples["calls"].items():
            print(f"  {name:14}{''.join(f'{t:9.1f}' for t in times)}")
    if given.keep:
        print(raw.keep("overhead", samples))


def tables(samples: dict[str, Any]) -> dict[str, raw.Table]:
    """``steps`` of both sides, what they put into ``collectives``, and µs of ``calls``."""
    steps = [["mesh", "Meshwright", "by hand", "ratio of medians", "pairs, quartiles"]]
    moved = [["mesh", "Meshwright", "by hand"]]
    for mesh, one in samples["meshes"].items():
        a, b = one["meshwright"], one["by hand"]
        low, high = _quartiles(a, b)
        times = [f"{1e3 * median(side):.0f} ms" for side in (a, b)]
        steps.append([f"`{mesh}`", *times, f"{median(a) / median(b):.2f}", f"{low:.2f} to {high:.2f}"])
        moved.append([f"`{mesh}`", *one["collectives"]])
    calls = [["function", "plain", "through the dispatcher", "DTensor"]]
    calls += [[f"`{name}`", *(f"{t:.1f}" for t in times)] for name, times in samples["calls"].items()]
    return {"steps": steps, "collectives": moved, "calls": calls}


def _quartiles(a: list[float], b: list[float]) -> tuple[float, float]:
    """Of the ratios of pairs."""
    low, _, high = quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
    return low, high


if __name__ == "__main__":
    main()
