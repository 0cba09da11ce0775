"""Kills a random rank of a training run at a random moment, again and again; nothing may be lost.

    python bench/kill_trials.py --trials 60 [--keep]

A trial trains a small decoder with dropout in one of the layouts, saving after every step, and kills (SIGKILL) a rank: at a
random moment of the run; or when a checkpoint is being written, a random moment after its directory has appeared; or when
all of its files are there and only the rename is missing; or once more while the run that goes on loads. Then all processes
are ended, as a launcher does, and started anew, and the run goes on from its newest checkpoint, until it is done. Asserted,
after the kill and at the end:

    every ``step-…`` directory is complete: each file as it was written, by checksum
    the checkpoint that was there before the kill, or a newer one, is there
    the losses of all steps and the final weights are bitwise those of the undisturbed run

The seed of each trial is printed; ``--seed N --trials 1`` does that one again, as far as time can be done again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import raw
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint import folder as checkpoints
from meshwright.checkpoint.folder import MANIFEST
from meshwright.train import loop, metrics
from meshwright.workers.pool import LocalWorkers, WorkerError, local_workers, report

LAYOUTS = ["dp_shard=2", "tp=2", "pp=2", "dp_shard=3", "dp_shard=2,tp=2", "pp=2,dp_shard=2"]
MOMENTS = ["any", "writing", "before the rename", "loading"]
KILLED = ["between saves", "writing", "before the rename", "loading", "too late"]
"""What was there of a checkpoint when a rank was killed."""
STEPS, ROWS, VOCAB, DIM = 8, 96, 61, 32
_PATIENCE = 240.0  # seconds for a run; on a loaded machine new processes alone take some 30
STARTED, LOADING, LOADED = "started", "loading", "loaded"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 96), nn.Linear(96, DIM)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """With a table that is used twice, and dropout: what goes on wrongly shows in every later loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).flatten(0, 1)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def data() -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, VOCAB, (ROWS, 12), generator=torch.Generator().manual_seed(0))}


def train(layout: str, folder: str, asynchronous: bool) -> dict[str, Tensor]:
    """On each rank; rank 0's weights, whole."""
    job = mw.parallelize(Decoder, layout, batch={"tokens": data()["tokens"][:24]})
    record = loop.Record(Path(folder), save_every=1, keep=3, asynchronous=asynchronous)
    load = job.load

    def told(*args: Any, **kwargs: Any) -> Any:
        report(LOADING)
        loaded = load(*args, **kwargs)
        report(LOADED)
        return loaded

    job.load = told  # type: ignore[method-assign]
    report(STARTED)
    loop.train(job, data(), steps=STEPS, global_batch=24, lr=1e-2, record=record)
    return job.full_state_dict()


@dataclass
class Killer:
    """Kills a process at a moment, from a thread.

    Attributes:
        found: what was there of a checkpoint then.
        loads: whether the run is loading, as its rank 0 says.
    """

    folder: Path
    moment: str
    random: random.Random
    seconds: float
    found: str = "too late"
    loads: bool = False
    newest: Path | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def told(self, what: str, pids: list[int]) -> None:
        """What rank 0 reports."""
        self.loads = what == LOADING
        if what == (LOADING if self.moment == "loading" else STARTED):
            self.begin(pids)

    def begin(self, pids: list[int]) -> None:
        self.pid = self.random.choice(pids)
        self.rank = pids.index(self.pid)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        if self.moment in ("any", "loading", "after a save"):
            while self.moment == "after a save" and checkpoints.newest(self.folder) is None and not self.done.is_set():
                time.sleep(0.002)
            self.done.wait(self.random.uniform(0, self.seconds))
        else:
            saves = self.random.randint(1, STEPS - 1)
            seen: set[str] = set()
            while len(seen) < saves and not self.done.is_set():
                seen |= {name for name, files in self._writing() if self.moment == "writing" or MANIFEST in files}
            if self.moment == "writing":
                time.sleep(self.random.uniform(0, 0.03))
        if not self.done.is_set():
            self.newest, loads = checkpoints.newest(self.folder), self.loads
            os.kill(self.pid, signal.SIGKILL)
            files = [file for _, files in self._writing() for file in files]
            saving = "before the rename" if MANIFEST in files else "writing" if files else "between saves"
            self.found = "loading" if loads else saving

    def _writing(self) -> list[tuple[str, list[str]]]:
        """The directories that a checkpoint is being written to, and what is in them."""
        found = []
        for name in os.listdir(self.folder):
            with suppress(FileNotFoundError):  # it was published between the two looks
                found += [(name, os.listdir(self.folder / name))] if name.startswith(".saving-") else []
        return found


def trial(layout: str, moment: str, seed: int, seconds: float, expected: Any, workers: LocalWorkers) -> dict[str, Any]:
    """Which rank was killed last, and when. Raises AssertionError if anything was lost."""
    chance = random.Random(seed)
    asynchronous, ranks = chance.random() < 0.5, mw.Mesh.parse(layout).size
    with tempfile.TemporaryDirectory(prefix="meshwright-kill-") as name:
        folder = Path(name)
        killers, runs = [Killer(folder, moment, chance, seconds)], 0
        if moment == "loading":  # as a run does that goes on
            killers = [
                Killer(folder, "after a save", chance, seconds / 2),
                Killer(folder, moment, chance, seconds / 16),
            ]
        while True:
            runs += 1
            killer, kills = killers[min(runs, len(killers)) - 1], runs <= len(killers)
            try:
                found = workers.run(
                    train, layout, name, asynchronous, ranks=ranks, timeout=_PATIENCE,
                    on_report=lambda what, killer=killer, kills=kills: (
                        killer.told(what, workers.pids()[:ranks]) if kills else None
                    ),
                )[0]  # fmt: skip
            except WorkerError as error:
                assert kills, f"it failed without being killed: {error}"
                workers.kill()
                for path in checkpoints.complete(folder):
                    checkpoints.verify(path)
                after = checkpoints.newest(folder)
                assert killer.newest is None or (after is not None and after.name >= killer.newest.name), "one is lost"
                killer.done.set()
                continue
            for killer in killers:
                killer.done.set()
            break
        for path in checkpoints.complete(folder):
            checkpoints.verify(path)
        weights, losses = expected
        assert [line["loss"] for line in metrics.read(folder)] == losses, "other losses"
        assert found.keys() == weights.keys() and all(torch.equal(found[k], weights[k]) for k in weights), (
            "other weights"
        )
        after = killer.newest.name if killer.newest else "nothing"
        return {"rank": killer.rank, "asynchronous": asynchronous, "killed": killer.found, "after": after}


def undisturbed(layout: str, workers: LocalWorkers) -> tuple[tuple[dict[str, Tensor], list[float]], float]:
    """Weights and losses; and the seconds that it takes."""
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-kill-") as name:
        ranks = mw.Mesh.parse(layout).size
        weights = workers.run(
            train, layout, name, False, ranks=ranks, on_report=lambda _: times.append(time.monotonic())
        )[0]
        return (weights, [line["loss"] for line in metrics.read(Path(name))]), time.monotonic() - times[0]


def tables(samples: list[dict[str, Any]]) -> dict[str, raw.Table]:
    """``trials``: for each layout, how many trials lost nothing, and how many were killed at which moment."""
    layouts = list(dict.fromkeys(sample["layout"] for sample in samples))
    rows = [["layout", "trials", "lost nothing", *KILLED]]
    for layout in layouts:
        trials = [sample for sample in samples if sample["layout"] == layout]
        moments = Counter(sample.get("killed") for sample in trials)
        intact = sum(sample["error"] is None for sample in trials)
        rows.append([f"`{layout}`", f"{len(trials)}", f"{intact}", *(f"{moments[moment]}" for moment in KILLED)])
    return {"trials": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the others count on")
    parser.add_argument("--moment", choices=MOMENTS, help="only this one")
    parser.add_argument("--layouts", default=";".join(LAYOUTS), help="separated by semicolons")
    parser.add_argument("--keep", action="store_true", help="write docs/bench/kill_trials.json")
    chosen = parser.parse_args()
    layouts, samples = chosen.layouts.split(";"), list[dict[str, Any]]()
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores; {STEPS} steps, a checkpoint each; layouts {layouts}",
        flush=True,
    )
    with local_workers(max(mw.Mesh.parse(layout).size for layout in layouts)) as workers:
        known: dict[str, Any] = {}
        for number in range(chosen.trials):
            seed = chosen.seed + number
            layout = layouts[seed % len(layouts)]
            moment = chosen.moment or MOMENTS[seed // len(layouts) % len(MOMENTS)]
            if layout not in known:
                known[layout] = undisturbed(layout, workers)
            expected, seconds = known[layout]
            began, sample = time.monotonic(), {"seed": seed, "layout": layout, "error": None}
            try:
                sample |= trial(layout, moment, seed, seconds, expected, workers)
            except (AssertionError, mw.PlanError, WorkerError) as error:
                sample["error"] = str(error)
                workers.kill()
            samples.append(sample)
            print(f"seed {seed:4}  {layout:16} {_in_words(sample)}  ({time.monotonic() - began:.1f} s)", flush=True)
    raw.show(tables(samples)["trials"])
    if chosen.keep:
        print(raw.keep("kill_trials", samples))
    sys.exit(any(sample["error"] is not None for sample in samples))


def _in_words(sample: dict[str, Any]) -> str:
    if sample["error"] is not None:
        return f"FAILED: {sample['error']}"
    kind = "asynchronous" if sample["asynchronous"] else "synchronous"
    return f"rank {sample['rank']}, {kind}, {sample['killed']}, after {sample['after']}"


if __name__ == "__main__":
    main()
