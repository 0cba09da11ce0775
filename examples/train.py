"""A training script for torchrun: the code that the README opens with, on text made up of a rule that can be learnt.

    torchrun --nproc-per-node 4 examples/train.py
    meshwright train examples/train.py:model --mesh dp_shard=2,tp=2     # the same model, without a script

Run as a plain process it says how many processes its mesh needs.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw

PLAN = mw.Plan({"dp_shard": 2, "tp": 2})


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def data() -> dict[str, torch.Tensor]:
    """256 rows that count up by a step of their own, modulo the vocabulary."""
    start, step = torch.randint(1, 64, (2, 256, 1), generator=torch.Generator().manual_seed(0))
    tokens = (start + step * torch.arange(32)) % 64
    return {"input_ids": tokens, "labels": tokens}


def model() -> tuple[Any, ...]:
    """For the command line: what makes the model, a sample batch, and the rows to train on."""
    return build, {name: rows[:4] for name, rows in data().items()}, data()


def main() -> None:
    rows = data()
    job = mw.parallelize(build, PLAN, batch={name: column[:4] for name, column in rows.items()})
    optimizer = torch.optim.AdamW(job.parameters(), lr=3e-3)
    for step, batch in enumerate(job.batches(rows, global_batch=32, epochs=4), 1):
        loss = job.step(batch)
        job.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if job.rank == 0 and step % 8 == 0:
            print(f"step {step}  loss {loss:.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
