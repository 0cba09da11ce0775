"""``make demo``: a small decoder, trained on real text over 2 × 2 × 2 processes of this machine, and checked against one.

The model is Llama of Hugging Face, unedited, with random weights. It reads the documentation that comes with Python,
byte by byte. The mesh is two pipeline stages × data parallel with sharded parameters (FSDP) × tensor parallel.

    1  who holds what of one block      from the plan alone, before anything is started
    2  training                         8 local processes; loss falls well below what byte frequencies alone give
    3  the check                        loss, every gradient, every updated parameter, against one process, in float64
    4  the plan of ``mesh: auto``       this machine measured in seconds, the fastest plan for it found, predicted and run
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from functools import partial
from pydoc_data.topics import topics

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.amounts import count_text, size_text
from meshwright.draw import console as consoles
from meshwright.draw import plans
from meshwright.draw.terminal import render
from meshwright.hardware import Profile, calibrate, measured_link, measured_skew
from meshwright.prediction.job_costs import job_costs
from meshwright.search.measured import measured
from meshwright.train import loop
from meshwright.workers.pool import LocalWorkers, report

PLAN = {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "microbatches": 2}
STEPS, ROWS, LENGTH, HELD_OUT = 40, 32, 64, 128
WELL_BELOW = 0.5  # nats a byte

Batch = dict[str, torch.Tensor]


def build() -> LlamaForCausalLM:
    """1.6 million parameters; 8 query heads share 4 key and value heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip


def text() -> torch.Tensor:
    """The documentation, as bytes in rows of ``LENGTH``."""
    data = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    return data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH).long()


def rows(ids: torch.Tensor) -> Batch:
    return {"input_ids": ids, "labels": ids}


def entropy(ids: torch.Tensor) -> float:
    """Nats a byte, of a model that knows how often each byte comes and nothing else."""
    p = torch.bincount(ids.flatten()).double() / ids.numel()
    return -float((p * p.clamp(min=1e-300).log()).sum())


def train(steps: int) -> float:
    """Runs on every rank. The loss on text that was held out."""
    ids = text()
    job = mw.parallelize(build, PLAN, batch=rows(ids[:ROWS]))
    loop.train(job, rows(ids[HELD_OUT:]), steps=steps, global_batch=ROWS, lr=1e-3, on_step=report)
    losses = [job.evaluate(batch) for batch in job.batches(rows(ids[:HELD_OUT]), ROWS, shuffle=False)]
    return float(sum(losses)) / len(losses)


def machine(workers: LocalWorkers) -> Profile:
    """This machine, with fewer repetitions than ``meshwright calibrate``, which is surer."""
    profile = workers.run(partial(calibrate, rounds=3, budget=1.0), ranks=2)[0]  # while two processes compute
    link = workers.run(partial(measured_link, rounds=3), ranks=4)[0]
    waiting = workers.run(partial(measured_skew, cores=profile.cores, budget=0.2), ranks=4)[0]
    return job_costs(replace(profile, node=link, skew=waiting), workers, steps=4)


def main(steps: int = STEPS) -> int:
    console, started = consoles.console(), time.monotonic()
    ids = text()
    alone = entropy(ids)
    console.print(
        f"[bold]Text:[/] {count_text(ids.numel())} bytes, of {alone:.3f} nats each by their frequencies alone"
    )
    shards = mw.shard_map(mw.make_recipe(build, PLAN, rows(ids[:ROWS])))
    console.print(f"[bold]Model:[/] {count_text(shards.numel)} parameters over {shards.mesh}; one block of two:\n")
    console.print(render(shards, rank=3, parameter="model.layers.0"))

    with mw.local_workers(shards.mesh.size) as workers:
        console.print("\n[bold]Training[/]")
        loss = trained(workers, steps, console)
        console.print(f"loss on text held out: {loss:.3f} nats a byte; byte frequencies alone: {alone:.3f}")
        console.print("\n[bold]Check[/] against plain PyTorch in one process")
        verdict = mw.check(build, rows(ids[:4, :32]), PLAN, workers=workers)
        print(verdict)
        console.print("\n[bold]The plan[/] that mesh: auto would have chosen for 8 processes of this machine")
        found = mw.find_plans(build, rows(ids[:ROWS]), devices=8, hardware=machine(workers), top=1, verify=True)
        found = measured(found, build, rows(ids[:ROWS]), steps=4, workers=workers)
        console.print(plans.measured_table(found))
        console.print(
            "predicted for processes that share the cores with each other alone; what else runs here counts",
            style="dim",
        )
        console.print(found.plans[0].plan.dump(), end="", highlight=False)

    learnt = math.isfinite(loss) and loss < alone - WELL_BELOW
    console.print(f"\n{'[green]Learnt' if learnt else '[red]Not learnt'}[/], ", end="")
    console.print(f"{'[green]same as one device' if verdict else '[red]not the same as one device'}[/]", end="")
    console.print(f"; {time.monotonic() - started:.0f} s")
    return 0 if learnt and verdict else 1


def trained(workers: LocalWorkers, steps: int, console: Console) -> float:
    """Trains in the workers, with a bar here; the loss at the end."""
    columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, told="starting")

        def show(now: loop.Progress) -> None:
            told = f"loss {now.loss:.3f}  {count_text(now.rate)} {now.unit}/s  {size_text(now.memory)} a process"
            bar.update(task, completed=now.step, told=told)
            if now.step in (1, steps) or now.step % 20 == 0:
                bar.console.print(f"step {now.step:3}  {told}")

        return float(workers.run(train, steps, ranks=8, on_report=show, timeout=300)[0])


if __name__ == "__main__":
    sys.exit(main())
