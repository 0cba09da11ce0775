"""Saving and loading against plain DCP and ``torch.save``, in one run: seconds, peak memory, bytes.

    python bench/checkpoint.py [--width 2048] [--layers 12] [--rounds 3] [--keep]

A stack of linear layers with AdamW's state, FSDP over 2 local processes. *ours*: ``job.save`` / ``job.load``; *ours, no
checking*: loaded with ``verify=False``; *ours, async*: seconds that training waits for ``job.save(wait=False)``, and until it
is on disk; *DCP*: ``torch.distributed.checkpoint`` with ``get_state_dict``, as its tutorial has it; *torch.save*: everything
gathered on rank 0 and written by it, read by every rank and cut. The ways alternate within each round; medians over rounds of
the slower rank. Memory is the most that a process's resident set rose above what it was before, sampled; the largest over
ranks and rounds. Files are made anew in each round. All wrote to the disk (fsync) but
``torch.save``, which is followed by ``os.sync``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import raw
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import meshwright as mw

ASYNC, UNTIL = "save: ours, async: training waits", "save: ours, async: until it is on disk"
WAITS = (ASYNC, UNTIL)  # whose seconds are not those of writing everything


class Stack(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


class Build:
    """Makes the stack; can be sent to a worker."""

    def __init__(self, width: int, layers: int) -> None:
        self.width, self.layers = width, layers

    def __call__(self) -> nn.Module:
        return Stack(self.width, self.layers)


class Peak:
    """The most bytes that this process's resident set is above what it was."""

    def __enter__(self) -> Peak:
        self.start, self.most, self._on = _resident(), 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._on:
            self.most = max(self.most, _resident() - self.start)
            time.sleep(0.001)

    def __exit__(self, *error: object) -> None:
        self._on = False
        self._thread.join()


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as counts:
        return int(counts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ways(job: mw.Job, optimizer: torch.optim.Optimizer, root: Path) -> dict[str, Callable[[], Any]]:
    """What is compared, by name."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def dcp_save() -> None:
        model, state = get_state_dict(job.module, optimizer)
        state_dict_saver.save({"model": model, "optimizer": state}, checkpoint_id=root / "dcp")

    def dcp_load() -> None:
        model, state = get_state_dict(job.module, optimizer)
        state_dict_loader.load({"model": model, "optimizer": state}, checkpoint_id=root / "dcp")
        set_state_dict(job.module, optimizer, model_state_dict=model, optim_state_dict=state)

    def gathered_save() -> None:
        states = get_state_dict(job.module, optimizer, options=full)
        if job.rank == 0:
            torch.save(states, root / "gathered.pt")
            os.sync()
        dist.barrier()

    def gathered_load() -> None:
        model, state = torch.load(root / "gathered.pt", weights_only=True)
        set_state_dict(job.module, optimizer, model_state_dict=model, optim_state_dict=state, options=full)

    return {
        "save: ours": lambda: job.save(root / "ours", optimizer, step=1),
        "save: DCP": dcp_save,
        "save: torch.save": gathered_save,
        ASYNC: lambda: job.save(root / "later", optimizer, step=1, wait=False),
        UNTIL: job.saved,
        "load: ours": lambda: job.load(root / "ours", optimizer),
        "load: ours, no checking": lambda: job.load(root / "ours", optimizer, verify=False),
        "load: DCP": dcp_load,
        "load: torch.save": gathered_load,
    }


def measure(build: Build, folder: str, rounds: int) -> tuple[dict[str, list[tuple[float, int]]], int]:
    """Way → (seconds, bytes of memory) of each round on this rank; the bytes of its share."""
    job = mw.parallelize(build, {"mesh": {"dp_shard": 2}}, batch=(torch.zeros(4, build.width),), loss=_itself)
    optimizer = torch.optim.AdamW(job.parameters())
    job.step((torch.ones(4, build.width),))
    optimizer.step()
    optimizer.zero_grad()
    times: dict[str, list[tuple[float, int]]] = {}
    for _ in range(rounds + 1):
        if job.rank == 0:  # every save makes its files anew, as one of another step would
            shutil.rmtree(folder)
            Path(folder).mkdir()
            os.sync()
        for name, way in ways(job, optimizer, Path(folder)).items():
            dist.barrier()
            with Peak() as peak:
                started = time.perf_counter()
                way()
                seconds = time.perf_counter() - started
            times.setdefault(name, []).append((seconds, peak.most))
    share = 3 * sum(p.to_local().nbytes for p in job.parameters())  # type: ignore[attr-defined]
    return {name: runs[1:] for name, runs in times.items()}, share


def _itself(output: torch.Tensor) -> torch.Tensor:
    return output


def tables(samples: dict[str, Any]) -> dict[str, raw.Table]:
    """``ways``: the median over rounds of the slower rank's seconds; the largest memory over ranks and rounds."""
    rows = [["", "seconds", "MB/s", "memory above the share, MB"]]
    for name, ranks in samples["ways"].items():
        seconds = median(max(times) for times in zip(*([run[0] for run in runs] for runs in ranks), strict=True))
        memory = max(run[1] for runs in ranks for run in runs)
        rate = "" if name in WAITS else f"{samples['bytes'] / 1e6 / seconds:,.0f}"
        rows.append([name.strip(), f"{seconds:.2f}", rate, f"{memory / 1e6:,.0f}"])
    return {"ways": rows}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write docs/bench/checkpoint.json")
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        with mw.local_workers(2) as workers:
            ranks = workers.run(measure, Build(options.width, options.layers), folder, options.rounds, timeout=1800)
        size = sum(file.stat().st_size for file in Path(folder, "ours").rglob("*") if file.is_file())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    share, largest = max(bytes_ for _, bytes_ in ranks), options.width**2 * 4
    samples = {"bytes": size, "share": share, "ways": {name: [runs[name] for runs, _ in ranks] for name in ranks[0][0]}}
    print(f"{size / 1e6:,.0f} MB on disk; a rank's share {share / 1e6:,.0f} MB; largest tensor {largest / 1e6:,.0f} MB")
    raw.show(tables(samples)["ways"])
    if options.keep:
        print(raw.keep("checkpoint", samples))


if __name__ == "__main__":
    main()
